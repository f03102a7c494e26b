"""Refuse a client that has its share in flight already."""

from __future__ import annotations

import hashlib
import ipaddress
import secrets
from collections.abc import Callable, Iterable
from functools import partial

from lifecycle import Gate, GateFull
from lifecycle.events import Observer
from lifecycle_asgi._refusals import Answer, ShareUsedUp, openai_answer, say
from lifecycle_asgi._types import App, Receive, Scope, Send

_KEYS = (b"authorization", b"x-api-key")


class ClientLimit:
    """Answers 429 to clients that have *slots* requests in flight already.

    It is asked before anything of a body is read, so that it bounds the bodies of one
    client, too. A client is told by its API key, or else by its address; of a key, only
    a salted hash is kept, and only while one of its requests is in flight.

    Args:
        app: The application to wrap.
        slots: Requests of one client at a time.
        key: Whose a request is; ``None`` where nobody is to be counted. By default it
            is `client_address`.
        answer: Says no in the form of the application's own errors, given the scope
            and why. By default it is JSON in the form of OpenAI's.
        observer: Told of each grant and refusal, of a gate named ``"client"``.

    Raises:
        ValueError: *slots* is no whole number above 0.
    """

    def __init__(
        self,
        app: App,
        *,
        slots: int,
        key: Callable[[Scope], bytes | None] | None = None,
        answer: Answer | None = None,
        observer: Observer | None = None,
    ) -> None:
        if slots < 1:
            raise ValueError(f"slots must be at least 1, got {slots}")
        self._app = app
        self._slots = slots
        self._key = key or client_address
        self._answer = answer or openai_answer
        self._new_gate = partial(
            Gate, slots=slots, max_waiting=0, name="client", observer=observer
        )
        self._salt = secrets.token_bytes(16)
        self._gates: dict[bytes, Gate] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection.

        Cancellation:
            Passes through.
        """
        key = self._key(scope) if scope["type"] == "http" else None
        if key is None:
            await self._app(scope, receive, send)
            return
        name = hashlib.blake2b(key, key=self._salt, digest_size=16).digest()
        gate = self._gates.get(name) or self._gates.setdefault(name, self._new_gate())
        try:
            lease = gate.try_admit()
        except GateFull as full:
            refusal = ShareUsedUp(
                f"This client has {self._slots} requests in flight, which is its "
                f"limit; wait until one of them has ended",
                retry_after=full.retry_after,
            )
        else:
            try:
                await self._app(scope, receive, send)
            finally:
                lease.release()
                if not gate.statistics().slots_in_use:
                    self._gates.pop(name, None)
            return
        await say(send, self._answer(scope, refusal))


def client_address(scope: Scope) -> bytes:
    """The network that a client is in: its IPv4 address, or the /64 of an IPv6 one.

    It is the address of the connection. Behind a proxy that is the proxy's, unless the
    server is told to believe what that proxy says (uvicorn's ``forwarded_allow_ips``).
    Whoever may name its own address, or has a /64 of them, has no share that ends.
    """
    client = scope.get("client")
    if not client:
        return b""
    host = str(client[0])
    if ":" not in host:
        return host.encode()
    try:
        address = ipaddress.IPv6Address(host.partition("%")[0])
    except ValueError:  # whatever a server writes there
        return host.encode()
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped).encode()
    return address.packed[:8]


class KnownKeys:
    """Tells clients by the API keys that you gave out, and all others by address.

    A key is looked for as ``Authorization: Bearer`` and as ``x-api-key``. One that is
    not known is as good as none: anybody can make up another for each request. Nobody
    is refused for it either; that is for what stands in front of the server.

    Args:
        keys: Those that you gave out. Salted hashes of them are kept.

    Raises:
        TypeError: *keys* is one text, each letter of which would be a key.
    """

    def __init__(self, keys: Iterable[str]) -> None:
        if isinstance(keys, str | bytes):
            raise TypeError("KnownKeys takes several keys: write KnownKeys([key])")
        self._salt = secrets.token_bytes(16)
        self._known = frozenset(self._hash(key.encode()) for key in keys)

    def __call__(self, scope: Scope) -> bytes:
        """Whose a request is, for `ClientLimit`."""
        for name, value in scope["headers"]:
            if name in _KEYS:
                found = self._hash(bytes(value).rpartition(b" ")[2])  # no "Bearer"
                if found in self._known:
                    return found
        return client_address(scope)

    def _hash(self, key: bytes) -> bytes:
        return hashlib.blake2b(key, key=self._salt, digest_size=16).digest()
