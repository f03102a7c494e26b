"""Clients whose response has begun with a probe: real ones, and those that left."""

from __future__ import annotations

import asyncio
import http.client
import io
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import anyio
import anyio.to_thread
import go_client
import httpx
import pytest
from asgi_kit import serving

from lifecycle import Gate
from lifecycle_asgi import Admission, LifecycleMiddleware, request_of

MIB = 2**20
BODY = 4 * MIB
HTTP = pytest.mark.parametrize("http_parser", ["h11", "httptools"])
NODE = """
const http = require("http"), body = Buffer.alloc(+process.argv[2], "x");
const url = process.argv[3], way = process.argv[4];
async function main() {
  if (way === "fetch") {
    const answer = await fetch(url, {method: "POST", body});
    return answer.status + " " + await answer.text();
  }
  return new Promise((resolve, reject) => {
    const asked = http.request(url, {method: "POST"}, (answer) => {
      let text = "";
      answer.on("data", (part) => text += part);
      answer.on("end", () => resolve(answer.statusCode + " " + text));
    });
    asked.on("error", reject);
    asked.end(body);
  });
}
main().then((said) => process.stdout.write(said));
"""


class Waits:
    """An application that reads nothing until its gate opens; ``/probe`` probes."""

    def __init__(self) -> None:
        self.gate = Gate(slots=1, name="here")
        self.lease = self.gate.try_admit()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer with the length of the body, or with how many were probed."""
        if scope["path"] == "/probe":
            said = request_of(scope).probe_waiting()
        else:
            with await self.gate.admit():
                said, more = 0, True
                while more:
                    message = await receive()
                    said += len(message.get("body", b""))
                    more = message.get("more_body", False)
        body = b"%d" % said
        headers = [(b"content-length", b"%d" % len(body))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})


async def run(*argv: str, given: bytes = b"") -> str:
    """What a command says."""
    process = await asyncio.create_subprocess_exec(
        *argv, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    said, _ = await process.communicate(given)
    return said.decode()


async def by_curl(url: str) -> str:
    """With the Expect of large bodies, which is its default."""
    argv = ("curl", "-s", "-w", " %{http_code}", "--data-binary", "@-", url)
    body, status = (await run(*argv, given=bytes(BODY))).split()
    return f"{status} {body}"


async def by_node(url: str, way: str, tmp_path: Path) -> str:
    """By ``http`` or ``fetch``."""
    script = tmp_path / "ask.js"
    await anyio.Path(script).write_text(NODE)
    return await run("node", str(script), str(BODY), url, way)


async def by_go(url: str, tmp_path: Path) -> str:
    """By net/http, which reads while it still sends."""
    program = await go_client.build(tmp_path)
    async with go_client.asking(program, url, BODY) as (answer, _):
        return await answer


async def by_httpx(url: str) -> str:
    """As the SDKs do."""
    async with httpx.AsyncClient(timeout=120) as client:
        answer = await client.post(url, content=bytes(BODY))
        return f"{answer.status_code} {answer.text}"


async def by_aiohttp(url: str) -> str:
    """With its own parser."""
    async with (
        aiohttp.ClientSession() as client,
        client.post(url, data=io.BytesIO(bytes(BODY))) as answer,
    ):
        return f"{answer.status} {await answer.text()}"


async def by_http_client(url: str) -> str:
    """The standard library's, which requests and urllib3 use."""

    def ask() -> str:
        address = httpx.URL(url)
        connection = http.client.HTTPConnection(address.host, address.port, timeout=120)
        connection.request("POST", "/", bytes(BODY))
        answer = connection.getresponse()
        said = f"{answer.status} {answer.read().decode()}"
        connection.close()
        return said

    return await anyio.to_thread.run_sync(ask)


CLIENTS: dict[str, Callable[..., Awaitable[str]]] = {
    "curl": by_curl,
    "node": by_node,
    "fetch": by_node,
    "go": by_go,
    "httpx": by_httpx,
    "aiohttp": by_aiohttp,
    "http.client": by_http_client,
}
PROGRAMS = {"curl": "curl", "node": "node", "fetch": "node", "go": "go"}


