"""The limit on one request body, and who the client of a request is."""

from __future__ import annotations

import hashlib
import ipaddress
import secrets
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import suppress
from typing import Any, Final

from lifecycle_asgi.asgi_types import App, Message, Receive, Scope, Send
from lifecycle_asgi.body import BodyTooLarge, BodyTooSlow, RequestBody
from lifecycle_asgi.refusals import Refusal, refusal_response
from lifecycle_asgi.request import declared_length, keep_head
from lifecycle_asgi.responses import MAX_UNACCEPTABLE, Refusing, Response

Answer = Callable[[Scope, Refusal], Response]
_REFUSALS: Final = (BodyTooLarge, BodyTooSlow)
_LOCAL_NAMES: Final = frozenset({"localhost", "ip6-localhost"})


def is_loopback(host: str) -> bool:
    """Whether *host* names this machine for itself; no name is looked up."""
    if host in _LOCAL_NAMES:
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return bool((mapped or address).is_loopback)


def client_address(scope: Scope) -> bytes:
    """Return the network of a client: its IPv4 address, or the /64 of its IPv6 address.

    It is the peer address of the connection. Behind a proxy that is the proxy, unless
    the server trusts the proxy's headers (uvicorn's ``forwarded_allow_ips``). A client
    that can choose its own address, or has more than one /64, can evade a limit.
    """
    client = scope.get("client")
    if not client:
        return b""
    host = str(client[0])
    if ":" not in host:
        return host.encode()
    try:
        address = ipaddress.IPv6Address(host.partition("%")[0])
    except ValueError:  # a server may put any text there
        return host.encode()
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped).encode()
    return address.packed[:8]


class ClientIdentity:
    """Identifies clients by the API keys that you issued, all others by address.

    A key is read from the first ``Authorization``, if it is ``Bearer``, and from
    ``x-api-key``. An unknown key is ignored: a client could make one up for each
    request. To refuse it is the work of a check of keys, as in `Admission` or in the
    bundled server.

    Only salted hashes are kept and returned, so neither a key nor an address can be
    read from them; the salt is random for each instance.

    Args:
        keys: API keys that you issued.

    Raises:
        TypeError: *keys* is a single string, each letter of which would be a key.
        ValueError: A key is empty, as of a variable that is not set.
    """

    def __init__(self, keys: Iterable[str] = ()) -> None:
        if isinstance(keys, str | bytes):
            kind = type(self).__name__
            raise TypeError(f"{kind} takes several keys: write {kind}([key])")
        self._salt = secrets.token_bytes(16)
        self._issued: dict[bytes, bytes] = {}
        for key in keys:
            if not key:
                raise ValueError("a key is empty, and anybody has that; leave it out")
            client = self.digest(key.encode())
            self._issued[client] = client
            with suppress(UnicodeEncodeError):  # as vLLM expects them in a header
                self._issued[self.digest(key.encode("latin-1"))] = client

    def __call__(self, scope: Scope) -> bytes:
        """Return the client of a request, as the *client* of an `Admission`."""
        return self.issued(scope) or client_address(scope)

    def issued(self, scope: Scope) -> bytes | None:
        """Return the client by the first issued key of a request; ``None`` without one.

        Only salted hashes are compared, so the time says nothing about the keys.
        """
        keys = _given_keys(scope) if self._issued else ()
        found = (self._issued.get(self.digest(key)) for key in keys)
        return next(filter(None, found), None)

    def digest(self, *parts: bytes) -> bytes:
        """Return a salted hash of *parts*, 16 bytes; different parts never collide."""
        digest = hashlib.blake2b(key=self._salt, digest_size=16)
        for part in parts:
            # Prefixed by their lengths, no two sequences of parts are written alike.
            digest.update(len(part).to_bytes(8, "big"))
            digest.update(part)
        return digest.digest()

    def tenant_id(self, client: bytes, user: str) -> str:
        """Return the id of a tenant: of one client, and the user that it names.

        Clients choose the names of their users and conversations freely, so two of
        them may choose the same. The id contains the client, which a client cannot
        choose: what an engine caches for one tenant is neither found nor evicted by
        another, and the engine learns neither the client nor the user.

        Args:
            client: What this object, or `client_address`, returned for the request.
            user: Name of the user, from the request.

        Returns:
            32 hexadecimal digits, the same for the same arguments.
        """
        return self.digest(client, user.encode("utf-8", "surrogatepass")).hex()


