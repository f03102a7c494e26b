"""Refuse a client that has its share in flight already."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable
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
        key: Whose a request is; ``None`` where nobody is to be counted.
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
        self._key = key or client_key
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


def client_key(scope: Scope) -> bytes | None:
    """What tells a client from others: its API key, or else its address."""
    for name, value in scope["headers"]:
        if name in _KEYS:
            return bytes(value).rpartition(b" ")[2]  # without "Bearer"
    client = scope.get("client")
    return str(client[0]).encode() if client else b""
