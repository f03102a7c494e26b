"""The captioning server of the documentation, before and after it is made safe."""

from __future__ import annotations

import difflib
import importlib.util
import io
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import anyio
import httpx
import pytest
from ports import free_port

from lifecycle_asgi import Admission
from lifecycle_asgi.testing import request

pytest.importorskip("fastapi")
pytest.importorskip("python_multipart")
Image = pytest.importorskip("PIL.Image")
CAPTION = Path(__file__).resolve().parents[2] / "examples" / "caption"
MIB = 2**20
BUDGET = 512 * MIB  # as in the file


def module_of(name: str) -> ModuleType:
    """The application of one of the two files, loaded anew."""
    spec = importlib.util.spec_from_file_location(f"caption_{name}", CAPTION / name)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def admission_in(app: Any) -> Admission:
    """The `Admission` among the middlewares of an application that has served."""
    layer = app.middleware_stack
    while not isinstance(layer, Admission):
        layer = layer.app
    return layer


def test_changes_five_lines() -> None:
    """Three lines are added, one is moved, and one is another."""
    texts = [(CAPTION / name).read_text() for name in ("before.py", "after.py")]
    before, after = (text.partition('"""\n')[2].splitlines() for text in texts)
    lines = [line for line in difflib.ndiff(before, after) if line[2:].strip()]
    changed = [line[0] for line in lines if line[:2] in ("+ ", "- ")]
    assert (changed.count("+"), changed.count("-")) == (5, 2), lines


def form(picture: bytes) -> dict[str, Any]:
    """Body and headers of an upload."""
    head = b'content-disposition: form-data; name="image"; filename="i.png"'
    return {
        "body": b"--b\r\n" + head + b"\r\n\r\n" + picture + b"\r\n--b--\r\n",
        "headers": {"content-type": "multipart/form-data; boundary=b"},
    }


def encode(image: Any, kind: str) -> bytes:
    """The file of an image."""
    file = io.BytesIO()
    image.save(file, kind)
    return file.getvalue()


@pytest.mark.anyio
async def test_refuses_and_stops_captions(anyio_backend_name: str) -> None:
    """A picture that never fits is 413, and a client that leaves ends its caption."""
    module = module_of("after.py")
    for side, status in ((6000, 413), (20, 200)):
        upload = form(encode(Image.new("1", (side, side)), "PNG"))
        answer = await request(
            module.app, "POST", "/caption", **upload, leave_after_items=2
        )
        assert answer.status == status
        if status == 413:
            assert "pixels" in answer.body.decode()
    assert answer.items == [b"data: A\n\n", b"data: picture\n\n"]
    assert module.live == {"captions": 0}
    lanes = admission_in(module.app).statistics().values()
    assert [lane.bytes_in_use for lane in lanes] == [0, 0, 0]


# The promise of the guide: memory stays within the budget ----------------------------


def memory(pid: int, field: str) -> int:
    """``VmRSS`` or ``VmHWM``, its peak, of a process, in bytes."""
    status = Path(f"/proc/{pid}/status").read_text()
    found = re.search(rf"^{field}:\s+(\d+) kB", status, re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024


@contextmanager
def uvicorn(folder: Path, port: int) -> Iterator[int]:
    """Run ``after:app`` of a folder, and return the id of its process."""
    options = ("--port", str(port), "--log-level", "critical")
    command = [sys.executable, "-m", "uvicorn", "after:app", *options]
    with subprocess.Popen(command, cwd=folder) as process:
        try:
            yield process.pid
        finally:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()


class Clients:
    """Clients that send a photo of twelve megapixels each.

    Args:
        port: Of the server.
        stay: All keep their captions until each has one.
    """

    def __init__(self, port: int, *, stay: bool) -> None:
        self._url = f"http://127.0.0.1:{port}/caption"
        self._stay = stay
        self._begun = anyio.Event()
        self.statuses: list[int] = []

    @asynccontextmanager
    async def caption(self, picture: bytes) -> AsyncIterator[httpx.Response]:
        """Upload a picture, with the response as it begins."""
        upload = form(picture)
        limits = httpx.Timeout(120.0)
        async with (
            httpx.AsyncClient(timeout=limits) as client,
            client.stream(
                "POST", self._url, content=upload["body"], headers=upload["headers"]
            ) as response,
        ):
            yield response

    async def warm_up(self) -> None:
        """Have the server import what it needs; wait until it is there."""
        small = encode(Image.new("RGB", (20, 20)), "PNG")
        with anyio.fail_after(60):
            while True:
                try:
                    async with self.caption(small) as response:
                        assert response.status_code == 200
                        return
                except httpx.ConnectError:
                    await anyio.sleep(0.05)

    async def one(self, photo: bytes, count: int) -> None:
        """Read five words of a caption, and leave."""
        async with self.caption(photo) as response:
            lines = response.aiter_lines()
            if response.status_code == 200:
                for _ in range(5):
                    await anext(lines)
            self.statuses.append(response.status_code)
            if len(self.statuses) == count:
                self._begun.set()
            if self._stay:
                await self._begun.wait()

    async def run(self, count: int) -> None:
        """Send photos, all at once."""
        noise = Image.effect_noise((4000, 3000), 50).convert("RGB")
        photo = encode(noise, "JPEG")
        with anyio.fail_after(240):
            async with anyio.create_task_group() as tasks:
                for _ in range(count):
                    tasks.start_soon(self.one, photo, count)


@pytest.mark.asyncio
@pytest.mark.thorough
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="Linux tells")
@pytest.mark.parametrize("release", ["end", "hand_off"])
async def test_keeps_memory_within_the_budget(release: str, tmp_path: Path) -> None:
    """With bytes that are released by the first words, it grows beyond."""
    text = (CAPTION / "after.py").read_text()
    changed = text.replace('release="end"', f'release="{release}"')
    (tmp_path / "after.py").write_text(changed)
    assert f"bytes={BUDGET // MIB} * 2**20" in text
    port = free_port()
    with uvicorn(tmp_path, port) as pid:
        clients = Clients(port, stay=release != "end")
        await clients.warm_up()
        base = memory(pid, "VmRSS")
        await clients.run(10)
        grown = memory(pid, "VmHWM") - base
        # The allocator gives back what it kept, but for the top of each arena.
        with anyio.fail_after(60):
            while release == "end" and memory(pid, "VmRSS") > base + 48 * MIB:
                await anyio.sleep(0.1)
    assert 200 in clients.statuses
    assert set(clients.statuses) <= {200, 429, 503}
    if release == "end":
        assert 0.2 * BUDGET < grown <= 1.15 * BUDGET
    else:
        assert clients.statuses == [200] * 10
        assert grown > 1.15 * BUDGET