@HTTP
@pytest.mark.parametrize("name", CLIENTS)
@pytest.mark.asyncio
async def test_client_reads_a_response_that_began_with_probes(
    http_parser: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three bytes of the status line come long before the rest."""
    program = PROGRAMS.get(name)
    if program is not None and shutil.which(program) is None:
        pytest.skip(f"{program} is not installed")
    monkeypatch.setattr("lifecycle_asgi.disconnects._SECONDS_TO_NEXT_PROBE", 0.0)
    app = Waits()
    stack = LifecycleMiddleware(app, room=0)
    more = {
        "node": ("http", tmp_path),
        "fetch": ("fetch", tmp_path),
        "go": (tmp_path,),
    }
    async with (
        asyncio.timeout(120),
        serving(stack, http=http_parser) as port,
        httpx.AsyncClient() as prober,
    ):
        url = f"http://127.0.0.1:{port}/"
        asked = asyncio.create_task(CLIENTS[name](url, *more.get(name, ())))
        while not app.gate.statistics().waiting:
            assert not asked.done(), await asked
            await asyncio.sleep(0.001)
        probed = 0
        while probed < 3:
            probed += int((await prober.get(url + "probe")).text)
        app.lease.release()
        assert await asked == f"200 {BODY}"


@HTTP
@pytest.mark.asyncio
async def test_refusal_by_the_server_goes_on_where_the_probe_ended(
    http_parser: str,
) -> None:
    """uvicorn answers a body that is no HTTP itself, without the application."""
    app = Waits()
    head = b"POST / HTTP/1.1\r\nhost: here\r\ntransfer-encoding: chunked\r\n\r\n"
    parts = (b"%x\r\n" % MIB + bytes(MIB) + b"\r\n") * 4
    async with (
        asyncio.timeout(120),
        serving(LifecycleMiddleware(app, room=0), http=http_parser) as port,
        httpx.AsyncClient() as prober,
    ):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(head + parts + b"no size\r\n")
        while not app.gate.statistics().waiting:
            await asyncio.sleep(0.001)
        while (await prober.get(f"http://127.0.0.1:{port}/probe")).text != "1":
            pass
        app.lease.release()
        assert (await reader.read()).startswith(b"HTTP/1.1 400 ")
        writer.close()


@HTTP
@pytest.mark.asyncio
async def test_reader_of_an_answer_may_finish_sending(http_parser: str) -> None:
    """Its body is not read, so that no server tells its end from a leaving."""
    finished = asyncio.Event()
    parts = 20

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"y", "more_body": True})
        await finished.wait()
        for left in reversed(range(parts)):
            await anyio.wait_all_tasks_blocked()
            body = b"y" * 65536
            part = {"type": "http.response.body", "body": body, "more_body": left > 0}
            await send(part)

    stack = LifecycleMiddleware(app)
    async with asyncio.timeout(120), serving(stack, http=http_parser) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        head = b"POST / HTTP/1.1\r\nhost: here\r\ncontent-length: %d\r\n\r\n"
        writer.write(head % MIB + bytes(MIB))
        await reader.readuntil(b"y")
        writer.write_eof()
        while writer.transport.get_write_buffer_size():
            await asyncio.sleep(0.001)
        finished.set()
        assert (await reader.read()).count(b"y") == parts * 65536
        writer.close()


@HTTP
@pytest.mark.asyncio
async def test_refuses_no_client_for_those_that_left(http_parser: str) -> None:
    """The queue for bodies is full of them, and the kernel has no room for theirs."""
    bodies = Gate(bytes=3 * BODY, order="fair", max_waiting=8)
    app = Waits()
    admission = Admission(
        app, bytes=16 * MIB, gates={"bodies": bodies}, max_body=BODY, environment={}
    )
    head = b"POST / HTTP/1.1\r\nhost: here\r\ncontent-length: %d\r\n\r\n" % BODY
    held = bodies.try_admit(bytes=3 * BODY)
    async with asyncio.timeout(120), serving(admission, http=http_parser) as port:

        async def ask(number: int) -> asyncio.StreamWriter:
            address = (f"127.0.0.{number}", 0)
            _, writer = await asyncio.open_connection(
                "127.0.0.1", port, local_addr=address
            )
            writer.write(head + bytes(BODY))
            return writer

        leavers = [await ask(number) for number in range(2, 10)]
        while bodies.statistics().waiting < 8:
            await asyncio.sleep(0.001)
        for writer in leavers:
            writer.transport.abort()
        stays = await ask(10)
        while bodies.statistics().cancelled < 8:
            await asyncio.sleep(0.001)
        while not bodies.statistics().waiting:
            await asyncio.sleep(0.001)
        assert bodies.statistics().refused == 0
        stays.transport.abort()
        held.release()
    app.lease.release()
