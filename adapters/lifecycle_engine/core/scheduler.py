"""The scheduler: continuous batching of requests over the KV slots of a runner."""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from itertools import islice
from typing import Any, Literal, get_args

from lifecycle import strip
from lifecycle.lowlevel import Company, describe_error
from lifecycle_engine.core.model_runner import (
    Emitted,
    PrefillsTogether,
    PromptChunk,
    Runner,
)
from lifecycle_engine.core.request import (
    Finish,
    Merge,
    Output,
    RequestQueue,
    RequestRejected,
    Task,
    parse_request,
)
from lifecycle_engine.core.slots import KVSlotCache
from lifecycle_engine.errors import discard_error

# How a started request ended.
Outcome = Literal["completed", "cancelled", "failed", "ended"]
# Of so many slots, one is kept from a client that has company.
_RESERVE = 8
# A client's next chunk is due after so many steps of others, however long its last was.
_MOST_OWED = 8
# Number of latest runs whose longest is reported.
_RECENT = 64
# Of the queue, as many are named to those who ask what waits.
_MOST_QUEUED = 256
_log = logging.getLogger(__name__)


class Scheduler:
    """Runs requests over a `Runner`; the backend of an engine server.

    Each `step` decodes a token of every running request, or several where the runner
    has drafts of them, and then prefills one chunk of one prompt, or several short
    prompts that fit into one. A running stream is therefore delayed by at most one
    chunk per token, however many and however long the prompts are; and by one client's
    prompts for about half of the time, see `PrefillDebts`.

    All state changes happen between steps, on one thread, and each is complete when
    its call returns. A request is in exactly one place: queued, in prefill or in the
    running batch. Its slot and tensors are freed when it leaves.
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
            max_batch: Maximum number of requests that hold a slot at once; the
                default is all of the runner's slots.
            max_waiting: Maximum number of queued requests; ``None`` leaves the limit
                to the admission control in front of the engine.
            max_tokens: Upper limit of a request's ``max_tokens``.
            chunk: Maximum number of prompt tokens that one step prefills, with the
                padding between several prompts; see `PrefillsTogether`.
            merge: How to merge items for a client that reads slowly;
                ``"concatenate"`` suits a runner whose items are lists of tokens.
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
        self._slots = KVSlotCache(runner)
        self._together = runner if isinstance(runner, PrefillsTogether) else None
        self._waiting: RequestQueue[Task] = RequestQueue()
        self._company, self._debts = Company(), PrefillDebts()
        # Dicts keep the order and remove from the middle in constant time.
        self._prefilling: dict[str, Task] = {}
        self._running: dict[str, Task] = {}
        self._timed: dict[str, Task] = {}
        self._ready_outputs: dict[str, Output] = {}
        self._oldest_first = True
        self._steps, self._prefills, self._decodes = (Timings(clock) for _ in range(3))
        self._stats = SchedulerStats()
        self._payload_bytes = 0

    @property
    def busy(self) -> bool:
        """Whether `step` has anything to do."""
        return bool(
            self._waiting or self._prefilling or self._running or self._ready_outputs
        )

    def start(
        self, key: str, request: Mapping[str, Any], tensors: Mapping[str, memoryview]
    ) -> Merge:
        """Queue a request, or reject it and keep nothing of it.

        Raises:
            RequestRejected: See `parse_request`; also ``duplicate_key`` and
                ``overloaded``.
        """
        try:
            self._check_admissible(key)
            parsed = parse_request(
                request, tensors, self._runner, max_tokens=self._max_tokens
            )
        except RequestRejected:
            self._stats.rejected += 1
            raise
        deadline = self._clock() + parsed.timeout if parsed.timeout else None
        task = Task(key, parsed, parsed.nbytes, deadline)
        self._waiting.push(key, parsed.owner, task)
        self._company.see(parsed.client, self._clock())
        if deadline is not None:
            self._timed[key] = task
        self._stats.started += 1
        self._payload_bytes += parsed.nbytes
        return self._merge

    def cancel(self, key: str) -> None:
        """Stop a stream; the next step reports it as cancelled. Unknown: no-op.

        The request's slot and tensors are free when this returns.
        """
        if self._remove(key, "cancelled"):
            self._ready_outputs[key] = Output(key, finish=Finish("cancelled"))

    def end(self, key: str) -> None:
        """Discard a stream and free all it holds, without output. Unknown: no-op.

        The slot that a completed turn left in the cache stays there.
        """
        self._ready_outputs.pop(key, None)
        self._remove(key, "ended")

    def step(self) -> list[Output]:
        """Run one step for all streams.

        Raises:
            DeviceLost: The process has to end.
        """
        self._stats.steps += 1
        with self._steps.run():
            if self._timed:
                self._expire()
            outputs = list(self._ready_outputs.values())
            self._ready_outputs.clear()
            if self._running:
                outputs += self._decode()
            outputs += self._assign_slots()
            if self._prefilling and (tasks := self._next_prompts()):
                outputs += self._prefill(tasks)
        return outputs

    def status(self) -> dict[str, Any]:
        """Return all counters, consistent with each other, as plain values."""
        active = [*self._prefilling.values(), *self._running.values()]
        used = sum(task.prefilled + task.emitted for task in active)
        return {
            "waiting": len(self._waiting),
            "queued": [task.key for task in islice(self._waiting, _MOST_QUEUED)],
            "prefilling": len(self._prefilling),
            "running": len(self._running),
            "max_batch": self._max_batch,
            **self._slots.report(),
            "kv_used": used / (self._runner.slots * self._runner.max_length),
            "payload_bytes": self._payload_bytes,
            **asdict(self._stats),
            "times": self._times(),
            "runner": runner_status(self._runner),
        }

    def _times(self) -> dict[str, Any]:
        inside = self._prefills.seconds + self._decodes.seconds
        return {
            "step_seconds": self._steps.seconds,
            "overhead_seconds": max(self._steps.seconds - inside, 0.0),
            "longest_recent_step_seconds": max(self._steps.recent, default=0.0),
            "prefill": self._prefills.report(),
            "decode": self._decodes.report(),
        }

    def _check_admissible(self, key: str) -> None:
        used = (self._waiting, self._prefilling, self._running, self._ready_outputs)
        if any(key in keys for keys in used):
            raise RequestRejected("duplicate_key", "the key is in use; END it first")
        if self._max_waiting is not None and len(self._waiting) >= self._max_waiting:
            raise RequestRejected(
                "overloaded",
                f"{len(self._waiting)} requests wait, the limit is "
                f"{self._max_waiting}: retry later",
            )

    def _remove(self, key: str, outcome: Outcome) -> bool:
        """Remove a task and free what it holds; return whether it was there."""
        task = (
            self._running.pop(key, None)
            or self._prefilling.pop(key, None)
            or self._waiting.remove(key)
        )
        if task is None:
            return False
        self._stats.finished[outcome] += 1
        cache = outcome == "completed" and not task.request.last_turn
        self._release(task, cache=cache)
        return True

    def _release(self, task: Task, *, cache: bool = False) -> None:
        self._timed.pop(task.key, None)
        self._company.see(task.request.client, self._clock())
        self._strip(task, keep=())
        self._slots.release(task, cache=cache)

    def _strip(self, task: Task, keep: Any) -> None:
        strip(task.request.prompt.tensors, keep=keep)
        self._payload_bytes -= task.payload
        task.payload = 0

    def _expire(self) -> None:
        """End the requests whose deadline has passed."""
        now = self._clock()
        late = [
            task
            for task in self._timed.values()
            if task.deadline is not None and task.deadline <= now
        ]
        for task in late:
            self._remove(task.key, "failed")
            message = f"not done in its {task.request.timeout:g} s; ask for less"
            finish = Finish("failed", "deadline_exceeded", message)
            self._ready_outputs[task.key] = Output(task.key, finish=finish)

    def _assign_slots(self) -> list[Output]:
        """Move queued requests into free slots, preempting where that is fair."""
        failed = []
        while self._waiting:
            client = self._next_client()
            if client is None:
                break
            task = self._waiting.pop(client)
            self._prefilling[task.key] = task
            try:
                self._slots.acquire(task)
            except Exception as error:  # noqa: BLE001  # fails this request only
                failed.append(self._fail(task, "prefill_failed", error))
        return failed

    def _next_client(self) -> str | None:
        """Return the client that gets a slot now, for which it may preempt a prompt.

        While a client has company, some slots are kept from it, so that the others
        need not wait until one of its requests has ended.
        """
        prefilling, running = list(self._prefilling.values()), self._running.values()
        if len(prefilling) + len(running) >= self._max_batch:
            found = choose_preemption(self._waiting.clients, prefilling, running)
            if found is None:
                return None
            victim, client = found
            self._preempt(victim)
            return client
        used = Counter(task.request.client for task in (*prefilling, *running))
        most, now = self._max_batch - self._max_batch // _RESERVE, self._clock()
        clients = self._waiting.clients
        alone = len({*used, *clients}) == 1
        for client in clients:
            if used[client] < most or (alone and not self._company.of(client, now)):
                return client
        return None

    def _preempt(self, task: Task) -> None:
        """Put a request back at the head of its queue; its prefill starts over."""
        del self._prefilling[task.key]
        self._waiting.push_front(task.key, task.request.owner, task)
        self._stats.preempted += 1
        task.restart_prefill()
        # The runner's own state in the tensors is computed again.
        strip(task.request.prompt.tensors, keep=task.request.tensors)
        self._slots.release(task)

    def _next_prompts(self) -> list[Task]:
        """Choose the prompt of the next chunk, and short ones that fit beside it.

        Alternately the oldest and the shortest. The oldest alone would make a short
        prompt wait for all of a long one; the shortest alone could starve a long one.
        There may be none: those that are there owe time to the streams of others.
        """
        running = {task.request.client for task in self._running.values()}
        prefilling = [
            task
            for task in self._prefilling.values()
            if not self._debts.owes(task.request.client, running)
        ]
        if not prefilling:
            return []
        tasks = [min(prefilling, key=lambda task: task.remaining)]
        if self._oldest_first:
            tasks = prefilling[:1]
        self._oldest_first = not self._oldest_first
        if self._together is None:
            return tasks
        longest = tasks[0].positions
        for task in prefilling:
            padded = max(longest, task.positions)
            if task is not tasks[0] and padded * (len(tasks) + 1) <= self._chunk:
                tasks.append(task)
                longest = padded
        return tasks

    def _prefill(self, tasks: Sequence[Task]) -> list[Output]:
        """Run a chunk of each prompt; the last chunk produces the first token."""
        chunks = []
        for task in tasks:
            prompt, start = task.request.prompt, task.prefilled
            stop = start + min(self._chunk, task.remaining)
            assert task.slot is not None
            chunks.append(PromptChunk(task.slot, prompt, start, stop))
        try:
            with self._prefills.run() as tokens:
                made = self._run(chunks)
                tokens += [each.stop - each.start for each in chunks]
        except Exception as error:  # noqa: BLE001  # fails one request only
            if len(tasks) == 1:
                return [self._fail(tasks[0], "prefill_failed", error)]
            # Alone, the one whose error it is fails, and the others do not.
            cause = describe_error(error)
            _log.warning(
                "%d prompts in one pass: %s; each runs alone", len(tasks), cause
            )
            discard_error(error)
            return [output for task in tasks for output in self._prefill([task])]
        clients = {task.request.client for task in tasks}
        self._debts.prefilled(clients, self._prefills.recent[-1])
        return [
            output
            for task, chunk, output in zip(tasks, chunks, made, strict=True)
            for output in self._prefilled(task, chunk.stop, output)
        ]

    def _run(self, chunks: Sequence[PromptChunk]) -> Sequence[Any]:
        if len(chunks) == 1 or self._together is None:
            return [self._runner.prefill(*each) for each in chunks]
        made = list(self._together.prefill_together(chunks))
        if len(made) != len(chunks):
            raise InvalidRunnerOutput(
                f"prefill_together returned {len(made)} items for {len(chunks)} chunks"
            )
        return made

    def _prefilled(self, task: Task, stop: int, output: Any) -> list[Output]:
        """Record a chunk; a prompt without another one joins the running requests."""
        prompt = task.request.prompt
        try:
            if isinstance(output, Exception):
                raise output
            task.prefilled = stop
            emitted = validate_prefill_output(output, remaining=task.remaining)
            if not task.stripped and stop >= self._runner.needs_tensors_until(prompt):
                self._strip(task, keep=self._runner.keep)
                task.stripped = True
        except Exception as error:  # noqa: BLE001  # fails this request only
            return [self._fail(task, "prefill_failed", error)]
        if emitted is None:
            return []
        del self._prefilling[task.key]
        self._running[task.key] = task
        return [self._advance(task, [emitted])]

    def _decode(self) -> list[Output]:
        """Decode items of every running request; an error in it fails them all."""
        batch = list(self._running.values())
        slots = [task.slot for task in batch if task.slot is not None]
        try:
            with self._decodes.run() as tokens:
                items = validate_decode_output(self._runner.decode(slots), len(batch))
                tokens += [len(each) for each in items if isinstance(each, list)]
        except Exception as error:  # noqa: BLE001  # fails the batch, not the engine
            return [self._fail(task, "decode_failed", error) for task in batch]
        self._debts.decoded(self._decodes.recent[-1])
        return [
            self._advance(task, emitted)
            for task, emitted in zip(batch, items, strict=True)
        ]

    def _advance(self, task: Task, emitted: Sequence[Emitted] | Exception) -> Output:
        """Record items; a finished task is removed before its output is returned."""
        if isinstance(emitted, Exception):
            return self._fail(task, "decode_failed", emitted)
        items = task.first_items()
        reason = None
        for each in emitted:
            reason = self._record(task, each, items)
            if reason is not None:  # items after the last one are not part of it
                break
        if reason is None:
            return Output(task.key, items)
        self._remove(task.key, "completed")
        items.append({"finish_reason": reason})
        return Output(task.key, items, Finish("completed"))

    def _record(self, task: Task, emitted: Emitted, items: list[Any]) -> str | None:
        """Append an item; return why it is the last one, if it is."""
        if emitted.token in task.request.stop_ids:
            return "stop"
        task.emitted += 1
        self._stats.tokens += 1
        items.append(emitted.item)
        if emitted.last:
            return "stop"
        return "length" if task.emitted == task.request.max_tokens else None

    def _fail(self, task: Task, code: str, error: Exception) -> Output:
        """Fail a task; the error's text may quote the prompt, so it is not reported."""
        message = f"{code.replace('_', ' ')}: {public_message(error)}"
        _log.warning("%s (%s)", message, describe_error(error))
        discard_error(error)
        # Before the clean-up: if that raises, END must not find the task again.
        self._running.pop(task.key, None)
        self._prefilling.pop(task.key, None)
        self._stats.finished["failed"] += 1
        self._release(task)
        return Output(task.key, finish=Finish("failed", code, message))


