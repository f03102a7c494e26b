"""HTTP/1.1 of uvicorn by httptools, without the trailers of requests.

uvicorn --http lifecycle_asgi.uvicorn_protocol:HeadersOnly app:app
"""

from __future__ import annotations

from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol


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

    def on_header(self, name: bytes, value: bytes) -> None:
        """Called for each header, and for each trailer."""
        if self._in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Called when a head is complete."""
        self._in_head = False
        super().on_headers_complete()
