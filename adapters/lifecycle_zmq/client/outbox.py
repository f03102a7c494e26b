"""What the client has to tell the engine about its streams, gathered for one turn."""

from __future__ import annotations

from collections import deque
from itertools import islice
from typing import Any

from lifecycle_zmq._slot import Slot

# So many of each kind, beside so many bytes of starts and the largest start that
# goes here, fit into a message.
_BATCH = 1024
_STARTS = 16 * 2**10
SMALL_REQUEST = 4 * 2**10
# With so many the engine has enough to do until the next ones have been gathered.
_AMPLE = 32
# What its numbers and lengths take at most, beside its key and its request.
_START = 32


class Outbox:
    """Starts, cancellations, credit and ends, until the loop comes round.

    Made in the event loop that it belongs to.
    """

    __slots__ = ("_cancel", "_end", "_grant", "_posted", "_slot", "_start")

    def __init__(self) -> None:
        self._start: deque[list[Any]] = deque()
        self._cancel: dict[int, None] = {}
        self._grant: dict[int, int] = {}
        self._end: dict[int, None] = {}
        self._slot = Slot()
        self._posted = False

    @property
    def ample(self) -> bool:
        """Whether it is worth a message before the loop comes round."""
        return len(self._start) + len(self._end) >= _AMPLE

    def start(self, generation: int, key: str, window: int, request: bytes) -> None:
        """Ask for a stream, whose request is small and has no tensors."""
        self._start.append([generation, key, window, request])
        self._post()

    def cancel(self, generation: int) -> None:
        """Ask for the stream to stop at its next step."""
        self._cancel[generation] = None
        self._post()

    def grant(self, generation: int, credit: int) -> None:
        """Let the engine send so much more."""
        self._grant[generation] = self._grant.get(generation, 0) + credit
        self._post()

    def end(self, generation: int) -> None:
        """Ask for the stream to be forgotten."""
        # Said before its end, it would be of no use after it.
        self._grant.pop(generation, None)
        self._end[generation] = None
        self._post()

    def take(self) -> dict[str, Any] | None:
        """Return the fields of one message, or None when all was said."""
        if not (self._start or self._cancel or self._grant or self._end):
            return None
        # What goes together is read in this order, and nothing overtakes a start or
        # a cancellation: ends wait until both have gone.
        start = self._take_starts()
        grant = [[*it] for it in _take(self._grant)]
        cancel = [] if self._start else [it for it, _ in _take(self._cancel)]
        waits = self._start or self._cancel
        end = [] if waits else [it for it, _ in _take(self._end)]
        return {"start": start, "cancel": cancel, "grant": grant, "end": end}

    def _take_starts(self) -> list[list[Any]]:
        starts, size = [], 0
        while self._start and size < _STARTS:
            starts.append(self._start.popleft())
            _, key, _, request = starts[-1]
            # A character takes four bytes at most.
            size += _START + len(request) + (4 - 3 * key.isascii()) * len(key)
        return starts

    async def wait(self) -> None:
        """Wait until there is something to say, and for the end of the loop's turn.

        Cancellation: nothing is lost.
        """
        if not self._posted:
            await self._slot.wait()
        self._posted = False

    def _post(self) -> None:
        if not self._posted:
            self._posted = True
            self._slot.wake()


def _take(said: dict[int, Any]) -> list[tuple[int, Any]]:
    taken = list(islice(said.items(), _BATCH))
    for generation, _ in taken:
        del said[generation]
    return taken
