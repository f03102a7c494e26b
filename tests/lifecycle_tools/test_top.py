"""`lifecycle top`: the live view of a real server, in a terminal that textual plays."""

from __future__ import annotations

import asyncio
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest

pytest.importorskip("textual")

from asgi_kit import serving
from certificates import certificate
from live_kit import CANARY, asked, live_server
from serve_kit import served
from textual.widgets import DataTable, Static

from lifecycle_asgi import LifecycleMiddleware, LiveView
from lifecycle_tools.top import NoLiveView, Top, Viewer

pytestmark = pytest.mark.asyncio


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    """A server process with planted faults."""
    with live_server() as port:
        yield port


def text_of(app: Top, name: str) -> str:
    """What a part of the screen says."""
    part = app.query_one(f"#{name}")
    if isinstance(part, DataTable):
        rows = (part.get_row(key) for key in part.rows)
        return "\n".join(" | ".join(map(str, cells)) for cells in rows)
    assert isinstance(part, Static)
    return str(part.render())


async def until(pilot: Any, reached: Callable[[], Any]) -> Any:
    """What *reached* returns, once it is true."""
    async with asyncio.timeout(120):
        while not (found := reached()):
            await pilot.pause(0.1)
        return found


async def test_shows_and_cancels_requests(port: int) -> None:
    """Requests, gates, clients and warnings are shown; `w` says why, and `c` cancels."""
    app = Top(Viewer(f"127.0.0.1:{port}"))
    async with app.run_test(size=(120, 40)) as pilot:
        with asked(port, "/held") as connection:
            await until(pilot, lambda: "since it began" in text_of(app, "warnings"))
            row = text_of(app, "requests")
            assert re.search(r"POST /held \| 127.0.0.1 \| streaming", row), row
            assert "5.0 MiB" in row
            assert "5.0 MiB of 64.0 MiB" in text_of(app, "gates")
            assert "127.0.0.1 | 1 | 5.0 MiB" in text_of(app, "clients")
            assert "engine serving, incarnation 3, 2 restarts" in text_of(
                app, "summary"
            )
            await pilot.press("w")
            holders = app.query_one("#holders")
            await until(pilot, lambda: holders.display)
            assert "held:" in text_of(app, "holders")  # the frame, and its line
            await pilot.press("escape")
            assert not holders.display
            assert CANARY not in app.export_screenshot()
            await pilot.press("c")
            await until(pilot, lambda: not text_of(app, "requests"))
            connection.settimeout(60)
            while connection.recv(2**16):
                pass  # the answer was cut
        await until(pilot, lambda: "no warnings" in text_of(app, "warnings"))
        await pilot.press("c")  # where there is no request, nothing happens


async def test_shows_no_control_characters() -> None:
    """A path reaches no terminal as a command: no title, no colour, no turned line."""

    async def wait(_scope: Any, receive: Any, _send: Any) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    async with serving(LiveView(wait), lifespan="off") as port, asyncio.timeout(60):
        with asked(port, "/a%1b]0;pwned%07%e2%80%ae%c2%9b2J"):
            rows: list[Any] = []
            while not rows:
                rows = (await first(Viewer(f"127.0.0.1:{port}")))["requests"]
    assert rows[0]["what"] == "POST /a\ufffd]0;pwned\ufffd\ufffd\ufffd2J"


async def test_keeps_cursor_where_requests_end(port: int) -> None:
    """The cursor stays on its request, whatever becomes of those above it."""
    app = Top(Viewer(f"http://127.0.0.1:{port}"))
    async with app.run_test(size=(120, 40)) as pilot:
        with asked(port, "/slow") as above, asked(port, "/held"):
            table: Any = app.query_one("#requests")
            await until(pilot, lambda: table.row_count == 2)
            rows = text_of(app, "requests").splitlines()
            place = next(at for at, row in enumerate(rows) if "/held" in row)
            await pilot.press(*["down"] * place)
            chosen = app.selected
            above.close()
            await until(pilot, lambda: table.row_count == 1)
            assert app.selected == chosen


