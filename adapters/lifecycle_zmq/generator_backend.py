"""A backend of one async generator per request."""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal

import anyio
import anyio.lowlevel
from anyio.abc import TaskGroup

from lifecycle.lowlevel import (
    LoopWaiter,
    check_callable,
    check_choice,
    clear_traceback_frames,
)
from lifecycle_zmq.backend import MERGES, Merge, Output
from lifecycle_zmq.exceptions import EngineFailed, RequestRejected, log_exception
from lifecycle_zmq.heartbeat import Heartbeat, loop_hooks
from lifecycle_zmq.protocol import Finish
from lifecycle_zmq.server import EngineLoop
from lifecycle_zmq.transport.base import AwaitedTransport


@dataclass(slots=True, eq=False, repr=False)
class GeneratorTask:
    """Runs one generator in a task of its own, never more than one item ahead.

    Attributes:
        begun: Whether the generator has run until it waited.
        accepted: Whether the client was sent that it does.
        refusal: The exception, if it refused the request before it waited.
        put_in: Turn of the queue in which it last added an output.
    """

    key: str
    _items: AsyncIterator[Any]
    _queue: GeneratorBackend
    _waiter: LoopWaiter
    _scope: anyio.CancelScope = field(default_factory=anyio.CancelScope)
    _cancelled: bool = False
    _forgotten: bool = False
    paused: bool = False
    put_in: int = -1
    begun: bool = False
    finished: bool = False
    accepted: bool = False
    refusal: RequestRejected | None = None

    def wake(self) -> None:
        """Let it check again what it waits for."""
        self._waiter.wake()

    def cancel(self) -> None:
        """Cancel the generator where it waits."""
        self._cancelled = True
        self._scope.cancel()

    def forget(self) -> None:
        """Cancel it, and add no further output."""
        self._forgotten = True
        self.cancel()

    async def run(self) -> None:
        """Add all items, and the finish."""
        self.begun = True
        self._queue.notify_begun()
        try:
            finish = await self._finish()
            if not self._forgotten and self.refusal is None:
                self._put(Output(self.key, (), finish))
        except SystemExit as error:
            # Raised in a task, it would break asyncio's loop.
            self._queue.exit_with(error)
        finally:
            self.finished = True
            self._queue.closed(self)

    async def _finish(self) -> Finish:
        try:
            with self._scope:
                await self._forward()
        except asyncio.CancelledError as error:  # noqa: ASYNC103 - not ours
            if anyio.current_effective_deadline() == -math.inf:
                raise  # the loop ends, and all its tasks with it
            # A future, or this very task, was cancelled by user code: an error like any
            # other. Raised here, it would end all other generators.
            return self._failed(error)  # noqa: ASYNC104 - as above
        except Exception as error:  # noqa: BLE001 - sent to the reader
            return self._failed(error)
        return Finish("cancelled" if self._cancelled else "completed")

    def _failed(self, error: BaseException) -> Finish:
        refusal = RequestRejected("internal", f"it raised {type(error).__name__}")
        if isinstance(error, RequestRejected | EngineFailed):
            # Its message is written for the reader.
            clear_traceback_frames(error)
            refusal = RequestRejected(error.code, error.message)
        else:
            log_exception("a generator", error)
        if self._cancelled:
            return Finish("cancelled")
        if not self.accepted and self.put_in < 0:
            self.refusal = refusal
        return Finish("failed", refusal.code, refusal.message)

    async def _forward(self) -> None:
        async with _closing(self._items):
            async for item in self._items:
                while self.paused or self.put_in == self._queue.turn:
                    if not self.paused:
                        self._queue.wake_when_taken(self)
                    await self._waiter.wait()
                if self._cancelled:  # it has swallowed its cancellation
                    return
                self._put(Output(self.key, (item,)))

    def _put(self, output: Output) -> None:
        self.put_in = self._queue.turn
        self._queue.put(output)


def _closing(items: Any) -> AbstractAsyncContextManager[Any]:
    return aclosing(items) if hasattr(items, "aclose") else nullcontext()


