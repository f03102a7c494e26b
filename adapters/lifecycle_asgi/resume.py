"""Streams that outlive their connection: `ResumableStreams`, and `Last-Event-ID`.

A generator runs in a task of `ResumableStreams`, as a session of a `SessionRegistry`,
and its latest events are kept. A response reads them from there; what the client's
leaving means is the policy of each stream.
"""

from __future__ import annotations

import math
import re
import secrets
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from typing import Any, Final, Literal, Self, TypeAlias, cast

import anyio
import anyio.lowlevel
from anyio.abc import TaskGroup

from lifecycle import (
    GateClosed,
    GateFull,
    Refused,
    Session,
    SessionEnded,
    SessionRegistry,
)
from lifecycle.lowlevel import check_int, check_seconds, clear_traceback_frames
from lifecycle_asgi.asgi_types import Receive, Scope, Send
from lifecycle_asgi.disconnects import transport_of
from lifecycle_asgi.middleware import CLIENT_CLOSED_REQUEST, DISCONNECT
from lifecycle_asgi.refusals import ApiError, protocol_response, refusal_response
from lifecycle_asgi.request import SCOPE_KEY, asynchronous
from lifecycle_asgi.responses import send_response

OnDisconnect: TypeAlias = Literal["cancel", "detach"] | float
Found: TypeAlias = "tuple[EventStream, int]"

# An event: lines, and an empty one. A bare CR would be a line of its own to browsers.
# Possessive: to go back, the pattern would keep hundreds of bytes for each line.
_EVENT: Final = re.compile(rb"((?:[^\r\n]++\r?\n)++)\r?\n")
_ID_BYTES: Final = 24  # of randomness, as 32 characters
_EVENT_ID: Final = re.compile(r"([A-Za-z0-9_-]{32})(?:\.([0-9]{1,15}))?")
# What the id of the session has of it. Logs show that one, and it opens nothing.
_SHOWN: Final = 12
# Beside the bytes of an event, so that many small ones are bounded, too.
_EVENT_OVERHEAD: Final = 64
_SEND_BYTES: Final = 65536
_CLOSE_SECONDS: Final = 1.0


