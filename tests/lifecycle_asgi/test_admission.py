"""Admission: keys, bodies by bytes, one lease at a time, release, refusals."""

from __future__ import annotations

import gc
import inspect
import json
import tracemalloc
import typing
from dataclasses import fields
from functools import partial
from types import SimpleNamespace
from typing import Any

import anyio
import pytest
from asgi_kit import Message, ScriptedServer, http_scope

import lifecycle_asgi
from lifecycle import Gate
from lifecycle_asgi import (
    Admission,
    AdmissionOptions,
    AdmissionSettings,
    handed_off,
)

pytestmark = pytest.mark.anyio
OK = {"type": "http.response.start", "status": 200, "headers": []}
CHAT = "/v1/chat/completions"


def length(size: int) -> list[tuple[bytes, bytes]]:
    """The header that declares *size*."""
    return [(b"content-length", str(size).encode())]


def wrap(app: Any, **options: Any) -> Admission:
    """Admission that reads nothing from this process's environment."""
    return Admission(app, environment={}, **options)


async def call(
    admission: Any, server: ScriptedServer, path: str = CHAT, **scope: Any
) -> Any:
    """Serve one request, and return its response as JSON if it is some."""
    with anyio.fail_after(120):
        await admission(http_scope(path, **scope), server.receive, server.send)
    return json.loads(server.body) if server.body.startswith(b"{") else server.body


async def answer(send: Any) -> None:
    """Say 200."""
    await send(OK)
    await send({"type": "http.response.body", "body": b"ok"})


def in_use(admission: Admission) -> dict[str, int]:
    """Bytes held in each lane."""
    return {name: now.bytes_in_use for name, now in admission.statistics().items()}


NONE = {"small": 0, "bodies": 0, "requests": 0}


