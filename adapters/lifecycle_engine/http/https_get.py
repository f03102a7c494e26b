"""One file by HTTPS, from an address that may be asked, within limits.

The name is resolved here and the connection goes to the address that was checked, so
that a name cannot answer one address to the check and another one to the connection.
"""

from __future__ import annotations

import ipaddress
import re
import socket
import ssl
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from urllib.parse import urljoin, urlsplit

import anyio
import h11
from anyio.abc import ByteStream

_PORT = 443
_HOST_CHARS = 253
_CHUNK = 65536
_REDIRECTS = (301, 302, 303, 307, 308)
_HOST = re.compile(r"[a-z0-9_-]+(\.[a-z0-9_-]+)*\.?")
# The end of a stream is what a connection that ends in its handshake raises.
_BROKEN = (
    OSError,
    h11.RemoteProtocolError,
    anyio.BrokenResourceError,
    anyio.EndOfStream,
)
# Where IPv6 addresses have an IPv4 address in their last bytes.
_NAT64 = ipaddress.ip_network("64:ff9b::/96")
# Where they lead to who knows whom: local NAT64, Teredo, 6to4, site-local.
_TUNNELS = [
    ipaddress.ip_network(each)
    for each in ("64:ff9b:1::/48", "2001::/32", "2002::/16", "fec0::/10")
]

Resolve = Callable[[str], Awaitable[list[str]]]
Connect = Callable[[str, str], Awaitable[ByteStream]]


class NotFetched(Exception):
    """A file that was not fetched; the message says why, and nothing of its URL.

    Attributes:
        status: What the client is told.
    """

    def __init__(self, message: str, *, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchLimits:
    """The most that one request may make the server fetch.

    Attributes:
        files: Of one request.
        file_bytes: Of each file.
        seconds: For all files of a request together; and before, for its turn.
        redirects: Of each file, each checked like the first URL.
        bytes: Of the files of all requests together, until hand-off.
    """

    files: int = 8
    file_bytes: int = 20 * 2**20
    seconds: float = 10.0
    redirects: int = 3
    bytes: int = 256 * 2**20


async def resolve(host: str) -> list[str]:
    """The addresses of a name.

    Raises:
        OSError: It has none.

    Cancellation:
        At any time.
    """
    found = await anyio.getaddrinfo(host, _PORT, type=socket.SOCK_STREAM)
    return [str(address[0]) for *_, address in found]


async def connect(
    address: str,
    host: str,
    *,
    port: int = _PORT,
    context: ssl.SSLContext | None = None,
) -> ByteStream:
    """A TLS connection to *address*, whose certificate must be that of *host*.

    Args:
        address: Where.
        host: Who.
        port: The one of HTTPS.
        context: Whom to trust; by default whom the system trusts.

    Raises:
        OSError: Nobody listens, or the certificate is not good.
        anyio.EndOfStream: The connection ended in the handshake.

    Cancellation:
        At any time.
    """
    return await anyio.connect_tcp(
        address,
        port,
        ssl_context=context or ssl.create_default_context(),
        tls_hostname=host,
        tls_standard_compatible=False,
    )


def public(address: str) -> bool:
    """Whether an address is one of the internet at large, and not of anybody's own."""
    ip = ipaddress.ip_address(address)
    if isinstance(ip, ipaddress.IPv6Address):
        if ip in _NAT64 or ip.ipv4_mapped is not None:
            return public(str(ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)))
        if any(ip in network for network in _TUNNELS) or ip.scope_id is not None:
            return False
    return ip.is_global and not (ip.is_multicast or ip.is_reserved)


def _trusting_the_system() -> Connect:
    # Reading all certificates takes tens of milliseconds, for which nothing else runs.
    return partial(connect, context=ssl.create_default_context())


class HttpsGet:
    """Fetches files.

    Args:
        limits: What a file may be.
        resolve: Finds the addresses of a name.
        connect: Makes a connection to an address, for a name; by default `connect`,
            which trusts whom the system trusts when this is made.
    """

    def __init__(
        self,
        limits: FetchLimits,
        *,
        resolve: Resolve = resolve,
        connect: Connect | None = None,
    ) -> None:
        self.limits = limits
        self._resolve = resolve
        self._connect = connect or _trusting_the_system()

    async def __call__(self, url: str) -> bytes:
        """Fetch one file.

        Raises:
            NotFetched: The URL must not be fetched, or could not.

        Cancellation:
            At any time; the connection is closed.
        """
        for _ in range(self.limits.redirects + 1):
            target = _Target.of(url)
            answer = await self._get(target)
            if isinstance(answer, bytes):
                return answer
            url = answer
        raise NotFetched(f"redirects more than {self.limits.redirects} times")

    async def _get(self, target: _Target) -> bytes | str:
        """The file, or the URL where it is said to be."""
        try:
            address = await self._address(target.host)
            async with await self._connect(address, target.host) as stream:
                return await _Exchange(stream, self.limits).run(target)
        except _BROKEN as error:
            # Without its words, which may be the address.
            problem = f"could not be fetched ({type(error).__name__})"
        raise NotFetched(problem)

    async def _address(self, host: str) -> str:
        addresses = await self._resolve(host)
        if not addresses or not all(map(public, addresses)):
            raise NotFetched("is not at a public address")
        return addresses[0]


