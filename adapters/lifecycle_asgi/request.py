"""The state of one request: `RequestScope`, and the iterators that it closes."""

# ruff: noqa: SLF001 - the copies that frameworks keep are in private attributes

from __future__ import annotations

import inspect
import logging
import re
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Callable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import AsyncExitStack
from contextvars import ContextVar
from functools import partial
from types import MappingProxyType
from typing import Any, Final, Generic, Literal, Protocol, Self, TypeVar, overload

import anyio
import anyio.to_thread

from lifecycle import in_thread
from lifecycle.events import Outcome
from lifecycle.lowlevel import describe_error
from lifecycle_asgi.asgi_types import Message, Scope
from lifecycle_asgi.events import (
    LiveRequest,
    Phase,
    PhaseTimer,
    RequestRecorder,
    request_outcome,
)

T = TypeVar("T")
S = TypeVar("S", bound="Closable")

SCOPE_KEY = "lifecycle"
"""Key of the `RequestScope` in the ASGI scope, set by `LifecycleMiddleware`."""
FRAMING: Final = (b"content-length", b"transfer-encoding")
"""Headers without which a request of HTTP/1 has no body."""
HOST: Final = re.compile(
    rb"(\[[0-9a-f:.]+\]|[\w.~!$&'()*+,;=%-]*)(:[0-9]*)?", re.IGNORECASE
)
"""A ``Host`` (RFC 3986, 3.2): no user, and nothing but a port behind an address."""
ID: Final = b"x-request-id"
"""The header that names a request, and its response."""
IDS: Final = frozenset({ID, b"request-id"})
"""The same, and what Anthropic's API calls it."""
SAFE_ID: Final = re.compile(rb"[A-Za-z0-9._-]{1,128}")
"""An id that a header, a log and a terminal may have."""
_log: Final = logging.getLogger("lifecycle")
# Longer numbers are no lengths, and slow to read.
_MOST_DIGITS: Final = 18


def keep_head(scope: Scope) -> None:
    """Keep the headers of a request as they are when it reaches a middleware.

    uvicorn with httptools appends the trailers of a chunked body to the list that it
    put into the scope, while the body arrives. Middleware that waits for the body would
    show the application those, too: a key, or an address, that no proxy in front has
    seen.
    """
    # In the scope itself: what middleware above and below finds there stays the same.
    scope["headers"] = list(scope.get("headers", ()))


class Attachable(Protocol):
    """What can be attached to a request, such as a `lifecycle.Session`."""

    @property
    def cancelled_as(self) -> str:
        """Outcome of the session if its owner is cancelled."""

    @cancelled_as.setter
    def cancelled_as(self, outcome: Literal["client_gone"]) -> None: ...


class Closable(Protocol):
    """An async generator, a `lifecycle.Stream`, or another object with ``aclose``."""

    async def aclose(self) -> object:
        """Close it."""


class AdmittedBody(Protocol):
    """What a request's body was admitted with, by `Admission`."""

    def release(self) -> None:
        """Release the lease."""