class Held:
    """An application that reads its body, and answers when it may.

    Args:
        streamed: Whether it sends a first part, and the rest when it may.
    """

    def __init__(self, streamed: bool = False) -> None:
        self.streamed = streamed
        self.entered = 0
        self.bodies: list[bytes] = []
        self.may_answer = anyio.Event()
        self.scopes: list[Any] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Serve one request."""
        self.entered += 1
        self.scopes.append(scope)
        message = await receive()
        assert not message["more_body"]
        self.bodies.append(message["body"])
        if self.streamed:
            await send(OK)
            await send({"type": "http.response.body", "body": b"a", "more_body": True})
        await self.may_answer.wait()
        if self.streamed:
            await send({"type": "http.response.body", "body": b""})
        else:
            await answer(send)


async def test_gives_the_whole_body_once() -> None:
    """The application gets the body in one message, and then what the server has."""
    seen: list[Message] = []
    server = ScriptedServer(b"a" * 10, b"b" * 20)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append(await receive())
        await answer(send)
        seen.append(await receive())

    admission = wrap(app)
    await call(admission, server, headers=length(30))
    assert seen[0]["body"] == b"a" * 10 + b"b" * 20
    assert not seen[0]["more_body"]
    assert seen[1]["type"] == "http.disconnect"
    assert in_use(admission) == NONE


async def test_gives_the_very_bytes_of_the_server() -> None:
    """A body that came in one part is not copied."""
    body, seen = b"x" * 100_000, []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append((await receive())["body"])
        await answer(send)

    server = ScriptedServer()
    server.messages = [{"type": "http.request", "body": body, "more_body": False}]
    await call(wrap(app), server, headers=length(len(body)))
    assert seen[0] is body


async def test_serves_an_empty_body_that_declares_no_length() -> None:
    """As of a POST without a body: it costs nearly nothing, and is no mistake."""
    held = Held()
    held.may_answer.set()
    admission, server = wrap(held), ScriptedServer()
    await call(admission, server)
    assert (server.status, held.bodies) == (200, [b""])
    assert in_use(admission) == NONE


@pytest.mark.parametrize("refused", ["slots", "length"])
async def test_holds_no_body_while_it_answers_a_refusal(refused: str) -> None:
    """The bytes are given back by then; no frame of a traceback may have them still."""
    size, seen = 3_000_000, list[int]()
    limit = {"max_wait": 0.0, "slots": 1} if refused == "slots" else {"max_body": size}
    held = Held()
    admission = wrap(held, **limit)
    server = ScriptedServer(b"", b"x")
    server.on_send = lambda _: seen.append(tracemalloc.get_traced_memory()[0])
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(call, admission, ScriptedServer(b"{}"))
        await anyio.wait_all_tasks_blocked()
        gc.disable()
        tracemalloc.start()
        try:
            server.messages[0]["body"] = bytes(size)
            await call(admission, server)
            seen.append(tracemalloc.get_traced_memory()[0])
        finally:
            tracemalloc.stop()
            gc.enable()
            held.may_answer.set()
    assert server.status == {"slots": 503, "length": 413}[refused]
    assert max(seen) < size / 2


async def test_drops_a_body_that_the_application_never_reads() -> None:
    """A task that outlives the request has its context, but not its body."""
    kept = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        kept.append(scope["lifecycle.admission"])
        await answer(send)

    await call(wrap(app), ScriptedServer(b"x" * 100))
    assert kept[0].body is None


async def test_admits_declared_body_before_it_is_read() -> None:
    """A body that does not fit beside others is not read before it does."""
    app = Held()
    admission = wrap(app, bytes=16 * 2**20, max_waiting=4)  # bodies: 3 MiB
    first, second = ScriptedServer(), ScriptedServer(b"x" * 10)
    first.messages = []  # it declares much and sends nothing
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(call_with, admission, first, 900_000)
        await anyio.wait_all_tasks_blocked()
        tasks.start_soon(call_with, admission, second, 800_000)
        await anyio.wait_all_tasks_blocked()
        assert admission.statistics()["bodies"].waiting == 1
        assert in_use(admission)["bodies"] == 2_700_000
        first.gone.set()  # the lease passes on
        app.may_answer.set()
    assert second.status == 200
    assert in_use(admission) == NONE


async def call_with(admission: Any, server: ScriptedServer, size: int) -> None:
    """Serve a request that declares *size*."""
    await call(admission, server, headers=length(size))


@pytest.mark.parametrize("declared", [True, False])
async def test_refuses_body_above_the_limit(declared: bool) -> None:
    """413, before the application is called, and before a declared body is read."""
    app = Held()
    server = ScriptedServer(b"x" * 600, b"x" * 600)
    unread = []
    server.on_send = lambda _: unread.append(len(server.messages))
    headers = length(1200) if declared else []
    answered = await call(wrap(app, max_body=1000), server, headers=headers)
    assert server.status == 413
    assert answered["error"]["code"] == "request_too_large"
    assert not app.entered
    if declared:
        assert unread[0] >= 2


async def test_refuses_what_can_never_fit() -> None:
    """413 without Retry-After, where 503 would have clients retry for ever."""
    server = ScriptedServer()
    await call(wrap(Held(), bytes=2**20), server, headers=length(2**19))
    assert server.status == 413
    assert b"retry-after" not in dict(server.sent[0]["headers"])


async def test_refuses_when_the_queue_is_full() -> None:
    """503 with Retry-After in both forms, at once."""
    app = Held()
    admission = wrap(app, bytes=2**20, max_waiting=0)
    async with anyio.create_task_group() as tasks:
        first = ScriptedServer(b"x" * 50_000)
        tasks.start_soon(call_with, admission, first, 50_000)
        await anyio.wait_all_tasks_blocked()
        server = ScriptedServer()
        server.messages = []
        tasks.start_soon(call_with, admission, server, 60_000)
        await anyio.wait_all_tasks_blocked()
        late = ScriptedServer()
        await call(admission, late, headers=length(60_000))
        assert late.status == 503
        headers = dict(late.sent[0]["headers"])
        assert 1 <= int(headers[b"retry-after"]) <= 60
        assert int(headers[b"retry-after-ms"]) >= 1000
        server.gone.set()
        app.may_answer.set()
    assert in_use(admission) == NONE


SHAPES = [
    (CHAT, [], lambda body: body["error"]["code"] == "invalid_api_key"),
    ("/v1/responses", [], lambda body: body["error"]["param"] is None),
    (
        "/v1/messages",
        [],
        lambda body: (
            (body["type"], body["error"]["type"]) == ("error", "authentication_error")
        ),
    ),
    (
        "/anything",
        [(b"anthropic-version", b"2023-06-01")],
        lambda body: body["type"] == "error",
    ),
    ("/generate", [], lambda body: body.startswith(b"The API key")),
]


@pytest.mark.parametrize(("path", "headers", "right"), SHAPES)
async def test_refuses_in_the_format_of_the_api(
    path: str, headers: Any, right: Any
) -> None:
    """OpenAI's, Anthropic's and plain clients read the errors of their own API."""
    server = ScriptedServer()
    headers = [*headers, *length(10)]
    body = await call(wrap(Held(), api_keys=("k",)), server, path, headers=headers)
    assert server.status == 401
    assert right(body)


@pytest.mark.parametrize(
    "header", [(b"authorization", b"Bearer b"), (b"x-api-key", b"b")]
)
async def test_admits_requests_with_a_key(header: Any) -> None:
    """Either header counts, and any of several keys."""
    app = Held()
    app.may_answer.set()
    server = ScriptedServer(b"x")
    admission = wrap(app, api_keys=("a", "b"))
    await call(admission, server, headers=[header, *length(1)])
    assert server.status == 200


async def test_answers_the_unauthorised_before_it_reads() -> None:
    """Without a key nothing is received before the whole refusal is sent."""
    server = ScriptedServer(b"x" * 1000)
    unread = []
    server.on_send = lambda _: unread.append(len(server.messages))
    headers = [(b"authorization", b"Bearer wrong"), *length(1000)]
    app = Held()
    await call(wrap(app, api_keys=("k",)), server, headers=headers)
    assert server.status == 401
    assert unread == [2, 2, 0]  # head, content, and the end after the body
    assert not server.sent[-1]["body"]
    assert not app.entered


@pytest.mark.parametrize(
    ("path", "given", "status"),
    [
        (CHAT, b"Bearer wrong", 401),
        (CHAT, b"Bearer one", 200),
        (CHAT, b"bEARER two", 200),
        (CHAT, b"Bearer  one", 401),
        (CHAT, b"Basic one", 401),
        (CHAT, b"one", 401),
        (CHAT, "Bearer schlüssel".encode("latin-1"), 200),
        ("/v2/rerank", b"Bearer wrong", 401),
        ("/inference/v1/generate", b"Bearer wrong", 401),
        ("/cohere/v2/chat", b"Bearer wrong", 401),
        ("/cohere/v2/chat", b"Bearer two", 200),
        ("/tokenize", b"Bearer wrong", 200),
        ("/health", b"Bearer wrong", 200),
        ("/metrics", b"Bearer wrong", 200),
    ],
)
async def test_takes_the_key_of_vllm(path: str, given: bytes, status: int) -> None:
    """``--api-key`` is found in the application's state, and guards what vLLM guards."""
    app = Held()
    app.may_answer.set()
    args = SimpleNamespace(api_key=["one", "two", "schlüssel"])
    state = SimpleNamespace(args=args)
    server = ScriptedServer(b"x")
    headers = [(b"authorization", given), *length(1)]
    vllm = SimpleNamespace(state=state)
    await call(wrap(app), server, path, headers=headers, app=vllm)
    assert server.status == status


