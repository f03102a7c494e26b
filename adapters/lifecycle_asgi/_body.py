"""Refuse a request body that there is no room for before it is in memory."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import suppress

import anyio

from lifecycle import Gate, Lease, Refused
from lifecycle_asgi._refusals import (
    Answer,
    BodyTooLarge,
    BodyTooSlow,
    Refusal,
    openai_answer,
    say,
)
from lifecycle_asgi._request import KEY, RequestScope
from lifecycle_asgi._types import App, Message, Receive, Scope, Send

_REFUSALS = (BodyTooLarge, BodyTooSlow, Refused)


class BodyLimit:
    """Answers 413 to bodies larger than a limit, and 503 where all of them are.

    A declared length is refused before anything is read and before the
    application is called. An undeclared one is metered while it is read: as soon
    as it passes the limit, 413 is answered unless the response has begun, and the
    application's ``receive`` raises `BodyTooLarge`. Whatever it then still sends
    is dropped, and the exception ends here.

    With a gate, the bytes of all bodies are bounded, too. A declared length is
    admitted before anything is read, an undeclared one with the first bytes of the
    body. Whoever is refused gets 503 with ``Retry-After``. The lease lasts as long
    as the request, or until `RequestScope.release_body`: frameworks keep bodies.

    A body that trickles keeps its room for as long as it likes, unless there is a
    *timeout*. Then 408 is answered, and ``receive`` raises `BodyTooSlow`.

    The connection is not closed: a client that is still sending would be reset
    and might never read the answer, so the server is left to read and drop the
    rest.

    Args:
        app: The application to wrap.
        max_bytes: The largest body to let through.
        gate: Admits the bytes of bodies.
        timeout: Seconds for all of a body, from when the application first asks for
            it; by default there is no bound but the server's own.
        answer: Says no in the form of the application's own errors, given the scope
            and why. By default it is JSON in the form of OpenAI's.
    """

    def __init__(
        self,
        app: App,
        *,
        max_bytes: int,
        gate: Gate | None = None,
        timeout: float | None = None,
        answer: Answer | None = None,
    ) -> None:
        if not max_bytes >= 0:  # nor NaN, below which everything would be
            message = f"max_bytes must not be negative, got {max_bytes}"
            raise ValueError(message)
        if timeout is not None and not timeout > 0:
            raise ValueError(f"timeout must be above 0 s or None, got {timeout}")
        self._app = app
        self._timeout = timeout
        self._max_bytes = max_bytes
        self._gate = gate
        self._answer = answer or openai_answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection.

        Cancellation:
            Passes through; whoever waits at the gate leaves its line.
        """
        if scope["type"] != "http":
            await self._app(scope, receive, send)
        elif (declared := _declared(scope)) > self._max_bytes:
            await say(send, self._answer(scope, BodyTooLarge(self._max_bytes)))
        else:
            await self._metered(scope, receive, send, declared)

    async def _metered(
        self, scope: Scope, receive: Receive, send: Send, declared: int
    ) -> None:
        async def refuse(refusal: Refusal) -> None:
            await say(send, self._answer(scope, refusal))

        clock = _Clock(receive, self._timeout)
        meter = _Meter(clock.receive, send, refuse, self._max_bytes, self._gate)
        request = scope.get(KEY)
        if not isinstance(request, RequestScope):
            request = RequestScope()  # of nobody
        request.body = meter
        try:
            if declared:
                with request.phase("queue"):
                    await meter.admit(declared)
            await self._app(scope, meter.receive, meter.send)
        except _REFUSALS:
            if not meter.refused:
                raise
        except BaseExceptionGroup as group:  # of an application that reads in a task
            if not meter.refused:
                raise
            _, rest = group.split(_REFUSALS)
            if rest is not None:
                raise rest from None
        finally:
            meter.release()


class _Clock:
    """Times one body."""

    __slots__ = ("_receive", "_timeout", "_until")

    def __init__(self, receive: Receive, timeout: float | None) -> None:
        self._receive = receive
        self._timeout = timeout
        self._until: float | None = None

    async def receive(self) -> Message:
        limit = self._timeout
        if limit is None:
            return await self._receive()
        if self._until is None:
            self._until = anyio.current_time() + limit
        with anyio.CancelScope(deadline=self._until):
            message = await self._receive()
            if not message.get("more_body", False):
                self._timeout = None  # it is there, and what comes next may take long
            return message
        raise BodyTooSlow(limit)


class _Meter:
    """Counts one body, and takes the response over if it is refused."""

    __slots__ = (
        "_gate",
        "_lease",
        "_limit",
        "_over",
        "_read",
        "_receive",
        "_refuse",
        "_send",
        "_started",
        "refused",
    )

    def __init__(
        self,
        receive: Receive,
        send: Send,
        refuse: Callable[[Refusal], Awaitable[None]],
        limit: int,
        gate: Gate | None,
    ) -> None:
        self._receive = receive
        self._send = send
        self._refuse = refuse
        self._limit = limit
        self._gate = gate
        self._lease: Lease | None = None
        self._read = 0
        self._over = False
        self._started = False
        self.refused = False

    async def admit(self, size: int) -> None:
        """Have *size* bytes admitted, if there is a gate.

        Raises:
            Refused: They are not; the client has been told.
        """
        if self._gate is None:
            return
        try:
            self._lease = await self._gate.admit(bytes=size)
        except Refused as refusal:
            await self._answer(refusal)  # noqa: ASYNC120 - whoever is cancelled has left
            raise

    def release(self) -> None:
        """The body is gone: let the next one in. Idempotent."""
        # From here on it counts no more: what is still to come was never asked for.
        self._gate = None
        lease, self._lease = self._lease, None
        if lease is not None:
            lease.release()

    async def receive(self) -> Message:
        if self._over:
            raise BodyTooLarge(self._limit)
        try:
            message = await self._receive()
        except BodyTooSlow as late:
            await self._answer(late)  # noqa: ASYNC120 - whoever is cancelled has left
            raise
        self._read += len(message.get("body", b""))
        if self._read > self._limit:
            del message
            self._over = True
            refusal = BodyTooLarge(self._limit)
            await self._answer(refusal)
            raise refusal
        if self._lease is not None and self._read > self._lease.bytes:
            self._lease.settle(bytes=self._read)
        elif self._lease is None and self._read:
            await self.admit(self._read)
        return message

    async def send(self, message: Message) -> None:
        if self.refused:
            return
        self._started = True
        await self._send(message)

    async def _answer(self, refusal: Refusal) -> None:
        if not self._started:
            self._started = self.refused = True
            await self._refuse(refusal)


def _declared(scope: Scope) -> int:
    """The declared length; 0 if there is none, or none that is a number."""
    for name, value in scope["headers"]:
        if name == b"content-length":
            with suppress(ValueError):
                return max(int(value), 0)
    return 0
