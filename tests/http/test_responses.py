"""``/v1/responses``, asked by the real openai SDK, with and without asyncio."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

import openai
import pytest
from http_kit import Server, data_url, encoded, running

from lifecycle_engine import Chat, Prepared, SimProcessor

pytestmark = pytest.mark.asyncio(loop_scope="module")
ASK: dict[str, Any] = {"model": "sim", "input": "hello", "max_output_tokens": 20}
LOGPROBS = ["message.output_text.logprobs"]


def blocking(server: Server, **settings: Any) -> openai.OpenAI:
    """The SDK without asyncio; for a thread."""
    settings = {"max_retries": 0, "timeout": 20, **settings}
    return openai.OpenAI(base_url=server.url, api_key="none", **settings)


class Ending(SimProcessor):
    """Lets an answer end at the first space."""

    def prepare(self, chat: Chat) -> Prepared:
        """Prepare *chat*."""
        made = super().prepare(chat)
        made.request["stop_ids"] = [ord(" ")]
        return made


async def test_answers_whole_and_streamed_alike(server: Server, client: Any) -> None:
    """The same text, usage and status, whole, as events and by the SDK's helper."""
    whole = await client.responses.create(**ASK)
    assert whole.status == "incomplete"
    assert whole.incomplete_details.reason == "max_output_tokens"
    assert (whole.usage.output_tokens, whole.max_output_tokens) == (20, 20)
    assert whole.usage.total_tokens == whole.usage.input_tokens + 20
    stream = await client.responses.create(**ASK, stream=True)
    events = [event async for event in stream]
    deltas = [e.delta for e in events if e.type == "response.output_text.delta"]
    assert len(deltas) > 2
    assert "".join(deltas) == whole.output_text
    last = events[-1]
    assert last.type == "response.incomplete"
    assert last.response.output_text == whole.output_text
    assert last.response.usage == whole.usage
    async with client.responses.stream(**ASK) as helper:
        async for _ in helper:
            pass
    await server.quiet()


async def test_completes_where_the_model_ends() -> None:
    """An answer that ends by itself is completed, and says when."""
    ask = ASK | {"max_output_tokens": 1000}
    async with running(processor=Ending()) as server, server.client() as sdk:
        whole = await sdk.responses.create(**ask)
        assert (whole.status, whole.incomplete_details) == ("completed", None)
        assert whole.completed_at >= whole.created_at
        async with sdk.responses.stream(**ask) as stream:
            kinds = [event.type async for event in stream]
            final = await stream.get_final_response()
    assert final.output_text == whole.output_text
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert set(kinds[4:-4]) == {"response.output_text.delta"}


async def test_speaks_to_the_sdk_without_asyncio(server: Server) -> None:
    """The blocking SDK has the same answers."""

    def talk() -> list[str]:
        with blocking(server) as sdk:
            whole = sdk.responses.create(**ASK).output_text
            events = list(sdk.responses.create(**ASK, stream=True))
            with sdk.responses.stream(**ASK) as helper:
                texts = [e.snapshot for e in helper if "text.delta" in e.type]
        return [whole, events[-1].response.output_text, texts[-1]]

    texts = await asyncio.to_thread(talk)
    assert len(set(texts)) == 1
    await server.quiet()


async def test_takes_instructions_items_and_images(server: Server, client: Any) -> None:
    """They become one chat, in their order; the prompt is as long as it should be."""
    image = {"type": "input_image", "image_url": data_url(encoded()), "detail": "auto"}
    items = [
        {"role": "developer", "content": "A"},
        {"role": "user", "content": [{"type": "input_text", "text": "B"}, image]},
        {
            "type": "message",
            "role": "assistant",
            "id": "msg_1",
            "status": "completed",
            "content": [{"type": "output_text", "text": "C", "annotations": []}],
        },
        {"role": "user", "content": "D"},
    ]
    said = "system: S\nsystem: A\nuser: B[image]\nassistant: C\nuser: D\n"
    answer = await client.responses.create(
        model="sim", instructions="S", input=items, max_output_tokens=2
    )
    assert answer.usage.input_tokens == len(said)
    again = await client.responses.create(
        model="sim", input=[*items, *answer.output, {"role": "user", "content": "E"}]
    )
    more = f"assistant: {answer.output_text}\nuser: E\n"
    assert again.usage.input_tokens == len(said) - len("system: S\n") + len(more)
    await server.quiet()


async def test_repeats_what_was_asked(server: Server, client: Any) -> None:
    """Options and metadata come back, in the first event, too."""
    ask = ASK | {"temperature": 0.5, "top_p": 0.9, "metadata": {"a": "b"}}
    stream = await client.responses.create(**ask, stream=True, store=False)
    first = (await anext(stream)).response
    assert (first.temperature, first.top_p, first.metadata) == (0.5, 0.9, {"a": "b"})
    assert first.status == "in_progress"
    await stream.close()
    await server.quiet()