@dataclass(frozen=True, slots=True)
class _Target:
    """A URL that may be asked for, taken apart."""

    url: str = field(repr=False)
    host: str = field(repr=False)
    path: str = field(repr=False)

    @classmethod
    def of(cls, url: str) -> _Target:
        try:
            parts = urlsplit(url)
            bracketed, port = "[" in parts.netloc, parts.port
            host = (parts.hostname or "").encode("idna").decode("ascii")
        except ValueError:  # UnicodeError, too
            host, bracketed, port = "", False, None
        valid = _is_ipv6(host) if bracketed else _HOST.fullmatch(host) is not None
        if len(host) > _HOST_CHARS or not valid:
            raise NotFetched("has no valid URL")
        if parts.scheme != "https" or port not in (None, _PORT):
            raise NotFetched(f"is not at an https URL of port {_PORT}")
        if parts.username is not None or parts.password is not None:
            raise NotFetched("has a URL with a name or password in it")
        query = f"?{parts.query}" if parts.query else ""
        return cls(url, host, (parts.path or "/") + query)

    def elsewhere(self, location: str) -> str:
        """The URL that a redirect leads to."""
        try:
            return urljoin(self.url, location)
        except ValueError:
            return ""  # which is refused like any other


def _is_ipv6(host: str) -> bool:
    """Whether it is an address, and one that means the same on every machine."""
    try:
        return ipaddress.IPv6Address(host).scope_id is None
    except ValueError:
        return False


class _Exchange:
    """One GET on one connection."""

    def __init__(self, stream: ByteStream, limits: FetchLimits) -> None:
        self._stream = stream
        self._limits = limits
        self._http = h11.Connection(h11.CLIENT)

    async def run(self, target: _Target) -> bytes | str:
        headers = [
            ("host", f"[{target.host}]" if ":" in target.host else target.host),
            ("accept", "image/*"),
            ("accept-encoding", "identity"),
            ("connection", "close"),
        ]
        try:
            head = h11.Request(method="GET", target=target.path, headers=headers)
        except (h11.LocalProtocolError, UnicodeError):
            head = None
        if head is None:
            raise NotFetched("has no valid URL")
        await self._stream.send(self._http.send(head) or b"")
        await self._stream.send(self._http.send(h11.EndOfMessage()) or b"")
        response = await self._event()
        while isinstance(response, h11.InformationalResponse):
            response = await self._event()
        if not isinstance(response, h11.Response):
            raise NotFetched("could not be fetched")
        fields = {name.lower(): value for name, value in response.headers}
        if response.status_code in _REDIRECTS and b"location" in fields:
            return target.elsewhere(fields[b"location"].decode("latin-1"))
        if response.status_code != 200:
            raise NotFetched(f"could not be fetched (status {response.status_code})")
        if fields.get(b"content-encoding", b"identity") != b"identity":
            raise NotFetched("comes compressed, which was not asked for")
        self._check(int(fields.get(b"content-length", b"0")))
        return await self._body()

    async def _body(self) -> bytes:
        chunks: list[bytes] = []
        size = 0
        while isinstance(event := await self._event(), h11.Data):
            size += len(event.data)
            self._check(size)
            chunks.append(bytes(event.data))
        return b"".join(chunks)

    def _check(self, size: int) -> None:
        most = self._limits.file_bytes
        if size > most:
            raise NotFetched(f"is larger than {most} bytes; scale it down", status=413)

    async def _event(self) -> h11.Event:
        while (event := self._http.next_event()) is h11.NEED_DATA:
            try:
                data = await self._stream.receive(_CHUNK)
            except anyio.EndOfStream:
                data = b""
            self._http.receive_data(data)
        if isinstance(event, h11.Event):
            return event
        raise NotFetched("could not be fetched")  # another protocol follows
