"""Clients that go, or are forgotten, while a backend still takes its time for them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from lifecycle_zmq import EngineLoop
from lifecycle_zmq.protocol import wire
from lifecycle_zmq.protocol.items import pack_request
from lifecycle_zmq.protocol.wire import Kind
from lifecycle_zmq.server.books import Books, Peer
from lifecycle_zmq.server.delivery import Delivery
from lifecycle_zmq.server.ends import Ends
from lifecycle_zmq.server.loans import Loans
from lifecycle_zmq.server.starts import Starts


class Slow:
    """Decides nothing, and lets go of nothing before it is told to."""

    busy = False

    def __init__(self, script: Callable[[EngineLoop], None] | None = None) -> None:
        self.closing = True
        self._ended: set[str] = set()
        self._script = script

    def start(self, key: str, request: Any, tensors: Any) -> None:
        """Take it."""

    def started(self, key: str) -> bool:
        """Whether it is accepted: once nothing is slow."""
        return not self.closing

    def end(self, key: str) -> None:
        """Forget it, later."""
        self._ended.add(key)

    def ending(self, key: str) -> bool:
        """Whether something of it runs."""
        return self.closing and key in self._ended

    def cancel(self, key: str) -> None:
        """Let it be."""

    def step(self) -> list[Any]:
        """Produce nothing."""
        return []

    def status(self) -> dict[str, Any]:
        """Count nothing."""
        return {}

    def drive(self, loop: EngineLoop, transport: Any, pulse: Any) -> None:
        """Run the script instead of an event loop."""
        assert self._script is not None
        self._script(loop)
        loop.stop()


class Desk:
    """The parts of a loop, whose one client is found gone when it is told anything."""

    def __init__(self) -> None:
        self.backend = Slow()
        self.books = Books()
        self.peer = self.books.peers[b"client"] = Peer(b"client")
        delivery = Delivery(self.books, self.backend, self._flush, hold=64, stall=1)
        self.ends = Ends(self.books, self.backend, delivery, self._flush)
        loans = Loans(None, self.books)
        self.starts = Starts(self.books, self.backend, loans, self.ends, self._flush)
        for generation in (1, 2):
            start = {"key": f"s{generation}", "window": 64, "request": {}}
            self.starts.begin(self.peer, generation, start, {})

    def _flush(self, peer: Peer) -> None:
        self.ends.lose(peer)

    def crowd(self) -> None:
        """Leave no room in what the client is told next."""
        while not self.peer.tick.full:
            self.peer.tick.reject(99, "full", "x" * wire.MAX_TEXT)


def test_forgets_a_client_that_is_found_gone_when_told_of_an_end() -> None:
    """Its other ends were waited for, too; nobody is to be told of them any more."""
    desk = Desk()
    for generation in (1, 2):
        desk.ends.begin(desk.peer, generation)
    desk.crowd()
    desk.backend.closing = False
    desk.ends.settle()
    desk.ends.settle()
    assert not desk.books.peers


def test_forgets_a_client_that_is_found_gone_when_told_of_a_start() -> None:
    """Its other streams go with it, in the middle of looking through them."""
    desk = Desk()
    desk.crowd()
    desk.starts.hurry(desk.peer.streams.values())
    assert not desk.books.peers
    assert not desk.books.streams


class Clients:
    """A transport of any number of clients, in this thread."""

    def __init__(self) -> None:
        self._arrived: deque[tuple[bytes, list[bytes]]] = deque()
        self._sent: dict[bytes, int] = {}
        self.done: dict[bytes, list[int]] = {}

    def say(self, address: bytes, kind: Kind, body: Any, generation: int = 0) -> None:
        """Let a client say something."""
        number = self._sent[address] = self._sent.get(address, -1) + 1
        message = wire.encode(
            kind, body, incarnation=1, sequence=number, generation=generation
        )
        self._arrived.append((address, [message]))

    def poll(self, milliseconds: int | None) -> None:
        """Not with a loop of one's own."""
        raise AssertionError

    def receive(self) -> Any:
        """Bring what was said."""
        return self._arrived.popleft() if self._arrived else None

    def send(self, address: bytes, head: bytes) -> bool:
        """Note the ends that a client is told of."""
        message = wire.decode([head], accept=wire.FROM_ENGINE)
        self.done.setdefault(address, []).extend(message.body.get("done", ()))
        return True


def test_keeps_a_client_who_waits_for_an_end_where_there_are_too_many() -> None:
    """Who has no stream may be forgotten for another; not who would wait for ever."""
    clients = Clients()
    control = {"start": [], "cancel": [], "grant": [], "end": []}

    def script(loop: EngineLoop) -> None:
        start = [1, "a", 64, pack_request({})]
        clients.say(b"first", Kind.CONTROL, {**control, "start": [start]})
        clients.say(b"first", Kind.CONTROL, {**control, "end": [1]})
        loop.turn()
        for number in range(65):
            clients.say(b"%d" % number, Kind.STATUS, {"ask": 1})
            loop.turn()
        assert clients.done[b"first"] == []
        backend.closing = False
        loop.turn()

    backend = Slow(script)
    EngineLoop(backend, incarnation=1).run(clients)
    assert clients.done[b"first"] == [1]
