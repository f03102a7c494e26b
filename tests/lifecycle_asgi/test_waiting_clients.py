"""Real clients whose body waits unread: of Go, and behind a real nginx."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import go_client
import httpx
import pytest
from asgi_kit import serving
from nginx_kit import find_nginx, nginx

from lifecycle import Gate
from lifecycle_asgi import Admission

pytestmark = [
    pytest.mark.asyncio,
    pytest.mark.skipif(sys.platform != "linux", reason="epoll is of Linux"),
]
MIB = 2**20
# The buffers of a new connection have room for a tenth of it.
BODY = 4 * MIB
NGINX = {
    "nginx": "",
    "nginx, unbuffered": "proxy_http_version 1.1; proxy_request_buffering off;",
}
CLIENTS = ("go", "go, killed", *NGINX)


class Line:
    """`Admission` whose memory for bodies another request has.

    Args:
        roomy: Whether the kernel may have the bodies that wait, a sixteenth of `bytes`.
    """

    def __init__(self, *, roomy: bool) -> None:
        self.bodies = Gate(bytes=3 * BODY, order="fair", max_waiting=1)
        self.held = self.bodies.try_admit(bytes=3 * BODY)
        self.app = Admission(
            _length,
            bytes=(1024 if roomy else 16) * MIB,
            max_body=BODY,
            max_wait=600,
            gates={"bodies": self.bodies},
            environment={},
        )

    async def until(self, waiting: int) -> None:
        """Wait until so many requests wait."""
        while self.bodies.statistics().waiting != waiting:
            await asyncio.sleep(0.001)


def _unread(port: int) -> int:
    """Bytes that the kernel holds for the server at *port*."""
    rows = [row.split() for row in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    of_server = [row for row in rows if row[1].endswith(f":{port:04X}")]
    return sum(int(row[4].partition(":")[2], 16) for row in of_server)


async def _arrived(port: int) -> None:
    """Wait until no more of a body comes."""
    before = 0
    while (now := _unread(port)) != before or now < MIB:
        before = now
        await asyncio.sleep(0.25)


async def _length(scope: Any, receive: Any, send: Any) -> None:
    body = b"%d" % len((await receive())["body"])
    headers = [(b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


@contextlib.asynccontextmanager
async def asking(
    name: str, port: int, folder: Path
) -> AsyncIterator[tuple[asyncio.Task[str], Callable[[], object]]]:
    """Send a body; yield what will be answered, and what makes the client leave."""
    url = f"http://127.0.0.1:{port}/"
    if name in NGINX:
        answer = asyncio.create_task(_ask(url))
        yield answer, answer.cancel
        answer.cancel()
        await asyncio.wait([answer])
        return
    program = await go_client.build(folder)
    async with go_client.asking(program, url, BODY) as (answer, process):
        assert process.stdin is not None
        yield answer, process.kill if name == "go, killed" else process.stdin.close


async def _ask(url: str) -> str:
    async with httpx.AsyncClient(timeout=120) as client:
        answer = await client.post(url, content=bytes(BODY))
        return f"{answer.status_code} {answer.text}"


@contextlib.asynccontextmanager
async def front(name: str, port: int, folder: Path) -> AsyncIterator[int]:
    """The port that the client asks: that of nginx, or of the server."""
    if name not in NGINX:
        yield port
        return
    async with nginx(folder, port, NGINX[name]) as own:
        yield own


@pytest.fixture(autouse=True)
def installed(name: str) -> None:
    """Skip before there is anything to release."""
    find_nginx() if name in NGINX else go_client.find_go()


@pytest.mark.thorough
@pytest.mark.parametrize("sent", [True, False], ids=["sent", "sending"])
@pytest.mark.parametrize("name", CLIENTS)
async def test_notices_soon_that_a_client_left(
    name: str, *, sent: bool, tmp_path: Path
) -> None:
    """50 ms after it left; half of them within ten times that, on a busy machine."""
    if name == "nginx, unbuffered" and not sent:
        pytest.skip("nginx overlooks a client that leaves while it passes on the body")
    line, took = Line(roomy=True), []
    async with (
        asyncio.timeout(120),
        serving(line.app) as server,
        front(name, server, tmp_path) as port,
    ):
        for _ in range(5):
            async with asking(name, port, tmp_path) as (answer, leave):
                await line.until(1)
                if sent:
                    await _arrived(server)
                assert not answer.done()
                left = time.monotonic()
                leave()
                await line.until(0)
                took.append(time.monotonic() - left)
        line.held.release()
    print(f"{name}, {sent=}: {[round(1e3 * each, 1) for each in took]} ms")
    assert sorted(took)[2] < 0.5
    assert line.bodies.statistics().cancelled == 5


@pytest.mark.parametrize("roomy", [True, False], ids=["room", "no-room"])
@pytest.mark.parametrize("name", ["go", *NGINX])
async def test_client_that_waits_stays(
    name: str, *, roomy: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also while others are refused, for which it is probed where there is no room."""
    monkeypatch.setattr("lifecycle_asgi.disconnects._SECONDS_TO_NEXT_PROBE", 0.0)
    line = Line(roomy=roomy)
    async with (
        asyncio.timeout(120),
        serving(line.app) as server,
        front(name, server, tmp_path) as port,
        asking(name, port, tmp_path) as (answer, _),
        httpx.AsyncClient() as other,
    ):
        await line.until(1)
        for _ in range(3):
            url = f"http://127.0.0.1:{server}/"
            refused = await other.post(url, content=bytes(MIB))
            assert refused.status_code in (429, 503)
            await asyncio.sleep(0.2)
        assert line.bodies.statistics().waiting == 1
        assert line.bodies.statistics().cancelled == 0
        line.held.release()
        assert await answer == f"200 {BODY}"
