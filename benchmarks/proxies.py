"""What one streamed SSE event costs in a proxy: processor time of all its processes.

    python benchmarks/proxies.py [runs]

nginx, `lifecycle proxy`, a plain proxy of Starlette and httpx, and none pass the same
streams on in turns.
"""

import asyncio
import os
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import psutil
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import StreamingResponse

STREAMS, EVENTS, PAUSE = 8, 300, 0.01
EVENT = b'data: {"choices": [{"index": 0, "delta": {"content": " token"}}]}\n\n'
HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
NGINX = """daemon off; master_process off; pid %(d)s/pid; error_log %(d)s/log;
events {} http { access_log off; client_body_temp_path %(d)s/a; proxy_temp_path %(d)s/b;
fastcgi_temp_path %(d)s/c; scgi_temp_path %(d)s/d; uwsgi_temp_path %(d)s/e;
server { listen 127.0.0.1:%(port)d; location / { proxy_pass %(url)s;
proxy_http_version 1.1; proxy_buffering off; } } }"""


def plain() -> Starlette:
    """Return the proxy that one would write by hand."""
    client, app = httpx.AsyncClient(base_url=os.environ["UPSTREAM"]), Starlette()

    async def forward(request: Request) -> StreamingResponse:
        asked = client.build_request(request.method, request.url.path)
        answer = await client.send(asked, stream=True)

        async def body() -> AsyncIterator[bytes]:
            async for piece in answer.aiter_raw():
                yield piece
            await answer.aclose()

        return StreamingResponse(body(), media_type="text/event-stream")

    app.add_route("/", forward)
    return app


async def source(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Send one stream, each event in a chunk of its own."""
    writer.write(HEAD)
    for _number in range(EVENTS):
        await asyncio.sleep(PAUSE)
        writer.write(b"%x\r\n%b\r\n" % (len(EVENT), EVENT))
    writer.write(b"0\r\n\r\n")
    writer.close()


async def ask(port: int) -> None:
    """Read one stream to its end."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET / HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n")
    assert (await reader.read()).count(EVENT) == EVENTS
    writer.close()


async def cost(pid: int, port: int) -> float:
    """Return microseconds of a process and its children for an event."""
    spent = [0.0, 0.0]
    for end in (0, 1):
        main = [psutil.Process(pid)] if pid else []
        for each in [*main, *(child for one in main for child in one.children(True))]:
            spent[end] += sum(each.cpu_times()[:2])
        if end == 0:
            await asyncio.gather(*(ask(port) for _ in range(STREAMS)))
    return 1e6 * (spent[1] - spent[0]) / (STREAMS * EVENTS)


async def measure(ports: dict[str, int], pids: dict[str, int], runs: int) -> None:
    """Measure all in turns, after one to get warm, and print the figures."""
    await asyncio.start_server(source, "127.0.0.1", ports["none"])
    await asyncio.sleep(5)  # all have started
    for port in ports.values():
        await ask(port)
    turns = [{n: await cost(pids[n], ports[n]) for n in ports} for _ in range(runs)]
    for name in ports:
        seen = [turn[name] for turn in turns]
        spread = f"{min(seen):.1f} - {max(seen):.1f}"
        print(f"{name:10}{statistics.median(seen):7.1f} us an event, {spread}")
    for basis, goal in (("nginx", 3.0), ("starlette", 0.5)):
        ratio = statistics.median(turn["lifecycle"] / turn[basis] for turn in turns)
        print(f"lifecycle / {basis}: {ratio:.2f}, goal: at most {goal:g}")


if __name__ == "__main__":
    ports, folder = {}, tempfile.mkdtemp()
    for name in ("none", "nginx", "lifecycle", "starlette"):
        with socket.create_server(("127.0.0.1", 0)) as listener:
            ports[name] = listener.getsockname()[1]
    os.environ["UPSTREAM"] = url = f"http://127.0.0.1:{ports['none']}"
    conf = Path(folder, "nginx.conf")
    conf.write_text(NGINX % {"d": folder, "port": ports["nginx"], "url": url})
    main = "from lifecycle_tools import main; main()"
    own = [sys.executable, "-c", main, "proxy", "--upstream", url, "--port"]
    app = [sys.executable, "-m", "uvicorn", "--factory", "proxies:plain", "--port"]
    commands = [
        ["nginx", "-c", str(conf), "-e", f"{folder}/log"],
        [*own, str(ports["lifecycle"])],
        [*app, str(ports["starlette"]), "--no-access-log", "--log-level", "error"],
    ]
    here = Path(__file__).parent
    running = [subprocess.Popen(each, cwd=here) for each in commands]
    pids = [0, *(each.pid for each in running)]
    try:
        runs = int(sys.argv[1]) if sys.argv[1:] else 3
        asyncio.run(measure(ports, dict(zip(ports, pids, strict=True)), runs))
    finally:
        for process in running:
            process.terminate()
