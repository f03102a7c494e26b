"""Values and items on the wire: plain msgpack, and a compact form for tokens.

An item that is a list of one or more unsigned 32-bit integers is a *token list*; those
of one step travel together in one block of words. Any other item is the msgpack of a
plain value: no extension types, limited depth. Each item costs credit, which bounds
what may be in flight to a reader: its bytes, and as much again as a small object takes
in memory.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Mapping
from typing import Any, Final

import msgpack

from lifecycle_zmq.exceptions import EncodeError, ProtocolError

MAX_DEPTH = 16
MAX_MAP = 1024

# An array may claim no more elements than there are bytes, so nested arrays within so
# few bytes claim less than a fifth of a megabyte together.
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
        # A prompt is one long list of ints: checked without a Python step for each.
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

    Raises:
        EncodeError: It exceeds a limit, or msgpack cannot encode it.
    """
    try:
        packed: bytes = msgpack.packb(value)
    except (ValueError, OverflowError):  # a lone surrogate, an int beyond 64 bits
        raise EncodeError(
            "unencodable",
            f"{what} holds text that is not Unicode or an integer beyond 64 bits; "
            "replace it before",
        ) from None
    # Each element takes a byte, so a short message needs no count.
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
    """Return the value of msgpack that a peer sent.

    Raises:
        ProtocolError: It is malformed or exceeds the limit.
    """
    size = len(packed)
    if not size:  # the Unpacker would choose its own buffer size
        raise ProtocolError(f"{what} is empty")
    try:
        # Unpacking allocates what an array claims to hold. So skip through it first,
        # without allocating: then every claimed element exists.
        if size > _SHORT:
            walk = msgpack.Unpacker(max_buffer_size=size, read_size=size)
            walk.feed(packed)
            walk.skip()
        return msgpack.unpackb(
            packed,
            max_array_len=min(array, size),
            max_map_len=min(MAX_MAP, size),
            # Admits an empty extension, which `is_plain` refuses.
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


# Credit that an item costs beside its bytes; a token costs four of those.
BASE_COST: Final = 64
TOKEN_COST: Final = 4
MAX_TOKEN: Final = 2**32 - 1
MAX_TOKENS: Final = 2**15
MAX_ITEM: Final = 255 * 2**10
MAX_REQUEST: Final = 2**20
# A prompt of 128 Ki tokens fits.
_MAX_REQUEST_ARRAY: Final = 2**17
_MAX_ARRAY: Final = 2**16
_SWAPS: Final = sys.byteorder == "big"

# Generation of the stream, number of the item modulo 2 ** 32, and the tokens.
TokenList = tuple[int, int, list[int]]


def is_token_list(item: Any) -> bool:
    """Whether `item` takes the compact form."""
    if type(item) is not list:
        return False
    if len(item) == 1:
        (token,) = item
        return type(token) is int and 0 <= token <= MAX_TOKEN
    return (
        0 < len(item) <= MAX_TOKENS
        and set(map(type, item)) == {int}
        and min(item) >= 0
        and max(item) <= MAX_TOKEN
    )


def pack_item(item: Any) -> bytes:
    """Return an item as TICK chunks carry it.

    Raises:
        EncodeError: It is not a plain value, or too large.
    """
    if not is_plain(item):
        raise refuse("an item")
    return pack(item, "an item", size=MAX_ITEM, array=_MAX_ARRAY)


def unpack_item(packed: bytes) -> Any:
    """Return the item of `packed`.

    Raises:
        ProtocolError: It is none.
    """
    item = unpack(packed, "an item", array=_MAX_ARRAY)
    if not is_plain(item):
        raise ProtocolError(
            "an item has a value of another type than the wire protocol's"
        )
    return item


def pack_request(request: Any) -> bytes:
    """Return a request as START and CONTROL carry it.

    Raises:
        EncodeError: It has other than plain values, or is too large.
        TypeError: It is no map.
    """
    if type(request) is not dict:
        if not isinstance(request, Mapping):
            kind = type(request).__name__
            raise TypeError(f"a request is a map of plain values, not {kind}")
        request = dict(request)
    if not is_map(request):
        raise refuse("a request")
    return pack(request, "a request", size=MAX_REQUEST, array=_MAX_REQUEST_ARRAY)


def unpack_request(packed: bytes) -> dict[str, Any]:
    """Return the request of `packed`.

    Raises:
        ProtocolError: It is none.
    """
    request = unpack(packed, "a request", array=_MAX_REQUEST_ARRAY)
    if not is_map(request):
        raise ProtocolError("a request is no map of plain values")
    fields: dict[str, Any] = request
    return fields


def join_items(one: bytes, other: bytes) -> bytes | None:
    """Return one packed list with the elements of two, if both are lists.

    Lists whose elements would exceed the limit of an item are not joined.
    """
    counted, more = _array_head(one), _array_head(other)
    if counted is None or more is None or counted[0] + more[0] > _MAX_ARRAY:
        return None
    count, size = counted[0] + more[0], len(one) + len(other)
    if size > MAX_ITEM:
        return None
    return b"\xdd" + count.to_bytes(4, "big") + one[counted[1] :] + other[more[1] :]


def _array_head(packed: bytes) -> tuple[int, int] | None:
    """Return the number of elements of a packed array, and the length of its header."""
    first = packed[0]
    if 0x90 <= first <= 0x9F:
        return first & 0x0F, 1
    if first in {0xDC, 0xDD}:
        size = 3 if first == 0xDC else 5
        return int.from_bytes(packed[1:size], "big"), size
    return None


def pack_tokens(words: list[int]) -> bytes:
    """Return the block of some token lists.

    Args:
        words: For each list the generation of its stream, the number of the item, the
            number of tokens, and the tokens; all of 32 bits.
    """
    packed = array("I", words)
    if _SWAPS:
        packed.byteswap()
    return packed.tobytes()


def unpack_tokens(block: bytes) -> list[TokenList]:
    """Return the token lists of a block, in order.

    Raises:
        ProtocolError: A list is shorter than it claims.
    """
    if len(block) % 4:
        raise ProtocolError(f"a token block of {len(block)} bytes")
    packed = array("I", block)
    if _SWAPS:
        packed.byteswap()
    if len(packed) % 4 == 0 and packed[2::4].count(1) == len(packed) // 4:
        # Nearly every message: one token for each stream.
        tokens = [[token] for token in packed[3::4]]
        return list(zip(packed[::4], packed[1::4], tokens, strict=True))
    return _walk(packed.tolist())


def _walk(words: list[int]) -> list[TokenList]:
    lists, at = [], 0
    while at < len(words):
        begin = at + 3
        count = words[at + 2] if begin < len(words) else 0
        at = begin + count
        if not 0 < count <= len(words) - begin:
            raise ProtocolError("a token list does not have its declared length")
        lists.append((words[begin - 3], words[begin - 2], words[begin:at]))
    return lists