class PrefillDebts:
    """What clients owe to the streams of others, which waited for their prompts.

    A picture may take the engine as long as many tokens do. A client's next chunk
    waits until the streams of others have had as much time as its last one took. The
    engine does as much as before, and a client that is alone owes nobody.
    """

    def __init__(self) -> None:
        self._owed: dict[str, tuple[float, float]] = {}

    def prefilled(self, clients: Iterable[str], seconds: float) -> None:
        """Note that a chunk with prompts of *clients* took *seconds*."""
        self._owed |= dict.fromkeys(clients, (seconds, seconds / _MOST_OWED))

    def decoded(self, seconds: float) -> None:
        """Note that a step of the running streams took *seconds*."""
        for client, (owed, least) in list(self._owed.items()):
            self._owed[client] = owed - max(seconds, least), least
            if self._owed[client][0] <= 0:
                del self._owed[client]

    def owes(self, client: str, running: set[str]) -> bool:
        """Whether *client* owes time to the streams of *running* clients."""
        return client in self._owed and bool(running - {client})


def choose_preemption(
    waiting: Sequence[str], prefilling: Sequence[Task], running: Collection[Task]
) -> tuple[Task, str] | None:
    """Choose a task to preempt so that a waiting client without a slot gets one.

    The victim is the newest prompt that can still be prefilled from its start and
    whose client has another slot. So every client makes progress, and only part of a
    prefill is lost.

    Args:
        waiting: Clients with queued requests, the next one to be served first.
        prefilling: Tasks in prefill, in order of arrival.
        running: Tasks that stream.

    Returns:
        The task to preempt and the client that gets its slot; ``None`` to preempt
        nothing.
    """
    if not prefilling:
        return None
    slots = Counter(task.request.client for task in (*prefilling, *running))
    client = next((each for each in waiting if not slots[each]), None)
    if client is None:
        return None
    for task in reversed(prefilling):
        if task.replayable and slots[task.request.client] > 1:
            return task, client
    return None