async def test_says_where_there_is_no_view(unused_tcp_port: int) -> None:
    """An address without a server is named, and tried again."""
    app = Top(Viewer(f"127.0.0.1:{unused_tcp_port}"))
    async with app.run_test() as pilot:
        await until(pilot, lambda: "does not answer" in text_of(app, "summary"))


async def test_names_what_to_wrap(port: int) -> None:
    """The error about a server without a live view says what to wrap."""
    viewer = Viewer(f"http://127.0.0.1:{port}/elsewhere")
    with pytest.raises(NoLiveView, match="LiveView"):
        await viewer.read(lambda event: None)
    await viewer.aclose()


async def first(viewer: Viewer) -> dict[str, Any]:
    """The first event that *viewer* shows."""
    found: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
    reading: asyncio.Future[Any] = asyncio.ensure_future(viewer.read(found.set_result))
    try:
        async with asyncio.timeout(60):
            await asyncio.wait({reading, found}, return_when="FIRST_COMPLETED")
        return found.result() if found.done() else reading.result() or {}
    finally:
        reading.cancel()
        await asyncio.wait([reading])
        await viewer.aclose()


async def test_reads_a_socket_with_a_key(tmp_path: Path) -> None:
    """The view of `lifecycle serve`, where it is not open to all of the machine."""
    socket = f"unix:{tmp_path / 'operator'}"
    async with served("--admin-listen", socket, "--admin-key", "mine") as server:
        assert server.admin == socket
        assert (await first(Viewer(socket, key="mine")))["engine"]["incarnation"] == 1
        with pytest.raises(
            NoLiveView, match=f"{socket} asks for another key.*--admin-key"
        ):
            await first(Viewer(socket, key="other"))
        assert await server.exit(signal.SIGTERM) == 0


@pytest.mark.parametrize("key", ["secret", "gehéim:ÿ", "日本 鍵"])
async def test_lists_and_cancels_with_a_key(key: str) -> None:
    """At a view that asks for one; a key may have any letters."""

    async def wait(_scope: Any, receive: Any, _send: Any) -> None:
        await receive()
        await anyio.sleep_forever()

    view = LiveView(LifecycleMiddleware(wait), keys=["other", key], cancel=True)
    async with serving(view, lifespan="off") as port, asyncio.timeout(60):
        with pytest.raises(NoLiveView, match="asks for a key.*--admin-key"):
            await first(Viewer(f"127.0.0.1:{port}"))
        app = Top(Viewer(f"127.0.0.1:{port}", key=key))
        async with app.run_test(size=(120, 40)) as pilot:
            with asked(port, "/mine"):
                await until(pilot, lambda: "POST /mine" in text_of(app, "requests"))
                await pilot.press("c")
                await until(pilot, lambda: not text_of(app, "requests"))


async def test_trusts_a_named_authority(tmp_path: Path) -> None:
    """A view over HTTPS is read with the certificate that is given, and no other."""
    both = certificate(tmp_path, "127.0.0.1")
    nothing: Any = None  # is asked for the view alone
    app = LiveView(nothing)
    async with serving(app, lifespan="off", ssl_certfile=both) as port:
        url = f"https://127.0.0.1:{port}"
        assert (await first(Viewer(url, cacert=both)))["total"] == 0
        with pytest.raises(NoLiveView, match="does not answer"):
            await first(Viewer(url))


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a fresh interpreter."""
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


async def test_is_a_subcommand() -> None:
    """The command has it, and imports it only when it runs."""
    done = run("-c", "import lifecycle_tools; lifecycle_tools.main()", "top", "--help")
    assert done.returncode == 0, done.stderr
    assert "Address of the live view" in done.stdout
    script = "import sys, lifecycle_tools; assert 'textual' not in sys.modules"
    assert run("-c", script).returncode == 0


@pytest.mark.parametrize("missing", ["textual", "httpx2"])
async def test_names_extra_that_is_missing(missing: str) -> None:
    """Without its extra, the command says what to install."""
    script = f"import sys; sys.modules[{missing!r}] = None; import lifecycle_tools.top"
    last = run("-c", script).stderr.splitlines()[-1]
    assert f'needs {missing}; pip install "anyio-lifecycle[tools]"' in last
