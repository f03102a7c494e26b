"""One epoch of the worker that serves the gate of all."""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, suppress
from functools import partial
from typing import Final, Protocol

from lifecycle._exceptions import Refused
from lifecycle._gate import Gate
from lifecycle._queues import HELD, Ticket
from lifecycle._ticket_gate import TicketGate

from . import wire
from .loop import Loop
from .request import Request, ticket
from .rows import BEATS, BYTES, EPOCH, IDENT, OVER_LIMIT, SLOTS, Capacity, Folder, Row
from .wire import Connection, Frame, is_of_this_user

# Seconds from one sign of life of a leader to the next.
BEAT: Final = 0.05
# For how long a new leader waits until the live workers have said what they hold.
GRACE: Final = 0.25
# For how long a worker may hoard: leave a grant untaken, or a release unreported.
SILENT: Final = 0.5
# A dying process may close its connection before its row: look again soon, for a while.
_LOOK_AGAIN: Final = 0.003
_LOOK_FOR: Final = 0.1

Held = tuple[int, int, str | None]  # slots, bytes, key


class Worker(Protocol):
    """The worker that leads, as its leader knows it."""

    folder: Folder
    row: Row
    loop: Loop
    held: dict[int, Held]
    waiting: dict[int, Request]

    @property
    def capacity(self) -> Capacity:
        """The newest capacity that it knows."""

    def locked(self) -> AbstractContextManager[None]:
        """Keep all other threads from changing what it holds and waits for."""

    def decide(self, number: int, refusal: Refused | None, epoch: int) -> None:
        """Take a grant or a refusal. Under its lock."""

    def learn(self, capacity: Capacity) -> None:
        """Take a capacity that may be newer."""

    def bury(self, row: Row) -> None:
        """Count on for a worker that has died."""


class Peer:
    """A worker, and what the leader has granted to it."""

    __slots__ = ("connection", "gone", "hoards_since", "ident", "row", "tickets")

    def __init__(self, connection: Connection | None, row: Row | None = None) -> None:
        self.connection = connection
        self.row = row
        self.ident = row.words[IDENT] if row is not None else 0
        self.tickets: dict[int, Ticket] = {}
        self.gone = False
        self.hoards_since: float | None = None

    def hoards(self) -> bool:
        """Whether it is charged with what its row does not say."""
        assert self.row is not None, "only who has greeted is granted to"
        held = [each for each in self.tickets.values() if each.state == HELD]
        words = self.row.words
        return (
            sum(each.slots for each in held) > words[SLOTS]
            or sum(each.bytes for each in held) > words[BYTES]
        )


class _Bell:
    """Notes that something was decided for a ticket, in the middle of a change."""

    __slots__ = ("_leader", "_number", "_peer")

    def __init__(self, leader: Leader, peer: Peer, number: int) -> None:
        self._leader, self._peer, self._number = leader, peer, number

    def wake(self) -> bool:
        return self._leader.ring(self._peer, self._number)


