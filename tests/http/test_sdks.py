"""The real SDKs, with and without asyncio, where the server is full, closing or dead."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import time
from collections.abc import AsyncIterator
from typing import Any

import anthropic
import openai
import pytest
from http_kit import GatedProcessor, Server, running

from lifecycle import Gate
from lifecycle_engine import AppSettings

pytestmark = pytest.mark.asyncio
TEXT = [{"role": "user", "content": "hello"}]
ASKS = ["chat", "responses", "messages"]
KINDS = pytest.mark.parametrize("blocking", [False, True], ids=["async", "sync"])
EACH = pytest.mark.parametrize("ask", ASKS)


async def test_finds_model_of_an_owner() -> None:
    """Models of a hub are called ``owner/name``, which both SDKs put into a path."""
    name, settings = "some-owner/model-8B", {"api_key": "none", "max_retries": 0}
    async with (
        asyncio.timeout(120),
        running(settings=AppSettings(model=name)) as server,
    ):
        async with openai.AsyncOpenAI(base_url=server.url, **settings) as client:
            assert (await client.models.retrieve(name)).id == name
            with pytest.raises(openai.NotFoundError) as caught:
                await client.models.retrieve("some-owner/other")
            assert caught.value.code == "model_not_found"
        url = server.url.removesuffix("/v1")
        async with anthropic.AsyncAnthropic(base_url=url, **settings) as client:
            assert (await client.models.retrieve(name)).id == name


class Seen:
    """The answers that a client got, and when."""

    def __init__(self) -> None:
        self.answers: list[tuple[int, Any, float]] = []

    def note(self, answer: Any) -> None:
        """For a client without asyncio."""
        now = time.monotonic()
        self.answers.append((answer.status_code, answer.headers, now))

    async def anote(self, answer: Any) -> None:
        """For a client with asyncio."""
        self.note(answer)

    @property
    def statuses(self) -> list[int]:
        """In their order."""
        return [status for status, _, _ in self.answers]

    def obeyed(self) -> bool:
        """Whether each try came no sooner than the answer before it had said."""
        return all(
            next_[2] - last[2] >= int(last[1]["retry-after-ms"]) / 1000
            for last, next_ in itertools.pairwise(self.answers)
        )


def sdk(
    server: Server,
    ask: str,
    *,
    blocking: bool,
    seen: Seen | None = None,
    **settings: Any,
) -> Any:
    """A client of the SDK that belongs to what is asked."""
    url = f"http://127.0.0.1:{server.port}"
    settings = {"api_key": "none", "max_retries": 2, "timeout": 20, **settings}
    if ask == "messages":
        make: Any = anthropic.Anthropic if blocking else anthropic.AsyncAnthropic
    else:
        make, url = openai.OpenAI if blocking else openai.AsyncOpenAI, f"{url}/v1"
    client = make(base_url=url, **settings)
    if seen is not None:
        note: Any = seen.note if blocking else seen.anote
        client._client.event_hooks = {"response": [note]}
    return client


def create(client: Any, ask: str, tokens: int = 5, **options: Any) -> Any:
    """Call the SDK: an answer, or something to await for one."""
    if ask == "responses":
        options |= {"input": "hello", "max_output_tokens": tokens}
        return client.responses.create(model="sim", **options)
    resource = client.messages if ask == "messages" else client.chat.completions
    options |= {"messages": TEXT, "max_tokens": tokens}
    return resource.create(model="sim", **options)


def text_of(ask: str, answer: Any) -> str:
    """The text of an answer."""
    if ask == "responses":
        return answer.output_text
    if ask == "messages":
        return answer.content[0].text
    return answer.choices[0].message.content


async def whole(
    server: Server, ask: str, *, blocking: bool, tokens: int = 5, **settings: Any
) -> str:
    """The text of one answer."""
    client = sdk(server, ask, blocking=blocking, **settings)
    if not blocking:
        async with client:
            return text_of(ask, await create(client, ask, tokens))

    def call() -> str:
        with client:
            return text_of(ask, create(client, ask, tokens))

    return await asyncio.to_thread(call)


async def stream(
    server: Server, ask: str, *, blocking: bool, **settings: Any
) -> AsyncIterator[Any]:
    """The events of a long stream."""
    client = sdk(server, ask, blocking=blocking, **settings)
    if not blocking:
        async with client:
            async for event in await create(client, ask, 3900, stream=True):
                yield event
        return
    with client:
        answer = await asyncio.to_thread(create, client, ask, 3900, stream=True)
        while True:
            event = await asyncio.to_thread(next, iter(answer), None)
            if event is None:
                return
            yield event


def busy() -> Gate:
    """A gate of one slot and no line."""
    return Gate(slots=1, max_waiting=0, name="in_flight")


@KINDS
@EACH
async def test_retries_after_the_time_in_the_refusal(ask: str, blocking: bool) -> None:
    """A full server names a time; the SDK waits as long, asks again and is served."""
    gate, seen = busy(), Seen()
    async with asyncio.timeout(120), running(in_flight=gate) as server:
        lease = gate.try_admit()
        task = whole(server, ask, blocking=blocking, seen=seen)
        asking = asyncio.create_task(task)
        await server.until(lambda: len(seen.answers) == 1)
        lease.release()
        assert len(await asking) == 5
        assert seen.statuses == [529 if ask == "messages" else 503, 200]
        assert seen.obeyed()
        await server.quiet()


@KINDS
@EACH
async def test_comes_back_when_its_share_is_free(ask: str, blocking: bool) -> None:
    """So it does where the client has its share in flight."""
    processor, seen = GatedProcessor(), Seen()
    settings = AppSettings(model="sim", per_client=1)
    options = {"processor": processor, "settings": settings}
    async with asyncio.timeout(120), running(**options) as server:
        first = asyncio.create_task(whole(server, ask, blocking=blocking))
        await server.until(lambda: processor.entered.acquire(blocking=False))
        task = whole(server, ask, blocking=blocking, seen=seen)
        second = asyncio.create_task(task)
        await server.until(lambda: len(seen.answers) == 1)
        processor.release.set()
        assert [len(await first), len(await second)] == [5, 5]
        assert seen.statuses[0] == 429
        assert seen.statuses[-1] == 200
        assert seen.obeyed()
        await server.quiet()


@KINDS
@EACH
async def test_gives_up_after_its_retries(ask: str, blocking: bool) -> None:
    """A server that stays full is asked three times, and its last word is raised."""
    gate, seen = busy(), Seen()
    async with asyncio.timeout(120), running(in_flight=gate) as server:
        with gate.try_admit():
            with pytest.raises((openai.APIStatusError, anthropic.APIStatusError)) as no:
                await whole(server, ask, blocking=blocking, seen=seen)
        assert len(seen.answers) == 3
        assert seen.obeyed()
        assert no.value.status_code == (529 if ask == "messages" else 503)
        assert 1 <= int(no.value.response.headers["retry-after"]) <= 60
        await server.quiet()


@KINDS
@EACH
async def test_goes_elsewhere_where_the_server_closes(ask: str, blocking: bool) -> None:
    """While the server drains for good, no client is asked to retry."""
    seen = Seen()
    async with asyncio.timeout(120), running() as server:
        server.service.in_flight.close()
        with pytest.raises((openai.APIStatusError, anthropic.APIStatusError)) as no:
            await whole(server, ask, blocking=blocking, seen=seen)
        assert no.value.response.headers["x-should-retry"] == "false"
        assert len(seen.answers) == 1
        await server.quiet()


@KINDS
@EACH
async def test_asks_again_where_the_engine_died(ask: str, blocking: bool) -> None:
    """A client that waits for a whole answer gets it from the next engine."""
    async with asyncio.timeout(120), running("--sim-decode-step=0.05") as server:
        service = server.service
        task = whole(server, ask, blocking=blocking, tokens=40, max_retries=5)
        asking = asyncio.create_task(task)
        await server.until(
            lambda: any(s.phase == "started" for s in service.sessions.live())
        )
        assert service.engine.pid is not None
        os.kill(service.engine.pid, signal.SIGKILL)
        assert len(await asking) == 40
        assert service.engine.incarnation > 1
        assert service.sessions.statistics().outcomes["engine_lost"] >= 1
        await server.quiet()


@KINDS
@EACH
async def test_raises_where_the_engine_dies_in_the_stream(
    ask: str, blocking: bool
) -> None:
    """A stream that fails raises the SDK's own error, after what it had."""
    async with asyncio.timeout(120), running() as server:
        seen = 0
        with pytest.raises((openai.APIError, anthropic.APIStatusError)) as caught:
            async for _ in stream(server, ask, blocking=blocking):
                seen += 1
                if seen == 8:
                    assert server.service.engine.pid is not None
                    os.kill(server.service.engine.pid, signal.SIGKILL)
        assert seen >= 8
        assert "engine" in str(caught.value)
        assert server.service.sessions.statistics().opened == 1


