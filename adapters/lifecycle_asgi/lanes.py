"""Lanes of admission: gates that clients share, so that none fills a queue alone."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import anyio

from lifecycle import Gate, GateStatistics, Lease
from lifecycle.lowlevel import DrainRate
from lifecycle_asgi.limits import ClientLimitExceeded


class Lane:
    """A gate with a limit on the waiting of one client, which is half of its queue.

    Args:
        gate: The gate; in fair order, clients share what it admits, too.

    Attributes:
        gate: The gate.
    """

    __slots__ = ("_drain_rate", "_over_share", "_share", "_waiting", "gate")

    def __init__(self, gate: Gate) -> None:
        self.gate = gate
        longest = gate.statistics().max_waiting
        self._share = math.inf if longest is None else max(1, longest // 2)
        self._waiting: Counter[str] = Counter()
        self._over_share = 0
        self._drain_rate = DrainRate()

    def statistics(self) -> GateStatistics:
        """Return the state of the gate; clients over their share count as refused."""
        now = self.gate.statistics()
        return replace(now, refused=now.refused + self._over_share)

    async def admit(
        self,
        nbytes: int,
        client: str,
        *,
        priority: int = 0,
        max_wait: float | None = None,
    ) -> Lease:
        """Admit *nbytes* of a request of *client*.

        Args:
            nbytes: Estimated size.
            client: The client, whose requests wait behind each other.
            priority: As for `Gate.admit`.
            max_wait: Seconds; ``None`` for the gate's own.

        Raises:
            ClientLimitExceeded: The client has half of the queue already.
            Refused: As from `Gate.admit`.

        Cancellation:
            As for `Gate.admit`.
        """
        self.check_share(client)
        self._waiting[client] += 1
        try:
            if max_wait is None:
                return await self.gate.admit(
                    bytes=nbytes, key=client, priority=priority
                )
            return await self.gate.admit(
                bytes=nbytes, key=client, priority=priority, max_wait=max_wait
            )
        finally:
            self._waiting[client] -= 1
            if not self._waiting[client]:
                del self._waiting[client]

    def check_share(self, client: str, *, arriving: int = 0) -> None:
        """Refuse a request of a client that has its share of the queue.

        Args:
            client: The client.
            arriving: Further requests of it, which will wait soon.

        Raises:
            ClientLimitExceeded: The client has half of the queue already.
        """
        if self._waiting[client] + arriving < self._share:
            return
        self._over_share += 1
        share, released = int(self._share), self.gate.statistics().released
        after = self._drain_rate.retry_after(share, released, anyio.current_time())
        raise ClientLimitExceeded(
            f"This client has {share} requests in the queue, which is its "
            f"share; wait until one of them has been served",
            retry_after=after,
        )

    def ahead(self, client: str) -> int:
        """Return how many waiting requests go before the next one of *client*.

        In fair order clients take turns: as many of each other client as of this one.
        """
        turns = (self._waiting[client] + 1) * len(self._waiting.keys() | {client})
        return min(self.gate.statistics().waiting, turns - 1)

    def grow(self, lease: Lease, nbytes: int) -> bool:
        """Charge *lease* with *nbytes*, unless that takes more than the capacity."""
        now = self.gate.statistics()
        free = math.inf if now.bytes is None else now.bytes - now.bytes_in_use
        if nbytes - lease.bytes > free:
            return False
        lease.settle(bytes=nbytes)
        return True
