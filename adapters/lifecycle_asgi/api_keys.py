"""API keys, checked before a byte of a body is read."""

from __future__ import annotations

import binascii
from base64 import b64decode
from collections.abc import Iterable
from typing import Any, Final

from lifecycle_asgi.asgi_types import Scope
from lifecycle_asgi.limits import ClientIdentity

# Those of vLLM's own check.
GUARDED_PREFIXES: Final = ("/v1", "/v2", "/inference", "/cohere")


class ApiKeys:
    """The keys that a server accepts, in the headers where `ClientIdentity` reads them.

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
        own = tuple(keys)  # not kept: the identity has only their hashes
        self._own = ClientIdentity(own) if own else None
        self._server_key = server_key
        self._prefixes = tuple(prefixes)

    def accept(self, scope: Scope) -> bool:
        """Whether a request may pass."""
        if self._own is not None:
            return self._own.issued(scope) is not None
        path = str(scope.get("path", "")).removeprefix(scope.get("root_path") or "")
        if not path.startswith(self._prefixes) or scope.get("method") == "OPTIONS":
            return True
        keys = self._of_server(scope)
        return not keys or ClientIdentity(keys).issued(scope) is not None

    def _of_server(self, scope: Scope) -> list[str]:
        args: Any = getattr(getattr(scope.get("app"), "state", None), "args", None)
        given = getattr(args, "api_key", None) or [self._server_key]
        keys = [given] if isinstance(given, str) else given
        return [key for key in keys if isinstance(key, str) and key]


def with_basic(scope: Scope) -> Scope:
    """Return *scope* with the password of Basic as a key: browsers ask for one."""
    headers = list(scope["headers"])
    for name, value in scope["headers"]:
        scheme, _, given = bytes(value).partition(b" ")
        if name == b"authorization" and scheme.lower() == b"basic":
            try:
                password = b64decode(given, validate=True).partition(b":")[2]
            except binascii.Error:
                continue
            headers.append((b"x-api-key", password))
    return {"headers": headers}
