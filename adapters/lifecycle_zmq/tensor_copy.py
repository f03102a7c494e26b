"""Copies tensors into the arena; large ones in a worker thread."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import anyio
import anyio.lowlevel
import anyio.to_thread

from lifecycle import Refused
from lifecycle.lowlevel import clear_traceback_frames
from lifecycle_zmq.exceptions import EncodeError
from lifecycle_zmq.shared_memory import memfd
from lifecycle_zmq.shared_memory.allocator import Block
from lifecycle_zmq.shared_memory.arena import Arena
from lifecycle_zmq.shared_memory.tensors import TensorPayload, describe
from lifecycle_zmq.transport.base import ClientTransport

# Smaller tensors are as fast in the message as in the arena.
INLINE_BYTES = 64 * 2**10


class ArenaPlacement:
    """Places the tensors of one request in the arena.

    Attributes:
        blocks: The blocks that the request uses, for its lease.
    """

    def __init__(self, arena: Arena | None) -> None:
        self._arena = arena if arena is not None and arena.shared else None
        self.blocks: list[Block] = []

    def place(self, view: memoryview) -> int | None:
        """Return the offset of a tensor in the arena, or None to send it.

        Copies the tensor into the arena if it is not there yet and there is room.

        Raises:
            EncodeError: It crosses regions of the arena.
        """
        arena = self._arena
        if arena is None or view.nbytes <= INLINE_BYTES:
            return None
        found = arena.find(view)
        if found is None:
            try:
                found = arena.find(memoryview(arena.put(view)))
            except Refused:
                # No room: sending takes time, but does not refuse the request.
                arena.spilled += 1
        if found is None:
            return None
        offset, block = found
        self.blocks.append(block)
        return offset


# Copying more blocks the loop for about a millisecond, which is what a thread costs.
THREAD_COPY_BYTES = 4 * 2**20


class TensorCopier:
    """Copies large tensors to shared memory in a worker thread, one request at a time.

    The event loop goes on meanwhile.
    """

    def __init__(self, arena: Arena | None, link: ClientTransport) -> None:
        self._arena = arena if arena is not None and arena.shared else None
        self._passes: bool = getattr(link, "passes_memory", False)
        # Two copies at a time would only take the memory's bandwidth from each other.
        self._limiter = anyio.CapacityLimiter(1)

    async def copy_large(self, payload: TensorPayload | None) -> TensorPayload | None:
        """Return a payload of the same tensors, with large ones in shared memory.

        Tensors that cannot be copied, for any reason, are returned as they were.

        Cancellation: all are dropped, once a copy that was begun is done.
        """
        if payload is None or not hasattr(payload, "take"):
            return payload
        batch = _TensorBatch(payload.take())
        try:
            if batch.is_large(self._arena, passes=self._passes):
                await self._copy_in_thread(batch)
                # The engine gets no request that was cancelled meanwhile.
                await anyio.lowlevel.checkpoint_if_cancelled()
        except BaseException:
            batch.take()
            raise
        return batch

    async def _copy_in_thread(self, batch: _TensorBatch) -> None:
        try:
            await anyio.to_thread.run_sync(
                batch.copy, self._arena, limiter=self._limiter
            )
        except Exception as error:  # noqa: BLE001 - the hand-off reports it
            # No thread available, or an arena closed meanwhile. anyio leaves the error
            # in a cycle, and its frames hold the tensors.
            clear_traceback_frames(error)


class _TensorBatch:
    """A payload whose tensors are replaced; later references to it hold none."""

    __slots__ = ("_tensors",)

    def __init__(self, tensors: Mapping[str, Any]) -> None:
        self._tensors = tensors

    def take(self) -> Mapping[str, Any]:
        tensors, self._tensors = self._tensors, {}
        return tensors

    def is_large(self, arena: Arena | None, *, passes: bool) -> bool:
        """Whether copying takes long. False for tensors that cannot be sent at all."""
        if arena is None and not passes:
            return False
        with suppress(EncodeError):
            views = describe(self._tensors)[1]
            if arena is not None:
                views = [view for view in views if arena.find(view) is None]
            return sum(view.nbytes for view in views) > THREAD_COPY_BYTES
        return False

    def copy(self, arena: Arena | None) -> None:
        """Replace the tensors by copies; runs in a worker thread."""
        views = dict(zip(self._tensors, describe(self._tensors)[1], strict=True))
        if arena is not None:
            for name, view in views.items():
                if view.nbytes > INLINE_BYTES and arena.find(view) is None:
                    with suppress(Refused):
                        views[name] = memoryview(arena.put(view))
            self._tensors = views
            return
        copies = memfd.precopy([view.cast("B") for view in views.values()])
        if copies is not None:
            both = zip(views.items(), copies, strict=True)
            self._tensors = {name: _like(view, copy) for (name, view), copy in both}


def _like(view: memoryview, copy: memoryview) -> memoryview:
    letter: Any = view.format
    again: memoryview = copy.cast(letter, list(view.shape or ()))
    return again
