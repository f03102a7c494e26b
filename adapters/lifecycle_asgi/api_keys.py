"""API keys, checked before a byte of a body is read."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any, Final

from lifecycle_asgi._types import Scope

# Those of vLLM's own check.
GUARDED_PREFIXES: Final = ("/v1", "/v2", "/inference", "/cohere")


class ApiKeys:
    """The keys that a server accepts, compared in constant time.

    vLLM makes its middleware with the application alone and outside of its own check of
    keys, so its keys are taken from the application: ``--api-key`` is in
    ``app.state.args``, and ``VLLM_API_KEY`` comes in as an argument. As in vLLM, they
    guard some prefixes only, and health checks and metrics stay open; keys that are
    given here guard all paths.

    Args:
        keys: Keys that guard all paths; no others count if there are any.
        server_key: Key of the server itself, used unless the application has others.
        prefixes: Beginnings of the paths that the server's keys guard.
    """

    def __init__(
        self,
        keys: Iterable[str] = (),
        *,
        server_key: str = "",
        prefixes: Iterable[str] = GUARDED_PREFIXES,
    ) -> None:
        self._salt = secrets.token_bytes(16)
        self._own = self._digests(keys)
        self._server_key = server_key
        self._prefixes = tuple(prefixes)

    def accept(self, scope: Scope) -> bool:
        """Whether a request may pass."""
        if self._own:
            return self._known(scope, self._own)
        path = str(scope.get("path", "")).removeprefix(scope.get("root_path") or "")
        if not path.startswith(self._prefixes) or scope["method"] == "OPTIONS":
            return True
        keys = self._digests(self._of_server(scope))
        return not keys or self._known(scope, keys)

    def _of_server(self, scope: Scope) -> list[str]:
        args: Any = getattr(getattr(scope.get("app"), "state", None), "args", None)
        given = getattr(args, "api_key", None) or [self._server_key]
        keys = [given] if isinstance(given, str) else given
        return [key for key in keys if isinstance(key, str) and key]

    def _known(self, scope: Scope, keys: list[bytes]) -> bool:
        found = False
        for given in map(self._digest, _given_keys(scope)):
            for key in keys:  # all of them: the time says nothing about which one
                found |= hmac.compare_digest(given, key)
        return found

    def _digests(self, keys: Iterable[str]) -> list[bytes]:
        found = []
        for key in keys:
            found.append(self._digest(key.encode()))
            with suppress(UnicodeEncodeError):  # as vLLM expects them in a header
                found.append(self._digest(key.encode("latin-1")))
        return found

    def _digest(self, key: bytes) -> bytes:
        return hashlib.blake2b(key, key=self._salt, digest_size=16).digest()


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
