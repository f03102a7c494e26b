"""What one request knows about its client."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, Literal, Protocol, TypeVar

from lifecycle.events import Outcome
from lifecycle_asgi._copies import drop_copies
from lifecycle_asgi._owned import Begun, Closable, begun, close_all
from lifecycle_asgi._record import InPhase, Record, outcome_of
from lifecycle_asgi.events import Phase

S = TypeVar("S", bound=Closable)
T = TypeVar("T")

KEY = "lifecycle"
"""Where `LifecycleMiddleware` puts the `RequestScope` in the ASGI scope."""


class Attachable(Protocol):
    """What can be attached to a request: a `lifecycle.Session`, for one."""

    @property
    def cancelled_as(self) -> str:
        """What a cancellation of the owner is counted as."""

    @cancelled_as.setter
    def cancelled_as(self, outcome: Literal["client_gone"]) -> None: ...


class Body(Protocol):
    """What bounds the request's body: `BodyLimit`, with a gate."""

    def release(self) -> None:
        """Give back what the body was admitted with."""


class RequestScope:
    """The request's view of its client, found in ``scope["lifecycle"]``.

    A cancellation alone does not say who wanted it. A session attached here is
    told before the cancellation is delivered, so that it is counted as
    ``client_gone`` and not as ``cancelled``.

    A stream given to `own` or `begin` is closed when the application has ended, in
    the task that the server called, whatever became of the response.
    """

    __slots__ = (
        "_attached",
        "_cancelled_when_gone",
        "_client_gone",
        "_live",
        "_owned",
        "_record",
        "body",
    )

    def __init__(self, *, cancelled_when_gone: bool = False) -> None:
        self._cancelled_when_gone = cancelled_when_gone
        self._attached: list[Attachable] = []
        self._owned: list[Closable] = []
        self.body: Body | None = None
        self._record: Record | None = None
        self._client_gone = False
        self._live = True

    def __repr__(self) -> str:
        state = "gone" if self._client_gone else "here"
        return f"<RequestScope client {state}, {len(self._attached)} attached>"

    @property
    def client_gone(self) -> bool:
        """Whether the client left before its response was complete.

        Remembered for good: servers disagree on whether a second ``receive``
        repeats the disconnect or blocks for ever.
        """
        return self._client_gone

    @property
    def live(self) -> bool:
        """Whether the application still works on the request."""
        return self._live

    def attach(self, session: Attachable) -> None:
        """Have *session* count a cancellation by this client as its leaving.

        Args:
            session: Anything with a settable ``cancelled_as``. If the client
                has left already it is told at once.

        Raises:
            TypeError: It has none; the client's leaving would be told to nobody.
        """
        if not hasattr(session, "cancelled_as"):
            kind = type(session).__name__
            raise TypeError(f"a session is attached, from sessions.open, not {kind}")
        self._attached.append(session)
        if self._client_gone or self._cancelled_when_gone:
            session.cancelled_as = "client_gone"

    def own(self, source: S) -> S:
        """Have *source* closed at the end of the request; returns *source*.

        Args:
            source: An async generator, a `lifecycle.Stream`, or what else has
                ``aclose``.
        """
        self._owned.append(source)
        return source

    async def begin(self, source: AsyncIterator[T]) -> Begun[T]:
        """Own *source*, and wait for its first item before anything is answered.

        Frameworks send the status before they ask a body for its first item. Where
        that item has to be admitted first, a refusal would come too late to be one.

        Args:
            source: An async generator, or a `lifecycle.Stream`.

        Returns:
            The items of *source*, the first one included: a body for a response.

        Raises:
            Exception: What *source* raised before its first item.

        Cancellation:
            Goes through to *source*, which is closed at the end of the request.
        """
        self.own(Begun([], source))
        return await begun(source)

    def phase(self, phase: Phase) -> InPhase:
        """A ``with`` block that is one phase of the request, for the observer.

        What is made of it may be entered when the request has ended, as the END of
        an engine's session is.
        """
        return InPhase(self._record, phase)

    def count(self, **counts: int) -> None:
        """Have *counts*, by fixed words, told to the observer when the request ends."""
        if self._record is not None:
            self._record.count(**counts)

    def first_item(self) -> None:
        """Tell the observer that the first item of the answer is there. Idempotent."""
        if self._record is not None:
            self._record.first_item()

    def fail(self, error: BaseException) -> None:
        """Have the observer told that *error* made the request fail, without its words.

        For applications that answer the error themselves; one that propagates is told
        anyway.
        """
        if self._record is not None:
            self._record.fail(error)

    def release_body(self, request: object = None) -> None:
        """Say that the request's body is gone: the next one may come in. Idempotent.

        Call it at hand-off, where nothing else refers to the body any more. Whoever
        asks a framework for a body again has an error or nothing.

        Args:
            request: The request object of the framework, where that has read the
                body: it keeps a copy, and what it parsed from it, for as long as the
                answer lasts. They are dropped. Of Starlette and FastAPI, Litestar,
                Quart, Django, BlackSheep, or aiohttp.

        Raises:
            TypeError: *request* is of no framework that is known here, or of a version
                that keeps its copies elsewhere.
        """
        if request is not None:
            drop_copies(request)
        body, self.body = self.body, None
        if body is not None:
            body.release()

    async def close(self, grace: float) -> None:
        """Called by the middleware: close what is owned; see `close_all`.

        Cancellation:
            Shielded for as long as *grace* seconds for each.
        """
        owned, self._owned = self._owned, []
        await close_all(owned, grace)

    def leave(self) -> None:
        """Called by the middleware: the client left; tell what is attached."""
        self._client_gone = True
        for session in self._attached:
            session.cancelled_as = "client_gone"

    def begin_record(self, record: Record) -> None:
        """Called by the middleware: tell what becomes of the request."""
        self._record = record

    def end(
        self,
        status: int | None = None,
        error: BaseException | None = None,
        *,
        outcome: Outcome | None = None,
    ) -> None:
        """Called by the middleware at the end: let go of what is attached.

        Servers keep the ASGI scope of an idle connection until its next request.

        Args:
            status: That was answered.
            error: What the application raised.
            outcome: Of a request without a session; by default what the status says.
        """
        self._live = False
        self.body = None
        sessions, self._attached = self._attached, []
        record, self._record = self._record, None
        if record is None:
            return
        if isinstance(error, Exception):
            record.fail(error)
        ended = [each for each in sessions if getattr(each, "outcome", None)]
        # Of several, one that went wrong says more.
        session: Any = min(ended, key=_completed, default=None)
        if session is None:
            outcome = outcome or outcome_of(status, error, gone=self._client_gone)
            record.end(outcome, status, None)
        else:
            record.end(session.outcome, status, getattr(session, "id", None))


def _completed(session: Any) -> bool:
    return bool(session.outcome == "completed")


def request_of(scope: Any) -> RequestScope:
    """The `RequestScope` of an ASGI scope.

    Args:
        scope: The ASGI scope that the application was called with.

    Raises:
        LookupError: No `LifecycleMiddleware` stands above this application, or the
            scope is no request's, but a websocket's.
        TypeError: It is no scope at all, but an object that has one, for example.
    """
    if not hasattr(scope, "get"):
        kind = type(scope).__name__
        raise TypeError(f"request_of takes a scope, as in request.scope, not {kind}")
    found = scope.get(KEY)
    if isinstance(found, RequestScope):
        return found
    remedy = "wrap the application in lifecycle_asgi.LifecycleMiddleware"
    if (kind := scope.get("type", "http")) != "http":
        remedy = f"only requests have one, and this is a {kind}"
    raise LookupError(f"scope[{KEY!r}] holds no RequestScope: {remedy}")
