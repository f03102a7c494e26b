"""The promises of the library as decorators on functions that stream."""

from __future__ import annotations

import functools
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import (
    TYPE_CHECKING,
    Any,
    ParamSpec,
    Protocol,
    TypeVar,
    cast,
    final,
    overload,
)
from weakref import ref

from ._outcome import outcome_of
from ._payload import forget_frames
from ._scrub import Boxer
from ._stream import Stream

if TYPE_CHECKING:
    from ._gate import Gate
    from ._lease import Lease
    from ._payload import Payload
    from ._session import Session
    from ._sessions import SessionRegistry

P = ParamSpec("P")
T = TypeVar("T")


class Decorator(Protocol):
    """Turns a function that streams into one that returns a `Stream`."""

    @overload
    def __call__(
        self, function: Callable[P, AsyncIterator[T]], /
    ) -> Callable[P, Stream[T]]: ...
    @overload
    def __call__(
        self, function: Callable[P, Awaitable[AsyncIterator[T]]], /
    ) -> Callable[P, Stream[T]]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    gate: Gate | None
    sessions: SessionRegistry | None
    wants_lease: bool
    wants_session: bool
    two_phase: bool


def managed(
    *,
    gate: Gate | None = None,
    cost: int | Callable[..., int] = 0,
    slots: int = 1,
    sessions: SessionRegistry | None = None,
    key: Callable[..., str] | None = None,
    scrub: tuple[str, ...] | str = (),
) -> Decorator:
    """Admit, track and scrub a function that streams, in the right order.

    For async generator functions, and for the two-phase form that needs no
    care: a coroutine function that hands its payload over and *returns* the
    stream, so that its frame is gone before the first item.

    The call returns a `Stream` and takes nothing yet. With the first item that
    is asked for, a session is opened, a lease is admitted, and then the function
    runs. The lease is released, and payloads left in boxes are cleared, when a
    two-phase function returns, at the first item of a generator, at
    ``lease.release()`` if the function asks for its ``lease`` by a parameter of
    that name, and in any case at the end, or when a start that goes on alone has
    settled. A parameter named ``session`` is given the session.

    Args:
        gate: Admits each stream.
        cost: Bytes to ask of the gate, or a function of the call's arguments.
        slots: Slots to ask of the gate.
        sessions: Tracks each stream as a session.
        key: Session id, as a function of the call's arguments.
        scrub: Parameters that carry payloads; see `lifecycle.scrub`.

    Raises:
        TypeError: The function neither is an async generator function nor a
            coroutine function, or lacks a parameter to scrub; or *sessions*
            comes without *key*.
    """
    if (sessions is None) != (key is None):
        raise TypeError("sessions and key go together")
    names = (scrub,) if isinstance(scrub, str) else tuple(scrub)

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        two_phase = inspect.iscoroutinefunction(function)
        if not two_phase and not inspect.isasyncgenfunction(function):
            what = getattr(function, "__qualname__", type(function).__name__)
            raise TypeError(
                f"{what} is neither an async generator function nor a coroutine "
                f"function that returns a stream; make it `async def`"
            )
        boxer = Boxer(function, names)
        parameters = inspect.signature(function).parameters
        plan = _Plan(
            gate=gate,
            sessions=sessions,
            wants_lease=gate is not None and "lease" in parameters,
            wants_session=sessions is not None and "session" in parameters,
            two_phase=two_phase,
        )

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Stream[Any]:
            nbytes = cost(*args, **kwargs) if callable(cost) else cost
            id_ = None if key is None else key(*args, **kwargs)
            (new_args, new_kwargs), boxes = boxer(args, kwargs)
            work = functools.partial(function, *new_args, **new_kwargs)
            return _ManagedStream(_Source(plan, work, boxes, id_, nbytes, slots))

        return call

    return decorate


@final
class _Source:
    """The iterator inside a managed stream: admission, then the user's own."""

    __slots__ = (
        "_ask",
        "_boxes",
        "_id",
        "_inner",
        "_next",
        "_plan",
        "_work",
        "lease",
        "owner",
        "session",
    )

    owner: ref[Stream[Any]]

    def __init__(
        self,
        plan: _Plan,
        work: Callable[..., Any],
        boxes: list[Payload[Any]],
        id_: str | None,
        nbytes: int,
        slots: int,
    ) -> None:
        self._plan = plan
        self._work: Callable[..., Any] | None = work
        self._boxes = boxes
        self._id = id_
        self._ask = nbytes, slots
        self._inner: AsyncIterator[Any] | None = None
        self._next: Callable[[], Awaitable[Any]] | None = None
        self.lease: Lease | None = None
        self.session: Session | None = None

    def __anext__(self) -> Awaitable[Any]:
        return self._first() if self._next is None else self._next()

    async def _first(self) -> Any:
        work, self._work = self._work, None
        assert work is not None, "a stream that is over asks for nothing"
        given: dict[str, Any] | None = None
        try:
            given = await self._admit()
            if self._plan.two_phase:
                inner = await work(**given)
                self.hand_off()
            else:
                inner = work(**given)
            del work, given
            self._inner = inner = aiter(inner)
            self._next = inner.__anext__
            return await inner.__anext__()
        except BaseException as error:
            work = given = None  # noqa: F841 - the traceback holds this frame
            forget_frames(error)
            raise
        finally:
            self.hand_off()

    async def _admit(self) -> dict[str, Any]:
        plan = self._plan
        given: dict[str, Any] = {}
        if plan.sessions is not None and self._id is not None:
            self.session = plan.sessions.open(self._id)
            self.session.lead(self.owner)
        if plan.gate is not None:
            nbytes, slots = self._ask
            self.lease = await plan.gate.admit(bytes=nbytes, slots=slots)
            if self.session is not None:
                self.session.lease = self.lease
        if self.session is not None:
            self.session.confirm()
        if plan.wants_lease:
            given["lease"] = self.lease
        if plan.wants_session:
            given["session"] = self.session
        return given

    def hand_off(self) -> None:
        """Give up what only the creation of the payload needed. Idempotent."""
        lease, self.lease = self.lease, None
        if lease is not None:
            lease._leave()  # noqa: SLF001 - a friend
        boxes, self._boxes = self._boxes, []
        for payload in boxes:
            payload.clear()

    def finish(self, error: BaseException | None) -> None:
        """Give everything up. Idempotent."""
        self.hand_off()
        self._work = None
        session, self.session = self.session, None
        if session is not None:
            end = GeneratorExit() if error is None else error
            session.close(outcome_of(end, session.cancelled_as))

    async def aclose(self) -> None:
        """Close what the function returned."""
        close = getattr(self._inner, "aclose", None)
        if close is not None:
            await close()


@final
class _ManagedStream(Stream[T]):
    """A stream that gives back what its function was given."""

    __slots__ = ("_managed",)

    def __init__(self, source: _Source) -> None:
        super().__init__(cast("AsyncIterator[T]", source))
        self._managed = source
        source.owner = ref(self)

    def _finish(self, error: BaseException | None) -> None:
        super()._finish(error)
        self._managed.finish(error)

    def _lose(self) -> None:
        session = self._managed.session
        assert session is not None
        session.lose()

    def _owes(self) -> bool:
        # Whoever holds a lease is being waited for, so cannot be lost.
        return self._managed.session is not None
