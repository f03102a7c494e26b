"""Large tensors are copied in a thread, before their hand-off: the loop goes on."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import anyio
import anyio.lowlevel
import anyio.to_thread

from lifecycle import Refused
from lifecycle_zmq._errors import EncodeError
from lifecycle_zmq._hand_off import Box, forget_frames
from lifecycle_zmq.client.lodging import SENT_BELOW
from lifecycle_zmq.memory import parcels
from lifecycle_zmq.memory.arena import Arena
from lifecycle_zmq.memory.tensors import describe
from lifecycle_zmq.transport import ClientTransport

# A copy of so much holds a loop up by about a millisecond, as long as a thread costs.
CARRIED_FROM = 4 * 2**20


class Carrier:
    """Brings tensors to where the engine sees them, one request at a time.

    Args:
        arena: Where there may be room; ``None``: nowhere.
        link: What takes the rest.
    """

    def __init__(self, arena: Arena | None, link: ClientTransport) -> None:
        self._arena = arena if arena is not None and arena.shared else None
        self._passes: bool = getattr(link, "passes_memory", False)
        # Two copies at a time would only take the memory's bandwidth from each other.
        self._turn = anyio.CapacityLimiter(1)

    async def bring(self, box: Box | None) -> Box | None:
        """Return a box of the same tensors, the large ones where the engine sees them.

        What cannot be brought, for whatever reason, is in it as it was.

        Cancellation: all are dropped, once a copy that was begun is done.
        """
        if box is None or not hasattr(box, "take"):
            return box
        load = _Load(box.take())
        try:
            if load.is_large(self._arena, passes=self._passes):
                await self._carry(load)
                # Whoever has left is not heard of by the engine.
                await anyio.lowlevel.checkpoint_if_cancelled()
        except BaseException:
            load.take()
            raise
        return load

    async def _carry(self, load: _Load) -> None:
        try:
            await anyio.to_thread.run_sync(load.carry, self._arena, limiter=self._turn)
        except Exception as error:  # noqa: BLE001 - what is wrong the hand-off finds too
            # Such as no thread to be had, or an arena that was closed meanwhile. anyio
            # leaves it in a cycle, and its frames have the tensors.
            forget_frames(error)


class _Load:
    """A box that its tensors are replaced in. What refers to it later has none."""

    __slots__ = ("_tensors",)

    def __init__(self, tensors: Mapping[str, Any]) -> None:
        self._tensors = tensors

    def take(self) -> Mapping[str, Any]:
        tensors, self._tensors = self._tensors, {}
        return tensors

    def is_large(self, arena: Arena | None, *, passes: bool) -> bool:
        """Whether to bring it is much to copy; not what cannot be sent at all."""
        if arena is None and not passes:
            return False
        with suppress(EncodeError):
            views = describe(self._tensors)[1]
            if arena is not None:
                views = [view for view in views if arena.find(view) is None]
            return sum(view.nbytes for view in views) > CARRIED_FROM
        return False

    def carry(self, arena: Arena | None) -> None:
        """Replace the tensors by copies, in a thread."""
        views = dict(zip(self._tensors, describe(self._tensors)[1], strict=True))
        if arena is not None:
            for name, view in views.items():
                if view.nbytes > SENT_BELOW and arena.find(view) is None:
                    with suppress(Refused):
                        views[name] = memoryview(arena.put(view))
            self._tensors = views
            return
        copies = parcels.pack_early([view.cast("B") for view in views.values()])
        if copies is not None:
            both = zip(views.items(), copies, strict=True)
            self._tensors = {name: _like(view, copy) for (name, view), copy in both}


def _like(view: memoryview, copy: memoryview) -> memoryview:
    letter: Any = view.format
    again: memoryview = copy.cast(letter, list(view.shape or ()))
    return again
