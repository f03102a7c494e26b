"""What workers see of each other: a row for each, the lock of its life, and the links.

A row is a small file that one worker writes and all may map. It is locked while that
worker lives, and the lock says that much and nothing else: it is no right to grant.
That is the newest epoch, and epoch n is a hard link to the row of its leader, named
``leader.<n>``. To make the link is to be elected: one atomic step in which no process
can be stopped half-way, and of two candidates one fails.
"""

from __future__ import annotations

import logging
import mmap
import operator
import os
import secrets
import stat
import struct
import sys
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

if sys.platform == "linux":  # pragma: no branch
    import fcntl

# The words of a row. Each is one aligned store of its one writer. There is no version
# word: a writer that is stopped half-way would leave it odd.
IDENT: Final = 0
EPOCH: Final = 1  # that this worker follows; older ones it may still be looking for
BEATS: Final = 2  # of the leader
SLOTS: Final = 3  # granted to this worker and not released, as the bytes
BYTES: Final = 4
WAITING: Final = 5
ADMITTED: Final = 6
REFUSED: Final = 7
CANCELLED: Final = 8
RELEASED: Final = 9
LOST: Final = 10
OVER_LIMIT: Final = 11
CAPACITY_SINCE: Final = 12  # 0 while the next two are written
CAPACITY_SLOTS: Final = 13
CAPACITY_BYTES: Final = 14
PROCESS: Final = 15  # for people alone: no code decides by it

COUNTERS: Final = (ADMITTED, REFUSED, CANCELLED, RELEASED, LOST, OVER_LIMIT)

_WORDS: Final = 16
_SIZE: Final = 8 * _WORDS
# Longer than the step of any file system's clock.
_TICK_NS: Final = 50_000_000
_UNBOUNDED: Final = 2**64 - 1
log: Final = logging.getLogger("lifecycle")
# It is gone, or no worker wrote it.
_NO_ROW: Final = FileNotFoundError, ValueError
# A write lock on the whole file, as `struct flock` says it.
_LOCK: Final = struct.pack("hhqqi4x", 1, os.SEEK_SET, 0, 0, 0)
# A Python that was built for an old glibc, as uv's are, has no names for these.
_F_OFD_GETLK, _F_OFD_SETLK = 36, 37


@dataclass(frozen=True, slots=True, order=True)
class Capacity:
    """A capacity, and when it was named: the newest of all workers counts.

    Attributes:
        since: Nanoseconds of the clock that all processes of a host share.
        slots: Or ``None`` for unbounded, as the bytes.
        bytes: Likewise.
    """

    since: int
    slots: int | None
    bytes: int | None

    @property
    def limits(self) -> tuple[int | None, int | None]:
        """The slots and the bytes."""
        return self.slots, self.bytes


def lock_for_life(descriptor: int) -> None:
    """Lock until the last of this open file is closed, as it is when a process ends."""
    try:
        fcntl.fcntl(descriptor, _F_OFD_SETLK, _LOCK)
    except OSError as error:  # of an old kernel, a sandbox or such a file system
        what = "a shared gate needs locks of open files (OFD), and has none here"
        raise OSError(error.errno, f"{error.strerror}: {what}") from None


