"""What the fields of each kind may hold; exact types, both sides check the same."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any

from lifecycle_zmq.memory.tensors import ITEMSIZE
from lifecycle_zmq.protocol.items import MAX_ITEM, MAX_REQUEST
from lifecycle_zmq.protocol.plain import is_map

MAX_KEY = 256
MAX_CODE = 64
MAX_TEXT = 4096
MAX_DIMENSIONS = 8
MAX_LENGTH = 2**40
REASONS = frozenset({"completed", "cancelled", "failed"})

_TENSOR = ([str, str, list, type(None)], [str, str, list, int])

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
    return type(value) is str and 0 < len(value) <= MAX_KEY and _is_unicode(value)


def _is_unicode(text: str) -> bool:
    # JSON may name a lone surrogate, which no message can carry.
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


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


# What there is many of is looked at by columns: a call for each takes longer than all
# that is done with it.
def _columns(rows: Any, width: int) -> Sequence[Sequence[Any]] | None:
    """Return the columns of a list of lists, if it is one and all are as wide."""
    if type(rows) is not list:
        return None
    if not rows:
        return ((),) * width
    if set(map(type, rows)) != {list} or set(map(len, rows)) != {width}:
        return None
    return tuple(zip(*rows, strict=True))


def _are(kind: type, values: Sequence[Any]) -> bool:
    return {kind}.issuperset(map(type, values))


def _are_whole(values: Sequence[Any], least: int) -> bool:
    return not values or (
        _are(int, values) and min(values) >= least and max(values) < 2**63
    )


def _are_long(kind: type, values: Sequence[Any], most: int) -> bool:
    """Whether all are of that kind, none is empty, and none longer than `most`."""
    return not values or (
        _are(kind, values)
        and min(map(len, values)) > 0
        and max(map(len, values)) <= most
    )


def _are_generations(value: Any) -> bool:
    return type(value) is list and _are_whole(value, 1)


_is_code = _text(MAX_CODE)
_is_message = _text(MAX_TEXT)


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


def _are_chunks(value: Any) -> bool:
    columns = _columns(value, 4)
    if columns is None:
        return False
    generations, firsts, lists, finishes = columns
    return (
        _are_whole(generations, 1)
        and _are_whole(firsts, 0)
        and _are(list, lists)
        and _are_long(bytes, [*chain.from_iterable(lists)], MAX_ITEM)
        and all(map(_is_finish, finishes))
    )


def _is_rejection(value: Any) -> bool:
    if type(value) is not list or len(value) != 3:
        return False
    generation, code, message = value
    return _is_generation(generation) and _is_code(code) and _is_message(message)


def _are_grants(value: Any) -> bool:
    columns = _columns(value, 2)
    return columns is not None and all(_are_whole(it, 1) for it in columns)


def _are_starts(value: Any) -> bool:
    columns = _columns(value, 4)
    if columns is None:
        return False
    generations, keys, windows, requests = columns
    return (
        _are_whole(generations, 1)
        and _are_long(str, keys, MAX_KEY)
        and _are_whole(windows, 1)
        and _are_long(bytes, requests, MAX_REQUEST)
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
    "start": _are_starts,
    "cancel": _are_generations,
    "grant": _are_grants,
    "end": _are_generations,
}
STATUS: Schema = {"ask": _is_count}
TICK: Schema = {
    "accepted": _are_generations,
    "rejected": _list_of(_is_rejection),
    "tokens": _is_bytes,
    "chunks": _are_chunks,
    "freed": _are_generations,
    "done": _are_generations,
}
REPORT: Schema = {"ask": _is_count, "status": is_map}
