"""One HTTP connection: bounds on what uvicorn lets a client do for ever."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from .http10 import undivided
from .http_parser import Parser
from .reading import Reading

# Requests on one connection that are read while another one runs, and bytes of their
# bodies, of which no gate knows yet. Behind them nobody is heard to leave.
_PIPELINED, _PIPELINED_BYTES = 8, 16384
# What a client has to read of an answer in the time that it gets.
_READER_BYTES = 65536
# What is read at a time of a body that nobody asks for, and of one that somebody does.
_SIP, _GULP = 16384, 262144


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLimits:
    """What a client may make a server wait for, and keep.

    Attributes:
        head: Seconds until the head of a request is complete, from the connection on,
            or from the first byte behind the last request.
        head_bytes: The longest head, and the most without any of a body within one.
        rest: Seconds for what is left of a body behind an early answer.
        reader: Seconds in which 64 KiB of an answer, or what is left of it, have to be
            read, once the system takes no more of it.
        connections: Of all clients together; further ones get 503 at once.
    """

    head: float = 10.0
    head_bytes: int = 32768
    rest: float = 30.0
    reader: float = 30.0
    connections: int = 16384


def http_protocol(limits: ConnectionLimits | None = None) -> type[asyncio.Protocol]:
    """What ``uvicorn.Config(http=...)`` takes, for a server of one's own.

    Args:
        limits: On each connection.
    """
    limits = limits or ConnectionLimits()

    def made(*args: Any, **kwargs: Any) -> Reading:
        connection = Connection(*args, limits=limits, **kwargs)
        return Reading(connection, connection.appetite)

    return cast("type[asyncio.Protocol]", made)


class _Outlet:
    """What a request has of its connection's transport."""

    __slots__ = ("close", "is_closing", "write")

    def __init__(self, connection: Connection) -> None:
        self.write = connection.transport.write
        self.is_closing = connection.transport.is_closing
        self.close = connection.finish


