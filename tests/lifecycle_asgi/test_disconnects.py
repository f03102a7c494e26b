"""Clients that leave while their bodies are not read, and waiters at a gate."""

from __future__ import annotations

import contextlib
import contextvars
import gc
import os
import resource
import socket
import struct
import sys
import time
import weakref
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any, Self

import anyio
import anyio.lowlevel
import anyio.to_thread
import pytest
from asgi_kit import ScriptedServer, http_scope
from descriptors import descriptors_before, open_descriptors

from lifecycle import Gate
from lifecycle_asgi import LifecycleMiddleware, disconnects, middleware
from lifecycle_asgi.disconnects import (
    BegunResponse,
    DisconnectWatcher,
    Watch,
    transport_of,
)

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.skipif(sys.platform != "linux", reason="epoll is of Linux"),
]
MIB = 2**20
BODY = 4 * MIB


class Peers:
    """Both ends of a connection, over TCP.

    Args:
        unread: Bytes that the client sends at once, as far as the kernel takes them.
    """

    def __init__(self, unread: int = BODY) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self.client = socket.create_connection(listener.getsockname())
            self.server, _ = listener.accept()
        self.client.setblocking(False)
        self._left = memoryview(bytes(unread))
        self.gone = anyio.Event()
        self.half_closed = self.closing = self.aborted = False
        self.answers = anyio.Event()
        self.push()

    def push(self) -> bool:
        """Send more; returns whether all was taken."""
        with contextlib.suppress(BlockingIOError):
            while self._left:
                self._left = self._left[self.client.send(self._left) :]
        return not self._left

    def fileno(self) -> int:
        """Of the server's end: the watcher is given this object as a socket."""
        return self.server.fileno()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.server, name)

    def is_closing(self) -> bool:
        """As a transport's."""
        return self.closing or self.server.fileno() < 0

    def abort(self) -> None:
        """As a transport's."""
        self.aborted = True

    def watch(self, watcher: DisconnectWatcher) -> Watch | None:
        """Have *watcher* watch the server's end."""
        return watcher.watch(
            self, self.gone.set, unread=BODY, answers=self.answers.is_set
        )

    async def leave(self, how: str = "close") -> None:
        """Let the client go, once its kernel has all that it wants to send."""
        while not self.push():
            await anyio.sleep(0.001)
        self.close(how)

    def close(self, how: str = "close") -> None:
        """Let the client go, whatever it has sent."""
        if how == "reset":
            linger = struct.pack("ii", 1, 0)
            self.client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        self.client.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.client.close()
        self.server.close()


async def left(count: int) -> None:
    """Wait until *count* files are open."""
    while len(open_descriptors()) != count:
        await anyio.lowlevel.checkpoint()


@contextlib.contextmanager
def no_descriptor_left() -> Iterator[None]:
    """Every new file is refused inside."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    opened = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 512), hard))
    try:
        with contextlib.suppress(OSError):
            while True:
                opened.append(os.open(os.devnull, os.O_RDONLY))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for each in opened:
            os.close(each)


async def test_tells_a_client_with_a_full_buffer_of_the_new_room() -> None:
    """Its kernel has asked for room for a while, and will do so in a second or more."""
    watcher = DisconnectWatcher(64 * MIB)
    for _ in range(3):
        with anyio.fail_after(60), Peers() as peers:
            await anyio.sleep(1.6)
            began = anyio.current_time()
            assert peers.watch(watcher) is not None
            await peers.leave()
            await peers.gone.wait()
            if anyio.current_time() - began < 0.6:
                return
    pytest.fail("heard late, three times")


async def test_waits_for_no_body_where_sockets_have_a_default_timeout() -> None:
    """Some programs set one, which a socket made of a descriptor has as well."""
    before = socket.getdefaulttimeout()
    with Peers(unread=0) as peers:
        try:
            socket.setdefaulttimeout(20)
            began = time.monotonic()
            assert peers.watch(DisconnectWatcher(64 * MIB)) is not None
            assert time.monotonic() - began < 10
        finally:
            socket.setdefaulttimeout(before)


@pytest.mark.parametrize("how", ["close", "reset"])
async def test_tells_when_client_leaves_behind_its_body(how: str) -> None:
    """Of 4 MiB that are not read; a reset and an end."""
    watcher = DisconnectWatcher(64 * MIB)
    before = len(descriptors_before())
    with anyio.fail_after(60), Peers() as peers:
        assert peers.watch(watcher) is not None
        await anyio.wait_all_tasks_blocked()
        assert not peers.gone.is_set()
        assert not peers.aborted
        await peers.leave(how)
        await peers.gone.wait()
        assert peers.aborted
        await left(before + 1)


async def test_tells_of_resets_where_there_is_no_room() -> None:
    """An end behind the body stays in the client's kernel, and is no alarm."""
    watcher = DisconnectWatcher(0)
    with anyio.fail_after(60), Peers() as ends, Peers() as resets:
        watch = ends.watch(watcher)
        assert watch is not None
        assert resets.watch(watcher) is not None
        ends.close()
        resets.close("reset")
        await resets.gone.wait()
        assert not ends.gone.is_set()
        watch.cancel()


