"""Chat completions by the real SDK, over a real socket, from a real engine process."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest
from http_kit import encoded, png, user

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_answers_text(server: Any, client: Any) -> None:
    """A request of text gets an answer with its usage."""
    answer = await client.chat.completions.create(
        model="sim", messages=user("hello"), max_tokens=7
    )
    assert answer.object == "chat.completion"
    assert len(answer.choices[0].message.content) == 7
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 7
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 7
    await server.quiet()


async def test_streams_what_it_answers(server: Any, client: Any) -> None:
    """The chunks of a stream add up to the answer that is not streamed."""
    ask = {"model": "sim", "messages": user("hello", encoded()), "max_tokens": 9}
    whole = await client.chat.completions.create(**ask)
    stream = await client.chat.completions.create(**ask, stream=True)
    chunks = [chunk async for chunk in stream]
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].choices[0].finish_reason == "length"
    assert all(chunk.usage is None for chunk in chunks)
    assert len({chunk.id for chunk in chunks}) == 1
    await server.quiet()


async def test_streams_usage_when_asked(server: Any, client: Any) -> None:
    """With include_usage the last chunk has no choices and counts the tokens."""
    stream = await client.chat.completions.create(
        model="sim",
        messages=user("hello"),
        max_tokens=5,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = [chunk async for chunk in stream]
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 5
    assert chunks[-2].choices[0].finish_reason == "length"
    await server.quiet()


async def test_shows_engine_every_pixel(server: Any, client: Any) -> None:
    """Images reach the engine whole: another image is another text."""
    texts = set()
    for side in range(20, 30):
        answer = await client.chat.completions.create(
            model="sim", messages=user("look", encoded(side, 20)), max_tokens=8
        )
        texts.add(answer.choices[0].message.content)
    assert len(texts) > 3
    await server.quiet()


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF"])
async def test_takes_every_format(server: Any, client: Any, kind: str) -> None:
    """Each format that the header reader knows can also be decoded."""
    answer = await client.chat.completions.create(
        model="sim", messages=user(encoded(kind=kind)), max_tokens=2
    )
    assert answer.choices[0].finish_reason == "length"
    await server.quiet()


async def test_serves_synchronous_sdk(server: Any) -> None:
    """The synchronous SDK works as well, from a thread."""

    def ask() -> str:
        with openai.OpenAI(base_url=server.url, api_key="none") as client:
            stream = client.chat.completions.create(
                model="sim", messages=user("hi", png(64, 64)), max_tokens=6, stream=True
            )
            return "".join(c.choices[0].delta.content or "" for c in stream)

    assert len(await asyncio.to_thread(ask)) == 6
    await server.quiet()


async def test_answers_many_at_once(server: Any, client: Any) -> None:
    """Thirty-two requests at a time each get their own whole answer."""

    async def ask(i: int) -> int:
        answer = await client.chat.completions.create(
            model="sim", messages=user("x" * i, png(100 + i, 100)), max_tokens=4 + i
        )
        return len(answer.choices[0].message.content)

    lengths = await asyncio.gather(*[ask(i) for i in range(32)])
    assert lengths == [4 + i for i in range(32)]
    await server.quiet()


async def test_lists_its_model(client: Any) -> None:
    """The SDK lists and retrieves the one model, and gets 404 for any other."""
    models = [model.id async for model in client.models.list()]
    assert models == ["sim"]
    assert (await client.models.retrieve("sim")).id == "sim"
    with pytest.raises(openai.NotFoundError):
        await client.models.retrieve("other")
