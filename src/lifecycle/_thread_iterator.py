"""Blocking iterators as asynchronous ones: each runs in a thread of its own.

One thread per iterator, not one per item: a generator may keep state of its thread
across a ``yield``, as ``torch.inference_mode`` and SQLite connections do. A token of a
limiter is held while the thread works on an item, not while it waits for the consumer.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import AsyncGenerator, Callable, Iterable
from contextvars import ContextVar, copy_context
from queue import SimpleQueue
from threading import Thread
from typing import Any, Generic, ParamSpec, Protocol, TypeVar, overload
from weakref import ref

import anyio
import anyio.to_thread
from anyio.lowlevel import checkpoint

from ._error_payload import clear_traceback_frames, describe_error
from ._eventloop import (
    LoopWaiter,
    call_if_cancelled,
    current_task,
    forget_loop,
    threadsafe_call,
)
from ._validation import check, name_of

T = TypeVar("T")
P = ParamSpec("P")
# What is given up with the first item, the last one first.
Held = list[Callable[[], object]]

_log = logging.getLogger("lifecycle")


class Consumer(Protocol):
    """The one that waits for what runs here.

    Attributes:
        gone: Whether it waits no more.
    """

    @property
    def gone(self) -> bool: ...


running_consumer: ContextVar[Consumer | None] = ContextVar("running", default=None)
"""The one that `consumer_gone` asks about; set by what runs work for a consumer."""


def give_up(held: Held) -> None:
    """Call and forget what is in *held*, the last one first."""
    if held:
        try:
            held.pop()()
        finally:  # also where a callback of the user raises
            give_up(held)


@overload
def in_thread(
    function: Callable[P, Iterable[T]],
    /,
    *,
    limiter: anyio.CapacityLimiter | None = None,
) -> Callable[P, AsyncGenerator[T, Any]]: ...
@overload
def in_thread(
    function: None = None, /, *, limiter: anyio.CapacityLimiter | None = None
) -> Callable[[Callable[P, Iterable[T]]], Callable[P, AsyncGenerator[T, Any]]]: ...
def in_thread(
    function: Callable[..., Iterable[Any]] | None = None,
    /,
    *,
    limiter: anyio.CapacityLimiter | None = None,
) -> Any:
    """Turn a blocking generator function into an asynchronous one.

    Or a plain function that returns an iterator; it is called in the thread, too. The
    call takes nothing yet. With the first item asked for, a thread begins that runs
    the iterator to its end and closes it: all items of one iterator come from one
    thread, in one copy of the caller's context. The event loop never runs its code.

    A thread cannot be interrupted. Where the consumer leaves, it is not kept waiting:
    the thread goes on to its next ``yield``, closes the generator there, and gives back
    its token then. `consumer_gone` tells code that takes long between two items. A
    thread that never returns keeps its token, and does not keep the process alive.

    Args:
        function: A generator function, or one that returns an iterator. Left out where
            this is used as a decorator with options.
        limiter: A token of it is held while the thread works on an item. Default:
            anyio's for worker threads, which has 40.

    Raises:
        TypeError: *function* is asynchronous, or not callable; or *limiter* is no
            `anyio.CapacityLimiter`.
    """
    fits = limiter is None or isinstance(limiter, anyio.CapacityLimiter)
    check(fits, "limiter must be an anyio.CapacityLimiter", limiter)
    if function is None:
        return functools.partial(in_thread, limiter=limiter)
    check(callable(function), "in_thread takes a function", function)
    name = name_of(function)
    if inspect.isasyncgenfunction(function) or inspect.iscoroutinefunction(function):
        raise TypeError(f"{name} is asynchronous already; use it without in_thread")
    generates = inspect.isgeneratorfunction(function)

    @functools.wraps(function)
    def threaded(*args: Any, **kwargs: Any) -> ThreadIterator[Any]:
        call = functools.partial(function, *args, **kwargs)
        if generates:  # its body has not begun; wrong arguments raise here
            call = functools.partial(iter, call())
        return ThreadIterator(name, call, limiter)

    threaded.__signature__ = _signature(function)  # type: ignore[attr-defined]
    # Frameworks unwrap a function to learn of what kind it is.
    threaded.__wrapped__ = _asynchronous  # type: ignore[assignment]
    return threaded


def asynchronous(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return *function*; a blocking generator function as one that runs in threads."""
    return in_thread(function) if inspect.isgeneratorfunction(function) else function


def is_generator_function(function: object) -> bool:
    """Whether *function* returns an async generator, of this kind or Python's own."""
    ours = getattr(function, "__wrapped__", None) is _asynchronous
    return ours or inspect.isasyncgenfunction(function)


