"""A client for tests of your own application: it leaves when you say so."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote, urlsplit

import anyio
import anyio.lowlevel

from lifecycle_asgi.asgi_types import App, Message

__all__ = ("Answer", "lifespan", "request")


@dataclass(slots=True)
class Answer:
    """What a client has received, and how the application ended.

    Attributes:
        status: HTTP status; ``None`` if the client left before there was one.
        headers: Response headers, with lower-case names.
        items: Parts of the body that were sent while the client was there.
        left: Whether the client left before the response was complete.
        seconds: From then, or from the last part, until the application ended.
    """

    status: int | None = None
    headers: dict[str, str] = field(default_factory=dict)
    items: list[bytes] = field(default_factory=list)
    left: bool = False
    seconds: float = 0.0

    @property
    def body(self) -> bytes:
        """All items together."""
        return b"".join(self.items)


async def request(
    app: App,
    method: str,
    url: str,
    *,
    body: bytes = b"",
    headers: Mapping[str, str] | None = None,
    leave_after_items: int | None = None,
    leave_after_seconds: float | None = None,
    timeout: float = 60.0,
) -> Answer:
    """Send one request to *app*, and wait until the application has ended.

    The application runs in this process, without a server or a socket, on asyncio or
    trio. Errors of the application are raised here.

    Args:
        app: An ASGI application.
        method: Such as ``"POST"``.
        url: A path, with a query if you like.
        body: The request body.
        headers: The request headers; the length of the body is added.
        leave_after_items: Disconnect after this many parts of the response body; 0
            means with the status.
        leave_after_seconds: Disconnect after this time.
        timeout: Seconds for all of it.

    Returns:
        What the client has received.

    Raises:
        TimeoutError: The application has not ended in time, for example because it
            works on for a client that has left.

    Cancellation:
        Goes through to the application.
    """
    client = _Client(body, leave_after_items)
    with anyio.fail_after(timeout):
        async with anyio.create_task_group() as tasks:
            if leave_after_seconds is not None:
                tasks.start_soon(client.leave_after, leave_after_seconds)
            scope = _scope(method, url, {**(headers or {})}, len(body))
            failure: Exception | None = None
            try:
                await app(scope, client.receive, client.send)
            except Exception as error:  # noqa: BLE001 - raised below, outside the group
                failure = error
            tasks.cancel_scope.cancel()
    if failure is not None:
        raise failure
    client.answer.seconds = anyio.current_time() - client.ended
    return client.answer


class lifespan:  # noqa: N801 - it reads as a function: `async with lifespan(app)`
    """Starts *app* as a server does, and shuts it down after the block.

    Args:
        app: An ASGI application.
    """

    def __init__(self, app: App) -> None:
        self._app: Any = app
        self._started = False
        self._tasks = anyio.create_task_group()
        self._to_app, self._receive = anyio.create_memory_object_stream[Message](1)
        self._send, self._from_app = anyio.create_memory_object_stream[Message](2)

    async def __aenter__(self) -> None:
        """Wait until the application has started.

        Raises:
            RuntimeError: It did not start.

        Cancellation:
            Ends the application.
        """
        await self._tasks.__aenter__()
        scope = {"type": "lifespan", "asgi": _ASGI, "state": {}}
        send, receive = self._send.send, self._receive.receive
        answer: Message = {"type": "", "message": "the application ended"}
        try:
            self._tasks.start_soon(self._run, scope, receive, send)
            with suppress(anyio.EndOfStream):
                answer = await self._ask("lifespan.startup")
            self._started = answer["type"] == "lifespan.startup.complete"
        finally:
            if not self._started:
                await self.__aexit__(None, None, None)  # noqa: ASYNC102 - bounded
        if not self._started:
            raise RuntimeError(f"no startup: {answer.get('message', '')}")

    async def _run(self, *args: Any) -> None:
        try:
            await self._app(*args)
        finally:
            self._send.close()  # nothing else will be answered

    async def __aexit__(self, *error: object) -> None:
        """Wait until the application has shut down.

        Cancellation:
            Ends the application without a shutdown.
        """
        try:
            if self._started:
                with anyio.move_on_after(_SHUTDOWN_SECONDS):
                    await self._ask("lifespan.shutdown")  # noqa: ASYNC102 - cancellable
        finally:
            self._tasks.cancel_scope.cancel()
            for stream in (self._to_app, self._receive, self._send, self._from_app):
                stream.close()
            await self._tasks.__aexit__(None, None, None)  # noqa: ASYNC102 - cancelled

    async def _ask(self, kind: str) -> Message:
        await self._to_app.send({"type": kind})
        return await self._from_app.receive()


_SHUTDOWN_SECONDS = 60.0
_ASGI = {"version": "3.0", "spec_version": "2.3"}


class _Client:
    """The server's side of one request."""

    def __init__(self, body: bytes, leave_after_items: int | None) -> None:
        self.answer = Answer()
        self.ended = anyio.current_time()
        self._body: list[bytes] = [body]
        self._limit = leave_after_items
        self._gone = anyio.Event()

    async def receive(self) -> Message:
        if self._body and not self._gone.is_set():
            body = self._body.pop()
            return {"type": "http.request", "body": body, "more_body": False}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        await anyio.lowlevel.checkpoint()
        if self._gone.is_set():
            return
        if message["type"] == "http.response.start":
            self.answer.status = message["status"]
            pairs = message.get("headers", ())
            self.answer.headers = {
                bytes(name).decode("latin-1").lower(): bytes(value).decode("latin-1")
                for name, value in pairs
            }
        elif body := message.get("body", b""):
            self.answer.items.append(body)
        complete = message["type"] == "http.response.body" and not message.get(
            "more_body", False
        )
        if complete:
            self._end()
        elif self._limit is not None and len(self.answer.items) >= self._limit:
            self._leave()

    async def leave_after(self, seconds: float) -> None:
        await anyio.sleep(seconds)
        if not self._gone.is_set():
            self._leave()

    def _leave(self) -> None:
        self.answer.left = True
        self._end()

    def _end(self) -> None:
        self.ended = anyio.current_time()
        self._gone.set()


def _scope(method: str, url: str, headers: dict[str, str], length: int) -> Any:
    parts = urlsplit(url)
    if length:
        headers.setdefault("content-length", str(length))
    headers.setdefault("host", "testserver")
    pairs = [(name.lower().encode(), text.encode()) for name, text in headers.items()]
    return {
        "type": "http",
        "asgi": _ASGI,
        "http_version": "1.1",
        "method": method.upper(),
        "scheme": "http",
        "path": unquote(parts.path),
        "raw_path": parts.path.encode(),
        "root_path": "",
        "query_string": parts.query.encode(),
        "headers": pairs,
        "client": ("127.0.0.1", 1),
        "server": ("testserver", 80),
        "state": {},
    }
