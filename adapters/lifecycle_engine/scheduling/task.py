"""A request on its way through the scheduler."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .requests import Request

# Whose conversation it is, and what that one calls it.
Session = tuple[str, str]


@dataclass(slots=True, eq=False)
class Task:
    """A request that was taken, wherever it is.

    Attributes:
        payload: Bytes of tensors that it still holds.
        deadline: When its time is over, on the scheduler's clock.
        slot: While it is in prefill or runs.
        read: Prompt tokens that are in the slot.
        resumed: Those of them that the turn before had left there.
        stripped: No further chunk needs its tensors, and they are gone.
        made: Items emitted.
    """

    key: str
    request: Request
    payload: int
    deadline: float | None
    slot: int | None = None
    read: int = 0
    resumed: int = 0
    stripped: bool = False
    made: int = 0

    @property
    def left(self) -> int:
        """Prompt tokens that are not in the slot yet."""
        return len(self.request.prompt.input_ids) - self.read

    @property
    def session(self) -> Session | None:
        """Of which conversation it is a turn."""
        if self.request.session is None:
            return None
        return self.request.share, self.request.session

    def begin_again(self) -> None:
        """Have its prompt read from the start, in another slot."""
        self.read, self.resumed, self.stripped = 0, 0, False

    def first_items(self) -> list[Any]:
        """What is told before its first item, and not again."""
        if self.made or not self.resumed:
            return []
        return [{"cached_tokens": self.resumed}]

    @property
    def replayable(self) -> bool:
        """Whether all is there that reading its prompt from the start needs."""
        return not (self.stripped and self.request.tensors)
