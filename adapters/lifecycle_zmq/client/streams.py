"""What the client knows of one stream, and the iterator over its items."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from lifecycle_zmq._slot import Slot

Error = Callable[[], Exception]
_NEVER = float("-inf")


class StreamState(Slot):
    """One stream of one incarnation, from START to DONE. Every step is synchronous.

    It is the slot of whoever starts it, and then of its reader. Each waiter gets an
    exception of its own, built where it is raised: a shared one would collect the
    traceback, and with it the frames, of all of them.

    Args:
        key: What its owner calls it.
        generation: What the engine calls it.
        window: The credit that its START carries.
        like: As for `Slot`.
    """

    __slots__ = (
        "_enders",
        "_owed",
        "cancel_sent",
        "credit",
        "discarding",
        "done",
        "end_sent",
        "error",
        "finish_seen",
        "finished",
        "generation",
        "items",
        "key",
        "low",
        "mark",
        "received",
        "refusal",
        "settled",
        "window",
    )

    def __init__(
        self, key: str, generation: int, window: int, like: Slot | None = None
    ) -> None:
        super().__init__(like)
        self.key = key
        self.generation = generation
        self.window = window
        self._enders: Sequence[Slot] = ()
        self.settled = False
        self.done = False
        self.refusal: Error | None = None
        # Bounded by the window and one item: the engine sends none without credit.
        self.items: deque[Any] = deque()
        self.received = 0
        # A mark is set where half a window was used up. When all before it was read,
        # what that had cost is granted: no item's own cost need be kept.
        self.credit = window
        self.low: float = window / 2
        self.mark = 0
        self._owed = 0
        self.finish_seen = False
        self.finished = False
        self.error: Error | None = None
        self.discarding = False
        self.cancel_sent = False
        self.end_sent = False

    def settle(self, refusal: Error | None = None) -> None:
        """Let `start` return, or raise `refusal`."""
        self.refusal = refusal
        self.settled = True
        self.wake()

    def push(self, item: Any, cost: int) -> None:
        """Append one item that the engine produced."""
        self.received += 1
        self.credit -= cost
        if self.credit <= self.low:
            self.set_mark()
        if not self.discarding:
            self.items.append(item)
            self.wake()

    def set_mark(self) -> None:
        """Owe what was used of the window by now, until the reader comes to here."""
        self.mark, self.low = self.received, _NEVER
        self._owed = self.window - self.credit

    def regain(self) -> int:
        """Return the credit to grant, of which the mark was reached."""
        if self.finish_seen or self.end_sent:
            return 0
        credit = self._owed
        self.credit += credit
        self.mark, self.low = 0, self.window / 2
        if self.credit <= self.low:
            self.set_mark()
        return credit

    def conclude(self, error: Error | None) -> None:
        """Note the finish that the engine told; nothing may follow it."""
        self.finish_seen = True
        self.credit = 0
        self.finish(error)

    def finish(self, error: Error | None = None) -> None:
        """End the items, the first time only; `error` comes after the last of them."""
        if not self.finished:
            self.finished = True
            self.error = error
            self.wake()

    def discard(self) -> None:
        """Keep nothing more: nobody will read it. Any thread may call this."""
        self.discarding = True
        self.items.clear()

    def complete(self) -> None:
        """Let everybody know that the engine has forgotten the stream."""
        self.done = True
        enders, self._enders = self._enders, ()
        for slot in enders:
            slot.wake()

    def lose(self, error: Error) -> None:
        """Tell whoever waits, each exactly once, that the engine is gone."""
        if not self.settled:
            self.settle(error)
        self.finish(error)
        self.complete()

    async def wait_settled(self) -> None:
        """Wait until the engine has taken or refused the stream, or is lost."""
        while not self.settled:
            await self.wait()

    async def wait_done(self) -> None:
        """Wait until the engine has forgotten the stream, or is lost."""
        if not self.done:
            slot = Slot(self)
            self._enders = (*self._enders, slot)
            await slot.wait()


class EngineStream:
    """The items of one stream, for one reader.

    Closing or dropping it never waits and never ends the stream in the engine: only
    `EngineClient.end` does, so that END is sent once and by whoever owns the session.

    Args:
        state: What the client knows of the stream.
        cancel: Asks the engine to stop it; does not wait.
        grant: Gives the engine credit for more items; does not wait.
    """

    __slots__ = ("_cancel", "_grant", "_state")

    def __init__(
        self,
        state: StreamState,
        cancel: Callable[[str], None],
        grant: Callable[[int, int], None],
    ) -> None:
        self._state = state
        self._cancel = cancel
        self._grant = grant

    def __aiter__(self) -> EngineStream:
        """Return the stream itself."""
        return self

    async def __anext__(self) -> Any:
        """Return the next item.

        Raises:
            EngineFailed: The engine gave up on this stream, told once.
            EngineLost: The engine is gone, told once.
            RuntimeError: Another task waits for an item.

        Cancellation: no item is lost; the next call returns it.
        """
        state = self._state
        items = state.items
        while not items:
            if state.discarding:
                raise StopAsyncIteration
            if state.finished:
                error, state.error = state.error, None
                raise StopAsyncIteration if error is None else error()
            await state.wait()
        item = items.popleft()
        if (
            state.mark
            and state.received - len(items) >= state.mark
            and (credit := state.regain())
        ):
            self._grant(state.generation, credit)
        return item

    async def aclose(self) -> None:
        """Stop reading and ask the engine to stop producing. Does not wait.

        Cancellation: there is no checkpoint in it.
        """
        self.close_nowait()

    def close_nowait(self) -> None:
        """As `aclose`, which does not wait either."""
        if not self._state.finished:
            self._cancel(self._state.key)
        self._state.discard()

    def __del__(self) -> None:
        """Stop buffering for nobody; any thread may collect, so touch no socket."""
        self._state.discard()

    def __repr__(self) -> str:
        """Show the key and the number of items waiting, never an item."""
        return f"<EngineStream {self._state.key!r} waiting={len(self._state.items)}>"
