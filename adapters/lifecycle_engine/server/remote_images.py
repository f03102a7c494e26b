"""Images by URL: fetched over HTTPS, from public addresses only, within limits.

A host name is resolved here and the connection goes to the address that was checked,
so a name server cannot give the check one address and the connection another one.
"""

from __future__ import annotations

import ipaddress
import re
import socket
import ssl
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from urllib.parse import urljoin, urlsplit

import anyio
import anyio.to_thread
import h11
from anyio.abc import ByteStream

from lifecycle import Gate, Payload, Session
from lifecycle_asgi import ImageSize
from lifecycle_asgi.refusals import ApiError
from lifecycle_engine.api.request_body import ParsedRequest, RemoteImage
from lifecycle_engine.multimodal.limits import (
    MediaLimits,
    check_total,
    read_image_size,
)
from lifecycle_engine.processing.processor import Chat

_PORT = 443
_HOST_CHARS = 253
_CHUNK = 65536
_REDIRECTS = (301, 302, 303, 307, 308)
_HOST = re.compile(r"[a-z0-9_-]+(\.[a-z0-9_-]+)*\.?")
# EndOfStream is raised by a connection that ends during the TLS handshake.
_CONNECTION_ERRORS = (
    OSError,
    h11.RemoteProtocolError,
    anyio.BrokenResourceError,
    anyio.EndOfStream,
)
# IPv6 addresses that end with an IPv4 address.
_NAT64 = ipaddress.ip_network("64:ff9b::/96")
# A list of our own: Python's differs from release to release. From IANA's registries of
# special-purpose addresses, with the tunnels that lead to unknown networks.
_INSIDE_4 = tuple(
    ipaddress.IPv4Network(each)
    for each in (
        *("0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8"),
        *("169.254.0.0/16", "172.16.0.0/12", "192.0.0.0/24", "192.0.2.0/24"),
        *("192.88.99.0/24", "192.168.0.0/16", "198.18.0.0/15", "198.51.100.0/24"),
        *("203.0.113.0/24", "224.0.0.0/3"),
        "168.63.129.16/32",  # Azure's agent, inside of every machine there
    )
)
_GLOBAL_6 = ipaddress.IPv6Network("2000::/3")
_INSIDE_6 = tuple(
    ipaddress.IPv6Network(each)
    for each in ("2001::/23", "2001:db8::/32", "2002::/16", "3fff::/20")
)

Resolve = Callable[[str], Awaitable[list[str]]]
Connect = Callable[[str, str], Awaitable[ByteStream]]


class FetchError(Exception):
    """A file could not be fetched. The message never quotes the URL.

    Attributes:
        status: HTTP status for the client.
    """

    def __init__(self, message: str, *, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchLimits:
    """Limits on what requests may make the server fetch.

    Attributes:
        files: Maximum number of files of one request.
        file_bytes: Maximum size of each file.
        seconds: Timeout for all files of a request together, and for the wait for
            memory before.
        redirects: Maximum number of redirects of each file; each target is checked
            like the first URL.
        bytes: Maximum size of the files of all requests together, until hand-off.
    """

    files: int = 8
    file_bytes: int = 20 * 2**20
    seconds: float = 10.0
    redirects: int = 3
    bytes: int = 256 * 2**20


async def resolve(host: str) -> list[str]:
    """Return the addresses of a host name.

    Raises:
        OSError: The name cannot be resolved.

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
    """Open a TLS connection to *address*; the certificate must be valid for *host*.

    Trusted are the certificates of *context*. Default: those of the system.

    Raises:
        OSError: The connection was refused, or the certificate is invalid.
        anyio.EndOfStream: The connection ended during the handshake.

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


def is_public(address: str) -> bool:
    """Whether an address belongs to the public internet; False for what is none."""
    try:
        ip = ipaddress.ip_address(address)
    except ValueError:
        return False
    if isinstance(ip, ipaddress.IPv4Address):
        return not any(ip in network for network in _INSIDE_4)
    if ip.scope_id is not None:
        return False
    if ip in _NAT64 or ip.ipv4_mapped is not None:
        return is_public(str(ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)))
    return ip in _GLOBAL_6 and not any(ip in network for network in _INSIDE_6)