def _given_keys(scope: Scope) -> Iterator[bytes]:
    """Yield the key of the first ``Authorization``, and those in ``x-api-key``."""
    authorised = False
    for name, value in scope["headers"]:
        if name == b"x-api-key":
            yield bytes(value)
        elif name == b"authorization" and not authorised:
            authorised = True
            scheme, _, key = bytes(value).partition(b" ")
            if scheme.lower() == b"bearer":
                yield key


def _openai_answer(_scope: Scope, refusal: Refusal) -> Response:
    return refusal_response(refusal)


class BodyLimit:
    """Answers 413 to a body that is larger than a limit.

    A body with a declared length is refused before any of it is read and before the
    application is called. A body without one is counted while it is read: as soon as it
    passes the limit, 413 is answered unless the response has begun, and the
    application's ``receive`` raises `BodyTooLarge`. What the application sends after
    that is dropped, and the exception ends here.

    With a *timeout*, 408 is answered to a body that takes longer, and ``receive``
    raises `BodyTooSlow`. To limit all bodies together is the work of `Admission`.

    A client that is still sending would see a reset and might never read the response,
    so the rest of a refused body is dropped: up to 8 MiB of it, for five seconds at
    most, when the application has ended.

    Args:
        app: The application to wrap.
        max_bytes: Maximum size of one body, in bytes.
        timeout: Seconds for a whole body, from the application's first ``receive``.
            Default: no limit but the server's own.
        answer: Returns status, headers and body of a refusal, given the scope and the
            reason. Default: JSON in the format of OpenAI's API.

    Raises:
        ValueError: *max_bytes* is negative, or *timeout* is not above 0.
    """

    def __init__(
        self,
        app: App,
        *,
        max_bytes: int,
        timeout: float | None = None,
        answer: Answer | None = None,
    ) -> None:
        if not max_bytes >= 0:  # false for NaN, too: no body would be above it
            message = f"max_bytes must not be negative, got {max_bytes}"
            raise ValueError(message)
        if timeout is not None and not timeout > 0:
            raise ValueError(f"timeout must be above 0 s or None, got {timeout}")
        self._app = app
        self._timeout = timeout
        self._max_bytes = max_bytes
        self._answer = answer or _openai_answer

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Serve one connection.

        Cancellation:
            Passes through.
        """
        if scope["type"] != "http":
            await self._app(scope, receive, send)
        elif (declared_length(scope) or 0) > self._max_bytes:
            refusing = Refusing(scope, RequestBody(receive), send)
            await refusing.send(self._answer(scope, BodyTooLarge(self._max_bytes)))
            await refusing.linger(max_bytes=MAX_UNACCEPTABLE)
        else:
            keep_head(scope)
            await self._serve_metered(scope, receive, send)

    async def _serve_metered(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = RequestBody(receive, timeout=self._timeout, max_bytes=self._max_bytes)
        started = False
        refusing: Refusing | None = None

        async def receive_metered() -> Message:
            nonlocal started, refusing
            try:
                return await body.receive()
            except _REFUSALS as refusal:
                if not started:
                    started, refusing = True, Refusing(scope, body, send)
                    # Cancelled, the client is gone.
                    await refusing.send(self._answer(scope, refusal))  # noqa: ASYNC120
                raise

        def send_unless_refused(message: Message) -> Awaitable[None]:
            nonlocal started
            if refusing is not None:
                return _drop()
            started = True
            return send(message)

        try:
            await self._app(scope, receive_metered, send_unless_refused)
        except (*_REFUSALS, BaseExceptionGroup) as error:
            if refusing is None:
                raise
            _end_refusal(error)
        if refusing is not None:  # the application has ended, too
            await refusing.linger(max_bytes=MAX_UNACCEPTABLE)


def _end_refusal(error: BaseException) -> None:
    """End a refusal, or those in a group; raise the rest of the group."""
    if isinstance(error, BaseExceptionGroup):  # the application reads in a task group
        _, rest = error.split(_REFUSALS)
        if rest is not None:
            raise rest from None
    else:
        # A cycle, with the frames that have what the application has read.
        error.with_traceback(None)


async def _drop() -> None:
    """Send nothing: the client has got another response."""
