"""This worker among the others: what it holds, who leads, and whom to ask."""

from __future__ import annotations

import secrets
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, Final

from lifecycle._exceptions import (
    AdmissionTimeout,
    CostTooLarge,
    GateClosed,
    GateFull,
    Refused,
)
from lifecycle._gate import Gate
from lifecycle._lease import Lease
from lifecycle._lock import ChangeLock
from lifecycle._queues import DONE, HELD

from . import rows, wire
from .leader import Held, Leader
from .loop import Loop
from .request import Request
from .rows import Capacity, Folder, Row, count_on, lock_for_life, log
from .wire import VERSION, Connection, is_of_this_user

# Seconds from one look at the leader's sign of life to the next, and how many looks in
# vain depose it. Looks are counted, and not seconds: who was stopped itself, or a host
# that slept, would find every leader silent.
TICK: Final = 0.1
_PATIENCE: Final = 5
# A host that is too loaded to give a sign of life would elect again and again.
_MOST_PATIENCE: Final = 20
_CALM: Final = 600
# Seconds between a new epoch and the reading of rows, by when a store of any processor
# that came before its look at the epochs is seen.
_SETTLED: Final = 0.005
_RETRY: Final = 0.005
_MOST_RETRIES: Final = 100
_BACKLOG: Final = 1024
# Seconds until it tries again after an error. Longer than the others look for a leader
# that does not listen: if this worker was elected, they lead by then.
_AGAIN: Final = 1.0

_UNIX_SOCKET: Final = partial(socket.socket, getattr(socket, "AF_UNIX", -1))

_REFUSALS: Final[dict[str, type[Refused]]] = {
    each.__name__: each
    for each in (AdmissionTimeout, CostTooLarge, GateClosed, GateFull)
}


