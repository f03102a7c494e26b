"""What usage tells of prompt tokens that a conversation's slot held already."""

from __future__ import annotations

from typing import Any

import aiohttp
import anthropic
import pytest
from http_kit import Server, user
from openai.types.responses import Response
from sdk_contract import mistakes

pytestmark = pytest.mark.asyncio(loop_scope="module")
TALK = [
    {"role": "user", "content": "hello"},
    {"role": "assistant", "content": "well"},
    {"role": "user", "content": "and then?"},
]


async def chat(client: Any, turn: int, *, stream: bool, **more: Any) -> Any:
    """The usage of one turn by chat completions."""
    ask = {"model": "sim", "messages": TALK[:turn], "max_tokens": 5, **more}
    if not stream:
        return (await client.chat.completions.create(**ask)).usage
    options = {"include_usage": True}
    answer = await client.chat.completions.create(
        **ask, stream=True, stream_options=options
    )
    return [chunk.usage async for chunk in answer][-1]


async def responses(client: Any, turn: int, *, stream: bool, **more: Any) -> Any:
    """The usage of one turn by responses."""
    ask = {"model": "sim", "input": TALK[:turn], "max_output_tokens": 5, **more}
    if not stream:
        return (await client.responses.create(**ask)).usage
    answer = await client.responses.create(**ask, stream=True)
    last: Response | None = None
    async for event in answer:
        last = getattr(event, "response", last)
    assert last is not None
    return last.usage


def cached(usage: Any) -> int:
    """The tokens that were cached, in the SDK's own model, strictly read."""
    assert mistakes(type(usage), usage.to_dict()) == []
    details = getattr(usage, "prompt_tokens_details", None)
    return int((details or usage.input_tokens_details).cached_tokens)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("ask", [chat, responses])
async def test_openai_tells_what_was_cached_in_the_prompt(
    server: Server, client: Any, ask: Any, stream: bool
) -> None:
    """Nothing of a first turn, of the next one what both have alike; streamed or not."""
    key = f"{ask.__name__}-{stream}"
    alone = await ask(client, 3, stream=stream)
    assert cached(alone) == 0
    first = await ask(client, 1, stream=stream, prompt_cache_key=key)
    assert cached(first) == 0
    await server.quiet()
    second = await ask(client, 3, stream=stream, prompt_cache_key=key)
    assert len("user: hello") <= cached(second) < len("user: hello\n") * 2
    # Cached tokens are among those of the prompt, and count as before.
    assert second.total_tokens == alone.total_tokens
    await server.quiet()


@pytest.mark.parametrize("stream", [False, True])
async def test_anthropic_tells_what_was_cached_beside_the_input(
    server: Server, stream: bool
) -> None:
    """Its `input_tokens` are those that were read; with the cached ones they are all."""
    url = f"http://127.0.0.1:{server.port}"
    more = {"prompt_cache_key": f"messages-{stream}"}
    async with anthropic.AsyncAnthropic(base_url=url, api_key="none") as sdk:

        async def ask(turn: int, extra: Any = None) -> Any:
            options: Any = {"model": "sim", "max_tokens": 5, "extra_body": extra}
            options["messages"] = TALK[:turn]
            if not stream:
                return (await sdk.messages.create(**options)).usage
            async with sdk.messages.stream(**options) as events:
                return (await events.get_final_message()).usage

        alone = await ask(3)
        assert alone.cache_read_input_tokens == 0
        assert (await ask(1, more)).cache_read_input_tokens == 0
        await server.quiet()
        usage = await ask(3, more)
        assert mistakes(type(usage), usage.to_dict()) == []
        assert usage.cache_read_input_tokens >= len("user: hello")
        both = usage.input_tokens + usage.cache_read_input_tokens
        assert both == alone.input_tokens
    await server.quiet()


async def test_plain_endpoint_tells_it_as_well(server: Server) -> None:
    """Of two answers to one prompt, the one that went on from the slot counts."""
    ask = {"text": "hello", "max_tokens": 3, "prompt_cache_key": "plain"}
    told = []
    async with aiohttp.ClientSession() as http:
        for more in ({}, {"n": 2}):
            url = f"http://127.0.0.1:{server.port}/generate"
            async with http.post(url, json=ask | more) as answer:
                told.append((await answer.json())["usage"])
            await server.quiet()
    first, second = (each["prompt_tokens_details"]["cached_tokens"] for each in told)
    assert first == 0
    # All but the last one, whose pass draws.
    assert second == told[1]["prompt_tokens"] - 1


async def test_stop_string_does_not_hide_what_was_cached(
    server: Server, client: Any
) -> None:
    """It is reported although the reader leaves before the engine's last item."""
    options: Any = {"prompt_cache_key": "stopped", "model": "sim", "max_tokens": 50}
    options["messages"] = user("hello")
    text = (await client.chat.completions.create(**options)).choices[0].message.content
    await server.quiet()
    answer = await client.chat.completions.create(**options, stop=text[3:6])
    assert answer.choices[0].finish_reason == "stop"
    assert cached(answer.usage) == answer.usage.prompt_tokens - 1
    await server.quiet()
