"""Messages in a stream of bytes: each part behind a prefix that tells how long it is.

The prefix has eight bytes, one big-endian number: in its first byte how many parts of
the message follow this one, in the others the bytes of this one. Is the highest bit of
that byte set in the first part, the others' bytes do not follow their prefixes: they
lie in memory whose descriptor is passed with the first byte of the message.
"""

from __future__ import annotations

import mmap
import socket
import struct
from collections.abc import Sequence

from lifecycle_zmq._errors import ProtocolError
from lifecycle_zmq.memory.tensors import LOST
from lifecycle_zmq.protocol import wire
from lifecycle_zmq.protocol.wire import Buffer
from lifecycle_zmq.transport.passing import passed

PREFIX = struct.Struct("!Q")
SHIFT = 56
APART = 128
_SIZE = 2**SHIFT - 1
_NOTHING = memoryview(b"")
# From here on, memory of its own that is given back to the system with the tensor.
_MAPPED_FROM = 64 * 2**10


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
        "_passed",
        "_receive",
        "_sizes",
        "_skipped",
        "_start",
        "_tensors",
        "_unfilled",
        "over",
    )

    def __init__(self, sock: socket.socket, *, head: int, tensors: int) -> None:
        self._passed = passed(sock) if tensors else None
        self._receive = (sock if self._passed is None else self._passed).recv_into
        self._head = head
        self._tensors = tensors
        # One for ever, used from its beginning: what a reader's caches know already.
        self._memory = memoryview(bytearray(PREFIX.size + head))
        self._start = self._end = 0
        self._parts: list[Buffer] = []
        self._follow = 0
        self._unfilled = _NOTHING
        # Bytes of a tensor to come for which there is no memory.
        self._skipped = 0
        # Of the tensors whose bytes are apart; None while they are not.
        self._sizes: list[int] | None = None
        self.over = False

    @property
    def amid(self) -> bool:
        """Whether the rest of a message is to come."""
        return bool(self._parts) or self._start < self._end

    def read(self) -> bool:
        """Take what is there, at most a buffer full; False if that is nothing.

        Raises:
            ProtocolError: Something was passed that no message has.
        """
        try:
            if self._passed is not None and self._passed.held and not self.amid:
                raise ProtocolError("memory was passed that no message announces")
            count = self._receive(self._unfilled or self._room())
        except BlockingIOError:
            return False
        except OSError:
            count = 0
        except ProtocolError:
            self.close()
            raise
        if not count:
            self.close()
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
            if self._skipped and not self._skip():
                return None
            if self._parts and not self._follow:
                parts, self._parts = self._parts, []
                return parts
            if self.over or not self._begin():
                return None
        return None

    def close(self) -> None:
        """Take nothing more, and close what was passed for messages that miss more."""
        self.over = True
        if self._passed is not None:
            self._passed.close()

    def _room(self) -> memoryview:
        # The longest legal part fits, so there always is some.
        rest = self._end - self._start
        if rest:
            self._memory[:rest] = self._memory[self._start : self._end]
        self._start, self._end = 0, rest
        return self._memory[rest:]

    def _begin(self) -> bool:
        begin = self._start + PREFIX.size
        if begin > self._end:
            return False
        (prefix,) = PREFIX.unpack_from(self._memory, self._start)
        follow, size = prefix >> SHIFT, prefix & _SIZE
        if not self._parts:
            self._sizes = [] if follow & APART else None
            follow &= ~APART
        self._check(follow, size)
        if self._parts:
            self._begin_tensor(begin, size, last=not follow)
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
            bad = bad or (self._sizes is not None and not follow)
        if bad:
            self._parts = []
            self.close()
            raise ProtocolError(f"a part of {size} bytes before {follow} others")

    def _begin_tensor(self, begin: int, size: int, *, last: bool) -> None:
        if self._sizes is not None:
            self._sizes.append(size)
            self._start = begin
            if last:
                self._parts += self._passed_tensors(self._sizes)
            return
        part = _memory_for(size)
        self._parts.append(part)
        if part is LOST:
            self._start, self._skipped = begin, size
            return
        view = memoryview(part)
        there = min(size, self._end - begin)
        view[:there] = self._memory[begin : begin + there]
        self._unfilled = view[there:] or _NOTHING
        self._start = begin + there

    def _skip(self) -> bool:
        """Drop what has come of what is to be skipped; False while more is to come."""
        there = min(self._skipped, self._end - self._start)
        self._start += there
        self._skipped -= there
        return not self._skipped

    def _passed_tensors(self, sizes: list[int]) -> list[memoryview]:
        try:
            if self._passed is None:
                raise ProtocolError("this system knows no memory that is passed")
            return self._passed.take(sizes)
        except ProtocolError:
            self._parts = []
            self.close()
            raise


def _memory_for(size: int) -> bytearray | memoryview:
    """Return memory for a tensor; `LOST` where this process has no room for it."""
    # Not touched before it is filled, whatever a peer claims to send.
    try:
        if size < _MAPPED_FROM:
            return bytearray(size)
        return memoryview(mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE))
    except (MemoryError, OSError):
        return LOST