class ResumableResponse:
    """A response of `ResumableStreams`: an ASGI application.

    Attributes:
        stream: The id of the stream, which is in the header ``x-stream-id``, too.
        raw_headers: The headers that it sends.
    """

    def __init__(
        self,
        find: Callable[[], Found],
        detach: Callable[[EventStream, Reader], None],
        stream: str,
    ) -> None:
        self._find = find
        self._detach = detach
        self.stream = stream
        self.raw_headers: list[tuple[bytes, bytes]] = [
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"cache-control", b"no-store"),
            (b"x-accel-buffering", b"no"),  # nginx would hold events back
            (b"x-stream-id", stream.encode()),
        ]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events.

        A response that the end of the server cuts off has no error: that would be a
        traceback in the log for each client.

        Raises:
            Exception: The error of the generator.

        Cancellation:
            Counts as the client's leaving: the policy of the stream decides.
        """
        try:
            stream, after = self._find()
        except ApiError as error:
            await send_response(send, protocol_response(scope, error))
            return
        except Refused as refusal:
            await send_response(send, refusal_response(refusal))
            return
        reader = stream.attach(after)
        try:
            await self._send_watched(stream, reader, receive, send)
            # Not before: another may take over while that ends, or it is cancelled.
            reader.error = stream.take_error(reader)
        finally:
            self._detach(stream, reader)
        if reader.error is None:
            await self._finish(reader, scope, send)
        elif getattr(reader.error, "outcome", None) == "shutdown" and await _cut_off(
            reader, scope, receive, send
        ):
            reader.error = None
        else:
            try:
                raise reader.error
            finally:
                reader.error = None  # a frame that refers to its own exception

    async def _send_watched(
        self, stream: EventStream, reader: Reader, receive: Receive, send: Send
    ) -> None:
        """Send until the end, until the client leaves, or another takes over."""
        errors: list[Exception] = []  # of the server; the task group would wrap one

        async def listen() -> None:
            try:
                while (await receive())["type"] != DISCONNECT:
                    pass
            except Exception as error:  # noqa: BLE001 - raised below
                errors.append(error)
            reader.scope.cancel()

        with reader.scope:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(listen)
                try:
                    await self._send(stream, reader, send)
                except Exception as error:  # noqa: BLE001 - raised below
                    errors.append(error)
                tasks.cancel_scope.cancel()
        if errors:
            raise errors.pop()

    async def _finish(self, reader: Reader, scope: Scope, send: Send) -> None:
        """Send a response, as middleware may rely on one, where none has begun."""
        if reader.replaced and not reader.begun:
            what = "Another client has resumed this stream"
            taken = ApiError(409, f"{what}; leave it to that one", code="stream_taken")
            await send_response(send, protocol_response(scope, taken))
        elif not reader.begun:
            headers = [(b"content-length", b"0")]
            await send_response(send, (CLIENT_CLOSED_REQUEST, headers, b""))

    async def _send(self, stream: EventStream, reader: Reader, send: Send) -> None:
        if not stream.last:  # a refusal may come first, and be the response
            await stream.read(reader)
        done = stream.ended and reader.at == stream.last
        if not done or stream.error is None:
            reader.begun = True
            status = 204 if done and stream.last else 200
            start = {"type": "http.response.start", "status": status}
            await send({**start, "headers": self.raw_headers})
        while events := await stream.read(reader):
            body = b"".join(events)
            part = {"type": "http.response.body", "body": body, "more_body": True}
            await send(part)
            reader.at += len(events)
            stream.wake()
        reader.reached_end = True
        if stream.error is None:
            await send({"type": "http.response.body", "body": b""})


async def _cut_off(reader: Reader, scope: Scope, receive: Receive, send: Send) -> bool:
    """End a response without its end; say why if nothing of it was sent.

    False if its connection is not known: then an error alone keeps the server from
    ending the response as if it were complete.
    """
    if not reader.begun:
        closed = GateClosed("the server is shutting down; ask another one")
        await send_response(send, refusal_response(closed))
        return True
    request = scope.get(SCOPE_KEY)
    transport = request.transport() if request else transport_of(receive, send)
    is_http1 = scope.get("http_version", "")[:2] == "1."
    if not is_http1 or not hasattr(transport, "is_closing"):
        return False
    # A server logs an error for a response without its end, but for those whose client
    # has left.
    transport.close()
    with anyio.move_on_after(_CLOSE_SECONDS):
        while (await receive())["type"] != DISCONNECT:
            pass
    return True


class ResumableStreams:
    """Streams of server-sent events that clients may leave, and resume.

    ``async with streams:`` lives as long as the server, inside of that of *sessions*.
    Leaving it ends all streams with ``"shutdown"``. For FastAPI and Starlette, take
    `lifecycle_asgi.starlette.ResumableStreams`.

    Each event gets an id, and a client that returns sends the last one it got as
    ``Last-Event-ID``, as browsers do by themselves. A stream has one client: one that
    resumes takes over, and the response to the one before is cut off.

    The latest events of a stream are kept. While a client is attached, the generator
    waits for it where all of these are still to be sent. While none is, the work goes
    on, and the oldest events are dropped: a client that needs them gets a 410, and
    never an answer with a gap.

    Args:
        sessions: Each stream is one of its sessions, until its generator has ended.
            The session's id is the first 12 characters of the stream's.
        keep: Seconds that a stream whose generator has ended can be resumed.
        max_bytes: Limit on the events of one stream that are kept. An event that is
            larger is kept alone.
        max_streams: Limit on streams. Beyond it those that have ended are dropped, the
            first to expire first; where all are running, the next is refused by 503.

    Raises:
        TypeError: A limit is no whole number, or *keep* no number.
        ValueError: *keep* is negative, or a limit is less than 1.
    """

    _response: type[ResumableResponse] = ResumableResponse

    def __init__(
        self,
        sessions: SessionRegistry,
        *,
        keep: float = 30.0,
        max_bytes: int = 2**20,
        max_streams: int = 1000,
    ) -> None:
        check_int(1, max_bytes=max_bytes, max_streams=max_streams)
        check_seconds(keep=keep)
        self._sessions = sessions
        self._keep = keep
        self._max_bytes = max_bytes
        self._max_streams = max_streams
        self._streams: dict[str, EventStream] = {}
        self._tasks: TaskGroup | None = None
        self._closing = False

    def start(
        self,
        source: AsyncIterator[Any] | Iterator[Any],
        *,
        on_disconnect: OnDisconnect = "cancel",
        owner: str | None = None,
    ) -> ResumableResponse:
        """Return the response that starts *source* when it is sent.

        Its status is sent with the first event. An error of *source* is raised there,
        or in the response of the next client that resumes.

        Args:
            source: An async generator, or a blocking one, which runs in a thread. Each
                item is one event with the empty line at its end, as text, bytes, or an
                object with ``encode()``. Of its own ``id`` none is left.
            on_disconnect: ``"cancel"`` closes *source* when the client leaves. A number
                lets it run for so many seconds without a client, and ``"detach"`` until
                its end.
            owner: The only one to resume it, such as the id of a user: the id of the
                stream alone is not enough then.

        Raises:
            TypeError: *source* cannot be iterated, or *on_disconnect* is none of these.
            ValueError: *on_disconnect* is negative.
        """
        source = cast("AsyncIterator[Any]", asynchronous(source))
        if not hasattr(source, "__anext__"):
            kind = type(source).__name__
            raise TypeError(f"a stream takes an async generator, not {kind}")
        patience = _patience(on_disconnect)
        id_ = secrets.token_urlsafe(_ID_BYTES)
        stream = EventStream(id_, owner, patience, self._max_bytes)
        return self._response(partial(self._open, stream, source), self.detach, id_)

    def resume(
        self, last_event_id: str | None, *, owner: str | None = None
    ) -> ResumableResponse:
        """Return the response that sends what follows *last_event_id*, and goes on.

        Its status is 204 if the stream has ended and nothing is missing, which tells
        browsers not to connect again; 400 for what is no id, 404 for a stream that is
        unknown, of another *owner*, or gone, and 410 where events are missing.

        Args:
            last_event_id: ``Last-Event-ID`` of the request; the id of a stream stands
                for all of its events.
            owner: As of `start`.
        """
        match = _EVENT_ID.fullmatch(last_event_id or "")
        find = partial(self._find, match, owner)
        return self._response(find, self.detach, match[1] if match else "")

    async def __aenter__(self) -> Self:
        if self._tasks is not None:
            raise RuntimeError("this ResumableStreams is already entered; make another")
        self._closing, self._earlier = False, anyio.Event()
        self._expiring = anyio.CancelScope()
        self._tasks = await anyio.create_task_group().__aenter__()
        self._tasks.start_soon(self._expire)
        return self

    async def __aexit__(self, *_: object) -> None:
        tasks, self._closing = self._tasks, True
        assert tasks is not None
        streams, self._streams = list(self._streams.values()), {}
        try:
            self._expiring.cancel()
            for stream in streams:
                stream.session.stop("shutdown")
            # Without the error of the block, which it would put in a group. Each
            # generator has its seconds to close.
            await tasks.__aexit__(None, None, None)  # noqa: ASYNC102
        finally:
            self._tasks = None
            for stream in streams:  # also where its task never ran
                stream.end(_shut_down())

    def _open(self, stream: EventStream, source: AsyncIterator[Any]) -> Found:
        """Start a stream: it has a client from its first moment on."""
        if self._tasks is None:
            what = "this ResumableStreams is not entered"
            raise RuntimeError(f"{what}; enter it where the server starts")
        if self._closing:
            raise GateClosed("the server is shutting down; ask another one")
        self._make_room()
        stream.session = self._sessions.open(stream.id[:_SHOWN])
        self._streams[stream.id] = stream
        self._tasks.start_soon(self._run, stream, source)
        return stream, 0

    def _find(self, match: re.Match[str] | None, owner: str | None) -> Found:
        if match is None:
            what = "Last-Event-ID is missing, or no event of this server has it"
            raise ApiError(400, f"{what}; send the id of the last event", code="bad_id")
        stream, after = self._streams.get(match[1]), int(match[2] or 0)
        if stream is None or stream.owner != owner:
            what = "There is no such stream, or it has expired"
            raise ApiError(404, f"{what}; start another", code="stream_not_found")
        if after > stream.last:
            what = f"The stream has sent {stream.last} events, and not yet {after}"
            raise ApiError(400, f"{what}; send the id of the last one", code="bad_id")
        if after < stream.first - 1:
            what = f"Event {after + 1} is not kept any more, only from {stream.first}"
            raise ApiError(410, f"{what}; start another stream", code="events_gone")
        return stream, after

    def _make_room(self) -> None:
        if len(self._streams) < self._max_streams:
            return
        streams = self._streams.values()
        ended = [each for each in streams if each.ended and each.reader is None]
        if not ended:
            raise GateFull(f"{self._max_streams} streams are running; try again later")
        self._drop(min(ended, key=lambda stream: stream.expires))

    async def _run(self, stream: EventStream, source: AsyncIterator[Any]) -> None:
        error: Exception | None = _shut_down()
        try:
            with stream.session as session:
                async with session.stream(source) as items:
                    async for item in items:
                        await stream.put(item)
                        del item
            error = None
        except Exception as raised:  # noqa: BLE001 - for the client, as it was raised
            error = _without_payload(raised)
        except anyio.get_cancelled_exc_class():  # noqa: ASYNC103
            # Of this generator alone, which awaited what others cancel, it would end
            # the task group, with the streams of all other clients.
            if anyio.current_effective_deadline() == -math.inf:
                raise
            what = "the generator of the stream was cancelled; start another"
            error = SessionEnded(what, outcome="cancelled")
        finally:
            stream.end(error)
            del error
            if stream.reader is None:
                self._leave_alone(stream)

    def detach(self, stream: EventStream, reader: Reader) -> None:
        """The response of *reader* is over. Harmless if another has taken over."""
        if stream.reader is not reader:
            return
        stream.reader = None
        stream.wake()
        if reader.error is not None:  # reported, and so done with
            self._drop(stream)
        else:
            self._leave_alone(stream)

    def _leave_alone(self, stream: EventStream) -> None:
        """Decide how long a stream without a client is kept."""
        seconds = stream.patience
        if stream.ended and seconds is not None:
            seconds = self._keep
        if not seconds:
            self._drop(stream)
        else:
            stream.expires = anyio.current_time() + seconds
            self._earlier.set()

    def _drop(self, stream: EventStream) -> None:
        """Forget a stream, and end its generator if that still runs. Idempotent."""
        if self._streams.get(stream.id) is stream:
            del self._streams[stream.id]
            stream.session.stop("client_gone")

    async def _expire(self) -> None:
        with self._expiring:
            while True:
                self._earlier = anyio.Event()
                with anyio.CancelScope(deadline=self._drop_expired()):
                    await self._earlier.wait()

    def _drop_expired(self) -> float:
        """Drop what has expired; return when the next one does."""
        now = anyio.current_time()
        for stream in list(self._streams.values()):
            if stream.expires <= now:
                self._drop(stream)
        due = [stream.expires for stream in self._streams.values()]
        return min(due, default=math.inf)


class Reader:
    """A response that reads a stream.

    Attributes:
        at: The last event that it has sent.
        scope: Cancelled when its client leaves, or another one takes over.
        replaced: Whether another one has.
        begun: Whether its status was sent.
        reached_end: Whether all events were sent, and the generator has ended.
        error: The error of the generator, to be raised by the response.
    """

    __slots__ = ("at", "begun", "error", "reached_end", "replaced", "scope")

    def __init__(self, at: int) -> None:
        self.at = at
        self.scope = anyio.CancelScope()
        self.begun = self.replaced = self.reached_end = False
        self.error: Exception | None = None


class EventStream:
    """A stream: its latest events, its reader, and how it ended.

    Attributes:
        id: Its id; the ids of its events begin with it.
        owner: The only one to resume it.
        patience: Seconds that it runs without a client; ``None`` if it is not kept.
        session: Of it, once it has started.
        reader: The response that reads it, if there is one.
        last: The number of its latest event.
        ended: Whether its generator has ended.
        error: The error of the generator, until a client got it.
        expires: When it is dropped.
    """

    session: Session

    def __init__(
        self, id_: str, owner: str | None, patience: float | None, max_bytes: int
    ) -> None:
        self.id = id_
        self.owner = owner
        self.patience = patience
        self.reader: Reader | None = None
        self.last = 0
        self.ended = False
        self.error: Exception | None = None
        self.expires = math.inf
        self._events: deque[bytes] = deque()
        self._bytes = 0
        self._max_bytes = max_bytes
        self._changed: anyio.Event | None = None

    @property
    def first(self) -> int:
        """The number of the oldest event that is kept."""
        return self.last - len(self._events) + 1

    def attach(self, after: int) -> Reader:
        """Read from now on by a new reader, which takes over."""
        old, self.reader = self.reader, Reader(after)
        self.expires = math.inf
        if old is not None:
            old.replaced = True
            old.scope.cancel()
        return self.reader

    async def put(self, item: Any) -> None:
        """Append an event.

        Cancellation:
            It is not appended.
        """
        event = _numbered(item, f"{self.id}.{self.last + 1}")
        while self._events and self._bytes + _size(event) > self._max_bytes:
            if self.reader is None or self.reader.at >= self.first:
                self._bytes -= _size(self._events.popleft())
            else:
                await self._wait()
        # A generator that never waits would keep the event loop.
        await anyio.lowlevel.checkpoint()
        self._events.append(event)
        self._bytes += _size(event)
        self.last += 1
        self.wake()

    async def read(self, reader: Reader) -> list[bytes]:
        """Wait for events that *reader* has not sent; none means the end.

        Cancellation:
            Changes nothing.
        """
        # A replaced one is cancelled here: what it would send next may be gone.
        while reader.replaced or not (self.ended or reader.at < self.last):
            await self._wait()
        events: list[bytes] = []
        nbytes = 0
        for place in range(reader.at - self.last, 0):  # from the end: that is quick
            events.append(self._events[place])
            nbytes += len(events[-1])
            if nbytes >= _SEND_BYTES:
                break
        return events

    def end(self, error: Exception | None) -> None:
        """Note how the generator ended. Idempotent."""
        if not self.ended:
            self.ended, self.error = True, error
            self.wake()

    def take_error(self, reader: Reader) -> Exception | None:
        """Return the error of the generator if *reader* is the one that gets it."""
        if self.reader is not reader or not reader.reached_end:
            return None
        error, self.error = self.error, None
        return error

    def wake(self) -> None:
        """Have the generator and the reader look again."""
        changed, self._changed = self._changed, None
        if changed is not None:
            changed.set()

    async def _wait(self) -> None:
        if self._changed is None:
            self._changed = anyio.Event()
        await self._changed.wait()


def _numbered(item: Any, id_: str) -> bytes:
    """Return the event *item* with an id; of two, the later one counts."""
    data = item.encode() if hasattr(item, "encode") else item
    match = _EVENT.fullmatch(data) if isinstance(data, bytes) else None
    if match is None:
        number, kind = id_.rpartition(".")[2], type(item).__name__
        what = f"item {number} of the stream, of type {kind}, is not one event"
        raise ValueError(f'{what}: yield "data: ...", with an empty line at its end')
    return b"%bid: %b\n\n" % (match[1], id_.encode())


def _size(event: bytes) -> int:
    return len(event) + _EVENT_OVERHEAD


def _without_payload(error: Exception) -> Exception:
    """Return *error* without the frame that caught it: that keeps its stream."""
    clear_traceback_frames(error)
    trace = error.__traceback__
    return error.with_traceback(trace and trace.tb_next)


def _shut_down() -> SessionEnded:
    message = "the stream was ended: the server is shutting down"
    return SessionEnded(message, outcome="shutdown")


def _patience(on_disconnect: OnDisconnect) -> float | None:
    if on_disconnect == "cancel":
        return None
    if on_disconnect == "detach":
        return math.inf
    check_seconds(on_disconnect=on_disconnect)
    return on_disconnect
