"""Request bodies: how far they have come, and what they are charged."""

from __future__ import annotations

import io
import math
import sys
from collections.abc import Callable

import anyio

from lifecycle import GateClosed, GateFull, Lease
from lifecycle.lowlevel import event_loop_clock
from lifecycle_asgi.asgi_types import Message, Receive, Scope
from lifecycle_asgi.request import FRAMING, declared_length

# The first charge of a body without a declared length; it grows by doubling.
FIRST_CHARGE = 65536
_RETRY_SECONDS = 1.0


class BodyTooLarge(Exception):
    """Raised by ``receive`` under `BodyLimit` when a body is larger than the limit.

    Attributes:
        limit: Maximum number of bytes.
    """

    def __init__(self, limit: int) -> None:
        super().__init__(f"the request body is larger than {limit} bytes")
        self.limit = limit


class BodyTooSlow(Exception):
    """Raised by ``receive`` under `BodyLimit` when a body does not arrive in time.

    Attributes:
        limit: Maximum number of seconds.
    """

    def __init__(self, limit: float) -> None:
        super().__init__(f"the request body took longer than {limit:g} s")
        self.limit = limit


class ClientLeft(Exception):
    """The client disconnected before its body was complete."""


class RequestBody:
    """A server's ``receive``, and how far the body has come within its limits.

    Args:
        receive: The server's.
        timeout: Seconds for the whole body, from the first `receive`.
        max_bytes: Maximum size of the body, for `receive`.

    Attributes:
        complete: The last part has come, or the client has left.
        timeout: With ``None``, the rest may take as long as it likes.
    """

    __slots__ = ("_deadline", "_max_bytes", "_read", "_receive", "complete", "timeout")

    def __init__(
        self,
        receive: Receive,
        *,
        timeout: float | None = None,
        max_bytes: int = sys.maxsize,
    ) -> None:
        self._receive = receive
        self._deadline: float | None = None
        self._max_bytes = max_bytes
        self._read = 0
        self.timeout = timeout
        self.complete = False

    async def receive(self) -> Message:
        """Return the next message.

        Raises:
            BodyTooSlow: It has not come in time. None is lost.
            BodyTooLarge: The body is larger than *max_bytes*.

        Cancellation:
            As for the server's ``receive``.
        """
        if self._read <= self._max_bytes:
            message = await self._take_in_time()
            self._read += len(message.get("body", b""))
            if self._read <= self._max_bytes:
                return message
            del message  # a traceback has this frame
        raise BodyTooLarge(self._max_bytes)

    async def _take_in_time(self) -> Message:
        while (deadline := self.deadline()) < math.inf:
            with anyio.CancelScope(deadline=deadline):
                return await self.take()
        return await self.take()

    def deadline(self) -> float:
        """Return until when a message is in time; raise `BodyTooSlow` if none is."""
        now, timeout = event_loop_clock()(), self.timeout
        if self._deadline is None:
            self._deadline = math.inf if timeout is None else now + timeout
        if timeout is None or self.complete:  # a disconnect may come late
            return math.inf
        if now >= self._deadline:
            raise BodyTooSlow(timeout)
        return self._deadline

    async def take(self) -> Message:
        """Return the next message, whenever it comes.

        Cancellation:
            As for the server's ``receive``.
        """
        message = await self._receive()
        if not message.get("more_body", False):  # or the client has left
            self.complete = True
        return message

    def is_expected(self, scope: Scope) -> bool:
        """Whether there is more to come on a connection of this request alone."""
        if self.complete or not scope.get("http_version", "1.1").startswith("1"):
            return False  # a stream of HTTP/2 ends without the others
        if self._deadline is not None:  # it has been asked for
            return True
        headers = {name: value.lower() for name, value in scope["headers"]}
        framed = not headers.keys().isdisjoint(FRAMING)
        if not framed or declared_length(scope) == 0:
            return False
        return headers.get(b"expect") != b"100-continue"

    async def drop_rest(self, max_bytes: int) -> None:
        """Read the rest and keep nothing, up to *max_bytes*.

        Cancellation:
            Passes through.
        """
        dropped = 0
        while not self.complete and dropped <= max_bytes:
            dropped += len((await self.take()).get("body", b""))


