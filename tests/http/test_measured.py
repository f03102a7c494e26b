"""Events about the engine for an observer of the server."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("prometheus_client")

from http_kit import make_engine, running, user

from lifecycle import Gate
from lifecycle.events import Event
from lifecycle_asgi.prometheus import Metrics
from lifecycle_engine import AppSettings, EngineMeasured, SimProcessor, create_app

pytestmark = pytest.mark.asyncio
QUICK = AppSettings(model="sim", measured_every=0.02)


class Told(Metrics):
    """An observer that records events about the engine."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[EngineMeasured] = []
        self._news = asyncio.Event()

    def __call__(self, event: Event, /) -> None:
        super().__call__(event)
        if isinstance(event, EngineMeasured):
            self.events.append(event)
            self._news.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until *condition* holds for the events."""
        while not condition():
            self._news.clear()
            await self._news.wait()

    @property
    def decoded(self) -> int:
        """Return the tokens of all events."""
        return sum(event.decode_tokens for event in self.events)


async def ask(client: Any, tokens: int) -> Any:
    """One answer of so many tokens."""
    return await client.chat.completions.create(
        model="sim",
        messages=user("hello"),
        max_tokens=tokens,
        extra_body={"ignore_eos": True},
    )


async def test_events_add_up_to_what_was_answered() -> None:
    """Events are emitted while there are requests, and then no more."""
    told, looked = Told(), asyncio.Event()
    engine = make_engine("--sim-decode-step=0.005")
    plain = engine.status

    async def status() -> Any:
        found = await plain()
        looked.set()
        return found

    engine.status = status  # type: ignore[method-assign]
    async with (
        asyncio.timeout(120),
        running(engine=engine, metrics=told, settings=QUICK) as server,
        server.client() as client,
    ):
        await looked.wait()  # what is done from here on is told
        answers = await asyncio.gather(*(ask(client, 60) for _ in range(3)))
        await told.until(lambda: told.decoded >= 3 * 59)
        await server.quiet()
        prompts = sum(answer.usage.prompt_tokens for answer in answers)
        assert sum(event.prefill_tokens for event in told.events) == prompts
        assert told.decoded == 3 * 59
        busy = [event for event in told.events if event.running]
        assert busy
        assert max(event.batch for event in busy) <= 3
        for event in busy:
            assert event.decode_s * event.batch >= 0.0049 * event.decode_tokens
        assert all(event.interval_s >= 0.02 for event in busy)
        await told.until(lambda: not told.events[-1].running)
        count = len(told.events)
        await asyncio.sleep(0.3)  # in which fifteen would be told
        assert len(told.events) <= count + 2  # one on its way, and the last one


async def test_measures_a_replaced_engine_anew() -> None:
    """Its counters begin at zero, and so do those of the events."""
    told = Told()
    async with (
        asyncio.timeout(120),
        running(metrics=told, settings=QUICK) as server,
        server.client() as client,
    ):
        await ask(client, 30)
        assert server.service.engine.pid is not None
        os.kill(server.service.engine.pid, signal.SIGKILL)
        engine = server.service.engine
        await server.until(lambda: engine.incarnation == 2 and server.service.ready)
        told.events.clear()
        await ask(client, 20)
        await told.until(lambda: told.decoded >= 19)
        assert all(event.steps >= 0 for event in told.events)


async def test_observer_that_raises_breaks_no_request(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It is reported once; so is an engine that cannot be measured."""

    class Broken(Told):
        def __call__(self, event: Event, /) -> None:
            super().__call__(event)
            if self.events:
                raise RuntimeError("no")

    told = Broken()
    async with (
        asyncio.timeout(120),
        running(metrics=told, settings=QUICK) as server,
        server.client() as client,
    ):
        while len(told.events) < 2:
            await ask(client, 2)

        async def status() -> Any:
            raise ValueError("none")

        server.service.engine.status = status  # type: ignore[method-assign]
        while "its metrics stop until a restart" not in caplog.text:
            await ask(client, 2)
        assert (await ask(client, 2)).usage.completion_tokens == 2
        del server.service.engine.status
        await server.quiet()
    assert caplog.text.count("observer failed on EngineMeasured") == 1


@pytest.mark.parametrize("kind", [ValueError, SystemExit])
async def test_leaves_an_error_of_its_caller_alone(kind: type[BaseException]) -> None:
    """What is raised inside the lifespan comes out as it is, and not in a group."""
    app = create_app(
        make_engine(),
        SimProcessor(),
        gate=Gate(bytes=10**6),
        settings=QUICK,
        observer=Told(),
    )
    raised = kind("mine")
    with pytest.raises(kind) as caught:
        async with app.router.lifespan_context(app):
            raise raised
    assert caught.value is raised
