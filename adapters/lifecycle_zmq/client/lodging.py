"""Finding each tensor of a request its place in the arena."""

from __future__ import annotations

from lifecycle import Refused
from lifecycle_zmq.memory.arena import Arena
from lifecycle_zmq.memory.block import Block

# Up to here a message is as fast as a place in the arena.
SENT_BELOW = 64 * 2**10


class Lodging:
    """The tensors of one request in the arena.

    Args:
        arena: Where there may be room; ``None``: nowhere.

    Attributes:
        blocks: What the engine gets on loan.
    """

    def __init__(self, arena: Arena | None) -> None:
        self._arena = arena if arena is not None and arena.shared else None
        self.blocks: list[Block] = []

    def lodge(self, view: memoryview) -> int | None:
        """Return where a tensor lies, copying it there if need be; None: send it.

        Raises:
            EncodeError: It lies across regions of the arena.
        """
        arena = self._arena
        if arena is None or view.nbytes <= SENT_BELOW:
            return None
        found = arena.find(view)
        if found is None:
            try:
                found = arena.find(memoryview(arena.put(view)))
            except Refused:
                # It exists already: sent, it costs time but no request.
                arena.spilled += 1
        if found is None:
            return None
        offset, block = found
        self.blocks.append(block)
        return offset
