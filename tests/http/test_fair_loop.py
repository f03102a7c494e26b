"""How long the server's event loop works at a stretch, whoever asks for what.

What is measured is processor time of the loop's own thread between two looks at its
sockets, so that other processes on the machine change nothing.
"""

from __future__ import annotations

import asyncio
import gc
import json
import selectors
import socket
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import uvicorn
from http_kit import answer_to, png, running, user
from rough_clients import PATHS, request_of

from lifecycle import Gate
from lifecycle_engine.app import AppSettings
from lifecycle_engine.http.connections import http_protocol
from lifecycle_engine.http.serve import DrainingServer

COUNT = 200
# As much as so many requests take on average, with all that they pass through. Without
# turns it is 40 to 100.
MOST = 20


class Steps(selectors.DefaultSelector):  # type: ignore[valid-type, misc]
    """A selector that notes how long its loop worked since it last looked."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[float] = []
        self._since: float | None = None

    def select(self, timeout: float | None = None) -> Any:
        """Look, and note the step before."""
        if self._since is not None:
            self.seen.append(time.thread_time() - self._since)
        found = super().select(timeout)
        self._since = time.thread_time()
        return found


def steps_of(scenario: Callable[[Steps], Awaitable[None]]) -> list[float]:
    """Run *scenario* on a loop of its own; returns what it has left in the selector."""
    steps = Steps()

    def loop() -> asyncio.AbstractEventLoop:
        return asyncio.SelectorEventLoop(steps)

    gc.collect()
    gc.disable()  # its pauses are told of elsewhere
    try:
        with asyncio.Runner(loop_factory=loop) as runner:
            runner.run(asyncio.wait_for(scenario(steps), 60))
    finally:
        gc.enable()
    return steps.seen


def all_at_once(port: int, whole: bytes, count: int) -> list[bytes]:
    """Send the same from many connections that are there already; in a thread."""
    peers = [socket.create_connection(("127.0.0.1", port)) for _ in range(count)]
    try:
        for peer in peers:
            peer.settimeout(30)
        time.sleep(0.3)
        for peer in peers:
            peer.sendall(whole)
        return [peer.recv(12) for peer in peers]
    finally:
        for peer in peers:
            peer.close()


def asked(*content: str | bytes) -> bytes:
    """A body."""
    document = {"model": "sim", "max_tokens": 1, "messages": user(*content)}
    return json.dumps(document).encode()


PLAIN = request_of(PATHS[0], asked("go"))
KINDS = {
    "odd-ids": (PLAIN.replace(b"host: here", b"x-request-id: a b"), b"400"),
    "too-large": (request_of(PATHS[0], b"")[:-5] + b"999999999\r\n\r\n", b"413"),
    "deep": (request_of(PATHS[0], b"[" * 3000), b"400"),
    "deep-and-long": (request_of(PATHS[0], b"[" * 30_000), b"400"),
    "many-values": (request_of(PATHS[0], b"[" + b"1," * 1500 + b"1]"), b"400"),
    "bombs": (request_of(PATHS[0], asked(png(7000, 7000))), b"413"),
    "good": (PLAIN, b"200"),
    "full": (PLAIN, b"503"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_works_in_short_steps_whatever_comes_at_once(kind: str) -> None:
    """Of two hundred requests at once no step of the loop is more than a few (N12)."""
    whole, status = KINDS[kind]
    whole = whole.replace(b"connection: close\r\n", b"")

    async def scenario(steps: Steps) -> None:
        settings = AppSettings(model="sim")
        limits = {"loop": "asyncio", "http": http_protocol(), "settings": settings}
        gate = Gate(slots=COUNT, max_waiting=0, name="in_flight")
        async with running(in_flight=gate, **limits) as server:
            await answer_to(server.port, asked("go", png(32, 32)))  # all is imported
            steps.seen.clear()
            full = gate.try_admit(slots=COUNT) if kind == "full" else None
            ask = partial(all_at_once, server.port, whole, COUNT)
            answers = await asyncio.to_thread(ask)
            if full is not None:
                full.release()
            assert {answer[9:] for answer in answers} == {status}
            # One may have had a page fault, or the machine's own work, in it.
            longest, each = sorted(steps.seen)[-2], sum(steps.seen) / COUNT
            assert longest < MOST * each

    steps_of(scenario)


def test_takes_connections_one_by_one() -> None:
    """However many wait, whoever is there has its turn between two of them (N12)."""
    taken: list[int] = []

    async def scenario(steps: Steps) -> None:
        class Taken(asyncio.Protocol):
            def connection_made(self, transport: Any) -> None:
                taken.append(len(steps.seen))
                transport.abort()

        config = uvicorn.Config(echo, http=lambda **_: Taken(), lifespan="off")  # type: ignore[arg-type]
        engine = SimpleNamespace(wait_ready=asyncio.Event().wait)
        service: Any = SimpleNamespace(engine=engine)
        server = DrainingServer(config, service, drain=0)
        config.load()
        server.lifespan = config.lifespan_class(config)
        with socket.create_server(("127.0.0.1", 0), backlog=2048) as listener:
            peers = [socket.socket() for _ in range(COUNT)]
            for peer in peers:
                peer.setblocking(False)
                peer.connect_ex(listener.getsockname())
            await server.startup([listener])
            while len(taken) < COUNT:
                await asyncio.sleep(0)
            for each in [*peers, *server.servers]:
                each.close()

    steps_of(scenario)
    assert max(Counter(taken).values()) <= 2  # of asyncio in 3.12 and later


async def echo(scope: Any, receive: Any, send: Any) -> None:
    """Never called."""
