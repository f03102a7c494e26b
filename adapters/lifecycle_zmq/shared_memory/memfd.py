"""Anonymous shared memory: mapped arenas, and sealed memory of one message's tensors.

The engine process inherits or receives descriptors; no crash leaves a name behind.

The tensors of one message lie in one sealed memfd one after the other, each at a
multiple of 64 bytes. The sender writes and never maps them, so they do not count as
memory of its process. Once sealed, neither side can change or truncate them.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import secrets
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from lifecycle_zmq.exceptions import EncodeError, ProtocolError

ArenaKind = Literal["memfd", "shm", "frames"]


@dataclass(frozen=True, slots=True)
class MappedMemory:
    """One mapping, writable here.

    Attributes:
        kind: How it was made.
        mapping: The memory.
        descriptor: Descriptor by which another process maps it; ``None`` if private.
    """

    kind: ArenaKind
    mapping: mmap.mmap
    descriptor: int | None


# Of limits that a user may raise, and that no other kind of memory is free of.
REMEDIES = {
    errno.ENOMEM: "free memory, or raise the limit on address space (ulimit -v)",
    errno.EFBIG: "raise the limit on file sizes (ulimit -f), which counts here",
    errno.ENOSPC: "enlarge /dev/shm",
}


def create(size: int, kind: ArenaKind | None = None) -> MappedMemory:
    """Make `size` bytes of zeroed memory.

    Args:
        size: Bytes; only those that are written take memory, except for ``"shm"``.
        kind: ``"memfd"``, ``"shm"`` (POSIX shared memory whose name is removed at
            once) or ``"frames"`` (not shared); ``None`` takes the best available.

    Raises:
        OSError: The system has no such memory, or not enough of it.
    """
    if kind is None:
        try:
            return create(size, "memfd")
        except OSError as error:
            # Under a limit "shm" would take all the pages, and then fail, too.
            if error.errno in REMEDIES:
                raise
            return create(size, "shm")  # unsupported, or forbidden by a sandbox
    if kind == "frames":
        private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        return MappedMemory(
            kind, _exclude_from_core(mmap.mmap(-1, size, private)), None
        )
    descriptor = _memfd() if kind == "memfd" else _anonymous_shm()
    try:
        _reserve(descriptor, size, kind)
        mapping = mmap.mmap(descriptor, size, mmap.MAP_SHARED)
        if kind == "memfd":
            fcntl.fcntl(descriptor, _F_ADD_SEALS, _SEALS)
    except BaseException:
        os.close(descriptor)
        raise
    return MappedMemory(kind, _exclude_from_core(mapping), descriptor)


def map_inherited(descriptor: int, *, writable: bool = False) -> mmap.mmap:
    """Map inherited memory as a whole and close its descriptor.

    Args:
        descriptor: Of the memory.
        writable: Map it writable, which some devices require.

    Raises:
        OSError: It refers to no memory.
    """
    try:
        size = os.fstat(descriptor).st_size
        if not size:
            raise OSError("the inherited arena descriptor refers to no memory")
        access = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        mapping = mmap.mmap(descriptor, size, mmap.MAP_SHARED, access)
    finally:
        os.close(descriptor)
    return _exclude_from_core(mapping)


# A Python that was built for an old glibc, as uv's are, has no names for these.
_F_ADD_SEALS: int = getattr(fcntl, "F_ADD_SEALS", 1033)
_F_GET_SEALS: int = getattr(fcntl, "F_GET_SEALS", 1034)
# F_SEAL_SEAL, _SHRINK and _GROW: neither side can truncate what the other one reads.
_SEALS = 1 | 2 | 4
_TENSOR_SEALS = _SEALS | 8  # F_SEAL_WRITE


def _memfd() -> int:
    try:
        return os.memfd_create("arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except AttributeError:
        what = "this system, or this build of Python, has no memfd"
        raise OSError(errno.ENOSYS, what) from None


def _anonymous_shm() -> int:
    from _posixshmem import (  # type: ignore[import-not-found]
        shm_open,
        shm_unlink,
    )

    name = f"/lifecycle-{secrets.token_hex(8)}"
    descriptor: int = shm_open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    # At once: a process that is killed later leaves no name behind.
    shm_unlink(name)
    return descriptor


def _reserve(descriptor: int, size: int, kind: ArenaKind) -> None:
    os.ftruncate(descriptor, size)
    # A full file system is an error here; later it would be SIGBUS.
    if kind == "shm" and hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, 0, size)


def _exclude_from_core(mapping: mmap.mmap) -> mmap.mmap:
    # Keeps payloads out of core files.
    if hasattr(mmap, "MADV_DONTDUMP"):
        with contextlib.suppress(OSError):
            mapping.madvise(mmap.MADV_DONTDUMP)
    return mapping


_ALIGNMENT = 64
# One call writes at most 2 GiB less a page.
_MAX_WRITE = 2**30
_FAILED = ctypes.c_void_p(-1).value
SUPPORTED = hasattr(os, "memfd_create")


def layout(sizes: Iterable[int]) -> tuple[list[int], int]:
    """Return the offsets of tensors of these sizes, and the end of the last one."""
    offsets: list[int] = []
    end = 0
    for size in sizes:
        offsets.append(-(-end // _ALIGNMENT) * _ALIGNMENT)
        end = offsets[-1] + size
    return offsets, end


def pack(tensors: Sequence[memoryview]) -> int | None:
    """Return the descriptor of sealed memory with copies of `tensors`, which are bytes.

    ``None``: the system has no such memory, or no descriptor or room for it now.

    Raises:
        EncodeError: There is nothing at the address of a tensor.
    """
    if not SUPPORTED:
        return None
    if (early := _precopied(tensors)) is not None:
        return early
    try:
        descriptor = os.memfd_create("tensors", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError:
        return None
    try:
        for tensor, at in zip(tensors, layout(map(len, tensors))[0], strict=True):
            _write(descriptor, tensor, at)
        fcntl.fcntl(descriptor, _F_ADD_SEALS, _TENSOR_SEALS)
    except OSError as error:
        os.close(descriptor)
        check_address(error)
        return None
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def check_address(error: OSError) -> None:
    """Raise `EncodeError` if the memory of a tensor does not exist any more."""
    if error.errno == errno.EFAULT:
        raise EncodeError(
            "unencodable",
            "the memory of a tensor is gone, as of a mapped file that was truncated; "
            "copy it before",
        ) from None


def precopy(tensors: Sequence[memoryview]) -> list[memoryview] | None:
    """Return copies of `tensors` that `pack` reuses; in any thread.

    Mapped and not touched, so no part of what this process holds; None as for `pack`.
    """
    descriptor = pack(tensors)
    if descriptor is None:
        return None
    sizes = tuple(map(len, tensors))
    try:
        region, offsets = _open(descriptor, sizes)
    except (OSError, MemoryError, ProtocolError):
        os.close(descriptor)
        return None
    region.sizes, region.descriptor = sizes, descriptor
    return _views(region, offsets, sizes)


def _precopied(tensors: Sequence[memoryview]) -> int | None:
    region: Any = tensors[0].obj
    same = isinstance(region, _MappedTensors) and all(
        it.obj is region for it in tensors
    )
    if not same or region.sizes != tuple(map(len, tensors)):
        return None
    # Reused once; sending the same views again copies them.
    descriptor, region.descriptor = region.descriptor, None
    found: int | None = descriptor
    return found


def unpack(descriptor: int, sizes: Sequence[int]) -> list[memoryview]:
    """Return the tensors of these sizes; the last view of them unmaps the memory.

    They are writable copies of the receiver's own (private mapping).

    Raises:
        MemoryError: This process has no room to map it.
        ProtocolError: It refers to no memory, is not sealed, or has another size.
    """
    try:
        region, offsets = _open(descriptor, sizes)
    except OSError:
        raise ProtocolError("the received descriptor refers to no memory") from None
    finally:
        os.close(descriptor)
    return _views(region, offsets, sizes)


def _open(descriptor: int, sizes: Sequence[int]) -> tuple[_MappedTensors, list[int]]:
    offsets, size = layout(sizes)
    seals = fcntl.fcntl(descriptor, _F_GET_SEALS)
    there = os.fstat(descriptor).st_size
    if seals & _TENSOR_SEALS != _TENSOR_SEALS or not size or there != size:
        raise ProtocolError("the memory of tensors is not sealed, or of wrong size")
    return _map(descriptor, size), offsets


def _views(
    region: _MappedTensors, offsets: Sequence[int], sizes: Sequence[int]
) -> list[memoryview]:
    memory = memoryview(region).cast("B")
    places = zip(offsets, sizes, strict=True)
    return [memory[offset : offset + size] for offset, size in places]


def _write(descriptor: int, tensor: memoryview, at: int) -> None:
    while tensor:
        written = os.pwrite(descriptor, tensor[:_MAX_WRITE], at)
        tensor, at = tensor[written:], at + written


# `mmap.mmap` would keep a descriptor as long as the memory is referenced. A ctypes type
# for each length would be cyclic garbage: so one type, longer than any memory.
class _MappedTensors(ctypes.c_ubyte * min(2**46, sys.maxsize)):  # type: ignore[misc]
    size = 0
    # Sizes and descriptor of a precopy, until `pack` reuses it.
    sizes: tuple[int, ...] = ()
    descriptor: int | None = None

    def __del__(self) -> None:
        """Unmap it; this may be any thread."""
        _libc().munmap(ctypes.addressof(self), self.size)
        if self.descriptor is not None:
            os.close(self.descriptor)


def _map(descriptor: int, size: int) -> _MappedTensors:
    access = mmap.PROT_READ | mmap.PROT_WRITE
    address = _libc().mmap(None, size, access, mmap.MAP_PRIVATE, descriptor, 0)
    if address == _FAILED:
        raise MemoryError("the memory of tensors cannot be mapped")
    region: _MappedTensors = _MappedTensors.from_address(address)
    region.size = size
    return region


@cache
def _libc() -> Any:
    libc = ctypes.CDLL(None)
    long, number, pointer = ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p
    libc.mmap.argtypes = [pointer, long, number, number, number, ctypes.c_long]
    libc.mmap.restype = pointer
    libc.munmap.argtypes = [pointer, long]
    return libc


def close(descriptors: Iterable[int]) -> None:
    """Close descriptors, ignoring errors."""
    for descriptor in descriptors:
        with contextlib.suppress(OSError):
            os.close(descriptor)