async def test_keeps_to_its_room_and_takes_it_back() -> None:
    """Room for one body: the second gets none until the first is done."""
    watcher = DisconnectWatcher(BODY + MIB)
    with anyio.fail_after(60), Peers() as first, Peers() as second:
        held = first.watch(watcher)
        other = second.watch(watcher)
        assert held is not None and other is not None
        assert (held.room >= BODY, other.room) == (True, 0)
        held.cancel()
        other.cancel()
        again = second.watch(watcher)
        assert again is not None
        assert again.room >= BODY
        await second.leave()
        await second.gone.wait()


async def test_server_hears_of_single_bytes_after_the_watch() -> None:
    """Until then, only of all that it waits for, which the kernel acknowledges at once.

    A kernel that delays its acknowledgements takes 40 ms for each, and an end that
    queues behind the body as long.
    """
    watcher = DisconnectWatcher(64 * MIB)
    with anyio.fail_after(60), Peers(unread=10) as peers:
        await anyio.wait_readable(peers.server)
        watch = peers.watch(watcher)
        assert watch is not None
        mark = peers.server.getsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT)
        assert mark >= BODY
        with anyio.move_on_after(0.05) as heard:
            await anyio.wait_readable(peers.server)
        assert heard.cancelled_caught
        with no_descriptor_left():
            watch.cancel()
        await anyio.wait_readable(peers.server)
        assert peers.server.recv(BODY) == bytes(10)


async def test_watch_ends_without_an_error_on_a_closed_descriptor() -> None:
    """Somebody else may close it, whatever its transport says."""
    watcher = DisconnectWatcher(64 * MIB)
    with Peers(unread=10) as peers:
        watch = peers.watch(watcher)
        assert watch is not None
        assert watch.room
        os.close(peers.server.fileno())
        watch.cancel()
        peers.server.detach()
        assert watcher.probe() == 0  # it watches nothing


async def test_half_closed_client_has_not_left() -> None:
    """Where the server answers those, an end is none; a reset is."""
    watcher = DisconnectWatcher(64 * MIB)
    with anyio.fail_after(60), Peers(10) as waits, Peers(10) as other:
        waits.half_closed = True
        assert waits.watch(watcher) is not None
        assert other.watch(watcher) is not None
        waits.client.shutdown(socket.SHUT_WR)
        other.client.shutdown(socket.SHUT_WR)
        await other.gone.wait()
        await anyio.wait_all_tasks_blocked()  # the event loop does not spin
        assert not waits.gone.is_set()
        await waits.leave("reset")
        await waits.gone.wait()


async def test_reader_of_an_answer_has_not_left() -> None:
    """A client finishes sending after the answer to it has begun; a reset is one."""
    watcher = DisconnectWatcher(64 * MIB)
    with anyio.fail_after(60), Peers(10) as reads, Peers(10) as other:
        assert reads.watch(watcher) is not None
        assert other.watch(watcher) is not None
        reads.answers.set()
        reads.client.shutdown(socket.SHUT_WR)
        other.client.shutdown(socket.SHUT_WR)
        await other.gone.wait()
        await anyio.wait_all_tasks_blocked()  # the event loop does not spin
        assert not reads.gone.is_set()
        reads.close("reset")
        await reads.gone.wait()


async def test_aborts_no_connection_that_its_server_closes() -> None:
    """The end of an answer may still have to be sent."""
    watcher = DisconnectWatcher(64 * MIB)
    with anyio.fail_after(60), Peers(10) as peers:
        assert peers.watch(watcher) is not None
        peers.closing = True
        peers.client.shutdown(socket.SHUT_WR)
        await peers.gone.wait()
        assert not peers.aborted


