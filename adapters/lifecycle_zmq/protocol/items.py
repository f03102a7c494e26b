"""Requests and items on the wire: plain values, and a compact form for tokens.

An item that is a list of one or more unsigned 32-bit integers is a *token list*; those
of one tick travel together in one block of words. Any other item is the msgpack
of a plain value. Each item costs credit, so that a reader bounds what may be on its way
to it: its bytes, and as much again as a small object takes in memory.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Mapping
from typing import Any, Final

from lifecycle_zmq._errors import ProtocolError
from lifecycle_zmq.protocol.plain import is_map, is_plain, pack, refuse, unpack

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

# Of which stream, which of its items modulo 2 ** 32, and the tokens.
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
    """Return an item as CHUNKS carry it.

    Raises:
        EncodeError: It is no plain value, or too large.
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
        raise ProtocolError("an item is no plain value")
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
    """Return the elements of a packed array, and the bytes that say so."""
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
        words: For each list the generation of its stream, which of its items this is,
            how many tokens follow, and they; all of 32 bits.
    """
    packed = array("I", words)
    if _SWAPS:
        packed.byteswap()
    return packed.tobytes()


def unpack_tokens(block: bytes) -> list[TokenList]:
    """Return the token lists of a block, in order.

    Raises:
        ProtocolError: Its lists are not as long as they claim.
    """
    if len(block) % 4:
        raise ProtocolError(f"a token block of {len(block)} bytes")
    packed = array("I", block)
    if _SWAPS:
        packed.byteswap()
    if len(packed) % 4 == 0 and packed[2::4].count(1) == len(packed) // 4:
        # Nearly every tick: one token for each stream.
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
            raise ProtocolError("a token list is not as long as it claims")
        lists.append((words[begin - 3], words[begin - 2], words[begin:at]))
    return lists
