"""The promise of the middleware for servers that do not speak ASGI."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from typing import TYPE_CHECKING, final

import anyio

from lifecycle.events import Observer, guarded
from lifecycle_asgi._record import Record, outcome_of
from lifecycle_asgi._request import RequestScope

if TYPE_CHECKING:
    from types import TracebackType


@final
class request_scope:  # noqa: N801 - it reads as a function: `async with request_scope(…)`
    """Cancels the block when the client of a request leaves.

    For aiohttp, grpc.aio, a plain asyncio server, or whatever else can say that a
    client left. When it did, what is attached to the request is told, then the block
    is cancelled, and the code behind it goes on: `RequestScope.client_gone` tells.

    Args:
        gone: Returns when the client has left. It is called once, in a task of its
            own, and cancelled when the block is left first. An `OSError` of it says
            that the connection is lost, so that the client is gone, too. Any other
            error of it cancels the block and is raised where the block is left.
            ``None``: the server itself cancels the task of whoever left, as grpc.aio
            does, and aiohttp with ``handler_cancellation``. Then every cancellation
            from outside counts as leaving, and propagates.
        grace: Seconds that each thing that the request owns may take to close.
        observer: Told of the request, as in `lifecycle_asgi.events`. A block that ends
            by itself has ``completed``; one that raises has ``failed``.
        operation: What kind of request it is: a fixed word.
        headers: Raw ones, as ``request.raw_headers`` of aiohttp: the caller's trace is
            told of them, and nothing else.
    """

    __slots__ = (
        "_emit",
        "_failure",
        "_gone",
        "_grace",
        "_headers",
        "_operation",
        "_request",
        "_tasks",
        "_work",
    )

    def __init__(
        self,
        gone: Callable[[], Awaitable[object]] | None = None,
        *,
        grace: float = 5.0,
        observer: Observer | None = None,
        operation: str = "request",
        headers: Iterable[tuple[bytes, bytes]] = (),
    ) -> None:
        self._gone = gone
        self._grace = grace
        self._emit = guarded(observer)
        self._operation = operation
        self._headers = headers
        self._failure: Exception | None = None
        self._request = RequestScope(cancelled_when_gone=gone is None)
        self._work = anyio.CancelScope()

    async def __aenter__(self) -> RequestScope:
        """Begin to listen.

        Cancellation:
            Never raised here: this is no checkpoint.
        """
        if self._emit is not None:
            named = [(name.lower(), value) for name, value in self._headers]
            record = Record(self._emit, self._operation, {"headers": named})
            self._request.begin_record(record)
        self._tasks = anyio.create_task_group()
        await self._tasks.__aenter__()
        if self._gone is not None:
            self._tasks.start_soon(self._watch, self._gone)
        self._work.__enter__()
        return self._request

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        """Stop listening.

        Cancellation:
            The client's ends here; any other propagates.
        """
        swallowed = bool(self._work.__exit__(exc_type, exc, traceback))
        if self._gone is None and isinstance(exc, anyio.get_cancelled_exc_class()):
            self._request.leave()
        # Only the watcher is left to wait for, and it is stopping. Being cancelled in
        # that wait would lose an error of the block.
        self._tasks.cancel_scope.shield = True
        try:
            # Shielded and bounded in there, for each thing that is closed.
            await self._request.close(self._grace)  # noqa: ASYNC102
        except Exception as error:  # noqa: BLE001 - raised below, if nothing else is
            self._failure = self._failure or error
        finally:
            # What the block raised, a cancellation above all, goes before a failure.
            self._end(self._failure if exc is None or swallowed else exc)
            self._tasks.cancel_scope.cancel()
            await self._tasks.__aexit__(None, None, None)  # noqa: ASYNC102 - cut above
        failure, self._failure = self._failure, None
        if failure is not None and (exc is None or swallowed):
            raise failure
        return swallowed

    def _end(self, error: BaseException | None) -> None:
        # A block has no status: one that ends has answered.
        outcome = outcome_of(200, error, gone=self._request.client_gone)
        self._request.end(error=error, outcome=outcome)

    async def _watch(self, gone: Callable[[], Awaitable[object]]) -> None:
        try:
            await gone()
        except OSError:
            self._request.leave()
        except Exception as error:  # noqa: BLE001 - raised where the block is left
            self._failure = error
        else:
            self._request.leave()
        self._work.cancel(reason="the client left")