async def test_takes_the_key_of_vllm_from_its_environment() -> None:
    """``VLLM_API_KEY`` counts where the application has no key."""
    admission = Admission(Held(), environment={"VLLM_API_KEY": "one"})
    server = ScriptedServer(b"x")
    await call(admission, server, headers=length(1))
    assert server.status == 401


@pytest.mark.parametrize(("path", "status"), [(CHAT, 200), ("/v3/x", 401)])
async def test_guards_other_prefixes_by_option(path: str, status: int) -> None:
    """A server with other routes names its own."""
    app = Held()
    app.may_answer.set()
    environment = {"VLLM_API_KEY": "k", "LIFECYCLE_GUARDED_PREFIXES": "/v3, /v4"}
    server = ScriptedServer(b"x")
    await call(Admission(app, environment=environment), server, path, headers=length(1))
    assert server.status == status


async def test_counts_the_first_authorization_only() -> None:
    """vLLM would refuse the request by its first header, with the body read."""
    given = [(b"authorization", b"Bearer x"), (b"authorization", b"Bearer k")]
    app = Held()
    app.may_answer.set()
    server = ScriptedServer(b"x")
    headers = [*given, *length(1)]
    await call(wrap(app, api_keys=("k",)), server, headers=headers)
    assert server.status == 401


