"""LifecycleMiddleware against a scripted server, on asyncio and trio."""

from __future__ import annotations

import contextvars
import gc
import os
import subprocess
import sys
import time
import weakref
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest
from asgi_kit import ScriptedServer, alone, http_scope
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.responses import StreamingResponse

import lifecycle
import lifecycle_asgi
from lifecycle_asgi import Admission, LifecycleMiddleware, RequestEnded, request_of
from lifecycle_asgi.events import log_failures

pytestmark = pytest.mark.anyio
START = {"type": "http.response.start", "status": 200, "headers": []}


class Session:
    """Stands in for a lifecycle session."""

    cancelled_as: str = "cancelled"


def part(body: bytes = b"x", *, more: bool = True) -> dict[str, Any]:
    """One body message."""
    return {"type": "http.response.body", "body": body, "more_body": more}


async def call(app: Any, server: ScriptedServer, **changes: Any) -> dict[str, Any]:
    """Call *app* as *server* would and return the scope."""
    scope = http_scope(**changes)
    with anyio.fail_after(120):
        async with alone():
            await app(scope, server.receive, server.send)
    return scope


async def test_cancels_handler_that_waits_when_client_leaves() -> None:
    """A handler that waits for work is cancelled, and 499 is answered for it."""
    server, session, ends = ScriptedServer(b"body"), Session(), []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        request_of(scope).attach(session)
        server.gone.set()
        try:
            await anyio.sleep_forever()
        except anyio.get_cancelled_exc_class():
            ends.append(session.cancelled_as)
            raise

    scope = await call(LifecycleMiddleware(app), server)
    assert ends == ["client_gone"]
    assert server.status == 499
    assert scope["lifecycle"].client_gone


