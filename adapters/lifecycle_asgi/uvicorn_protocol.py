"""HTTP/1.1 of uvicorn by httptools, without the trailers of requests.

Older clients get neither chunks nor a 100, both of which uvicorn sends them.

uvicorn --http lifecycle_asgi.uvicorn_protocol:HeadersOnly app:app
"""

from __future__ import annotations

from typing import Any

from uvicorn.protocols.http.httptools_impl import (
    HttpToolsProtocol,
    RequestResponseCycle,
)


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
    cycle.waiting_for_100_continue = False


class HeadersOnly(HttpToolsProtocol):
    """Ignores trailers, which uvicorn's own class appends to the headers.

    Trailers that arrive with the head are there before an application is called, so no
    middleware can tell them from headers. A proxy in front that removes or sets a
    header, such as ``X-Forwarded-For``, never looks at trailers.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._in_head = False

    def on_message_begin(self) -> None:
        """Called when a head begins."""
        super().on_message_begin()
        self._in_head = True

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        if cycle.scope["http_version"] != "1.1":  # 0.9 where a line names none
            answer_without_chunks(cycle)
        super()._start_asgi_task(cycle, app)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Called for each header, and for each trailer."""
        if self._in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Called when a head is complete."""
        self._in_head = False
        super().on_headers_complete()