class RequestScope:
    """State of one request and its client, found in ``scope["lifecycle"]``.

    A cancellation alone does not say what caused it. Sessions attached here are marked
    before the cancellation is delivered, so that a disconnect is counted as
    ``client_gone`` and not as ``cancelled``.

    A stream given to `own` or `begin` is closed when the application has ended, in the
    task that the server called, however the response ended. Most frameworks never close
    the generator of a body: a generator left at a ``yield`` is closed when the garbage
    collector finds it, during another request, and one that was never iterated runs
    none of its ``finally`` blocks.

    Attributes:
        body: What the request's body was admitted with, if it still holds that.
        probe_waiting: Asks the clients whose bodies wait unread whether they are still
            there, and returns how many were asked. Those that have left are noticed
            after a round trip. For a queue that would refuse somebody for them.
        transport: Returns the connection of HTTP/1 under it, where that is known.
    """

    __slots__ = (
        "_attached",
        "_cancelled_when_gone",
        "_client_gone",
        "_ends",
        "_kept",
        "_live",
        "_owned",
        "_recorder",
        "_shown",
        "body",
        "probe_waiting",
        "transport",
    )

    def __init__(self, *, cancelled_when_gone: bool = False) -> None:
        self._cancelled_when_gone = cancelled_when_gone
        self._attached: list[Attachable] = []
        self._ends: list[Callable[[], object]] = []
        self._kept: list[Callable[[], object]] = []
        self._owned: list[Closable] = []
        self.body: AdmittedBody | None = None
        self.probe_waiting: Callable[[], int] = int
        self.transport: Callable[[], Any] = _no_transport
        self._recorder: RequestRecorder | None = None
        self._shown: LiveRequest | None = None
        self._client_gone = False
        self._live = True

    def __repr__(self) -> str:
        state = "gone" if self._client_gone else "connected"
        return f"<RequestScope client {state}, {len(self._attached)} attached>"

    @property
    def client_gone(self) -> bool:
        """Whether the client disconnected before its response was complete.

        The value never changes back: servers disagree on whether a second ``receive``
        repeats the disconnect or blocks for ever.
        """
        return self._client_gone

    @property
    def live(self) -> bool:
        """Whether the application still works on the request."""
        return self._live

    def attach(self, session: Attachable) -> None:
        """Have *session* count a cancellation by this client as a disconnect.

        Args:
            session: An object with a settable ``cancelled_as``. If the client has
                disconnected already, it is set at once.

        Raises:
            TypeError: *session* has no such attribute, so a disconnect would be lost.
        """
        if not hasattr(session, "cancelled_as"):
            kind = type(session).__name__
            raise TypeError(f"a session is attached, from sessions.open, not {kind}")
        self._attached.append(session)
        if self._client_gone or self._cancelled_when_gone:
            session.cancelled_as = "client_gone"

    def when_gone(self, end: Callable[[], object]) -> None:
        """Call *end* when the client disconnects, at once if it has already.

        For work elsewhere that has to be told, by applications that notice too late.

        Args:
            end: Called in the event loop, where it must not wait. What it raises is
                logged. Dropped at the end of the request.
        """
        if self._live or self._client_gone:
            self._ends.append(end)
        if self._client_gone:
            self._call_ends()

    def _call_ends(self) -> None:
        ends, self._ends = self._ends, []
        for end in ends:
            try:
                end()
            except Exception as error:  # noqa: BLE001 - of others' code
                failed = "ending the work of a client that left failed: %s"
                _log.warning(failed, describe_error(error))

    @overload
    def own(self, source: S) -> S: ...
    @overload
    def own(self, source: Iterator[T]) -> AsyncGenerator[T, Any]: ...
    def own(self, source: Any) -> Any:
        """Close *source* at the end of the request; returns *source*.

        Args:
            source: An async generator, a `lifecycle.Stream`, or another object with
                ``aclose``. A blocking generator is returned as an async one that runs
                in a thread; see `lifecycle.in_thread`.
        """
        source = asynchronous(source)
        self._owned.append(source)
        return source

    async def begin(
        self, source: AsyncIterator[T] | Iterator[T]
    ) -> PrefetchedIterator[T]:
        """Own *source*, and wait for its first item before the response begins.

        Frameworks send the status before they ask a body for its first item. If that
        item has to be admitted first, a refusal would come after the status.

        Args:
            source: An async generator, a `lifecycle.Stream`, or a blocking generator,
                which runs in a thread.

        Returns:
            An iterator over all items of *source*: the body of a response.

        Raises:
            Exception: What *source* raised before its first item.

        Cancellation:
            Goes through to *source*, which is closed at the end of the request.
        """
        items = self.own(PrefetchedIterator[T]([], asynchronous(source)))
        async for item in items:
            items._first = [item]
            break
        return items

    def phase(self, phase: Phase) -> PhaseTimer:
        """Return a context manager that reports one phase of the request.

        It may be entered after the request has ended, for example for the END of an
        engine's session.
        """
        return PhaseTimer(self._recorder, phase, self._shown)

    def count(self, **counts: int | Callable[[], int]) -> None:
        """Report *counts*, by fixed words, to the observer when the request ends.

        A count may be a function, which returns it when it is reported or shown. A
        later count replaces one of the same word. ``output_tokens`` is shown in the
        live view meanwhile.
        """
        if self._shown is not None and "output_tokens" in counts:
            self._shown.tokens = counts["output_tokens"]
        if self._recorder is not None:
            self._recorder.count(**counts)

    def first_item(self) -> None:
        """Report that the first item of the response is available. Idempotent."""
        if self._recorder is not None:
            self._recorder.first_item()

    def fail(self, error: BaseException) -> None:
        """Report *error* to the observer as the reason of a failure, without its text.

        For applications that turn the error into a response themselves; an error that
        propagates is reported by the middleware.
        """
        if self._recorder is not None:
            self._recorder.fail(error)

    def release_body(self, request: object = None) -> None:
        """Release the lease of the request's body: another body may come. Idempotent.

        Call it at hand-off, when nothing else refers to the body any more. Asking the
        framework for the body after that gives an error or an empty body.

        Args:
            request: The request object of the framework, if it has read the body: it
                keeps a copy, and what it parsed from it, for as long as the response
                lasts. These are dropped. Starlette and FastAPI, Litestar, Quart,
                Django, BlackSheep and aiohttp are supported.

        Raises:
            TypeError: *request* is of an unsupported framework, or of a version that
                keeps its copies elsewhere.
        """
        if request is not None:
            drop_body_copies(request)
        body, self.body = self.body, None
        if body is not None:
            body.release()

    async def close(self, grace: float) -> None:
        """Called by the middleware: close what the request owns. See `close_all`.

        Cancellation:
            Shielded for up to *grace* seconds for each.
        """
        owned, self._owned = self._owned, []
        kept, self._kept = self._kept, []
        try:
            if owned:
                await close_all(owned, grace)
        finally:
            for release in kept:
                call_when_closed(owned, release)

    def mark_client_gone(self) -> None:
        """Called by the middleware: mark all attached sessions as ``client_gone``."""
        self._client_gone = True
        for session in self._attached:
            session.cancelled_as = "client_gone"
        self._call_ends()

    def set_recorder(self, recorder: RequestRecorder) -> None:
        """Called by the middleware: report the request to *recorder*."""
        self._recorder = recorder

    def show(self, shown: LiveRequest, cancel: Callable[[], object]) -> None:
        """Called by the middleware: show phases in the live view, which may cancel."""
        self._shown = shown
        shown.cancel = cancel

    def keep_bytes(self, release: Callable[[], object]) -> None:
        """Called by `Admission`: call *release* once all it owns is closed."""
        self._kept.append(release)
        if self._shown is not None:
            self._shown.keeps_bytes = True

    def end(
        self,
        status: int | None = None,
        error: BaseException | None = None,
        *,
        outcome: Outcome | None = None,
        named: str | None = None,
    ) -> None:
        """Called by the middleware: report the end and drop all references.

        Servers keep the ASGI scope of an idle connection until its next request.

        Args:
            status: HTTP status of the response.
            error: What the application raised.
            outcome: Outcome of a request without a session. Default: by *status*.
            named: The id that the response has in its head.
        """
        self._live = False
        self.body, self.transport = None, _no_transport
        self._ends.clear()
        sessions, self._attached = self._attached, []
        recorder, self._recorder = self._recorder, None
        if recorder is None:
            return
        if isinstance(error, Exception):
            recorder.fail(error)
        ended = [each for each in sessions if getattr(each, "outcome", None)]
        # Of several sessions, one that did not complete says more.
        session: Any = min(ended, key=_completed, default=None)
        if session is None:
            outcome = outcome or request_outcome(
                status, error, client_gone=self._client_gone
            )
            recorder.end(outcome, status, None, named)
        else:
            id_ = getattr(session, "id", None)
            recorder.end(session.outcome, status, id_, named)


