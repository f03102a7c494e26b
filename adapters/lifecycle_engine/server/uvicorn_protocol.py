"""uvicorn's HTTP protocol, with timeouts and limits for each connection.

`Connection` adds to uvicorn's protocol: timeouts for slow senders and readers, limits
on heads and pipelining, disconnects reported to every request, and a lingering close.
`BoundedReads` below it bounds reads.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from lifecycle_asgi.uvicorn_protocol import RequestHeadParser, answer_without_chunks

# Pipelined requests that are read while another one runs, and bytes of their bodies,
# which no gate counts. Beyond this a disconnect is not seen until they are answered.
_PIPELINED, _PIPELINED_BYTES = 8, 16384
# Bytes that wait for the end of a turn of the event loop, at most.
_GATHERED_BYTES = 16384
# Bytes of an answer that a client must read within the reader timeout.
_MIN_READ_BYTES = 65536
# Read sizes: for a body that the application has not asked for, and for one it has.
_SMALL_READ, _LARGE_READ = 16384, 262144

Headers = list[tuple[bytes, bytes]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLimits:
    """Timeouts and limits for client connections.

    Attributes:
        head: Seconds for the head of a request, from the connection, or from the first
            byte after the previous request.
        head_bytes: Maximum size of a head, and of framing between the chunks of a body.
        rest: Seconds for the rest of a body that was answered early.
        reader: Seconds for a client to read 64 KiB of an answer, or the rest of it,
            once the system's buffer is full.
        connections: Maximum number of connections; further ones get 503 at once.
        half_closed: Whether a client that has finished sending gets its answer. Most
            clients that finish sending have left: their requests then run on until
            writing to them fails. Without effect on TLS.
    """

    head: float = 10.0
    head_bytes: int = 32768
    rest: float = 30.0
    reader: float = 30.0
    connections: int = 16384
    half_closed: bool = False


def http_protocol(limits: ConnectionLimits | None = None) -> type[asyncio.Protocol]:
    """Return a protocol for ``uvicorn.Config(http=...)``.

    Args:
        limits: Timeouts and limits for each connection.
    """
    limits = limits or ConnectionLimits()

    def protocol(*args: Any, **kwargs: Any) -> BoundedReads:
        connection = Connection(*args, limits=limits, **kwargs)
        return BoundedReads(connection, connection.read_size)

    return cast("type[asyncio.Protocol]", protocol)


class Connection(HttpToolsProtocol):
    """One client connection.

    A disconnect reaches every request of the connection, and no further one is begun;
    uvicorn reports it to the request that was read last, and stops reading behind it.

    If a request is answered before its body has arrived and the connection ends, the
    rest of the body is read and dropped (RFC 9112, 9.6). uvicorn closes at once, and
    the system resets the connection, so that the client may never see the answer.

    Offers of another protocol are ignored, see `RequestHeadParser`.
    """

    # In the instance dict they would exceed CPython's limit for shared keys (thirty
    # names), at over a kilobyte per waiting client.
    __slots__ = (
        "_body_bytes",
        "_cycles",
        "_framing_bytes",
        "_ignore_input",
        "_in_body",
        "_in_head",
        "_limits",
        "_lingering",
        "_message_ended",
        "_read_timer",
        "_send_timer",
        "_unread_bytes",
    )

    def __init__(self, *args: Any, limits: ConnectionLimits, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.parser = RequestHeadParser(self)  # type: ignore[assignment]
        self._limits = limits
        self._cycles: list[Any] = []
        self._in_head = self._in_body = False
        self._message_ended = self._lingering = self._ignore_input = False
        self._framing_bytes = self._body_bytes = 0
        self._send_timer: asyncio.TimerHandle | None = None
        self._read_timer: asyncio.TimerHandle | None = None
        self._unread_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Accept the connection, or answer 503 if there are too many."""
        gathering: Any = GatheringTransport(transport, self.loop)
        super().connection_made(gathering)
        # Bytes are buffered here only once the system's buffer is full. With 0,
        # asyncio's TLS never resumes writing.
        transport.set_write_buffer_limits(high=1)
        if len(self.connections) > self._limits.connections:
            self._write_response(b"503 Service Unavailable\r\nretry-after: 1")
            self.transport.close()
        else:
            self._start_send_timer()

    def read_size(self) -> int:
        """Maximum bytes of the next read: large once the application reads the body.

        A request that waits for admission never gets that far, see `create_app`.
        """
        cycle: Any = self.cycle  # None before the first one, whatever its type says
        if self._lingering:
            return _LARGE_READ
        if cycle is None or not self._in_body:  # a head comes next
            return _SMALL_READ
        taken = self._body_bytes - len(cycle.body)
        return _LARGE_READ if taken > 2 * _SMALL_READ else _SMALL_READ

    def data_received(self, data: bytes | memoryview) -> None:
        """Parse data, within the limits."""
        if self._lingering or self._ignore_input:
            return
        self._message_ended, before = False, self._body_bytes
        super().data_received(data)  # type: ignore[arg-type]
        if self._in_body and self._busy and len(self.cycle.body) >= self.read_size():
            self.flow.pause_reading()  # until the application asks for more
        if self._message_ended or (self._in_body and self._body_bytes > before):
            self._framing_bytes = 0
        elif (self._in_head or self._in_body) and not self._lingering:
            # Of a head, or of chunk headers and trailers.
            self._framing_bytes += len(data)
            if self._framing_bytes > self._limits.head_bytes:
                self._refuse(b"431 Request Header Fields Too Large")
        self._start_send_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """Report the disconnect to every request."""
        for timer in (self._send_timer, self._read_timer):
            if timer is not None:
                timer.cancel()
        self.pipeline.clear()
        for cycle in self._cycles:
            cycle.transport = self.transport  # breaks a reference cycle
            if not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()
        super().connection_lost(exc)

    # uvicorn's annotation is narrower than that of asyncio.
    def eof_received(self) -> bool:  # type: ignore[override]
        """Called when the client has finished sending; returns whether it may read."""
        cycle: Any = self.cycle
        # What was written in this turn: the loop closes the connection after it.
        cast("GatheringTransport", self.transport).flush()
        answering = self._busy and not self._in_body and not self.pipeline
        if not (self._limits.half_closed and answering):
            return False
        if not self.transport.can_write_eof():  # TLS
            return False
        cycle.keep_alive = False
        return True

    def close_after_response(self) -> None:
        """Close after the last response, once the client has finished sending."""
        sending = self._in_body or self._ignore_input
        if not sending or self._lingering or self.transport.is_closing():
            self.transport.close()
        else:
            self.cycle.body = bytearray()
            self._lingering_close()

    def _lingering_close(self) -> None:
        self._lingering = True
        if self.transport.can_write_eof():  # TLS cannot half-close
            self.transport.write_eof()
        self.flow.resume_reading()
        self._stop_send_timer()
        self._send_timer = self.loop.call_later(self._limits.rest, self.transport.close)

    def abort_if_idle(self) -> None:
        """Close now if only the client is waited for.

        It has to read what was written, or to send a body that will be dropped, or the
        end of TLS.
        """
        closing = self._lingering or self.transport.is_closing()
        if closing or self.transport.get_write_buffer_size():
            self.transport.abort()

    def send_400_response(self, msg: str) -> None:
        """Refuse input that is not valid HTTP."""
        self._refuse(b"400 Bad Request", msg.encode())

    def _refuse(self, status: bytes, text: bytes = b"") -> None:
        """Stop parsing; send *status* unless it would end up inside another answer."""
        if self.transport.is_closing():
            return
        if self._in_body and self.pipeline:  # not begun yet: drop it
            self.pipeline.popleft()
            self._cycles.pop()
            self.cycle, self._in_body = self._cycles[-1], False
        if self._busy and not self._in_body:
            # After a complete request, such as a stray byte: that request is answered.
            self._ignore_input, self.cycle.keep_alive = True, False
        elif self._in_body and self._has_begun(self.cycle):
            self.transport.close()
        else:
            if self._in_body:  # the application waits for the rest of the body
                self.cycle.disconnected = self.cycle.response_complete = True
                self.cycle.waiting_for_100_continue = False  # no response follows
                self.cycle.message_event.set()
            self._write_response(status, text)
            self._lingering_close()

    @staticmethod
    def _has_begun(cycle: Any) -> bool:
        """Whether a part of the response was sent, if only by a probe."""
        probed: int = getattr(cycle.transport, "sent", 0)
        return bool(cycle.response_started or probed)

    def _write_response(self, status: bytes, text: bytes = b"") -> None:
        head = b"HTTP/1.1 %b\r\nconnection: close\r\ncontent-length: %d\r\n\r\n"
        self.transport.write(head % (status, len(text)) + text)

    def on_message_begin(self) -> None:
        """Called when a head begins."""
        super().on_message_begin()
        self._in_head, self._framing_bytes = True, 0

    def on_header(self, name: bytes, value: bytes) -> None:
        """Called for each header. Trailer fields are ignored."""
        if self._in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Called when a head is complete."""
        if self.parser.should_upgrade():
            return
        _check_head(self.parser.get_http_version(), self.headers)
        super().on_headers_complete()  # raises for an invalid target
        self._in_head, self._in_body = False, True
        self._cycles = [it for it in self._cycles if not it.response_complete]
        self._cycles.append(self.cycle)
        piped = sum(len(cycle.body) for cycle, _ in self.pipeline)
        if len(self.pipeline) <= _PIPELINED and piped <= _PIPELINED_BYTES:
            self.flow.resume_reading()

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        if cycle.scope["http_version"] == "1.0":
            answer_without_chunks(cycle)
        cycle.transport = _ResponseTransport(self, half_closed=self._limits.half_closed)
        super()._start_asgi_task(cycle, app)

    def on_response_complete(self) -> None:
        """Called when a response is complete; after the last one no request follows."""
        if self._lingering:
            self.server_state.total_requests += 1
        else:
            super().on_response_complete()

    def on_body(self, body: bytes) -> None:
        """Called for each part of a body."""
        self._body_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Called when a body is complete."""
        if self.parser.should_upgrade():
            return
        self._in_body, self._message_ended, self._body_bytes = False, True, 0
        self._stop_send_timer()
        super().on_message_complete()

    @property
    def _busy(self) -> bool:
        """Whether a request is being served; its application then times its body."""
        cycle: Any = self.cycle  # None before the first one, whatever its type says
        return cycle is not None and not cycle.response_complete

    def _start_send_timer(self) -> None:
        if self._busy or self.transport.is_closing():
            self._stop_send_timer()
        elif self._send_timer is None:
            limit = self._limits.rest if self._in_body else self._limits.head
            self._send_timer = self.loop.call_later(limit, self._on_send_timeout)

    def _stop_send_timer(self) -> None:
        if self._send_timer is not None:
            self._send_timer.cancel()
            self._send_timer = None

    def _on_send_timeout(self) -> None:
        self._send_timer = None
        if self._in_head and not self.transport.is_closing():
            self._write_response(b"408 Request Timeout")
        self.transport.close()

    def pause_writing(self) -> None:
        """Called when the system's buffer is full; the client has to read."""
        super().pause_writing()
        self._unread_bytes = self.transport.get_write_buffer_size()
        self._read_timer = self.loop.call_later(self._limits.reader, self._check_reader)

    def resume_writing(self) -> None:
        """Called when the client has read."""
        super().resume_writing()
        if self._read_timer is not None:
            self._read_timer.cancel()
            self._read_timer = None

    def _check_reader(self) -> None:
        self._read_timer = None
        left = self.transport.get_write_buffer_size()
        if self._unread_bytes - left < _MIN_READ_BYTES:
            self.transport.abort()
        else:
            self._unread_bytes = left
            self._read_timer = self.loop.call_later(
                self._limits.reader, self._check_reader
            )


