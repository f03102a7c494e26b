"""A simulated host: processes with threads, sockets between them, and one clock.

Files and the locks on them are real. A process can be stopped and killed between any
two statements that have a step: its threads are greenlets, which run one at a time.
"""

from __future__ import annotations

import errno
import fcntl
import math
import os
import struct
import sys
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from greenlet import GreenletExit, getcurrent, greenlet
from statements import Statements

from lifecycle._lock import ChangeLock

_UNLOCK = struct.pack("hhqqi4x", fcntl.F_UNLCK, os.SEEK_SET, 0, 0, 0)


class Thread:
    """One thread of a process, which runs when the schedule says so."""

    def __init__(self, process: Process, run: Callable[[], object]) -> None:
        self.process = process
        self.condition: Callable[[], bool] | None = None
        self.until = math.inf
        self._run = run
        self.greenlet = greenlet(self._main, process.host.main)

    def _main(self) -> None:
        try:
            self._run()
        except GreenletExit:
            pass
        except BaseException:  # noqa: BLE001 - the schedule reports it
            self.process.host.crashes.append(traceback.format_exc())

    @property
    def ready(self) -> bool:
        """Whether it can go on."""
        process = self.process
        if process.stopped or process.dead or self.greenlet.dead:
            return False
        if self.condition is None:
            return True
        return self.until <= process.host.now or self.condition()


class Process:
    """What is stopped and killed as a whole."""

    def __init__(self, host: Host, number: int) -> None:
        self.host, self.number = host, number
        self.stopped = self.dead = False
        self.continues_at = math.inf
        self.threads: list[Thread] = []
        self.sockets: dict[Socket, None] = {}
        self._locked: tuple[int, int] | None = None

    def spawn(self, run: Callable[[], object]) -> None:
        """Start a thread."""
        self.threads.append(Thread(self, run))

    def lock_row(self, descriptor: int) -> None:
        """Lock for real, and remember what: at the end of this process it is free."""
        from lifecycle.shared.rows import lock_for_life

        lock_for_life(descriptor)
        self._locked = descriptor, os.fstat(descriptor).st_ino

    def kill(self) -> None:
        """Run nothing more. What it has open is closed by the system, by and by."""
        self.dead = True

    def close_sockets(self) -> None:
        """Close what a killed process had open."""
        for each in list(self.sockets):
            each.close()

    def unlock_row(self) -> None:
        """Close what a killed process had locked: others see that it is dead."""
        descriptor, inode = self._locked or (-1, 0)
        self._locked = None
        try:
            if os.fstat(descriptor).st_ino == inode:
                fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, _UNLOCK)
        except OSError:
            pass  # it was closed before

    def new_socket(self) -> Socket:
        """Make a socket."""
        return Socket(self)

    def new_loop(self, *args: Any) -> Loop:
        """Make a loop, to run in a thread of this process."""
        return Loop(self, *args)

    def new_lock(self) -> ChangeLock:
        """Make a lock that lets the threads of this host wait."""
        lock = ChangeLock()
        lock.mutex = Mutex(self.host)
        lock.interrupted = lock.mutex.is_owned
        return lock


