"""A backend of one async generator per request."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Any, Literal

import anyio
import anyio.lowlevel
from anyio.abc import TaskGroup

from lifecycle_zmq import _options
from lifecycle_zmq._errors import RequestRejected
from lifecycle_zmq._slot import Slot
from lifecycle_zmq.process import beat
from lifecycle_zmq.process.pulse import Turns
from lifecycle_zmq.server.backend import MERGES, Merge, Output
from lifecycle_zmq.server.generator_task import Running
from lifecycle_zmq.server.loop import EngineLoop
from lifecycle_zmq.transport import AwaitedTransport

Serve = Callable[[str, dict[str, Any], dict[str, memoryview]], AsyncIterator[Any]]


class GeneratorBackend:
    """Runs one async generator for each request, all of them in one event loop.

    A `Backend` for engines that are asynchronous themselves; give it to `EngineServer`,
    `ThreadEngine` or `RayEngine`. The loop runs in the server's own thread. What all
    generators have yielded in one turn of it travels in one message.

    Args:
        serve: Called with the key, the request and the tensors, as `Backend.start` is;
            an async generator function, or a function that returns an async iterator.
        merge: How items may merge while their reader is behind, as `Backend.start`
            returns it; or what returns that for a request.
        backend: The event loop.
        lifespan: Makes what is entered before the first request, in the event loop,
            and left when all generators are closed.
        status: Returns counters, of plain values, beside those of this class.

    Raises:
        TypeError: *serve* is a coroutine function, which yields nothing, or another
            option cannot be called.
        ValueError: *merge* or *backend* is none of those that there are.
    """

    _loop: EngineLoop
    _transport: AwaitedTransport
    _pulse: Turns
    _news: Slot
    _tasks: TaskGroup
    _waits: TaskGroup

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
            _options.one_of(MERGES, merge=merge)
        _options.one_of(("asyncio", "trio"), backend=backend)
        _options.callables(serve=serve, lifespan=lifespan, status=status)
        self._serve = serve
        self._merge = merge
        self._on = backend
        self._lifespan = lifespan
        self._status = status
        self._live: dict[str, Running] = {}
        self._ending: dict[str, Running] = {}
        self._outputs: list[Output] = []
        self._pausing: list[Running] = []
        self._reason: SystemExit | None = None
        self._due = False
        self._full = False
        self.turn = 0

    def start(
        self, key: str, request: dict[str, Any], tensors: dict[str, memoryview]
    ) -> Merge | None:
        """Make the generator; its task begins when this turn of the loop is over."""
        merge = self._merge(request) if callable(self._merge) else self._merge
        if merge not in MERGES:
            # The server would refuse it, too, and the key be in use until the
            # generator is closed.
            kind = type(merge).__name__
            told = f"merge returned {kind}, not None or a Merge"
            raise RequestRejected("internal", told)
        items = aiter(self._serve(key, request, tensors))
        running = self._live[key] = Running(key, items, self, self._news)
        self._tasks.start_soon(running.run)
        return merge

    def cancel(self, key: str) -> None:
        """Cancel the generator; its stream finishes when it is closed."""
        if key in self._live:
            self._live[key].cancel()

    def end(self, key: str) -> None:
        """Cancel the generator, if it runs, and tell of nothing any more."""
        running = self._live.pop(key, None)
        if running is None:
            return
        if running.put_in == self.turn:
            self._outputs = [it for it in self._outputs if it.key != key]
        if not running.over:
            self._ending[key] = running
            running.forget()

    def started(self, key: str) -> bool:
        """Whether the generator runs: all that it does before it waits is its start.

        Raises:
            RequestRejected: It has raised before it waited.
        """
        running = self._live[key]
        if running.refusal is not None:
            del self._live[key]
            raise running.refusal
        running.accepted = running.begun
        return running.begun

    def ending(self, key: str) -> bool:
        """Whether a generator that was told to end is still to be closed."""
        return key in self._ending

    def pause(self, key: str) -> None:
        """Leave the generator where it is at its next item."""
        self._live[key].paused = True

    def resume(self, key: str) -> None:
        """Ask it for more."""
        self._live[key].paused = False
        self._live[key].wake()

    @property
    def busy(self) -> bool:
        """Whether anything was produced that is not told yet."""
        return bool(self._outputs)

    def step(self) -> Sequence[Output]:
        """Return what was produced, and let those go on who waited for that."""
        outputs, self._outputs = self._outputs, []
        waiting, self._pausing = self._pausing, []
        self.turn += 1
        for running in waiting:
            running.wake()
        return outputs

    def status(self) -> dict[str, Any]:
        """Return how many generators there are, and counters of the engine's own."""
        counters = {"generators": len(self._live), "ending": len(self._ending)}
        return counters | self._status()

    def put(self, output: Output) -> None:
        """Take what a generator has yielded."""
        self._outputs.append(output)
        if not self._due:
            self._ring()

    def waits(self, running: Running) -> None:
        """Wake a generator's task when what it has put is taken."""
        self._pausing.append(running)

    def begun(self) -> None:
        """Tell soon which starts are accepted."""
        # Many may begin in one turn, and each take its time.
        self._pulse.turn(idle=False)
        self._ring()

    def leave(self, reason: SystemExit) -> None:
        """Let `drive` raise what a generator has raised to end the process."""
        self._reason = reason
        self._ring()

    def closed(self, running: Running) -> None:
        """Note that a generator is closed, and tell of it soon."""
        # As many may be closed in one turn, or refuse in it.
        self._pulse.turn(idle=False)
        if self._ending.get(running.key) is running:
            del self._ending[running.key]
        self._ring()

    def drive(
        self, loop: EngineLoop, transport: AwaitedTransport, pulse: Turns
    ) -> None:
        """Run the event loop until the server has been told to stop.

        Raises:
            BaseException: What ended it before, such as an error of *lifespan*.
        """
        self._loop, self._transport, self._pulse = loop, transport, pulse
        options = beat.options(self._on, pulse)
        try:
            anyio.run(self._run, backend=self._on, backend_options=options)
        except BaseExceptionGroup as group:
            raise _only(group) from None
        finally:
            del self._loop, self._transport, self._pulse

    async def _run(self) -> None:
        self._news = Slot()
        async with self._lifespan(), anyio.create_task_group() as self._tasks:
            async with anyio.create_task_group() as self._waits:
                self._waits.start_soon(self._listen)
                await self._turn_until_stopped()
                self._waits.cancel_scope.cancel()
            for running in self._live.values():
                running.forget()

    async def _turn_until_stopped(self) -> None:
        while self._loop.running:
            if self._reason is not None:
                raise self._reason
            if self._due:
                self._turn()
                # Whoever is ready comes first: what all of them yield is one message.
                await anyio.lowlevel.checkpoint()
                continue
            with anyio.move_on_after(self._loop.patience()) as limit:
                await self._news.wait()
            self._due |= limit.cancelled_caught

    async def _listen(self) -> None:
        while self._loop.running:
            await self._transport.wait()
            self._turn()
            # There may be something to be done at another time now.
            self._news.wake()

    async def _make_room(self) -> None:
        await self._transport.wait(room=True)
        self._full = False
        self._ring()

    def _turn(self) -> None:
        self._due = False
        self._loop.turn()
        if self._transport.full and not self._full:
            self._full = True
            self._waits.start_soon(self._make_room)
        if self._transport.ahead:
            self._ring()

    def _ring(self) -> None:
        if not self._due:
            self._due = True
            self._news.wake()


def _only(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        (error,) = error.exceptions
    return error