def consumer_gone() -> bool:
    """Whether the consumer of what runs here has gone.

    For code of `in_thread` that takes long between two items, and of adapters that tell
    who waits. ``False`` where no such code runs. Threads that it starts itself know
    nothing of its consumer, unless they run in a copy of its context.
    """
    running = running_consumer.get()
    return running is not None and running.gone


async def _asynchronous() -> AsyncGenerator[None, None]:
    """Stand for a blocking generator function that runs in a thread."""
    yield


def _signature(function: Callable[..., Any]) -> inspect.Signature | None:
    try:
        return inspect.signature(function)
    except ValueError:  # some functions of C have none
        return None


class _Worker:
    """The thread of one iterator, and what it shares with the event loop.

    The thread refers to this alone: an iterator that is dropped ends its thread.

    Attributes:
        held: Given up by the thread once the first item is there, or will not come.
        gone: Whether no item is wanted any more.
    """

    def __init__(
        self,
        name: str,
        call: Callable[[], Iterable[Any]],
        limiter: anyio.CapacityLimiter | None,
    ) -> None:
        self.name = name
        self.held: Held = []
        self.gone = self.busy = self.ended = False
        self._call: Callable[[], Iterable[Any]] | None = call
        self._limiter = limiter
        self._tasks: SimpleQueue[tuple[str, tuple[object, ...]] | None] = SimpleQueue()
        self._thread: Thread | None = None
        self._answer: list[Any] = []
        self._closed: anyio.Event | None = None
        self._waiting = 0
        self._left: Held = []
        self._failure: BaseException | None = None
        self._asker: Callable[[], object] = lambda: None
        self._revoke: Callable[[], object] = lambda: None

    # In the event loop.

    async def ask(self, method: str, *args: object) -> Any:
        """Call *method* of the iterator in the thread; see `ThreadIterator`."""
        if self.busy:
            raise RuntimeError("another task is waiting for an item of this iterator")
        if self.gone:
            await checkpoint()
            raise StopAsyncIteration
        self.busy = True
        try:
            answered = await self._submit(method, args)
            while not self._answer:
                await answered.wait()
        except BaseException:
            self.leave()
            self._answer.clear()
            raise
        finally:
            self.busy = False
        item, error = self._answer.pop()
        try:
            if error is None:
                return item
            if isinstance(error, StopIteration):
                raise StopAsyncIteration
            raise error
        finally:
            del item, error  # a frame that refers to its own exception is a cycle

    async def _submit(self, method: str, args: tuple[object, ...]) -> LoopWaiter:
        limiter = self._limiter or anyio.to_thread.current_default_thread_limiter()
        try:
            limiter.acquire_on_behalf_of_nowait(self)
        except anyio.WouldBlock:
            await limiter.acquire_on_behalf_of(self)
        if self.gone:  # closed by another task meanwhile
            limiter.release_on_behalf_of(self)
            raise StopAsyncIteration
        if self._thread is None:
            self._limiter, self._answered = limiter, LoopWaiter()
            self._post = threadsafe_call()
            context, name = copy_context(), f"lifecycle {self.name}"
            # A daemon: one that never returns must not keep the process alive.
            thread = Thread(target=context.run, args=(self._run,), name=name)
            thread.daemon = True
            try:
                thread.start()
            except BaseException:
                limiter.release_on_behalf_of(self)
                raise
            self._thread = thread
        if (task := current_task()) is not self._asker():
            self._revoke()  # the task before has passed the iterator on
            self._revoke, self._asker = call_if_cancelled(self.leave), ref(task)
        self._tasks.put((method, args))
        return self._answered

    def _answered_by(self, item: object, error: BaseException | None) -> None:
        assert self._limiter is not None
        self._limiter.release_on_behalf_of(self)
        if self.busy:  # else the consumer has gone
            self._answer.append((item, error))
            self._answered.wake()
        elif not (error is None or isinstance(error, StopIteration)):
            what = "%s failed in its thread after its consumer had gone: %s"
            _log.warning(what, self.name, describe_error(error))

    def leave(self) -> None:
        """Want nothing more: the iterator is closed where it waits. Any thread."""
        self.gone = True
        if self._thread is not None:
            self._tasks.put(None)
        else:
            self._call = None
            give_up(self.held)

    async def wait_closed(self) -> None:
        """Wait until the iterator is closed, and raise what that raised."""
        if not self._works():
            await checkpoint()
            return
        self._closed = self._closed or anyio.Event()
        self._waiting += 1
        try:
            await self._closed.wait()
        finally:
            self._waiting -= 1
        failure, self._failure = self._failure, None
        try:
            if failure is not None:
                raise failure
        finally:
            del failure

    def when_closed(self, call: Callable[[], object]) -> None:
        """See `ThreadIterator.when_closed`."""
        if self._works():
            self._left.append(call)
        else:
            call()

    def _works(self) -> bool:
        return not self.ended and self._thread is not None and self._thread.is_alive()

    def _ended_with(self, failure: BaseException | None) -> None:
        self.ended = True
        self._revoke()
        if self._closed is not None:
            self._closed.set()
        if self._waiting:
            self._failure = failure
        elif failure is not None:
            what = "closing %s in its thread failed: %s"
            _log.warning(what, self.name, describe_error(failure))
        give_up(self._left)  # last: what others gave may raise

    # In the thread.

    def _run(self) -> None:
        forget_loop()
        running_consumer.set(self)
        call, self._call = self._call, None
        iterator: list[Any] = []
        item = error = None
        while error is None and (task := self._tasks.get()) is not None:
            item, error = _attempt(_next_item, call, iterator, task)
            call = task = None
            _, failure = _attempt(give_up, self.held)
            error = error or failure
            if error is None:
                # What is not wanted any more is dropped here, not in the event loop.
                end = StopIteration() if self.gone else None
                item = None if self.gone else item
                self._post(functools.partial(self._answered_by, item, end))
            item = None
        self.gone = True
        _, failure = _attempt(_close, iterator)
        if error is not None:
            if isinstance(error, StopIteration) and failure is not None:
                error, failure = failure, None
            self._post(functools.partial(self._answered_by, None, error))
        self._post(functools.partial(self._ended_with, failure))


