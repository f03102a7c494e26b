"""Saying no before a body is read: reading and parsing it is most of what it costs."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from types import MappingProxyType
from typing import Any

from lifecycle import Refused
from lifecycle.events import Observer, guarded
from lifecycle_asgi import tell_refusal
from lifecycle_engine.api_errors import INTERNAL, ApiError, bad_request, describe
from lifecycle_engine.dialects.dialect import Dialect
from lifecycle_engine.dialects.replies import Reply
from lifecycle_engine.incoming import request_id

from .observing import operation_of
from .places import Places

# Those that change nothing of a body.
_ENCODINGS: Mapping[bytes, tuple[bytes, ...]] = MappingProxyType(
    {
        b"content-encoding": (b"", b"identity"),
        b"transfer-encoding": (b"chunked",),
    }
)


class Early:
    """Refuses generating requests by their heads, before anything is made for them.

    Where ten times as many come as can be served, this is what most of them meet, and
    what the others' answers have to share the process with. It says what `Generate`
    would say; whatever it is not sure of, it leaves to that.

    Args:
        places: Of requests.
        dialects: The APIs, by path.
        body_bytes: Of larger bodies, another refusal is due.
        observer: Told of whom it refused, as of every request.
    """

    def __init__(
        self,
        places: Places,
        dialects: Mapping[str, Dialect],
        *,
        body_bytes: int,
        observer: Observer | None,
    ) -> None:
        self._places = places
        self._dialects = dialects
        self._body_bytes = body_bytes
        self._emit = guarded(observer)

    async def __call__(self, scope: Any, send: Any) -> bool:
        """Refuse the request of an ASGI scope; returns whether it was.

        Cancellation:
            The answer may be cut. It counts as refused all the same.
        """
        if scope["method"] != "POST" or not self._places.full:
            return False
        dialect = self._dialects.get(scope["path"])
        if dialect is None or _declared(scope) > self._body_bytes:
            return False
        reply = Reply(send, dialect)
        try:
            reply.request_id = request_id(scope)
            refuse_encoded(scope)
            self._places.refuse_when_full()
        except Refused as refusal:
            problem = describe(refusal) or INTERNAL
        except ApiError:
            return False
        else:
            return False
        operation = operation_of(scope)
        if operation is not None and self._emit is not None:
            tell_refusal(self._emit, operation, scope, dialect.error(problem, None)[0])
        with suppress(OSError):  # of servers that mind that the client left
            await reply.error(problem)
        return True


def _declared(scope: Any) -> int:
    for name, value in scope["headers"]:
        if name == b"content-length":
            with suppress(ValueError):
                return int(value)
    return 0


def refuse_encoded(scope: Any) -> None:
    """Refuse a body that its client has compressed: no bound here looks inside it.

    Raises:
        ApiError: 400 for any ``content-encoding`` but ``identity``, and any
            ``transfer-encoding`` but ``chunked``.
    """
    for name, value in scope["headers"]:
        if name in _ENCODINGS and value.strip().lower() not in _ENCODINGS[name]:
            raise bad_request(
                "Compressed bodies are not read; send it without content-encoding, and "
                "with no transfer-encoding but chunked",
                param=name.decode(),
                code="unsupported_encoding",
            )
