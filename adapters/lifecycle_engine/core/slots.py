"""KV slots: allocation, and an LRU cache of slots for the turns of a conversation."""

from __future__ import annotations

import heapq
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import NamedTuple

from lifecycle.lowlevel import describe_error
from lifecycle_engine.core.model_runner import Resumes, Runner
from lifecycle_engine.core.request import ConversationKey, Task
from lifecycle_engine.errors import discard_error

_log = logging.getLogger(__name__)


class KVSlotCache:
    """Assigns slots to tasks and caches the slots of conversations between turns.

    Cached slots are evicted in LRU order when a task needs one, so caching never
    makes a request wait.

    Args:
        runner: The owner of the slots. No slot is cached for a runner without
            `Resumes`.
    """

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._resumes = runner if isinstance(runner, Resumes) else None
        # A heap: the lowest first, because adjacent rows are cheaper to gather. The
        # padding row of a runner has the next number, and is never given.
        self._unused = list(range(runner.slots))
        # Least recently used first; one slot per conversation at most.
        self._cached: dict[ConversationKey, int] = {}
        self._resumed = 0
        self._evicted = 0

    def report(self) -> dict[str, int]:
        """Return the current slot counts and the totals of the cache."""
        return {
            "slots": self._runner.slots,
            # Cached slots are evicted on demand, so they count as free.
            "slots_free": len(self._unused) + len(self._cached),
            "slots_cached": len(self._cached),
            "slots_evicted": self._evicted,
            "tokens_resumed": self._resumed,
        }

    def acquire(self, task: Task) -> None:
        """Give a task a slot: its conversation's, a free one or an evicted one.

        Fewer tasks than there are slots must have one.
        """
        slot = None
        if task.conversation is not None:
            slot = self._cached.pop(task.conversation, None)
        if slot is None:
            if not self._unused:
                self._evict()
            task.slot = heapq.heappop(self._unused)
            return
        task.slot = slot
        assert self._resumes is not None
        task.prefilled = self._resumes.resume(slot, task.request.prompt)
        task.resumed = task.prefilled
        self._resumed += task.prefilled

    def release(self, task: Task, *, cache: bool = False) -> None:
        """Take the slot from a task, if it has one, and free or cache it."""
        slot, task.slot = task.slot, None
        if slot is None:
            return
        if cache and task.conversation is not None and self._resumes is not None:
            # Two turns of one conversation ran at once: the later one is cached.
            replaced = self._cached.pop(task.conversation, None)
            self._cached[task.conversation] = slot
            slot = replaced
        if slot is not None:
            self._free(slot)

    def _evict(self) -> None:
        slot = self._cached.pop(next(iter(self._cached)))
        self._evicted += 1
        self._free(slot)

    def _free(self, slot: int) -> None:
        if slot in self._unused:
            raise RuntimeError(f"slot {slot} was freed before")
        heapq.heappush(self._unused, slot)
        try:
            self._runner.free(slot)
        except Exception as error:  # noqa: BLE001  # fails no request
            # The slot's request may have its answer already, and the next prefill in
            # the slot starts at 0. Retiring the slot would use all of them up.
            _log.warning(
                "freeing a KV slot failed: %s; the slot is used again",
                describe_error(error),
            )
            discard_error(error)


class ImageSpan(NamedTuple):
    """An image of a prompt.

    Attributes:
        start: Position of its first token.
        digest: Hash of everything that its features depend on.
    """

    start: int
    digest: bytes


@dataclass(frozen=True, slots=True)
class PrefixContents:
    """The tokens and images that the positions of a slot were computed from.

    Attributes:
        ids: Token ids: the prompt's, then the generated ones.
        images: Images among them.
    """

    ids: list[int] = field(repr=False)
    images: Sequence[ImageSpan] = field(default=(), repr=False)

    def common_prefix(self, other: PrefixContents) -> int:
        """Return the number of leading positions that both have in common.

        An image is shared as a whole or not at all: all its tokens have the same id,
        so they say nothing about its pixels.
        """
        same = min(len(self.ids), len(other.ids))
        for at, (mine, theirs) in enumerate(zip(self.ids, other.ids, strict=False)):
            if mine != theirs:
                same = at
                break
        for mine_, theirs_ in zip_longest(self.images, other.images):
            if mine_ != theirs_:
                starts = [each.start for each in (mine_, theirs_) if each is not None]
                return min(same, *starts)
        return same
