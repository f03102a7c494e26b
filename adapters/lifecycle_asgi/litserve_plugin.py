"""LitServe with `Admission`, whose workers end the work of clients that left.

Import `LitServer` from here instead of from ``litserve``; all else stays. By itself
LitServe takes bodies of any number and size, and its workers, which are processes of
their own, finish every request.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import inspect
import logging
import multiprocessing
from collections import deque
from collections.abc import AsyncIterator, Callable, Generator
from contextlib import closing
from contextvars import ContextVar
from typing import Any, Final

import litserve
from fastapi import HTTPException
from litserve import utils
from litserve.loops import BatchedLoop, BatchedStreamingLoop, SingleLoop, StreamingLoop
from litserve.loops.base import LitLoop
from litserve.middlewares import MaxSizeMiddleware
from litserve.utils import LitAPIStatus

from lifecycle import consumer_gone
from lifecycle.lowlevel import running_consumer
from lifecycle_asgi.admission import Admission
from lifecycle_asgi.asgi_types import App, Receive, Scope, Send
from lifecycle_asgi.middleware import CLIENT_CLOSED_REQUEST

_PUT: Final = (
    *("self", "transport", "response_queue_id", "uid"),
    *("response_data", "status", "response_type"),
)
# A subclass may work on several requests at once, and we would take them for one.
_LOOPS: Final = (SingleLoop, BatchedLoop, StreamingLoop, BatchedStreamingLoop)
_REMEDY: Final = (
    "install litserve 0.2.17 to 0.2.19, or run its own LitServer behind "
    "`lifecycle proxy`"
)
# How often a worker looks whether the client of a coroutine has left.
_SECONDS_BETWEEN_LOOKS: Final = 0.05
_log: Final = logging.getLogger("lifecycle").log
# What the current HTTP request has submitted to workers.
_SUBMITTED: Final[ContextVar[list[object] | None]] = ContextVar(
    "lifecycle_litserve", default=None
)


class LitServer(litserve.LitServer):  # type: ignore[misc]
    """``litserve.LitServer``, in `Admission`; a leaver's work ends in the worker.

    Where a client has left, a request that waits in a queue is taken by no worker; a
    ``predict`` that yields is closed at its next item, one that is ``async`` is
    cancelled, and `lifecycle.consumer_gone` tells any other that asks. A batch ends
    with its last client. LitServe's loop for continuous batches, and loops of your
    own, finish what they have taken.

    Args:
        *args: LitServe's.
        **options: LitServe's. *middlewares* may have an `Admission` with options.

    Raises:
        SystemExit: This version of LitServe works in another way, so that nothing would
            end.
    """

    middlewares: list[Any]

    def __init__(self, *args: Any, **options: Any) -> None:
        put = tuple(inspect.signature(LitLoop.put_response).parameters)
        if put != _PUT or not hasattr(LitAPIStatus, "START"):
            unknown = f"litserve {litserve.__version__} is unknown to this plug-in"
            raise SystemExit(f"{unknown}; {_REMEDY}")
        self._left = _Left()
        super().__init__(*args, **options)
        self.response_buffer = _Answers()
        self._callback_runner._add_callbacks(_EndWork(self._left))  # noqa: SLF001

    def end(self, submitted: list[object]) -> None:
        """End what workers do for a request that is over."""
        for uid in submitted:
            self._left.add(uid)
            self.response_buffer.pop(uid, None)

    def _register_middleware(self) -> None:
        given = self.middlewares
        ours: list[Any] = [functools.partial(_Submitting, server=self)]
        # Around `Admission`, which reads the body, its refusal would be an error.
        ours += [each for each in given if _is(MaxSizeMiddleware, each)]
        if not any(_is(Admission, each) for each in given):
            ours.append(Admission)
        self.middlewares = [*ours, *(each for each in given if each not in ours)]
        super()._register_middleware()

    def _init_manager(self, num_api_servers: int) -> Any:
        manager = super()._init_manager(num_api_servers)
        queues = self.litapi_request_queues
        for path, queue in queues.items():
            queues[path] = _Requests(queue, self._left)
        return manager


def _is(kind: type, middleware: Any) -> bool:
    made = middleware[0] if isinstance(middleware, tuple) else middleware
    made = getattr(made, "func", made)  # of a partial
    return isinstance(made, type) and issubclass(made, kind)


class _Answers(dict[object, Any]):
    """Where answers are put.

    Those for who has left get lost, where LitServe 0.2.17 would fail for all clients.
    """

    def __missing__(self, uid: object) -> Any:
        return utils.ResponseBufferItem(asyncio.Event(), deque())


class _Submitting:
    """Middleware that ends what a request has submitted, once it is over."""

    def __init__(self, app: App, *, server: LitServer) -> None:
        self.app = app
        self.server = server

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        submitted: list[object] = []
        token = _SUBMITTED.set(submitted)
        try:
            await self.app(scope, receive, send)
        finally:
            _SUBMITTED.reset(token)
            self.server.end(submitted)


class _Left:
    """The requests that are over, as all processes see them: the newest of many.

    Rows, each of which forgets its oldest request. Whose work is looked at only after
    that is finished.
    """

    _ROWS: Final = 4096
    _PLACES: Final = 16
    _SIZE: Final = 16

    def __init__(self) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._keys = spawn.RawArray("c", self._ROWS * self._PLACES * self._SIZE)
        self._oldest = spawn.RawArray("B", self._ROWS)

    def add(self, uid: object) -> None:
        key, row = self._find(uid)
        oldest = self._oldest[row]
        self._oldest[row] = (oldest + 1) % self._PLACES
        start = (row * self._PLACES + oldest) * self._SIZE
        self._keys[start : start + self._SIZE] = key

    def __contains__(self, uid: object) -> bool:
        key, row = self._find(uid)
        width = self._PLACES * self._SIZE
        return key in self._keys[row * width : (row + 1) * width]

    def _find(self, uid: object) -> tuple[bytes, int]:
        key = hashlib.blake2b(str(uid).encode(), digest_size=self._SIZE).digest()
        return key, int.from_bytes(key[:4]) % self._ROWS


class _Requests:
    """A queue to workers, which get no request that is over."""

    def __init__(self, queue: Any, left: _Left) -> None:
        self._queue = queue
        self._left = left

    def put(self, item: Any, *args: Any, **options: Any) -> None:
        if (submitted := _SUBMITTED.get()) is not None:
            submitted.append(item[1])
        self._queue.put(item, *args, **options)

    def put_nowait(self, item: Any) -> None:
        self.put(item, block=False)

    def get(self, *args: Any, **options: Any) -> Any:
        while True:
            item = self._queue.get(*args, **options)
            if not (isinstance(item, tuple) and item[1] in self._left):
                return item

    def get_nowait(self) -> Any:
        return self.get(block=False)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # asked for by pickle, before there is a queue
            raise AttributeError(name)
        return getattr(self._queue, name)


class _Work:
    """What a worker works on: a request, or a batch."""

    def __init__(self, left: _Left) -> None:
        self._left = left
        self.uids: list[object] = []
        self.answered = False

    @property
    def gone(self) -> bool:
        return all(uid in self._left for uid in self.uids)


class _EndWork(litserve.Callback):  # type: ignore[misc]
    """Has a worker end what it works on, from when its model is set up."""

    def __init__(self, left: _Left) -> None:
        self._left = left

    def on_after_setup(self, *_: Any, lit_api: Any, **__: Any) -> None:
        loop = lit_api.loop
        if type(loop) not in _LOOPS:
            goes_on = "%s works on for clients that left: only LitServe's own loops "
            goes_on += "for single requests and for batches end"
            _log(logging.WARNING, goes_on, type(loop).__name__)
            return
        batched = lit_api.max_batch_size > 1
        loop.put_response = _noting(loop.put_response, self._left, batched=batched)
        lit_api.predict = _ending(lit_api.predict)


def _noting(
    put: Callable[..., None], left: _Left, *, batched: bool
) -> Callable[..., None]:
    """Return *put*, which notes who waits for the work that begins with it."""
    work = _Work(left)

    def put_response(
        transport: Any,
        response_queue_id: int,
        uid: object,
        response_data: Any,
        status: LitAPIStatus,
        response_type: Any,
    ) -> None:
        nonlocal work
        if status != LitAPIStatus.START:
            work.answered = True
        else:
            if work.answered or not batched:
                work = _Work(left)
            work.uids.append(uid)
            running_consumer.set(work)
        put(transport, response_queue_id, uid, response_data, status, response_type)

    return put_response


def _ending(predict: Callable[..., Any]) -> Callable[..., Any]:
    """Return *predict*, of the same kind, which ends where its consumer has gone."""
    if inspect.isasyncgenfunction(predict):

        async def ending_stream(*args: Any, **options: Any) -> AsyncIterator[Any]:
            items, watching = predict(*args, **options), _cancel_when_gone()
            try:
                async for item in items:
                    yield item
                    _raise_if_gone()
            finally:
                watching.cancel()
                await items.aclose()

        return functools.wraps(predict)(ending_stream)
    if inspect.iscoroutinefunction(predict):

        async def ending_call(*args: Any, **options: Any) -> Any:
            watching = _cancel_when_gone()
            try:
                return await predict(*args, **options)
            finally:
                watching.cancel()

        return functools.wraps(predict)(ending_call)

    def ending(*args: Any, **options: Any) -> Any:
        result = predict(*args, **options)
        return _until_gone(result) if inspect.isgenerator(result) else result

    return functools.wraps(predict)(ending)


def _until_gone(items: Generator[Any, Any, Any]) -> Generator[Any, Any, Any]:
    sent = None
    with closing(items):
        while True:
            try:
                item = items.send(sent)
            except StopIteration as end:
                return end.value
            sent = yield item
            _raise_if_gone()


def _raise_if_gone() -> None:
    """Raise what LitServe answers and does not log.

    Where the items just ended, ``encode_response`` would take them for all there are.
    """
    if consumer_gone():
        raise HTTPException(CLIENT_CLOSED_REQUEST)


def _cancel_when_gone() -> asyncio.Task[None]:
    """Return a task that cancels this one, whose own context *predict* may change."""
    task = asyncio.current_task()
    assert task is not None

    async def watch() -> None:
        while not consumer_gone():  # noqa: ASYNC110 - no other process sets an event
            await asyncio.sleep(_SECONDS_BETWEEN_LOOKS)
        task.cancel()

    return asyncio.create_task(watch())