class InvalidRunnerOutput(Exception):
    """A runner's return value breaks its protocol; the message quotes no content."""


def public_message(error: Exception) -> str:
    """Return what a client may see of an error: of a runner's own, only the type."""
    return (
        str(error) if isinstance(error, InvalidRunnerOutput) else type(error).__name__
    )


def validate_prefill_output(output: Any, *, remaining: int) -> Emitted | None:
    """Return the output of a chunk if it follows the protocol.

    A runner may be user code, so its values are checked before the scheduler acts on
    them. An invalid value fails only its own request.

    Raises:
        InvalidRunnerOutput: The runner returned an output before the last chunk, none
            from the last chunk, or a value of another type.
    """
    if output is None and remaining:
        return None
    if remaining or output is None:
        what = "an item" if remaining else "None"
        raise InvalidRunnerOutput(
            f"prefill returned {what} with {remaining} tokens left"
        )
    emitted = _validate_emitted(output)
    if isinstance(emitted, Exception):
        raise emitted
    return emitted


def validate_decode_output(
    output: Iterable[Any], count: int
) -> list[list[Emitted] | Exception]:
    """Return the outputs of a step for each slot, or the error that replaces them.

    Args:
        output: What `Runner.decode` returned. Errors of a lazy iterable propagate.
        count: Number of slots in the step.

    Raises:
        InvalidRunnerOutput: The number of items differs from the number of slots.
    """
    items = list(output)
    if len(items) != count:
        raise InvalidRunnerOutput(
            f"decode returned {len(items)} items for {count} slots"
        )
    return [_validate_run(item) for item in items]