def _no_transport() -> None:
    """What a request has no connection by."""


def asynchronous(source: Any) -> Any:
    """Return *source*, or a blocking iterator as one that runs in a thread."""
    kind = type(source)
    if hasattr(kind, "__anext__") or not hasattr(kind, "__next__"):
        return source
    unbegun = [source]
    items = in_thread(_blocking)(unbegun)
    # Of a generator that never began, nothing is to be closed.
    closed = not inspect.isgenerator(source) and hasattr(source, "close")
    return PrefetchedIterator([], items, unbegun) if closed else items


def _blocking(unbegun: list[Iterator[T]]) -> Iterator[T]:
    return unbegun.pop()


def _completed(session: Any) -> bool:
    return bool(session.outcome == "completed")


def is_handled(scope: Scope) -> bool:
    """Whether a `LifecycleMiddleware` above watches the request."""
    found = scope.get(SCOPE_KEY)
    return isinstance(found, RequestScope) and found.live


def is_bodiless(scope: Scope) -> bool:
    """Whether the head says that a request has no body."""
    if scope.get("method") not in ("GET", "HEAD"):
        return False
    return not any(name in FRAMING for name, _ in scope.get("headers", ()))


def allowed_read_ahead(scope: Scope, read_ahead: int) -> int:
    """Return *read_ahead*, or what else is right for this request."""
    if any(name == b"expect" for name, _ in scope.get("headers", ())):
        return 0  # the first `receive` asks the client for the body
    if is_bodiless(scope):
        return max(read_ahead, 1)  # there is nothing to read but the disconnect
    return read_ahead


