"""Admission of request bodies, by the bytes that they take while they arrive."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

import anyio

from lifecycle import Gate, GateFull, Lease, Refused
from lifecycle_asgi import BodyTooLarge, request_of
from lifecycle_asgi.lanes import Lane
from lifecycle_asgi.limits import Answer
from lifecycle_asgi.responses import send_response
from lifecycle_engine.api.request_body import SMALL_BYTES

# The first charge of a body without a declared length, and what may arrive before the
# next charge of a slow one.
_STEP: Final = 16384
# Bytes a second; a body that is slower keeps no bytes from others that wait.
_FLOOR: Final = 2**20
# Seconds that every body gets, and between two looks at its speed.
_GRACE: Final = 0.5
_RETRY_SECONDS: Final = 1.0


class BodyAdmission:
    """Answers 413 to a body larger than a limit, and 503 where all bytes are taken.

    Small bodies have a lane of their own, which large ones cannot fill. In each lane,
    clients share the bytes and the queue.

    A body is charged with its declared length before it is read. If it arrives slowly
    while others wait, it is charged with what has arrived, and what arrives later only
    if there are bytes left. So it keeps out no others, however much it declares. The
    lease lasts as long as the request, or until `RequestScope.release_body`.

    Args:
        app: The application to wrap.
        large: Gate over the bytes of large bodies.
        small: Gate over the bytes of small ones.
        max_bytes: Maximum size of one body.
        client: Returns the client of a request.
        enforce: Whether a slow body is refused where the bytes are taken.
        answer: Returns status, headers and body of a refusal.
    """

    def __init__(
        self,
        app: Any,
        *,
        large: Gate,
        small: Gate,
        max_bytes: int,
        client: Callable[[Any], bytes],
        enforce: bool = True,
        answer: Answer,
    ) -> None:
        self._app = app
        self._large, self._small = Lane(large), Lane(small)
        self._max_bytes = max_bytes
        self._client_of = client
        self._enforce = enforce
        self._answer = answer

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Serve one connection.

        Cancellation:
            Passes through; a request that waits leaves its queue.
        """
        declared = _declared_length(scope) if scope["type"] == "http" else 0
        if declared == 0:
            await self._app(scope, receive, send)
            return
        is_small = declared is not None and declared <= SMALL_BYTES
        lane = self._small if is_small else self._large
        body = AdmittedBody(
            receive, lane, declared, self._max_bytes, enforce=self._enforce
        )
        request = request_of(scope)
        request.body = body
        refusal: BodyTooLarge | Refused | None = None
        try:
            with request.phase("queue"):
                await body.admit(self._client_of(scope).hex())
        except (BodyTooLarge, Refused) as error:
            refusal = error
        if refusal is not None:
            await send_response(send, self._answer(scope, refusal))
            return
        try:
            await self._app(scope, body.receive, send)
        finally:
            body.release()


class AdmittedBody:
    """One body, and what it is charged with. The application answers its refusals.

    Args:
        receive: Of the server.
        lane: The lane that it is admitted in.
        declared: Declared length; ``None`` without one.
        max_bytes: Maximum size.
        enforce: Whether it is refused where the bytes are taken.
    """

    __slots__ = (
        "_began",
        "_declared",
        "_enforce",
        "_lane",
        "_lease",
        "_look_at",
        "_max_bytes",
        "_metered",
        "_read",
        "_receive",
    )

    def __init__(
        self,
        receive: Any,
        lane: Lane,
        declared: int | None,
        max_bytes: int,
        *,
        enforce: bool = True,
    ) -> None:
        self._enforce = enforce
        self._receive = receive
        self._lane = lane
        self._declared = declared
        self._max_bytes = max_bytes
        self._metered = declared is None
        self._lease: Lease | None = None
        self._read = 0
        self._began = self._look_at = 0.0

    async def admit(self, client: str) -> None:
        """Wait for the bytes that it declares.

        Raises:
            BodyTooLarge: It is larger than the limit.
            Refused: As from `Lane.admit`.

        Cancellation:
            As for `Gate.admit`.
        """
        size = self._declared or min(_STEP, self._max_bytes or 1)
        if size > self._max_bytes:
            raise BodyTooLarge(self._max_bytes)
        self._lease = await self._lane.admit(size, client)
        self._began = anyio.current_time()
        self._look_at = self._began + _GRACE

    async def receive(self) -> Any:
        """Return the next message.

        Raises:
            BodyTooLarge: It is larger than the limit.
            GateFull: It arrives slowly, and the bytes are taken.

        Cancellation:
            No message is lost.
        """
        message = await self._next()
        self._read += len(message.get("body", b""))
        if self._read > self._max_bytes:
            raise BodyTooLarge(self._max_bytes)
        if not message.get("more_body", False):
            self._look_at = float("inf")  # complete; a disconnect may come late
            if self._lease is not None:
                self._lease.settle(bytes=self._read)
        elif self._lease is not None:
            self._charge()
        return message

    def release(self) -> None:
        """Release the lease. Idempotent."""
        lease, self._lease = self._lease, None
        if lease is not None:
            lease.release()

    async def _next(self) -> Any:
        while True:
            with anyio.CancelScope(deadline=self._look_at):
                return await self._receive()
            self._look()

    def _look(self) -> None:
        """Give up the bytes that did not arrive yet, if others wait for them."""
        now = anyio.current_time()
        if now < self._look_at:
            return
        self._look_at = now + _GRACE
        lane, lease = self._lane, self._lease
        slow = self._read < _FLOOR * (now - self._began)
        if lease is None or self._metered or not slow:
            return
        if lane.gate.statistics().waiting:
            self._metered, self._look_at = True, float("inf")
            lease.settle(bytes=min(self._read + _STEP, lease.bytes))

    def _charge(self) -> None:
        self._look()
        lane, lease = self._lane, self._lease
        if lease is None or not self._metered or self._read <= lease.bytes:
            return
        for size in (min(2 * self._read, self._max_bytes), self._read):
            if lane.grow(lease, size):
                return
        if not self._enforce:
            lease.settle(bytes=self._read)
            return
        raise GateFull(
            f"the bytes for the rest of the body are taken; retry in "
            f"{_RETRY_SECONDS:g} s, and send it faster",
            retry_after=_RETRY_SECONDS,
        )


def _declared_length(scope: Any) -> int | None:
    """Return the declared length; ``None`` for one that is not known in advance."""
    if any(name == b"transfer-encoding" for name, _ in scope["headers"]):
        return None
    for name, value in scope["headers"]:
        if name == b"content-length":
            with suppress(ValueError):
                return max(int(value), 0)
    return 0
