"""Admission control: where a request is admitted, queued or refused.

A generating request meets these checks in this order. Each one is cheaper than what
it protects.

1. `FairAcceptMiddleware`: requests begin one at a time, addresses in turn.
2. `check_head`: without an engine, or with a compressed body, refused by its head.
3. `lifecycle_asgi.Admission`: beyond the limit of its client, and while the queue is
   full, refused by its head; then bytes of its body, bytes of its images until the
   engine has read them, and a slot until it ends; clients in turn.

Nothing else in the server decides about admission.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Final

import anyio
import anyio.lowlevel

from lifecycle import Gate
from lifecycle_asgi import client_address
from lifecycle_engine.errors import bad_request, not_started
from lifecycle_engine.server.service import Service

OPERATIONS: Final = {
    "/v1/chat/completions": "chat",
    "/v1/responses": "responses",
    "/v1/messages": "messages",
    "/generate": "generate",
}
"""Operation names for metrics and logs, by path. Other paths are not reported."""

PROBES: Final = frozenset({"/health", "/ready"})
"""Paths that orchestrators and monitoring poll."""

# Header values that leave a body as it is.
_UNCOMPRESSED: Final[Mapping[bytes, tuple[bytes, ...]]] = {
    b"content-encoding": (b"", b"identity"),
    b"transfer-encoding": (b"chunked",),
}
# Hash buckets of client addresses.
_ADDRESS_BUCKETS: Final = 64
# Seconds in which one request may begin without waiting; uvloop's clock has
# millisecond resolution.
_UNQUEUED_INTERVAL: Final = 0.001


def operation_of(scope: Any) -> str | None:
    """Return the operation of an ASGI scope; ``None`` if it is not a generating one."""
    return OPERATIONS.get(scope["path"]) if scope["method"] == "POST" else None


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


async def check_head(service: Service, scope: Any) -> None:
    """Refuse what no engine could serve, by the head of a generating request.

    Raises:
        ApiError: Its body is compressed, or the application runs without its lifespan.
        EngineLost: No engine is ready, and none is being started.

    Cancellation:
        At any time.
    """
    refuse_compressed(scope)
    if not service.started:
        raise not_started()
    if not service.engine.ready:  # raises if none is being started
        with anyio.move_on_after(0):
            await service.engine.wait_ready()


class FairAcceptMiddleware:
    """Lets one request begin at a time; other ready tasks run in between.

    An event loop runs all that is ready before it polls again. If two hundred requests
    arrive at once, their first steps alone would take tens of milliseconds, even if
    each is only refused, and all streams would stall meanwhile. `Admission` by itself
    refuses as many, but beside such a burst a stream then waits longer for its next
    token, and another client several times as long for its answer. Client addresses
    take turns, so a burst from one address delays requests of others by one step.
    Addresses are hashed into a fixed number of buckets, which bounds the cost of a turn
    (stochastic fair queueing, McKenney 1990).

    A request that arrives alone does not wait: each poll of the loop releases the
    interpreter lock, and with busy threads it takes long to get it back. Probes have a
    queue of their own, since a proxy's probes come from the address of all its clients.
    """

    def __init__(
        self, app: Any, *, clock: Callable[[], float] = anyio.current_time
    ) -> None:
        self._app = app
        self._clock = clock
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
        await self._app(scope, receive, send)

    def _begins_unqueued(self, gate: Gate) -> bool:
        now = self._clock()
        busy = gate.statistics().slots_in_use
        if now - self._last_unqueued < _UNQUEUED_INTERVAL or busy:
            return False
        self._last_unqueued = now
        return True
