"""``/generate``: one document, or one a line."""

from __future__ import annotations

import asyncio
import base64
import json
from typing import Any

import aiohttp
import pytest
from http_kit import Server, encoded, running, user

from lifecycle import Gate
from lifecycle_asgi import ClientIdentity
from lifecycle_engine import AppSettings

pytestmark = pytest.mark.asyncio(loop_scope="module")
ASK: dict[str, Any] = {"text": "hello", "max_tokens": 12}


MINE = {"x-api-key": "mine"}  # who alone may cancel an id that a client chose
KEYED = AppSettings(model="sim", client=ClientIdentity(["mine"]))


async def post(server: Server, body: Any, path: str = "/generate") -> tuple[int, Any]:
    """Status and document, or documents of each line."""
    url = f"http://127.0.0.1:{server.port}{path}"
    asking = aiohttp.ClientSession(headers=MINE)
    async with asking as http, http.post(url, json=body) as answer:
        told = await answer.read()
        if answer.content_type == "application/x-ndjson":
            return answer.status, [json.loads(line) for line in told.splitlines()]
        return answer.status, json.loads(told)


async def test_answers_without_a_model_named(server: Server) -> None:
    """A text is all that is needed; the answer says what it cost and why it ended."""
    status, whole = await post(server, ASK)
    assert status == 200
    [output] = whole["outputs"]
    assert len(output["text"]) == whole["usage"]["completion_tokens"] == 12
    assert (output["finish_reason"], output["stop"]) == ("length", None)
    assert whole["model"] == "sim"
    status, lines = await post(server, ASK | {"stream": True, "model": "sim"})
    assert "".join(each.get("text", "") for each in lines) == output["text"]
    assert lines[-1]["usage"] == whole["usage"]
    await server.quiet()


async def test_answers_as_a_chat_does(server: Server, client: Any) -> None:
    """Messages are those of chat completions; pictures come before their text."""
    picture = encoded()
    _, by_messages = await post(
        server, {"messages": user(picture, "hello"), "max_tokens": 12}
    )
    data = base64.b64encode(picture).decode()
    _, by_text = await post(server, ASK | {"images": [data]})
    url = f"data:image/png;base64,{data}"
    _, by_url = await post(server, ASK | {"images": [url]})
    chat = await client.chat.completions.create(
        model="sim", messages=user(picture, "hello"), max_tokens=12
    )
    text = chat.choices[0].message.content
    for each in (by_messages, by_text, by_url):
        assert each["outputs"][0]["text"] == text
        assert each["usage"]["prompt_tokens"] == chat.usage.prompt_tokens
    await server.quiet()


async def test_gives_several_answers_and_says_which_stop(server: Server) -> None:
    """As many as were asked for, in a stream by index; with the stop that was met."""
    _, plain = await post(server, ASK)
    stop = plain["outputs"][0]["text"][5:8]
    ask = ASK | {"n": 3, "stop": ["never", stop], "logprobs": True}
    _, whole = await post(server, ask)
    assert [each["stop"] for each in whole["outputs"]] == [stop] * 3
    assert {each["finish_reason"] for each in whole["outputs"]} == {"stop"}
    assert all(each["logprobs"] for each in whole["outputs"])
    _, lines = await post(server, ask | {"stream": True})
    for index, output in enumerate(whole["outputs"]):
        mine = [each for each in lines if each.get("index") == index]
        assert "".join(each["text"] for each in mine) == output["text"]
        assert mine[-1]["stop"] == stop
    await server.quiet()


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"text": None}, "text"),
        ({"messages": user("x")}, "text"),
        ({"text": None, "messages": user("x"), "images": ["x"]}, "images"),
        ({"images": ["?"]}, "images[0]"),
        ({"images": ["https://example.org/x.png"]}, "images[0]"),
        ({"model": "other"}, "model"),
        ({"n": 0}, "n"),
        ({"top_logprobs": 2}, "top_logprobs"),
    ],
)
async def test_refuses_by_name(server: Server, fields: Any, param: str) -> None:
    """What it cannot do is refused, and the field is named."""
    status, told = await post(server, ASK | fields)
    assert status == (404 if param == "model" else 400)
    assert told["error"]["param"] == param
    assert server.service.sessions.statistics().live == 0


@pytest.mark.parametrize("stream", [False, True])
async def test_cancels_any_request_by_its_id(stream: bool) -> None:
    """Each waiting or running request, whichever API it came by, ends by its id.

    The answer comes when the engine is quiet.
    """
    gate = Gate(slots=3, name="in_flight")
    paths: dict[str, dict[str, Any]] = {
        "/generate": {"text": "x", "max_tokens": 3900},
        "/v1/chat/completions": {"messages": user("x"), "max_tokens": 3900},
        "/v1/responses": {"input": "x", "max_output_tokens": 3900},
        "/v1/messages": {"messages": user("x"), "max_tokens": 3900},
    }
    async with asyncio.timeout(120), running(in_flight=gate, settings=KEYED) as server:
        url = f"http://127.0.0.1:{server.port}"
        sessions = server.service.sessions

        async def ask(path: str, id_: str) -> bytes:
            body = {**paths[path], "model": "sim", "stream": stream}
            async with aiohttp.ClientSession(
                headers={"x-request-id": id_, **MINE}
            ) as http:
                async with http.post(url + path, json=body) as answer:
                    return await answer.read()

        asking = [
            asyncio.create_task(ask(path, f"id-{at}")) for at, path in enumerate(paths)
        ]
        await server.until(lambda: sessions.statistics().live == 4)
        for at in range(len(paths)):
            path = f"/v1/requests/id-{at}/cancel"
            assert await post(server, None, path) == (
                200,
                {"id": f"id-{at}", "status": "cancelled"},
            )
            now = sessions.statistics()
            assert (now.live, now.closing) == (3 - at, 0)
        for told in await asyncio.gather(*asking):
            assert b"The request was cancelled" in told
        status, told = await post(server, None, "/v1/requests/id-0/cancel")
        assert (status, told["error"]["code"]) == (404, "not_found")
        assert sessions.statistics().outcomes["cancelled"] == 4
        await server.quiet()


async def test_cancels_request_while_its_body_arrives() -> None:
    """Its session is open from its head on, and the answer says what became of it."""
    async with asyncio.timeout(120), running(settings=KEYED) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        head = b"POST /generate HTTP/1.1\r\nhost: here\r\nx-request-id: slow\r\nx-api-key: mine\r\n"
        writer.write(head + b"connection: close\r\ncontent-length: 90\r\n\r\n{")
        await server.until(lambda: server.service.sessions.statistics().live)
        status, told = await post(server, None, "/v1/requests/slow/cancel")
        assert (status, told["status"]) == (200, "cancelled")
        answer = await reader.read()
        assert answer.startswith(b"HTTP/1.1 499")
        assert b"The request was cancelled" in answer
        writer.close()
        await writer.wait_closed()
        assert (await server.quiet())["backend"]["started"] == 0


async def test_redirects_no_path_with_another_slash(server: Server) -> None:
    """Behind TLS it would send them to http."""
    status, told = await post(server, ASK, "/generate/")
    assert (status, told["error"]["code"]) == (404, "not_found")
