"""Messages in a stream of bytes: each part behind a prefix that tells how long it is.

The prefix has eight bytes, one big-endian number: in its first byte how many parts of
the message follow this one, in the others the bytes of this one.
"""

from __future__ import annotations

import mmap
import socket
import struct
from collections import deque
from collections.abc import Sequence

from . import wire
from ._errors import EncodeError, ProtocolError
from .wire import Buffer

_PREFIX = struct.Struct("!Q")
_SHIFT = 56
_SIZE = 2**_SHIFT - 1
_NOTHING = memoryview(b"")
# From here on, memory of its own that is given back to the system with the tensor.
_MAPPED_FROM = 64 * 2**10
# What may wait for the other side to read: of all messages with tensors, which a gate
# bounds long before; and of others, far more than credit lets pile up.
MOST_TENSORS = 4 * 2**30
MOST_WAITING = 256 * 2**20
_SENDS = 64
_BUFFER = 2**20
# Programs may have undone that Python ignores this signal.
_QUIET: int = getattr(socket, "MSG_NOSIGNAL", 0)


def prepare(sock: socket.socket) -> None:
    """Make one end of a pair ready for frames."""
    sock.setblocking(False)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER)


class FrameReader:
    """Cuts what a socket brings into messages again.

    Args:
        sock: The socket; it does not block.
        head: The most bytes of a first part.
        tensors: The most parts that may follow it.

    Attributes:
        over: Whether nothing more can come.
    """

    __slots__ = (
        "_end",
        "_follow",
        "_head",
        "_memory",
        "_parts",
        "_socket",
        "_start",
        "_tensors",
        "_unfilled",
        "over",
    )

    def __init__(self, sock: socket.socket, *, head: int, tensors: int) -> None:
        self._socket = sock
        self._head = head
        self._tensors = tensors
        # One for ever, used from its beginning: what a reader's caches know already.
        self._memory = memoryview(bytearray(_PREFIX.size + head))
        self._start = self._end = 0
        self._parts: list[Buffer] = []
        self._follow = 0
        self._unfilled = _NOTHING
        self.over = False

    @property
    def amid(self) -> bool:
        """Whether the rest of a message is to come."""
        return bool(self._parts) or self._start < self._end

    def read(self) -> bool:
        """Take what is there, at most a buffer full; False if that is nothing."""
        try:
            count = self._socket.recv_into(self._unfilled or self._room())
        except BlockingIOError:
            return False
        except OSError:
            count = 0
        if not count:
            self.over = True
        elif self._unfilled:
            # An empty rest would keep all of the tensor alive.
            self._unfilled = self._unfilled[count:] or _NOTHING
        else:
            self._end += count
        return count > 0

    def take(self) -> Sequence[Buffer] | None:
        """Return the parts of the next whole message; None if there is none.

        A part that is alone is there until the next `read`.

        Raises:
            ProtocolError: What came is no message; nothing more is taken.
        """
        while not self._unfilled:
            if self._parts and not self._follow:
                parts, self._parts = self._parts, []
                return parts
            if self.over or not self._begin():
                return None
        return None

    def _room(self) -> memoryview:
        # The longest legal part fits, so there always is some.
        rest = self._end - self._start
        if rest:
            self._memory[:rest] = self._memory[self._start : self._end]
        self._start, self._end = 0, rest
        return self._memory[rest:]

    def _begin(self) -> bool:
        begin = self._start + _PREFIX.size
        if begin > self._end:
            return False
        (prefix,) = _PREFIX.unpack_from(self._memory, self._start)
        follow, size = prefix >> _SHIFT, prefix & _SIZE
        self._check(follow, size)
        if self._parts:
            self._begin_tensor(begin, size)
        elif begin + size > self._end:
            return False
        else:
            head = self._memory[begin : begin + size]
            self._parts.append(bytes(head) if follow else head)
            self._start = begin + size
        self._follow = follow
        return True

    def _check(self, follow: int, size: int) -> None:
        if self._parts:
            bad = follow != self._follow - 1 or size > wire.MAX_TENSOR_BYTES
        else:
            bad = follow > self._tensors or size > self._head
        if bad:
            self.over = True
            self._parts = []
            raise ProtocolError(f"a part of {size} bytes before {follow} others")

    def _begin_tensor(self, begin: int, size: int) -> None:
        part = _memory_for(size)
        self._parts.append(part)
        view = memoryview(part)
        there = min(size, self._end - begin)
        view[:there] = self._memory[begin : begin + there]
        self._unfilled = view[there:] or _NOTHING
        self._start = begin + there


