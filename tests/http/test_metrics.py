"""What ``/metrics`` of a running server tells, and that bodies are bounded together."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
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
        assert now["lifecycle_engine_up"]["sim",] == 1
        assert now["lifecycle_engine_starts_total"]["sim",] == 1
        assert now["lifecycle_engine_slots"]["sim", "0", "all"] > 0
        left = now["lifecycle_engine_requests_total"]
        assert sum(left.values()) == 12
        # As many as were answered by more than one token.
        paces = now["lifecycle_time_between_tokens_seconds_count"]
        assert 0 < sum(paces.values()) <= 12
        memory = now["lifecycle_resident_bytes"]
        assert memory["sim", "server"] > 0 < memory["sim", "engine"]
        assert b"canary" not in metrics.text()


def asked(text: str) -> set[str]:
    """The metrics that expressions name."""
    return set(re.findall(r"lifecycle_\w+", text))


async def test_dashboards_and_alerts_ask_for_metrics_that_exist() -> None:
    """By name, and of the engine by the values of labels, too."""
    docs = Path(__file__).parents[2] / "docs"
    texts = [(docs / "alerts.yml").read_text()]
    for page in ("grafana.json", "grafana-engine.json"):
        panels = json.loads((docs / page).read_text())["panels"]
        targets = [json.dumps(panel["targets"]) for panel in panels]
        texts += [target.replace('\\"', '"') for target in targets]
    metrics = Metrics()
    async with (
        asyncio.timeout(120),
        running(metrics=metrics) as server,
        server.client() as client,
    ):
        for _ in range(2):
            await client.chat.completions.create(
                model="sim", messages=user("hello"), max_tokens=3
            )
        await server.quiet()
        shown = await scrape(server.admin_port)
    # One that nothing has happened to yet has a name and no samples.
    known = set(shown) | asked(metrics.text().decode()) | {"lifecycle_asgi"}
    for text in texts:
        assert asked(text)
        assert asked(text) <= known
        for name, value in re.findall(r'(lifecycle_engine_\w+){\w+="(\w+)"}', text):
            assert any(value in labels for labels in shown[name]), (name, value)


async def test_figures_of_the_engine_follow_its_work() -> None:
    """Passes, tokens and time, prefill and decode apart, as they were run."""
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
        now = await scrape(server.admin_port)
        at = "lifecycle_engine_"
        assert answer.usage is not None
        tokens, runs = now[at + "tokens_total"], now[at + "runs_total"]
        assert tokens["sim", "0", "prefill"] == answer.usage.prompt_tokens
        assert tokens["sim", "0", "decode"] == runs["sim", "0", "decode"] == 11
        assert now[at + "answer_tokens_total"]["sim", "0"] == 12
        seconds = now[at + "run_seconds_total"]
        # What the simulated model takes by its costs, at least.
        assert seconds["sim", "0", "decode"] >= 11 * 0.005
        assert seconds["sim", "0", "prefill"] > 0 < seconds["sim", "0", "scheduling"]
        assert now[at + "longest_run_seconds"]["sim", "0", "decode"] >= 0.005
        assert now[at + "kv_used_ratio"]["sim", "0"] == 0
        assert now[at + "requests_total"]["sim", "completed", "0"] == 1


async def test_engine_that_is_gone_is_told(tmp_path: Path) -> None:
    """One that is not there is not up; the one after one that was killed counts."""
    engine = make_engine(begin_when=tmp_path / "never")
    async with (
        asyncio.timeout(120),
        running(engine=engine, metrics=Metrics(), wait=False) as server,
    ):
        now = await scrape(server.admin_port)
        assert now["lifecycle_engine_up"]["sim",] == 0
        assert "lifecycle_engine_requests_running" not in now
    async with asyncio.timeout(120), running(metrics=Metrics()) as server:
        os.kill(server.service.engine.pid, signal.SIGKILL)
        starts = 1.0
        while starts == 1:
            now = await scrape(server.admin_port)
            starts = now["lifecycle_engine_starts_total"]["sim",]
        assert starts == 2


async def test_each_replica_has_series_of_its_own() -> None:
    """Sums are no maxima, and fall with one that ends; a status may be no mapping."""

    def work(tokens: int, used: float) -> dict[str, Any]:
        return {"backend": {"tokens": tokens, "kv_used": used, "runner": {"own": 3}}}

    replicas = {"0": work(1000, 0.5), "1": work(7, 0.9), "2": {"backend": None}}
    sums = {"backend": {"tokens": 1007, "kv_used": 1.4, "runner": None}}
    told: list[dict[str, Any]] = [{}]

    async def status() -> Any:
        return told[-1]

    engine = make_engine()
    async with (
        asyncio.timeout(120),
        running(engine=engine, metrics=Metrics()) as server,
    ):
        engine.status = status  # type: ignore[method-assign]
        for each in ({"backend": None}, sums, sums | {"replicas": replicas}):
            told.append(each)
            found = await scrape(server.admin_port)
            assert found["lifecycle_engine_starts_total"] == {("sim",): 1}
    used = {("sim", "0"): 0.5, ("sim", "1"): 0.9}
    assert found["lifecycle_engine_kv_used_ratio"] == used
    tokens = found["lifecycle_engine_answer_tokens_total"]
    assert tokens == {("sim", "0"): 1000, ("sim", "1"): 7}
    assert found["lifecycle_engine_runner"]["own", "sim", "1"] == 3


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

        async def figure(name: str, label: str) -> float:
            found = await scrape(server.admin_port)
            return found[f"lifecycle_engine_{name}"]["sim", "0", label]

        await ask("hello", prompt_cache_key="talk", user="me")
        assert await figure("slots", "cached") == 1
        assert await figure("tokens_total", "reused") == 0
        again = await ask("hello there", prompt_cache_key="talk", user="me")
        resumed = await figure("tokens_total", "reused")
        assert resumed >= len("hello")
        other = await ask("hello there", prompt_cache_key="talk", user="you")
        assert again == other == await ask("hello there")
        assert await figure("tokens_total", "reused") == resumed


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