def declared_length(scope: Mapping[str, Any]) -> int | None:
    """Return the declared length of a body, or ``None`` if only reading tells.

    A chunked body overrides a length, and some servers let both through. A length
    counts only if there is one, of digits: what another reader of the request could
    take for another number is not trusted.
    """
    found = [each for each in scope["headers"] if each[0] in FRAMING]
    if len(found) != 1:
        return None
    name, value = found[0]
    is_length = name == b"content-length" and value.isdigit()
    return int(value) if is_length and len(value) <= _MOST_DIGITS else None


CURRENT: Final[ContextVar[RequestScope | None]] = ContextVar(
    "lifecycle_request", default=None
)
"""The request that the current task works on, for hooks that have no ASGI scope."""


def request_of(scope: Any) -> RequestScope:
    """Return the `RequestScope` of an ASGI scope.

    Args:
        scope: The ASGI scope that the application was called with.

    Raises:
        LookupError: There is no `LifecycleMiddleware` above this application, or the
            scope belongs to a websocket and not to a request.
        TypeError: The argument is no scope, but a request object, for example.
    """
    if not hasattr(scope, "get"):
        kind = type(scope).__name__
        raise TypeError(f"request_of takes a scope, as in request.scope, not {kind}")
    found = scope.get(SCOPE_KEY)
    if isinstance(found, RequestScope):
        return found
    remedy = (
        "wrap the application in lifecycle_asgi.LifecycleMiddleware, or call "
        "lifecycle_asgi.starlette.install(app)"
    )
    if (kind := scope.get("type", "http")) != "http":
        remedy = f"only requests have one, and this is a {kind}"
    raise LookupError(f"scope[{SCOPE_KEY!r}] holds no RequestScope: {remedy}")


class PrefetchedIterator(Generic[T]):
    """An async iterator whose first item is already available.

    Not a generator: an abandoned generator would have to be closed, too.
    """

    __slots__ = ("_first", "_source", "_unbegun")

    def __init__(
        self, first: list[T], source: AsyncIterator[T], unbegun: list[Any] | None = None
    ) -> None:
        self._first = first
        self._source = source
        self._unbegun = unbegun or []

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> T:
        return self._first.pop() if self._first else await self._source.__anext__()

    def when_closed(self, call: Callable[[], object]) -> None:
        """Call *call* once no thread works for the source any more, or now."""
        call_when_closed([self._source], call)

    async def aclose(self) -> None:
        """Drop the first item and close the source.

        Cancellation:
            Goes through to the source.
        """
        self._first.clear()
        close = getattr(self._source, "aclose", None)
        if close is not None:
            await close()
        while self._unbegun:  # no thread will take it any more
            close = self._unbegun.pop().close
            await anyio.to_thread.run_sync(
                close,
                abandon_on_cancel=True,
                limiter=anyio.CapacityLimiter(1),  # all threads may be at work
            )


def call_when_closed(sources: Sequence[Any], call: Callable[[], object]) -> None:
    """Call *call* once no thread works for any of *sources*, or now."""
    for at, source in enumerate(sources, 1):
        if hasattr(source, "when_closed"):  # as what `in_thread` returns
            source.when_closed(partial(call_when_closed, sources[at:], call))
            return
    call()


async def close_all(sources: list[Any], grace: float) -> None:
    """Close *sources* in reverse order; an error of one does not keep others open.

    Raises:
        Exception: Of the last source whose ``aclose`` failed.

    Cancellation:
        Shielded for up to *grace* seconds for each.
    """
    async with AsyncExitStack() as stack:
        for source in sources:
            stack.push_async_callback(_close, source, grace)