@KINDS
@EACH
async def test_leaves_nothing_where_it_lost_patience(ask: str, blocking: bool) -> None:
    """A client that times out has hung up: its request ends with it."""
    processor = GatedProcessor()
    async with asyncio.timeout(120), running(processor=processor) as server:
        with pytest.raises((openai.APITimeoutError, anthropic.APITimeoutError)):
            await whole(server, ask, blocking=blocking, timeout=1.0, max_retries=0)
        await server.until(lambda: not server.service.sessions.live())
        processor.release.set()
        status = await server.quiet()
        outcomes = server.service.sessions.statistics().outcomes
        assert outcomes["client_gone"] == 1
        assert status["starts"] == 0


@KINDS
@EACH
async def test_ends_what_it_no_longer_reads(ask: str, blocking: bool) -> None:
    """A stream that is closed early ends its request."""
    async with asyncio.timeout(120), running() as server:
        client = sdk(server, ask, blocking=blocking)
        if blocking:
            answer = await asyncio.to_thread(create, client, ask, 3900, stream=True)
            await asyncio.to_thread(next, iter(answer))
            await asyncio.to_thread(answer.close)
            client.close()
        else:
            async with client, await create(client, ask, 3900, stream=True) as answer:
                async for _ in answer:
                    break
        await server.quiet()
        outcomes = server.service.sessions.statistics().outcomes
        assert outcomes["client_gone"] == 1