async def test_tells_log_probabilities(server: Server, client: Any) -> None:
    """Each token's, in the answer and in its events, if they are asked for."""
    ask = ASK | {"include": LOGPROBS, "top_logprobs": 2}
    whole = (await client.responses.create(**ask)).output[0].content[0]
    assert len(whole.logprobs) == 20
    assert b"".join(bytes(it.bytes) for it in whole.logprobs) == whole.text.encode()
    told = [
        each.token
        async for event in await client.responses.create(**ask, stream=True)
        if event.type == "response.output_text.delta"
        for each in event.logprobs
    ]
    assert told == [each.token for each in whole.logprobs]
    assert all(each.top_logprobs for each in whole.logprobs)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"previous_response_id": "resp_1"}, "previous_response_id"),
    ({"conversation": "conv_1"}, "conversation"),
    ({"background": True}, "background"),
    ({"tools": [{"type": "web_search"}]}, "tools"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"reasoning": {"effort": "high"}}, "reasoning"),
    ({"text": {"format": {"type": "json_object"}}}, "text"),
    ({"truncation": "auto"}, "truncation"),
    ({"prompt": {"id": "p"}}, "prompt"),
    ({"extra_body": {"n": 2}}, "n"),
    ({"extra_body": {"stop": ["x"]}}, "stop"),
    ({"extra_body": {"max_tokens": 2}}, "max_tokens"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"input": []}, "input"),
    ({"input": [{"type": "function_call_output"}]}, "input[0].type"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"metadata": {"secret": 3}}, "metadata"),
    (
        {"input": [{"role": "user", "content": [{"type": "input_file"}]}]},
        "input[0].content[0].type",
    ),
    (
        {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
        "input[0].content[0]",
    ),
    (
        {
            "instructions": "first",
            "input": [
                {
                    "role": "user",
                    "content": [
                        {"type": "input_text", "text": "x"},
                        {"type": "input_image", "image_url": "x"},
                    ],
                }
            ],
        },
        "input[0].content[1].image_url",
    ),
]


@pytest.mark.parametrize(("fields", "param"), REFUSED)
async def test_refuses_by_name(
    server: Server, client: Any, fields: Any, param: str
) -> None:
    """What it cannot do is refused, and the field is named."""
    with pytest.raises(openai.BadRequestError) as caught:
        await client.responses.create(**ASK | fields)
    assert caught.value.param == param
    assert server.service.sessions.statistics().live == 0


async def test_takes_as_many_messages_as_it_says(server: Server, client: Any) -> None:
    """Instructions in front of the most messages are no failure of the server."""
    items = [{"role": "user", "content": ""}] * 4095
    ask = {"model": "sim", "instructions": "S", "max_output_tokens": 1}
    for count in (items, [*items, items[0]]):
        with pytest.raises(openai.BadRequestError):
            await client.responses.create(**ask, input=count)


async def test_keeps_nothing(server: Server, client: Any) -> None:
    """Retrieving or deleting a response is 404."""
    answer = await client.responses.create(**ASK)
    for call in (client.responses.retrieve, client.responses.delete):
        with pytest.raises(openai.NotFoundError, match="does not store responses"):
            await call(answer.id)


async def test_cancels_by_id(server: Server, client: Any) -> None:
    """The SDK's own cancel ends a running response; its reader gets an error."""
    stream = await client.responses.create(
        **ASK | {"max_output_tokens": 3900}, stream=True
    )
    id_ = (await anext(stream)).response.id
    cancelled = await client.responses.cancel(id_)
    assert (cancelled.id, cancelled.status, cancelled.output) == (id_, "cancelled", [])
    left = server.service.sessions.statistics()
    assert (left.live, left.closing) == (0, 0)
    with pytest.raises(openai.APIError) as caught:
        async for _ in stream:
            pass
    assert caught.value.code == "cancelled"
    with pytest.raises(openai.NotFoundError):
        await client.responses.cancel(id_)
    await server.quiet()


async def test_cancels_what_is_not_streamed(server: Server, client: Any) -> None:
    """A client that waits for a whole answer gets an error without a retry."""
    ask = ASK | {"max_output_tokens": 3900}
    asking = asyncio.create_task(client.responses.create(**ask))
    await server.until(lambda: server.service.sessions.statistics().live)
    [session] = server.service.sessions.live()
    assert (await client.responses.cancel(f"resp_{session.id}")).status == "cancelled"
    with pytest.raises(openai.APIStatusError) as caught:
        await asking
    assert caught.value.status_code == 499


async def test_raises_when_the_engine_dies_mid_stream() -> None:
    """The failure is an event of the API, and then one that the SDK raises."""
    async with asyncio.timeout(120), running() as server, server.client() as client:
        ask = ASK | {"max_output_tokens": 3900}
        kinds = []
        with pytest.raises(openai.APIError, match="engine"):
            async with client.responses.stream(**ask) as stream:
                async for event in stream:
                    kinds.append(event.type)
                    if event.type.endswith("text.delta") and len(kinds) == 5:
                        assert server.service.engine.pid is not None
                        os.kill(server.service.engine.pid, signal.SIGKILL)
        assert kinds[-1] == "response.failed"
        await server.until(lambda: not server.service.sessions.statistics().closing)