async def _close(source: Closable, grace: float) -> None:
    with anyio.CancelScope(shield=True, deadline=anyio.current_time() + grace):
        await source.aclose()


def drop_body_copies(request: object) -> None:
    """Drop the copies of the body that a framework's request object keeps.

    They are attributes of other projects, most of them private: for each framework a
    test measures the memory of a server, and fails when the attributes have moved.

    Raises:
        TypeError: *request* is of an unsupported framework, or of a version that keeps
            its copies elsewhere.
    """
    # ``__class__`` and not ``type``: Quart's request is a proxy.
    for base in request.__class__.__mro__:
        framework = base.__module__.partition(".")[0]
        if framework in _DROP_COPIES:
            _drop_copies_of(framework, request)
            return
    raise TypeError(
        f"release_body knows the requests of {', '.join(_DROP_COPIES)}, not "
        f"{type(request).__qualname__}; read the body where nothing keeps it"
    )


def _drop_copies_of(framework: str, request: object) -> None:
    try:
        _DROP_COPIES[framework](request)
    except AttributeError as error:
        raise TypeError(
            f"release_body does not know the requests of this version of {framework}: "
            f"no {error.name}; read the body where nothing keeps it"
        ) from None


def _drop_starlette(request: Any) -> None:
    for name in ("_body", "_json"):
        vars(request).pop(name, None)


def _drop_litestar(request: Any) -> None:
    from litestar.types import Empty

    _reset(request, Empty, "_body", "_json", "_msgpack")
    # Shared by all request objects of one scope.
    _reset(request._connection_state, Empty, "body", "json", "msgpack")


def _drop_quart(request: Any) -> None:
    request.body.clear()
    request._cached_json = dict.fromkeys(request._cached_json, ...)


def _drop_django(request: Any) -> None:
    vars(request).pop("_body", None)
    request._stream.close()


def _drop_blacksheep(request: Any) -> None:
    request.content.dispose()


def _drop_aiohttp(request: Any) -> None:
    _reset(request, None, "_read_bytes")


def _reset(holder: Any, value: object, *names: str) -> None:
    for name in names:
        getattr(holder, name)  # raises for a version that keeps the copy elsewhere
        setattr(holder, name, value)


_DROP_COPIES: Mapping[str, Callable[[Any], None]] = MappingProxyType(
    {
        "starlette": _drop_starlette,
        "litestar": _drop_litestar,
        "quart": _drop_quart,
        "django": _drop_django,
        "blacksheep": _drop_blacksheep,
        "aiohttp": _drop_aiohttp,
    }
)


class ResponseState:
    """How much of one response was sent.

    Attributes:
        started: The response has begun: no other status can be sent.
        complete: The last message was given to the server.
        status: HTTP status of the response.
        id: The id in its head; ``None`` without one, or one that no log may have.
    """

    __slots__ = ("_trailers", "complete", "id", "started", "status")

    def __init__(self) -> None:
        self._trailers = False
        self.started = False
        self.complete = False
        self.status: int | None = None
        self.id: str | None = None

    def update(self, message: Message) -> None:
        """Update the state by *message*, before it is sent.

        Before and not after, because the response is then out of our hands: while the
        last message is being flushed, servers send ``http.disconnect``, as they do
        after every success.
        """
        kind = message["type"]
        if kind == "http.response.start":
            self.started = True
            self.status = message.get("status")
            self._trailers = bool(message.get("trailers", False))
            self.id = _id_in(message.get("headers"))
        elif kind in ("http.response.body", "http.response.zerocopysend"):
            last = not message.get("more_body", False)
            self.complete = last and not self._trailers
        elif kind == "http.response.pathsend":
            self.complete = not self._trailers
        elif kind == "http.response.trailers":
            self.complete = not message.get("more_trailers", False)


def _id_in(headers: object) -> str | None:
    # Others could be read once only, and by the server; some servers take text, too.
    for name, value in headers if isinstance(headers, list | tuple) else ():
        names = isinstance(value, bytes) and name.lower() in IDS
        if names and SAFE_ID.fullmatch(value):
            return str(value, "ascii")
    return None
