"""HTTP/1.1 of uvicorn by httptools, without the trailers of requests.

Older clients get neither chunks nor a 100, both of which uvicorn sends them. A request
that offers another protocol, such as h2c, keeps its body.

uvicorn --http lifecycle_asgi.uvicorn_protocol:HeadersOnly app:app
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import httptools
from uvicorn.protocols.http.httptools_impl import (
    HttpToolsProtocol,
    RequestResponseCycle,
)

__all__ = ("HeadersOnly",)

_CONNECTION: Final = (b"connection", b"proxy-connection")
# What offers another protocol there.
_OFFERS: Final = (b"upgrade", b"http2-settings")


class _ToTheEnd(RequestResponseCycle):
    """A response without a length ends with the connection: that of HTTP/1.0."""

    without_length = False

    async def send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            headers = [
                each
                for each in message.get("headers", ())
                if each[0].lower() != b"transfer-encoding"
            ]
            message = {**message, "headers": headers}
            names = {name.lower() for name, _ in headers}
            self.without_length = b"content-length" not in names
            if self.without_length:
                self.chunked_encoding = False
        elif self.without_length:
            self.expected_content_length = len(message.get("body", b""))
        await super().send(message)


def answer_without_chunks(cycle: RequestResponseCycle) -> None:
    """Have a request answered as HTTP/1.0 is: with neither chunks nor a 100."""
    cycle.__class__ = _ToTheEnd
    # Versions other than 1.0 may ask for more on the connection whose end is needed.
    cycle.keep_alive = cycle.waiting_for_100_continue = False


class RequestHeadParser:
    """httptools' parser, which ignores offers of another protocol.

    httptools stops after a head that offers one, and takes the body for that protocol,
    or for requests. A server may ignore the offer, so the head is parsed again without
    it. ``curl --http2`` and Java's ``HttpClient`` offer HTTP/2 with a first request.

    While `should_upgrade` is true, the owner must ignore that a head or a message is
    complete, unless it accepts the offer: both are reported again.

    Args:
        owner: Called with what is found.
        accepts: Whether the owner accepts the offer of the current head.
    """

    __slots__ = ("_accepts", "_owner", "_parser")

    def __init__(
        self, owner: HttpToolsProtocol, accepts: Callable[[], bool] = bool
    ) -> None:
        self._owner = owner
        self._accepts = accepts
        self._parser = _new_parser(owner)

    def feed_data(self, data: bytes) -> None:
        """Parse *data*, calling the owner.

        Raises:
            httptools.HttpParserError: Not HTTP, or a CONNECT.
            httptools.HttpParserUpgrade: The owner accepts an offer.
        """
        rest = memoryview(data)
        while rest:
            try:
                self._parser.feed_data(rest)
            except httptools.HttpParserUpgrade as offer:
                if self._accepts():
                    raise
                rest = rest[offer.args[0] :]
            else:
                return
            self._parse_again()

    def _parse_again(self) -> None:
        head = _head(self._parser, self._owner)
        self._parser = _new_parser(self._owner)
        try:
            self._parser.feed_data(head)
        except httptools.HttpParserUpgrade:
            raise httptools.HttpParserError("CONNECT is only for proxies") from None

    def should_upgrade(self) -> bool:
        """Whether the current head offers an upgrade."""
        return bool(self._parser.should_upgrade())

    def should_keep_alive(self) -> bool:
        """Whether the connection may be reused."""
        return bool(self._parser.should_keep_alive())

    def get_http_version(self) -> str:
        """Return the version, such as ``"1.1"``."""
        return str(self._parser.get_http_version())

    def get_method(self) -> bytes:
        """Return the method, such as ``b"POST"``."""
        return bytes(self._parser.get_method())


def _new_parser(owner: HttpToolsProtocol) -> httptools.HttpRequestParser:
    parser = httptools.HttpRequestParser(owner)
    # As in uvicorn: data after the last request is dropped, not refused.
    parser.set_dangerous_leniencies(lenient_data_after_close=True)
    return parser


def _head(parser: httptools.HttpRequestParser, request: HttpToolsProtocol) -> bytes:
    version = parser.get_http_version().encode()
    head = [parser.get_method() + b" " + request.url + b" HTTP/" + version]
    for name, value in request.headers:
        if name in _CONNECTION:
            tokens = [token.strip() for token in value.split(b",")]
            value = b", ".join(it for it in tokens if it.lower() not in _OFFERS)  # noqa: PLW2901
            if not value:
                continue
        # An application may have an answer for a WebSocket.
        if name not in _OFFERS or b"websocket" in value.lower():
            head.append(name + b": " + value)
    return b"\r\n".join([*head, b"", b""])


class HeadersOnly(HttpToolsProtocol):
    """Ignores trailers, which uvicorn's own class appends to the headers.

    Trailers that arrive with the head are there before an application is called, so no
    middleware can tell them from headers. A proxy in front that removes or sets a
    header, such as ``X-Forwarded-For``, never looks at trailers.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._in_head = False
        self._running: RequestResponseCycle | None = None
        self.parser = RequestHeadParser(self, self._should_upgrade)  # type: ignore[assignment]

    def connection_lost(self, exc: Exception | None) -> None:
        """Called when the client has left; uvicorn tells the last request alone."""
        if self._running is not None:
            self._running.disconnected = True
            self._running.message_event.set()
        super().connection_lost(exc)

    def _should_upgrade(self) -> bool:
        # Not behind a request whose response would come second.
        idle = getattr(self.cycle, "response_complete", True)
        return bool(idle and super()._should_upgrade())

    def on_message_begin(self) -> None:
        """Called when a head begins."""
        super().on_message_begin()
        self._in_head = True

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        if cycle.scope["http_version"] != "1.1":  # 0.9 where a line names none
            answer_without_chunks(cycle)
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Called for each header, and for each trailer."""
        if self._in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Called when a head is complete."""
        if not self._will_be_parsed_again():
            self._in_head = False
            super().on_headers_complete()

    def on_message_complete(self) -> None:
        """Called when a body is complete."""
        if not self._will_be_parsed_again():
            super().on_message_complete()

    def _will_be_parsed_again(self) -> bool:
        return self.parser.should_upgrade() and not self._should_upgrade()
