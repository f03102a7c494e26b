"""Continuous batching: who runs in the next step, and what becomes of whom.

All state changes happen between steps, on one thread, and each is whole when its
call returns. A request is in exactly one place: the waiting line, the running
batch, or nowhere; what it owns (a slot, its tensors) goes when it leaves.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lifecycle import strip

from .backend import Finish, Merge, Output, RequestRejected
from .requests import Request, parse
from .runner import Runner
from .slots import SlotPool
from .traces import release, where

_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Task:
    """A request that was taken.

    Attributes:
        payload: Bytes of tensors that it still holds.
        slot: While it runs.
        last: The token that the next decode step starts from.
        made: Tokens emitted.
    """

    key: str
    request: Request
    payload: int
    slot: int | None = None
    last: int = 0
    made: int = 0


class Scheduler:
    """Runs requests over a `Runner`; the backend of an engine server.

    Each `step` decodes one token for everybody who runs and then prefills at most
    one who waits, so that a long line of prompts slows a running stream by one
    prefill a token and no more.
    """

    def __init__(
        self,
        runner: Runner,
        *,
        max_batch: int | None = None,
        max_waiting: int | None = None,
        max_tokens: int | None = None,
    ) -> None:
        """Make an idle scheduler.

        Args:
            runner: The model.
            max_batch: Requests that run at a time; at most, and by default, the
                runner's slots.
            max_waiting: Requests in line; ``None`` leaves that to the gate in
                front of the engine.
            max_tokens: The most that one request may ask for.
        """
        if max_batch is not None and not 1 <= max_batch <= runner.slots:
            raise ValueError(
                f"max_batch is {max_batch}; the runner has {runner.slots} slots"
            )
        self._runner = runner
        self._max_batch = max_batch or runner.slots
        self._max_waiting = max_waiting
        self._max_tokens = max_tokens
        self._pool = SlotPool(runner.slots)
        # Dicts for their order: first in line is first served, and leaving from
        # the middle costs nothing.
        self._waiting: dict[str, _Task] = {}
        self._running: dict[str, _Task] = {}
        self._told: dict[str, Output] = {}
        self._steps = 0
        self._tokens = 0
        self._started = 0
        self._rejected = 0
        self._payload_bytes = 0
        self._finished = dict.fromkeys(("completed", "cancelled", "failed", "ended"), 0)

    @property
    def busy(self) -> bool:
        """Whether `step` has anything to do."""
        return bool(self._waiting or self._running or self._told)

    def start(
        self, key: str, request: Mapping[str, Any], tensors: Mapping[str, memoryview]
    ) -> Merge:
        """Take a request into the waiting line, or refuse it and hold nothing.

        The tokens of a reader that is behind become one list.

        Raises:
            RequestRejected: See `parse`; also ``duplicate_key`` and
                ``overloaded``.
        """
        try:
            self._refuse_unless_free(key)
            parsed = parse(request, tensors, self._runner, max_tokens=self._max_tokens)
        except RequestRejected:
            self._rejected += 1
            raise
        self._waiting[key] = _Task(key, parsed, parsed.nbytes)
        self._started += 1
        self._payload_bytes += parsed.nbytes
        return "concatenate"

    def cancel(self, key: str) -> None:
        """Stop a stream now; the next step tells it "cancelled". Unknown: no-op.

        Its slot and tensors are free when this returns.
        """
        task = self._leave(key)
        if task is not None:
            self._finished["cancelled"] += 1
            self._told[key] = Output(key, finish=Finish("cancelled"))

    def end(self, key: str) -> None:
        """Forget a stream and free all it holds; nothing is told. Unknown: no-op."""
        self._told.pop(key, None)
        if self._leave(key) is not None:
            self._finished["ended"] += 1

    def step(self) -> list[Output]:
        """Run one tick for all streams.

        Raises:
            DeviceLost: The process has to end.
        """
        self._steps += 1
        outputs = list(self._told.values())
        self._told.clear()
        if self._running:
            outputs += self._decode()
        if self._waiting and len(self._running) < self._max_batch:
            outputs.append(self._prefill())
        return outputs

    def status(self) -> dict[str, Any]:
        """Counters, all of one moment between two steps."""
        return {
            "waiting": len(self._waiting),
            "running": len(self._running),
            "slots": self._pool.size,
            "slots_free": self._pool.free_slots,
            "payload_bytes": self._payload_bytes,
            "steps": self._steps,
            "tokens": self._tokens,
            "started": self._started,
            "rejected": self._rejected,
            "finished": dict(self._finished),
        }

    def _refuse_unless_free(self, key: str) -> None:
        if key in self._waiting or key in self._running or key in self._told:
            raise RequestRejected("duplicate_key", "the key is in use; END it first")
        if self._max_waiting is not None and len(self._waiting) >= self._max_waiting:
            raise RequestRejected(
                "overloaded",
                f"{len(self._waiting)} requests wait, the limit is "
                f"{self._max_waiting}: retry later",
            )

    def _leave(self, key: str) -> _Task | None:
        """Take a task out of wherever it is, with all that it holds."""
        task = self._waiting.pop(key, None) or self._running.pop(key, None)
        if task is not None:
            self._drop(task)
        return task

    def _drop(self, task: _Task) -> None:
        self._strip(task, keep=())
        if task.slot is not None:
            slot, task.slot = task.slot, None
            self._pool.free(slot)
            self._runner.free(slot)

    def _strip(self, task: _Task, keep: Any) -> None:
        strip(task.request.prompt.tensors, keep=keep)
        self._payload_bytes -= task.payload
        task.payload = 0

    def _prefill(self) -> Output:
        """Run the first in line into a slot; it has its first token afterwards."""
        task = next(iter(self._waiting.values()))
        del self._waiting[task.key]
        task.slot = self._pool.allocate()
        try:
            token = self._runner.prefill(task.slot, task.request.prompt)
            self._strip(task, keep=self._runner.keep)
        except Exception as error:  # noqa: BLE001  # fails alone, whatever it is
            return self._fail(task, "prefill_failed", error)
        self._running[task.key] = task
        return self._advance(task, token)

    def _decode(self) -> list[Output]:
        """One token for everybody who runs; all of them fail if the step does."""
        batch = list(self._running.values())
        slots = [task.slot for task in batch if task.slot is not None]
        try:
            tokens = self._runner.decode(slots, [task.last for task in batch])
            if len(tokens) != len(batch):
                raise RuntimeError(f"{len(tokens)} tokens for {len(batch)} slots")
        except Exception as error:  # noqa: BLE001  # fails alone, whatever it is
            return [self._fail(task, "decode_failed", error) for task in batch]
        return [
            self._advance(task, token)
            for task, token in zip(batch, tokens, strict=True)
        ]

    def _advance(self, task: _Task, token: int) -> Output:
        """Book a token; a finished task leaves at once, before it is told."""
        items: list[Any] = []
        reason = "stop" if token in task.request.stop_ids else None
        if reason is None:
            task.last = token
            task.made += 1
            self._tokens += 1
            items.append([token])
            if task.made == task.request.max_tokens:
                reason = "length"
        if reason is None:
            return Output(task.key, items)
        self._leave(task.key)
        self._finished["completed"] += 1
        items.append({"finish_reason": reason})
        return Output(task.key, items, Finish("completed"))

    def _fail(self, task: _Task, code: str, error: Exception) -> Output:
        """End a task by an error; its text is not told, it may quote the prompt."""
        message = f"{code.replace('_', ' ')}: {type(error).__name__}"
        _log.warning("%s of a request: %s", code, where(error))
        release(error)
        # One by one: should a clean-up fail as well, END still finds the others.
        self._running.pop(task.key, None)
        self._finished["failed"] += 1
        self._drop(task)
        return Output(task.key, finish=Finish("failed", code, message))
