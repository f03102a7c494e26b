"""What the client has to tell the engine about its streams, gathered for one turn."""

from __future__ import annotations

from itertools import islice
from typing import Any

from ._slot import new_slot

# So many of each kind leave room in a message, whatever their numbers are.
_BATCH = 1024


class Outbox:
    """Cancellations, credit and ends of all streams, until the loop comes round.

    Made in the event loop that it belongs to.
    """

    __slots__ = ("_cancel", "_end", "_grant", "_posted", "_slot")

    def __init__(self) -> None:
        self._cancel: dict[int, None] = {}
        self._grant: dict[int, int] = {}
        self._end: dict[int, None] = {}
        self._slot = new_slot()
        self._posted = False

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
        if not (self._cancel or self._grant or self._end):
            return None
        # An end goes after whatever was said of its stream, so it waits its turn.
        cancel = list(islice(self._cancel, _BATCH))
        grant = [[*it] for it in islice(self._grant.items(), _BATCH)]
        for generation in cancel:
            del self._cancel[generation]
        for generation, _ in grant:
            del self._grant[generation]
        ends = [] if self._cancel else list(islice(self._end, _BATCH))
        for generation in ends:
            del self._end[generation]
        return {"cancel": cancel, "grant": grant, "end": ends}

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
