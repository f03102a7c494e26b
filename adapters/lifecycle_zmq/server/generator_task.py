"""One request's generator, in a task of its own."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, aclosing, nullcontext
from typing import Any, Protocol

import anyio

from lifecycle_zmq._errors import EngineFailed, RequestRejected
from lifecycle_zmq._hand_off import complain, forget_frames
from lifecycle_zmq._slot import Slot
from lifecycle_zmq.server.backend import Finish, Output


class Desk(Protocol):
    """Where what was produced is put until it is told.

    Attributes:
        turn: Counts the times that all of it was taken.
    """

    turn: int

    def put(self, output: Output) -> None:
        """Take what a stream has produced."""
        ...

    def waits(self, running: Running) -> None:
        """Wake a stream when what it has put is taken."""
        ...

    def begun(self) -> None:
        """Look soon at what has begun."""
        ...

    def leave(self, reason: SystemExit) -> None:
        """Let the server end by what a stream has raised."""
        ...

    def closed(self, running: Running) -> None:
        """Note that nothing of a stream runs any more."""
        ...


class Running:
    """Asks a generator for item after item, never more than one ahead of the reader.

    Args:
        key: Its stream.
        items: The generator; closed in the end, in this same task.
        desk: Where its items go.
        like: A slot of the same event loop.

    Attributes:
        key: As given.
        begun: Whether the generator runs, at least until it waits.
        accepted: Whether the client was told that it does.
        refusal: Why it never will, if it said so before.
        over: Whether it is closed.
        paused: Whether to ask for nothing more.
        put_in: In which of the desk's turns it has put something last.
    """

    __slots__ = (
        "_cancelled",
        "_desk",
        "_forgotten",
        "_items",
        "_scope",
        "_slot",
        "accepted",
        "begun",
        "key",
        "over",
        "paused",
        "put_in",
        "refusal",
    )

    def __init__(
        self, key: str, items: AsyncIterator[Any], desk: Desk, like: Slot
    ) -> None:
        self.key = key
        self.paused = False
        self.put_in = -1
        self._items = items
        self._desk = desk
        self._slot = Slot(like)
        self._scope = anyio.CancelScope()
        self._cancelled = False
        self._forgotten = False
        self.begun = False
        self.over = False
        self.accepted = False
        self.refusal: RequestRejected | None = None

    def wake(self) -> None:
        """Let it look again at what it waits for."""
        self._slot.wake()

    def cancel(self) -> None:
        """Cancel the generator where it waits."""
        self._cancelled = True
        self._scope.cancel()

    def forget(self) -> None:
        """Cancel it, and tell of nothing any more."""
        self._forgotten = True
        self.cancel()

    async def run(self) -> None:
        """Put all items, and how it ended."""
        self.begun = True
        self._desk.begun()
        try:
            finish = await self._finish()
            if not self._forgotten and self.refusal is None:
                self._put(Output(self.key, (), finish))
        except SystemExit as error:
            # Out of a task, it would tear asyncio's loop apart.
            self._desk.leave(error)
        finally:
            self.over = True
            self._desk.closed(self)

    async def _finish(self) -> Finish:
        try:
            with self._scope:
                await self._pass_on()
        except asyncio.CancelledError as error:  # noqa: ASYNC103 - not ours
            if anyio.current_effective_deadline() == -math.inf:
                raise  # the loop ends, and all its tasks with it
            # Of a future, or of this very task, that somebody has cancelled: an error
            # like any other. Let out of the task, it would end all the others.
            return self._failed(error)  # noqa: ASYNC104 - as above
        except Exception as error:  # noqa: BLE001 - told to the reader
            return self._failed(error)
        return Finish("cancelled" if self._cancelled else "completed")

    def _failed(self, error: BaseException) -> Finish:
        refusal = RequestRejected("internal", f"it raised {type(error).__name__}")
        if isinstance(error, RequestRejected | EngineFailed):
            # It was written for the reader.
            forget_frames(error)
            refusal = RequestRejected(error.code, error.message)
        else:
            complain("a generator", error)
        if self._cancelled:
            return Finish("cancelled")
        if not self.accepted and self.put_in < 0:
            self.refusal = refusal
        return Finish("failed", refusal.code, refusal.message)

    async def _pass_on(self) -> None:
        async with _closed_at_the_end(self._items):
            async for item in self._items:
                while self.paused or self.put_in == self._desk.turn:
                    if not self.paused:
                        self._desk.waits(self)
                    await self._slot.wait()
                if self._cancelled:  # it has swallowed its cancellation
                    return
                self._put(Output(self.key, (item,)))

    def _put(self, output: Output) -> None:
        self.put_in = self._desk.turn
        self._desk.put(output)


def _closed_at_the_end(items: Any) -> AbstractAsyncContextManager[Any]:
    return aclosing(items) if hasattr(items, "aclose") else nullcontext()
