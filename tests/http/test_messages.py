"""``/v1/messages``, asked by the real anthropic SDK."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import signal
from typing import Any

import anthropic
import pytest
from anthropic.types import ModelInfo
from anthropic.types.shared import ErrorResponse
from http_kit import Server, answer_to, encoded, running
from sdk_contract import mistakes

from lifecycle import Gate
from lifecycle_engine import AppSettings

pytestmark = pytest.mark.asyncio


def client(server: Server, **settings: Any) -> Any:
    """The SDK, by default without retries."""
    url = f"http://127.0.0.1:{server.port}"
    settings = {"max_retries": 0, "timeout": 20, **settings}
    return anthropic.AsyncAnthropic(base_url=url, api_key="none", **settings)


def user(*content: str | bytes) -> list[dict[str, Any]]:
    """One turn of text and images."""
    blocks: list[dict[str, Any]] = []
    for part in content:
        if isinstance(part, str):
            blocks.append({"type": "text", "text": part})
            continue
        data = base64.b64encode(part).decode()
        source = {"type": "base64", "media_type": "image/png", "data": data}
        blocks.append({"type": "image", "source": source})
    return [{"role": "user", "content": blocks}]


ASK: dict[str, Any] = {"model": "sim", "max_tokens": 20, "messages": user("hello")}


@pytest.mark.parametrize("content", [("hello",), ("look", encoded()), (encoded(),)])
async def test_answers_whole_as_it_streams(content: Any) -> None:
    """Text and images, streamed and not, give the same text and the same usage."""
    ask = {**ASK, "messages": user(*content), "extra_body": {"temperature": 0.0}}
    async with asyncio.timeout(120), running() as server, client(server) as sdk:
        whole = await sdk.messages.create(**ask)
        async with sdk.messages.stream(**ask) as stream:
            text = "".join([piece async for piece in stream.text_stream])
            final = await stream.get_final_message()
        assert whole.content[0].text == text == final.content[0].text
        assert text
        assert whole.stop_reason == final.stop_reason
        assert whole.usage.input_tokens == final.usage.input_tokens > 0
        assert whole.usage.output_tokens == final.usage.output_tokens > 0
        assert final.id.startswith("msg_")
        await server.quiet()


async def test_streams_events_in_the_order_that_is_documented() -> None:
    """Every event validates against the SDK's own types, in their order."""
    async with asyncio.timeout(120), running() as server, client(server) as sdk:
        stream = await sdk.messages.create(**ASK, stream=True)
        kinds = [event.type async for event in stream]
        assert kinds[:2] == ["message_start", "content_block_start"]
        assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
        assert set(kinds[2:-3]) == {"content_block_delta"}
        await server.quiet()


async def test_reads_system_and_turns() -> None:
    """A system text and an earlier answer are part of the prompt."""
    turns = [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "two"},
        {"role": "user", "content": "three"},
    ]
    async with asyncio.timeout(120), running() as server, client(server) as sdk:
        short = await sdk.messages.create(**{**ASK, "messages": turns[:1]})
        long = await sdk.messages.create(
            **{**ASK, "messages": turns}, system="Be brief."
        )
        assert long.usage.input_tokens > short.usage.input_tokens


async def test_tells_which_stop_sequence_ended_it() -> None:
    """The answer ends before the sequence, and says which one it was."""
    async with asyncio.timeout(120), running() as server, client(server) as sdk:
        ask = {**ASK, "max_tokens": 200, "extra_body": {"temperature": 0.0}}
        text = (await sdk.messages.create(**ask)).content[0].text
        stop = text[5:9]
        cut = await sdk.messages.create(**ask, stop_sequences=["\0never", stop])
        assert cut.stop_reason == "stop_sequence"
        assert cut.stop_sequence == stop
        assert cut.content[0].text == text[: text.index(stop)]
        await server.quiet()


async def test_ends_stream_that_its_client_leaves() -> None:
    """Closing the stream ends the session, here and in the engine."""
    async with asyncio.timeout(120), running() as server, client(server) as sdk:
        ask = {**ASK, "max_tokens": 4000, "messages": user("look", encoded())}
        stream = await sdk.messages.create(**ask, stream=True)
        async for event in stream:
            if event.type == "content_block_delta":
                break
        await stream.close()
        await server.quiet()
        outcomes = server.service.sessions.statistics().outcomes
        assert outcomes["client_gone"] == 1


