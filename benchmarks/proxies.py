"""What one streamed SSE event costs in a proxy: processor time of all its processes.

    python benchmarks/proxies.py [runs]

nginx, `lifecycle proxy`, a plain proxy of Starlette and httpx, and none pass the same
streams on in turns.
"""

import asyncio
import os
import socket
import statistics
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import psutil
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import StreamingResponse

NAMES = ("none", "nginx", "lifecycle", "starlette")
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


async def cost(port: int, process: psutil.Process | None) -> float:
    """Return microseconds of a process and its children for an event."""

    def spent() -> float:
        all_ = [process, *process.children(recursive=True)] if process else []
        return sum(sum(each.cpu_times()[:2]) for each in all_)

    before = spent()
    await asyncio.gather(*(ask(port) for _ in range(STREAMS)))
    return 1e6 * (spent() - before) / (STREAMS * EVENTS)


async def measure(ports: list[int], processes: list[psutil.Process | None]) -> None:
    """Measure all in turns, after one to get warm, and print the figures."""
    await asyncio.start_server(source, "127.0.0.1", ports[0])
    await asyncio.sleep(5)  # all have started
    turns = []
    for _ in range(1 + int(sys.argv[1] if sys.argv[1:] else 3)):
        pairs = zip(NAMES, ports, processes, strict=True)
        turns.append({name: await cost(port, seen) for name, port, seen in pairs})
    for name in NAMES:
        found = sorted(turn[name] for turn in turns[1:])
        spread = f"{found[0]:.1f} - {found[-1]:.1f}"
        print(f"{name:10}{statistics.median(found):7.1f} us an event, {spread}")
    for name, goal in (("nginx", 3.0), ("starlette", 0.5)):
        ratio = statistics.median(turn["lifecycle"] / turn[name] for turn in turns[1:])
        print(f"lifecycle / {name}: {ratio:.2f}, goal: at most {goal:g}")


if __name__ == "__main__":
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in NAMES]
    ports = [each.getsockname()[1] for each in listeners]
    for listener in listeners:
        listener.close()
    os.environ["UPSTREAM"] = url = f"http://127.0.0.1:{ports[0]}"
    conf = Path(tempfile.mkdtemp(), "nginx.conf")
    conf.write_text(NGINX % {"d": conf.parent, "port": ports[1], "url": url})
    own = f"-c|from lifecycle_tools import main; main()|proxy|--upstream|{url}|--port"
    app = "-m|uvicorn|--factory|proxies:plain|--no-access-log|--port"
    commands = [["nginx", "-c", str(conf), "-e", f"{conf.parent}/log"]]
    for command, port in ((own, ports[2]), (app, ports[3])):
        commands.append([sys.executable, *command.split("|"), str(port)])
    running = [psutil.Popen(each, cwd=Path(__file__).parent) for each in commands]
    try:
        asyncio.run(measure(ports, [None, *running]))
    finally:
        for process in running:
            process.terminate()