def _check_head(version: str, headers: Headers) -> None:
    """Raise `ValueError`, which is answered with 400, for a head that is ambiguous.

    Proxies in front may read it in another way (RFC 9112, 3.2 and 6.1).
    """
    names = [name for name, _ in headers]
    if version not in ("1.0", "1.1"):
        raise ValueError(f"HTTP/{version} is not served; use HTTP/1.1")
    if names.count(b"host") != 1 and (version == "1.1" or b"host" in names):
        raise ValueError("a request has one Host")
    if version == "1.0" and b"transfer-encoding" in names:
        raise ValueError("HTTP/1.0 knows no Transfer-Encoding")


class GatheringTransport:
    """A transport whose writes of one turn of the event loop leave in one, at its end.

    A write is a system call and wakes the client: once for the head and the body of a
    short answer, and for all events that a stream has at that moment. All else is as
    the transport has it.
    """

    __slots__ = ("_bytes", "_gathered", "_loop", "_transport")

    def __init__(
        self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop
    ) -> None:
        self._transport, self._loop = transport, loop
        self._gathered: list[bytes] = []
        self._bytes = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        """Write *data* at the end of this turn, or now if much has gathered."""
        if not self._gathered:
            self._loop.call_soon(self.flush)
        self._gathered.append(data)
        self._bytes += len(data)
        if self._bytes > _GATHERED_BYTES:
            self.flush()

    def write_eof(self) -> None:
        """Write what has gathered, and the end."""
        self.flush()
        self._transport.write_eof()

    def close(self) -> None:
        """Write what has gathered, and close."""
        self.flush()
        self._transport.close()

    def get_write_buffer_size(self) -> int:
        """Return the bytes that the system has not taken yet."""
        return self._transport.get_write_buffer_size() + self._bytes

    def flush(self) -> None:
        """Write what has gathered."""
        gathered, self._gathered, self._bytes = self._gathered, [], 0
        if gathered and not self._transport.is_closing():
            self._transport.write(b"".join(gathered))