def _connect_with_system_certificates() -> Connect:
    # Once: reading all certificates blocks the event loop for tens of milliseconds.
    return partial(connect, context=ssl.create_default_context())


class HttpsGet:
    """Fetches files over HTTPS.

    Args:
        limits: Limits on each file.
        resolve: Returns the addresses of a host name.
        connect: Connects to an address, given the host name. Default: `connect` with
            the system's certificates at the time of construction.
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
        self._connect = connect or _connect_with_system_certificates()

    async def __call__(self, url: str) -> bytes:
        """Fetch one file.

        Raises:
            FetchError: The URL is not allowed, or fetching failed.

        Cancellation:
            At any time; the connection is closed.
        """
        for _ in range(self.limits.redirects + 1):
            target = _Target.of(url)
            result = await self._get(target)
            if isinstance(result, bytes):
                return result
            url = result
        raise FetchError(f"redirects more than {self.limits.redirects} times")

    async def _get(self, target: _Target) -> bytes | str:
        """Return the file, or the URL that it redirects to."""
        try:
            address = await self._address(target.host)
            async with await self._connect(address, target.host) as stream:
                return await _HttpExchange(stream, self.limits).run(target)
        except _CONNECTION_ERRORS as error:
            # Without the text, which may contain the address.
            problem = f"could not be fetched ({type(error).__name__})"
        raise FetchError(problem)

    async def _address(self, host: str) -> str:
        addresses = await self._resolve(host)
        if not addresses or not all(map(is_public, addresses)):
            raise FetchError("is not at a public address")
        return addresses[0]


@dataclass(frozen=True, slots=True)
class _Target:
    """The parts of a URL that may be fetched."""

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
            raise FetchError("has no valid URL")
        if parts.scheme != "https" or port not in (None, _PORT):
            raise FetchError(f"is not at an https URL of port {_PORT}")
        if parts.username is not None or parts.password is not None:
            raise FetchError("has a URL with a name or password in it")
        query = f"?{parts.query}" if parts.query else ""
        return cls(url, host, (parts.path or "/") + query)

    def redirect(self, location: str) -> str:
        """The absolute URL of a redirect."""
        try:
            return urljoin(self.url, location)
        except ValueError:
            return ""  # refused as invalid


def _is_ipv6(host: str) -> bool:
    """Whether *host* is an IPv6 address without a zone, which is machine-local."""
    try:
        return ipaddress.IPv6Address(host).scope_id is None
    except ValueError:
        return False


class _HttpExchange:
    """One GET request on one connection."""

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
            raise FetchError("has no valid URL")
        await self._stream.send(self._http.send(head) or b"")
        await self._stream.send(self._http.send(h11.EndOfMessage()) or b"")
        response = await self._event()
        while isinstance(response, h11.InformationalResponse):
            response = await self._event()
        if not isinstance(response, h11.Response):
            raise FetchError("could not be fetched")
        fields = {name.lower(): value for name, value in response.headers}
        if response.status_code in _REDIRECTS and b"location" in fields:
            return target.redirect(fields[b"location"].decode("latin-1"))
        if response.status_code != 200:
            raise FetchError(f"could not be fetched (status {response.status_code})")
        if any(
            name.lower() == b"content-encoding" and value != b"identity"
            for name, value in response.headers
        ):
            raise FetchError("is compressed, though the request did not accept it")
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
        limit = self._limits.file_bytes
        if size > limit:
            raise FetchError(f"is larger than {limit} bytes; scale it down", status=413)

    async def _event(self) -> h11.Event:
        while (event := self._http.next_event()) is h11.NEED_DATA:
            try:
                data = await self._stream.receive(_CHUNK)
            except anyio.EndOfStream:
                data = b""
            self._http.receive_data(data)
        if isinstance(event, h11.Event):
            return event
        raise FetchError("could not be fetched")  # another protocol follows


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteImages:
    """Fetches the images that requests give by URL.

    Attributes:
        get: Fetches one file.
        media: Limits on images.
        gate: Gate over the bytes of files, until hand-off. It is separate from the gate
            over bodies: a request that waits here holds the memory of its body, so
            sharing one gate could deadlock.
        threads: Limits the threads that read the headers of images.
    """

    get: HttpsGet
    media: MediaLimits
    gate: Gate
    threads: anyio.CapacityLimiter = field(repr=False)

    async def fetch(
        self,
        session: Session,
        box: Payload[Chat],
        parsed: ParsedRequest,
        leases: ExitStack,
    ) -> tuple[ParsedRequest, Payload[Chat]]:
        """Fetch the images of a request concurrently.

        Args:
            session: Session of the request.
            box: Its chat, with an empty part for each image; taken here.
            parsed: The request.
            leases: Receives the lease over the bytes; close it at hand-off.

        Returns:
            The request with the sizes of its images, and the payload of its chat.

        Raises:
            ApiError: 400, 413 or 504; it never quotes a URL.
            Refused: As from `Gate.admit`; it waits at most for `FetchLimits.seconds`.

        Cancellation:
            At any time; connections are closed.
        """
        limits, remote = self.get.limits, parsed.remote
        if len(remote) > limits.files:
            message = f"{len(remote)} images by URL; the limit is {limits.files}"
            raise ApiError(400, message, code="too_many_images", param=remote[0].param)
        # Bounded: the request holds the bytes of its body meanwhile.
        size = limits.file_bytes * len(remote)
        lease = await self.gate.admit(bytes=size, max_wait=limits.seconds)
        leases.enter_context(lease)
        files = await self._fetch_all(remote)
        lease.settle(bytes=sum(map(len, files)))
        sizes = [*parsed.image_sizes, *await self._read_sizes(files, remote)]
        check_total(sizes, self.media, param=parsed.fields.images)
        chat = box.take()
        for image, file in zip(remote, files, strict=True):
            content = chat.messages[image.message].content
            assert isinstance(content, list)
            content[image.part] = file
        parsed = replace(
            parsed,
            image_sizes=tuple(sizes),
            remote=(),
        )
        nbytes = sum(size.encoded for size in sizes)
        return parsed, session.box(chat, nbytes=nbytes)

    async def _fetch_all(self, remote: Sequence[RemoteImage]) -> list[bytes]:
        files = [b""] * len(remote)
        problems: list[ApiError] = []
        late = ApiError(504, "An image took too long to fetch", code="image_timeout")

        async def fetch_one(at: int, scope: anyio.CancelScope) -> None:
            try:
                files[at] = await self.get(remote[at].url)
            except FetchError as error:
                problems.append(_problem(error, remote[at].param))
                scope.cancel()

        with anyio.move_on_after(self.get.limits.seconds) as clock:
            async with anyio.create_task_group() as tasks:
                for at in range(len(remote)):
                    tasks.start_soon(fetch_one, at, tasks.cancel_scope)
        if clock.cancelled_caught:
            problems.append(late)
        if problems:
            raise problems[0]
        return files

    async def _read_sizes(
        self, files: Sequence[bytes], remote: Sequence[RemoteImage]
    ) -> list[ImageSize]:
        def run() -> list[ImageSize] | ApiError:
            try:
                return [
                    read_image_size(file, self.media, param=image.param)
                    for file, image in zip(files, remote, strict=True)
                ]
            except ApiError as error:
                # A worker thread refers to what it raised until it runs again.
                return error.with_traceback(None)

        result = await anyio.to_thread.run_sync(run, limiter=self.threads)
        if isinstance(result, ApiError):
            raise result
        return result


def _problem(error: FetchError, param: str) -> ApiError:
    code = "image_too_large" if error.status == 413 else "remote_image_refused"
    return ApiError(error.status, f"The image {error}", code=code, param=param)
