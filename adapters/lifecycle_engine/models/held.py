"""What a slot holds, and how much of a further prompt that already is.

Kept for conversations: the next turn begins with what the last one left in its
slot, as far as tokens and images are the same. Pure, no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import NamedTuple


class Picture(NamedTuple):
    """An image of a prompt.

    Attributes:
        start: Where its first token is.
        digest: Of everything that its features depend on.
    """

    start: int
    digest: bytes


@dataclass(frozen=True, slots=True)
class Held:
    """What the positions of a slot were made from, in order.

    Attributes:
        ids: Tokens: the prompt's, then those drawn.
        pictures: Images among them.
    """

    ids: list[int] = field(repr=False)
    pictures: Sequence[Picture] = field(default=(), repr=False)

    def shared(self, other: Held) -> int:
        """Return how many first positions both have alike, images included.

        An image counts whole or not at all: its tokens are all the same one, so
        they say nothing of what is in it.
        """
        same = min(len(self.ids), len(other.ids))
        for at, (mine, theirs) in enumerate(zip(self.ids, other.ids, strict=False)):
            if mine != theirs:
                same = at
                break
        for mine_, theirs_ in zip_longest(self.pictures, other.pictures):
            if mine_ != theirs_:
                starts = [each.start for each in (mine_, theirs_) if each is not None]
                return min(same, *starts)
        return same