class Leader:
    """Grants to all workers, from an ordinary gate, until a newer epoch begins.

    All of it runs in the thread of the worker's loop, but for what is named ``_here``,
    which other threads call under the worker's lock.

    Args:
        worker: Which leads.
        epoch: That has begun with the link to its row, *before* any row is read here: a
            grant of an older epoch is in a row by then, or its receiver sees the link.
        listener: Where the others connect; it listens already.
        gate: Of the worker's capacity.
        clock: That all processes of a host share.

    Attributes:
        open: Whether it grants: not before it knows what all live workers hold.
    """

    def __init__(
        self,
        worker: Worker,
        epoch: int,
        listener: socket.socket,
        gate: Gate,
        clock: Callable[[], float],
    ) -> None:
        self.epoch, self.open = epoch, False
        self._worker, self._listener, self._clock = worker, listener, clock
        self._tickets = TicketGate(gate)
        self._here = Peer(None)
        self._peers: dict[int, Peer] = {}
        # No sets of peers: their order would differ from run to run.
        self._strangers: dict[Peer, None] = {}  # that have not greeted yet
        self._missing: dict[int, Peer] = {}  # alive or not, but not connected
        self._expected: set[int] = set()  # those of them to wait for
        self._early: list[tuple[Peer, Request]] = []
        self._rung: deque[tuple[Peer, int]] = deque()
        self._unsent: dict[Peer, None] = {}
        self._blocked: set[Peer] = set()  # watched until more can be sent
        self._over_limit = worker.row.words[OVER_LIMIT]
        self._began = self._lost_at = clock()
        self._beat_at = self._began
        self._deaf = False

    def take_over(self, deposed: int) -> None:
        """Charge all that live workers hold, and wait for them but the *deposed*."""
        worker, oldest = self._worker, self.epoch - 1
        for row in worker.folder.rows():
            peer = Peer(None, row)
            if peer.ident == worker.row.words[IDENT]:
                row.close()
                continue
            words = row.words
            self._missing[peer.ident] = peer
            self._charge(peer, {0: (words[SLOTS], words[BYTES], None)})
            if row.alive:
                oldest = min(oldest, words[EPOCH])
                self._expected |= {peer.ident} - {deposed}
                capacity = row.capacity  # once: it may be written at any moment
                if capacity is not None:
                    worker.learn(capacity)
        self._reap()
        worker.folder.forget_epochs(oldest)
        worker.folder.remove_unborn()
        worker.loop.watch(self._listener, self._accept)

    def turn(self, now: float) -> float:
        """Do what is due, and return after how many seconds something may be."""
        worker = self._worker
        if now >= self._beat_at:
            self._beat_at = now + BEAT
            if self._deaf:
                self._deaf = False
                worker.loop.watch(self._listener, self._accept)
            worker.row.words[BEATS] += 1
            self._tickets.recheck()
            self._find_dead()
            self._reap()
            over = self._tickets.gate.statistics().over_limit
            worker.row.words[OVER_LIMIT] = self._over_limit + over
        hurries = bool(self._missing) and now < self._lost_at + _LOOK_FOR
        if hurries:
            self._reap()
        if not self.open and (not self._expected or now > self._began + GRACE):
            self._open_up()
        self._send()
        return _LOOK_AGAIN if hurries or not self.open else self._beat_at - now

    def silent(self, now: float) -> int:
        """Return the ident of a worker that hoards and says nothing, or 0.

        It was stopped before it took a grant, or before it reported a release; and
        connected or not, it may take the grant yet: only a new epoch is safe.
        """
        if now < self._beat_at:
            return 0
        for peer in [*self._peers.values(), *self._missing.values()]:
            if not peer.hoards():
                peer.hoards_since = None
            elif peer.hoards_since is None:
                peer.hoards_since = now
            elif now > peer.hoards_since + SILENT:
                return peer.ident
        return 0

    def stop(self) -> None:
        """End: a newer epoch has begun, or the worker leaves."""
        worker = self._worker
        self._here.gone = True
        self._rung.clear()
        worker.loop.unwatch(self._listener)
        worker.folder.remove_socket(worker.row.words[IDENT], self.epoch)
        for peer in [*self._peers.values(), *self._strangers, *self._missing.values()]:
            peer.gone = True
            if peer.connection is not None:
                worker.loop.unwatch(peer.connection.sock)
        self.close()

    def close(self) -> None:
        """Close the descriptors; in a forked child, its copies alone."""
        self._listener.close()
        for peer in [*self._peers.values(), *self._strangers, *self._missing.values()]:
            if peer.connection is not None:
                peer.connection.close()
            if peer.row is not None:
                peer.row.close()

    # Of the worker itself.

    def charge_here(self) -> None:
        """Charge what the worker holds from before."""
        self._charge(self._here, self._worker.held)

    def admit_here(self, request: Request) -> bool:
        """Return whether *request* is held at once; if not, its turn comes.

        Raises:
            Refused: As from `Gate.admit`.
        """
        return self._enter(self._here, request)

    def give_back_here(self, number: int) -> None:
        """Take back what the request of this *number* holds or waits for."""
        self._give_back(self._here, number)

    def settle_here(self, number: int, nbytes: int) -> None:
        """Change what the lease of this *number* is charged with."""
        self._settle(self._here, number, nbytes)

    def expire_here(self, number: int, max_wait: float | None) -> None:
        """Refuse the request of this *number* if it waits still."""
        self._expire(self._here, number, max_wait)

    def resize_here(self, capacity: Capacity) -> None:
        """Change the capacity, and tell all workers."""
        self._tickets.gate.resize(slots=capacity.slots, bytes=capacity.bytes)
        self._worker.loop.call(self._broadcast, capacity)

    def _broadcast(self, capacity: Capacity) -> None:
        for peer in self._peers.values():
            self._put(peer, wire.CAPACITY, capacity.since, *capacity.limits)

    # Requests.

    def ring(self, peer: Peer, number: int) -> bool:
        """Note that something was decided; ``False`` if its worker is gone."""
        if not peer.gone:
            self._rung.append((peer, number))
            self._worker.loop.call(self._tell_outcomes)
        return not peer.gone

    def _enter(self, peer: Peer, request: Request) -> bool:
        ticket = peer.tickets[request.number] = request.ticket()
        bell = _Bell(self, peer, request.number) if request.may_wait else None
        try:
            return self._tickets.submit(ticket, bell)
        except BaseException:
            del peer.tickets[request.number]
            raise

    def _submit(self, peer: Peer, request: Request) -> None:
        try:
            held = self._enter(peer, request)
        except Refused as refusal:
            self._answer(peer, request.number, refusal)
        else:
            if held:
                self._answer(peer, request.number, None)

    def _tell_outcomes(self) -> None:
        while self._rung:
            peer, number = self._rung.popleft()
            ticket = peer.tickets.get(number)
            if ticket is None:
                continue
            refusal = self._tickets.outcome(ticket)
            if refusal is not None:
                peer.tickets.pop(number, None)
            self._answer(peer, number, refusal)

    def _answer(self, peer: Peer, number: int, refusal: Refused | None) -> None:
        if peer is self._here:
            with self._worker.locked():
                self._worker.decide(number, refusal, self.epoch)
        elif refusal is not None:
            why = type(refusal).__name__, str(refusal), refusal.retry_after
            self._put(peer, wire.REFUSE, number, *why)
        elif peer.gone:  # it cannot have seen this grant
            self._give_back(peer, number)
        else:
            self._put(peer, wire.GRANT, number)

    def _give_back(self, peer: Peer, number: int) -> None:
        ticket = peer.tickets.pop(number, None)
        if ticket is not None:
            self._tickets.give_back(ticket)

    def _settle(self, peer: Peer, number: int, nbytes: int) -> None:
        ticket = peer.tickets.get(number)
        if ticket is not None:
            self._tickets.settle(ticket, nbytes)

    def _expire(self, peer: Peer, number: int, max_wait: float | None) -> None:
        ticket = peer.tickets.get(number)
        if ticket is not None:
            self._tickets.expire(ticket, max_wait)

    def _charge(self, peer: Peer, held: Mapping[int, Held]) -> None:
        for number, cost in held.items():
            peer.tickets[number] = ticket(*cost)
            self._tickets.charge(peer.tickets[number])

    def _open_up(self) -> None:
        """Begin to grant: first who waits, in the order in which requests were made."""
        with self._worker.locked():
            here = [(self._here, each) for each in self._worker.waiting.values()]
            early, self._early = [*self._early, *here], []
            for peer, request in sorted(early, key=lambda each: each[1].since):
                if not peer.gone:
                    self._submit(peer, request)
            self.open = True

    # Connections.

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except BlockingIOError:  # it is gone already
            return
        except OSError:  # no descriptors are left: try again with the next beat
            self._deaf = True
            self._worker.loop.unwatch(self._listener)
            return
        if not is_of_this_user(sock):
            sock.close()
            return
        peer = Peer(Connection(sock))
        self._strangers[peer] = None
        self._worker.loop.watch(sock, partial(self._read, peer))

    def _read(self, peer: Peer) -> None:
        connection = peer.connection
        if peer.gone or connection is None:
            return
        peer.hoards_since = None  # it runs
        try:
            for kind, *rest in connection.read():
                if not peer.gone:
                    self._handle(peer, kind, rest)
        except (ValueError, TypeError, OSError):  # no frames of ours, or no descriptors
            connection.ended = True
        if connection.ended:
            self._lose(peer)
        elif peer in self._blocked:
            self._unsent[peer] = None

    def _handle(self, peer: Peer, kind: int, rest: Frame) -> None:
        if kind == wire.ASK:
            request = Request(*rest)
            if self.open:
                self._submit(peer, request)
            else:
                self._early.append((peer, request))
        elif kind == wire.RELEASE:
            self._give_back(peer, *rest)
        elif kind == wire.CANCEL:
            self._early = [
                (other, each)
                for other, each in self._early
                if other is not peer or each.number != rest[0]
            ]
            self._give_back(peer, *rest)
        elif kind == wire.SETTLE:
            self._settle(peer, *rest)
        elif kind == wire.EXPIRE:
            self._expire(peer, *rest)
        elif kind == wire.CAPACITY:
            self._worker.learn(Capacity(*rest))
        elif kind == wire.HELLO:
            version, *greeting = rest
            if version == wire.VERSION:
                self._greet(peer, *greeting)
            else:
                self._put(peer, wire.OTHER_VERSION, wire.VERSION)

    def _greet(
        self,
        peer: Peer,
        ident: int,
        capacity: Frame,
        held: Iterable[Frame],
        waiting: Iterable[Frame],
    ) -> None:
        if ident in self._peers:
            self._lose(self._peers[ident])
        old = self._missing.pop(ident, None)
        if old is not None:
            peer.row = old.row
        else:
            try:
                peer.row = self._worker.folder.row(ident)
            except FileNotFoundError:  # the last words of one that is dead and buried
                self._lose(peer)
                return
        self._strangers.pop(peer, None)
        peer.ident, self._peers[ident] = ident, peer
        self._worker.learn(Capacity(*capacity))
        # Charge first, and then take back what it was thought to hold: no gap.
        self._charge(peer, {number: (*cost,) for number, *cost in held})
        if old is not None:
            for number in list(old.tickets):
                self._give_back(old, number)
        for each in waiting:
            self._handle(peer, wire.ASK, each)
        self._expected.discard(ident)
        newest = self._worker.capacity
        self._put(peer, wire.CAPACITY, newest.since, *newest.limits)

    def _lose(self, peer: Peer) -> None:
        """Take the end of a connection for what it is: a reason to look at the row."""
        peer.gone = True
        connection, peer.connection = peer.connection, None
        self._strangers.pop(peer, None)
        self._unsent.pop(peer, None)
        self._blocked.discard(peer)
        if connection is not None:
            self._worker.loop.unwatch(connection.sock)
            connection.close()
        if self._peers.get(peer.ident) is peer:
            del self._peers[peer.ident]
            self._tell_outcomes()  # what it cannot have seen is given back
            for number, ticket in list(peer.tickets.items()):
                if ticket.state != HELD:
                    self._give_back(peer, number)
            self._missing[peer.ident] = peer
            self._lost_at = self._clock()
            self._reap()

    def _find_dead(self) -> None:
        """Find who died unheard: before it greeted, or a child has its socket."""
        for peer in list(self._peers.values()):
            if peer.row is not None and not peer.row.alive:
                self._lose(peer)
        folder, own = self._worker.folder, self._worker.row.words[IDENT]
        with suppress(OSError):  # no descriptors are left: with a later beat
            for row in folder.dead_rows({own, *self._peers, *self._missing}):
                self._missing[row.words[IDENT]] = Peer(None, row)

    def _reap(self) -> None:
        """Take back what dead workers held."""
        for ident, peer in list(self._missing.items()):
            if peer.row is not None and not peer.row.alive:
                del self._missing[ident]
                self._expected.discard(ident)
                for number in list(peer.tickets):
                    self._give_back(peer, number)
                self._worker.bury(peer.row)
                peer.row.close()

    def _put(self, peer: Peer, *frame: object) -> None:
        if peer.connection is not None:
            peer.connection.put(*frame)
            self._unsent[peer] = None

    def _send(self) -> None:
        for peer in list(self._unsent):
            connection = peer.connection
            assert connection is not None, "who is lost is not sent to"
            left = connection.flush()
            if left or peer in self._blocked:
                on_ready = partial(self._read, peer)
                self._worker.loop.watch(connection.sock, on_ready, write=left)
                (self._blocked.add if left else self._blocked.discard)(peer)
        self._unsent.clear()
