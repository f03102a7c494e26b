"""What `serve.run` does to its process: settings, the event loop, and the heap.

What is measured of the loop is processor time of its own thread between two looks at its
sockets, so that other processes on the machine change nothing.
"""

from __future__ import annotations

import asyncio
import gc
import json
import platform
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import uvicorn
from http_kit import ENV, answer_to, png, running, user
from rough_clients import PATHS, request_of

from lifecycle import Gate
from lifecycle_engine import AppSettings, http_protocol
from lifecycle_engine.server.run import DrainingServer, frozen_heap

SCRIPT = """
import gc, json, os, signal, sys

def now():
    handlers = [str(signal.getsignal(each)) for each in (signal.SIGINT, signal.SIGTERM)]
    return [sys.getswitchinterval(), gc.get_freeze_count() > 10_000, handlers]

told = [now()]
from lifecycle import Gate
from lifecycle_engine.server.app import create_app
from lifecycle_engine.sim import SimProcessor
from lifecycle_engine.server import run as serve
from lifecycle_zmq import ZmqEngine

work = [sys.executable, "-m", "lifecycle_engine.worker", "--runner", "sim"]
app = create_app(ZmqEngine(work), SimProcessor(), gate=Gate(slots=None, name="payloads"))
told.append(now())

def ready(address):
    told.append(now())
    os.kill(os.getpid(), signal.SIGTERM)

serve.run(app, host="127.0.0.1", port=0, announce=ready)
told.append(now())
from PIL import Image
told.append(Image.core.get_blocks_max())
print(json.dumps(told))
"""


def run_script(script: str) -> subprocess.CompletedProcess[bytes]:
    """Run *script* in a process of its own."""
    command = [sys.executable, "-c", script]
    return subprocess.run(
        command, env=ENV, capture_output=True, check=False, timeout=600
    )


def test_changes_its_process_only_while_it_serves() -> None:
    """An application that is made, or was served, leaves all as it was, but memory."""
    done = run_script(SCRIPT)
    assert done.returncode == 0, done.stderr
    before, made, serving, after, blocks = json.loads(done.stdout)
    assert before == made == after
    assert serving[0] < before[0]
    assert serving[1]
    assert serving[2] != before[2]
    assert blocks == AppSettings().threads  # pages that one picture after another gets


def test_a_signal_after_its_end_can_be_ignored() -> None:
    """A second Ctrl+C that comes late does not make a failure of a good end."""
    serve = "port=0, announce=ready, signals_after=signal.SIG_IGN)\n"
    late = "os.kill(os.getpid(), signal.SIGINT)\n"
    script = SCRIPT.replace("port=0, announce=ready)\n", serve + late)
    assert late in script
    done = run_script(script)
    assert (done.returncode, done.stderr) == (0, b"")
    handlers = json.loads(done.stdout)[3][2]
    assert handlers == [str(signal.SIG_IGN)] * 2


INTERRUPTED = """
import os, signal, weakref
from lifecycle_engine import cli

class Thing: pass

def load_config(*_, **__):
    thing = Thing()
    gone = weakref.ref(thing, lambda _: os.kill(os.getpid(), signal.SIGINT))
    del thing
    print("it goes on", flush=True)
    raise SystemExit(3)

cli.load_config = load_config
cli.main(["serve", "--runner", "sim"])
"""


@pytest.mark.parametrize("ignored", [False, True])
def test_a_signal_before_it_serves_is_not_lost(ignored: bool) -> None:
    """Python loses what it raises in a callback, as imports run many of them."""
    how = "SIG_IGN" if ignored else "default_int_handler"
    script = f"import signal; signal.signal(signal.SIGINT, signal.{how})" + INTERRUPTED
    done = run_script(script)
    # Who starts it in the background has it ignore the signal.
    expected = (3, b"it goes on\n") if ignored else (-signal.SIGINT, b"")
    assert (done.returncode, done.stdout) == expected, done.stderr


# The longest time that the loop works without a break --------------------------------

