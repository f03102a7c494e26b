"""Lanes of admission: gates that clients share, so that none fills a queue alone."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import anyio

from lifecycle import Gate, GateFull, GateStatistics, Lease, Refused
from lifecycle.events import AdmissionRefused, Observer, combine_observers, guarded
from lifecycle.lowlevel import DrainRate, event_loop_clock
from lifecycle.shared import SharedGate
from lifecycle_asgi.admission_settings import AdmissionSettings
from lifecycle_asgi.asgi_types import AnyGate, Message, Send
from lifecycle_asgi.refusals import ClientLimitExceeded, TooManyInFlight

RESERVES: Final = MappingProxyType({"fair": 0.125, "fifo": 0.0, "adaptive": 0.0})
"""Parts of a gate that one client leaves to the others, by the order."""
_LOAD: Final = b"endpoint-load-metrics"
_SECONDS_BETWEEN_SUMMARIES: Final = 60.0


def shares(nbytes: int) -> list[int]:
    """Return what the lanes ``small``, ``bodies`` and ``requests`` have of *nbytes*."""
    return [nbytes * share // 16 or 1 for share in (1, 3, 12)]


class Lane:
    """A gate that clients share, with a limit on the waiting of one client.

    Args:
        gate: The gate. In fair order, clients take turns.
        shadow: Refuse no request, like a gate with ``enforce=False``, and count those
            that this lane would have refused.
        observer: Called with each refusal of this lane that has a reason.

    Attributes:
        gate: The gate.
    """

    def __init__(
        self,
        gate: AnyGate,
        *,
        shadow: bool = False,
        observer: Observer | None = None,
    ) -> None:
        limit = gate.statistics().max_waiting
        self.gate = gate
        self._max_waiting = math.inf if limit is None else limit
        self._share = math.inf if limit is None else max(1, limit // 2)
        self._waiting: Counter[str] = Counter()
        self._shadow = shadow
        self._refused = 0
        self._drain_rate = DrainRate()
        self._emit = None if shadow else guarded(observer)

    @property
    def name(self) -> str:
        """That of the gate."""
        return self.gate.name

    def statistics(self) -> GateStatistics:
        """Return the state of the gate, with what the lane refused, or would have."""
        now = self.gate.statistics()
        if self._shadow:
            return replace(now, over_limit=now.over_limit + self._refused)
        return replace(now, refused=now.refused + self._refused)

    async def admit(
        self,
        nbytes: int,
        client: str,
        *,
        slots: int = 1,
        deadline: float = math.inf,
        until: float = math.inf,
        now: GateStatistics | None = None,
    ) -> Lease:
        """Admit a request of *client*.

        Args:
            nbytes: Bytes that it needs.
            client: Whose it is.
            slots: Slots that it needs.
            deadline: When the client gives up, by the loop's clock. A request that
                would be admitted later does not wait: the client would not read its
                answer.
            until: When its wait ends, by the same clock, if that is earlier than the
                gate says.
            now: The gate, as it is now. Default: it is asked.

        Raises:
            ClientLimitExceeded: The client has half of the queue already.
            Refused: As from `Gate.admit`.

        Cancellation:
            As for `Gate.admit`.
        """
        self._check_share(client)
        self._waiting[client] += 1
        try:
            return await self.gate.admit(
                bytes=nbytes,
                slots=slots,
                key=client,
                max_wait=self._patience(client, deadline, until, now),
            )
        finally:
            self._waiting[client] -= 1
            if not self._waiting[client]:
                del self._waiting[client]

    def is_full(self, client: str, now: GateStatistics) -> bool:
        """Whether the next request of *client* finds no place, as the gate is *now*."""
        if self._shadow:
            return False
        return self._waiting[client] >= self._share or now.waiting >= self._max_waiting

    def check(self, client: str) -> None:
        """Refuse a request of *client* that would find the queue for slots full.

        For a request whose body has yet to arrive. One that passes may be refused
        later, as others may come first.

        Raises:
            ClientLimitExceeded: The client has half of the queue already.
            GateFull: All slots are taken, and the queue is full.
            GateClosed: The gate is closed as well.
        """
        now = self.gate.statistics()
        taken = now.slots is not None and now.slots_in_use >= now.slots
        if taken and now.waiting >= self._max_waiting:
            self._refuse_full(now, client)
        self._check_share(client)

    def _refuse_full(self, now: GateStatistics, client: str) -> None:
        if isinstance(self.gate, Gate):
            # It refuses, says when to retry, and counts the refusal.
            self.gate.try_admit(bytes=0, key=client).release()
        elif not self.gate.closed:
            # To ask another process, `try_admit` would hold up the event loop.
            after = self._drain_rate.retry_after(now.waiting, now.released, _now())
            what = f"gate {self.name!r} is full, and {now.waiting} requests wait for it"
            how = f"{what}; retry in {after:.1f} s"
            raise self.counted(GateFull(how, retry_after=after))

    def grow(self, lease: Lease, nbytes: int) -> bool:
        """Charge *lease* with *nbytes*, unless that takes more than the capacity."""
        if (more := nbytes - lease.bytes) > 0:
            now = self.gate.statistics()
            if now.bytes is not None and more > now.bytes - now.bytes_in_use:
                return False
        lease.settle(bytes=nbytes)
        return True

    def count_refusal(self) -> None:
        """Count a request that was refused here, or would have been."""
        self._refused += 1

    def counted(self, refusal: Refused) -> Refused:
        """Count *refusal*, tell the observer of it, and return it."""
        self.count_refusal()
        if self._emit is not None:
            reason, retry_after = refusal.reason, refusal.retry_after
            why = partial(AdmissionRefused, reason=reason, retry_after=retry_after)
            self._emit(why(gate=self.name, slots=0, bytes=0))
        return refusal

    def _check_share(self, client: str) -> None:
        if self._waiting[client] < self._share:
            return  # most come here, and a shared gate reads all workers to be asked
        now = self.gate.statistics()
        if now.waiting >= self._max_waiting:
            return  # a full queue is no client's fault, and the gate's to refuse
        if self._shadow:
            self.count_refusal()
            return
        share = self._waiting[client]
        after = self._drain_rate.retry_after(share, now.released, _now())
        what = f"This client has its share of the queue, which is {share}"
        how = f"{what}; wait until one of its requests has been served"
        raise self.counted(ClientLimitExceeded(how, retry_after=after))

    def _patience(
        self, client: str, deadline: float, until: float, gate: GateStatistics | None
    ) -> float | None:
        """Return how long *client*, which gives up at *deadline*, is kept waiting."""
        now, gate = _now(), gate or self.gate.statistics()
        longest = math.inf if self.gate.max_wait is None else self.gate.max_wait
        left = max(0.0, deadline - now)
        if not gate.waiting:
            # The first of a queue: an idle time says nothing of how fast this one is.
            self._drain_rate.restart(gate.released, now)
        elif deadline < math.inf:
            each = self._drain_rate.seconds_per_release(gate.released, now)
            if each * self._turn(client, gate.waiting) > left:
                return 0.0
        longest = min(longest, left, max(0.0, until - now))
        return None if longest == math.inf else longest

    def _turn(self, client: str, waiting: int) -> int:
        """Return the place of *client*, which has begun to wait, behind *waiting*."""
        if self.gate.order == "fifo":
            return waiting + 1
        if self.gate.order == "adaptive":
            return 1  # as the newest, perhaps
        # Each of the others comes as often before it as it has come itself.
        own = self._waiting[client]
        return sum(min(own, count) for count in self._waiting.values())


def make_lanes(
    settings: AdmissionSettings,
    nbytes: int,
    gates: Mapping[str, AnyGate],
    observer: Observer | None,
    export: Callable[[str | int], Any],
) -> dict[str, Lane]:
    """Return the lanes that divide *nbytes*, in the order a request passes them."""
    small, bodies, requests = shares(nbytes)
    limits: dict[str, dict[str, Any]] = {
        "small": {"bytes": small},
        "bodies": {"bytes": bodies},
        "requests": {"bytes": requests, "slots": settings.media_slots},
    }
    if settings.slots or "slots" in gates:
        limits["slots"] = {"slots": settings.slots}
    if unknown := gates.keys() - limits:
        raise ValueError(f"no lane {sorted(unknown)}; there are {', '.join(limits)}")
    if settings.bytes == "auto" and (given := sorted(gates.keys() - {"slots"})):
        raise ValueError(
            f"bytes='auto' resizes the lanes of this Admission alone, and gates= gives "
            f"{', '.join(given)}; give a number of bytes, or leave those gates out"
        )
    metrics = None
    if settings.metrics is not None:
        metrics = export(settings.metrics)
        observer = combine_observers(observer, metrics)
    gate: Callable[..., AnyGate] = Gate
    if settings.shared is not None:
        gate = partial(_shared, settings.shared)
    gate = partial(
        gate,
        max_waiting=settings.max_waiting,
        max_wait=settings.max_wait,
        order=settings.order,
        reserve=RESERVES[settings.order],
        enforce=not settings.shadow,
        observer=observer,
    )
    lanes = {
        name: Lane(
            gates.get(name) or gate(**limit, name=f"admission-{name}"),
            shadow=settings.shadow,
            observer=observer,
        )
        for name, limit in limits.items()
    }
    if metrics is not None:
        metrics.watch(*lanes.values())
    return lanes


def _shared(folder: str, *, name: str, **options: Any) -> AnyGate:
    return SharedGate(Path(folder, name), name=name, **options)


class ClientShares:
    """Counts the requests of each client that are in flight.

    Args:
        most: Requests that one client may have.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._in_flight: Counter[str] = Counter()
        self._entered = self._ended = 0
        self._drain_rate = DrainRate()

    def enter(self, client: str) -> Callable[[], None]:
        """Count a request of *client*; return what its end has to call, once.

        Raises:
            ClientLimitExceeded: It is one too many, and is not counted.
        """
        live, own = self._entered - self._ended, self._in_flight[client]
        if own >= self._most:
            # Any request may end next: one in so many is a request of this client.
            turns = math.ceil(live / own)
            raise TooManyInFlight(
                f"This client has {self._most} requests in flight, which is its limit; "
                f"wait until one of them has ended",
                retry_after=self._drain_rate.retry_after(turns, self._ended, _now()),
            )
        if not live:
            # An idle time says nothing of how fast requests end.
            self._drain_rate.restart(self._ended, _now())
        self._entered += 1
        self._in_flight[client] += 1
        return partial(self._leave, client)

    def _leave(self, client: str) -> None:
        self._ended += 1
        self._in_flight[client] -= 1
        if not self._in_flight[client]:
            del self._in_flight[client]


