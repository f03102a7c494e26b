"""The engine's end of the link: the loop that serves the streams of one backend."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from lifecycle.lowlevel import (
    check_bool,
    check_int,
    check_seconds,
    check_type,
    clear_traceback_frames,
)
from lifecycle_zmq import protocol
from lifecycle_zmq.backend import MERGES, Backend, check
from lifecycle_zmq.exceptions import (
    EncodeError,
    ProtocolError,
    RequestRejected,
    log_exception,
)
from lifecycle_zmq.flow_control import FlowController, Peer, ServedStream, ServerState
from lifecycle_zmq.heartbeat import Heartbeat, HeartbeatPage, PageHeartbeat
from lifecycle_zmq.process import (
    exit_with_parent,
    exit_with_process,
    ignore_stop_signals,
)
from lifecycle_zmq.protocol import Kind, Message
from lifecycle_zmq.shared_memory.arena_reader import ArenaView
from lifecycle_zmq.shared_memory.tensors import NOWHERE, Place, move
from lifecycle_zmq.transport import endpoints
from lifecycle_zmq.transport.base import ServerTransport
from lifecycle_zmq.transport.socketpair import SocketPairServer

if TYPE_CHECKING:
    from lifecycle_zmq.transport.zmq import ZmqServerTransport


# Seconds between polls for released leases while the loop is idle.
_LEASE_POLL_SECONDS = 0.1
_MISPLACED = "invalid_tensors", "a tensor is not where its description says"
_NO_MEMORY = (
    "no_memory",
    "the engine has no descriptor or memory left to take tensors in",
)


class ArenaLeases:
    """Finds tensors of requests in the arena, and reports leases that were released."""

    def __init__(self, arena: ArenaView | None, state: ServerState) -> None:
        self._arena = arena
        self._state = state

    def __len__(self) -> int:
        """Return how many requests hold a lease of the arena."""
        return 0 if self._arena is None else self._arena.leases

    def resolve(
        self, peer: Peer, generation: int, tensors: dict[str, memoryview | Place]
    ) -> tuple[str, str] | None:
        """Add the tensors of a START that lie in the arena to the others.

        Returns:
            Code and message of a rejection if they are misplaced, which is counted, or
            could not be mapped.
        """
        places = [it for it in tensors.values() if isinstance(it, Place)]
        if any(place.offset == NOWHERE for place in places):
            if any(place.offset != NOWHERE for place in places):
                peer.batch.free(generation)
            return _NO_MEMORY
        try:
            if self._arena is not None:
                self._arena.resolve((peer.address, generation), tensors)
            elif places:
                peer.batch.free(generation)
                raise ProtocolError("there is no arena")
        except ProtocolError:
            self._state.bad_frames += 1
            return _MISPLACED
        return None

    def report_released(self, flush: Callable[[Peer], None]) -> None:
        """Tell clients which of their leases were released."""
        if self._arena is None:
            return
        for address, generation in self._arena.released():
            peer = self._state.peers.get(address)
            if peer is not None:
                peer.batch.free(generation)
                if peer.batch.full:
                    flush(peer)

    def next_timeout(self, seconds: float | None) -> float | None:
        """Return how long to sleep at most, given another limit in seconds."""
        if not len(self):
            return seconds
        # Another thread may release a lease, which does not wake the loop.
        return (
            _LEASE_POLL_SECONDS
            if seconds is None
            else min(_LEASE_POLL_SECONDS, seconds)
        )


class StartHandler:
    """Hands requests to the backend and reports whether they were accepted."""

    def __init__(
        self,
        state: ServerState,
        backend: Backend,
        leases: ArenaLeases,
        ends: EndHandler,
        flush: Callable[[Peer], None],
    ) -> None:
        self._state = state
        self._backend = backend
        self._leases = leases
        self._ends = ends
        self._flush = flush
        self._started: Callable[[str], bool] | None = getattr(backend, "started", None)
        self._pending: list[ServedStream] = []

    def begin(
        self,
        peer: Peer,
        generation: int,
        body: Mapping[str, Any],
        tensors: dict[str, memoryview | Place],
    ) -> None:
        """Hand a request to the backend, which alone holds its tensors then."""
        if self._state.peers.get(peer.address) is not peer:
            # The client was found gone a moment ago and will never send END.
            return
        key = body["key"]
        if tensors and (problem := self._leases.resolve(peer, generation, tensors)):
            self._reject(peer, generation, *problem)
            return
        if key in self._state.streams or self._ends.pending(key):
            message = "the key is in use; choose another"
            self._reject(peer, generation, "duplicate_key", message)
            return
        try:
            # A temporary: from here on the backend alone holds the tensors.
            merge = self._backend.start(
                key, body["request"], move(tensors) if tensors else {}
            )
        except RequestRejected as refusal:
            clear_traceback_frames(refusal)
            self._reject(peer, generation, refusal.code, refusal.message)
        except Exception as error:  # noqa: BLE001
            # A request that the backend cannot start fails alone.
            log_exception("start", error)
            self._backend.end(key)
            message = f"start raised {type(error).__name__}"
            self._reject(peer, generation, "internal", message)
        else:
            if merge not in MERGES:  # such as the coroutine of an `async def`
                self._backend.end(key)
                message = f"start returned {type(merge).__name__}, not None or a Merge"
                self._reject(peer, generation, "internal", message)
                return
            stream = ServedStream(
                key, generation, peer, body["window"], merge or "never"
            )
            self._state.started(stream)
            if self._started is None:
                self._accept(stream)
            else:
                self._pending.append(stream)

    def settle(self) -> None:
        """Report the starts that the backend has decided since."""
        undecided, self._pending = self._pending, []
        for stream in undecided:
            if self._state.streams.get(stream.key) is not stream:
                continue  # its client is gone
            try:
                if self._started is None or self._started(stream.key):
                    self._accept(stream)
                else:
                    self._pending.append(stream)
            except RequestRejected as refusal:
                clear_traceback_frames(refusal)
                self._state.withdrawn(stream)
                code, message = refusal.code, refusal.message
                self._reject(stream.peer, stream.generation, code, message)

    def accept_now(self, streams: Iterable[ServedStream]) -> None:
        """Accept undecided ones of some streams, which are about to end."""
        # A copy: accepting one may find its client gone, which removes its streams.
        for stream in list(streams) if self._pending else ():
            if stream in self._pending:
                self._pending.remove(stream)
                self._accept(stream)

    def _accept(self, stream: ServedStream) -> None:
        stream.peer.batch.accept(stream)
        if stream.peer.batch.full:
            self._flush(stream.peer)

    def _reject(self, peer: Peer, generation: int, code: str, message: str) -> None:
        self._state.refused(peer, generation)
        peer.batch.reject(generation, code, message)
        if peer.batch.full:
            self._flush(peer)


class EndHandler:
    """Makes the backend forget streams, and confirms their END with DONE."""

    def __init__(
        self,
        state: ServerState,
        backend: Backend,
        delivery: FlowController,
        flush: Callable[[Peer], None],
    ) -> None:
        self._state = state
        self._backend = backend
        self._flow = delivery
        self._flush = flush
        self._ending: Callable[[str], bool] | None = getattr(backend, "ending", None)
        self._unconfirmed: dict[tuple[Peer, int], str] = {}

    def pending(self, key: str) -> bool:
        """Whether the backend has not released a key yet."""
        return self._ending is not None and self._ending(key)

    def has_pending(self, peer: Peer) -> bool:
        """Whether a client waits for a DONE."""
        return any(it is peer for it, _ in self._unconfirmed)

    def begin(self, peer: Peer, generation: int) -> None:
        """Forget a stream; confirm now, or when nothing of it runs any more."""
        stream = self._state.ended(peer, generation)
        if stream is not None:
            self._backend.end(stream.key)
            self._flow.forget(stream)
            if self.pending(stream.key):
                self._unconfirmed[peer, generation] = stream.key
        if (peer, generation) not in self._unconfirmed:
            self._confirm(peer, generation)

    def settle(self) -> None:
        """Confirm the streams that were released since."""
        for it, key in list(self._unconfirmed.items()):
            # Confirming may find the client gone, which removes its other entries.
            if not self.pending(key) and self._unconfirmed.pop(it, ""):
                self._confirm(*it)

    def forget_peer(self, peer: Peer) -> None:
        """Forget the streams of a client that is gone."""
        for stream in self._state.forget(peer):
            self._backend.end(stream.key)
            self._flow.forget(stream)
        for it in [it for it in self._unconfirmed if it[0] is peer]:
            del self._unconfirmed[it]

    def _confirm(self, peer: Peer, generation: int) -> None:
        peer.batch.finish(generation)
        if peer.batch.full:
            self._flush(peer)


# Messages handled between two steps, so that a flood cannot stop the streams.
_BURST = 1024
_MAX_PEERS = 64
# A backend whose every step raises does not recover; a new process may.
_MAX_FAILED_STEPS = 3


class EngineLoop:
    """Serves one backend to the clients of one transport, in one thread.

    A message that breaks the protocol, or is missing, ends the connection of its
    client, which learns of it. A client that is gone loses its streams at the first
    message that cannot reach it.

    Args:
        backend: The engine that runs the requests.
        incarnation: Number of this engine, given by its supervisor.
        hold: As for `EngineServer`.
        stall: As for `EngineServer`.
        arena: The arena with large tensors, if the clients have one.

    Raises:
        TypeError: *backend* is no `Backend`, or another option has the wrong type.
        ValueError: A number is less than 0.
    """

    _transport: ServerTransport
    _heartbeat: Heartbeat

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
        check_int(hold=hold)
        check_seconds(stall=stall)
        check_type(ArenaView | None, "arena must be an ArenaView or None", arena)
        self._backend = backend
        self._incarnation = incarnation
        self._state = ServerState()
        self._leases = ArenaLeases(arena, self._state)
        self._flow = FlowController(
            self._state, backend, self._flush, hold=hold, stall=stall
        )
        self._ends = EndHandler(self._state, backend, self._flow, self._flush)
        self._starts = StartHandler(
            self._state, backend, self._leases, self._ends, self._flush
        )
        self._running = True
        self._failed_steps = 0

    def run(
        self, transport: ServerTransport, heartbeat: Heartbeat | None = None
    ) -> None:
        """Serve until SHUTDOWN, once; blocks the calling thread.

        Args:
            transport: Carries the messages.
            heartbeat: Records each turn of the loop; ``None`` records nothing.
        """
        self._transport = transport
        self._heartbeat = heartbeat or PageHeartbeat(None)
        drive = getattr(self._backend, "drive", None)
        try:
            if drive is not None:  # it has an event loop and calls `turn`
                drive(self, transport, self._heartbeat)
                if self._running:
                    raise RuntimeError("the event loop ended before SHUTDOWN")
            while self._running:
                self._sleep()
                self.turn()
        finally:
            # They refer to this loop: without it the backend, and all requests, would
            # live until the next garbage collection.
            del self._flow, self._starts, self._ends

    def stop(self) -> None:
        """Let `run` return at its next turn; any thread may call this."""
        self._running = False

    def _sleep(self) -> None:
        idle = not self._backend.busy
        self._heartbeat.beat(idle=idle)
        if idle:
            next_timeout = self.next_timeout()
            limit = (
                None if next_timeout is None else max(0, math.ceil(1000 * next_timeout))
            )
            self._transport.poll(limit)
            self._heartbeat.beat(idle=False)

    @property
    def running(self) -> bool:
        """Whether neither SHUTDOWN nor `stop` was called."""
        return self._running

    def turn(self) -> None:
        """Handle messages, run one step if the backend is busy, send the outputs."""
        self._receive_all()
        self._starts.settle()
        self._ends.settle()
        self._flow.expire()
        # Before the step, so that new requests need not wait for it.
        self._flush_all()
        if self._running and self._backend.busy:
            self._step()
            self._flush_all()

    def next_timeout(self) -> float | None:
        """Return the seconds until the loop has to run again; ``None``: no limit."""
        return self._leases.next_timeout(self._flow.next_timeout())

    def _receive_all(self) -> None:
        for _ in range(_BURST):
            if not (self._running and self._receive()):
                return

    def _receive(self) -> bool:
        try:
            arrived = self._transport.receive()
        except ProtocolError as error:
            self._break_off(error.sender, error)
            return True
        if arrived is None:
            return False
        address, parts = arrived
        # No reference may outlive this frame: the parts are tensors of a request.
        del arrived
        if parts is None:
            self._forget(address)
            return True
        try:
            message = protocol.decode(parts, accept=protocol.FROM_CLIENT)
            del parts
            peer = self._check(address, message)
        except ProtocolError as error:
            self._break_off(address, error)
        else:
            if peer is None:
                self._state.bad_frames += 1
            else:
                self._handle(peer, message)
        return True

    def _check(self, address: bytes, message: Message) -> Peer | None:
        """Return the client of a message; None if the message is to be ignored.

        Raises:
            ProtocolError: Nothing of this client can be trusted any more.
        """
        if message.incarnation != self._incarnation:
            return None  # its client was lost with the engine that it was for
        peer = self._state.peers.get(address)
        expected = 0 if peer is None else peer.received
        if message.sequence < expected:
            return None  # it came twice
        if message.sequence > expected:
            what = f"message {message.sequence} instead of {expected}"
            raise ProtocolError(f"{what}: one was lost")
        if peer is None:
            peer = self._add_peer(address)
        peer.number(message)
        peer.received += 1
        return peer

    def _add_peer(self, address: bytes) -> Peer:
        peers = self._state.peers
        if len(peers) >= _MAX_PEERS:
            # An idle client that comes back hears that its connection is over.
            idle = next((it for it in peers.values() if not self._is_waiting(it)), None)
            if idle is None:
                raise ProtocolError(f"more than {_MAX_PEERS} clients")
            del peers[idle.address]
        peer = peers[address] = Peer(address)
        self._send(peer, Kind.READY, {})
        return peer

    def _is_waiting(self, peer: Peer) -> bool:
        return bool(peer.streams or peer.batch) or self._ends.has_pending(peer)

    def _break_off(self, address: bytes | None, error: ProtocolError) -> None:
        """Tell a client that its connection is over, and forget its streams.

        What was lost may have started, cancelled, ended or granted any of them, so the
        client would wait forever for the answer.
        """
        self._state.bad_frames += 1
        if address is not None:
            peer = self._state.peers.get(address) or Peer(address)
            self._forget(address)
            self._send(peer, Kind.FAULT, {"message": str(error)[: protocol.MAX_TEXT]})

    def _handle(self, peer: Peer, message: Message) -> None:
        # Each of many messages may take long in the backend: that is progress.
        self._heartbeat.beat(idle=False)
        if message.kind is Kind.CONTROL:
            self._control(peer, message.body)
        elif message.kind is Kind.START:
            self._starts.begin(peer, message.generation, message.body, message.tensors)
        elif message.kind is Kind.STATUS:
            self._report(peer, message.body["ask"])
        elif message.kind is Kind.PING:
            self._flush(peer)
            self._send(peer, Kind.PONG, message.body)
        elif message.kind is Kind.LEAVE:
            self._forget(peer.address)
        else:
            self._running = False

    def _control(self, peer: Peer, body: dict[str, Any]) -> None:
        for generation, key, window, request in body["start"]:
            self._heartbeat.beat(idle=False)
            start = {"key": key, "window": window, "request": request}
            self._starts.begin(peer, generation, start, {})
        # A client may name a stream whose finish it has not received yet.
        for generation in body["cancel"]:
            stream = peer.streams.get(generation)
            if stream is not None:
                self._flow.cancel(stream)
        for generation, credit in body["grant"]:
            stream = peer.streams.get(generation)
            if stream is not None:
                self._flow.grant(stream, credit)
        for generation in body["end"]:
            self._heartbeat.beat(idle=False)
            stream = peer.streams.get(generation)
            self._starts.accept_now([stream] if stream is not None else [])
            self._ends.begin(peer, generation)

    def _step(self) -> None:
        try:
            outputs = self._backend.step()
            self._failed_steps = 0
        except Exception as error:
            log_exception("step", error)
            self._failed_steps += 1
            if self._failed_steps == _MAX_FAILED_STEPS:
                raise
            self._starts.accept_now(self._state.streams.values())
            outputs = self._flow.fail_all(f"a step raised {type(error).__name__}")
        self._flow.publish(outputs)

    def _report(self, peer: Peer, request_id: int) -> None:
        status: dict[str, Any] = dict(self._state.counters())
        status["leases"] = len(self._leases)
        # Keeps the order of messages.
        self._flush(peer)
        try:
            status["backend"] = self._backend.status()
            self._send(peer, Kind.REPORT, {"ask": request_id, "status": status})
        except EncodeError as error:
            status["backend"] = {"error": error.code}
            self._send(peer, Kind.REPORT, {"ask": request_id, "status": status})

    def _flush_all(self) -> None:
        for peer in list(self._state.peers.values()):
            self._flush(peer)

    def _flush(self, peer: Peer) -> None:
        # At the latest with its DONE, the lease of a stream is reported.
        self._leases.report_released(self._flush)
        if peer.batch:
            self._send(peer, Kind.TICK, peer.batch.take())

    def _send(self, peer: Peer, kind: Kind, body: Mapping[str, Any]) -> None:
        head = protocol.encode(
            kind, body, incarnation=self._incarnation, sequence=peer.sent
        )
        peer.sent += 1
        if not self._transport.send(peer.address, head):
            self._forget(peer.address)

    def _forget(self, address: bytes) -> None:
        peer = self._state.peers.get(address)
        if peer is not None:
            self._ends.forget_peer(peer)


class EngineServer:
    """Serves one backend on one endpoint: one thread, one socket, one loop.

    A frame that breaks the protocol, or is missing, ends the connection of its client,
    which learns of it. A client that is gone loses its streams at the first message
    that cannot reach it.

    Args:
        endpoint: The value of ``--endpoint``; or an ``ipc://`` address to listen on, in
            a directory of mode 0700.
        backend: The engine that runs the requests.
        incarnation: Number of this process, given by its parent.
        leave_with_parent: Whether the process ends when its parent does, for any
            reason, and leaves SIGINT and SIGTERM to it; standard input must then be a
            pipe that the parent holds. On Linux the engine of a `ZmqEngine` is killed
            with its parent in any case, before it can clean up.
        hold: Bytes queued for one stream whose reader has no credit. Beyond them it
            ends as ``slow_client``.
        stall: Seconds that a reader may take nothing while items are queued for it,
            before its stream ends as ``slow_client``.
        writable_arena: Map the arena so that a device can be given it as pinned memory.

    Raises:
        TypeError: *backend* is no `Backend`, or another option has the wrong type.
        ValueError: A number is less than 0.

    Attributes:
        arena: The arena with large tensors, if the client has one.
    """

    def __init__(
        self,
        endpoint: str,
        backend: Backend,
        *,
        incarnation: int,
        leave_with_parent: bool = True,
        hold: int = 128 * 2**10,
        stall: float = 30.0,
        writable_arena: bool = False,
    ) -> None:
        check_type(str, "endpoint must be text, as it came", endpoint)
        check_bool(leave_with_parent=leave_with_parent)
        check_bool(writable_arena=writable_arena)
        self._endpoint, self._inherited = endpoints.split(endpoint)
        self.arena = ArenaView.attach(self._inherited, writable=writable_arena)
        self._leave_with_parent = leave_with_parent
        self._loop = EngineLoop(
            backend,
            incarnation=incarnation,
            hold=hold,
            stall=stall,
            arena=self.arena,
        )

    def run(self) -> None:
        """Serve until SHUTDOWN, or until the only client has hung up.

        Blocks the calling thread.
        """
        if self._leave_with_parent:
            exit_with_parent()
            exit_with_process(self._inherited.get("parent"))
            ignore_stop_signals()
        # From here on the death of this thread is noticed at once.
        heartbeat = PageHeartbeat(HeartbeatPage.attach(self._inherited.get("liveness")))
        try:
            with self._connect() as transport:
                self._loop.run(transport, heartbeat)
        finally:
            heartbeat.stop()

    def _connect(self) -> ZmqServerTransport | SocketPairServer:
        pair = self._inherited.get("link")
        if pair is not None:
            return SocketPairServer(pair, self._loop.stop)
        from lifecycle_zmq.transport.zmq import ZmqServerTransport

        return ZmqServerTransport(self._endpoint, self._inherited.get("listener"))