Serve = Callable[[str, dict[str, Any], dict[str, memoryview]], AsyncIterator[Any]]


class GeneratorBackend:
    """Runs one async generator for each request, all of them in one event loop.

    A `Backend` for engines that are asynchronous themselves; give it to `EngineServer`,
    `ThreadEngine` or `RayEngine`. The loop runs in the server's thread. Everything that
    generators yield in one turn of it travels in one message.

    Args:
        serve: Called with the key, the request and the tensors, as `Backend.start` is;
            an async generator function, or a function that returns an async iterator.
        merge: How items may merge while their reader is behind, as `Backend.start`
            returns it; or a function that returns that for a request.
        backend: The event loop.
        lifespan: Makes a context manager that is entered before the first request, in
            the event loop, and left when all generators are closed.
        status: Returns counters, of plain values, beside those of this class.

    Raises:
        TypeError: *serve* is a coroutine function, which yields nothing, or another
            option cannot be called.
        ValueError: *merge* or *backend* is not one of the allowed values.
    """

    _loop: EngineLoop
    _transport: AwaitedTransport
    _heartbeat: Heartbeat
    _wakeup: LoopWaiter
    _tasks: TaskGroup
    _wait_tasks: TaskGroup

    def __init__(
        self,
        serve: Serve,
        *,
        merge: Merge | Callable[[dict[str, Any]], Merge | None] = "never",
        backend: Literal["asyncio", "trio"] = "asyncio",
        lifespan: Callable[[], AbstractAsyncContextManager[Any]] = nullcontext,
        status: Callable[[], dict[str, Any]] = dict,
    ) -> None:
        if inspect.iscoroutinefunction(serve):
            name = getattr(serve, "__name__", "serve")
            raise TypeError(f"{name} yields nothing; make it an async generator")
        if not callable(merge):
            check_choice(MERGES, merge=merge)
        check_choice(("asyncio", "trio"), backend=backend)
        check_callable(serve=serve, lifespan=lifespan, status=status)
        self._serve = serve
        self._merge = merge
        self._loop_backend = backend
        self._lifespan = lifespan
        self._status = status
        self._live: dict[str, GeneratorTask] = {}
        self._ending: dict[str, GeneratorTask] = {}
        self._outputs: list[Output] = []
        self._waiting_tasks: list[GeneratorTask] = []
        self._reason: SystemExit | None = None
        self._due = False
        self._full = False
        self.turn = 0  # how often everything was taken

    def start(
        self, key: str, request: dict[str, Any], tensors: dict[str, memoryview]
    ) -> Merge | None:
        """Create the generator; its task begins after this turn of the loop."""
        merge = self._merge(request) if callable(self._merge) else self._merge
        if merge not in MERGES:
            # The server would refuse it, too, but the key would be in use until the
            # generator is closed.
            kind = type(merge).__name__
            message = f"merge returned {kind}, not None or a Merge"
            raise RequestRejected("internal", message)
        items = aiter(self._serve(key, request, tensors))
        running = self._live[key] = GeneratorTask(
            key, items, self, LoopWaiter(self._wakeup)
        )
        self._tasks.start_soon(running.run)
        return merge

    def cancel(self, key: str) -> None:
        """Cancel the generator; its stream finishes when it is closed."""
        if key in self._live:
            self._live[key].cancel()

    def end(self, key: str) -> None:
        """Cancel the generator, if it runs, and drop its outputs."""
        running = self._live.pop(key, None)
        if running is None:
            return
        if running.put_in == self.turn:
            self._outputs = [it for it in self._outputs if it.key != key]
        if not running.finished:
            self._ending[key] = running
            running.forget()

    def started(self, key: str) -> bool:
        """Whether the generator runs. What it does before it first waits is its start.

        Raises:
            RequestRejected: It raised before it waited.
        """
        running = self._live[key]
        if running.refusal is not None:
            del self._live[key]
            raise running.refusal
        running.accepted = running.begun
        return running.begun

    def ending(self, key: str) -> bool:
        """Whether a generator that was ended is not closed yet."""
        return key in self._ending

    def pause(self, key: str) -> None:
        """Leave the generator suspended at its next item."""
        self._live[key].paused = True

    def resume(self, key: str) -> None:
        """Continue the generator."""
        self._live[key].paused = False
        self._live[key].wake()

    @property
    def busy(self) -> bool:
        """Whether there are outputs that were not taken."""
        return bool(self._outputs)

    def step(self) -> Sequence[Output]:
        """Return the outputs, and continue the generators that waited for that."""
        outputs, self._outputs = self._outputs, []
        waiting, self._waiting_tasks = self._waiting_tasks, []
        self.turn += 1
        for running in waiting:
            running.wake()
        return outputs

    def status(self) -> dict[str, Any]:
        """Return the numbers of generators, and the engine's own counters."""
        counters = {"generators": len(self._live), "ending": len(self._ending)}
        return counters | self._status()

    def put(self, output: Output) -> None:
        """Add an output of a generator."""
        self._outputs.append(output)
        if not self._due:
            self._schedule_turn()

    def wake_when_taken(self, running: GeneratorTask) -> None:
        """Wake a generator's task when its output was taken."""
        self._waiting_tasks.append(running)

    def notify_begun(self) -> None:
        """Report soon which starts are accepted."""
        # Many may begin in one turn, and each may take long.
        self._heartbeat.beat(idle=False)
        self._schedule_turn()

    def exit_with(self, reason: SystemExit) -> None:
        """Let `drive` raise what a generator has raised to end the process."""
        self._reason = reason
        self._schedule_turn()

    def closed(self, running: GeneratorTask) -> None:
        """Note that a generator is closed, and report it soon."""
        # Likewise, many may close in one turn.
        self._heartbeat.beat(idle=False)
        if self._ending.get(running.key) is running:
            del self._ending[running.key]
        self._schedule_turn()

    def drive(
        self, loop: EngineLoop, transport: AwaitedTransport, heartbeat: Heartbeat
    ) -> None:
        """Run the event loop until the server stops.

        Raises:
            BaseException: What ended it before, such as an error of *lifespan*.
        """
        self._loop, self._transport, self._heartbeat = loop, transport, heartbeat
        hooks = loop_hooks(self._loop_backend, heartbeat)
        try:
            anyio.run(self._run, backend=self._loop_backend, backend_options=hooks)
        except BaseExceptionGroup as group:
            raise _unwrap(group) from None
        finally:
            del self._loop, self._transport, self._heartbeat

    async def _run(self) -> None:
        self._wakeup = LoopWaiter()
        async with self._lifespan(), anyio.create_task_group() as self._tasks:
            async with anyio.create_task_group() as self._wait_tasks:
                self._wait_tasks.start_soon(self._listen)
                await self._turn_until_stopped()
                self._wait_tasks.cancel_scope.cancel()
            for running in self._live.values():
                running.forget()

    async def _turn_until_stopped(self) -> None:
        while self._loop.running:
            if self._reason is not None:
                raise self._reason
            if self._due:
                self._turn()
                # Ready generators run first: what all of them yield is one message.
                await anyio.lowlevel.checkpoint()
                continue
            with anyio.move_on_after(self._loop.next_timeout()) as limit:
                await self._wakeup.wait()
            self._due |= limit.cancelled_caught

    async def _listen(self) -> None:
        while self._loop.running:
            await self._transport.wait()
            self._turn()
            # The next timeout may have changed.
            self._wakeup.wake()

    async def _make_room(self) -> None:
        await self._transport.wait(room=True)
        self._full = False
        self._schedule_turn()

    def _turn(self) -> None:
        self._due = False
        self._loop.turn()
        if self._transport.full and not self._full:
            self._full = True
            self._wait_tasks.start_soon(self._make_room)
        if self._transport.ahead:
            self._schedule_turn()

    def _schedule_turn(self) -> None:
        if not self._due:
            self._due = True
            self._wakeup.wake()


def _unwrap(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        (error,) = error.exceptions
    return error
