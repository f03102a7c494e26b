"""Memory that an engine process can inherit and that no crash leaves behind."""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import secrets
from dataclasses import dataclass
from typing import Literal

Kind = Literal["memfd", "shm", "frames"]


@dataclass(frozen=True, slots=True)
class Memory:
    """One mapping, writable here.

    Attributes:
        kind: How it was made.
        mapping: The memory.
        descriptor: What another process maps it by; ``None`` where none can.
    """

    kind: Kind
    mapping: mmap.mmap
    descriptor: int | None


def create(size: int, kind: Kind | None = None) -> Memory:
    """Make `size` bytes of zeroed memory.

    Args:
        size: Bytes; only those that are written take memory, but for ``"shm"``.
        kind: ``"memfd"``, ``"shm"`` (POSIX shared memory whose name is removed at
            once) or ``"frames"`` (not shared); ``None`` takes the best there is.

    Raises:
        OSError: The system has no such memory, or not enough of it.
    """
    if kind is None:
        try:
            return create(size, "memfd")
        except (AttributeError, OSError):  # none here, or a sandbox forbids it
            return create(size, "shm")
    if kind == "frames":
        private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        return Memory(kind, _undumped(mmap.mmap(-1, size, private)), None)
    descriptor = _memfd() if kind == "memfd" else _nameless()
    try:
        _reserve(descriptor, size, kind)
        mapping = mmap.mmap(descriptor, size, mmap.MAP_SHARED)
        if kind == "memfd":
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
    except BaseException:
        os.close(descriptor)
        raise
    return Memory(kind, _undumped(mapping), descriptor)


def map_inherited(descriptor: int, *, writable: bool = False) -> mmap.mmap:
    """Map inherited memory as a whole and close its descriptor.

    Args:
        descriptor: Of the memory.
        writable: Only because some devices cannot be given memory that is not.

    Raises:
        OSError: There is none.
    """
    try:
        size = os.fstat(descriptor).st_size
        if not size:
            raise OSError("what was inherited as an arena is no memory")
        access = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        mapping = mmap.mmap(descriptor, size, mmap.MAP_SHARED, access)
    finally:
        os.close(descriptor)
    return _undumped(mapping)


if hasattr(fcntl, "F_SEAL_SHRINK"):
    # Nobody, not even we, can now cut off what the other side is reading.
    _SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def _memfd() -> int:
    return os.memfd_create("arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)


def _nameless() -> int:
    from _posixshmem import (  # type: ignore[import-not-found]
        shm_open,
        shm_unlink,
    )

    name = f"/lifecycle-{secrets.token_hex(8)}"
    descriptor: int = shm_open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    # At once: whoever dies later leaves nothing that anybody would have to find.
    shm_unlink(name)
    return descriptor


def _reserve(descriptor: int, size: int, kind: Kind) -> None:
    os.ftruncate(descriptor, size)
    # A full file system is an error here; later it would be a SIGBUS.
    if kind == "shm" and hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, 0, size)


def _undumped(mapping: mmap.mmap) -> mmap.mmap:
    # A core file holds no payload.
    if hasattr(mmap, "MADV_DONTDUMP"):
        with contextlib.suppress(OSError):
            mapping.madvise(mmap.MADV_DONTDUMP)
    return mapping
