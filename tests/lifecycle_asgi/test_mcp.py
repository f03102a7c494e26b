"""Servers of the `mcp` SDK: what they do is the same with and without us around them."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import httpx
import pytest
from asgi_kit import serving

from lifecycle_asgi import Admission, LifecycleMiddleware

pytest.importorskip("mcp.server.mcpserver")

import httpx2
from mcp import MCPError
from mcp.client.client import Client
from mcp.client.streamable_http import streamable_http_client
from mcp.server.mcpserver import Context, MCPServer
from mcp.server.streamable_http import EventMessage, EventStore
from mcp_types import ElicitResult
from pydantic import BaseModel

pytestmark = pytest.mark.anyio
KEY = {"Authorization": "Bearer key"}
TYPES = {"Accept": "application/json, text/event-stream"}
# Of the revisions in which a disconnect cancels nothing.
VERSION = "2025-11-25"


def admitted(app: Any, **settings: Any) -> Admission:
    """Guard *app* by all that a request can wait for."""
    settings = {"slots": 1, "per_client": 1, "bytes": 2**26, **settings}
    return Admission(app, environment={"LIFECYCLE_API_KEYS": "key"}, **settings)


guards = pytest.mark.parametrize(
    "guard",
    [lambda app: app, LifecycleMiddleware, admitted],
    ids=["none", "middleware", "admission"],
)


class Events(EventStore):  # type: ignore[misc, unused-ignore]
    """Keeps all events, so that a client may resume."""

    def __init__(self) -> None:
        self.kept: list[tuple[str, Any]] = []

    async def store_event(self, stream_id: str, message: Any) -> str:
        """Keep an event, and number it."""
        self.kept.append((stream_id, message))
        return str(len(self.kept))

    async def replay_events_after(self, last_event_id: str, send_callback: Any) -> str:
        """Send what followed in the stream of an event."""
        after = int(last_event_id)
        stream = self.kept[after - 1][0]
        for number, (of, message) in enumerate(self.kept[after:], after + 1):
            if of == stream and message is not None:
                await send_callback(EventMessage(message, str(number)))
        return stream


class Tool:
    """A tool that reports progress, and goes on when the test says so."""

    def __init__(self) -> None:
        self.begun, self.go, self.ended = anyio.Event(), anyio.Event(), anyio.Event()
        self.result = ""

    async def work(self, context: Context[Any]) -> str:
        """Work in two steps."""
        try:
            await context.report_progress(1, 2)
            self.begun.set()
            await self.go.wait()
            await context.report_progress(2, 2)
            self.result = "finished"
        finally:
            self.result = self.result or "cancelled"
            self.ended.set()
        return "done"

    def app(self, **options: Any) -> Any:
        """Return the ASGI application of a server with this tool."""
        found = MCPServer("tools")
        found.add_tool(self.work)
        return found.streamable_http_app(**options)


class Noted:
    """Notes when the calls of a tool have ended, and when they learned of a disconnect."""

    def __init__(self, app: Any) -> None:
        self.app = app
        self.left, self.over = anyio.Event(), anyio.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        is_call = (b"x-call", b"1") in scope.get("headers", ())

        async def noted() -> Any:
            message = await receive()
            if is_call and message["type"] == "http.disconnect":
                self.left.set()
            return message

        try:
            await self.app(scope, noted, send)
        finally:
            if is_call:
                self.over.set()


class Session:
    """A client that speaks the protocol by hand, so that it can leave anywhere."""

    def __init__(self, url: str, client: httpx.AsyncClient) -> None:
        self.url, self.client = url, client
        self.headers = {"MCP-Protocol-Version": VERSION}

    def message(self, method: str, number: int | None = None, **params: Any) -> Any:
        """Return the arguments of a POST."""
        body: dict[str, Any] = {"jsonrpc": "2.0", "method": method, "params": params}
        if number is not None:
            body["id"] = number
        return {"url": self.url, "json": body, "headers": self.headers}

    async def begin(self) -> None:
        """Initialise the session, and list the tools."""
        hello: dict[str, Any] = {"protocolVersion": VERSION, "capabilities": {}}
        hello["clientInfo"] = {"name": "test", "version": "1"}
        answer = await self.client.post(**self.message("initialize", 1, **hello))
        assert answer.status_code == 200
        if "mcp-session-id" in answer.headers:
            self.headers["Mcp-Session-Id"] = answer.headers["mcp-session-id"]
        told = await self.client.post(**self.message("notifications/initialized"))
        assert told.status_code == 202
        answer = await self.client.post(**self.message("tools/list", 2))
        assert '"name":"work"' in answer.text

    async def call_and_leave(self, tool: Tool, *, seen: str = "") -> str:
        """Call the tool, and disconnect when it has begun and *seen* has arrived."""
        token = {"progressToken": "p"}
        call = self.message("tools/call", 3, name="work", arguments={}, _meta=token)
        call["headers"] = {**self.headers, "X-Call": "1"}
        parts: list[str] = []
        arrived = anyio.Event()

        async def run() -> None:
            async with self.client.stream("POST", **call) as response:
                async for part in response.aiter_text():
                    parts.append(part)
                    if seen in "".join(parts):
                        arrived.set()

        with anyio.fail_after(60):
            async with anyio.create_task_group() as group:
                group.start_soon(run)
                await tool.begun.wait()
                if seen:
                    await arrived.wait()
                group.cancel_scope.cancel()
        return "".join(parts)


@asynccontextmanager
async def session(app: Any) -> AsyncIterator[Session]:
    """Serve *app* by uvicorn, with a session in it."""
    async with (
        serving(app) as port,
        httpx.AsyncClient(headers=KEY | TYPES, timeout=60) as client,
    ):
        found = Session(f"http://127.0.0.1:{port}/mcp", client)
        await found.begin()
        yield found


@pytest.fixture
def anyio_backend() -> str:
    """uvicorn runs on asyncio."""
    return "asyncio"


@guards
async def test_a_call_goes_on_without_its_client_and_is_resumed(guard: Any) -> None:
    """A disconnect is no cancellation: the client comes back and has all it missed."""
    tool = Tool()
    guarded = guard(tool.app(event_store=Events()))
    noted = Noted(guarded)
    async with session(noted) as ours:
        async with ours.client.stream("GET", ours.url, headers=ours.headers) as stream:
            assert stream.status_code == 200  # what the server says unasked
            seen = await ours.call_and_leave(tool, seen='"progress":1')
            with anyio.fail_after(60):
                await noted.over.wait()
            assert not tool.ended.is_set()
            if isinstance(guarded, Admission):
                assert guarded.statistics()["slots"].slots_in_use == 0
        last = [line[4:] for line in seen.split("\r\n") if line.startswith("id: ")][-1]
        resume = {**ours.headers, "Last-Event-ID": last}
        async with ours.client.stream("GET", ours.url, headers=resume) as stream:
            tool.go.set()
            more = ""
            async for part in stream.aiter_text():
                more += part
                if '"result"' in more:
                    break
        assert '"progress":1' not in more
        assert more.index('"progress":2') < more.index('"done"')
        assert tool.result == "finished"
        gone = await ours.client.delete(ours.url, headers=ours.headers)
        assert gone.status_code == 200
        answer = await ours.client.post(**ours.message("tools/list", 4))
        assert answer.status_code == 404


@guards
async def test_a_call_for_one_document_goes_on_in_its_session(guard: Any) -> None:
    """Where answers are JSON, the handler is cancelled, and not the tool of the session."""
    tool = Tool()
    noted = Noted(guard(tool.app(json_response=True)))
    async with session(noted) as ours:
        await ours.call_and_leave(tool)
        if guard in {LifecycleMiddleware, admitted}:
            with anyio.fail_after(60):
                await noted.over.wait()
        assert not tool.ended.is_set()
        tool.go.set()
        with anyio.fail_after(60):
            await tool.ended.wait()
        assert tool.result == "finished"
        answer = await ours.client.post(**ours.message("tools/list", 4))
        assert answer.status_code == 200


@guards
async def test_a_stream_without_a_session_ends_with_its_client(guard: Any) -> None:
    """The SDK itself ends what nobody can ask for again."""
    tool = Tool()
    async with session(guard(tool.app(stateless_http=True))) as ours:
        await ours.call_and_leave(tool)
        with anyio.fail_after(60):
            await tool.ended.wait()
        assert tool.result == "cancelled"


@pytest.mark.parametrize("guard", [LifecycleMiddleware, admitted])
@pytest.mark.parametrize(
    ("delay", "result"), [(0.0, "cancelled"), (math.inf, "finished")]
)
async def test_a_document_without_a_session_ends_unless_told(
    guard: Any, delay: float, result: str
) -> None:
    """Alone the SDK lets this tool run on for nobody; `cancel_delay` does that here."""
    tool = Tool()
    app = tool.app(stateless_http=True, json_response=True)
    noted = Noted(guard(app, cancel_delay=delay))
    async with session(noted) as ours:
        await ours.call_and_leave(tool)
        with anyio.fail_after(60):
            await noted.left.wait()
            if delay:
                tool.go.set()
            await tool.ended.wait()
            await noted.over.wait()
        assert tool.result == result


@guards
@pytest.mark.parametrize("stateless", [False, True])
@pytest.mark.parametrize("mode", ["legacy", "2026-07-28"])
async def test_the_client_of_the_sdk_is_served(
    guard: Any, stateless: bool, mode: str
) -> None:
    """It initialises, lists, calls with progress, and ends its session."""
    tool, told = Tool(), []

    async def note(progress: float, total: float | None, message: str | None) -> None:
        told.append(progress)
        tool.go.set()

    async with (
        serving(guard(tool.app(stateless_http=stateless))) as port,
        httpx2.AsyncClient(headers=KEY) as http,
    ):
        url = f"http://127.0.0.1:{port}/mcp"
        transport = streamable_http_client(url, http_client=http)
        async with Client(transport, mode=mode) as client:
            assert [each.name for each in (await client.list_tools()).tools] == ["work"]
            found = await client.call_tool("work", {}, progress_callback=note)
            assert found.structured_content == {"result": "done"}
    assert told == [1, 2]


@guards
async def test_a_call_of_a_later_revision_ends_with_its_client(guard: Any) -> None:
    """From 2026-07-28 on a disconnect is a cancellation, and the SDK does that itself."""
    tool = Tool()
    async with (
        serving(guard(tool.app())) as port,
        httpx2.AsyncClient(headers=KEY) as http,
    ):
        url = f"http://127.0.0.1:{port}/mcp"
        transport = streamable_http_client(url, http_client=http)
        async with (
            Client(transport, mode="2026-07-28") as client,
            anyio.create_task_group() as group,
        ):
            group.start_soon(client.call_tool, "work", {})
            await tool.begun.wait()
            group.cancel_scope.cancel()
        with anyio.fail_after(60):
            await tool.ended.wait()
    assert tool.result == "cancelled"


class Answer(BaseModel):
    """What the client is asked in the middle of a call."""

    sure: bool


@pytest.mark.parametrize(
    ("settings", "refused"),
    [
        ({}, 0),
        pytest.param({"slots": 1}, 1, marks=pytest.mark.thorough),
        pytest.param({"per_client": 1}, 1, marks=pytest.mark.thorough),
    ],
    ids=["bytes alone", "slots", "per_client"],
)
async def test_what_a_tool_asks_is_answered_unless_the_call_has_the_only_slot(
    settings: Any, refused: int
) -> None:
    """The answer is a request beside the call: as one more of its client, and of all."""

    async def work(context: Context[Any]) -> str:
        return (await context.elicit("Sure?", Answer)).model_dump_json()

    async def answer(context: Any, params: Any) -> ElicitResult:
        return ElicitResult(action="accept", content={"sure": True})

    tools = MCPServer("tools")
    tools.add_tool(work)
    limits = {"slots": None, "per_client": None, "max_wait": 1, **settings}
    app = admitted(tools.streamable_http_app(), **limits)
    async with serving(app) as port, httpx2.AsyncClient(headers=KEY) as http:
        url = f"http://127.0.0.1:{port}/mcp"
        transport = streamable_http_client(url, http_client=http)
        speaker = Client(transport, mode="legacy", elicitation_callback=answer)
        async with speaker as client:
            if refused:
                with pytest.raises(MCPError):
                    await client.call_tool("work", {})
            else:
                found = await client.call_tool("work", {})
                assert '\\"sure\\":true' in found.model_dump_json()
    assert sum(lane.refused for lane in app.statistics().values()) == refused


async def test_a_key_is_asked_of_messages_and_a_session_id_of_the_rest() -> None:
    """GET and DELETE have no body: what guards them is the session id."""
    async with session(admitted(Tool().app())) as ours, httpx.AsyncClient() as other:
        message = ours.message("tools/list", 4)
        message["headers"] = TYPES | ours.headers
        assert (await other.post(**message)).status_code == 401
        for method in ("GET", "DELETE"):
            answer = await other.request(method, ours.url, headers=TYPES)
            assert answer.status_code == 400
        mine = await other.delete(ours.url, headers=ours.headers)
        assert mine.status_code == 200