class Host:
    """The clock, and what runs.

    Args:
        statements: That its threads run.
        most_frames: That a socket takes before it would block.

    Attributes:
        now: In seconds.
        moving: Sockets that something is on its way to.
        crashes: Errors that ended a thread.
        ended: Whether the schedule is over: whatever still runs only cleans up.
        running: The newest of them.
    """

    running: Host

    def __init__(self, statements: Statements, most_frames: int) -> None:
        Host.running = self
        self.now, self.most_frames = 1000.0, most_frames
        self.listening: dict[str, Socket] = {}
        self.moving: dict[Socket, None] = {}
        self.crashes: list[str] = []
        self.ended = False
        self.sockets = 1_000_000
        self.current: Thread | None = None
        self._statements, self.main = statements, getcurrent()

    def clock(self) -> float:
        """Return the time."""
        return self.now

    def run(self, thread: Thread, statements: int) -> bool:
        """Let a thread run; return whether it was interrupted and did not wait."""
        self.current, self._statements.left = thread, statements
        thread.condition, thread.until = None, math.inf
        thread.greenlet.switch()
        self.current, self._statements.left = None, sys.maxsize
        return thread.condition is None and not thread.greenlet.dead

    def interrupt(self) -> None:
        """Come back to the schedule, in the middle of a thread."""
        if not self.ended:
            self.main.switch()

    def wait(self, condition: Callable[[], bool], until: float = math.inf) -> None:
        """Let the thread that calls this wait."""
        thread = self.current
        if self.ended or thread is None:
            raise GreenletExit
        thread.condition, thread.until = condition, until
        self.main.switch()

    def sleep(self, seconds: float) -> None:
        """Let the thread that calls this sleep."""
        self.wait(lambda: False, self.now + seconds)

    def end(self, threads: list[Thread]) -> None:
        """End all threads; what they clean up now concerns nobody."""
        self.ended = True
        for each in threads:
            if not each.greenlet.dead:
                self.current = each
                each.greenlet.throw(GreenletExit)


