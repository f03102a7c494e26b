"""One connection to the upstream: h11 over a stream of anyio.

h11 shows trailers, and lets a response be read while the body is still being sent; the
API of an HTTP client hides both.
"""

from __future__ import annotations

import select
from typing import Final, TypeAlias

import anyio
import h11
from anyio.abc import ByteStream, SocketAttribute

_READ_BYTES: Final = 65536
_MAX_HEAD: Final = 65536
_CLOSE_SECONDS: Final = 1.0

Event: TypeAlias = (
    h11.InformationalResponse | h11.Response | h11.Data | h11.EndOfMessage
)


class UpstreamError(Exception):
    """The upstream does not answer as it should."""

    def __init__(
        self, reason: str, *, status: int = 502, code: str = "upstream_unavailable"
    ) -> None:
        super().__init__(reason)
        self.status = status
        self.code = code


class UpstreamLost(UpstreamError):
    """The connection ended before the response did."""


class UpstreamTimeout(UpstreamError):
    """The upstream took too long."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason, status=504, code="upstream_timeout")


class Connection:
    """One HTTP/1.1 connection, for one request at a time.

    Attributes:
        reused: Whether it has served a request before.
        idle_since: When the last one ended.
    """

    __slots__ = ("_http", "_sending", "_stream", "idle_since", "reused")

    def __init__(self, stream: ByteStream) -> None:
        self._stream = stream
        self._http = h11.Connection(h11.CLIENT, max_incomplete_event_size=_MAX_HEAD)
        self._sending = False
        self.reused = False
        self.idle_since = 0.0

    async def send(self, *events: h11.Event) -> None:
        """Send *events* in one piece.

        Raises:
            UpstreamLost: The connection is closed.
            h11.LocalProtocolError: HTTP does not allow this.

        Cancellation:
            The connection can only be closed.
        """
        data = b"".join(self._http.send(event) or b"" for event in events)
        if not data:
            return
        self._sending = True
        try:
            await self._stream.send(data)
        except (OSError, anyio.BrokenResourceError, anyio.ClosedResourceError):
            raise UpstreamLost("The upstream closed the connection") from None
        self._sending = False

    async def next_event(self) -> Event:
        """Return the next event; waits for its bytes.

        Raises:
            UpstreamError: What came is no response.
            UpstreamLost: The connection was closed before its time.

        Cancellation:
            Nothing is lost.
        """
        while True:
            event = self.ready_event()
            if event is not None:
                return event
            await self._receive()

    def ready_event(self) -> Event | None:
        """Return the next event if it is here already.

        Raises:
            UpstreamError: What came is no response.
            UpstreamLost: The connection was closed before its time.
        """
        try:
            event = self._http.next_event()
        except h11.RemoteProtocolError as error:
            if self._http.trailing_data[1]:
                text = "The upstream closed the connection before its response ended"
                raise UpstreamLost(text) from None
            raise UpstreamError(f"The upstream sent no valid HTTP: {error}") from None
        if isinstance(event, type):
            assert event is h11.NEED_DATA, event  # nothing is read after the end
            return None
        if isinstance(event, h11.ConnectionClosed):
            raise UpstreamLost("The upstream closed the connection without a response")
        assert isinstance(event, Event), event
        return event

    async def _receive(self) -> None:
        try:
            data = await self._stream.receive(_READ_BYTES)
        except anyio.EndOfStream:
            data = b""
        except (OSError, anyio.BrokenResourceError, anyio.ClosedResourceError):
            raise UpstreamLost("The upstream reset the connection") from None
        self._http.receive_data(data)

    def start_next(self, now: float) -> bool:
        """Make ready for another request; false if the connection must be closed."""
        http = self._http
        done = http.our_state is h11.DONE and http.their_state is h11.DONE
        # Bytes behind a response would be taken for the next one.
        if self._sending or not done or http.trailing_data != (b"", False):
            return False
        http.start_next_cycle()
        self.reused, self.idle_since = True, now
        return True

    def is_stale(self) -> bool:
        """Whether an idle connection has something to read: its end, most likely."""
        raw = self._stream.extra(SocketAttribute.raw_socket, None)  # noqa: S610
        if raw is None or raw.fileno() < 0:
            return True
        poll = select.poll()
        poll.register(raw.fileno(), select.POLLIN)
        return bool(poll.poll(0))

    async def aclose(self) -> None:
        """Close at once, whatever is under way; bytes not sent yet are dropped.

        Cancellation:
            Shielded: it is closed in any case.
        """
        with anyio.move_on_after(_CLOSE_SECONDS, shield=True):
            await anyio.aclose_forcefully(self._stream)