async def test_cancelled_watch_tells_nothing() -> None:
    """And leaves nothing in the event loop."""
    watcher = DisconnectWatcher(64 * MIB)
    before = len(descriptors_before())
    with anyio.fail_after(60), Peers(10) as peers, Peers(10) as other:
        watch = peers.watch(watcher)
        assert watch is not None
        watch.cancel()
        watch.cancel()
        await left(before + 4)
        assert other.watch(watcher) is not None
        await peers.leave()
        await other.leave()
        await other.gone.wait()
        assert not peers.gone.is_set()


async def test_tells_of_a_connection_that_has_a_closed_ones_number() -> None:
    """A server may close a socket that is still watched: its room is free then."""
    watcher = DisconnectWatcher(BODY + MIB)
    with anyio.fail_after(60), Peers(10) as first:
        assert first.watch(watcher) is not None
        number = first.fileno()
        first.server.close()
        with Peers(10) as second:
            os.dup2(second.fileno(), number)
            with socket.socket(fileno=number) as same:
                second.server.close()
                second.server = same
                watch = second.watch(watcher)
                assert watch is not None
                assert watch.room >= BODY
                await second.leave()
                await second.gone.wait()
        assert not first.gone.is_set()


async def test_keeps_nothing_of_a_request_that_is_over() -> None:
    """The event loop has one reader for all, which began with the first of them."""

    class Payload:
        pass

    payload = Payload()
    kept = weakref.ref(payload)
    watcher = DisconnectWatcher(0)
    with anyio.fail_after(60), Peers(10) as first, Peers(10) as other:
        of_request = contextvars.copy_context()
        of_request.run(contextvars.ContextVar[Payload]("payload").set, payload)
        watch = of_request.run(first.watch, watcher)
        assert watch is not None
        assert other.watch(watcher) is not None
        watch.cancel()
        del of_request, payload
        gc.collect()
        assert kept() is None
        await other.leave()
        await other.gone.wait()


async def test_watches_nothing_without_descriptors() -> None:
    """Then all is as without it."""
    watcher = DisconnectWatcher(64 * MIB)
    with anyio.fail_after(60), Peers(10) as peers:
        with no_descriptor_left():
            assert peers.watch(watcher) is None
        assert peers.watch(watcher) is not None
        await peers.leave()
        await peers.gone.wait()


class Written:
    """A transport that keeps what is written."""

    def __init__(self) -> None:
        self.data = b""

    def write(self, data: bytes) -> None:
        """Append *data*."""
        self.data += data


