"""Every byte that is sent is what the SDKs' own models say, strictly read."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import signal
from typing import Any

import aiohttp
import pytest
from http_kit import GatedProcessor, Server, data_url, encoded, running
from sdk_contract import EVENTS, WHOLE, error_of, events, mistakes, mistakes_of_event

from lifecycle import Gate
from lifecycle_engine import AppSettings

pytestmark = pytest.mark.asyncio(loop_scope="module")
CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
MESSAGES, PLAIN = "/v1/messages", "/generate"
PATHS = [CHAT, RESPONSES, MESSAGES, PLAIN]
IMAGE = encoded()


def ask(path: str, *, picture: bytes | None = None, **fields: Any) -> dict[str, Any]:
    """A request in the form of *path*; *fields* are sent as they are."""
    text = "hello"
    base = base64.b64encode(picture or b"").decode()
    body: dict[str, Any] = {"model": "sim"}
    if path == PLAIN:
        body |= {"text": text, "images": [base] if picture else []}
    elif path == RESPONSES:
        content: list[Any] = [{"type": "input_text", "text": text}]
        if picture:
            content.append({"type": "input_image", "image_url": data_url(picture)})
        body |= {"input": [{"role": "user", "content": content}]}
    else:
        content = [{"type": "text", "text": text}]
        if picture and path == CHAT:
            image = {"url": data_url(picture)}
            content.append({"type": "image_url", "image_url": image})
        elif picture:
            source = {"type": "base64", "media_type": "image/png", "data": base}
            content.append({"type": "image", "source": source})
        body |= {"messages": [{"role": "user", "content": content}]}
    limit = "max_output_tokens" if path == RESPONSES else "max_tokens"
    tokens = fields.pop("tokens", 9)
    return {**body, limit: tokens, **fields}


async def raw(
    server: Server, path: str, body: Any, **headers: str
) -> tuple[int, str, bytes]:
    """Status, content type and body of a POST."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    url = f"http://127.0.0.1:{server.port}{path}"
    async with aiohttp.ClientSession() as http:
        async with http.post(url, data=data, headers=names) as answer:
            return answer.status, answer.headers["content-type"], await answer.read()


def check_whole(path: str, body: bytes) -> Any:
    """Check a document; return it."""
    document = json.loads(body)
    assert mistakes(WHOLE[path], document) == []
    return document


def check_error(path: str, body: bytes) -> Any:
    """Check a document that tells an error; return it."""
    document = json.loads(body)
    assert mistakes(error_of(path), document) == []
    return document["error"]


def check_events(path: str, body: bytes) -> list[Any]:
    """Check a stream; return its events."""
    found = events(path, body)
    for document in found:
        assert mistakes_of_event(path, document) == []
    if path == RESPONSES:
        numbers = [each["sequence_number"] for each in found]
        assert numbers == sorted(set(numbers))
        # What was cut by a cancellation may have had a number.
        assert "error" in found[-1] or numbers == [*range(len(found))]
    return found


LOGPROBS = {
    CHAT: {"logprobs": True, "top_logprobs": 1},
    RESPONSES: {"include": ["message.output_text.logprobs"], "top_logprobs": 1},
    PLAIN: {"logprobs": True, "top_logprobs": 1},
}
STOPS = {CHAT: "stop", MESSAGES: "stop_sequences", PLAIN: "stop"}
ASKED = [
    *((path, {}) for path in PATHS),
    *((path, {"picture": IMAGE}) for path in PATHS),
    *((path, {"temperature": 0.5, "top_p": 0.5}) for path in PATHS),
    *((path, it) for path, it in LOGPROBS.items()),
    *((path, {name: ["y", "e", "s"]}) for path, name in STOPS.items()),
    (CHAT, {"n": 3}),
    (PLAIN, {"n": 3, "logprobs": True}),
    (RESPONSES, {"instructions": "Be brief", "metadata": {"a": "b"}, "store": False}),
]


@pytest.mark.parametrize(("path", "fields"), ASKED)
async def test_answers_as_the_models_say(
    server: Server, path: str, fields: Any
) -> None:
    """A whole answer and a streamed one have the fields of the models and no others."""
    status, kind, body = await raw(server, path, ask(path, **fields))
    assert (status, kind) == (200, "application/json")
    check_whole(path, body)
    status, kind, body = await raw(server, path, ask(path, **fields, stream=True))
    assert status == 200
    assert kind.startswith("application/x-ndjson" if path == PLAIN else "text/event")
    assert len(check_events(path, body)) > 2
    await server.quiet()


