"""The engine process's side: one thread, one socket, one backend, one loop."""

from __future__ import annotations

import errno
import os
import sys
import traceback
from collections.abc import Mapping, Sequence
from typing import Any

import zmq

from . import _address, wire
from ._backend import Backend, Finish, Output
from ._books import Books, Peer
from ._chunks import Entry, finish_map, write
from ._errors import EncodeError, ProtocolError, RequestRejected
from ._hand_off import forget_frames
from ._page import Page
from ._parent import exit_with_parent, leave_signals_to_parent
from ._pulse import Pulse
from .wire import Kind, Message

# Messages taken between two steps, so that a flood of them cannot stop the streams.
_BURST = 1024
_MAX_PEERS = 64
# A backend whose every step raises will not get well; a new process may.
_MAX_FAILED_STEPS = 3
# Shorter parts lie in a receive buffer of libzmq that they share and keep alive.
_COPIED_BELOW = 16 * 2**10


class EngineServer:
    """Serves one backend on one endpoint until told to stop.

    A frame that breaks the protocol is counted and dropped, whoever sent it. A client
    that is gone loses its streams at the first message that cannot reach it.

    Args:
        endpoint: What came after ``--endpoint``; or an ``ipc://`` address to listen
            on, in a directory of mode 0700.
        backend: What runs the requests.
        incarnation: The number of this process, given by whoever spawned it.
        leave_with_parent: Whether the process ends when its parent does, by whatever
            cause, and leaves SIGINT and SIGTERM to it; standard input must then be a
            pipe that the parent holds.
    """

    def __init__(
        self,
        endpoint: str,
        backend: Backend,
        *,
        incarnation: int,
        leave_with_parent: bool = True,
    ) -> None:
        self._endpoint, self._inherited = _address.split(endpoint)
        self._backend = backend
        self._incarnation = incarnation
        self._leave_with_parent = leave_with_parent
        self._books = Books()
        self._peers: dict[bytes, Peer] = {}
        self._running = False
        self._failed_steps = 0
        self._socket: zmq.Socket[bytes]
        self._pulse: Pulse

    def run(self) -> None:
        """Serve until SHUTDOWN; blocks the calling thread."""
        if self._leave_with_parent:
            exit_with_parent()
            leave_signals_to_parent()
        # From here on this thread's death is told at once.
        self._pulse = Pulse(Page.attach(self._inherited.get("liveness")))
        try:
            self._serve()
        finally:
            self._pulse.leave()

    def _serve(self) -> None:
        with zmq.Context() as context, context.socket(zmq.ROUTER) as self._socket:
            for option, value in _socket_options().items():
                self._socket.setsockopt(option, value)
            listener = self._inherited.get("listener")
            if listener is not None:
                self._socket.setsockopt(zmq.USE_FD, listener)
            self._socket.bind(self._endpoint)
            self._running = True
            while self._running:
                self._turn()

    def _turn(self) -> None:
        idle = not self._backend.busy
        self._pulse.turn(idle=idle)
        came = self._socket.poll(None if idle else 0)
        if idle:
            self._pulse.turn(idle=False)
        if came:
            self._receive_all()
        if self._running and self._backend.busy:
            self._step()

    def _receive_all(self) -> None:
        for _ in range(_BURST):
            if not self._running or not self._receive_one():
                return

    def _receive_one(self) -> bool:
        # The parts must not outlive this call: they are the tensors of a request.
        try:
            frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return False
        address = frames[0].bytes
        try:
            message = wire.decode(_own(frames[1:]), accept=wire.FROM_CLIENT)
            del frames
            self._check(address, message)
        except ProtocolError:
            self._books.bad_frames += 1
            return True
        self._handle(address, message)
        return True

    def _check(self, address: bytes, message: Message) -> None:
        if message.incarnation != self._incarnation:
            raise ProtocolError(f"incarnation {message.incarnation}")
        peer = self._peers.get(address)
        if peer is None:
            self._make_room()
            peer = self._peers[address] = Peer()
            self._send(address, Kind.READY, {})
        if message.sequence < peer.received:
            raise ProtocolError("a message came twice")
        peer.received = message.sequence + 1

    def _make_room(self) -> None:
        # A peer without streams loses nothing by being forgotten but its numbering.
        if len(self._peers) >= _MAX_PEERS:
            busy = {stream.peer for stream in self._books.streams.values()}
            idle = next((peer for peer in self._peers if peer not in busy), None)
            if idle is None:
                raise ProtocolError(f"more than {_MAX_PEERS} clients")
            del self._peers[idle]

    def _handle(self, peer: bytes, message: Message) -> None:
        body = message.body
        if message.kind is Kind.START:
            self._start(peer, message)
        elif message.kind is Kind.CANCEL:
            if self._books.owned(body["key"], peer):
                self._backend.cancel(body["key"])
        elif message.kind is Kind.END:
            self._end(peer, body["key"])
        elif message.kind is Kind.STATUS:
            self._report(peer, body["ask"])
        else:
            self._running = False

    def _start(self, peer: bytes, message: Message) -> None:
        key = message.body["key"]
        if key in self._books.streams:
            self._reject(
                peer, key, "duplicate_key", "the key is in use; choose another"
            )
            return
        try:
            # As a temporary: from here on the backend alone holds the tensors.
            self._backend.start(key, message.body["request"], _move(message.tensors))
        except RequestRejected as refusal:
            forget_frames(refusal)
            self._reject(peer, key, refusal.code, refusal.message)
        except Exception as error:  # noqa: BLE001
            # One request that the backend cannot take is no reason to stop the rest.
            _complain("start", error)
            self._backend.end(key)
            self._reject(peer, key, "internal", f"start raised {type(error).__name__}")
        else:
            self._books.started(key, peer)
            self._send(peer, Kind.ACCEPTED, {"key": key})

    def _reject(self, peer: bytes, key: str, code: str, message: str) -> None:
        self._books.refused(key)
        fields = {"code": code[: wire.MAX_CODE], "message": message[: wire.MAX_TEXT]}
        self._send(peer, Kind.REJECTED, {"key": key, **fields})

    def _end(self, peer: bytes, key: str) -> None:
        if self._books.ended(key, peer):
            self._backend.end(key)
        self._send(peer, Kind.DONE, {"key": key})

    def _step(self) -> None:
        try:
            outputs = self._backend.step()
            self._failed_steps = 0
        except Exception as error:
            _complain("step", error)
            self._failed_steps += 1
            if self._failed_steps == _MAX_FAILED_STEPS:
                raise
            outputs = self._fail_all(f"a step raised {type(error).__name__}")
        self._publish(outputs)

    def _fail_all(self, message: str) -> list[Output]:
        finish = Finish("failed", "step_failed", message)
        live = [key for key, it in self._books.streams.items() if not it.finished]
        for key in live:
            self._backend.end(key)
        return [Output(key, (), finish) for key in live]

    def _publish(self, outputs: Sequence[Output]) -> None:
        by_peer: dict[bytes, list[Entry]] = {}
        for output in outputs:
            stream = self._books.streams.get(output.key)
            # Ended between two steps, or already finished: nobody waits for it.
            if stream is None or stream.finished:
                continue
            items, finish = list(output.items), finish_map(output.finish)
            entry = [output.key, stream.items, items, finish]
            by_peer.setdefault(stream.peer, []).append(entry)
            stream.items += len(items)
            stream.finished = finish is not None
        for peer, entries in by_peer.items():
            self._publish_to(peer, entries)

    def _publish_to(self, peer: bytes, entries: list[Entry]) -> None:
        spoiled: set[str] = set()
        write(
            entries,
            lambda some: self._send(peer, Kind.CHUNKS, {"chunks": some}),
            spoiled,
        )
        for key in spoiled:
            if self._books.owned(key, peer):
                self._books.streams[key].finished = True
                self._backend.cancel(key)

    def _report(self, peer: bytes, ask: int) -> None:
        status: dict[str, Any] = dict(self._books.counters())
        try:
            status["backend"] = self._backend.status()
            self._send(peer, Kind.REPORT, {"ask": ask, "status": status})
        except EncodeError as error:
            status["backend"] = {"error": error.code}
            self._send(peer, Kind.REPORT, {"ask": ask, "status": status})

    def _send(self, address: bytes, kind: Kind, body: Mapping[str, Any]) -> None:
        peer = self._peers.get(address)
        if peer is None:
            return
        head = wire.encode(
            kind, body, incarnation=self._incarnation, sequence=peer.sent
        )
        peer.sent += 1
        try:
            self._socket.send_multipart([address, head], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno not in {errno.EHOSTUNREACH, errno.EAGAIN}:
                raise
            self._forget(address)

    def _forget(self, address: bytes) -> None:
        del self._peers[address]
        for key in self._books.forget_peer(address):
            self._backend.end(key)


def _socket_options() -> dict[int, int]:
    options: dict[int, int] = {
        zmq.LINGER: 0,
        # A client that is gone is an error to be told of, not a message to be lost.
        zmq.ROUTER_MANDATORY: 1,
        # Bounded by the streams that were admitted; a full queue would lose a DONE.
        zmq.SNDHWM: 0,
        zmq.RCVHWM: 0,
        zmq.MAXMSGSIZE: wire.MAX_TENSOR_BYTES,
    }
    if sys.platform == "linux":
        # The directory keeps other users out already; this does where it was opened.
        options[zmq.IPC_FILTER_UID] = os.getuid()
    return options


def _own(frames: Sequence[zmq.Frame]) -> list[wire.Buffer]:
    return [
        frame.buffer if len(frame) >= _COPIED_BELOW else bytearray(frame.buffer)
        for frame in frames
    ]


def _move(tensors: dict[str, memoryview]) -> dict[str, memoryview]:
    moved = dict(tensors)
    tensors.clear()
    return moved


def _complain(where: str, error: Exception) -> None:
    # Without the message of the error and without locals, which may hold a prompt.
    sys.stderr.write(f"{where} raised {type(error).__name__}\n")
    traceback.print_tb(error.__traceback__)
    forget_frames(error)
