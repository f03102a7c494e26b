"""What the ASGI tests share: a scripted server, a real one, and a canceller."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import types
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from typing import Any

import anyio
import anyio.lowlevel
import uvicorn
from packaging.version import Version

Message = dict[str, Any]
# Earlier releases of uvicorn close a connection without a word.
ANNOUNCES_CLOSE = Version(uvicorn.__version__) >= Version("0.53")
KINDS = [
    ("asyncio", "scope", "early"),
    ("asyncio", "scope", "late"),
    ("asyncio", "native", "early"),
    ("asyncio", "native", "late"),
    ("asyncio", "native", "always"),
    ("trio", "scope", "early"),
]


def http_scope(path: str = "/", **changes: Any) -> dict[str, Any]:
    """An ASGI scope such as a server would make."""
    scope: dict[str, Any] = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": [],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 2),
    }
    return {**scope, **changes}


class ScriptedServer:
    """The server's side of one request: `receive` and `send`, and what was sent.

    Args:
        chunks: The request body.
        waits: Whether ``send`` suspends, as a server under back-pressure does.
    """

    def __init__(self, *chunks: bytes, waits: bool = False) -> None:
        self.messages: list[Message] = [
            {"type": "http.request", "body": chunk, "more_body": True}
            for chunk in chunks
        ]
        self.messages.append({"type": "http.request", "body": b"", "more_body": False})
        self.waits = waits
        self.gone = anyio.Event()
        self.complete = anyio.Event()
        self.readers = 0
        # A response was begun, though a cancellation may have cut its first send.
        self.offered = False
        self.sent: list[Message] = []
        self.on_send: Callable[[Message], None] = lambda message: None

    async def receive(self) -> Message:
        """The body, then ``http.disconnect`` once gone or complete."""
        self.readers += 1
        assert self.readers == 1, "two readers of one receive"
        try:
            await anyio.lowlevel.checkpoint()
            if self.messages:
                return self.messages.pop(0)
            async with anyio.create_task_group() as tasks:
                for event in (self.gone, self.complete):
                    tasks.start_soon(_first, event, tasks.cancel_scope)
            return {"type": "http.disconnect"}
        finally:
            self.readers -= 1

    async def send(self, message: Message) -> None:
        """Keep *message* as a server would write it."""
        self.offered = True
        if self.waits:
            await anyio.lowlevel.checkpoint()
        self.sent.append(message)
        self.on_send(message)
        if message["type"] == "http.response.body" and not message.get("more_body"):
            self.complete.set()

    @property
    def status(self) -> int | None:
        """The status of the response, if it began."""
        starts = [m for m in self.sent if m["type"] == "http.response.start"]
        assert len(starts) <= 1, "a response began twice"
        return starts[0]["status"] if starts else None

    @property
    def body(self) -> bytes:
        """The body that was sent."""
        return b"".join(m.get("body", b"") for m in self.sent)


async def _first(event: anyio.Event, scope: anyio.CancelScope) -> None:
    await event.wait()
    scope.cancel()


# Cancelling at every suspension ------------------------------------------------


@types.coroutine
def _stepped(
    target: Coroutine[Any, Any, Any], hook: Callable[[Any], Callable[[], None] | None]
) -> Any:
    step: Callable[[Any], Any] = target.send
    value: Any = None
    while True:
        try:
            pending = step(value)
        except StopIteration as end:
            return end.value
        after = hook(pending)
        try:
            step, value = target.send, (yield pending)
        except BaseException as error:  # noqa: BLE001 - thrown into the target
            step, value = target.throw, error
        if after is not None:
            after()


class Cancelled:
    """One run that is cancelled at its suspension number *at*, and how it went.

    Args:
        at: From 1; 0 cancels nothing.
        kind: "scope" by an anyio scope, "native" by ``Task.cancel``, "leave" by
            whatever `cancel` is set to.
        when: "early" as it suspends, "late" when what it waits for is there but it
            has not run yet, "always" at this and every later suspension.
    """

    def __init__(self, at: int, kind: str, when: str) -> None:
        self.at, self.kind, self.when = at, kind, when
        self.points = 0
        self.hit = False
        self.propagated = False
        self.cancel: Callable[[], Any] | None = None

    async def run(self, target: Coroutine[Any, Any, Any]) -> None:
        """Run *target*; at the chosen suspension cancel it, or call `cancel`."""
        scope = anyio.CancelScope()
        task = asyncio.current_task() if self.kind == "native" else None
        cancel = self.cancel or (task.cancel if task else scope.cancel)
        try:
            with scope:
                await _stepped(target, lambda pending: self._hook(pending, cancel))
        except asyncio.CancelledError:
            if task is None:
                raise
            self.propagated = True
            while task.cancelling():
                task.uncancel()
        if scope.cancelled_caught:
            self.propagated = True

    def _hook(
        self, pending: Any, cancel: Callable[[], Any]
    ) -> Callable[[], None] | None:
        self.points += 1
        if self.at and self.when == "always" and self.points >= self.at:
            self.hit = True
            cancel()
        if self.points != self.at or self.when == "always":
            return None
        self.hit = True
        if self.when == "early":
            cancel()
        elif pending is None:  # a bare yield: it has no future to wait for
            asyncio.get_running_loop().call_soon(cancel)
        else:  # before the task's own wake-up: granted, then cancelled
            pending.add_done_callback(lambda _: cancel())
        return None


def cancel_everywhere(
    scenario: Callable[[Cancelled], Awaitable[None]],
    backend: str,
    kind: str,
    when: str,
    *,
    limit: int = 400,
) -> int:
    """Run *scenario* once per suspension point; returns how many there were.

    The scenario builds fresh state, calls ``await run.run(coroutine)`` and asserts
    its invariants. A run that hangs fails after ten seconds.
    """
    for at in range(1, limit):
        run = Cancelled(at, kind, when)

        async def main(run: Cancelled = run) -> None:
            with anyio.fail_after(120):
                async with alone():
                    await scenario(run)

        try:
            anyio.run(main, backend=backend)
        except BaseException as error:
            error.add_note(f"{backend} {kind} {when}, point {at}")
            raise
        if not run.hit:
            return at - 1
    message = f"more than {limit} suspension points"
    raise AssertionError(message)


@contextlib.asynccontextmanager
async def alone() -> AsyncIterator[None]:
    """Leaves no task running that did not run before."""
    known = {task.id for task in anyio.get_running_tasks()}
    yield
    for _ in range(20):
        running = anyio.get_running_tasks()
        if not (left := [task for task in running if task.id not in known]):
            return
        await anyio.lowlevel.checkpoint()
    message = f"tasks left: {[task.name for task in left]}"
    raise AssertionError(message)


# A real server -----------------------------------------------------------------


class QuietServer(uvicorn.Server):
    """uvicorn without its signal handlers, which belong to the main program."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave the signals alone."""
        yield


@contextlib.asynccontextmanager
async def serving(app: Any, **settings: Any) -> AsyncIterator[int]:
    """Serve *app* by uvicorn on this loop and yield the port."""
    # No WebSockets: earlier releases of uvicorn import a deprecated part of websockets.
    settings = {"log_level": "error", "lifespan": "auto", "ws": "none", **settings}
    config = uvicorn.Config(app, timeout_graceful_shutdown=2, **settings)
    server = QuietServer(config)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        task = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            while not server.started:
                if task.done():
                    await task
                await asyncio.sleep(0)
            yield port
        finally:
            server.should_exit = True
            await task
