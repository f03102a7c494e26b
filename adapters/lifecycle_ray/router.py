"""`Router`: chooses the replica of each request, by load and by conversation."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

from lifecycle_ray.replica import Replica

TokenEstimate = Callable[[Mapping[str, Any]], int]
ConversationOf = Callable[[Mapping[str, Any]], Hashable | None]

# Number of latest conversations whose replica is remembered.
_MAX_CONVERSATIONS = 4096


class Router:
    """Routes each request to the replica with the least load.

    The load of a replica is its share of all live tokens plus its share of all live
    bytes. A conversation stays with its replica while that accepts requests, as its
    KV cache may still be there.

    Args:
        replicas: All of them.
        weigh: Returns how many tokens a request may take.
        conversation: Returns the conversation of a request, or ``None``.
    """

    def __init__(
        self,
        replicas: Sequence[Replica],
        weigh: TokenEstimate,
        conversation: ConversationOf,
    ) -> None:
        self._replicas = replicas
        self._weigh = weigh
        self._conversation = conversation
        self._live: list[dict[str, tuple[int, int]]] = [{} for _ in replicas]
        self._conversations: OrderedDict[Hashable, int] = OrderedDict()

    def place(self, key: str, request: Mapping[str, Any], nbytes: int) -> Replica:
        """Choose a replica for a new stream, and add it to that load."""
        self._prune()
        name = self._conversation(request)
        number = self._conversations.get(name) if name is not None else None
        if number is None or not self._replicas[number].ready:
            number = self._least_loaded()
        if name is not None:
            self._conversations[name] = number
            self._conversations.move_to_end(name)
            if len(self._conversations) > _MAX_CONVERSATIONS:
                self._conversations.popitem(last=False)
        self._live[number][key] = self._weigh(request), nbytes
        return self._replicas[number]

    def replica_of(self, key: str) -> Replica | None:
        """Return the replica of a stream, or ``None``."""
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
        # The replicas are asked, since a stream may end in many ways.
        for replica, live in zip(self._replicas, self._live, strict=True):
            for key in [key for key in live if not replica.holds(key)]:
                del live[key]


def weigh(request: Mapping[str, Any]) -> int:
    """Return the tokens that a request of the bundled engine may take at most."""
    prompt, asked = request.get("input_ids"), request.get("max_tokens")
    known = len(prompt) if isinstance(prompt, list | tuple) else 0
    return 1 + known + (asked if isinstance(asked, int) else 0)


def conversation(request: Mapping[str, Any]) -> Hashable | None:
    """Return the conversation of a request of the bundled engine, or ``None``."""
    session, tenant = request.get("session"), request.get("tenant")
    return (tenant, session) if isinstance(session, str) else None