async def test_tells_usage_as_the_models_say(server: Server) -> None:
    """So does a chat whose usage is asked for."""
    more = {"stream": True, "stream_options": {"include_usage": True}}
    _, _, body = await raw(server, CHAT, ask(CHAT, **more))
    assert check_events(CHAT, body)[-1]["usage"]["completion_tokens"] == 9


async def test_lists_models_as_the_models_say(server: Server) -> None:
    """The list of models, and the one."""
    async with aiohttp.ClientSession() as http:
        for path in ("/v1/models", "/v1/models/sim"):
            async with http.get(f"http://127.0.0.1:{server.port}{path}") as answer:
                check_whole(path, await answer.read())
        async with http.get(f"http://127.0.0.1:{server.port}/v1/models/x") as answer:
            assert answer.status == 404
            check_error("/v1/models/x", await answer.read())


WRONG: list[tuple[int, Any]] = [
    (400, b"{"),
    (400, b'"text"'),
    (400, {}),
    (400, {"temperature": "warm"}),
    (400, {"stream": 3}),
    (404, {"model": "other"}),
    (400, {"tokens": 10**6}),
    (400, {"picture": b"no picture"}),
]


@pytest.mark.parametrize("path", PATHS)
async def test_refuses_as_the_models_say(server: Server, path: str) -> None:
    """Errors have the form that each SDK reads, whatever layer found them."""
    for expected, wrong in WRONG:
        body = ask(path, **wrong) if isinstance(wrong, dict) and wrong else wrong
        status, kind, told = await raw(server, path, body)
        assert (status, kind) == (expected, "application/json"), wrong
        assert check_error(path, told)["message"]
    body = ask(path)
    status, _, told = await raw(server, path, body, x_request_id="no such/id")
    assert status == 400
    check_error(path, told)
    url = f"http://127.0.0.1:{server.port}{path}"
    async with aiohttp.ClientSession() as http, http.get(url) as answer:
        assert answer.status == 405
        check_error(path, await answer.read())
    for nowhere in (f"{path}/nowhere", f"{path}/a/cancel"):
        status, _, told = await raw(server, nowhere, b"")
        assert status in (404, 405)
        check_error(path, told)
    await server.quiet()


@pytest.mark.parametrize("path", PATHS)
async def test_turns_away_as_the_models_say(path: str) -> None:
    """Full, too large, the same id twice, and closing."""
    gate = Gate(slots=1, max_waiting=1, name="in_flight")
    settings, processor = AppSettings(model="sim", body_bytes=2000), GatedProcessor()
    full = 529 if path == MESSAGES else 503
    async with running(in_flight=gate, settings=settings, processor=processor) as it:
        busy = asyncio.create_task(raw(it, path, ask(path), x_request_id="one"))
        await it.until(lambda: gate.statistics().slots_in_use)
        refused = [(await raw(it, path, ask(path), x_request_id="one"), 409)]
        waits = asyncio.create_task(raw(it, path, ask(path)))
        await it.until(lambda: gate.statistics().waiting)
        refused.append((await raw(it, path, ask(path)), full))
        processor.release.set()
        for served in (busy, waits):
            check_whole(path, (await served)[2])
        refused.append((await raw(it, path, b"x" * 3000), 413))
        it.service.in_flight.close()
        refused.append((await raw(it, path, ask(path)), full))
        for (status, _, told), expected in refused:
            assert status == expected
            check_error(path, told)
        await it.quiet()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("how", ["engine", "cancel"])
async def test_fails_mid_stream_as_the_models_say(path: str, how: str) -> None:
    """An error in the stream has the shape that each SDK raises."""
    async with asyncio.timeout(120), running() as server:
        body = ask(path, tokens=3900, stream=True)
        url, mine = f"http://127.0.0.1:{server.port}{path}", {"x-request-id": "mine"}
        async with aiohttp.ClientSession(headers=mine) as http:
            async with http.post(url, json=body) as answer:
                told = await answer.content.readany()
                if how == "engine":
                    assert server.service.engine.pid is not None
                    os.kill(server.service.engine.pid, signal.SIGKILL)
                else:
                    await server.service.sessions.cancel("mine")
                told += await answer.read()
        found = check_events(path, told)
        assert found[-1]["error"]["message"]
        assert sum("error" in each for each in found) == 1
        if path == RESPONSES:
            assert found[-2]["type"] == "response.failed"


async def test_covers_every_endpoint() -> None:
    """There is a model for all that generates."""
    async with running(wait=False) as server:
        paths = {route.path for route in server.app.routes}
    assert set(EVENTS) == set(PATHS)
    assert set(PATHS) <= paths
