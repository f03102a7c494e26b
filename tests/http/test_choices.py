"""Stop strings, several answers, log probabilities: by the real SDK, over a socket."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from http_kit import encoded, running, user

from lifecycle import Gate

pytestmark = pytest.mark.asyncio(loop_scope="module")
ASK: dict[str, Any] = {"model": "sim", "messages": user("hello"), "max_tokens": 40}


async def texts_of(stream: Any) -> tuple[dict[int, str], dict[int, str], list[Any]]:
    """The text and the finish reason of each choice, and the usage chunks."""
    texts: dict[int, str] = {}
    reasons: dict[int, str] = {}
    usages = []
    async for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + (
                choice.delta.content or ""
            )
            if choice.finish_reason is not None:
                assert choice.index not in reasons
                reasons[choice.index] = choice.finish_reason
        if chunk.usage is not None:
            usages.append(chunk.usage)
    return texts, reasons, usages


async def test_stops_before_a_string(server: Any, client: Any) -> None:
    """A stop string ends the answer, is not in it, and ends the work for it."""
    whole = (await client.chat.completions.create(**ASK)).choices[0].message.content
    stop = [whole[12:16], "never in it"]
    answer = await client.chat.completions.create(**ASK, stop=stop)
    assert answer.choices[0].message.content == whole[: whole.find(stop[0])]
    assert answer.choices[0].finish_reason == "stop"
    assert 12 < answer.usage.completion_tokens <= 16
    stream = await client.chat.completions.create(**ASK, stop=stop[0], stream=True)
    texts, reasons, _ = await texts_of(stream)
    assert texts[0] == answer.choices[0].message.content
    assert reasons == {0: "stop"}
    await server.quiet()


async def test_holds_back_what_may_become_a_stop(server: Any, client: Any) -> None:
    """What only looked like a stop string comes out at the end of the text."""
    whole = (await client.chat.completions.create(**ASK)).choices[0].message.content
    answer = await client.chat.completions.create(**ASK, stop=[whole[-3:] + "!"])
    assert answer.choices[0].message.content == whole
    assert answer.choices[0].finish_reason == "length"
    await server.quiet()


@pytest.mark.parametrize("content", [("hello",), ("hello", encoded())])
async def test_gives_several_answers(server: Any, client: Any, content: Any) -> None:
    """Three choices, each whole, with one usage; streamed they are the same."""
    ask = ASK | {"messages": user(*content), "max_tokens": 9, "n": 3}
    answer = await client.chat.completions.create(**ask)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert all(len(choice.message.content) == 9 for choice in answer.choices)
    assert answer.usage.completion_tokens == 27
    stream = await client.chat.completions.create(
        **ask, stream=True, stream_options={"include_usage": True}
    )
    texts, reasons, usages = await texts_of(stream)
    whole = {choice.index: choice.message.content for choice in answer.choices}
    assert texts == whole
    assert reasons == dict.fromkeys(range(3), "length")
    assert [usage.completion_tokens for usage in usages] == [27]
    assert usages[0].prompt_tokens == answer.usage.prompt_tokens
    status = await server.quiet()
    assert status["starts"] == status["ends"]


async def test_tells_log_probabilities(server: Any, client: Any) -> None:
    """Each token comes with its bytes and log probability, if asked for."""
    ask = ASK | {"max_tokens": 5}
    plain = await client.chat.completions.create(**ask)
    assert plain.choices[0].logprobs is None
    answer = await client.chat.completions.create(**ask, logprobs=True, top_logprobs=1)
    content = answer.choices[0].logprobs.content
    assert len(content) == answer.usage.completion_tokens == 5
    text = b"".join(bytes(each.bytes) for each in content).decode()
    assert text == answer.choices[0].message.content
    assert all(each.top_logprobs[0].token == each.token for each in content)
    stream = await client.chat.completions.create(**ask, logprobs=True, stream=True)
    told = [
        each
        async for chunk in stream
        for each in (chunk.choices[0].logprobs or EMPTY).content
    ]
    assert [each.token for each in told] == [each.token for each in content]
    await server.quiet()


class EMPTY:
    """No log probabilities in a chunk."""

    content: tuple[Any, ...] = ()


async def test_several_answers_are_all_or_none() -> None:
    """When one of several answers cannot start, none runs, and the client gets an error."""
    async with running("--max-batch=2", "--max-waiting=1") as server:
        async with server.client() as client:
            with pytest.raises(openai.InternalServerError) as caught:
                await client.chat.completions.create(
                    **ASK | {"max_tokens": 3900, "n": 16}
                )
        assert caught.value.code == "server_overloaded"
        status = await server.quiet()
        assert status["backend"]["finished"]["completed"] == 0


async def test_leaving_ends_every_answer(server: Any, client: Any) -> None:
    """A client that hangs up in the middle ends all of the choices."""
    before = (await server.quiet())["backend"]["finished"]["completed"]
    stream = await client.chat.completions.create(
        **ASK | {"max_tokens": 3000, "n": 4}, stream=True
    )
    async for chunk in stream:
        if chunk.choices[0].index == 3:
            break
    await stream.close()
    status = await server.quiet()
    assert status["backend"]["finished"]["completed"] == before


async def test_several_answers_with_images_need_room_for_each() -> None:
    """The bytes of images count once for each answer."""
    gate = Gate(bytes=3 * 1_200_000, max_waiting=4, name="payloads")
    async with running(gate=gate) as server:
        async with server.client() as client:
            ask = ASK | {"messages": user("?", encoded(200, 200)), "max_tokens": 2}
            await client.chat.completions.create(**ask, n=2)
            with pytest.raises(openai.APIStatusError) as caught:
                await client.chat.completions.create(**ask, n=16)
        assert caught.value.status_code == 413
        await server.quiet()