def load_report(lanes: Iterable[Lane]) -> bytes:
    """Return the value of the header that load balancers read.

    A line of text as ORCA has it (``xds.data.orca.v3.OrcaLoadReport``): the fullest
    lane, the part of all bytes that is in use, and how many requests wait.
    """
    found = [lane.statistics() for lane in lanes]
    saturation = max(each.saturation for each in found)
    limits = [each.bytes for each in found if each.bytes is not None]
    used = sum(each.bytes_in_use for each in found if each.bytes is not None)
    memory = min(1.0, used / sum(limits)) if sum(limits) else 0.0
    waiting = sum(each.waiting for each in found)
    text = (
        f"TEXT application_utilization={saturation:.4f}, mem_utilization={memory:.4f}"
    )
    return f"{text}, named_metrics.waiting={waiting}".encode()


def reporting(send: Send, lanes: Iterable[Lane]) -> Send:
    """Return ``send`` with the load of *lanes* in the head of each response."""

    def report(message: Message) -> Awaitable[None]:
        headers = message.get("headers", ())
        if message["type"] == "http.response.start" and not any(
            name.lower() == _LOAD for name, _ in headers
        ):
            headers = [*headers, (_LOAD, load_report(lanes))]
            message = {**message, "headers": headers}
        return send(message)

    return report


def _now() -> float:
    return event_loop_clock()()


class ShadowLog:
    """Says in the log that no request is refused, and how many would have been."""

    def __init__(self, lanes: Sequence[Lane]) -> None:
        self._lanes = lanes
        self._seen: dict[str, int] = {}
        self._next = -math.inf
        self._log = logging.getLogger("lifecycle")
        self._log.warning(
            "Admission refuses no request and only counts, as its setting shadow is "
            "on; turn it off to limit requests"
        )

    def summarise(self) -> None:
        """Log the counts that have changed, once a minute at most."""
        now = anyio.current_time()
        if now < self._next:
            return
        lanes = self._lanes
        counts = {lane.name: lane.statistics().over_limit for lane in lanes}
        if counts != self._seen and any(counts.values()):
            self._next = now + _SECONDS_BETWEEN_SUMMARIES
            self._seen = counts
            names = (name.removeprefix("admission-") for name in counts)
            pairs = zip(counts.values(), names, strict=True)
            shown = ", ".join(f"{count} in {name}" for count, name in pairs)
            self._log.warning("Admission would have refused or delayed %s", shown)