class Row:
    """The row of one worker, mapped.

    Args:
        folder: Descriptor of its folder.
        name: In that.
        make: Locks the descriptor of a new row; without it, there is one.

    Attributes:
        words: Its words.
        inode: Of its file.
    """

    def __init__(
        self, folder: int, name: str, *, make: Callable[[int], object] | None = None
    ) -> None:
        flags = os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT | os.O_EXCL if make else 0)
        if not make and not stat.S_ISREG(os.lstat(name, dir_fd=folder).st_mode):
            raise ValueError(f"{name} is no regular file")
        self._lock = os.open(name, flags, 0o600, dir_fd=folder)
        try:
            self.inode = os.fstat(self._lock).st_ino
            if make:
                # Written, and not only made long: on a full file system the first
                # store into a hole of a mapping would kill the process.
                os.pwrite(self._lock, bytes(_SIZE), 0)
                make(self._lock)
            # By an open file of its own: a mapping keeps its file open, and with that
            # the lock, also in a forked child that has closed all it knows of.
            mapped = os.open(name, os.O_RDWR | os.O_CLOEXEC, dir_fd=folder)
            try:
                self.words = memoryview(mmap.mmap(mapped, _SIZE)).cast("Q")
            finally:
                os.close(mapped)
        except BaseException:
            self.close()
            raise

    @property
    def alive(self) -> bool:
        """Whether its worker lives."""
        return self._lock >= 0 and _is_locked(self._lock)

    @property
    def capacity(self) -> Capacity | None:
        """The capacity that its worker knows, or ``None`` while that is written."""
        words = self.words
        since, *limits = words[CAPACITY_SINCE : CAPACITY_BYTES + 1]
        if not since or words[CAPACITY_SINCE] != since:
            return None
        slots, nbytes = (None if each == _UNBOUNDED else each for each in limits)
        return Capacity(since, slots, nbytes)

    def write_capacity(self, capacity: Capacity) -> None:
        """Say which capacity its worker knows. For the worker alone."""
        words = self.words
        words[CAPACITY_SINCE] = 0
        for word, limit in zip(
            (CAPACITY_SLOTS, CAPACITY_BYTES), capacity.limits, strict=True
        ):
            words[word] = _UNBOUNDED if limit is None else limit
        words[CAPACITY_SINCE] = capacity.since

    def add(self, slots: int, nbytes: int) -> None:
        """Count what its worker holds up or down. For the worker alone."""
        self.words[SLOTS] += slots
        self.words[BYTES] += nbytes

    def close(self) -> None:
        """Give the lock up: of its own worker, this is the end. Words stay readable."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


class Folder:
    """The folder that the workers of one gate share, of this user alone.

    Args:
        path: Made if there is none.
        lock: Locks a row for the life of its worker.
        draw: Returns so many random bits, which name a worker.

    Attributes:
        path: As given.
        descriptor: Of the folder, for as long as it is open.

    Raises:
        PermissionError: Another user owns it or may enter it.
    """

    def __init__(
        self,
        path: str,
        *,
        lock: Callable[[int], object] = lock_for_life,
        draw: Callable[[int], int] = secrets.randbits,
    ) -> None:
        self.path, self._lock, self._draw = path, lock, draw
        # Rows that `live_rows` reads, and when the folder had last changed by then.
        self._opened: dict[str, Row] = {}
        self._opened_at = 0
        self._odd: set[str] = set()  # rows that the log has told of
        try:
            Path(path).mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            what = f"{error.strerror}: it is to be a shared gate's folder; name one"
            where = "where this user may make files, such as one below /dev/shm"
            raise OSError(error.errno, f"{what} {where}", path) from None
        flags = os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        self.descriptor = os.open(path, flags)
        found = os.fstat(self.descriptor)
        mode = stat.S_IMODE(found.st_mode)
        if found.st_uid != os.geteuid() or mode & 0o077:
            self.close()
            raise PermissionError(
                f"the folder {path} of a shared gate is of user {found.st_uid} with "
                f"mode {mode:o}; it must be of user {os.geteuid()} alone: chmod 700"
            )
        self._is = found.st_dev, found.st_ino

    def close(self) -> None:
        """Close the descriptor, and leave all files."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1
            self._close_rows()

    @property
    def in_place(self) -> bool:
        """Whether its path still leads here: removed or replaced, it splits a gate."""
        try:
            found = Path(self.path).lstat()
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError:  # nobody can tell now
            return True
        return (found.st_dev, found.st_ino) == self._is

    def lost(self, row: Row) -> str:
        """Return what was removed or replaced: this folder, *row* in it, or nothing."""
        if not self.in_place:
            return self.path
        name = f"row.{row.words[IDENT]:x}"
        try:
            there = os.lstat(name, dir_fd=self.descriptor).st_ino == row.inode
        except OSError as error:  # others say nothing of the row
            there = not isinstance(error, FileNotFoundError)
        return "" if there else f"{self.path}/{name}"

    def join(self) -> Row:
        """Make a row for this worker, locked for its life."""
        row = None
        while row is None:
            row = self._make_row(self._draw(62) + 1)
        return row

    def _make_row(self, ident: int) -> Row | None:
        hidden, row = f"new.{ident:x}", None
        try:
            row = Row(self.descriptor, hidden, make=self._lock)
            row.words[IDENT], row.words[PROCESS] = ident, os.getpid()
            # Named once it is locked: a process that sees the name can trust the lock.
            self._rename(hidden, f"row.{ident:x}")
        except FileNotFoundError:
            if row is not None:
                row.close()
            if not self.in_place:
                raise
            return None  # a leader took it for one of the dead before it was locked
        except BaseException:
            if row is not None:
                row.close()
            self._unlink(hidden)
            raise
        return row

    def _rename(self, name: str, to: str) -> None:
        here = self.descriptor
        os.rename(name, to, src_dir_fd=here, dst_dir_fd=here)

    def row(self, ident: int) -> Row:
        """Open the row of a worker.

        Raises:
            FileNotFoundError: It has died, and others know that by now.
        """
        return Row(self.descriptor, f"row.{ident:x}")

    def rows(self) -> list[Row]:
        """Open all rows, those of the dead included. The caller closes them."""
        found: list[Row] = []
        try:
            for name in self._names("row."):
                try:
                    found.append(self._open(name))
                except FileNotFoundError:
                    continue
                except ValueError:
                    if name not in self._odd:
                        log.warning("%s/%s is no row; remove it", self.path, name)
                    self._odd.add(name)
        except BaseException:
            for row in found:
                row.close()
            raise
        return found

    def dead_rows(self, known: Collection[int]) -> Iterator[Row]:
        """Open the rows of the dead, but for *known* idents. The caller closes them."""
        for name in self._names("row."):
            with suppress(OSError, ValueError):  # no row, or no descriptors are left
                if int(name.removeprefix("row."), 16) not in known:
                    row = self._open(name)
                    if not row.alive:
                        yield row
                    else:
                        row.close()

    def _open(self, name: str) -> Row:
        row = Row(self.descriptor, name)
        if name == f"row.{row.words[IDENT]:x}":
            return row
        kind = OSError if row.alive else ValueError  # who knows what a live one holds?
        row.close()
        raise kind(f"{name} is no row, and locked; end the process that has locked it")

    def live_rows(self) -> list[Row]:
        """Return the rows of workers that live, to be read and not to be kept.

        Where no descriptors are left, those that were found before.
        """
        with suppress(OSError):
            self._look_for_rows()
        return [row for row in list(self._opened.values()) if row.alive]

    def totals(self) -> list[int]:
        """Return the sum of each word, with what the dead counted and not held."""
        with suppress(OSError):
            self._look_for_rows()
        sums = [0] * _WORDS
        for row in list(self._opened.values()):
            if row.alive:
                sums = [*map(operator.add, sums, row.words.tolist())]
            else:
                count_on(sums, row.words)
        return sums

    def _look_for_rows(self) -> None:
        changed = os.fstat(self.descriptor).st_mtime_ns
        if changed == self._opened_at:
            return
        names = self._names("row.")
        for name in self._opened.keys() - set(names):
            with suppress(KeyError):  # a signal handler came between, and was faster
                self._opened.pop(name).close()
        for name in names:
            if name not in self._opened:
                with suppress(*_NO_ROW):
                    self._opened[name] = self._open(name)
        # Another change in the same tick of the file system would look like none.
        if abs(time.time_ns() - changed) > _TICK_NS:
            self._opened_at = changed

    def _close_rows(self) -> None:
        for row in self._opened.values():
            row.close()
        self._opened, self._opened_at = {}, 0

    def remove(self, row: Row) -> None:
        """Remove what a dead worker left but its links; last its row, which tells."""
        ident = row.words[IDENT]
        for name in [*self._names(f"sock.{ident:x}."), f"row.{ident:x}"]:
            self._unlink(name)

    def remove_unborn(self) -> None:
        """Remove what workers left that died before their row had its name.

        A worker that has not locked its row yet makes another one.
        """
        for name in self._names("new."):
            with suppress(OSError):  # it is gone, or no file
                found = os.open(name, os.O_RDWR | os.O_CLOEXEC, dir_fd=self.descriptor)
                try:
                    if not _is_locked(found):
                        self._unlink(name)
                finally:
                    os.close(found)

    # Epochs.

    def newest_epoch(self) -> int:
        """Return the newest epoch, or 0 if there was none."""
        return max(self._epochs(), default=0)

    def has_epoch(self, epoch: int) -> bool:
        """Whether *epoch* has begun: one system call, for each admission."""
        return os.access(f"leader.{epoch}", os.F_OK, dir_fd=self.descriptor)

    def leader(self, epoch: int) -> Row:
        """Open the row of the leader of *epoch*.

        Raises:
            FileNotFoundError: All others have seen a newer one.
        """
        return Row(self.descriptor, f"leader.{epoch}")

    def elect(self, row: Row, epoch: int) -> bool:
        """Begin *epoch*, led by the worker of *row*; ``False`` if it had begun."""
        here = self.descriptor
        try:
            os.link(
                f"row.{row.words[IDENT]:x}",
                f"leader.{epoch}",
                src_dir_fd=here,
                dst_dir_fd=here,
            )
        except FileExistsError:
            return False
        return True

    def forget_epochs(self, newest: int) -> None:
        """Remove the links of all epochs up to *newest*.

        Each live worker must follow it or a later one: a worker that is stopped while
        it looks for the next epoch, or makes it, has to find that when it goes on.
        """
        for epoch in self._epochs():
            if epoch <= newest:
                self._unlink(f"leader.{epoch}")

    # Sockets.

    def socket_path(self, ident: int, epoch: int) -> str:
        """Return where a leader listens: short, for sockets have short paths."""
        return f"/proc/self/fd/{self.descriptor}/sock.{ident:x}.{epoch}"

    def remove_socket(self, ident: int, epoch: int) -> None:
        """Remove the name of a socket, if it is there."""
        self._unlink(f"sock.{ident:x}.{epoch}")

    def _epochs(self) -> list[int]:
        names = [each.partition(".")[2] for each in self._names("leader.")]
        return [int(each) for each in names if each.isdecimal() and len(each) < 19]

    def _names(self, prefix: str) -> list[str]:
        # By a path: listing a descriptor moves an offset that other threads share, and
        # forked children, and either would miss names. Sorted, for no file system has
        # an order that a schedule could be repeated in.
        here = Path(f"/proc/self/fd/{self.descriptor}")
        names = sorted(each.name for each in here.iterdir())
        return [each for each in names if each.startswith(prefix)]

    def _unlink(self, name: str) -> None:
        # Another one was faster, or it stays: no file that is left does harm.
        with suppress(OSError):
            os.unlink(name, dir_fd=self.descriptor)


def count_on(words: list[int] | memoryview[int], dead: memoryview[int]) -> None:
    """Add what a *dead* worker counted; what it held is released."""
    for word in COUNTERS:
        words[word] += dead[word]
    words[RELEASED] += dead[ADMITTED] - dead[RELEASED]


def _is_locked(descriptor: int) -> bool:
    """Ask for a lock without taking it: to try it would look like life itself."""
    found = fcntl.fcntl(descriptor, _F_OFD_GETLK, _LOCK)
    return bool(struct.unpack_from("h", found)[0] != fcntl.F_UNLCK)
