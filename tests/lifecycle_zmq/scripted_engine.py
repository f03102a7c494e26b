"""An engine whose streams do what their request says; run as a script.

Request fields: ``count`` items (0, 1, 2, … as ``[n]``), or ``forever``; ``hold``
gives no item, ``watch`` the number of tensors alive; ``reject`` and
``raise_in_start`` refuse; ``fail_at``, ``odd_item_at`` and ``raise_at`` go wrong at
that item, and ``leave_at`` leaves the loop; ``exit`` leaves the process with that code,
``signal`` by that signal, ``eat`` takes so many bytes of memory first.
``start_seconds`` is how long its start takes, ``end_seconds`` its end,
``sleep_at`` spends ``seconds`` of a step in a call that does not return, ``hold_at`` in
one that keeps the interpreter lock, too. ``merge`` is how the items may merge; ``size``
and ``each`` give so many items of so many bytes, ``distinct`` objects that are all
different.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import mmap
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lifecycle_zmq import (
    Backend,
    EngineServer,
    Finish,
    Merge,
    Output,
    RequestRejected,
    exit_with_parent,
)


class Tensors:
    """What requests brought, and how much of it is still alive."""

    def __init__(self) -> None:
        self._memory: list[weakref.ref[Any]] = []
        self.seen: list[Any] = []

    def read_process_state(self, tensors: dict[str, memoryview]) -> None:
        """Write down of each what it is, and keep nothing of it."""
        for name, view in tensors.items():
            self._memory.append(weakref.ref(view))
            with contextlib.suppress(TypeError):  # a bytearray takes no weak reference
                self._memory.append(weakref.ref(view.obj))
            flat = view.cast("B")
            self.seen.append([name, view.format, list(view.shape), sum(flat[:64])])

    def alive(self) -> int:
        """How many are still referenced."""
        return sum(ref() is not None for ref in self._memory)

    def status(self) -> dict[str, Any]:
        """Return the books."""
        return {"seen": self.seen[-20:], "tensors_alive": self.alive()}


def items_at(at: int, it: dict[str, Any]) -> list[Any]:
    """The items of a request at one step of its stream."""
    if at == it.get("odd_item_at"):
        return [object()]
    if "distinct" in it:
        return [{"n": at, "text": "x" * at}]
    if "size" in it:
        return [b"x" * it["size"]] * it.get("each", 1)
    return [[at]]


def block_at(at: int, it: dict[str, Any]) -> None:
    """Spend time in a call that does not return, if the request says so."""
    if at == it.get("sleep_at"):
        time.sleep(it["seconds"])
    if at == it.get("hold_at"):
        # As C code does that never lets other threads run.
        ctypes.PyDLL(None).usleep(int(it["seconds"] * 1e6))


class ScriptedBackend:
    """Records all calls, for `status`."""

    def __init__(self, step_seconds: float) -> None:
        self._step_seconds = step_seconds
        self._live: dict[str, dict[str, Any]] = {}
        self._cancelled: set[str] = set()
        self._paused: set[str] = set()
        self._tensors = Tensors()
        self._calls: list[str] = []

    def start(
        self, key: str, request: dict[str, Any], tensors: dict[str, memoryview]
    ) -> Merge | None:
        """Take, refuse or blow up, as the request says."""
        self._calls.append(f"start {key}")
        self._tensors.read_process_state(tensors)
        if "eat" in request:
            used_memory(request["eat"])
        if "exit" in request:
            os._exit(request["exit"])
        if "signal" in request:
            os.kill(os.getpid(), request["signal"])
        time.sleep(request.get("start_seconds", 0))
        if "stderr" in request:
            os.write(2, b"x" * request["stderr"])
        if "reject" in request:
            refusal = RequestRejected(request["reject"], "as asked")
            raise refusal
        if "raise_in_start" in request:
            raise RuntimeError(request["raise_in_start"])
        self._live[key] = {**request, "at": 0}
        return request.get("merge")

    def cancel(self, key: str) -> None:
        """Finish the stream at the next step."""
        self._calls.append(f"cancel {key}")
        self._cancelled.add(key)

    def end(self, key: str) -> None:
        """Forget the stream."""
        self._calls.append(f"end {key}")
        it = self._live.pop(key, {})
        time.sleep(it.get("end_seconds", 0))
        self._cancelled.discard(key)
        self._paused.discard(key)

    def pause(self, key: str) -> None:
        """Produce nothing for the stream."""
        self._paused.add(key)

    def resume(self, key: str) -> None:
        """Go on."""
        self._paused.discard(key)

    def step(self) -> list[Output]:
        """Produce one item for each stream that has one."""
        time.sleep(self._step_seconds)
        outputs = [self._advance(key, it) for key, it in list(self._live.items())]
        return [output for output in outputs if output is not None]

    @property
    def busy(self) -> bool:
        """Whether any stream is to produce something."""
        return bool(self._cancelled) or any(
            "hold" not in it and key not in self._paused
            for key, it in self._live.items()
        )

    def status(self) -> dict[str, Any]:
        """Return the books."""
        return {
            "live": sorted(self._live),
            "calls": self._calls[-200:],
            **self._tensors.status(),
            "descriptors": len(list(Path("/proc/self/fd").iterdir())),
        }

    def _advance(self, key: str, it: dict[str, Any]) -> Output | None:
        at = it["at"]
        if key in self._cancelled:
            return self._close(key, Finish("cancelled"))
        if "hold" in it or key in self._paused:
            return None
        if at == it.get("raise_at"):
            raise RuntimeError("as asked")
        if at == it.get("leave_at"):
            raise SystemExit(3)
        if at == it.get("fail_at"):
            return self._close(key, Finish("failed", "asked", "as asked"))
        if at == it.get("count"):
            return self._close(key, Finish("completed"))
        it["at"] += 1
        block_at(at, it)
        if "watch" in it:
            return Output(key, [[self._tensors.alive()]])
        return Output(key, items_at(at, it))

    def _close(self, key: str, finish: Finish) -> Output:
        self._live.pop(key)
        self._cancelled.discard(key)
        return Output(key, [], finish)


def main(make: Callable[[float], Backend] = ScriptedBackend) -> None:
    """Run one engine process."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--endpoint", required=True)
    parser.add_argument("--incarnation", type=int, required=True)
    parser.add_argument("--step", type=float, default=0.001)
    parser.add_argument("--fail", default="")
    parser.add_argument("--fail-while", type=Path)
    parser.add_argument("--begin-when", type=Path)
    parser.add_argument("--never-ready", action="store_true")
    parser.add_argument("--linger", action="store_true")
    parser.add_argument("--ballast", type=int, default=0)
    parser.add_argument("--hold", type=int, default=2**17)
    parser.add_argument("--stall", type=float, default=30.0)
    options = parser.parse_args()
    if options.fail:
        sys.exit(options.fail)
    if options.fail_while and options.fail_while.exists():
        sys.exit("not yet")
    while options.begin_when and not options.begin_when.exists():
        time.sleep(0.005)
    exit_with_parent()
    if options.never_ready:
        time.sleep(600)
    ballast = used_memory(options.ballast)
    if options.linger:
        threading.Thread(target=time.sleep, args=(600,)).start()
    EngineServer(
        options.endpoint,
        make(options.step),
        incarnation=options.incarnation,
        hold=options.hold,
        stall=options.stall,
    ).run()
    del ballast


def used_memory(size: int) -> object:
    """Memory in small pages, each written to, as a model on a CPU has."""
    if not size:
        return None
    memory = mmap.mmap(-1, size)
    memory.madvise(mmap.MADV_NOHUGEPAGE)
    for at in range(0, size, mmap.PAGESIZE):
        memory[at] = 1
    return memory


if __name__ == "__main__":
    main()
