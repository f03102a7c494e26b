"""What serves the streams of one backend: one thread, one transport, one loop."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from lifecycle_zmq import _options
from lifecycle_zmq._errors import EncodeError, ProtocolError
from lifecycle_zmq._hand_off import complain
from lifecycle_zmq.memory.arena_view import ArenaView
from lifecycle_zmq.process.pulse import Pulse, Turns
from lifecycle_zmq.protocol import wire
from lifecycle_zmq.protocol.wire import Kind, Message
from lifecycle_zmq.server.backend import Backend, check
from lifecycle_zmq.server.books import Books, Peer
from lifecycle_zmq.server.delivery import Delivery
from lifecycle_zmq.server.ends import Ends
from lifecycle_zmq.server.loans import Loans
from lifecycle_zmq.server.starts import Starts
from lifecycle_zmq.transport import ServerTransport

# Messages taken between two steps, so that a flood of them cannot stop the streams.
_BURST = 1024
_MAX_PEERS = 64
# A backend whose every step raises will not get well; a new process may.
_MAX_FAILED_STEPS = 3


class EngineLoop:
    """Serves one backend to the clients of one transport until told to stop.

    A message that breaks the protocol is counted and dropped, whoever sent it. A client
    that is gone loses its streams at the first message that cannot reach it.

    Args:
        backend: What runs the requests.
        incarnation: The number of this engine, given by whoever started it.
        hold: As for `EngineServer`.
        stall: As for `EngineServer`.
        arena: Where large tensors lie, if the clients have one.

    Raises:
        TypeError: *backend* is no `Backend`, or another option of another kind.
        ValueError: A number is less than 0.
    """

    _transport: ServerTransport
    _pulse: Turns

    def __init__(
        self,
        backend: Backend,
        *,
        incarnation: int,
        hold: int = 128 * 2**10,
        stall: float = 30.0,
        arena: ArenaView | None = None,
    ) -> None:
        check(backend)
        if type(incarnation) is not int:  # it would wait for messages to another one
            kind = type(incarnation).__name__
            raise TypeError(f"incarnation must be an int, not {kind}; give int() of it")
        _options.whole(hold=hold)
        _options.seconds(stall=stall)
        _options.expect(ArenaView | None, "arena must be an ArenaView or None", arena)
        self._backend = backend
        self._incarnation = incarnation
        self._books = Books()
        self._loans = Loans(arena, self._books)
        self._delivery = Delivery(
            self._books, backend, self._flush, hold=hold, stall=stall
        )
        self._ends = Ends(self._books, backend, self._delivery, self._flush)
        self._starts = Starts(
            self._books, backend, self._loans, self._ends, self._flush
        )
        self._running = True
        self._failed_steps = 0

    def run(self, transport: ServerTransport, pulse: Turns | None = None) -> None:
        """Serve until SHUTDOWN, once; blocks the calling thread.

        Args:
            transport: Carries the messages.
            pulse: Where each turn is shown; ``None`` shows nothing.
        """
        self._transport = transport
        self._pulse = pulse or Pulse(None)
        drive = getattr(self._backend, "drive", None)
        try:
            if drive is not None:  # it has an event loop, in which it calls `turn`
                drive(self, transport, self._pulse)
                if self._running:
                    raise RuntimeError("the event loop ended before SHUTDOWN")
            while self._running:
                self._sleep()
                self.turn()
        finally:
            # They refer to this: only a collection would find the backend, and all
            # that was handed over to it.
            del self._delivery, self._starts, self._ends

    def stop(self) -> None:
        """Let `run` return at its next turn; any thread may call this."""
        self._running = False

    def _sleep(self) -> None:
        idle = not self._backend.busy
        self._pulse.turn(idle=idle)
        if idle:
            patience = self.patience()
            limit = None if patience is None else max(0, math.ceil(1000 * patience))
            self._transport.poll(limit)
            self._pulse.turn(idle=False)

    @property
    def running(self) -> bool:
        """Whether it was not told to stop."""
        return self._running

    def turn(self) -> None:
        """Take what has come, step once if there is anything to, and tell of it."""
        self._receive_all()
        self._starts.settle()
        self._ends.settle()
        self._delivery.expire()
        # Before the step: who has just been accepted need not wait for it.
        self._flush_all()
        if self._running and self._backend.busy:
            self._step()
            self._flush_all()

    def patience(self) -> float | None:
        """Return the seconds until there is something to do; ``None``: no end."""
        return self._loans.patience(self._delivery.patience())

    def _receive_all(self) -> None:
        for _ in range(_BURST):
            if not (self._running and self._receive()):
                return

    def _receive(self) -> bool:
        try:
            arrived = self._transport.receive()
        except ProtocolError:
            self._books.bad_frames += 1
            return True
        if arrived is None:
            return False
        address, parts = arrived
        # Nothing of this frame may outlive it: the parts are a request's tensors.
        del arrived
        if parts is None:
            self._forget(address)
            return True
        try:
            message = wire.decode(parts, accept=wire.FROM_CLIENT)
            del parts
            peer = self._check(address, message)
        except ProtocolError:
            self._books.bad_frames += 1
        else:
            self._handle(peer, message)
        return True

    def _check(self, address: bytes, message: Message) -> Peer:
        if message.incarnation != self._incarnation:
            raise ProtocolError(f"incarnation {message.incarnation}")
        peer = self._books.peers.get(address)
        if peer is None:
            peer = self._welcome(address, message.sequence)
        if message.sequence < peer.received:
            raise ProtocolError("a message came twice")
        # What is refused here leaves a gap, as what was lost does.
        peer.number(message)
        if message.sequence > peer.received:
            self._mend(peer)
        peer.received = message.sequence + 1
        return peer

    def _welcome(self, address: bytes, sequence: int) -> Peer:
        peers = self._books.peers
        if len(peers) >= _MAX_PEERS:
            # Who waits for nothing loses nothing by being forgotten but its numbering.
            idle = next((it for it in peers.values() if not self._waits(it)), None)
            if idle is None:
                raise ProtocolError(f"more than {_MAX_PEERS} clients")
            del peers[idle.address]
        peer = peers[address] = Peer(address, received=sequence)
        self._send(peer, Kind.READY, {})
        return peer

    def _waits(self, peer: Peer) -> bool:
        return bool(peer.streams or peer.tick) or self._ends.owed(peer)

    def _mend(self, peer: Peer) -> None:
        """End the streams of a client of which a message was lost or refused.

        It may have begun, cancelled, ended or granted; nobody knows whose.
        """
        self._books.bad_frames += 1
        self._starts.hurry(peer.streams.values())
        for stream in list(peer.streams.values()):
            if not stream.finished:
                self._delivery.fail(stream, "gap", "a message of its client was lost")

    def _handle(self, peer: Peer, message: Message) -> None:
        # A backend may take its time for each of many: the loop gets on all the same.
        self._pulse.turn(idle=False)
        if message.kind is Kind.CONTROL:
            self._control(peer, message.body)
        elif message.kind is Kind.START:
            self._starts.begin(peer, message.generation, message.body, message.tensors)
        elif message.kind is Kind.STATUS:
            self._report(peer, message.body["ask"])
        else:
            self._running = False

    def _control(self, peer: Peer, body: dict[str, Any]) -> None:
        for generation, key, window, request in body["start"]:
            self._pulse.turn(idle=False)
            start = {"key": key, "window": window, "request": request}
            self._starts.begin(peer, generation, start, {})
        # What names a stream that is over was said before its end was heard of.
        for generation in body["cancel"]:
            stream = peer.streams.get(generation)
            if stream is not None:
                self._delivery.cancel(stream)
        for generation, credit in body["grant"]:
            stream = peer.streams.get(generation)
            if stream is not None:
                self._delivery.grant(stream, credit)
        for generation in body["end"]:
            self._pulse.turn(idle=False)
            stream = peer.streams.get(generation)
            self._starts.hurry([stream] if stream is not None else [])
            self._ends.begin(peer, generation)

    def _step(self) -> None:
        try:
            outputs = self._backend.step()
            self._failed_steps = 0
        except Exception as error:
            complain("step", error)
            self._failed_steps += 1
            if self._failed_steps == _MAX_FAILED_STEPS:
                raise
            self._starts.hurry(self._books.streams.values())
            outputs = self._delivery.fail_all(f"a step raised {type(error).__name__}")
        self._delivery.publish(outputs)

    def _report(self, peer: Peer, ask: int) -> None:
        status: dict[str, Any] = dict(self._books.counters())
        status["loans"] = len(self._loans)
        # What was said before stays before.
        self._flush(peer)
        try:
            status["backend"] = self._backend.status()
            self._send(peer, Kind.REPORT, {"ask": ask, "status": status})
        except EncodeError as error:
            status["backend"] = {"error": error.code}
            self._send(peer, Kind.REPORT, {"ask": ask, "status": status})

    def _flush_all(self) -> None:
        for peer in list(self._books.peers.values()):
            self._flush(peer)

    def _flush(self, peer: Peer) -> None:
        # With the end of a stream, at the latest, its part of the arena is told free.
        self._loans.give_back(self._flush)
        if peer.tick:
            self._send(peer, Kind.TICK, peer.tick.take())

    def _send(self, peer: Peer, kind: Kind, body: Mapping[str, Any]) -> None:
        head = wire.encode(
            kind, body, incarnation=self._incarnation, sequence=peer.sent
        )
        peer.sent += 1
        if not self._transport.send(peer.address, head):
            self._forget(peer.address)

    def _forget(self, address: bytes) -> None:
        peer = self._books.peers.get(address)
        if peer is not None:
            self._ends.lose(peer)
