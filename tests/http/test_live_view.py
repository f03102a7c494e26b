"""The live view of the bundled server: in a browser, and over a real engine."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from collections.abc import Callable
from typing import Any

import httpx2
import pytest
from http_kit import Server, make_engine, running, user

from lifecycle import Gate
from lifecycle_asgi.prometheus import Metrics

pytestmark = pytest.mark.asyncio(loop_scope="module")
CANARY = "canary-77aa <img src=x onerror=alert(1)>"
# An answer of 4,000 tokens outlasts every look at it.
SLOW = "--sim-decode-step=0.05"
PATIENCE_MS = 120_000


@pytest.fixture(scope="module")
def browser_path() -> str:
    """The program of a Chromium, where there is one."""
    pytest.importorskip("playwright", reason="playwright is not installed")
    names = ("chromium", "chromium-browser", "google-chrome", "chrome")
    found = next(filter(None, map(shutil.which, names)), None)
    if found is None:
        pytest.skip("no Chromium is installed: apt install chromium")
    return found


async def snapshot(server: Server) -> dict[str, Any]:
    """One event."""
    async with httpx2.AsyncClient() as client:
        url = f"http://127.0.0.1:{server.admin_port}/_lifecycle/snapshot"
        answer = await client.get(url, timeout=60)
        assert "canary-77aa" not in answer.text
        return dict(answer.json())


async def until(server: Server, what: Callable[[dict[str, Any]], Any]) -> Any:
    """What *what* finds in an event, once it finds something."""
    async with asyncio.timeout(120):
        while not (found := what(await snapshot(server))):
            await asyncio.sleep(0.45)
        return found


def warned(kind: str) -> Callable[[dict[str, Any]], Any]:
    """Finds a warning of this kind."""
    return lambda event: [each for each in event["warnings"] if each["kind"] == kind]


def ask(client: Any, id_: str, **more: Any) -> Any:
    """A request of the SDK for a long answer."""
    return client.chat.completions.create(
        model="sim",
        messages=user(CANARY),
        max_tokens=4000,
        stream=True,
        extra_headers={"x-request-id": id_},
        **more,
    )


async def test_shows_requests_and_engine() -> None:
    """A stream is shown with its id, its tokens and its rate, and so is the engine."""
    async with running(SLOW) as server, server.client() as client:
        stream = await ask(client, "mine")
        rows = await until(
            server,
            lambda event: [
                each
                for each in event["requests"]
                if each["session"] == "mine" and each["rate"] > 0
            ],
        )
        assert rows[0]["phase"] == "streaming"
        assert rows[0]["tokens"] > 0
        event = await snapshot(server)
        assert event["engine"]["health"] in ("serving", "busy")
        assert event["engine"]["incarnation"] == 1
        names = {each["name"] for each in event["gates"]}
        assert {"admission-bodies", "in_flight", "payloads"} <= names
        await stream.close()
        await server.quiet()


@pytest.mark.parametrize("choices", [1, 2])
async def test_tells_what_waits_in_the_engine_from_what_runs(choices: int) -> None:
    """A request that the engine has accepted, and that has no place in its batch."""
    options = (SLOW, "--max-batch=1")
    async with (
        running(*options, metrics=Metrics()) as server,
        server.client() as client,
    ):
        first = await ask(client, "first")
        second = asyncio.create_task(ask(client, "second", n=choices))
        event = await until(server, lambda seen: seen["phases"].get("queued") and seen)
        phases = {each["session"]: each["phase"] for each in event["requests"]}
        assert phases == {"first": "streaming", "second": "queued"}
        (row,) = [each for each in event["requests"] if each["session"] == "second"]
        assert row["waits_for"] == "a place in the engine's batch"
        await first.close()
        await (await second).close()
        await server.quiet()


async def test_names_engine_that_is_stopped() -> None:
    """An engine process that was stopped is named, and so is the end of that."""
    # By default it would be replaced after two seconds, between two looks at it.
    engine = make_engine(SLOW, stopped_after=3600.0)
    async with running(engine=engine) as server, server.client() as client:
        stream = await ask(client, "mine")
        os.kill(server.service.engine.pid, signal.SIGSTOP)
        try:
            found = await until(server, warned("engine slow"))
        finally:
            os.kill(server.service.engine.pid, signal.SIGCONT)
        assert "stopped" in found[0]["text"] or "busy" in found[0]["text"]
        await until(server, lambda event: event["engine"]["health"] == "serving")
        await stream.close()


async def test_shows_page_in_browser(browser_path: str) -> None:
    """A browser shows requests as text only, under the policy, and its button ends one."""
    from playwright.async_api import async_playwright

    async with (
        running(SLOW) as server,
        server.client() as client,
        async_playwright() as play,
    ):
        browser = await play.chromium.launch(
            executable_path=browser_path, args=["--no-sandbox"], timeout=PATIENCE_MS
        )
        page = await browser.new_page()
        page.set_default_timeout(PATIENCE_MS)
        problems: list[str] = []
        page.on("console", lambda message: problems.append(message.text))
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("request", lambda request: problems.extend(_foreign(request.url)))
        await page.goto(f"http://127.0.0.1:{server.admin_port}/_lifecycle")
        stream = await ask(client, "mine")
        row = page.locator("#requests tr", has_text="/v1/chat/completions")
        await row.wait_for()
        text = await row.inner_text()
        assert "127.0.0.1" in text
        assert "canary" not in await page.content()
        await page.locator("#state", has_text="engine serving").wait_for()
        assert "payloads" in await page.locator("#gates").inner_text()
        await row.get_by_role("button", name="cancel").click()
        await row.wait_for(state="detached")
        with pytest.raises(Exception, match="cancel"):
            async for _ in stream:
                pass
        await server.quiet()
        assert problems == []
        await browser.close()


async def test_shows_names_as_text(browser_path: str) -> None:
    """What clients choose, such as a path, never becomes an element of the page."""
    from playwright.async_api import async_playwright

    evil = "/<img src=x onerror=alert(1)>"

    async with running() as server, async_playwright() as play:
        browser = await play.chromium.launch(
            executable_path=browser_path, args=["--no-sandbox"], timeout=PATIENCE_MS
        )
        page = await browser.new_page()
        page.set_default_timeout(PATIENCE_MS)
        await page.goto(f"http://127.0.0.1:{server.admin_port}/_lifecycle")
        # One step of the page's script: no event of the server comes in between.
        images, text = await page.evaluate(
            "evil => { update({token: '', cancel: true, pid: 1, uptime_s: 1, engine: null,"
            " warnings: [{kind: evil, text: evil}], gates: [], phases: {[evil]: 1},"
            " total: 1, clients: [{client: evil, requests: 1, bytes: 1}], requests: ["
            " {id: evil, session: evil, what: evil, client: evil, phase: evil,"
            " gate: evil, age_s: 1, bytes: 1, tokens: evil, rate: evil,"
            " warnings: [evil], cancellable: true}]});"
            " return [document.images.length, at('requests').innerText]; }",
            evil,
        )
        assert images == 0
        assert evil in text
        await browser.close()


def _foreign(url: str) -> list[str]:
    return [] if url.startswith("http://127.0.0.1:") else [url]


async def test_lists_all_requests_with_what_they_wait_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One that is answered, one at a gate, and one that is uploaded."""
    gate = Gate(slots=1, name="in_flight")

    async def listed(server: Server) -> list[dict[str, Any]]:
        async with httpx2.AsyncClient() as client:
            url = f"http://127.0.0.1:{server.admin_port}/_lifecycle/requests"
            found = (await client.get(url, timeout=60)).json()
            assert len(found["requests"]) == min(most, found["total"])
            return list(found["requests"])

    most = 1000
    async with running(SLOW, in_flight=gate) as server, server.client() as client:
        stream = await ask(client, "first")
        waiting = asyncio.create_task(ask(client, "second"))
        await server.until(lambda: gate.statistics().waiting)
        _, upload = await asyncio.open_connection("127.0.0.1", server.port)
        head = b"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{"
        upload.write(head)
        async with asyncio.timeout(120):
            while len(rows := await listed(server)) < 3:
                pass
        assert [each["id"] for each in rows[:2]] == ["first", "second"]
        assert rows[2]["what"] == "POST /generate"
        assert [each["waits_for"] for each in rows] == [
            "the next part of its response",
            "gate in_flight",
            "its body",
        ]
        most = 2
        monkeypatch.setattr("lifecycle_asgi.live_snapshot._MOST_LISTED", most)
        assert [each["id"] for each in await listed(server)] == ["first", "second"]
        upload.close()
        waiting.cancel()
        await stream.close()
        await server.quiet()