async def test_tells_what_works_for_a_client_that_leaves(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Each is told once; one that fails is logged, and keeps nobody from hearing."""
    server, told = ScriptedServer(b"body"), list[str]()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        request = request_of(scope)
        request.when_gone(partial(told.append, "before"))
        request.when_gone(lambda: 1 // 0)
        request.when_gone(partial(told.append, "between"))
        server.gone.set()
        with suppress(anyio.get_cancelled_exc_class()):
            await anyio.sleep_forever()
        request.when_gone(partial(told.append, "after"))

    await call(LifecycleMiddleware(app), server)
    assert told == ["before", "between", "after"]
    assert "ending the work of a client that left failed: ZeroDiv" in caplog.text


async def test_tells_nobody_of_a_client_that_stays() -> None:
    """Its response is complete when the connection ends."""
    server, told = ScriptedServer(b"body"), list[str]()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        work = Session()
        refs.append(weakref.ref(work))
        request_of(scope).when_gone(lambda: told.append(work.cancelled_as))
        await send(START)
        await send(part(more=False))
        server.gone.set()
        await anyio.lowlevel.checkpoint()

    refs = list[weakref.ref[Session]]()
    scope = await call(LifecycleMiddleware(app), server)
    late = Session()
    refs.append(weakref.ref(late))
    scope["lifecycle"].when_gone(partial(setattr, late, "cancelled_as", "late"))
    del late
    assert told == []
    assert [ref() for ref in refs] == [None, None]  # though servers keep the scope
    assert not scope["lifecycle"].client_gone


async def test_marks_session_attached_after_the_disconnect() -> None:
    """A session attached after the disconnect is cancelled at once."""
    server, session = ScriptedServer(), Session()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        server.gone.set()
        try:
            await anyio.sleep_forever()
        finally:
            request_of(scope).attach(session)

    await call(LifecycleMiddleware(app), server)
    assert session.cancelled_as == "client_gone"


@pytest.mark.parametrize("waits", [True, False])
async def test_cancels_stream_that_never_suspends(waits: bool) -> None:
    """A body that is produced without ever waiting still hears of the leaving."""
    server, sent = ScriptedServer(waits=waits), 0

    async def app(scope: Any, receive: Any, send: Any) -> None:
        nonlocal sent
        await send(START)
        while True:
            await send(part())
            sent += 1
            if sent == 3:
                server.gone.set()

    await call(LifecycleMiddleware(app), server)
    assert sent < 400  # the last hundred in vain
    assert server.status == 200


async def test_cancels_stream_that_works_for_each_message() -> None:
    """A body that never waits and takes long for each part makes few of them in vain."""
    server, made = ScriptedServer(), 0

    async def app(scope: Any, receive: Any, send: Any) -> None:
        nonlocal made
        await receive()
        await send(START)
        while True:
            time.sleep(0.01)  # noqa: ASYNC251 - the work
            await send(part())
            made += 1
            if made == 3:
                server.gone.set()

    await call(LifecycleMiddleware(app), server)
    assert made < 15


async def test_replays_body_then_disconnect() -> None:
    """The application reads every byte in order, and after the answer the end."""
    server, seen = ScriptedServer(b"a" * 100_000, b"b" * 100_000, b"c"), []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        while (message := await receive()).get("more_body"):
            seen.append(message["body"])
        await send(START)
        await send(part(more=False))
        seen.append(await receive())
        seen.append(await receive())

    scope = await call(LifecycleMiddleware(app), server)
    assert b"".join(seen[:3]) == b"a" * 100_000 + b"b" * 100_000 + b"c"
    assert seen[3:] == [{"type": "http.disconnect"}] * 2
    assert not scope["lifecycle"].client_gone


async def test_sends_disconnect_to_a_task_that_waits_behind_the_body() -> None:
    """An application that waits for the disconnect has it, and what it does then runs."""
    server, ended, session = ScriptedServer(b"body"), [], Session()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        request_of(scope).attach(session)
        while (await receive()).get("more_body"):
            pass
        message = await receive()
        ended.append((message["type"], session.cancelled_as))
        await anyio.sleep_forever()

    async with anyio.create_task_group() as tasks:
        wrapped = LifecycleMiddleware(app, disconnect_grace=0.01)
        tasks.start_soon(call, wrapped, server)
        await anyio.wait_all_tasks_blocked()
        server.gone.set()
    assert ended == [("http.disconnect", "client_gone")]
    assert server.status == 499


async def test_sends_disconnect_to_a_task_that_waits_for_more_of_a_body() -> None:
    """As without the middleware, an application may clean up a partial upload."""
    server, ends = ScriptedServer(), []
    server.messages = [{"type": "http.request", "body": b"x", "more_body": True}]

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        ends.append(await receive())

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(call, LifecycleMiddleware(app), server)
        await anyio.wait_all_tasks_blocked()
        server.gone.set()
    assert ends == [{"type": "http.disconnect"}]


async def test_reads_ahead_no_more_than_allowed() -> None:
    """With the bound's worth of body unread, the rest stays with the server."""
    server = ScriptedServer(*[b"x" * 10] * 100)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await anyio.wait_all_tasks_blocked()
        assert len(server.messages) == 101 - 3
        while (await receive())["more_body"]:
            pass

    await call(LifecycleMiddleware(app, read_ahead=25), server)


async def test_leaves_application_alone_after_complete_response() -> None:
    """Work behind the response is not the client's to cancel any more (peers-39)."""
    server, done = ScriptedServer(), []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send(START)
        await send(part(more=False))
        server.gone.set()
        await anyio.wait_all_tasks_blocked()
        done.append(request_of(scope).client_gone)

    await call(LifecycleMiddleware(app), server)
    assert done == [False]


async def test_ignores_disconnect_after_the_last_message() -> None:
    """Servers say http.disconnect after every success, some before send returns."""
    server, done = ScriptedServer(), []

    async def send(message: Any) -> None:
        await server.send(message)
        if server.complete.is_set():
            await anyio.wait_all_tasks_blocked()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send(START)
        await send(part(more=False))
        done.append(request_of(scope).client_gone)

    with anyio.fail_after(120):
        await LifecycleMiddleware(app)(http_scope(), server.receive, send)
    assert done == [False]


@pytest.mark.parametrize("leave", [False, True])
async def test_passes_exception_of_application_unwrapped(leave: bool) -> None:
    """An exception arrives as itself, whether the client is there or not."""
    server = ScriptedServer()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        try:
            if leave:
                server.gone.set()
                await anyio.sleep_forever()
        finally:
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        await call(LifecycleMiddleware(app), server)


async def test_keeps_nothing_alive_after_exception() -> None:
    """What the application held dies with its exception, without the collector."""

    class Big:
        pass

    held: list[weakref.ref[Big]] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        big = Big()
        held.append(weakref.ref(big))
        session = Session()
        request_of(scope).attach(session)
        held.append(weakref.ref(session))  # type: ignore[arg-type]
        raise ValueError("no")

    gc.collect()
    gc.disable()
    try:
        with pytest.raises(ValueError, match="no") as caught:
            await LifecycleMiddleware(app)(
                scope := http_scope(), (s := ScriptedServer()).receive, s.send
            )
        del caught
        assert [ref() for ref in held] == [None, None]
    finally:
        gc.enable()
    assert not scope["lifecycle"].live


async def test_keeps_nothing_alive_after_a_disconnect() -> None:
    """Nor after the client has left a handler that waited."""

    class Big:
        pass

    held: list[weakref.ref[Big]] = []
    server = ScriptedServer(b"body")

    async def app(scope: Any, receive: Any, send: Any) -> None:
        big = scope["big"] = Big()
        held.append(weakref.ref(big))
        while (await receive())["more_body"]:
            pass
        server.gone.set()
        await anyio.sleep_forever()

    gc.collect()
    gc.disable()
    try:
        await LifecycleMiddleware(app)(http_scope(), server.receive, server.send)
        for _ in range(5):
            await anyio.lowlevel.checkpoint()
        assert [ref() for ref in held] == [None]
    finally:
        gc.enable()


async def test_keeps_context_variables_of_server_task() -> None:
    """The application runs in the task of the server: its context is shared."""
    variable: contextvars.ContextVar[int] = contextvars.ContextVar("v", default=0)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        variable.set(7)
        await send(START)
        await send(part(more=False))

    await call(LifecycleMiddleware(app), ScriptedServer())
    assert variable.get() == 7


async def test_delivers_error_of_server_receive_to_application() -> None:
    """What the server's receive raises is raised where the application reads."""

    async def receive() -> Any:
        await anyio.lowlevel.checkpoint()
        raise OSError("broken pipe")

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()

    with anyio.fail_after(120), pytest.raises(OSError, match="broken pipe"):
        await LifecycleMiddleware(app)(http_scope(), receive, ScriptedServer().send)


async def test_ignores_server_that_minds_the_499() -> None:
    """A server that raises OSError after the client left breaks nothing."""
    server = ScriptedServer()
    server.gone.set()

    async def send(message: Any) -> None:
        await anyio.lowlevel.checkpoint()
        raise OSError("closed")

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await anyio.sleep_forever()

    with anyio.fail_after(120):
        await LifecycleMiddleware(app)(http_scope(), server.receive, send)


@pytest.mark.parametrize("kind", ["lifespan", "of a server's own"])
async def test_passes_other_scopes_through(kind: str) -> None:
    """Calls that are no requests reach the application untouched."""
    seen: list[Any] = []

    async def app(*call: Any) -> None:
        await anyio.lowlevel.checkpoint()
        seen.extend(call)

    scope, server = {"type": kind}, ScriptedServer()
    receive, send = server.receive, server.send
    await LifecycleMiddleware(app)(scope, receive, send)
    assert seen[0] is scope
    assert seen[1] is receive
    assert seen[2] is send
    assert scope == {"type": kind}


async def test_watches_once_when_nested_and_again_when_scope_is_reused() -> None:
    """A second middleware inside passes through; a scope used again is watched."""
    found: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        found.append(scope["lifecycle"])
        await send(START)
        await send(part(more=False))

    inner = LifecycleMiddleware(app)

    async def between(scope: Any, receive: Any, send: Any) -> None:
        found.append(scope["lifecycle"])
        await inner(scope, receive, send)

    scope = http_scope()
    for _ in range(2):
        server = ScriptedServer()
        await LifecycleMiddleware(between)(scope, server.receive, server.send)
    assert found[0] is found[1]
    assert found[2] is found[3]
    assert found[0] is not found[2]


async def _dispatch(request: Any, call_next: Any) -> Any:
    return await call_next(request)


# Starlette never closes the body it iterates, and trio says so when it is collected.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("above", [True, False])
@pytest.mark.parametrize("form", ["waits", "streams", "never-suspends"])
async def test_works_above_and_below_base_http_middleware(
    above: bool, form: str
) -> None:
    """BaseHTTPMiddleware hides the client from those below it, not from us (peers-38)."""
    server, ends = ScriptedServer(b"body"), []

    async def body() -> Any:
        while True:
            yield b"x" * 1000
            if form == "streams":
                await anyio.sleep_forever()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        try:
            if form == "waits":
                server.gone.set()
                await anyio.sleep_forever()
            await StreamingResponse(body())(scope, receive, send)
        finally:
            ends.append(form)

    server.on_send = lambda message: server.gone.set() if server.body else None
    if above:
        stack: Any = LifecycleMiddleware(BaseHTTPMiddleware(app, _dispatch))
    else:
        stack = BaseHTTPMiddleware(LifecycleMiddleware(app), _dispatch)
    await call(stack, server)
    assert ends == [form]
    assert server.status == (499 if form == "waits" else 200)


async def test_requires_middleware_for_request_of() -> None:
    """Asking for the request without the middleware says what to do."""
    with pytest.raises(LookupError, match="LifecycleMiddleware"):
        request_of(http_scope())
    with pytest.raises(TypeError, match=r"as in request\.scope, not object"):
        request_of(object())
    with pytest.raises(LookupError, match="only requests have one.* a websocket"):
        request_of(http_scope(type="websocket"))


@pytest.mark.parametrize(
    "option", [{"read_ahead": -1}, {"cancel_delay": -1}, {"disconnect_grace": -1}]
)
async def test_refuses_an_option_below_zero(option: Any) -> None:
    """An error names the option and the value."""
    with pytest.raises(ValueError, match=f"{next(iter(option))} must be 0 .*, not -1"):
        LifecycleMiddleware(_dispatch, **option)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("start", "ends"),
    [
        ({}, [{"type": "http.response.pathsend", "path": "/f"}]),
        ({}, [{"type": "http.response.zerocopysend", "file": 3}]),
        (
            {"trailers": True},
            [part(more=False), {"type": "http.response.trailers", "headers": []}],
        ),
    ],
)
async def test_knows_every_way_a_response_completes(start: Any, ends: Any) -> None:
    """Path and file sends complete a response, and trailers do where announced."""
    server, gone = ScriptedServer(), []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({**START, **start})
        for message in ends:
            await send(message)
        server.gone.set()
        await anyio.wait_all_tasks_blocked()
        gone.append(request_of(scope).client_gone)

    await call(LifecycleMiddleware(app), server)
    assert gone == [False]