async def test_probes_seldom_and_never_the_whole_status_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each time a client waits twice as long, and the response is whole at its end."""
    now = 0.0
    clock = SimpleNamespace(monotonic=lambda: now)
    monkeypatch.setattr(disconnects, "time", clock)
    written = Written()
    response = BegunResponse(written)
    watcher, sent = DisconnectWatcher(0), []
    with Peers(10) as peers:
        watch = watcher.watch(
            peers, peers.gone.set, unread=BODY, begin=lambda: response
        )
        assert watch is not None
        while now < 1000:
            sent += [now] * watcher.probe()
            now += 0.5
        watch.cancel()
    assert sent == [0.0, 0.5, 1.5, 3.5, 7.5, 15.5, 31.5]
    response.write(b"HTTP/1.1 204 No Content\r\n")
    response.write(b"HTTP/1.1 is also what this body says")
    assert written.data.startswith(b"HTTP/1.1 204 No Content\r\nHTTP/1.1 is")


async def test_probes_no_client_whose_end_arrives() -> None:
    """Where the kernel has room, or little is unread."""
    watcher = DisconnectWatcher(64 * MIB)
    response = BegunResponse(Written())
    with Peers(10) as roomy, Peers(10) as small:
        for peers, unread in ((roomy, BODY), (small, 10)):
            assert watcher.watch(
                peers, peers.gone.set, unread=unread, begin=lambda: response
            )
        assert watcher.probe() == response.sent == 0
        for peers in (roomy, small):
            await peers.leave()
            await peers.gone.wait()


async def test_watches_no_stranger() -> None:
    """Callables of unknown servers lead nowhere, and no other object is watched."""
    server = ScriptedServer(b"x")
    assert transport_of(server.receive, server.send) is None
    watcher = DisconnectWatcher(0)
    assert watcher.watch(object(), lambda: None, unread=1) is None


# An application that waits at a gate


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """An application that has not asked for its body has an hour to do so."""
    monkeypatch.setattr(middleware, "_FIRST_LOOK_SECONDS", 3600.0)


async def serve(app: Any, server: ScriptedServer) -> None:
    """Serve one request of a client that has left."""
    server.gone.set()
    await LifecycleMiddleware(app)(http_scope(), server.receive, server.send)


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("works_first", [False, True])
async def test_waiter_at_a_gate_leaves_with_its_client(*, works_first: bool) -> None:
    """Whether it has come to the gate before its client left, or comes later."""
    gate, server = Gate(slots=1), ScriptedServer(b"x")

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if works_first:
            await anyio.wait_all_tasks_blocked()
        with await gate.admit():
            pytest.fail("was admitted")

    held = gate.try_admit()
    with anyio.fail_after(60):
        await serve(app, server)
    assert gate.statistics().waiting == 0
    held.release()
    assert server.status == 499


@pytest.mark.usefixtures("patient")
async def test_waiter_in_another_task_is_left_alone() -> None:
    """The application's own task may have begun something: it receives the disconnect as before."""
    gate, server = Gate(slots=1), ScriptedServer()
    received: list[Any] = []

    async def wait() -> None:
        with await gate.admit():
            pytest.fail("was admitted")

    async def app(scope: Any, receive: Any, send: Any) -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(wait)
            await anyio.wait_all_tasks_blocked()
            received.extend([await receive(), await receive()])
            tasks.cancel_scope.cancel()

    held = gate.try_admit()
    with anyio.fail_after(60):
        await serve(app, server)
    held.release()
    assert [each["type"] for each in received] == ["http.request", "http.disconnect"]
    assert server.status is None


@pytest.mark.usefixtures("patient")
async def test_takes_leases_of_threads() -> None:
    """A thread of the request asks a gate; no event loop runs there."""
    gate, server = Gate(slots=1), ScriptedServer()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        lease = await anyio.to_thread.run_sync(gate.try_admit)
        lease.release()
        await receive()
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    with anyio.fail_after(60):
        await LifecycleMiddleware(app)(http_scope(), server.receive, server.send)
    assert server.status == 204


# A server that waits for its application to read


def received(body: bytes = b"") -> bytes:
    """A request with *body*."""
    return b"POST / HTTP/1.1\r\nhost: here\r\ncontent-length: %d\r\n\r\n" % len(body)


async def test_hypercorn_keeps_nothing_of_clients_that_left(
    anyio_backend_name: str,
) -> None:
    """Each of its connections waits until somebody reads what has arrived there."""
    serve = pytest.importorskip(f"hypercorn.{anyio_backend_name}").serve
    config = pytest.importorskip("hypercorn.config").Config()
    config.errorlog = None
    gate, stop, body = Gate(slots=1), anyio.Event(), bytes(MIB)
    held = gate.try_admit()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        assert scope["type"] == "http"
        with await gate.admit():
            pytest.fail("was admitted")

    listener = socket.create_server(("127.0.0.1", 0))
    address = listener.getsockname()
    config.bind = [f"fd://{listener.detach()}"]
    stack = LifecycleMiddleware(app)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(
            partial(serve, stack, config, shutdown_trigger=stop.wait, mode="asgi")
        )
        with anyio.fail_after(60):
            async with await anyio.connect_tcp(*address) as first:
                await first.send(received())
                while gate.statistics().waiting != 1:
                    await anyio.sleep(0.001)
            while gate.statistics().waiting:
                await anyio.sleep(0.001)
            await anyio.wait_all_tasks_blocked()
            running, files = len(anyio.get_running_tasks()), descriptors_before()
            for _ in range(3):
                async with await anyio.connect_tcp(*address) as client:
                    await client.send(received(body) + body)
                    while not gate.statistics().waiting:
                        await anyio.sleep(0.001)
                    await anyio.wait_all_tasks_blocked()
            while gate.statistics().waiting or gate.statistics().cancelled < 4:
                await anyio.sleep(0.001)
            while (
                len(anyio.get_running_tasks()) > running
                or not open_descriptors() <= files
            ):
                await anyio.sleep(0.001)
        stop.set()
    held.release()
