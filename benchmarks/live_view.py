"""What the live view costs a server with 1,000 requests, in processor time.

    python benchmarks/live_view.py

A server process works on that many requests, each with a lease and a payload in a
session; they wait, so that what the process uses is the live view's. Its processor time
is read over the same seconds without a viewer, with one, and with three. The cost of a
request that passes is measured apart, with the view and without it, in turns.
"""

from __future__ import annotations

import argparse
import contextlib
import resource
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import httpx2
import psutil

from lifecycle import Gate, SessionRegistry
from lifecycle_asgi import LifecycleMiddleware, LiveView, request_of

_GATE = Gate(bytes=2**40, name="pictures")
_SESSIONS = SessionRegistry()
_BODY = b"x" * 100


async def _waits(scope: Any, receive: Any, send: Any) -> None:
    """Hold a lease and a payload until the client leaves."""
    if scope["type"] == "lifespan":
        async with _SESSIONS:
            await receive()
            await send({"type": "lifespan.startup.complete"})
            await receive()
        await send({"type": "lifespan.shutdown.complete"})
        return
    request = request_of(scope)
    host, port = scope["client"]
    with _SESSIONS.open(f"{host}:{port}") as session:
        request.attach(session)
        with await _GATE.admit(bytes=2**20), request.phase("prepare"):
            session.box(b"", nbytes=2**20)
            await anyio.sleep_forever()


async def _answers(_scope: Any, _receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": _BODY})


app = LiveView(LifecycleMiddleware(_waits))


@contextlib.contextmanager
def _served() -> Iterator[tuple[int, psutil.Process]]:
    with socket.create_server(("127.0.0.1", 0), backlog=2048) as listener:
        argv = [sys.executable, "-m", "uvicorn", "--fd", str(listener.fileno())]
        argv += ["--log-level", "warning", "live_view:app"]
        process = subprocess.Popen(
            argv, pass_fds=[listener.fileno()], cwd=Path(__file__).parent
        )
        try:
            yield listener.getsockname()[1], psutil.Process(process.pid)
        finally:
            process.kill()
            process.wait()


@contextlib.contextmanager
def _requests(port: int, count: int) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for _ in range(count):
            connection = socket.create_connection(("127.0.0.1", port))
            stack.enter_context(connection)
            head = b"POST /x HTTP/1.1\r\nhost: here\r\ncontent-length: 4\r\n\r\nbody"
            connection.sendall(head)
        url = f"http://127.0.0.1:{port}/_lifecycle/snapshot"
        while httpx2.get(url, timeout=60).json()["phases"].get("preparing") != count:
            time.sleep(0.1)
        yield


def _watch(port: int, stop: threading.Event, seen: list[int]) -> None:
    url = f"http://127.0.0.1:{port}/_lifecycle/events"
    while not stop.is_set():
        with httpx2.stream("GET", url, timeout=60) as answer:
            for line in answer.iter_lines():
                seen.append(len(line))
                if stop.is_set():
                    return


def _measure(process: psutil.Process, port: int, viewers: int, seconds: float) -> float:
    """Return the processor time of *process*, in percent of one core."""
    stop, seen = threading.Event(), list[int]()
    threads = [
        threading.Thread(target=_watch, args=(port, stop, seen)) for _ in range(viewers)
    ]
    for thread in threads:
        thread.start()
    time.sleep(2)
    began, before = time.monotonic(), sum(process.cpu_times()[:2])
    time.sleep(seconds)
    used, took = sum(process.cpu_times()[:2]) - before, time.monotonic() - began
    stop.set()
    for thread in threads:
        thread.join()
    assert not viewers or max(seen) > 1000, "no snapshot arrived"
    return 100 * used / took


async def _per_request(served: Any, count: int) -> float:
    """Return the processor time of one request, in microseconds."""

    async def receive() -> Any:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(_: Any) -> None:
        pass

    began = time.process_time()
    for _ in range(count):
        scope = {"type": "http", "method": "GET", "path": "/", "headers": []}
        await served(scope, receive, send)
    return 1e6 * (time.process_time() - began) / count


def _added(rounds: int, count: int) -> float:
    """Return what the view adds to a request, the median of *rounds*."""
    bare = LifecycleMiddleware(_answers)
    seen = LiveView(bare)
    added = [
        anyio.run(_per_request, seen, count) - anyio.run(_per_request, bare, count)
        for _ in range(rounds)
    ]
    return statistics.median(added)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=20.0)
    options = parser.parse_args()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = options.requests + 200
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))
    with _served() as (port, process), _requests(port, options.requests):
        for viewers in (0, 1, 3):
            percent = _measure(process, port, viewers, options.seconds)
            print(
                f"{options.requests} requests, {viewers} viewers: "
                f"{percent:.2f} % of a core",
                flush=True,
            )
    print(f"per request that passes: {_added(7, 4000):.1f} us more")


if __name__ == "__main__":
    main()