class BodyReader:
    """Reads one body into memory.

    A complete body is charged with a multiple of its length, since a server holds it
    as bytes, as text and parsed. A body is charged with its declared length, until it
    turns out to be slow: then with what has arrived, so that it keeps out no others.
    What arrives later is charged if there are bytes left, and refused if not. Waiting
    for bytes here, while holding some, could be a deadlock.

    Args:
        body: Of the request; a cancelled wait for it loses no message.
        grow: Charges a lease with more bytes, and returns whether there are as many.
        lease: Charged with the body.
        declared: Declared length, or ``None``.
        copies: Bytes charged for each byte of the body.
        max_body: Maximum length.
        slow_after: Seconds after which an incomplete body is slow.
    """

    def __init__(
        self,
        body: RequestBody,
        grow: Callable[[Lease, int], bool],
        lease: Lease,
        *,
        declared: int | None,
        copies: int,
        max_body: int,
        slow_after: float,
    ) -> None:
        self._body = body
        self._grow = grow
        self._lease = lease
        self._copies = copies
        self._max_body = max_body
        self._metered = declared is None
        self._advice = "" if declared is not None else ", with a declared length"
        # Many small bodies that are slow leave room for others of their size.
        self._slow_charge = min(FIRST_CHARGE, (declared or 0) // 8)
        self._read = 0
        self._slow_at = math.inf if self._metered else event_loop_clock()() + slow_after
        self._stopped = False
        self._waiting: anyio.CancelScope | None = None
        self._first = b""
        self._rest: io.BytesIO | None = None

    def stop(self) -> None:
        """Read no further; `read` raises `GateClosed`. Idempotent."""
        self._stopped = True
        if self._waiting is not None:
            self._waiting.cancel()

    async def read(self) -> bytes:
        """Return the whole body.

        Raises:
            BodyTooLarge: It is larger than the limit.
            BodyTooSlow: It took too long.
            GateFull: It has no declared length, or is slow, and the bytes are taken.
            GateClosed: `stop` was called.
            ClientLeft: The client disconnected.

        Cancellation:
            What was read is dropped.
        """
        more = True
        while more:
            chunk, more = await self._next()
            self._add(chunk)
            del chunk
            if self._read > self._max_body:
                raise BodyTooLarge(self._max_body)
            self._charge(complete=not more)
        return self.take()

    def take(self) -> bytes:
        """Return what has arrived, and keep none of it."""
        first, self._first = self._first, b""
        rest, self._rest = self._rest, None
        return first if rest is None else rest.getvalue()

    def _add(self, chunk: bytes) -> None:
        # Never joined at once: the event loop would wait, and memory be needed twice. A
        # buffer gives its bytes away without a copy.
        if not self._read:
            self._first = chunk
        elif chunk:
            if self._rest is None:
                self._rest = io.BytesIO()
                self._rest.write(self._first)
                self._first = b""
            self._rest.write(chunk)
        self._read += len(chunk)

    async def _next(self) -> tuple[bytes, bool]:
        while not self._stopped:
            until = min(self._slow_at, self._body.deadline())
            with anyio.CancelScope(deadline=until) as self._waiting:
                message = await self._body.take()
                if message["type"] == "http.disconnect":
                    raise ClientLeft
                return message.get("body", b""), message.get("more_body", False)
            if until == self._slow_at and not self._stopped:
                self._release_rest()
        raise GateClosed("the server reads no more bodies; ask another one")

    def _release_rest(self) -> None:
        """From now on, charge what has arrived."""
        self._metered, self._slow_at = True, math.inf
        arrived = self._copies * (self._read + self._slow_charge)
        self._lease.settle(bytes=min(arrived, self._lease.bytes))

    def _charge(self, *, complete: bool) -> None:
        charges = [self._read]
        if not complete:
            if anyio.current_time() >= self._slow_at:
                self._release_rest()
            if not self._metered or self._copies * self._read <= self._lease.bytes:
                return
            charges.insert(0, min(2 * self._read, self._max_body))
        grow, lease = self._grow, self._lease
        if not any(grow(lease, self._copies * each) for each in charges):
            raise GateFull(
                "the bytes for the rest of the body are taken; retry in "
                f"{_RETRY_SECONDS:g} s{self._advice}",
                retry_after=_RETRY_SECONDS,
            )
