"""The items of streams on the wire: plain values, and a compact form for tokens.

An item that is a list of one or more unsigned 32-bit integers is a *token list*; those
of one tick travel together as four columns of one block. Any other item is the msgpack
of a plain value. Each item costs credit, so that a reader bounds what may be on its way
to it: its bytes, and as much again as a small object takes in memory.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from itertools import chain
from typing import Any, Final

from ._errors import ProtocolError
from ._plain import is_plain, pack, refuse, unpack

# Credit that an item costs beside its bytes; a token costs four of those.
BASE_COST: Final = 64
TOKEN_COST: Final = 4
MAX_TOKEN: Final = 2**32 - 1
MAX_TOKENS: Final = 2**15
MAX_ITEM: Final = 255 * 2**10
_MAX_ARRAY: Final = 2**16
_SWAPS: Final = sys.byteorder == "big"

# Of which stream, which of its items, and the tokens.
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


def pack_tokens(
    streams: Sequence[int],
    firsts: Sequence[int],
    lengths: Sequence[int],
    tokens: Sequence[int],
) -> bytes:
    """Return the block of some token lists; no column may exceed 32 bits.

    Args:
        streams: The generation of each list's stream.
        firsts: Which item of its stream each list is, from 0.
        lengths: How many tokens each has.
        tokens: The tokens of all lists, one after another.
    """
    if not streams:
        return b""
    words = array("I", chain((len(streams),), streams, firsts, lengths, tokens))
    if _SWAPS:
        words.byteswap()
    return words.tobytes()


def unpack_tokens(block: bytes) -> list[TokenList]:
    """Return the token lists of a block, in order.

    Raises:
        ProtocolError: Its columns are not what they claim.
    """
    if not block:
        return []
    if len(block) % 4:
        raise ProtocolError(f"a token block of {len(block)} bytes")
    words = array("I", block)
    if _SWAPS:
        words.byteswap()
    count, size = words[0], len(words)
    if not 0 < count <= (size - 1) // 4:
        raise ProtocolError(f"{count} token lists in {size} words")
    at = 1 + 3 * count
    lengths, tokens = words[1 + 2 * count : at].tolist(), words[at:].tolist()
    if 0 in lengths or sum(lengths) != len(tokens):
        raise ProtocolError("the lengths of the token lists are not their own")
    streams, firsts = words[1 : 1 + count], words[1 + count : 1 + 2 * count]
    return list(zip(streams, firsts, _split(tokens, lengths), strict=True))


def _split(tokens: list[int], lengths: list[int]) -> list[list[int]]:
    if len(tokens) == len(lengths):
        return [[token] for token in tokens]
    lists, end = [], 0
    for length in lengths:
        begin, end = end, end + length
        lists.append(tokens[begin:end])
    return lists