class _ResponseTransport:
    """The transport of one request: closing it may linger."""

    __slots__ = (
        "abort",
        "close",
        "get_extra_info",
        "half_closed",
        "is_closing",
        "write",
    )

    def __init__(self, connection: Connection, *, half_closed: bool) -> None:
        self.half_closed = half_closed
        self.abort = connection.transport.abort
        self.get_extra_info = connection.transport.get_extra_info
        self.write = connection.transport.write
        self.is_closing = connection.transport.is_closing
        self.close = connection.close_after_response


class BoundedReads(asyncio.BufferedProtocol):
    """Reads for a protocol that chooses the size of each read.

    By default an event loop reads 256 KiB at a time from every client, also from those
    that wait for admission.
    """

    def __init__(
        self, protocol: asyncio.Protocol, read_size: Callable[[], int]
    ) -> None:
        self._protocol = protocol
        self._read_size = read_size
        self._buffer = bytearray()

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002
        """Return a buffer for the next read."""
        # A new one for each read: one for all would save nothing, and would mix
        # clients' bytes across event loops.
        self._buffer = bytearray(self._read_size())
        # asyncio's TLS writes to slices of it; slices of a bytearray would be copies.
        return memoryview(self._buffer)

    def buffer_updated(self, nbytes: int) -> None:
        """Pass on what was read."""
        data, self._buffer = memoryview(self._buffer)[:nbytes], bytearray()
        self._protocol.data_received(data)  # type: ignore[arg-type]

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Pass on to the protocol."""
        self._protocol.connection_made(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        """Pass on to the protocol."""
        self._protocol.connection_lost(exc)

    def eof_received(self) -> bool | None:
        """Pass on to the protocol."""
        return self._protocol.eof_received()

    def pause_writing(self) -> None:
        """Pass on to the protocol."""
        self._protocol.pause_writing()

    def resume_writing(self) -> None:
        """Pass on to the protocol."""
        self._protocol.resume_writing()
