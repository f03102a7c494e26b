"""The map of a TICK that brings tokens and no other news, which nearly all are.

All of it but the block is always the same bytes. So such a map is told by them, and
made of them, without msgpack and without a look at its fields: those are a third of
what a message of 128 tokens costs a process that has just woken up.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgpack

_NO_NEWS: Final[dict[str, Any]] = {
    "accepted": [],
    "rejected": [],
    "tokens": b"",
    "chunks": [],
    "freed": [],
    "done": [],
}
# msgpack's forms for a `bytes` object of less than 2 ** 8, and of less than 2 ** 16.
_SHORT, _LONG = 0xC4, 0xC5
_BEFORE, _AFTER = msgpack.packb(_NO_NEWS).split(bytes((_SHORT, 0)))
_BLOCK_AT = len(_BEFORE) + 3
_LEAST = _BLOCK_AT + 2**8 + len(_AFTER)
_MOST = _LEAST - 2**8 + 2**16


def pack_block(body: Mapping[str, Any]) -> bytes | None:
    """Return the map of `body`; None unless it is a long block of tokens alone."""
    block = body.get("tokens")
    if type(block) is not bytes or not 2**8 <= len(block) < 2**16:
        return None
    if body != {**_NO_NEWS, "tokens": block}:
        return None
    return b"%b%c%b%b%b" % (
        _BEFORE,
        _LONG,
        len(block).to_bytes(2, "big"),
        block,
        _AFTER,
    )


def unpack_block(packed: memoryview) -> dict[str, Any] | None:
    """Return the fields of such a map; None if `packed` is anything else."""
    if not _LEAST <= len(packed) < _MOST or packed[: len(_BEFORE)] != _BEFORE:
        return None
    block = bytes(packed[_BLOCK_AT : -len(_AFTER)])
    size = bytes((_LONG,)) + len(block).to_bytes(2, "big")
    if packed[len(_BEFORE) : _BLOCK_AT] != size or packed[-len(_AFTER) :] != _AFTER:
        return None
    return {
        "accepted": [],
        "rejected": [],
        "tokens": block,
        "chunks": [],
        "freed": [],
        "done": [],
    }
