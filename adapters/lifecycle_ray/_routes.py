"""Which replica gets which request."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

from ._replica import Replica

Weigh = Callable[[Mapping[str, Any]], int]
Conversation = Callable[[Mapping[str, Any]], Hashable | None]

# Conversations whose replica is remembered, the latest.
_REMEMBERED = 4096


class Routes:
    """Gives each request to the replica that has the least to do.

    What a replica has to do is its share of all live tokens and of all live bytes,
    added. A conversation stays where it was, while that replica takes requests: what
    was computed for it may still be there.

    Args:
        replicas: All of them.
        weigh: Tells how many tokens a request may take.
        conversation: Tells what a request belongs to; ``None`` is nothing.
    """

    def __init__(
        self, replicas: Sequence[Replica], weigh: Weigh, conversation: Conversation
    ) -> None:
        self._replicas = replicas
        self._weigh = weigh
        self._conversation = conversation
        self._live: list[dict[str, tuple[int, int]]] = [{} for _ in replicas]
        self._homes: OrderedDict[Hashable, int] = OrderedDict()

    def place(self, key: str, request: Mapping[str, Any], nbytes: int) -> Replica:
        """Choose a replica for a new stream, and count it there."""
        self._prune()
        name = self._conversation(request)
        home = self._homes.get(name) if name is not None else None
        if home is None or not self._replicas[home].ready:
            home = self._least_loaded()
        if name is not None:
            self._homes[name] = home
            self._homes.move_to_end(name)
            if len(self._homes) > _REMEMBERED:
                self._homes.popitem(last=False)
        self._live[home][key] = self._weigh(request), nbytes
        return self._replicas[home]

    def of(self, key: str) -> Replica | None:
        """Return the replica that has a stream, if one has."""
        return next((it for it in self._replicas if it.holds(key)), None)

    def loads(self) -> list[tuple[int, int]]:
        """Return the live tokens and bytes of each replica."""
        self._prune()
        return self._loads()

    def _loads(self) -> list[tuple[int, int]]:
        return [
            (sum(it[0] for it in live.values()), sum(it[1] for it in live.values()))
            for live in self._live
        ]

    def _least_loaded(self) -> int:
        loads = self._loads()
        tokens = sum(it[0] for it in loads) or 1
        nbytes = sum(it[1] for it in loads) or 1

        def load(number: int) -> tuple[bool, float, int]:
            share = loads[number][0] / tokens + loads[number][1] / nbytes
            return not self._replicas[number].ready, share, len(self._live[number])

        return min(range(len(loads)), key=load)

    def _prune(self) -> None:
        # Asked of those who know, as a stream may end in many ways.
        for replica, live in zip(self._replicas, self._live, strict=True):
            for key in [key for key in live if not replica.holds(key)]:
                del live[key]


def weigh(request: Mapping[str, Any]) -> int:
    """Return the tokens that a request of the bundled engine may take at most."""
    prompt, asked = request.get("input_ids"), request.get("max_tokens")
    known = len(prompt) if isinstance(prompt, list | tuple) else 0
    return 1 + known + (asked if isinstance(asked, int) else 0)


def conversation(request: Mapping[str, Any]) -> Hashable | None:
    """Return what a request of the bundled engine is a turn of, if of anything."""
    session, share = request.get("session"), request.get("share")
    return (share, session) if isinstance(session, str) else None
