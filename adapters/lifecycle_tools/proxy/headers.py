"""Headers: what passes between two connections, and what is refused.

RFC 9110, 7.6.1 says which headers belong to one connection, RFC 9112, 6 how the length
of a message is found.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterable
from enum import StrEnum
from typing import Final, TypeAlias
from urllib.parse import unquote

from lifecycle_asgi.asgi_types import Scope
from lifecycle_asgi.request import HOST, declared_length

Header: TypeAlias = tuple[bytes, bytes]

_HOP_BY_HOP: Final = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-connection",
        b"te",
        b"transfer-encoding",
        b"upgrade",
    }
)
# An upstream that shows them to local clients takes all clients of a proxy for some.
_OPERATORS: Final = "/_lifecycle"
# Times that a path may be encoded; servers decode it once, some twice.
_DECODINGS: Final = 4
_PARAMETERS: Final = re.compile(r"[;?#\0][^/]*")
_FORWARDED: Final = (b"x-forwarded-", b"x-real-ip", b"forwarded")


class ForwardedHeaders(StrEnum):
    """What becomes of ``X-Forwarded-For``, ``-Proto`` and ``-Host``.

    Attributes:
        PASS: They pass as the client sent them.
        ADD: The client's address is added to the list; the others are added where the
            client sent none.
        REPLACE: Those of the client are removed, ``Forwarded`` and ``X-Real-IP`` too,
            and ours added.
    """

    PASS = "pass"
    ADD = "add"
    REPLACE = "replace"


def values(headers: Iterable[Header], name: bytes) -> list[bytes]:
    """Return the values of all headers called *name*, in their order."""
    return [value for each, value in headers if each.lower() == name]


def tokens(headers: Iterable[Header], name: bytes) -> list[bytes]:
    """Return the items of the lists in the headers called *name*, in lower case."""
    items = b",".join(values(headers, name)).lower().split(b",")
    return [item for each in items if (item := each.strip())]


def end_to_end(headers: Iterable[Header]) -> list[Header]:
    """Return the headers that pass to the next connection, in their order."""
    found = [(name.lower(), value) for name, value in headers]
    dropped = _HOP_BY_HOP.union(tokens(found, b"connection")) - {b"host"}
    return [each for each in found if each[0] not in dropped]


def ambiguity(scope: Scope) -> str | None:
    """Return why two servers could read a request differently; ``None`` if not.

    Servers refuse most of this themselves; a proxy must not depend on it.
    """
    headers: list[Header] = list(scope["headers"])
    codings = tokens(headers, b"transfer-encoding")
    lengths = values(headers, b"content-length")
    if codings and lengths:
        return "Content-Length and Transfer-Encoding exclude each other; send one"
    if codings and scope.get("http_version", "1.1") != "1.1":
        return "Only HTTP/1.1 has a Transfer-Encoding"
    if codings not in ([], [b"chunked"]):
        return "Transfer-Encoding must be chunked and nothing else"
    if lengths and declared_length(scope) is None:
        return "Content-Length must be one number"
    target = bytes(scope.get("raw_path") or b"/")
    if target[:1] not in (b"/", b"*") or b"#" in target + scope["query_string"]:
        return "The target must be a path"  # and no URL, whose path others look for
    hosts = values(headers, b"host")
    if len(hosts) != 1 and (hosts or scope.get("http_version") == "1.1"):
        return "Host must be sent, once"
    if hosts and not HOST.fullmatch(hosts[0]):
        return "Host must be a name or an address, with a port at most"
    return None


def is_operators(path: str) -> bool:
    """Whether *path*, as a server may read it, shows an operator all clients.

    Servers differ in whether they decode a path twice, merge slashes, follow dots, drop
    parameters and tell capitals apart.
    """
    for _ in range(_DECODINGS):
        path = unquote(path)
    if unquote(path) != path:
        return True  # no client writes that by mistake, and each time costs
    plain = _PARAMETERS.sub("", path.replace("\\", "/"))
    # Not all servers follow dots.
    return any(
        re.sub("/+", "/", f"/{each}/").lower().startswith(f"{_OPERATORS}/")
        for each in (plain, posixpath.normpath(f"/{plain}"))
    )


def request_headers(
    scope: Scope, *, authority: bytes | None, forwarded: ForwardedHeaders
) -> list[Header]:
    """Return the headers for the upstream, without those that frame the body.

    Args:
        scope: The ASGI scope of the request.
        authority: Replaces ``Host``; ``None`` keeps that of the client.
        forwarded: What to do about ``X-Forwarded-*``.
    """
    headers: list[Header] = list(scope["headers"])
    # The body is asked for and read here, so its client has been answered already, and
    # its trailers end here.
    framing = (b"content-length", b"expect", b"trailer")
    passed = [each for each in end_to_end(headers) if each[0] not in framing]
    host = next(iter(values(headers, b"host")), b"")
    if authority is not None:
        passed = [each for each in passed if each[0] != b"host"]
        passed.insert(0, (b"host", authority))
    if b"trailers" in tokens(headers, b"te") and takes_trailers(scope):
        passed += [(b"te", b"trailers"), (b"connection", b"te")]
    if forwarded is not ForwardedHeaders.PASS:
        passed = _add_forwarded(passed, scope, host, forwarded)
    return passed


def _add_forwarded(
    headers: list[Header], scope: Scope, host: bytes, how: ForwardedHeaders
) -> list[Header]:
    if how is ForwardedHeaders.REPLACE:
        # Servers of WSGI and CGI take an underscore for the same.
        headers = [
            each
            for each in headers
            if not each[0].replace(b"_", b"-").startswith(_FORWARDED)
        ]
    client, scheme = scope.get("client"), str(scope.get("scheme", "http"))
    hops = values(headers, b"x-forwarded-for")
    if client and client[0]:
        hops.append(str(client[0]).encode())
    added = [
        (b"x-forwarded-proto", scheme.replace("ws", "http").encode()),
        (b"x-forwarded-host", host),
    ]
    present = {name for name, _ in headers}
    kept = [each for each in headers if each[0] != b"x-forwarded-for"]
    if hops:
        kept.append((b"x-forwarded-for", b", ".join(hops)))
    return kept + [each for each in added if each[1] and each[0] not in present]


def takes_trailers(scope: Scope) -> bool:
    """Whether the ASGI server can send trailers to this client."""
    return "http.response.trailers" in (scope.get("extensions") or {})


def response_headers(
    status: int, headers: Iterable[Header], *, trailers: bool = False
) -> list[Header]:
    """Return the headers for the client, with ``Trailer`` only where *trailers* follow.

    Without ``Content-Length`` where the upstream also sent ``Transfer-Encoding``, which
    overrides it; and in a 304, where ASGI servers take it for the length of a body.
    """
    found = list(headers)
    passed = end_to_end(found)
    if status in (204, 304) or values(found, b"transfer-encoding"):
        passed = [each for each in passed if each[0] != b"content-length"]
    return [each for each in passed if trailers or each[0] != b"trailer"]
