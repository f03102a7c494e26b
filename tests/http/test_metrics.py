"""What ``/metrics`` of a running server tells, and that bodies are bounded together."""

from __future__ import annotations

import asyncio
import json
import re
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("prometheus_client")

from http_kit import answer_to, encoded, make_engine, running, user
from prometheus_client.parser import text_string_to_metric_families

from lifecycle_asgi.prometheus import Metrics
from lifecycle_engine import AppSettings

pytestmark = pytest.mark.asyncio


async def scrape(port: int) -> dict[str, dict[Any, float]]:
    """Every sample of the server by its name and labels."""

    def get() -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
            assert answer.headers["content-type"].startswith("text/plain")
            return str(answer.read(), "ascii")

    found: dict[str, dict[Any, float]] = {}
    for family in text_string_to_metric_families(await asyncio.to_thread(get)):
        for sample in family.samples:
            labels = tuple(sample.labels.values())
            found.setdefault(sample.name, {})[labels] = sample.value
    return found


async def test_counts_each_request_once() -> None:
    """Opened is live and ended at every scrape, and the engine's numbers are there."""
    metrics = Metrics()
    async with (
        asyncio.timeout(120),
        running(metrics=metrics) as server,
        server.client() as client,
    ):

        async def ask(number: int) -> None:
            stream = await client.chat.completions.create(
                model="sim",
                messages=user("canary-7f3a", encoded()),  # type: ignore[arg-type]
                stream=True,
                max_tokens=20,
            )
            async for _ in stream:
                if number % 3 == 0:
                    break
            await stream.close()

        async with asyncio.TaskGroup() as tasks:
            for number in range(12):
                tasks.create_task(ask(number))
            for _ in range(5):
                now = await scrape(server.admin_port)
                ended = sum(now["lifecycle_sessions_ended_total"].values())
                live = now["lifecycle_sessions_live"][()]
                assert now["lifecycle_sessions_opened_total"][()] == live + ended
        await server.quiet()
        now = await scrape(server.admin_port)
        ended = now["lifecycle_sessions_ended_total"]
        assert sum(ended.values()) == 12
        assert ended["client_gone",] + ended["completed",] == 12
        assert now["lifecycle_engine_backend_slots"][()] > 0
        assert b"canary" not in metrics.text()


async def test_dashboard_of_the_engine_asks_for_metrics_that_exist() -> None:
    """Each of its panels shows something; of device memory only where there is CUDA."""
    page = Path(__file__).parents[2] / "docs" / "grafana-engine.json"
    panels = json.loads(page.read_text())["panels"]
    async with asyncio.timeout(120), running(metrics=Metrics()) as server:
        known = set(await scrape(server.admin_port))
    for panel in panels:
        asked = set(re.findall(r"lifecycle_\w+", json.dumps(panel["targets"])))
        asked -= {name for name in asked if "_runner_device_bytes" in name}
        assert asked
        assert asked <= known


async def test_figures_of_the_engine_follow_its_work() -> None:
    """Steps, batch and tokens, prefill and decode apart, as they were run."""
    async with (
        asyncio.timeout(120),
        running("--sim-decode-step", "0.005", metrics=Metrics()) as server,
        server.client() as client,
    ):
        options: dict[str, Any] = {"model": "sim", "max_tokens": 12}
        answer = await client.chat.completions.create(
            messages=user("hello"), extra_body={"ignore_eos": True}, **options
        )
        await server.quiet()
        now = {
            name: values[()]
            for name, values in (await scrape(server.admin_port)).items()
            if () in values
        }
        at = "lifecycle_engine_backend_"
        assert answer.usage is not None
        assert now[at + "times_prefill_tokens"] == answer.usage.prompt_tokens
        assert now[at + "tokens"] == 12
        assert now[at + "times_decode_runs"] == 11
        assert now[at + "times_decode_recent_tokens_per_run"] == 1
        # What the simulated model takes by its costs, at least.
        assert now[at + "times_decode_recent_run_seconds"] >= 0.005
        assert 0 < now[at + "times_decode_recent_tokens_per_second"] < 200
        assert now[at + "times_recent_step_seconds"] > 0
        assert now[at + "kv_used"] == 0