COUNT = 200
# As much as so many requests take on average, with all that they pass through. Without
# turns it is 40 to 100.
MOST = 30


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
    "odd-ids": (PLAIN.replace(b"\r\n", b"\r\nx-request-id: a b\r\n", 1), b"400"),
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
    """However many requests wait, running ones get a turn between two of them (N12)."""
    taken: list[int] = []

    async def scenario(steps: Steps) -> None:
        class Taken(asyncio.Protocol):
            def connection_made(self, transport: Any) -> None:
                taken.append(len(steps.seen))
                transport.abort()

        config = uvicorn.Config(
            echo,
            http=lambda **_: Taken(),  # type: ignore[arg-type]
            ws="none",
            lifespan="off",
        )
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


# Memory that a server process keeps after freeing, measured in its own process --------

# Payloads of all sizes in several threads, each with a small thing that stays.
BURST = """
import os, sys, threading
from lifecycle_engine.server.run import configure_malloc

if "before" not in sys.argv:
    assert configure_malloc()

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

kept, start = [], resident()

def burst():
    # The first to be freed tells glibc that such blocks belong on the heap.
    del (first := [bytearray(30 << 20)])[:]
    large = []
    for _ in range(5):
        large.append(bytearray(b"1") * (12 << 20))
        kept.append(bytearray(b"1") * 1000)

threads = [threading.Thread(target=burst) for _ in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print((resident() - start) >> 20)
"""
# As many pieces as a picture is decoded in, in four threads, one after the other.
PIECES = """
import os, sys, threading
from lifecycle_engine.server.run import configure_malloc

if "before" not in sys.argv:
    assert configure_malloc()

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

start, turn, done = resident(), threading.Lock(), threading.Barrier(5)

def decode():
    with turn:
        for _ in range(2):
            pieces = [b"1" * 65536 for _ in range(200)]
            del pieces
    done.wait(20)  # a thread that ends leaves its heap to the next one

for _ in range(4):
    threading.Thread(target=decode).start()
done.wait(20)
print((resident() - start) >> 20)
"""
# Pictures of 12 MiB one after another in each of two threads, at the same time.
DECODES = """
import io, sys, threading
from PIL import Image
from lifecycle_engine.server.run import configure_malloc, reuse_image_memory

configure_malloc()
if "before" not in sys.argv:
    reuse_image_memory(2)

file = io.BytesIO()
Image.new("RGB", (2048, 1536)).save(file, "PNG")
both = threading.Barrier(2)

def decode():
    for _ in range(5):
        picture = Image.open(io.BytesIO(file.getvalue()))
        picture.load()
        both.wait(20)  # there are two of them now
        del picture
        both.wait(20)

threads = [threading.Thread(target=decode) for _ in range(2)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(Image.core.get_stats()["allocated_blocks"])
"""


def left(script: str, *argv: str) -> int:
    """Run a script; return the number that it prints, for example MiB left."""
    done = subprocess.run(
        [sys.executable, "-c", script, *argv],
        capture_output=True,
        text=True,
        timeout=600,
        check=True,
    )
    return int(done.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the heap is glibc's")
def test_large_blocks_are_returned() -> None:
    """After a burst little memory is left."""
    assert left(BURST) < 24


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the heap is glibc's")
def test_all_threads_share_one_heap() -> None:
    """Freed memory is not kept separately for each thread."""
    assert left(PIECES) < 20


def test_decoding_reuses_the_blocks_of_earlier_pictures() -> None:
    """Pillow allocates one block for each decoding thread."""
    assert left(DECODES) == 2


def test_collector_skips_loaded_modules_while_a_server_runs() -> None:
    """Loaded objects are frozen while it runs, and unfrozen afterwards."""
    before = gc.get_freeze_count()
    with frozen_heap():
        assert gc.get_freeze_count() > 10_000
        assert not any(each is gc.__dict__ for each in gc.get_objects())
    assert gc.get_freeze_count() <= before
