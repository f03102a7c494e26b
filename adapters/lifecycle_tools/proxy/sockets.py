"""WebSockets of uvicorn, with a bound on what a client can make it keep."""

from __future__ import annotations

from typing import Any

from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

_BAD_REQUEST = (
    b"HTTP/1.1 400 Bad Request\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
)


class BoundedSocket(WebSocketsSansIOProtocol):
    """Answers each handshake, and leaves a client that takes nothing.

    uvicorn's own class answers none that it cannot parse, queues a pong for each ping
    of a client that reads nothing, and waits for ever until such a client is closed.
    """

    _pong = b""

    def data_received(self, data: bytes) -> None:
        """Called with what the client has sent."""
        super().data_received(data)
        if self.conn.handshake_exc is not None and not self.handshake_initiated:
            answer = b"".join(self.conn.data_to_send())
            self.transport.write(answer or _BAD_REQUEST)
            self.transport.close()

    def handle_parser_exception(self) -> None:
        """Close a connection on which no frames come; uvicorn expects a handshake."""
        if self.conn.close_sent is None:
            self.disconnected = True  # an answer would find the protocol ended
            self.transport.abort()
        else:
            super().handle_parser_exception()

    def handle_ping(self) -> None:
        """Answer a ping; of those of a client that reads nothing, the last."""
        pongs = b"".join(self.conn.data_to_send())
        if self.writable.is_set():
            self.transport.write(pongs)
        elif pongs:
            self._pong = pongs

    def resume_writing(self) -> None:
        """Called when the client has read."""
        super().resume_writing()
        pong, self._pong = self._pong, b""
        if pong:
            self.transport.write(pong)

    def handle_cont(self, event: Any) -> None:
        """Keep the pieces of a message as one: an object for each takes far more."""
        pieces: list[Any] = self.frames
        if event.fin or not pieces:
            super().handle_cont(event)
        elif isinstance(pieces[0], bytearray):
            pieces[0] += event.data
        else:
            pieces[0] = bytearray(pieces[0]) + event.data

    def keepalive_timeout(self) -> None:
        """Called when the client has answered no ping."""
        super().keepalive_timeout()
        self.transport.abort()  # `close` waits until the client has read everything
