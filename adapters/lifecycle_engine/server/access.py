"""Access control: API keys, the admin key, and requests that a web page forged.

A browser sends requests for any page that it shows, also to servers that only its own
machine can reach. Two headers that a page cannot choose say so: ``Host`` is the name
that the page was loaded by (DNS rebinding), and ``Origin`` is the page itself (CSRF).
"""

from __future__ import annotations

import binascii
import ipaddress
import re
from base64 import b64decode
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import urlsplit

from lifecycle_asgi.api_keys import ApiKeys
from lifecycle_asgi.live_view import was_forwarded
from lifecycle_asgi.refusals import ApiError

ADMIN_KEY: Final = "lifecycle.admin_key"
"""Key in an ASGI scope: whether the request came with an admin key."""

_OPEN: Final = frozenset({"/health", "/ready"})
_ADMIN_PREFIX: Final = "/_lifecycle"
# Cancels by id: `CancelEndpoints` compares the client with that of the request.
_CANCEL: Final = re.compile(r"/_lifecycle/requests/[^/]+/cancel")
_SAFE: Final = frozenset({"GET", "HEAD", "OPTIONS"})
# What a page may send to another site without asking it first (Fetch, 2.2.2).
_FORM_TYPES: Final = frozenset(
    {b"text/plain", b"application/x-www-form-urlencoded", b"multipart/form-data"}
)

Answer = Callable[[Any, ApiError], Callable[[Any, Any, Any], Awaitable[None]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class AccessRules:
    """Which requests may do what.

    Attributes:
        api_keys: Keys of clients; without any, no key is asked for.
        admin_keys: Keys for ``/_lifecycle``. Without any, it is open to the server's
            own machine if there are no API keys, and closed otherwise, as to requests
            that a proxy has forwarded.
        metrics_open: Whether ``/metrics`` needs no key, or an admin key.
        hosts: Further names of the server in ``Host``; ``*`` is any.
        origins: Origins of web pages that may send requests; ``*`` is any.
    """

    api_keys: tuple[str, ...] = field(default=(), repr=False)
    admin_keys: tuple[str, ...] = field(default=(), repr=False)
    metrics_open: bool = True
    hosts: tuple[str, ...] = ()
    origins: tuple[str, ...] = ()


class AccessControl:
    """Refuses requests that may not do what they ask for, before a body is read.

    Args:
        app: The application to wrap.
        rules: Which requests may do what.
        answer: Makes the response to a refused request.
    """

    def __init__(self, app: Any, rules: AccessRules, *, answer: Answer) -> None:
        self._app = app
        self._rules = rules
        self._answer = answer
        self._clients = ApiKeys(rules.api_keys) if rules.api_keys else None
        self._admins = ApiKeys(rules.admin_keys) if rules.admin_keys else None
        self._hosts = frozenset(host.lower() for host in rules.hosts)
        self._origins = frozenset(rules.origins)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Serve one connection.

        Cancellation:
            Passes through.
        """
        if scope["type"] == "http":
            try:
                self._check(scope)
            except ApiError as problem:
                response = self._answer(scope, problem)
            else:
                response = self._app
            await response(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _check(self, scope: Any) -> None:
        headers = dict(scope["headers"])
        self._check_host(scope, headers.get(b"host"))
        self._check_page(scope, headers)
        self._check_key(scope)

    def _check_host(self, scope: Any, value: bytes | None) -> None:
        """Refuse a name of another site on a connection from this machine."""
        name = _name_of(value)
        local = _is_loopback(scope.get("server"))
        if name is None or not local or self._is_own(name):
            return
        raise ApiError(
            421,
            "This server does not serve the name in Host; use its address, or start "
            "it with --allowed-host NAME",
            code="unknown_host",
            param="host",
        )

    def _is_own(self, name: str) -> bool:
        """Whether no other site can have this name.

        An address is no name, and names without a dot are those of the local network.
        """
        if self._hosts & {name, "*"} or "." not in name:
            return True
        return name.endswith(".localhost") or _is_address(name)

    def _check_page(self, scope: Any, headers: dict[bytes, bytes]) -> None:
        """Refuse what a browser sends for the page of another site."""
        origin = headers.get(b"origin")
        forged = origin is not None and not self._trusts(scope, origin, headers)
        if origin is None and scope["method"] not in _SAFE:
            forged = headers.get(b"sec-fetch-site") in (b"cross-site", b"same-site")
        if forged:
            raise ApiError(
                403,
                "Web pages of other sites may not send requests; start the server "
                "with --allowed-origin ORIGIN to allow one",
                code="origin_not_allowed",
                param="origin",
            )
        kind = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
        if scope["method"] not in _SAFE and kind in _FORM_TYPES:
            raise ApiError(
                415,
                "The content-type is one of HTML forms; send application/json",
                code="unsupported_content_type",
                param="content-type",
            )

    def _trusts(self, scope: Any, origin: bytes, headers: dict[bytes, bytes]) -> bool:
        page = origin.decode("latin-1")
        if self._origins & {page, "*"}:
            return True
        name = _name_of(headers.get(b"host"))
        if name is None or not self._is_own(name):
            return False
        own = b"://".join((str(scope["scheme"]).encode(), headers[b"host"]))
        return own.lower() == origin.lower()

    def _check_key(self, scope: Any) -> None:
        path = scope["path"]
        if path in _OPEN or (path == "/metrics" and self._rules.metrics_open):
            return
        by_key = self._admins is not None and self._admins.accept(_with_basic(scope))
        scope[ADMIN_KEY] = by_key
        below = path.startswith((_ADMIN_PREFIX, "/metrics"))
        if by_key and below:
            return
        if below and not _CANCEL.fullmatch(path):
            self._refuse_admin(scope)
        elif self._clients is not None and not self._clients.accept(scope):
            raise _no_key("API key", "Bearer KEY, or in x-api-key")

    def _refuse_admin(self, scope: Any) -> None:
        if self._admins is not None:
            raise _no_key("admin key", "Bearer KEY, or Basic with it as the password")
        peer = scope.get("client")
        here = (peer is None or _is_loopback(peer)) and not was_forwarded(scope)
        if self._clients is None and here:
            return
        raise ApiError(
            403,
            "Only the server's operator may see this; start the server with "
            "--admin-key KEY, and send it",
            code="admin_only",
        )


def _no_key(what: str, how: str) -> ApiError:
    message = f"A valid {what} is needed; send it as Authorization: {how}"
    return ApiError(401, message, code="invalid_api_key", retry=False)


def _with_basic(scope: Any) -> dict[str, Any]:
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


def _name_of(host: bytes | None) -> str | None:
    """Return the name in a ``Host``, without its port."""
    if not host:
        return None
    try:
        return urlsplit(f"//{host.decode('latin-1')}").hostname or ""
    except ValueError:
        return "."  # of no site


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _is_loopback(address: Any) -> bool:
    """Whether an address of an ASGI scope is of the machine itself."""
    if not address:
        return False
    try:
        ip = ipaddress.ip_address(str(address[0]).partition("%")[0])
    except ValueError:
        return False
    mapped = getattr(ip, "ipv4_mapped", None)
    return (mapped or ip).is_loopback