def _attempt(
    function: Callable[..., Any], *args: Any
) -> tuple[Any, BaseException | None]:
    try:
        return function(*args), None
    except BaseException as error:  # noqa: ASYNC103, BLE001 - raised in the loop
        del args  # with these, an error that is kept keeps the payload
        clear_traceback_frames(error)
        return None, error  # noqa: ASYNC104 - no task runs here


def _next_item(
    call: Callable[[], Iterable[Any]] | None,
    iterator: list[Any],
    task: tuple[str, tuple[object, ...]],
) -> Any:
    if call is not None:
        iterator.append(iter(call()))
    method, args = task
    return getattr(iterator[0], method)(*args)


def _close(iterator: list[Any]) -> None:
    close = getattr(iterator.pop(), "close", None) if iterator else None
    if close is not None:
        close()


class ThreadIterator(AsyncGenerator[T, Any], Generic[T]):
    """A blocking iterator as an async generator; what `in_thread` returns."""

    __slots__ = ("__weakref__", "_worker")

    def __init__(
        self,
        name: str,
        call: Callable[[], Iterable[T]],
        limiter: anyio.CapacityLimiter | None,
    ) -> None:
        self._worker = _Worker(name, call, limiter)

    def hold(self, held: Held) -> None:
        """Give *held* up in the thread, once the first item is there."""
        self._worker.held += held
        held.clear()

    def when_closed(self, call: Callable[[], object]) -> None:
        """Have the event loop call *call* once the thread works no more, or now."""
        self._worker.when_closed(call)

    async def __anext__(self) -> T:
        """Return the next item.

        Raises:
            RuntimeError: Another task is waiting for an item already.
            BaseException: What the iterator raised; the locals of its frames are
                cleared.

        Cancellation:
            Raised at once. The thread goes on to its next item, drops it, and closes
            the iterator.
        """
        item: T = await self._worker.ask("__next__")
        return item

    async def asend(self, value: Any) -> T:
        """As `__anext__`, for a generator; *value* is the result of its ``yield``."""
        item: T = await self._worker.ask("send", value)
        return item

    async def athrow(self, *error: Any) -> T:
        """As `__anext__`, for a generator; *error* is raised by its ``yield``."""
        item: T = await self._worker.ask("throw", *error)
        return item

    async def aclose(self) -> None:
        """Close the iterator in its thread, and wait for that. Idempotent.

        Raises:
            BaseException: What closing raised, if nothing else has.

        Cancellation:
            At any time. The thread closes the iterator all the same; what that raises
            is then logged, by its type.
        """
        self._worker.leave()
        await self._worker.wait_closed()

    def __repr__(self) -> str:
        state = "closed" if self._worker.gone else "open"
        return f"<ThreadIterator of {self._worker.name}, {state}>"

    def __del__(self) -> None:
        if not self._worker.gone:
            self._worker.leave()