def _memory_for(size: int) -> bytearray | memoryview:
    # Not touched before it is filled, whatever a peer claims to send.
    if size < _MAPPED_FROM:
        return bytearray(size)
    return memoryview(mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE))


class FrameWriter:
    """Sends messages through a socket, and keeps what does not fit into it yet.

    Args:
        sock: The socket; it does not block.

    Attributes:
        waiting: Bytes that are kept.
    """

    __slots__ = ("_kept", "_lone", "_socket", "waiting")

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        # Each with whether it is a message without tensors; and the bytes of those.
        self._kept: deque[tuple[memoryview, bool]] = deque()
        self._lone = 0
        self.waiting = 0

    def write(self, parts: Sequence[Buffer]) -> bool:
        """Send or keep one message; what is kept was copied. False: no room for it.

        Raises:
            EncodeError: There is no room for its tensors.
            OSError: The other side has hung up, or the system takes nothing.
        """
        lone = len(parts) == 1
        if lone and not self._kept:
            frame = _PREFIX.pack(len(parts[0])) + parts[0]
            return self._send([frame], lone=True)
        views = [memoryview(part).cast("B") for part in parts]
        size = sum(map(len, views))
        if lone:
            # Tensors leave room for what is to be said of their streams.
            if self._lone + size > MOST_WAITING:
                return False
        elif self.waiting and self.waiting + size > MOST_TENSORS:
            raise EncodeError(
                "no_memory",
                f"{self.waiting} bytes wait for the engine to read them, at most "
                f"{MOST_TENSORS}; admit fewer bytes at a time, or pass arena_bytes=",
            )
        frames: list[Buffer] = []
        for follow, view in zip(reversed(range(len(views))), views, strict=True):
            frames += (_PREFIX.pack(follow << _SHIFT | len(view)), view)
        return self._send(frames, lone=lone)

    def flush(self) -> None:
        """Send what was kept, as much as fits.

        Raises:
            OSError: The other side has hung up.
        """
        # Bounded: a reader that keeps up must not hold the caller.
        for _ in range(_SENDS):
            if not self._kept:
                return
            sent = self._try([self._kept[0][0]])
            frame, lone = self._kept.popleft()
            self._count(-sent, lone=lone)
            if sent < len(frame):
                self._kept.appendleft((frame[sent:], lone))
                return

    def drop(self) -> None:
        """Keep nothing any more."""
        self._kept.clear()
        self._lone = self.waiting = 0

    def _count(self, size: int, *, lone: bool) -> None:
        self.waiting += size
        self._lone += size * lone

    def _send(self, frames: Sequence[Buffer], *, lone: bool) -> bool:
        sent = 0 if self._kept else self._try(frames)
        for frame in frames:
            if sent < len(frame):
                rest = memoryview(bytes(memoryview(frame)[sent:]))
                self._kept.append((rest, lone))
                self._count(len(rest), lone=lone)
            sent = max(0, sent - len(frame))
        return True

    def _try(self, frames: Sequence[Buffer]) -> int:
        try:
            if len(frames) == 1:
                return self._socket.send(frames[0], _QUIET)
            return self._socket.sendmsg(frames, (), _QUIET)
        except BlockingIOError:
            return 0
