"""Admission control: where a request is admitted, queued or refused.

A generating request meets these checks in this order. Each one is cheaper than what
it protects.

1. `FairAcceptMiddleware`: requests begin one at a time, addresses in turn.
2. `EarlyRefusal`: while the server is full, requests are refused by their heads.
3. `lifecycle_asgi.ClientLimit`: concurrent requests of one client.
4. `lifecycle_asgi.BodyLimit`: bytes of all request bodies.
5. `Admission.refuse_when_full`: as 2, for requests that had to pass 3 and 4 first.
6. `Admission.admit_request`: a slot for the parsed request, until it ends.
7. `Admission.admit_payload`: bytes for its images, until the engine has read them.

Nothing else in the server decides about admission; the gates themselves are
`lifecycle.Gate`.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from types import MappingProxyType
from typing import Any, Final

import anyio
import anyio.lowlevel

from lifecycle import Gate, Lease, Refused
from lifecycle.events import Observer, guarded
from lifecycle_asgi import client_address, record_refusal
from lifecycle_asgi.refusals import ApiError
from lifecycle_asgi.request import declared_length
from lifecycle_engine.api.base import ApiFormat, ResponseWriter
from lifecycle_engine.api.request_body import request_id
from lifecycle_engine.errors import INTERNAL, bad_request, to_api_error

OPERATIONS: Final = {
    "/v1/chat/completions": "chat",
    "/v1/responses": "responses",
    "/v1/messages": "messages",
    "/generate": "generate",
}
"""Operation names for metrics and logs, by path. Other paths are not reported."""

PROBES: Final = frozenset({"/health", "/ready", "/metrics"})
"""Paths that orchestrators and monitoring poll."""

# Request headers of the OpenAI and Anthropic SDKs: the client's timeout in seconds.
_TIMEOUT_HEADERS: Final = (b"x-stainless-read-timeout", b"x-stainless-timeout")
# Seconds; a shorter time says little about how fast a gate drains.
_DRAIN_WINDOW: Final = 1.0
# Seconds that a place is reserved for an arriving body. A body sent together with its
# head is read long before; a slow one must not keep other requests out.
_ARRIVAL_SECONDS: Final = 0.05
# Header values that leave a body as it is.
_UNCOMPRESSED: Final[Mapping[bytes, tuple[bytes, ...]]] = MappingProxyType(
    {
        b"content-encoding": (b"", b"identity"),
        b"transfer-encoding": (b"chunked",),
    }
)
# Hash buckets of client addresses.
_ADDRESS_BUCKETS: Final = 64
# Seconds in which one request may begin without waiting; uvloop's clock has
# millisecond resolution.
_UNQUEUED_INTERVAL: Final = 0.001

Refuse = Callable[[Any, Any], Awaitable[bool]]


def operation_of(scope: Any) -> str | None:
    """Return the operation of an ASGI scope; ``None`` if it is not a generating one."""
    return OPERATIONS.get(scope["path"]) if scope["method"] == "POST" else None


def client_timeout(scope: Any) -> float:
    """Seconds until the client of an ASGI scope gives up; infinite if not stated."""
    timeouts = [math.inf]
    for name, value in scope["headers"]:
        if name in _TIMEOUT_HEADERS:
            with suppress(ValueError):
                timeouts.append(float(value))
    return min(timeout for timeout in timeouts if timeout > 0)


def refuse_compressed(scope: Any) -> None:
    """Refuse a compressed body, which would pass every limit on its size.

    Raises:
        ApiError: 400 for any ``content-encoding`` but ``identity``, and any
            ``transfer-encoding`` but ``chunked``.
    """
    for name, value in scope["headers"]:
        if name in _UNCOMPRESSED and value.strip().lower() not in _UNCOMPRESSED[name]:
            raise bad_request(
                "Compressed bodies are not supported; send it without "
                "content-encoding, and with no transfer-encoding but chunked",
                param=name.decode(),
                code="unsupported_encoding",
            )


class Admission:
    """Decides which requests are admitted, by the gates of a server.

    Args:
        in_flight: Gate over requests, until they end.
        payloads: Gate over the bytes of payloads, until the engine has read them.

    Attributes:
        pending: Requests that passed `refuse_when_full` and are still being read.
    """

    __slots__ = ("_estimators", "pending")

    def __init__(self, *, in_flight: Gate, payloads: Gate) -> None:
        self.pending = PendingArrivals(in_flight)
        self._estimators = {
            "request": WaitEstimator(in_flight),
            "payload": WaitEstimator(payloads),
        }

    def refuse_when_full(self) -> None:
        """Refuse a request that would be refused once its body has arrived.

        Raises:
            GateFull: The queue is full; the refusal is counted by the gate.
            GateClosed: The gate is closed as well.
        """
        self.pending.refuse_when_full()

    async def admit_request(self, *, deadline: float) -> Lease:
        """Admit a request whose client gives up at *deadline*, by the loop's clock.

        Raises:
            Refused: As from `Gate.admit`.

        Cancellation:
            As for `Gate.admit`.
        """
        return await self._admit(self._estimators["request"], deadline)

    async def admit_payload(self, size: int, *, deadline: float) -> Lease:
        """Admit *size* bytes of a request whose client gives up at *deadline*.

        Raises:
            Refused: As from `Gate.admit`.

        Cancellation:
            As for `Gate.admit`.
        """
        return await self._admit(self._estimators["payload"], deadline, size)

    async def _admit(
        self, estimator: WaitEstimator, deadline: float, size: int = 0
    ) -> Lease:
        # A request that would be admitted too late does not wait: it is admitted now
        # or refused.
        if anyio.current_time() + estimator.wait() > deadline:
            return await estimator.gate.admit(bytes=size, max_wait=0)
        return await estimator.gate.admit(bytes=size)


class WaitEstimator:
    """Estimates how long a new request will wait at a gate, from its drain rate.

    The estimate of ``Retry-After`` in `Gate` is another one: it is sampled at
    refusals, jittered and bounded, while this one is read at each admission and is 0
    while no request waits.

    Args:
        gate: The gate to watch.
        clock: Monotonic seconds.
    """

    __slots__ = ("_clock", "_interval", "_released", "_since", "gate")

    def __init__(
        self, gate: Gate, clock: Callable[[], float] = anyio.current_time
    ) -> None:
        self.gate = gate
        self._clock = clock
        self._since: float | None = None
        self._released = 0
        self._interval = 0.0

    def wait(self) -> float:
        """Return seconds; 0 while the queue is empty or nothing is known yet."""
        now, gate = self._clock(), self.gate.statistics()
        if self._since is None or not gate.waiting:
            # An idle gate says nothing about its drain rate under load.
            self._since, self._released = now, gate.released
            return 0.0
        window, departures = now - self._since, gate.released - self._released
        if departures and window >= _DRAIN_WINDOW:
            self._interval = window / departures
            self._since, self._released = now, gate.released
        elif window > self._interval and not departures:
            self._interval = window  # no departure for at least this long
        return self._interval * (gate.waiting + 1)


class PendingArrivals:
    """Counts admitted requests whose bodies are still arriving.

    Requests reach the gate after their bodies have been read and parsed. If several
    requests arrive while one place is free, only one of them will get it, so a place
    is reserved for a moment for each request that was let through, and the others are
    refused before their bodies are read.

    Args:
        gate: The gate over requests.
        clock: Monotonic seconds.
    """

    __slots__ = ("_clock", "_expiry", "_gate")

    def __init__(
        self, gate: Gate, clock: Callable[[], float] = anyio.current_time
    ) -> None:
        self._gate = gate
        self._clock = clock
        self._expiry: dict[object, float] = {}  # ordered by time

    @property
    def full(self) -> bool:
        """Whether a request that arrives now would be refused by the gate.

        A request that may wait in the queue, or fits now, is let through; the gate
        decides once the body has arrived.
        """
        now = self._gate.statistics()
        if now.max_waiting is None:
            return False
        free = math.inf if now.slots is None else now.slots - now.slots_in_use
        queue_places = now.max_waiting - now.waiting
        return queue_places + (0 if now.waiting else max(free, 0)) <= self._count()

    def refuse_when_full(self) -> None:
        """Refuse a request that the gate would refuse.

        Raises:
            GateFull: There is no place; the refusal is counted by the gate.
            GateClosed: The gate is closed as well.
        """
        if self.full:
            # Ask for one slot more than is pending: the gate refuses, and says when to
            # retry. More slots than the gate has would be refused for good.
            slots = max(self._gate.statistics().slots or 0, 1)
            self._gate.try_admit(slots=min(self._count() + 1, slots)).release()

    def add(self, request: object) -> None:
        """Reserve a place for *request*, which was let through."""
        self._expiry[request] = self._clock() + _ARRIVAL_SECONDS

    def discard(self, request: object) -> None:
        """Drop the reservation: the request has arrived or failed. Idempotent."""
        self._expiry.pop(request, None)

    def _count(self) -> int:
        now = self._clock()
        while self._expiry and self._expiry[first := next(iter(self._expiry))] <= now:
            del self._expiry[first]
        return len(self._expiry)


class EarlyRefusal:
    """Refuses generating requests by their heads while the server is full.

    Under a large overload most requests end here, on the same event loop that writes
    the answers of admitted requests, so it must be cheap. The answer is the one that
    `GenerateEndpoint` would give; whatever is uncertain is left to that.

    Args:
        pending: Requests whose bodies are arriving.
        formats: API formats by path.
        body_bytes: Maximum size of a body. A larger one gets another refusal.
        observer: Receives the events of refused requests.
    """

    def __init__(
        self,
        pending: PendingArrivals,
        formats: Mapping[str, ApiFormat],
        *,
        body_bytes: int,
        observer: Observer | None,
    ) -> None:
        self._pending = pending
        self._formats = formats
        self._body_bytes = body_bytes
        self._emit = guarded(observer)

    async def __call__(self, scope: Any, send: Any) -> bool:
        """Refuse the request of an ASGI scope; returns whether it was refused.

        Cancellation:
            The answer may be cut. The request counts as refused all the same.
        """
        if scope["method"] != "POST" or not self._pending.full:
            return False
        api = self._formats.get(scope["path"])
        if api is None or (declared_length(scope) or 0) > self._body_bytes:
            return False
        writer = ResponseWriter(send, api)
        try:
            writer.request_id = request_id(scope)
            refuse_compressed(scope)
            self._pending.refuse_when_full()
        except Refused as refusal:
            problem = to_api_error(refusal) or INTERNAL
        except ApiError:
            return False
        else:
            return False
        operation = operation_of(scope)
        if operation is not None and self._emit is not None:
            record_refusal(self._emit, operation, scope, api.error(problem, None)[0])
        with suppress(OSError):  # some servers raise it when the client has left
            await writer.error(problem)
        return True


async def _refuse_none(scope: Any, send: Any) -> bool:  # noqa: ARG001
    return False


class FairAcceptMiddleware:
    """Lets one request begin at a time; other ready tasks run in between.

    An event loop runs all that is ready before it polls again. If two hundred requests
    arrive at once, their first steps alone would take tens of milliseconds, even if
    each is only refused, and all streams would stall meanwhile. Client addresses take
    turns, so a burst from one address delays requests of others by one step. Addresses
    are hashed into a fixed number of buckets, which bounds the cost of a turn
    (stochastic fair queueing, McKenney 1990).

    A request that arrives alone does not wait: each poll of the loop releases the
    interpreter lock, and with busy threads it takes long to get it back. Probes have a
    queue of their own, since a proxy's probes come from the address of all its clients.

    Args:
        app: The application to wrap. A request has begun when it first waits.
        refuse: Called with the scope and ``send`` before the application; returns
            whether it has refused the request.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        app: Any,
        refuse: Refuse = _refuse_none,
        *,
        clock: Callable[[], float] = anyio.current_time,
    ) -> None:
        self._app = app
        self._clock = clock
        self._refuse = refuse
        self._requests = Gate(slots=1, order="fair", name="accept")
        self._probes = Gate(slots=1, order="fair", name="accept_probes")
        self._last_unqueued = -math.inf

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Serve one connection.

        Cancellation:
            Passes through; a waiting request leaves the queue.
        """
        if scope["type"] == "http":
            # Some servers append trailers to their list, in the time of this wait, too.
            scope["headers"] = list(scope["headers"])
            gate = self._probes if scope["path"] in PROBES else self._requests
            if not self._begins_unqueued(gate):
                bucket = hash(client_address(scope)) % _ADDRESS_BUCKETS
                with await gate.admit(key=str(bucket)):
                    await anyio.lowlevel.checkpoint()
            # After the turn: the answer may wait for a client that does not read.
            if await self._refuse(scope, send):
                return
        await self._app(scope, receive, send)

    def _begins_unqueued(self, gate: Gate) -> bool:
        now = self._clock()
        busy = gate.statistics().slots_in_use
        if now - self._last_unqueued < _UNQUEUED_INTERVAL or busy:
            return False
        self._last_unqueued = now
        return True