@pytest.mark.parametrize("size", [100, 100_000])
async def test_releases_with_the_first_bytes_of_a_stream(size: int) -> None:
    """The rest of a stream holds nothing, as the engine has the request."""
    app = Held(streamed=True)
    admission = wrap(app)
    server = ScriptedServer(b"x" * size)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(call_with, admission, server, size)
        await anyio.wait_all_tasks_blocked()
        assert server.status == 200
        assert app.entered == 1
        assert in_use(admission) == NONE
        app.may_answer.set()


@pytest.mark.parametrize("by_scope", [True, False])
async def test_releases_when_handed_off(by_scope: bool) -> None:
    """A hook releases a request that is not streamed, with its scope or without."""
    app = Held()
    admission = wrap(app)

    async def hooked(scope: Any, receive: Any, send: Any) -> None:
        assert in_use(admission)["requests"] == 300_000
        handed_off(scope if by_scope else None)
        assert in_use(admission) == NONE
        await app(scope, receive, send)

    admission = wrap(hooked)
    app.may_answer.set()
    server = ScriptedServer(b"x" * 100_000)
    await call(admission, server, headers=length(100_000))
    assert server.status == 200
    handed_off()
    handed_off({})


async def test_releases_at_the_end_otherwise() -> None:
    """An application that fails, or sends no body, leaves nothing behind."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        raise ZeroDivisionError

    admission = wrap(app)
    with pytest.raises(ZeroDivisionError):
        await call(admission, ScriptedServer(b"x"), headers=length(1))
    assert in_use(admission) == NONE


async def test_releases_when_the_client_leaves() -> None:
    """A client that leaves while it waits, or while it is served, holds nothing."""
    app = Held()
    admission = wrap(app, bytes=16 * 2**20)
    servers = [ScriptedServer(b"x" * 800_000) for _ in range(6)]
    async with anyio.create_task_group() as tasks:
        for server in servers:
            tasks.start_soon(call_with, admission, server, 800_000)
        await anyio.wait_all_tasks_blocked()
        waiting = admission.statistics()
        assert app.entered == 5
        assert waiting["requests"].waiting == 1
        for server in servers:
            server.gone.set()
    assert in_use(admission) == NONE
    assert admission.statistics()["requests"].cancelled == 1
    assert app.entered == 5


async def test_passes_on_what_has_no_body() -> None:
    """A GET, and a POST of length 0, are neither charged nor refused."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await answer(send)

    for scope in ({"method": "GET"}, {"headers": length(0)}):
        server = ScriptedServer()
        await call(wrap(app, bytes=1, api_keys=("k",)), server, **scope)
        assert server.status == 200


async def test_passes_on_other_scopes() -> None:
    """Lifespan and websockets are the application's own."""
    seen = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append(scope["type"])

    server = ScriptedServer()
    for kind in ("lifespan", "websocket"):
        await wrap(app)({"type": kind}, server.receive, server.send)
    assert seen == ["lifespan", "websocket"]


def test_reads_settings_from_the_environment() -> None:
    """Each setting has a variable; sizes may have units; arguments come first."""
    environment = {
        "LIFECYCLE_BYTES": "1.5GiB",
        "LIFECYCLE_MAX_BODY": "1000",
        "LIFECYCLE_MAX_WAIT": "2.5",
        "LIFECYCLE_API_KEYS": "a, b,",
        "LIFECYCLE_OTHER": "?",
    }
    read = AdmissionSettings.from_environment(environment, max_body=7)
    assert read == AdmissionSettings(
        bytes=3 * 2**29, max_body=7, max_wait=2.5, api_keys=("a", "b")
    )
    assert "api_keys" not in repr(read)


def test_names_the_same_options_to_type_checkers() -> None:
    """What a checker permits as an option is what there is, of the same type."""
    known = {each.name: each.type for each in fields(AdmissionSettings)}
    told = AdmissionOptions.__annotations__.items()
    assert {name: each.__forward_arg__ for name, each in told} == known


def test_tells_its_types_to_containers() -> None:
    """Such as those that inject what a signature asks for."""
    for name in lifecycle_asgi.__all__:
        each = getattr(lifecycle_asgi, name)
        for of in (each, getattr(each, "__init__", None)):
            if inspect.isfunction(of):
                assert typing.get_type_hints(of)["return"] is not None


