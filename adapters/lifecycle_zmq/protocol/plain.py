"""Plain values and their msgpack: no extension types, nothing nested too deep."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgpack

from lifecycle_zmq._errors import EncodeError, ProtocolError

MAX_DEPTH = 16
MAX_MAP = 1024

# An array may claim no more elements than there are bytes, so even arrays within arrays
# within so many bytes claim no more than a fifth of a megabyte together.
_SHORT = 256

_TEXT = frozenset({str})
_SCALARS = frozenset({int, float, str, bytes, bool, type(None)})


def is_plain(value: Any, depth: int = MAX_DEPTH) -> bool:
    """Whether `value` is of plain types only, nested at most `depth` deep."""
    kind = type(value)
    if kind in _SCALARS:
        return True
    if depth == 0:
        return False
    if kind is list or kind is tuple:
        # A prompt is one long list of ints: decided without a step of Python each.
        return _SCALARS.issuperset(map(type, value)) or all(
            is_plain(item, depth - 1) for item in value
        )
    return kind is dict and is_map(value, depth)


def is_map(value: Any, depth: int = MAX_DEPTH) -> bool:
    """Whether `value` is a map with text keys and plain values."""
    if type(value) is not dict or len(value) > MAX_MAP:
        return False
    if not _TEXT.issuperset(map(type, value)):
        return False
    return _SCALARS.issuperset(map(type, value.values())) or all(
        is_plain(item, depth - 1) for item in value.values()
    )


def pack(value: Any, what: str, *, size: int, array: int) -> bytes:
    """Return the msgpack of a plain `value`.

    Args:
        value: What to pack; `is_plain` or a map of checked fields.
        what: What an error calls it.
        size: The most bytes.
        array: The most elements of one array in it.

    Raises:
        EncodeError: It exceeds a limit, or holds what msgpack has no form for.
    """
    try:
        packed: bytes = msgpack.packb(value)
    except (ValueError, OverflowError):  # a lone surrogate, an int beyond 64 bits
        raise EncodeError(
            "unencodable",
            f"{what} holds text that is not Unicode or an integer beyond 64 bits; "
            "replace it before",
        ) from None
    # An element takes a byte, so a short message needs no count.
    if len(packed) > size or (len(packed) > array and _longest(value) > array):
        raise EncodeError(
            "too_large",
            f"{what} of {len(packed)} bytes exceeds the limit of {size} bytes and "
            f"{array} elements an array; send less",
        )
    return packed


def refuse(what: str) -> EncodeError:
    """Return the error of a value that is not plain."""
    return EncodeError(
        "unencodable",
        f"{what} takes plain values only (None, bool, int, float, str, bytes, list, "
        f"dict with str keys) nested up to {MAX_DEPTH} deep; convert what it holds "
        "before",
    )


def unpack(packed: bytes | memoryview, what: str, *, array: int) -> Any:
    """Return the value of one msgpack that a peer sent.

    Args:
        packed: The bytes; all of them are that value.
        what: What an error calls it.
        array: The most elements of one array in it.

    Raises:
        ProtocolError: It is malformed or exceeds the limit.
    """
    size = len(packed)
    if not size:  # which would ask the walk for a buffer of its own choice
        raise ProtocolError(f"{what} is empty")
    try:
        # Memory is taken for what an array claims to hold. So it is first walked
        # through without making anything: then each element claimed is there.
        if size > _SHORT:
            walk = msgpack.Unpacker(max_buffer_size=size, read_size=size)
            walk.feed(packed)
            walk.skip()
        return msgpack.unpackb(
            packed,
            max_array_len=min(array, size),
            max_map_len=min(MAX_MAP, size),
            # Lets an extension of no bytes through: a type that `is_plain` refuses.
            max_ext_len=0,
        )
    except (ValueError, RecursionError, msgpack.OutOfData):
        # Not chained: the cause would hold the frame, and with it a prompt.
        raise ProtocolError(f"{what} is malformed") from None


def _longest(value: Any) -> int:
    kind = type(value)
    if isinstance(value, Mapping):
        return max(map(_longest, value.values()), default=0)
    if kind is list or kind is tuple:
        if _SCALARS.issuperset(map(type, value)):
            return len(value)
        return max(len(value), *map(_longest, value))
    return 0