class Mutex:
    """The lock of one process, as `threading.RLock` is."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._owner: Thread | None = None
        self._depth = 0

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        while self._owner not in (None, self._host.current) and not self._host.ended:
            if not blocking:
                return False
            self._host.wait(lambda: self._owner is None)
        self._owner = self._host.current
        self._depth += 1
        return True

    def release(self) -> None:
        if not self.is_owned():
            raise RuntimeError("cannot release un-acquired lock")
        self._depth -= 1
        if not self._depth:
            self._owner = None

    def is_owned(self) -> bool:
        return self._owner is not None and self._owner is self._host.current

    __enter__ = acquire

    def __exit__(self, *_: object) -> None:
        self.release()


class Loop:
    """What `lifecycle.shared.loop.Loop` does, in a thread of the host."""

    def __init__(
        self,
        process: Process,
        turn: Callable[[], float | None],
        hindered: Callable[[OSError], object],
        failed: Callable[[], object],
        name: str,
    ) -> None:
        self._process, self._turn, self._hindered = process, turn, hindered
        self._calls: deque[tuple[Callable[..., object], tuple[Any, ...]]] = deque()
        self._watched: dict[int, tuple[Socket, Callable[[], object], bool]] = {}

    def start(self) -> None:
        self._process.spawn(self._run)

    def call(self, function: Callable[..., object], *args: Any) -> None:
        self._calls.append((function, args))

    def watch(
        self, what: Socket, on_ready: Callable[[], object], *, write: bool = False
    ) -> None:
        # Registered as an epoll is: the first callback stays while the events do.
        found = self._watched.get(what.fileno())
        if found is None or found[2] != write:
            self._watched[what.fileno()] = what, on_ready, write

    def unwatch(self, what: Socket) -> None:
        self._watched.pop(what.fileno(), None)

    def close(self) -> None:
        self._watched.clear()

    def _has_to_run(self) -> bool:
        return bool(self._calls) or next(self._ready(), None) is not None

    def _ready(self) -> Iterator[Callable[[], object]]:
        for sock, on_ready, write in self._watched.values():
            if not sock.closed and (sock.readable or (write and sock.writable)):
                yield on_ready

    def _run(self) -> None:
        host, seconds = self._process.host, 0.0
        until: float | None = host.now
        while until is not None:
            if host.now < until and not self._has_to_run():
                host.wait(self._has_to_run, until)
            try:
                wanted = self._step()
            except OSError as error:
                host.crashes.append(traceback.format_exc())
                self._hindered(error)
                host.sleep(0.1)
                wanted = seconds
            until = None if wanted is None else host.now + wanted
        self.close()

    def _step(self) -> float | None:
        for on_ready in list(self._ready()):
            on_ready()
        while self._calls:
            function, args = self._calls.popleft()
            function(*args)
        return self._turn()


class Socket:
    """A Unix socket; what is sent to it comes when the schedule says so."""

    def __init__(self, process: Process) -> None:
        self.process, self.host = process, process.host
        self.host.sockets += 1
        self._number = self.host.sockets
        self.closed = self._peer_closed = self._ended = False
        self._came = self._flying = b""
        self._peer: Socket | None = None
        self._address = ""
        self._backlog: deque[Socket] | None = None
        process.sockets[self] = None

    # As of a real one.

    def fileno(self) -> int:
        return -1 if self.closed else self._number

    def setblocking(self, flag: bool) -> None:
        assert not flag

    def getsockopt(self, *_: int) -> bytes:
        return struct.pack("3i", self.process.number, os.geteuid(), os.getegid())

    def bind(self, path: str) -> None:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL, 0o600))
        self._address = path.rpartition("/")[2]

    def listen(self, backlog: int) -> None:
        self._backlog = deque()
        self.host.listening[self._address] = self

    def accept(self) -> tuple[Socket, str]:
        if self.closed:
            raise OSError(errno.EBADF, "closed")
        if not self._backlog:
            raise BlockingIOError
        return self._backlog.popleft(), ""

    def connect(self, path: str) -> None:
        Path(path).stat()
        listener = self.host.listening.get(path.rpartition("/")[2])
        if listener is None or listener._backlog is None:
            raise ConnectionRefusedError
        other = Socket(listener.process)
        self._peer, other._peer = other, self
        listener._backlog.append(other)

    def send(self, data: bytes) -> int:
        peer = self._peer
        if self.closed or peer is None or peer.closed or peer._peer_closed:
            raise BrokenPipeError
        room = self.host.most_frames - peer._frames
        if room <= 0:
            raise BlockingIOError
        # Frames are counted, and not bytes: idents are of any length.
        sent = _cut(data, room, 3)
        peer._flying += sent
        self.host.moving[peer] = None
        return len(sent)

    def recv(self, size: int) -> bytes:
        if self.closed:
            raise OSError(errno.EBADF, "closed")
        if not self._came and not self._ended:
            raise BlockingIOError
        came, self._came = self._came, b""
        return came

    def close(self) -> None:
        if self.closed:
            return
        self.closed = True
        self.process.sockets.pop(self, None)
        self.host.moving.pop(self, None)
        if self.host.listening.get(self._address) is self:
            del self.host.listening[self._address]
        for each in self._backlog or ():
            each.close()
        if self._peer is not None and not self._peer.closed:
            self._peer._peer_closed = True
            self.host.moving[self._peer] = None

    # For the host.

    def cut(self) -> None:
        """End a connection, as for no reason."""
        for each in (self, self._peer):
            if each is not None and self._peer is not None and not each.closed:
                each._peer_closed = True
                self.host.moving[each] = None

    @property
    def _frames(self) -> int:
        return self._flying.count(b"\n") + self._came.count(b"\n")

    @property
    def readable(self) -> bool:
        return bool(self._came or self._ended or self._backlog)

    @property
    def writable(self) -> bool:
        peer = self._peer
        return peer is None or peer.closed or peer._frames < self.host.most_frames

    def deliver(self, frames: int, rest: int) -> None:
        """Let so many frames come, and the first bytes of the next one."""
        if self._flying:
            came = _cut(self._flying, frames, rest)
            self._came += came
            self._flying = self._flying[len(came) :]
        elif self._peer_closed:
            self._ended = True
        if not self._flying and self._ended >= self._peer_closed:
            self.host.moving.pop(self, None)


def _cut(data: bytes, frames: int, rest: int) -> bytes:
    lines = data.splitlines(keepends=True)
    return b"".join([*lines[:frames], *(each[:rest] for each in lines[frames:][:1])])