class Member:
    """One worker of a shared gate, from its first request to its end.

    Callers of methods without ``_``, other than `leave` and `close`, hold the lock: see
    `locked`. All others run in the thread of the loop.

    Attributes:
        held: Cost of each lease, by its number. No lease itself: a lost one is found.
        waiting: Requests that nothing was decided for.
        epoch: Of the leader that it follows, or of itself.
        leader: Itself, while it leads.
        cut_off: Why it admits no more, if it does not.
        found: The capacity that the others knew when it came.
    """

    def __init__(
        self,
        path: str,
        name: str,
        capacity: Capacity,
        lock: ChangeLock,
        engine: Callable[[Capacity], Gate],
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] = time.sleep,
        new_socket: Callable[[], socket.socket] = _UNIX_SOCKET,
        new_loop: Callable[..., Loop] = Loop,
        lock_row: Callable[[int], object] = lock_for_life,
        draw: Callable[[int], int] = secrets.randbits,
    ) -> None:
        self.folder, self._name = Folder(path, lock=lock_row, draw=draw), name
        self._clock, self._sleep, self._new_socket = clock, sleep, new_socket
        try:
            live = [row.capacity for row in self.folder.live_rows()]
            self.found = max(filter(None, live), default=None)
            self.row = self.folder.join()
            try:
                self.loop = new_loop(
                    self._turn,
                    self._pause,
                    self._fail,
                    f"lifecycle shared gate {name}",
                )
            except BaseException:
                self.row.close()
                raise
        except BaseException:
            self.folder.close()
            raise
        self.row.write_capacity(capacity)
        self.capacity, self.lock, self._engine = capacity, lock, engine
        self.held: dict[int, Held] = {}
        self.waiting: dict[int, Request] = {}
        self.epoch = 0
        self.leader: Leader | None = None
        self.cut_off = ""
        self._greeted = self._ended = False
        self._told = ""
        self._link: Connection | None = None
        self._followed: Row | None = None
        self._seeks, self._retries, self._seek_at = True, 0, 0.0
        self._depose = self._silent = 0
        self._seen, self._missed, self._calm, self._patience = 0, 0, 0, _PATIENCE
        self._tick_at, self._leaves = 0.0, False

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep all other threads from changing what is held and waited for."""
        # A change that was deferred would come in the middle of the one that asks.
        changes = self.lock.interrupted()
        with self.lock.mutex:
            if not changes:
                self.lock.catch_up()
            yield
        self.lock.make_deferred_changes()

    @property
    def is_in(self) -> bool:
        """Whether it has not left yet."""
        return self.folder.descriptor >= 0

    # Requests.

    def submit(self, request: Request) -> bool:
        """Return whether *request* is held at once; if not, its waiter will be woken.

        Raises:
            Refused: As from `Gate.admit`.
        """
        if self.cut_off:
            raise GateClosed(self.cut_off)
        leader = self.leader
        if leader is not None and leader.open and leader.admit_here(request):
            if self._accept(request, leader.epoch):
                return True
            leader.give_back_here(request.number)
            self.loop.call(self._seek_anew, leader.epoch)
        self.waiting[request.number] = request
        self._count_waiting()
        if self._link is not None:
            self._tell(wire.ASK, *request.frame())
        # Else the next greeting lists it, or this leader finds it when it opens.
        return False

    def _accept(self, request: Request, epoch: int) -> bool:
        """Hold what was granted, unless a newer epoch has begun: write, then look.

        The next leader links, then reads. Whichever comes first, no capacity is free
        there that is held here, whichever process is stopped between any two steps.
        """
        self.row.add(request.slots, request.bytes)
        if self.folder.has_epoch(epoch + 1):
            self.row.add(-request.slots, -request.bytes)
            return False
        self.held[request.number] = request.slots, request.bytes, request.key
        self.row.words[rows.ADMITTED] += 1
        request.lease.state = HELD
        return True

    def decide(self, number: int, refusal: Refused | None, epoch: int) -> None:
        """Take a grant or a refusal from the leader of *epoch*."""
        request = self.waiting.get(number)
        if request is None:
            return  # it was cancelled, and the leader knows
        if refusal is None and not self._accept(request, epoch):
            self.loop.call(self._seek_anew, epoch)
            return
        self._end_wait(request, refusal)

    def _end_wait(self, request: Request, refusal: Refused | None) -> None:
        lease = request.lease
        self.waiting.pop(request.number)
        self._count_waiting()
        request.refusal = refusal
        if refusal is not None:
            lease.state = DONE
            with suppress(ValueError):  # a stranger wrote to the row: tell all the same
                self.row.words[rows.REFUSED] += 1
        if not lease.waiter.wake():  # its loop is closed, or its task is cancelled
            self.release(lease)

    def expire(self, request: Request, max_wait: float | None) -> None:
        """Ask for the refusal of a request that has waited for *max_wait*."""
        if self.leader is not None:
            self.leader.expire_here(request.number, max_wait)
        self._tell(wire.EXPIRE, request.number, max_wait)

    def withdraw(self, request: Request, word: int = rows.CANCELLED) -> bool:
        """Take back a request that waits or is held; return whether it waited."""
        waited = self.waiting.pop(request.number, None) is not None
        if waited:
            self._count_waiting()
            self.row.words[word] += 1
            request.lease.state = DONE
            if self.leader is not None:
                self.leader.give_back_here(request.number)
            self._tell(wire.CANCEL, request.number)
        return waited

    def release(self, lease: Lease, *, lost: bool = False) -> bool:
        """Give back what *lease* holds; ``False`` if it holds nothing here.

        The row is the truth: a leader that does not hear of it will read it.
        """
        cost = self.held.pop(lease.number, None)
        if cost is None:
            return False
        lease.state = DONE
        self.row.add(-cost[0], -cost[1])
        self.row.words[rows.RELEASED] += 1
        self.row.words[rows.LOST] += lost
        if self.leader is not None:
            self.leader.give_back_here(lease.number)
        self._tell(wire.RELEASE, lease.number)
        return True

    def settle(self, lease: Lease, nbytes: int) -> bool:
        """Change what *lease* is charged with; ``False`` if it holds nothing here."""
        cost = self.held.get(lease.number)
        if cost is None:
            return False
        self.row.add(0, nbytes - cost[1])
        self.held[lease.number] = cost[0], nbytes, cost[2]
        lease.bytes = nbytes
        if self.leader is not None:
            self.leader.settle_here(lease.number, nbytes)
        self._tell(wire.SETTLE, lease.number, nbytes)
        return True

    def resize(self, capacity: Capacity) -> None:
        """Take the newest capacity, and tell the others."""
        if self.capacity < capacity:
            self.capacity = capacity
            self.row.write_capacity(capacity)
            if self.leader is not None:
                self.leader.resize_here(capacity)
            self._tell(wire.CAPACITY, capacity.since, *capacity.limits)

    def learn(self, capacity: Capacity) -> None:
        """Take a capacity that another worker knows."""
        with self.locked():
            self.resize(capacity)

    def bury(self, row: Row) -> None:
        """Go on counting for a dead worker, whose row goes, and keep its capacity."""
        with self.locked():
            self.folder.remove(row)  # first: where that fails, nothing counts twice
            count_on(self.row.words, row.words)
            capacity = row.capacity
            # Of another boot, it may seem to be of a time to come.
            if capacity is not None and capacity.since <= (self._clock() + 1) * 1e9:
                self.resize(capacity)

    def _count_waiting(self) -> None:
        self.row.words[rows.WAITING] = len(self.waiting)

    def _tell(self, *frame: Any) -> None:
        link = self._link
        if link is not None:
            link.put(*frame)
            if link.flush():
                self.loop.call(self._read, link)

    # The end.

    def leave(self) -> None:
        """End once nothing is held: unlocked, the row is that of the dead."""
        self.loop.call(self._begin_to_leave)

    def _begin_to_leave(self) -> None:
        self._leaves = True

    def close(self) -> None:
        """Close the descriptors; in a forked child, its copies alone.

        To unlock or to shut down would reach the parent, and so would the removal of
        anything from its selector, which the child shares.
        """
        self.row.close()
        self.folder.close()
        for part in (self.leader, self._link, self._followed, self.loop):
            if part is not None:
                part.close()

    def _cut_off(self, why: str) -> None:
        """Admit no more, and refuse who waits."""
        with self.lock.mutex:  # and no deferred change, which may fail: first tell all
            self.cut_off = f"gate {self._name!r} {why}"
            for request in list(self.waiting.values()):
                self._end_wait(request, GateClosed(self.cut_off))
        self.lock.make_deferred_changes()
        self._say(why)

    def _fail(self) -> None:
        """Leave the others to lead, after an error in the thread that does it here."""
        self._cut_off("ended by an error in its thread; restart the worker")
        self._step_down()

    def _pause(self, error: OSError) -> None:
        """Try again later, where the system has no more descriptors or space."""
        self._step_down()
        self._seeks, self._seek_at = True, self._clock() + _AGAIN
        self._say(f"cannot go on in {self.folder.path}: {error}; it tries again")

    def _say(self, what: str) -> None:
        """Log what goes wrong, once for as long as it does."""
        if what != self._told:
            self._told = what
            log.warning("shared gate %r %s", self._name, what)

    def _is_well(self) -> None:
        self.cut_off = self._told = ""
        self._greeted = True

    # Elections.

    def _turn(self) -> float | None:
        now = self._clock()
        if self._leaves and not self.held:
            self._step_down()
            with self.locked():
                self.close()
            return None
        if self._seeks and now >= self._seek_at and not self._ended:
            self._seek(now)
        if now >= self._tick_at:
            self._tick_at = now + TICK
            self._tick()
        until = min(self._tick_at, self._seek_at if self._seeks else self._tick_at)
        leader = self.leader
        if leader is None:
            return max(until - now, 0.0)
        silent = leader.silent(now)
        if silent:  # a new epoch voids what it was granted and has not taken
            self._seek_anew(leader.epoch, depose=leader.epoch, silent=silent)
            return 0.0
        return max(min(until - now, leader.turn(now)), 0.0)

    def _tick(self) -> None:
        if lost := self.folder.lost(self.row):
            # A new worker would get another gate, or nobody knows what this one holds.
            self._ended = True
            self._step_down()
            how = "restart all that say so; keep it where nothing cleans up, as in /run"
            self._cut_off(f"lost {lost}, which was removed or replaced; {how}")
        elif self.folder.has_epoch(self.epoch + 1):
            self._seek_anew(self.epoch)
        elif self._followed is not None and not self._seeks:
            beats = self._followed.words[rows.BEATS]
            self._missed = self._missed + 1 if beats == self._seen else 0
            self._calm = self._calm + 1 if not self._missed else 0
            self._seen = beats
            if self._calm >= _CALM:
                self._patience = _PATIENCE
            if self._missed >= self._patience:
                self._seek_anew(self.epoch, depose=self.epoch)

    def _seek_anew(
        self, epoch: int, *, depose: int = 0, silent: int = 0, at: float = 0.0
    ) -> None:
        """Leave the leader of *epoch*, to follow the newest one or to be it."""
        if epoch == self.epoch and not self._seeks:
            self._step_down()
            self._seeks, self._seek_at, self._retries = True, at, 0
            self._depose, self._silent = depose, silent

    def _step_down(self) -> None:
        with self.locked():
            leader, self.leader = self.leader, None
            link, self._link = self._link, None
        if leader is not None:
            leader.stop()
        if link is not None:
            self.loop.unwatch(link.sock)
            link.close()

    def _seek(self, now: float) -> None:
        self._seek_at, self._retries = now + _RETRY, self._retries + 1
        epoch = self.folder.newest_epoch()
        row = None
        with suppress(FileNotFoundError, ValueError):
            row = self.folder.leader(epoch)
        ident = row.words[rows.IDENT] if row is not None else 0
        if self._retries > _MOST_RETRIES:  # it lives, and does not listen
            self._depose, self._retries = epoch, 0
        deposes = epoch == self._depose
        if row is None and epoch and not deposes:
            return  # there is a newer one by now
        own = self.row.words[rows.IDENT]
        try:
            if row is None or not row.alive or ident == own or deposes:
                self._lead(epoch + 1, self._silent or ident)
            else:
                self._follow(row, ident, epoch)
        finally:
            if row is not None and row is not self._followed:
                row.close()

    def _lead(self, epoch: int, deposed: int) -> None:
        own = self.row.words[rows.IDENT]
        for row in self.folder.rows():
            row.close()  # there are descriptors for them: elected, it will need them
        listener = self._elected(own, epoch)
        if listener is None:
            return
        self._sleep(_SETTLED)
        self._lose_leader(own)
        self.row.words[rows.EPOCH] = epoch
        with self.locked():  # or a capacity that is set meanwhile would be missed
            gate = self._engine(self.capacity)
            leader = Leader(self, epoch, listener, gate, self._clock)
            self.epoch, self.leader, self._followed = epoch, leader, None
            leader.charge_here()
        leader.take_over(deposed)
        self._seeks = False
        self._is_well()

    def _elected(self, own: int, epoch: int) -> socket.socket | None:
        """Return where the others connect, if *epoch* is this worker's."""
        listener, elected = self._new_socket(), False
        try:
            listener.setblocking(False)
            self.folder.remove_socket(own, epoch)
            with suppress(FileNotFoundError):  # the folder is being removed
                listener.bind(self.folder.socket_path(own, epoch))
                listener.listen(_BACKLOG)  # before it can be found
                elected = self.folder.elect(self.row, epoch)
        finally:
            if not elected:
                listener.close()
                self.folder.remove_socket(own, epoch)
        return listener if elected else None

    def _follow(self, row: Row, ident: int, epoch: int) -> None:
        self.row.words[rows.EPOCH] = epoch
        sock = self._new_socket()
        sock.setblocking(False)
        try:
            sock.connect(self.folder.socket_path(ident, epoch))
            found = is_of_this_user(sock)
        except OSError:  # it ends, or has more to do
            found = False
        if not found:
            sock.close()
            return
        self._lose_leader(ident)
        link = Connection(sock)
        with self.locked():
            self.epoch, self._link, self._followed = epoch, link, row
            self._seen, self._missed = row.words[rows.BEATS], 0
            held = [(number, *cost) for number, cost in self.held.items()]
            waiting = [request.frame() for request in self.waiting.values()]
            capacity = self.capacity.since, *self.capacity.limits
            own = self.row.words[rows.IDENT]
            self._tell(wire.HELLO, VERSION, own, capacity, held, waiting)
        self._greeted = False
        self.loop.watch(sock, partial(self._read, link))
        self._seeks = False

    def _lose_leader(self, ident: int) -> None:
        """Be more patient with the next one, if this one was deposed and lives."""
        row, self._followed = self._followed, None
        if row is not None:
            if row.alive and row.words[rows.IDENT] != ident:
                self._patience = min(2 * self._patience, _MOST_PATIENCE)
            self._calm = 0
            row.close()

    def _read(self, link: Connection) -> None:
        if link is not self._link:
            return
        with self.locked():
            try:
                for kind, *rest in link.read():
                    self._handle(link, kind, *rest)
            except (ValueError, TypeError, KeyError):
                link.ended, self._greeted = True, False
                self._say("got what is no frame of its leader; it greets anew")
            left = link.flush()
        if link.ended:
            # Not at once where it would only be dropped again.
            later = 0.0 if self._greeted else self._clock() + TICK
            self._seek_anew(self.epoch, at=later)
        else:
            self.loop.watch(link.sock, partial(self._read, link), write=left)

    def _handle(self, link: Connection, kind: int, number: int, *rest: Any) -> None:
        if kind == wire.GRANT:
            self.decide(number, None, self.epoch)
        elif kind == wire.REFUSE:
            why, message, retry_after = rest
            refusal = _REFUSALS[why](message, retry_after=retry_after)
            self.decide(number, refusal, self.epoch)
        elif kind == wire.CAPACITY:
            self.learn(Capacity(number, *rest))
            self._is_well()
        elif kind == wire.OTHER_VERSION:
            what = f"is led by version {number} of its frames, not {VERSION}"
            self._cut_off(f"{what}; restart all workers with the same release")
            link.ended = True
