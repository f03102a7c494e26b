"""What the fields of each kind may hold; exact types, both sides check the same."""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from typing import Any

MAX_DEPTH = 16
MAX_MAP = 1024
MAX_KEY = 256
MAX_CODE = 64
MAX_TEXT = 4096
MAX_DIMENSIONS = 8
MAX_LENGTH = 2**40

# The native formats that memoryview.cast knows on every supported Python.
ITEMSIZE = {letter: struct.calcsize(letter) for letter in "?bBhHiIlLqQfd"}
REASONS = frozenset({"completed", "cancelled", "failed"})

_TENSOR = [str, str, list]
_CHUNK = ([str, int, list, type(None)], [str, int, list, dict])
_SCALARS = frozenset({int, float, str, bytes, bool, type(None)})

Check = Callable[[Any], bool]
Schema = Mapping[str, Check]


def fits(body: Mapping[str, Any], schema: Schema) -> bool:
    """Whether `body` has the fields of `schema`, all of them and no other."""
    if body.keys() != schema.keys():
        return False
    return all(check(body[name]) for name, check in schema.items())


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
    return (
        type(value) is dict
        and len(value) <= MAX_MAP
        and all(
            type(key) is str and is_plain(item, depth - 1)
            for key, item in value.items()
        )
    )


def longest(value: Any) -> int:
    """Return the length of the longest array in a plain `value`."""
    kind = type(value)
    if kind is dict:
        return max(map(longest, value.values()), default=0)
    if kind is list or kind is tuple:
        if _SCALARS.issuperset(map(type, value)):
            return len(value)
        return max(len(value), *map(longest, value))
    return 0


def _text(limit: int) -> Check:
    def check(value: Any) -> bool:
        return type(value) is str and len(value) <= limit

    return check


def is_key(value: Any) -> bool:
    """Whether `value` can name a stream."""
    return type(value) is str and 0 < len(value) <= MAX_KEY


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63


_is_code = _text(MAX_CODE)
_is_message = _text(MAX_TEXT)


def _is_tensor(value: Any) -> bool:
    if type(value) is not list or list(map(type, value)) != _TENSOR:
        return False
    name, letter, shape = value
    return (
        is_key(name)
        and letter in ITEMSIZE
        and len(shape) <= MAX_DIMENSIONS
        and all(type(size) is int and 0 < size <= MAX_LENGTH for size in shape)
    )


def _are_tensors(value: Any) -> bool:
    return type(value) is list and all(map(_is_tensor, value))


def _is_finish(value: Any) -> bool:
    if value is None:
        return True
    if type(value) is not dict:
        return False
    reason = value.get("reason")
    if type(reason) is not str or reason not in REASONS:
        return False
    if reason != "failed":
        return len(value) == 1
    return value.keys() == {"reason", "error"} and _is_error(value["error"])


def _is_error(value: Any) -> bool:
    return type(value) is dict and fits(value, _ERROR)


def _is_chunk(value: Any) -> bool:
    if type(value) is not list or list(map(type, value)) not in _CHUNK:
        return False
    key, first, items, finish = value
    return is_key(key) and _is_count(first) and is_plain(items) and _is_finish(finish)


def _are_chunks(value: Any) -> bool:
    return type(value) is list and all(map(_is_chunk, value))


_ERROR: Schema = {"code": _is_code, "message": _is_message}
EMPTY: Schema = {}
KEY: Schema = {"key": is_key}
START: Schema = {"key": is_key, "request": is_map, "tensors": _are_tensors}
STATUS: Schema = {"ask": _is_count}
REPORT: Schema = {"ask": _is_count, "status": is_map}
REJECTED: Schema = {"key": is_key, **_ERROR}
CHUNKS: Schema = {"chunks": _are_chunks}