@pytest.mark.parametrize(
    ("headers", "id_"),
    [
        ([(b"X-Request-Id", b"a.1")], "a.1"),
        ([(b"x-other", b"b"), (b"request-id", b"a.1")], "a.1"),
        ([(b"x-request-id", b"two lines\n")], None),
        ([(b"x-request-id", "text")], None),
        ([("x-request-id", "text")], None),
        (partial(iter, [(b"x-request-id", b"a.1")]), None),
    ],
)
async def test_reads_the_id_of_a_response_and_leaves_its_headers_alone(
    headers: Any, id_: str | None
) -> None:
    """Servers take headers of other types, too, and those get what the application sent."""
    server, ends = ScriptedServer(), []
    headers = headers() if callable(headers) else headers

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({**START, "headers": headers})
        await send(part(more=False))

    def observe(event: Any) -> None:
        if isinstance(event, RequestEnded):
            ends.append((event.response_id, event.error))

    await call(LifecycleMiddleware(app, observer=observe), server)
    assert ends == [(id_, None)]
    assert server.sent[0]["headers"] is headers
    assert len(list(headers)) > 0


async def test_names_a_failure_in_the_log_as_its_response_does(caplog) -> None:
    """A user who reports the id that came with half of an answer is found."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({**START, "headers": [(b"x-request-id", b"a.1")]})
        await send(part())
        raise OSError

    with pytest.raises(OSError, match="^$"):
        await call(LifecycleMiddleware(app, observer=log_failures), ScriptedServer())
    assert "request a.1 (http) failed with OSError" in caplog.text


class Picture:
    """What a frame holds while its request runs."""


@pytest.mark.parametrize("inner", [LifecycleMiddleware, Admission])
@pytest.mark.parametrize("asks", ["once", "caught", "never"])
async def test_keeps_nothing_of_a_request_that_the_server_fails(
    inner: Any, asks: str
) -> None:
    """An error of its ``receive`` takes the frames with it, collector or not."""
    alive: list[Any] = []

    def hold() -> Picture:
        picture = Picture()
        alive.append(weakref.ref(picture))
        return picture

    async def receive() -> Any:
        held = hold()  # noqa: F841 - by this frame
        raise OSError("reset")

    async def app(_: Any, receive: Any, __: Any) -> None:
        held = hold()  # noqa: F841 - by this frame
        await anyio.lowlevel.checkpoint()
        for _ in range(("never", "once", "caught").index(asks)):
            with suppress(OSError if asks == "caught" else ()):
                await receive()

    options: Any = {"environment": {}} if inner is Admission else {}
    gc.disable()
    try:
        with suppress(OSError):
            await inner(app, **options)(http_scope(), receive, ScriptedServer().send)
        for _ in range(3):  # the event loop holds its last tasks for a moment
            await anyio.lowlevel.checkpoint()
        assert {ref() for ref in alive} == {None}
    finally:
        gc.enable()


FRAMEWORKS = """
from litestar import Litestar
from litestar.middleware import DefineMiddleware
from starlette.applications import Starlette
from starlette.middleware import Middleware
from lifecycle_asgi import Admission, BodyLimit, LifecycleMiddleware

app = Litestar(middleware=[DefineMiddleware(Admission, bytes=1)])
DefineMiddleware(BodyLimit, max_bytes=1)
DefineMiddleware(LifecycleMiddleware)
Starlette(middleware=[Middleware(Admission, bytes=1), Middleware(LifecycleMiddleware)])
Admission(app)
Starlette().add_middleware(Admission, bytes="x")
"""


@pytest.mark.thorough
def test_is_middleware_for_the_type_checker_of_a_framework(tmp_path: Path) -> None:
    """Strict mypy takes what Litestar and Starlette take, and no wrong option."""
    pytest.importorskip("mypy")
    (tmp_path / "app.py").write_text(FRAMEWORKS)
    packages = [Path(each.__file__).parents[1] for each in (lifecycle, lifecycle_asgi)]
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "app.py"],
        cwd=tmp_path,
        env={**os.environ, "MYPYPATH": os.pathsep.join(map(str, packages))},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    errors = [line for line in done.stdout.splitlines() if line.startswith("app.py")]
    assert len(errors) == 1, done.stdout
    assert '"bytes" to "add_middleware"' in errors[0]