async def test_says_overloaded_so_that_the_sdk_retries() -> None:
    """A full server is 529, which the SDK retries after ``Retry-After``."""
    gate = Gate(slots=1, max_waiting=0, name="in_flight")
    async with asyncio.timeout(120), running(in_flight=gate) as server:
        lease = gate.try_admit()
        async with client(server) as sdk:
            with pytest.raises(anthropic.APIStatusError) as caught:
                await sdk.messages.create(**ASK)
            assert caught.value.status_code == 529
            assert caught.value.body["error"]["type"] == "overloaded_error"
            assert 0 < int(caught.value.response.headers["retry-after-ms"]) <= 60_000
        async with client(server, max_retries=3) as sdk:
            asking = asyncio.create_task(sdk.messages.create(**ASK))
            await server.until(lambda: gate.statistics().refused >= 2)
            lease.release()
            assert (await asking).content[0].text


@pytest.mark.parametrize(
    ("wrong", "status", "kind"),
    [
        ({"max_tokens": 0}, 400, "invalid_request_error"),
        ({"max_tokens": None}, 400, "invalid_request_error"),
        ({"model": "other"}, 404, "not_found_error"),
        ({"messages": []}, 400, "invalid_request_error"),
        (
            {"messages": [{"role": "system", "content": "x"}]},
            400,
            "invalid_request_error",
        ),
        ({"tools": [{"name": "t"}]}, 400, "invalid_request_error"),
        ({"tool_choice": {"type": "any"}}, 400, "invalid_request_error"),
        ({"n": 2}, 400, "invalid_request_error"),
        ({"logprobs": True}, 400, "invalid_request_error"),
        ({"stop": ["x"]}, 400, "invalid_request_error"),
        ({"seed": 1}, 400, "invalid_request_error"),
        (
            {"messages": [{**user(b"")[0], "role": "assistant"}]},
            400,
            "invalid_request_error",
        ),
        (
            {"system": "S", "messages": user("") * 4096},
            400,
            "invalid_request_error",
        ),
        (
            {"system": "S", "messages": user("") * 4095},
            400,
            "invalid_request_error",
        ),
        ({"temperature": 1.5}, 400, "invalid_request_error"),
        ({"messages": user(b"no picture")}, 400, "invalid_request_error"),
    ],
)
async def test_refuses_what_it_cannot_do(wrong: Any, status: int, kind: str) -> None:
    """An invalid request is refused at once, in the form that the SDK knows."""
    body = {key: it for key, it in {**ASK, **wrong}.items() if it is not None}
    async with asyncio.timeout(120), running() as server, client(server) as sdk:
        with pytest.raises(anthropic.APIStatusError) as caught:
            await sdk.post("/v1/messages", cast_to=object, body=body)
        assert caught.value.status_code == status
        assert caught.value.body["type"] == "error"
        assert caught.value.body["error"]["type"] == kind
        assert caught.value.body["error"]["message"]
        assert server.service.sessions.statistics().live == 0


async def test_refuses_large_body_in_its_own_form() -> None:
    """A refusal before the endpoint has the endpoint's format."""
    settings = AppSettings(model="sim", body_bytes=1000)
    async with asyncio.timeout(120), running(settings=settings) as server:
        async with client(server) as sdk:
            with pytest.raises(anthropic.APIStatusError) as caught:
                await sdk.messages.create(**{**ASK, "messages": user("x" * 2000)})
            assert caught.value.status_code == 413
            assert caught.value.body["error"]["type"] == "invalid_request_error"


async def test_tells_engine_death_in_the_stream() -> None:
    """An engine that dies mid stream is an error that the SDK raises."""
    async with asyncio.timeout(120), running() as server, client(server) as sdk:
        ask = {**ASK, "max_tokens": 4000}
        stream = await sdk.messages.create(**ask, stream=True)
        pid = server.service.engine.pid
        assert pid is not None
        with pytest.raises(anthropic.APIStatusError) as caught:
            async for event in stream:
                if event.type == "content_block_delta" and pid:
                    os.kill(pid, signal.SIGKILL)
                    pid = 0
        assert caught.value.body["error"]["type"] == "overloaded_error"


async def test_leaves_openai_errors_as_they_are() -> None:
    """Each endpoint speaks its own language."""
    async with asyncio.timeout(120), running() as server:
        body = json.dumps({"model": "sim"}).encode()
        status, _, document = await answer_to(server.port, body)
        assert status == 400
        assert document["error"]["code"] == "missing_required_parameter"


async def test_lists_models_to_the_sdk() -> None:
    """The SDK finds the one model, in the form that it has for models."""
    async with asyncio.timeout(120), running() as server, client(server) as sdk:
        found = [model async for model in await sdk.models.list()]
        [one] = found
        assert one.created_at == (await sdk.models.retrieve("sim")).created_at
        assert mistakes(ModelInfo, json.loads(one.to_json())) == []
        with pytest.raises(anthropic.NotFoundError) as caught:
            await sdk.models.retrieve("other")
        assert mistakes(ErrorResponse, caught.value.body) == []
