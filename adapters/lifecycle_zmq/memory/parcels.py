"""All tensors of one message in one piece of sealed memory, which its descriptor names.

They lie there one after the other, each from the next multiple of 64 bytes on. The
sender writes and never maps them, so they are no part of what its process holds.
Sealed, they are what nobody can change or cut off while the receiver reads.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import sys
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any

from lifecycle_zmq._errors import EncodeError, ProtocolError

_ALIGNMENT = 64
# One call writes no more than 2 GiB less a page.
_MOST_WRITTEN = 2**30
_FAILED = ctypes.c_void_p(-1).value
SUPPORTED = hasattr(os, "memfd_create") and hasattr(fcntl, "F_SEAL_WRITE")
if SUPPORTED:
    _SEALS = (
        fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL
    )


def layout(sizes: Iterable[int]) -> tuple[list[int], int]:
    """Return where tensors of these sizes begin, and where the last one ends."""
    offsets: list[int] = []
    end = 0
    for size in sizes:
        offsets.append(-(-end // _ALIGNMENT) * _ALIGNMENT)
        end = offsets[-1] + size
    return offsets, end


def pack(tensors: Sequence[memoryview]) -> int | None:
    """Return the descriptor of sealed memory with copies of `tensors`, of bytes each.

    ``None``: the system has no such memory, or no descriptor or room for it now.

    Raises:
        EncodeError: There is nothing at the address of a tensor.
    """
    if not SUPPORTED:
        return None
    if (early := _packed_early(tensors)) is not None:
        return early
    try:
        descriptor = os.memfd_create("tensors", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError:
        return None
    try:
        for tensor, at in zip(tensors, layout(map(len, tensors))[0], strict=True):
            _write(descriptor, tensor, at)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
    except OSError as error:
        os.close(descriptor)
        check_address(error)
        return None
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def check_address(error: OSError) -> None:
    """Raise `EncodeError` if the system found nothing where a tensor should be."""
    if error.errno == errno.EFAULT:
        raise EncodeError(
            "unencodable",
            "a tensor has no memory any more, as of a file that was cut short while it "
            "was mapped; copy it before",
        ) from None


def pack_early(tensors: Sequence[memoryview]) -> list[memoryview] | None:
    """Return copies of `tensors` that `pack` need not copy again; in any thread.

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
    return _cut(region, offsets, sizes)


def _packed_early(tensors: Sequence[memoryview]) -> int | None:
    region: Any = tensors[0].obj
    same = isinstance(region, _Region) and all(it.obj is region for it in tensors)
    if not same or region.sizes != tuple(map(len, tensors)):
        return None
    # Passed once; who has the views and passes them again has them copied.
    descriptor, region.descriptor = region.descriptor, None
    found: int | None = descriptor
    return found


def unpack(descriptor: int, sizes: Sequence[int]) -> list[memoryview]:
    """Return the tensors of these sizes; the last view of them takes the memory along.

    They are writable, as copies of the receiver's own.

    Args:
        descriptor: Whatever was passed as such memory; closed here in any case.
        sizes: Of each tensor, in bytes.

    Raises:
        MemoryError: This process has no room to map it.
        ProtocolError: It is no memory, not sealed, or of another size.
    """
    try:
        region, offsets = _open(descriptor, sizes)
    except OSError:
        raise ProtocolError("what was passed is no memory of tensors") from None
    finally:
        os.close(descriptor)
    return _cut(region, offsets, sizes)


def _open(descriptor: int, sizes: Sequence[int]) -> tuple[_Region, list[int]]:
    offsets, size = layout(sizes)
    seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
    there = os.fstat(descriptor).st_size
    if seals & _SEALS != _SEALS or not size or there != size:
        raise ProtocolError("the memory of tensors is not sealed, or of wrong size")
    return _map(descriptor, size), offsets


def _cut(
    region: _Region, offsets: Sequence[int], sizes: Sequence[int]
) -> list[memoryview]:
    memory = memoryview(region).cast("B")
    places = zip(offsets, sizes, strict=True)
    return [memory[offset : offset + size] for offset, size in places]


def _write(descriptor: int, tensor: memoryview, at: int) -> None:
    while tensor:
        written = os.pwrite(descriptor, tensor[:_MOST_WRITTEN], at)
        tensor, at = tensor[written:], at + written


# `mmap.mmap` would keep a descriptor for as long as the memory is seen. A type for each
# length would be garbage that only the collector finds: so one, longer than any memory.
class _Region(ctypes.c_ubyte * min(2**46, sys.maxsize)):  # type: ignore[misc]
    size = 0
    # What it was packed from, as long as it may be passed on as it is.
    sizes: tuple[int, ...] = ()
    descriptor: int | None = None

    def __del__(self) -> None:
        """Unmap it; this may be any thread."""
        _libc().munmap(ctypes.addressof(self), self.size)
        if self.descriptor is not None:
            os.close(self.descriptor)


def _map(descriptor: int, size: int) -> _Region:
    access = mmap.PROT_READ | mmap.PROT_WRITE
    address = _libc().mmap(None, size, access, mmap.MAP_PRIVATE, descriptor, 0)
    if address == _FAILED:
        raise MemoryError("the memory of tensors cannot be mapped")
    region: _Region = _Region.from_address(address)
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
    """Close each of them, whatever it is."""
    for descriptor in descriptors:
        with contextlib.suppress(OSError):
            os.close(descriptor)
