"""Continuous batching: who runs in the next step, and what becomes of whom.

All state changes happen between steps, on one thread, and each is whole when its
call returns. A request is in exactly one place: the line, in prefill, in the
running batch, or nowhere; what it owns (a slot, its tensors) goes when it leaves.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

from lifecycle import strip

from .runner import Emitted, Runner
from .scheduling.backend import Finish, Merge, Output, RequestRejected
from .scheduling.fairness import Turns, giving_way
from .scheduling.line import Line
from .scheduling.made import counters, each, one, told
from .scheduling.meter import Meter
from .scheduling.requests import parse
from .scheduling.retained import Slots
from .scheduling.tally import End, Tally
from .scheduling.task import Task
from .scheduling.traces import release, where

_log = logging.getLogger(__name__)


class Scheduler:
    """Runs requests over a `Runner`; the backend of an engine server.

    Each `step` decodes one token for everybody who runs and then prefills one
    chunk of one prompt, so that prompts, however long and many, slow a running
    stream by one chunk a token and no more.
    """

    def __init__(
        self,
        runner: Runner,
        *,
        max_batch: int | None = None,
        max_waiting: int | None = None,
        max_tokens: int | None = None,
        chunk: int = 512,
        merge: Merge = "never",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Make an idle scheduler.

        Args:
            runner: The model.
            max_batch: Requests that hold a slot at a time; at most, and by
                default, the runner's slots.
            max_waiting: Requests in line; ``None`` leaves that to the gate in
                front of the engine.
            max_tokens: The most that one request may ask for.
            chunk: Prompt tokens that are prefilled in one step, at most.
            merge: What becomes of items whose reader is behind; ``"concatenate"``
                suits a runner whose items are lists of tokens.
            clock: Monotonic seconds.
        """
        if max_batch is not None and not 1 <= max_batch <= runner.slots:
            raise ValueError(
                f"max_batch is {max_batch}; the runner has {runner.slots} slots"
            )
        if chunk < 1:
            raise ValueError(f"chunk is {chunk}; at least one token a step is needed")
        self._runner = runner
        self._max_batch = max_batch or runner.slots
        self._max_waiting = max_waiting
        self._max_tokens = max_tokens
        self._chunk = chunk
        self._merge = merge
        self._clock = clock
        self._slots = Slots(runner)
        self._waiting: Line[Task] = Line()
        # Dicts for their order; leaving from the middle costs nothing.
        self._prefilling: dict[str, Task] = {}
        self._running: dict[str, Task] = {}
        self._timed: dict[str, Task] = {}
        self._told: dict[str, Output] = {}
        self._turns = Turns()
        self._meter = Meter(clock)
        self._tally = Tally()
        self._payload_bytes = 0

    @property
    def busy(self) -> bool:
        """Whether `step` has anything to do."""
        return bool(self._waiting or self._prefilling or self._running or self._told)

    def start(
        self, key: str, request: Mapping[str, Any], tensors: Mapping[str, memoryview]
    ) -> Merge:
        """Take a request into the line, or refuse it and hold nothing.

        Raises:
            RequestRejected: See `parse`; also ``duplicate_key`` and
                ``overloaded``.
        """
        try:
            self._refuse_unless_free(key)
            parsed = parse(request, tensors, self._runner, max_tokens=self._max_tokens)
        except RequestRejected:
            self._tally.rejected += 1
            raise
        deadline = self._clock() + parsed.timeout if parsed.timeout else None
        task = Task(key, parsed, parsed.nbytes, deadline)
        self._waiting.join(key, parsed.share, task)
        if deadline is not None:
            self._timed[key] = task
        self._tally.started += 1
        self._payload_bytes += parsed.nbytes
        return self._merge

    def cancel(self, key: str) -> None:
        """Stop a stream now; the next step tells it "cancelled". Unknown: no-op.

        Its slot and tensors are free when this returns.
        """
        if self._leave(key, "cancelled"):
            self._told[key] = Output(key, finish=Finish("cancelled"))

    def end(self, key: str) -> None:
        """Forget a stream and free all it holds; nothing is told. Unknown: no-op.

        What a turn that was done left for the next one stays.
        """
        self._told.pop(key, None)
        self._leave(key, "ended")

    def step(self) -> list[Output]:
        """Run one tick for all streams.

        Raises:
            DeviceLost: The process has to end.
        """
        self._tally.steps += 1
        with self._meter.step():
            if self._timed:
                self._expire()
            outputs = list(self._told.values())
            self._told.clear()
            if self._running:
                outputs += self._decode()
            outputs += self._admit()
            if self._prefilling:
                outputs += self._prefill(self._turns.next(self._prefilling.values()))
        return outputs

    def status(self) -> dict[str, Any]:
        """Counters, all of one moment between two steps."""
        seated = [*self._prefilling.values(), *self._running.values()]
        held = sum(task.read + task.made for task in seated)
        return {
            "waiting": len(self._waiting),
            "prefilling": len(self._prefilling),
            "running": len(self._running),
            "max_batch": self._max_batch,
            **self._slots.report(),
            "kv_used": held / (self._runner.slots * self._runner.max_length),
            "payload_bytes": self._payload_bytes,
            **self._tally.report(),
            "times": self._meter.report(),
            "runner": counters(self._runner),
        }

    def _refuse_unless_free(self, key: str) -> None:
        places = (self._waiting, self._prefilling, self._running, self._told)
        if any(key in place for place in places):
            raise RequestRejected("duplicate_key", "the key is in use; END it first")
        if self._max_waiting is not None and len(self._waiting) >= self._max_waiting:
            raise RequestRejected(
                "overloaded",
                f"{len(self._waiting)} requests wait, the limit is "
                f"{self._max_waiting}: retry later",
            )

    def _leave(self, key: str, end: End) -> bool:
        """Take a task out of wherever it is; whether it was anywhere."""
        task = (
            self._running.pop(key, None)
            or self._prefilling.pop(key, None)
            or self._waiting.leave(key)
        )
        if task is None:
            return False
        self._tally.finished[end] += 1
        self._drop(task, keep=end == "completed" and not task.request.last_turn)
        return True

    def _drop(self, task: Task, *, keep: bool = False) -> None:
        self._timed.pop(task.key, None)
        self._strip(task, keep=())
        self._slots.leave(task, keep=keep)

    def _strip(self, task: Task, keep: Any) -> None:
        strip(task.request.prompt.tensors, keep=keep)
        self._payload_bytes -= task.payload
        task.payload = 0

    def _expire(self) -> None:
        """End whoever is out of time; a stream that is told so is not run."""
        now = self._clock()
        late = [
            task
            for task in self._timed.values()
            if task.deadline is not None and task.deadline <= now
        ]
        for task in late:
            self._leave(task.key, "failed")
            message = f"not done in its {task.request.timeout:g} s; ask for less"
            finish = Finish("failed", "deadline_exceeded", message)
            self._told[task.key] = Output(task.key, finish=finish)

    def _admit(self) -> list[Output]:
        """Give free slots to the first in line."""
        failed = []
        while self._waiting:
            share = None
            if self._seated >= self._max_batch:
                prefilling = list(self._prefilling.values())
                change = giving_way(
                    self._waiting.shares, prefilling, self._running.values()
                )
                if change is None:
                    break
                victim, share = change
                self._put_back(victim)
            task = self._waiting.take(share)
            self._prefilling[task.key] = task
            try:
                self._slots.take(task)
            except Exception as error:  # noqa: BLE001  # fails alone, whatever it is
                failed.append(self._fail(task, "prefill_failed", error))
        return failed

    def _put_back(self, task: Task) -> None:
        """Let a prompt wait for another slot, and be read anew in it."""
        del self._prefilling[task.key]
        self._waiting.rejoin(task.key, task.request.share, task)
        self._tally.preempted += 1
        task.begin_again()
        # What was made of it meanwhile is made again.
        strip(task.request.prompt.tensors, keep=task.request.tensors)
        self._slots.leave(task)

    @property
    def _seated(self) -> int:
        return len(self._prefilling) + len(self._running)

    def _prefill(self, task: Task) -> list[Output]:
        """Run one chunk of a prompt; the last one makes the first token."""
        prompt, start = task.request.prompt, task.read
        stop = start + min(self._chunk, task.left)
        assert task.slot is not None
        try:
            with self._meter.run(self._meter.prefill, stop - start):
                emitted = self._runner.prefill(task.slot, prompt, start, stop)
            task.read = stop
            emitted = one(emitted, left=task.left)
            if not task.stripped and stop >= self._runner.needs_tensors_until(prompt):
                self._strip(task, keep=self._runner.keep)
                task.stripped = True
        except Exception as error:  # noqa: BLE001  # fails alone, whatever it is
            return [self._fail(task, "prefill_failed", error)]
        if emitted is None:
            return []
        del self._prefilling[task.key]
        self._running[task.key] = task
        return [self._advance(task, emitted)]

    def _decode(self) -> list[Output]:
        """One item for everybody who runs; all of them fail if the whole step does."""
        batch = list(self._running.values())
        slots = [task.slot for task in batch if task.slot is not None]
        try:
            with self._meter.run(self._meter.decode, len(batch)):
                made = each(self._runner.decode(slots), len(batch))
        except Exception as error:  # noqa: BLE001  # fails alone, whatever it is
            return [self._fail(task, "decode_failed", error) for task in batch]
        return [
            self._advance(task, emitted)
            for task, emitted in zip(batch, made, strict=True)
        ]

    def _advance(self, task: Task, emitted: Emitted | Exception) -> Output:
        """Book an item; a finished task leaves at once, before it is told."""
        if isinstance(emitted, Exception):
            return self._fail(task, "decode_failed", emitted)
        items = task.first_items()
        reason = "stop" if emitted.token in task.request.stop_ids else None
        if reason is None:
            task.made += 1
            self._tally.tokens += 1
            items.append(emitted.item)
            if emitted.last:
                reason = "stop"
            elif task.made == task.request.max_tokens:
                reason = "length"
        if reason is None:
            return Output(task.key, items)
        self._leave(task.key, "completed")
        items.append({"finish_reason": reason})
        return Output(task.key, items, Finish("completed"))

    def _fail(self, task: Task, code: str, error: Exception) -> Output:
        """End a task by an error; its text is not told, it may quote the prompt."""
        message = f"{code.replace('_', ' ')}: {told(error)}"
        _log.warning("%s (%s)", message, where(error))
        release(error)
        # One by one: should a clean-up fail as well, END still finds the others.
        self._running.pop(task.key, None)
        self._prefilling.pop(task.key, None)
        self._tally.finished["failed"] += 1
        self._drop(task)
        return Output(task.key, finish=Finish("failed", code, message))
