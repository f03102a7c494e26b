"""What the client knows of one stream, and the iterator over its items."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import anyio

Error = Callable[[], Exception]


class StreamState:
    """One stream of one incarnation, from START to DONE. Every step is synchronous.

    Waiters get an exception of their own each, built where it is raised: a shared one
    would collect the traceback, and with it the frames, of all of them.
    """

    __slots__ = (
        "_changed",
        "cancel_sent",
        "discarding",
        "done",
        "end_sent",
        "error",
        "finish_seen",
        "finished",
        "items",
        "key",
        "received",
        "refusal",
        "settled",
    )

    def __init__(self, key: str) -> None:
        self.key = key
        self.settled = anyio.Event()
        self.done = anyio.Event()
        self.refusal: Error | None = None
        self.items: deque[Any] = deque()
        self.received = 0
        self.finish_seen = False
        self.finished = False
        self.error: Error | None = None
        self.discarding = False
        self.cancel_sent = False
        self.end_sent = False
        self._changed: anyio.Event | None = None

    def settle(self, refusal: Error | None = None) -> None:
        """Let `start` return, or raise `refusal`."""
        self.refusal = refusal
        self.settled.set()

    def push(self, items: list[Any]) -> None:
        """Append what the engine produced."""
        self.received += len(items)
        if not self.discarding:
            self.items.extend(items)
            self._wake()

    def finish(self, error: Error | None = None) -> None:
        """End the items, the first time only; `error` comes after the last of them."""
        if not self.finished:
            self.finished = True
            self.error = error
            self._wake()

    def discard(self) -> None:
        """Keep nothing more: nobody will read it. Any thread may call this."""
        self.discarding = True
        self.items.clear()

    def lose(self, error: Error) -> None:
        """Tell whoever waits, each exactly once, that the engine is gone."""
        if not self.settled.is_set():
            self.settle(error)
        self.finish(error)
        self.done.set()

    async def wait(self) -> None:
        """Wait for the next item or the finish.

        Cancellation: nothing is lost.
        """
        if not self.items and not self.finished:
            if self._changed is None:
                self._changed = anyio.Event()
            await self._changed.wait()

    def _wake(self) -> None:
        if self._changed is not None:
            self._changed.set()
            self._changed = None


class EngineStream:
    """The items of one stream, for one reader.

    Closing or dropping it never waits and never ends the stream in the engine: only
    `EngineClient.end` does, so that END is sent once and by whoever owns the session.

    Args:
        state: What the client knows of the stream.
        cancel: Asks the engine to stop it; does not wait.
    """

    __slots__ = ("_cancel", "_state")

    def __init__(self, state: StreamState, cancel: Callable[[str], None]) -> None:
        self._state = state
        self._cancel = cancel

    def __aiter__(self) -> EngineStream:
        """Return the stream itself."""
        return self

    async def __anext__(self) -> Any:
        """Return the next item.

        Raises:
            EngineFailed: The engine gave up on this stream, told once.
            EngineLost: The engine is gone, told once.

        Cancellation: no item is lost; the next call returns it.
        """
        state = self._state
        while not state.items:
            if state.discarding:
                raise StopAsyncIteration
            if state.finished:
                error, state.error = state.error, None
                raise StopAsyncIteration if error is None else error()
            await state.wait()
        return state.items.popleft()

    async def aclose(self) -> None:
        """Stop reading and ask the engine to stop producing. Does not wait.

        Cancellation: there is no checkpoint in it.
        """
        if not self._state.finished:
            self._cancel(self._state.key)
        self._state.discard()

    def __del__(self) -> None:
        """Stop buffering for nobody; any thread may collect, so touch no socket."""
        self._state.discard()

    def __repr__(self) -> str:
        """Show the key and the number of items waiting, never an item."""
        return f"<EngineStream {self._state.key!r} waiting={len(self._state.items)}>"