class Connection(HttpToolsProtocol):
    """uvicorn's, with limits, and with an ear for whoever leaves.

    uvicorn tells a lost connection to the request that was read last, and stops
    reading behind it. Here every request is told, and no further one is begun.

    Where a connection ends with an answer that came before the body, uvicorn closes it,
    and the system resets it: whoever is still sending may never see the answer. Here
    it is told the end, and read on (RFC 9112, 9.6).

    Offers of another protocol are ignored, see `Parser`.
    """

    # With these in its dict, it would share no names with the others' (CPython does so
    # up to thirty): over a kilobyte for each client that waits.
    __slots__ = (
        "_body_bytes",
        "_cycles",
        "_deaf",
        "_dry_bytes",
        "_finished",
        "_in_body",
        "_in_head",
        "_limits",
        "_message_ended",
        "_to_read",
        "_to_send",
        "_unread",
    )

    def __init__(self, *args: Any, limits: ConnectionLimits, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.parser = Parser(self)  # type: ignore[assignment]
        self._limits = limits
        self._cycles: list[Any] = []
        self._in_head = self._in_body = False
        self._message_ended = self._finished = self._deaf = False
        self._dry_bytes = self._body_bytes = 0
        self._to_send: asyncio.TimerHandle | None = None
        self._to_read: asyncio.TimerHandle | None = None
        self._unread = 0

    # The connection -------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take the connection, or say that there are too many."""
        super().connection_made(transport)
        # What waits here waits for the reader alone, the system's buffer being full. Of
        # 0 asyncio's TLS makes that nothing waits, and never lets anybody write.
        transport.set_write_buffer_limits(high=1)
        if len(self.connections) > self._limits.connections:
            self._say(b"503 Service Unavailable\r\nretry-after: 1")
            transport.close()
        else:
            self._watch_sender()

    def appetite(self) -> int:
        """Bytes to read at a time: many once a few sips of the body were taken.

        A request that waits to be let in does not take as many, see `create_app`.
        """
        cycle: Any = self.cycle  # None before the first one, whatever its type says
        if self._finished:
            return _GULP
        if cycle is None or not self._in_body:  # next is a head, and a body that waits
            return _SIP
        return _GULP if self._body_bytes - len(cycle.body) > 2 * _SIP else _SIP

    def data_received(self, data: bytes | memoryview) -> None:
        """Read on, within the limits."""
        if self._finished or self._deaf:
            return
        self._message_ended, before = False, self._body_bytes
        super().data_received(data)  # type: ignore[arg-type]
        if self._in_body and self._busy and len(self.cycle.body) >= self.appetite():
            self.flow.pause_reading()  # until the application asks for more
        if self._message_ended or (self._in_body and self._body_bytes > before):
            self._dry_bytes = 0
        elif (self._in_head or self._in_body) and not self._finished:
            # Of a head, or of what stands between the parts of a body and behind it.
            self._dry_bytes += len(data)
            if self._dry_bytes > self._limits.head_bytes:
                self._refuse(b"431 Request Header Fields Too Large")
        self._watch_sender()

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell every request that its client left."""
        for timer in (self._to_send, self._to_read):
            if timer is not None:
                timer.cancel()
        self.pipeline.clear()
        for cycle in self._cycles:
            cycle.transport = self.transport  # what leads back here would be a cycle
            if not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()
        super().connection_lost(exc)

    def finish(self) -> None:
        """All is said: close, once the client has sent what it is still sending."""
        sending = self._in_body or self._deaf
        if not sending or self._finished or self.transport.is_closing():
            self.transport.close()
        else:
            self.cycle.body = bytearray()
            self._hear_out()

    def _hear_out(self) -> None:
        self._finished = True
        if self.transport.can_write_eof():  # TLS has no half of a connection
            self.transport.write_eof()
        self.flow.resume_reading()
        self._stop_watching_sender()
        self._to_send = self.loop.call_later(self._limits.rest, self.transport.close)

    def give_up(self) -> None:
        """Close now, if there is nothing to wait for but the client.

        Either it is to read what was written, or to send what nobody will read.
        """
        if self._finished or self.transport.get_write_buffer_size():
            self.transport.abort()

    def send_400_response(self, msg: str) -> None:
        """What came is no HTTP."""
        self._refuse(b"400 Bad Request", msg.encode())

    def _refuse(self, status: bytes, text: bytes = b"") -> None:
        """Read no further, and say why where that stands in nobody's answer."""
        if self.transport.is_closing():
            return
        if self._in_body and self.pipeline:  # it was never begun: as if it never came
            self.pipeline.popleft()
            self._cycles.pop()
            self.cycle, self._in_body = self._cycles[-1], False
        if self._busy and not self._in_body:
            # Behind a whole request, such as a byte too many: that one is answered.
            self._deaf, self.cycle.keep_alive = True, False
        elif self._in_body and self.cycle.response_started:
            self.transport.close()
        else:
            if self._in_body:  # whoever waits for the rest of it waits in vain
                self.cycle.disconnected = self.cycle.response_complete = True
                self.cycle.waiting_for_100_continue = False  # behind the end of all
                self.cycle.message_event.set()
            self._say(status, text)
            self._hear_out()

    def _say(self, status: bytes, text: bytes = b"") -> None:
        head = b"HTTP/1.1 %b\r\nconnection: close\r\ncontent-length: %d\r\n\r\n"
        self.transport.write(head % (status, len(text)) + text)

    # Requests -------------------------------------------------------------------

    def on_message_begin(self) -> None:
        """A head begins."""
        super().on_message_begin()
        self._in_head, self._dry_bytes = True, 0

    def on_header(self, name: bytes, value: bytes) -> None:
        """A field has been read; those behind a body are nobody's to believe."""
        if self._in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """A head has been read."""
        if self.parser.should_upgrade():
            return
        if self.parser.get_http_version() == "1.0":
            self.expect_100_continue = False  # which that version does not know
        super().on_headers_complete()  # which raises where a target is none
        self._in_head, self._in_body = False, True
        self._cycles = [it for it in self._cycles if not it.response_complete]
        self._cycles.append(self.cycle)
        piped = sum(len(cycle.body) for cycle, _ in self.pipeline)
        if len(self.pipeline) <= _PIPELINED and piped <= _PIPELINED_BYTES:
            self.flow.resume_reading()

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        if cycle.scope["http_version"] == "1.0":
            app = undivided(app, cycle)
        cycle.transport = _Outlet(self)
        super()._start_asgi_task(cycle, app)

    def on_response_complete(self) -> None:
        """An answer has been given; behind a last one there is no other."""
        if self._finished:
            self.server_state.total_requests += 1
        else:
            super().on_response_complete()

    def on_body(self, body: bytes) -> None:
        """Some of a body has been read."""
        self._body_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        """A body has been read."""
        if self.parser.should_upgrade():
            return
        self._in_body, self._message_ended, self._body_bytes = False, True, 0
        self._stop_watching_sender()
        super().on_message_complete()

    # Clients that send slowly ---------------------------------------------------

    @property
    def _busy(self) -> bool:
        """Whether a request is served: then its application looks after its body."""
        cycle: Any = self.cycle  # None before the first one, whatever its type says
        return cycle is not None and not cycle.response_complete

    def _watch_sender(self) -> None:
        if self._busy or self.transport.is_closing():
            self._stop_watching_sender()
        elif self._to_send is None:
            limit = self._limits.rest if self._in_body else self._limits.head
            self._to_send = self.loop.call_later(limit, self._sent_too_slowly)

    def _stop_watching_sender(self) -> None:
        if self._to_send is not None:
            self._to_send.cancel()
            self._to_send = None

    def _sent_too_slowly(self) -> None:
        self._to_send = None
        if self._in_head and not self.transport.is_closing():
            self._say(b"408 Request Timeout")
        self.transport.close()

    # Clients that read slowly ---------------------------------------------------

    def pause_writing(self) -> None:
        """The system takes no more: the client has to read."""
        super().pause_writing()
        self._unread = self.transport.get_write_buffer_size()
        self._to_read = self.loop.call_later(self._limits.reader, self._look_at_reader)

    def resume_writing(self) -> None:
        """The client has read."""
        super().resume_writing()
        if self._to_read is not None:
            self._to_read.cancel()
            self._to_read = None

    def _look_at_reader(self) -> None:
        self._to_read = None
        left = self.transport.get_write_buffer_size()
        if self._unread - left < _READER_BYTES:
            self.transport.abort()
        else:
            self._unread = left
            self._to_read = self.loop.call_later(
                self._limits.reader, self._look_at_reader
            )