async def test_next_turn_of_a_conversation_goes_on_from_its_slot() -> None:
    """Named by prompt_cache_key, of one user; the answers are what they are without."""
    async with (
        asyncio.timeout(120),
        running(metrics=Metrics()) as server,
        server.client() as client,
    ):

        async def ask(text: str, **more: Any) -> str:
            answer = await client.chat.completions.create(
                model="sim", messages=user(text), max_tokens=5, **more
            )
            await server.quiet()
            return str(answer.choices[0].message.content)

        async def figure(name: str) -> float:
            return (await scrape(server.admin_port))[
                f"lifecycle_engine_backend_{name}"
            ][()]

        await ask("hello", prompt_cache_key="talk", user="me")
        assert await figure("slots_cached") == 1
        assert await figure("tokens_resumed") == 0
        again = await ask("hello there", prompt_cache_key="talk", user="me")
        resumed = await figure("tokens_resumed")
        assert resumed >= len("hello")
        other = await ask("hello there", prompt_cache_key="talk", user="you")
        assert again == other == await ask("hello there")
        assert await figure("tokens_resumed") == resumed


async def test_health_follows_the_steps_of_the_engine() -> None:
    """During a long chunk the health is busy, and requests are still served."""
    engine = make_engine("--sim-prefill-token", "0.1", busy_after=0.2)
    async with (
        asyncio.timeout(120),
        running(engine=engine) as server,
        server.client() as client,
        asyncio.TaskGroup() as tasks,
    ):
        url = f"http://127.0.0.1:{server.port}/health"
        assert (await client._client.get(url)).json()["engine"] == "serving"
        options: dict[str, Any] = {"model": "sim", "max_tokens": 2}
        asked = tasks.create_task(
            client.chat.completions.create(messages=user("hello " * 4), **options)
        )
        while (await client._client.get(url)).json()["engine"] != "busy":
            assert not asked.done()
        await asked
        assert (await client._client.get(url)).json()["engine"] == "serving"


async def test_says_where_metrics_are_missing() -> None:
    """Without its extra the server says so and serves all the same."""
    async with asyncio.timeout(120), running() as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.admin_port)
        writer.write(
            b"GET /metrics HTTP/1.1\r\nhost: here\r\nconnection: close\r\n\r\n"
        )
        answer = await reader.read()
        writer.close()
        await writer.wait_closed()
    assert answer.startswith(b"HTTP/1.1 404")
    assert b"prometheus-client" in answer


async def test_bounds_all_bodies_together_until_hand_off() -> None:
    """A body that finds no room is 503; one that was handed over makes room (fault-16)."""
    settings = AppSettings(model="sim", max_waiting=0)
    question = {"model": "sim", "messages": user("x" * 6000), "max_tokens": 4}
    body = json.dumps(question).encode()
    async with asyncio.timeout(120), running(settings=settings) as server:
        bodies = server.service.admission.gates[0]
        with bodies.try_admit(bytes=bodies.statistics().bytes or 0):
            status, headers, document = await answer_to(server.port, body)
        assert status == 503
        assert document["error"]["code"] == "server_overloaded"
        assert "retry-after" in headers
        seen = []
        hand_off = server.service.engine.start

        async def start(*args: Any) -> Any:
            stream = await hand_off(*args)
            seen.append(bodies.statistics().bytes_in_use)
            asyncio.get_running_loop().call_soon(
                lambda: asyncio.get_running_loop().call_later(
                    0.05, lambda: seen.append(bodies.statistics().bytes_in_use)
                )
            )
            return stream

        server.service.engine.start = start  # type: ignore[method-assign]
        question |= {"max_tokens": 400, "ignore_eos": True}
        status, _, _ = await answer_to(server.port, json.dumps(question).encode())
        assert status == 200
        assert seen[0] > 6000
        assert seen[1:] == [0]
        await server.quiet()


async def test_says_what_each_family_is() -> None:
    """Every family of a scrape has help, also those that the engine counts."""
    async with running(metrics=Metrics()) as server:
        url = f"http://127.0.0.1:{server.admin_port}/metrics"
        text = await asyncio.to_thread(lambda: urllib.request.urlopen(url).read())
        families = list(text_string_to_metric_families(text.decode()))
        assert any(each.name.startswith("lifecycle_engine_") for each in families)
        assert [each.name for each in families if not each.documentation] == []


async def test_names_what_describes_the_paths() -> None:
    """A path that does not exist is answered with where the others are described."""
    async with running() as server:
        url = f"http://127.0.0.1:{server.port}/v1/nothing"
        with pytest.raises(urllib.error.HTTPError) as caught:
            await asyncio.to_thread(urllib.request.urlopen, url)
        with caught.value as answer:
            message = json.loads(answer.read())["error"]["message"]
        assert "POST to /v1/chat/completions" in message
        assert "GET /docs" in message