def runner_status(runner: Runner) -> dict[str, Any]:
    """Return a runner's counters; an error in them fails no request."""
    try:
        return runner.status()
    except Exception as error:  # noqa: BLE001  # replaces only the counters
        return {"error": type(error).__name__}


def _validate_run(value: Any) -> list[Emitted] | Exception:
    if isinstance(value, list) and not value:
        return InvalidRunnerOutput("the runner returned an empty list for a slot")
    run = []
    for each in value if isinstance(value, list) else [value]:
        emitted = _validate_emitted(each)
        if isinstance(emitted, Exception):
            return emitted
        run.append(emitted)
    return run


def _validate_emitted(value: Any) -> Emitted | Exception:
    if isinstance(value, Exception):
        return value
    if not isinstance(value, Emitted):
        kind = type(value).__name__
        return InvalidRunnerOutput(f"the runner returned a {kind}, not an Emitted")
    for name, allowed in (("token", (int, type(None))), ("last", (bool,))):
        found = type(getattr(value, name))
        if found not in allowed:
            expected = " or ".join(each.__name__ for each in allowed)
            return InvalidRunnerOutput(
                f"{name} of an Emitted is a {found.__name__}, not {expected}"
            )
    return value


@dataclass(slots=True)
class SchedulerStats:
    """Counters of a scheduler; every started request ends once, with one outcome.

    Attributes:
        steps: Steps of the scheduler.
        tokens: Items emitted.
        started: Requests accepted.
        rejected: Requests rejected.
        preempted: Prompts that gave up their slot during prefill.
        finished: Ended requests by outcome.
    """

    steps: int = 0
    tokens: int = 0
    started: int = 0
    rejected: int = 0
    preempted: int = 0
    finished: dict[Outcome, int] = field(
        default_factory=lambda: dict.fromkeys(get_args(Outcome), 0)
    )


@dataclass(slots=True)
class Timings:
    """How long one kind of work takes: whole steps, prefill or decode.

    Attributes:
        clock: Monotonic seconds.
        runs: How often it was done.
        tokens: Prompt tokens prefilled, or tokens generated.
        seconds: Time that it took.
        recent: Seconds of the latest runs.
    """

    clock: Callable[[], float]
    runs: int = 0
    tokens: int = 0
    seconds: float = 0.0
    recent: deque[float] = field(default_factory=lambda: deque(maxlen=_RECENT))

    @contextmanager
    def run(self) -> Iterator[list[int]]:
        """Time a step or a call of the runner, whose tokens are added to the list."""
        tokens: list[int] = []
        begin = self.clock()
        try:
            yield tokens
        finally:
            seconds = self.clock() - begin
            self.runs += 1
            self.tokens += sum(tokens)
            self.seconds += seconds
            self.recent.append(seconds)

    def report(self) -> dict[str, float]:
        """Return the totals, and the longest of the latest runs."""
        return {
            "runs": self.runs,
            "tokens": self.tokens,
            "seconds": self.seconds,
            "longest_recent_run_seconds": max(self.recent, default=0.0),
        }
