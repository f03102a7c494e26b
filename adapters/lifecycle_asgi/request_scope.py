"""`request_scope`: disconnects and owned streams for servers that do not speak ASGI."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from typing import TYPE_CHECKING, final

import anyio

from lifecycle.events import Observer, guarded
from lifecycle_asgi.events import RequestRecorder, request_outcome
from lifecycle_asgi.request import RequestScope

if TYPE_CHECKING:
    from types import TracebackType


@final
class request_scope:  # noqa: N801 - it reads as a function: `async with request_scope(…)`
    """Cancels the block when the client of a request disconnects.

    For aiohttp, grpc.aio, a plain asyncio server, or any other server that can report
    a disconnect. When it does, the sessions attached to the request are marked, the
    block is cancelled, and the code after it continues: `RequestScope.client_gone`
    is true.

    Args:
        wait_disconnect: Returns when the client has disconnected. It is called once, in
            a task of its own, and cancelled if the block ends first. An `OSError` means
            that the connection is lost, which is a disconnect, too. Any other error
            cancels the block and is raised at its end. ``None``: the server itself
            cancels the task of a request whose client disconnects, as grpc.aio does,
            and aiohttp with ``handler_cancellation``. Then every cancellation from
            outside counts as a disconnect, and propagates.
        grace: Seconds that each stream owned by the request may take to close.
        observer: Called with the events of the request; see `RequestEvent`. A block
            that ends normally has ``completed``, one that raises has ``failed``.
        operation: Kind of request: a fixed word.
        headers: Raw headers, such as ``request.raw_headers`` of aiohttp. Only the
            trace context of the caller is read.
    """

    def __init__(
        self,
        wait_disconnect: Callable[[], Awaitable[object]] | None = None,
        *,
        grace: float = 5.0,
        observer: Observer | None = None,
        operation: str = "request",
        headers: Iterable[tuple[bytes, bytes]] = (),
    ) -> None:
        self._wait_disconnect = wait_disconnect
        self._grace = grace
        self._emit = guarded(observer)
        self._operation = operation
        self._headers = headers
        self._failure: Exception | None = None
        self._request = RequestScope(cancelled_when_gone=wait_disconnect is None)
        self._block = anyio.CancelScope()

    async def __aenter__(self) -> RequestScope:
        """Start to wait for the disconnect.

        Cancellation:
            Never raised here: this is no checkpoint.
        """
        if self._emit is not None:
            headers = [(name.lower(), value) for name, value in self._headers]
            scope = {"headers": headers}
            recorder = RequestRecorder(self._emit, self._operation, scope)
            self._request.set_recorder(recorder)
        self._tasks = anyio.create_task_group()
        await self._tasks.__aenter__()
        if self._wait_disconnect is not None:
            self._tasks.start_soon(self._watch, self._wait_disconnect)
        self._block.__enter__()
        return self._request

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        """Stop waiting, and close what the request owns.

        Cancellation:
            A cancellation by the disconnect ends here; any other one propagates.
        """
        swallowed = bool(self._block.__exit__(exc_type, exc, traceback))
        cancelled = isinstance(exc, anyio.get_cancelled_exc_class())
        if self._wait_disconnect is None and cancelled:
            self._request.mark_client_gone()
        # Only the watcher is left to wait for, and it is about to be cancelled. A
        # cancellation of this wait would lose an error of the block.
        self._tasks.cancel_scope.shield = True
        try:
            # Shielded, with a limit for each stream that is closed.
            await self._request.close(self._grace)  # noqa: ASYNC102
        except Exception as error:  # noqa: BLE001 - raised below, if nothing else is
            self._failure = self._failure or error
        finally:
            # What the block raised, above all a cancellation, precedes a failure.
            self._end(self._failure if exc is None or swallowed else exc)
            self._tasks.cancel_scope.cancel()
            await self._tasks.__aexit__(None, None, None)  # noqa: ASYNC102 - cancelled
        failure, self._failure = self._failure, None
        if failure is not None and (exc is None or swallowed):
            raise failure
        return swallowed

    def _end(self, error: BaseException | None) -> None:
        # A block has no status; one that ends normally counts as answered.
        gone = self._request.client_gone
        outcome = request_outcome(200, error, client_gone=gone)
        self._request.end(error=error, outcome=outcome)

    async def _watch(self, wait_disconnect: Callable[[], Awaitable[object]]) -> None:
        try:
            await wait_disconnect()
        except OSError:
            self._request.mark_client_gone()
        except Exception as error:  # noqa: BLE001 - raised at the end of the block
            self._failure = error
        else:
            self._request.mark_client_gone()
        self._block.cancel(reason="the client disconnected")
