"""Workers of a shared gate: in this process, and in others that take orders."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anyio

from lifecycle.shared import SharedGate

LONGEST = 60.0


async def until(condition: Callable[[], object]) -> None:
    """Wait until *condition* holds."""
    with anyio.fail_after(LONGEST):
        while not condition():
            await anyio.sleep(0.002)


def wait_until(condition: Callable[[], object]) -> None:
    """Wait until *condition* holds, without a loop."""
    ends = time.monotonic() + LONGEST
    while not condition():
        assert time.monotonic() < ends, "it never happened"
        time.sleep(0.002)


def leads(gate: SharedGate) -> bool:
    """Whether this worker serves the gate, and grants."""
    member = gate._member
    leader = member and member.leader
    return bool(leader and leader.open)


def follows(gate: SharedGate) -> bool:
    """Whether this worker has another one as leader, which has heard of it."""
    member = gate._member
    return bool(member and member._link is not None)


def queued(workers: Workers) -> int:
    """Requests that wait at the gate of who leads; a row counts those on the way too."""
    for gate in workers.made:
        member = gate._member
        leader = member and member.leader
        if leader and leader.open:
            return leader._tickets.gate.statistics().waiting
    return 0


class Workers:
    """Gates of one folder in this process: each is a worker of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.made: list[SharedGate] = []

    def __call__(self, **options: Any) -> SharedGate:
        options = options or {"slots": 2}
        self.made.append(SharedGate(self.folder, **options))
        return self.made[-1]

    def two(self, **options: Any) -> tuple[SharedGate, SharedGate]:
        """Return one that leads and one that follows it."""
        leader, follower = self(**options), self(**options)
        leader.statistics()
        wait_until(lambda: leads(leader))
        follower.statistics()
        wait_until(lambda: follows(follower))
        return leader, follower

    def one(self, role: str, **options: Any) -> SharedGate:
        """Return one of two workers."""
        return self.two(**options)[role == "follower"]

    def close(self) -> None:
        """End all their threads."""
        threads = [it._member.loop._thread for it in self.made if it._member]
        for gate in self.made:
            gate.close()
            if gate._member is not None:  # whatever a failed test has left there
                with gate._member.locked():
                    gate._member.held.clear()
                gate._member.leave()
        for thread in threads:
            thread.join(LONGEST)
            assert not thread.is_alive()


@contextlib.contextmanager
def stalled(gate: SharedGate) -> Iterator[None]:
    """Stop the thread of this worker, as SIGSTOP would; its other threads go on."""
    reached, go_on = threading.Event(), threading.Event()

    def stall() -> None:
        reached.set()
        assert go_on.wait(LONGEST)

    assert gate._member is not None
    gate._member.loop.call(stall)
    assert reached.wait(LONGEST)
    try:
        yield
    finally:
        go_on.set()


class Process:
    """A worker process that does what it is told, a line of JSON each."""

    def __init__(self, folder: Path, **options: Any) -> None:
        argv = [sys.executable, __file__, str(folder), json.dumps(options)]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self.popen = subprocess.Popen(argv, text=True, **pipes)

    def send(self, *order: Any) -> None:
        """Give an order."""
        print(json.dumps(order), file=self.popen.stdin, flush=True)

    def answer(self) -> Any:
        """Return the answer to the oldest order that has none yet."""
        assert self.popen.stdout is not None
        line = self.popen.stdout.readline()
        return json.loads(line) if line else None

    def ask(self, *order: Any) -> Any:
        """Give an order, and return the answer."""
        self.send(*order)
        return self.answer()

    def signal(self, number: int) -> None:
        """Send it a signal."""
        os.kill(self.popen.pid, number)

    def stop(self) -> None:
        """Stop it, and wait until all of its threads are."""
        self.signal(signal.SIGSTOP)
        threads = Path(f"/proc/{self.popen.pid}/task")
        wait_until(
            lambda: all(
                (each / "stat").read_text().rpartition(")")[2].split()[0] == "T"
                for each in threads.iterdir()
            )
        )

    def kill(self) -> None:
        """Kill it."""
        self.signal(signal.SIGKILL)
        self.popen.wait(LONGEST)

    def close(self) -> None:
        """End it, however it is."""
        self.popen.kill()
        self.popen.wait(LONGEST)
        for pipe in (self.popen.stdin, self.popen.stdout):
            with contextlib.suppress(BrokenPipeError):
                pipe.close()  # type: ignore[union-attr]


def _obey(folder: str, options: dict[str, Any]) -> None:
    gate = SharedGate(folder, **options)
    leases: dict[str, Any] = {}

    def say(what: Any) -> None:
        print(json.dumps(what), flush=True)

    async def admit(name: str, cost: dict[str, Any]) -> None:
        leases[name] = await gate.admit(**cost)
        say(["got", name, time.monotonic()])

    async def obey() -> None:
        async with anyio.create_task_group() as tasks:
            while line := await anyio.to_thread.run_sync(sys.stdin.readline):
                what, *rest = json.loads(line)
                if what == "admit":
                    tasks.start_soon(admit, rest[0], rest[1])
                elif what == "release":
                    leases.pop(rest[0]).release()
                    say("released")
                elif what == "leads":
                    say(leads(gate))
                elif what == "join":
                    now = gate.statistics()
                    say([now.slots, now.slots_in_use])
                elif what == "waiting":
                    say(gate.statistics().waiting)
                elif what == "warnings":
                    say([str(each.message) for each in caught])
                elif what == "fork":
                    child = os.fork()
                    if child == 0:
                        with contextlib.suppress(BaseException):
                            for lease in leases.values():
                                lease.release()
                            signal.pause()
                        os._exit(0)
                    say(child)
                elif what == "fork and admit":
                    child = os.fork()
                    if child == 0:
                        lease = gate.try_admit()
                        now = gate.statistics()
                        say([now.slots, now.slots_in_use])
                        os._exit(0)
                    await anyio.to_thread.run_sync(os.waitpid, child, 0)
            tasks.cancel_scope.cancel()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        anyio.run(obey)


if __name__ == "__main__":
    _obey(sys.argv[1], json.loads(sys.argv[2]))
