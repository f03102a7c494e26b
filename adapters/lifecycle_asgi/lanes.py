"""Lanes of admission: gates that clients share, so that none fills a queue alone."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import anyio

from lifecycle import Gate, GateStatistics, Lease
from lifecycle.events import Observer
from lifecycle.lowlevel import DrainRate
from lifecycle_asgi.refusals import ClientLimitExceeded


class Lane:
    """A gate over bytes in fair order, with a limit on the waiting of one client.

    Args:
        name: Of the gate.
        bytes: Capacity.
        max_waiting: Maximum number of waiting requests; of one client, half of it.
        max_wait: Longest wait in seconds.
        observer: Of the gate.

    Attributes:
        gate: The gate.
    """

    __slots__ = ("_drain_rate", "_over_share", "_share", "_waiting", "gate")

    def __init__(
        self,
        name: str,
        *,
        bytes: int,  # noqa: A002 - the unit is the name
        max_waiting: int,
        max_wait: float,
        observer: Observer | None,
    ) -> None:
        self.gate = Gate(
            bytes=bytes,
            max_waiting=max_waiting,
            max_wait=max_wait,
            order="fair",
            name=name,
            observer=observer,
        )
        self._share = max(1, max_waiting // 2)
        self._waiting: Counter[str] = Counter()
        self._over_share = 0
        self._drain_rate = DrainRate()

    def statistics(self) -> GateStatistics:
        """Return the state of the gate; clients over their share count as refused."""
        now = self.gate.statistics()
        return replace(now, refused=now.refused + self._over_share)

    async def admit(self, nbytes: int, client: str) -> Lease:
        """Admit *nbytes* of a request of *client*.

        Raises:
            ClientLimitExceeded: The client has half of the queue already.
            Refused: As from `Gate.admit`.

        Cancellation:
            As for `Gate.admit`.
        """
        if self._waiting[client] >= self._share:
            self._over_share += 1
            released = self.gate.statistics().released
            after = self._drain_rate.retry_after(
                self._share, released, anyio.current_time()
            )
            raise ClientLimitExceeded(
                f"This client has {self._share} requests in the queue, which is its "
                f"share; wait until one of them has been served",
                retry_after=after,
            )
        self._waiting[client] += 1
        try:
            return await self.gate.admit(bytes=nbytes, key=client)
        finally:
            self._waiting[client] -= 1
            if not self._waiting[client]:
                del self._waiting[client]

    def grow(self, lease: Lease, nbytes: int) -> bool:
        """Charge *lease* with *nbytes*, unless that takes more than the capacity."""
        now = self.gate.statistics()
        free = (now.bytes or 0) - now.bytes_in_use
        if nbytes - lease.bytes > free:
            return False
        lease.settle(bytes=nbytes)
        return True
