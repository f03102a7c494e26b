"""Access control: API keys, admin keys, and requests that a web page forged.

A browser sends requests for any page that it shows, also to servers that only its own
machine can reach. Two headers that a page cannot choose say so: ``Host`` is the name
that the page was loaded by (DNS rebinding), and ``Origin`` is the page itself (CSRF).
"""

from __future__ import annotations

import ipaddress
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import urlsplit

from lifecycle_asgi.api_keys import ApiKeys, with_basic
from lifecycle_asgi.limits import is_loopback
from lifecycle_asgi.refusals import ApiError
from lifecycle_asgi.request import HOST

_OPEN: Final = frozenset({"/health", "/ready"})
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
        admin_keys: Keys for ``/_lifecycle`` and ``/metrics``; without any, whatever
            reaches the operator's listener is served.
        hosts: Further names of the server in ``Host``; ``*`` is any, for clients alone.
        origins: Origins of web pages that may send requests; ``*`` is any.
    """

    api_keys: tuple[str, ...] = field(default=(), repr=False)
    admin_keys: tuple[str, ...] = field(default=(), repr=False)
    hosts: tuple[str, ...] = ()
    origins: tuple[str, ...] = ()


class AccessControl:
    """Refuses requests that may not do what they ask for, before a body is read.

    One for the *operator* asks for an admin key, and permits no page of another site.
    """

    def __init__(
        self, app: Any, rules: AccessRules, *, answer: Answer, operator: bool = False
    ) -> None:
        self._app = app
        self._answer = answer
        self._operator = operator
        keys = rules.admin_keys if operator else rules.api_keys
        self._keys = ApiKeys(keys) if keys else None
        # Any name would let any page in (DNS rebinding), also where no key is needed.
        hosts = (host for host in rules.hosts if not (operator and host == "*"))
        self._hosts = frozenset(host.lower() for host in hosts)
        self._origins = frozenset(() if operator else rules.origins)

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
        server = scope.get("server")
        local = server and is_loopback(str(server[0]))
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
        if self._keys is None:
            return
        if self._operator:
            if not self._keys.accept(with_basic(scope)):
                raise _no_key("admin key", "Bearer KEY, or Basic with it as password")
        elif scope["path"] not in _OPEN and not self._keys.accept(scope):
            raise _no_key("API key", "Bearer KEY, or in x-api-key")


def _no_key(what: str, how: str) -> ApiError:
    message = f"A valid {what} is needed; send it as Authorization: {how}"
    return ApiError(401, message, code="invalid_api_key", retry=False)


def _name_of(host: bytes | None) -> str | None:
    """Return the name in a ``Host``, without its port."""
    if not host:
        return None
    nowhere = "."  # the name of no site
    if not HOST.fullmatch(host):
        return nowhere
    try:
        return urlsplit(f"//{host.decode('latin-1')}").hostname or ""
    except ValueError:  # brackets around what is no address of IPv6
        return nowhere


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
