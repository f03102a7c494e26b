"""HTTP/1.1 on a socket, with control over each byte and over when a client leaves."""

from __future__ import annotations

import functools
import socket
import ssl
import time
from contextlib import suppress
from dataclasses import dataclass, field, replace
from urllib.parse import urlsplit

import anyio
from anyio.abc import ByteStream
from anyio.streams.tls import TLSStream

_HEAD_LIMIT = 64 * 1024
_BODY_LIMIT = 4 * 1024 * 1024
GONE = (
    anyio.EndOfStream,
    anyio.BrokenResourceError,
    anyio.ClosedResourceError,
    ssl.SSLError,
)


@dataclass(frozen=True, slots=True)
class Address:
    """Where the server is, and what each request to it carries.

    Attributes:
        prefix: Goes before each path.
        source: The address that connections come from; ``None`` is the system's choice.
    """

    host: str
    port: int
    tls: bool = False
    prefix: str = ""
    headers: tuple[tuple[str, str], ...] = ()
    source: str | None = None

    @classmethod
    def parse(cls, url: str, headers: tuple[tuple[str, str], ...] = ()) -> Address:
        """Read an address from *url*; a path in it goes before every path.

        A ``/v1`` at its end is left out, as each path begins with it.

        Raises:
            ValueError: *url* is no http or https URL with a host.
        """
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{url!r} is no http:// or https:// URL with a host")
        tls = parts.scheme == "https"
        port = parts.port or (443 if tls else 80)
        prefix = parts.path.rstrip("/").removesuffix("/v1")
        return cls(parts.hostname, port, tls, prefix, headers)

    def with_key(self, key: str) -> Address:
        """Return this address for the client whose API key is *key*."""
        others = [each for each in self.headers if each[0].lower() != "authorization"]
        return replace(self, headers=(*others, ("Authorization", f"Bearer {key}")))

    def head(self, method: str, path: str, *headers: tuple[str, str]) -> bytes:
        """Return the head of a request."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        lines = [f"{method} {self.prefix}{path} HTTP/1.1", f"Host: {host}:{self.port}"]
        lines += [f"{name}: {value}" for name, value in (*self.headers, *headers)]
        return "\r\n".join([*lines, "", ""]).encode()

    def post(
        self,
        path: str,
        body: bytes,
        *headers: tuple[str, str],
        length: int | None = None,
    ) -> bytes:
        """Return a whole request with a JSON *body*, or one of another *length*."""
        head = self.head(
            "POST",
            path,
            ("Content-Type", "application/json"),
            ("Content-Length", str(len(body) if length is None else length)),
            *headers,
        )
        return head + body

    async def connect(self) -> ByteStream:
        """Open a connection.

        Raises:
            OSError: the server does not listen, breaks off the TLS handshake, or has a
            certificate that is not trusted.

        Cancellation: the connection is closed.
        """
        host = "127.0.0.1" if self.source and self.host == "localhost" else self.host
        stream = await anyio.connect_tcp(host, self.port, local_host=self.source)
        if not self.tls:
            return stream
        try:
            return await TLSStream.wrap(
                stream,
                hostname=self.host,
                ssl_context=_context(),
                standard_compatible=False,
            )
        except GONE as error:
            await anyio.aclose_forcefully(stream)
            if isinstance(error, ssl.SSLCertVerificationError):
                raise
            raise ConnectionResetError("the server broke off TLS") from error
        except BaseException:
            await anyio.aclose_forcefully(stream)
            raise

    def connect_narrow(self) -> socket.socket:
        """Open a connection, blocking, on which the server cannot send much unread."""
        # For large segments a server has megabytes of room, however little is here.
        places = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)
        for family, kind, _, _, place in places:
            raw = socket.socket(family, kind)
            raw.settimeout(5.0)
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, 512)  # macOS's most
            with suppress(OSError):
                raw.connect(place)
                if self.tls:
                    raw = _context().wrap_socket(raw, server_hostname=self.host)
                return raw
            raw.close()
        raise ConnectionRefusedError


@functools.cache
def _context() -> ssl.SSLContext:
    return ssl.create_default_context()  # reads all certificates, which takes long


@dataclass(slots=True)
class Response:
    """What came back; status 0 is no response at all."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    seconds: float = 0.0
    complete: bool = False

    @property
    def content(self) -> bytes:
        """The body without the framing of chunks."""
        if "chunked" not in self.headers.get("transfer-encoding", ""):
            return self.body
        content, rest = b"", self.body
        while rest:
            size, _, rest = rest.partition(b"\r\n")
            try:
                count = int(size.partition(b";")[0], 16)
            except ValueError:
                break
            content, rest = content + rest[:count], rest[count + 2 :]
        return content

    @property
    def described(self) -> str:
        """The status, or that there was none."""
        return str(self.status) if self.status else "no response"


async def read_head(stream: ByteStream) -> Response:
    """Read the head of a response, and what came with it of the body.

    Cancellation: what was read is lost.
    """
    data = b""
    while b"\r\n\r\n" not in data:
        if len(data) > _HEAD_LIMIT:
            return Response()
        try:
            data += await stream.receive()
        except GONE:
            return Response()
    head, body = data.split(b"\r\n\r\n", 1)
    first, *lines = head.decode("latin-1").split("\r\n")
    words = first.split(" ", 2)
    if len(words) < 2 or not words[1].isdigit():
        return Response()
    pairs = (line.partition(":") for line in lines)
    headers = {name.strip().lower(): value.strip() for name, _, value in pairs}
    return Response(int(words[1]), headers, body)


def _is_complete(response: Response) -> bool:
    length = response.headers.get("content-length", "")
    if length.isdigit():
        return len(response.body) >= int(length)
    if "chunked" in response.headers.get("transfer-encoding", ""):
        return response.body.endswith(b"0\r\n\r\n")
    return False


async def read_response(stream: ByteStream) -> Response:
    """Read a response to its end.

    Cancellation: what was read is lost.
    """
    response = await read_head(stream)
    while response.status and not _is_complete(response):
        try:
            response.body += await stream.receive()
        except GONE:
            framed = {"content-length", "transfer-encoding"} & response.headers.keys()
            response.complete = not framed
            return response
        if len(response.body) > _BODY_LIMIT:
            return response
    response.complete = bool(response.status)
    return response


async def ask(address: Address, request: bytes, *, timeout: float) -> Response:
    """Send *request* and read the response, for at most *timeout* seconds.

    Cancellation: the connection is closed.
    """
    started = time.monotonic()
    response = Response()
    with anyio.move_on_after(timeout):
        try:
            stream = await address.connect()
        except OSError:
            return response
        try:
            with suppress(*GONE):  # an early refusal may still be there to read
                await stream.send(request)
            response = await read_response(stream)
        finally:
            await anyio.aclose_forcefully(stream)
    response.seconds = time.monotonic() - started
    return response