@pytest.mark.parametrize(
    ("limits", "warned"),
    [
        ({"bytes": 2**28}, False),  # the default gives way
        ({"bytes": 2**28, "max_body": 2**24}, False),
        ({"bytes": 2**28, "max_body": 2**24 + 1}, True),
        ({"bytes": 2**28, "max_body": 2**26 + 1}, True),
        ({"bytes": 16 * (2**26 + 1), "max_body": 2**26 + 1}, False),
    ],
)
def test_warns_of_bodies_that_never_fit(
    caplog: pytest.LogCaptureFixture, limits: dict[str, int], warned: bool
) -> None:
    """A body of a permitted size is not refused for the budget without a word."""
    wrap(None, **limits)
    assert bool(caplog.messages) is warned
    for message in caplog.messages:
        assert message == (
            f"Admission: bodies above {2**24} bytes are refused, although max_body is "
            f"{limits['max_body']}; that takes a budget of {16 * limits['max_body']} "
            f"bytes"
        )


def test_says_what_gate_of_yours_would_fit_a_body(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Where its limits count, and those of the settings do not."""
    wrap(None, bytes=2**20, max_body=100, gates={"bodies": Gate(bytes=299)})
    (message,) = caplog.messages
    assert message == (
        "Admission: bodies above 99 bytes are refused, although max_body is 100; that "
        "takes a gate of bodies of 300 bytes"
    )
    caplog.clear()
    wrap(None, bytes=2**20, max_body=100, gates={"bodies": Gate(bytes=300)})
    assert caplog.messages == []


def test_warns_of_variables_that_set_nothing(caplog) -> None:
    """A misspelt limit is none, which is told with the name that was most likely meant."""
    environment = {"LIFECYCLE_BYTE": "1GiB", "LIFECYCLE_SLOTS": "4", "OTHER": "1"}
    assert AdmissionSettings.from_environment(environment).slots == 4
    (record,) = caplog.records
    assert record.getMessage() == (
        "LIFECYCLE_BYTE is no setting of Admission, and is ignored; "
        "did you mean LIFECYCLE_BYTES?"
    )
    caplog.clear()
    AdmissionSettings.from_environment({"LIFECYCLE_XYZZY": "1"})
    assert caplog.messages == [
        "LIFECYCLE_XYZZY is no setting of Admission, and is ignored"
    ]


@pytest.mark.parametrize(
    ("environment", "options", "error"),
    [
        ({"LIFECYCLE_BYTES": "many"}, {}, ValueError),
        ({"LIFECYCLE_MAX_WAITING": "1.5"}, {}, ValueError),
        ({}, {"bytes": 0}, ValueError),
        ({"LIFECYCLE_TENSOR_PIXELS": "0"}, {}, ValueError),
        ({}, {"api_keys": "abc"}, TypeError),
        ({}, {"guarded_prefixes": "/v1"}, TypeError),
        ({}, {"max_wait": "1"}, TypeError),
        ({}, {"limit": 1}, TypeError),
    ],
)
def test_refuses_settings_out_of_range(
    environment: Any, options: Any, error: Any
) -> None:
    """A setting that cannot be meant fails when the server starts."""
    with pytest.raises(error):
        Admission(Held(), environment=environment, **options)


async def test_charges_a_body_without_length_as_it_arrives() -> None:
    """Its lease doubles, and it is refused where the bytes are taken."""
    app = Held()
    app.may_answer.set()
    admission = wrap(app, bytes=2**20)  # bodies: 196,608
    first = ScriptedServer()
    first.messages = []
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(call_with, admission, first, 20_000)
        await anyio.wait_all_tasks_blocked()
        assert in_use(admission)["bodies"]
        server = ScriptedServer(*[b"x" * 10_000] * 6)
        body = await call(admission, server)
        assert server.status == 503
        assert body["error"]["code"] == "server_overloaded"
        first.gone.set()
    assert in_use(admission) == NONE
    server = ScriptedServer(*[b"x" * 10_000] * 6)
    await call(admission, server)
    assert len(app.bodies[0]) == 60_000


async def test_serves_a_body_whose_bytes_it_has_though_the_gate_shrank() -> None:
    """A capacity that is lowered while it arrives takes nothing from its lease."""
    app = Held()
    app.may_answer.set()
    admission = wrap(app)
    server = ScriptedServer(b"x" * 60_000, b"y" * 60_000)

    async def shrinking() -> Message:
        if len(server.messages) == 1:  # the end of the body
            admission.gates[1].resize(bytes=1)
        return await server.receive()

    with anyio.fail_after(120):
        scope = http_scope(CHAT, headers=length(120_000))
        await admission(scope, shrinking, server.send)
    assert (server.status, len(app.bodies[0])) == (200, 120_000)
    assert in_use(admission) == NONE


@pytest.mark.parametrize("declared", [True, False])
async def test_a_body_for_which_there_is_never_room_is_too_large(
    declared: bool,
) -> None:
    """413 with the limit, where 503 would have the client try again for ever."""
    server = ScriptedServer(*[b"x" * 10_000] * 8)
    headers = length(80_000) if declared else []
    body = await call(wrap(Held(), bytes=2**20), server, headers=headers)
    assert server.status == 413
    assert "larger than 65536 bytes" in body["error"]["message"]


async def test_charges_a_slow_body_with_what_has_arrived() -> None:
    """A client that declares much and sends nothing keeps out no others."""
    app = Held()
    app.may_answer.set()
    admission = wrap(app, bytes=16 * 2**20, slow_after=0.001, max_wait=60.0)
    slow, honest = ScriptedServer(), ScriptedServer(b"x" * 900_000)
    slow.messages = []
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(call_with, admission, slow, 1_000_000)
        while in_use(admission)["bodies"] != 3 * 65536:
            await anyio.sleep(0.001)
        await call(admission, honest, headers=length(900_000))
        assert honest.status == 200
        slow.gone.set()
    assert in_use(admission) == NONE


async def test_logs_no_advice_for_a_slow_body_that_declared_its_length(caplog) -> None:
    """To declare one is what helps where nobody did."""
    admission = wrap(Held(), bytes=16 * 2**20, slow_after=0.001)
    server, arrived = ScriptedServer(b"x" * 900_000), anyio.Event()

    async def receive() -> Message:
        await arrived.wait()
        return await server.receive()

    async with anyio.create_task_group() as tasks:
        scope = http_scope(CHAT, headers=length(900_000))
        tasks.start_soon(admission, scope, receive, server.send)
        with anyio.fail_after(120):  # a timer tells nobody that it was due
            while in_use(admission)["bodies"] != 3 * 65536:
                await anyio.sleep(0.001)
        admission.gates[1].resize(bytes=1)
        arrived.set()
    assert server.status == 503
    (message,) = caplog.messages
    assert "the rest of the body are taken; retry in 1 s" in message
    assert "declared" not in message


async def test_refuses_a_body_that_takes_too_long() -> None:
    """408 when the time of a body is over, and its lease is released."""
    admission = wrap(Held(), body_timeout=0.01)
    server = ScriptedServer()
    server.messages = []
    server.on_send = lambda _: server.gone.set()
    await call(admission, server, headers=length(10))
    assert server.status == 408
    assert in_use(admission) == NONE


async def test_guards_a_chunked_body_that_declares_no_length() -> None:
    """A chunked body overrides ``Content-Length: 0``, as in h11."""
    held, server = Held(), ScriptedServer(b"body")
    headers = [(b"content-length", b"0"), (b"transfer-encoding", b"chunked")]
    await call(wrap(held, api_keys=("k",)), server, headers=headers)
    assert server.status == 401
    assert held.entered == 0


@pytest.mark.parametrize("values", [["-5"], ["+5"], ["5_0"], ["5", "0"], ["9" * 5000]])
async def test_believes_no_length_that_can_be_read_in_two_ways(
    values: list[str],
) -> None:
    """Such a body is guarded, and charged as one that declares no length."""
    headers = [(b"content-length", value.encode()) for value in values]
    admission = wrap(Held(), api_keys=("k",))
    server = ScriptedServer(b"body")
    await call(admission, server, headers=headers)
    assert server.status == 401
    admission, server = wrap(Held()), ScriptedServer()
    server.messages = []
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(partial(call, admission, server, headers=headers))
        await anyio.wait_all_tasks_blocked()
        assert in_use(admission) == NONE | {"bodies": 3 * 65536}
        server.gone.set()
