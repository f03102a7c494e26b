"""What the fields of each kind may hold; exact types, both sides check the same."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ._items import MAX_ITEM, MAX_REQUEST
from ._plain import is_map
from ._tensors import ITEMSIZE

MAX_KEY = 256
MAX_CODE = 64
MAX_TEXT = 4096
MAX_DIMENSIONS = 8
MAX_LENGTH = 2**40
REASONS = frozenset({"completed", "cancelled", "failed"})

_TENSOR = ([str, str, list, type(None)], [str, str, list, int])
_CHUNK = ([int, int, list, type(None)], [int, int, list, dict])

Check = Callable[[Any], bool]
Schema = Mapping[str, Check]


def fits(body: Mapping[str, Any], schema: Schema) -> bool:
    """Whether `body` has the fields of `schema`, all of them and no other."""
    if body.keys() != schema.keys():
        return False
    for name, check in schema.items():  # noqa: SIM110 - a generator costs more than it
        if not check(body[name]):
            return False
    return True


def is_key(value: Any) -> bool:
    """Whether `value` can name a request."""
    return type(value) is str and 0 < len(value) <= MAX_KEY


def _text(limit: int) -> Check:
    def check(value: Any) -> bool:
        return type(value) is str and len(value) <= limit

    return check


def _list_of(check: Check) -> Check:
    def check_all(value: Any) -> bool:
        return type(value) is list and all(map(check, value))

    return check_all


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _is_generation(value: Any) -> bool:
    return type(value) is int and 0 < value < 2**63


_is_code = _text(MAX_CODE)
_is_message = _text(MAX_TEXT)
_are_generations = _list_of(_is_generation)


def _is_tensor(value: Any) -> bool:
    if type(value) is not list or list(map(type, value)) not in _TENSOR:
        return False
    name, letter, shape, offset = value
    return (
        is_key(name)
        and letter in ITEMSIZE
        and len(shape) <= MAX_DIMENSIONS
        and all(type(size) is int and 0 < size <= MAX_LENGTH for size in shape)
        and (offset is None or _is_count(offset))
    )


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


def _is_packed_item(value: Any) -> bool:
    return type(value) is bytes and 0 < len(value) <= MAX_ITEM


def _is_chunk(value: Any) -> bool:
    if type(value) is not list or list(map(type, value)) not in _CHUNK:
        return False
    generation, first, items, finish = value
    return (
        _is_generation(generation)
        and _is_count(first)
        and all(map(_is_packed_item, items))
        and _is_finish(finish)
    )


def _is_rejection(value: Any) -> bool:
    if type(value) is not list or len(value) != 3:
        return False
    generation, code, message = value
    return _is_generation(generation) and _is_code(code) and _is_message(message)


def _is_grant(value: Any) -> bool:
    return type(value) is list and len(value) == 2 and all(map(_is_generation, value))


def _is_start(value: Any) -> bool:
    if type(value) is not list or len(value) != 4:
        return False
    generation, key, window, request = value
    return (
        _is_generation(generation)
        and is_key(key)
        and _is_generation(window)
        and _is_packed_request(request)
    )


def _is_packed_request(value: Any) -> bool:
    return type(value) is bytes and 0 < len(value) <= MAX_REQUEST


def _is_bytes(value: Any) -> bool:
    return type(value) is bytes


_ERROR: Schema = {"code": _is_code, "message": _is_message}
EMPTY: Schema = {}
START: Schema = {
    "key": is_key,
    "window": _is_generation,
    "request": _is_packed_request,
    "tensors": _list_of(_is_tensor),
}
CONTROL: Schema = {
    "start": _list_of(_is_start),
    "cancel": _are_generations,
    "grant": _list_of(_is_grant),
    "end": _are_generations,
}
STATUS: Schema = {"ask": _is_count}
TICK: Schema = {
    "accepted": _are_generations,
    "rejected": _list_of(_is_rejection),
    "tokens": _is_bytes,
    "chunks": _list_of(_is_chunk),
    "freed": _are_generations,
    "done": _are_generations,
}
REPORT: Schema = {"ask": _is_count, "status": is_map}
