"""Messages on the wire: a fixed header, one capped msgpack map, raw tensors.

A message has one to eight parts. The first part is the header followed by the map; each
further part is the memory of one tensor, described by the map. Numbers in the header
are big-endian:

====== ==== =========================================================
offset size field
====== ==== =========================================================
0      4    magic ``LCZQ``
4      1    version, 3
5      1    kind
6      2    number of tensor parts
8      4    bytes of the map
12     4    incarnation of the engine
16     8    generation of the stream that a START begins, else 0
24     8    sequence number, from 0 per sender and connection
32     4    CRC-32 of the header before it, and of the map
====== ==== =========================================================

A client numbers the streams that it starts, from 1 and increasing: a *generation* names
one stream in all later messages.

The checksum and the sequence number show a message that was damaged or lost on its way.
They do not cover the memory of tensors, of which only the sizes are checked.

Both sides check every message against the same schema, the sender before it sends: no
extension types, string keys, exact types, no unknown and no missing field. Decoding
never runs code that a peer chose, and `decode` raises `ProtocolError` only.
docs/reference/wire.md describes the fields.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import chain
from typing import Any, Final, Literal, NamedTuple, get_args

from lifecycle.lowlevel import check_choice
from lifecycle_zmq.codec import (
    BASE_COST,
    MAX_ITEM,
    MAX_REQUEST,
    is_map,
    pack,
    refuse,
    unpack,
    unpack_item,
    unpack_request,
    unpack_tokens,
)
from lifecycle_zmq.exceptions import ProtocolError
from lifecycle_zmq.shared_memory.tensors import (
    ITEMSIZE,
    MAX_TENSORS,
    Buffer,
    Place,
    attach,
)

MAX_KEY = 256
MAX_CODE = 64
MAX_TEXT = 4096
MAX_DIMENSIONS = 8
MAX_LENGTH = 2**40
Reason = Literal["completed", "cancelled", "failed"]
REASONS: Final = get_args(Reason)

_TENSOR = ([str, str, list, type(None)], [str, str, list, int])

Check = Callable[[Any], bool]
Schema = Mapping[str, Check]


def fits(body: Mapping[str, Any], schema: Schema) -> bool:
    """Whether *body* has exactly the fields of *schema*, with valid values."""
    if body.keys() != schema.keys():
        return False
    for name, check in schema.items():  # noqa: SIM110 - a generator is slower
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


# Long lists are checked by columns: a call for each row takes longer than the rest of
# its handling.
def _columns(rows: Any, width: int) -> Sequence[Sequence[Any]] | None:
    """Return the columns of a list of lists of equal width; None for other values."""
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
    """Whether all values are of *kind*, not empty, and at most *most* long."""
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
FAULT: Schema = {"message": _is_message}

MAGIC = b"LCZQ"
VERSION = 3
HEADER = struct.Struct("!4sBBHIIQQI")
_CHECKED = HEADER.size - 4
_CHECKSUM = struct.Struct("!I")


class Kind(IntEnum):
    """The kind of a message: below 16 from the client, from 16 on from the engine."""

    START = 1
    CONTROL = 2
    STATUS = 3
    SHUTDOWN = 4
    PING = 5
    LEAVE = 6
    READY = 16
    TICK = 17
    REPORT = 18
    PONG = 19
    FAULT = 20


FROM_CLIENT = frozenset(kind for kind in Kind if kind < Kind.READY)
FROM_ENGINE = frozenset(Kind) - FROM_CLIENT


@dataclass(frozen=True, slots=True)
class KindLimits:
    """Limits of one kind: bytes of the map, and elements of one array in it."""

    body: int
    array: int


_SMALL = KindLimits(body=64 * 2**10, array=2**10)
# The longest request or item fits; so does a TICK of 4 Ki streams.
_LIMITS = {
    Kind.START: KindLimits(body=2**20 + 2**15, array=2**10),
    Kind.CONTROL: KindLimits(body=64 * 2**10, array=2**12),
    Kind.TICK: KindLimits(body=2**18 + 2**15, array=2**14),
}
_KINDS = {int(kind): kind for kind in Kind}
_SCHEMAS: dict[Kind, Schema] = {
    Kind.START: START,
    Kind.CONTROL: CONTROL,
    Kind.STATUS: STATUS,
    Kind.SHUTDOWN: EMPTY,
    Kind.PING: STATUS,
    Kind.LEAVE: FAULT,
    Kind.READY: EMPTY,
    Kind.TICK: TICK,
    Kind.REPORT: REPORT,
    Kind.PONG: STATUS,
    Kind.FAULT: FAULT,
}


@dataclass(frozen=True, slots=True)
class Finish:
    """How a stream ended.

    Attributes:
        reason: ``"failed"`` reaches the reader as `EngineFailed`; after the other two
            the stream just ends.
        code: One word for metrics and status codes; of failures only.
        message: A sentence without any content of the request; of failures only.
    """

    reason: Reason
    code: str = ""
    message: str = ""

    def __post_init__(self) -> None:
        """Raise `ValueError` for an unknown reason."""
        check_choice(REASONS, reason=self.reason)


class Message(NamedTuple):
    """A message that passed every check.

    Attributes:
        kind: Its kind.
        incarnation: The engine process it belongs to.
        sequence: Its number in the sender's connection.
        body: The fields of its kind; requests and items in it are unpacked.
        generation: START only: the number of the stream.
        tensors: START only: name to memory, with format and shape, not copied; or to
            its place in the arena.
    """

    kind: Kind
    incarnation: int
    sequence: int
    body: dict[str, Any]
    generation: int = 0
    # Never changed: only a START has tensors, in a dict of its own.
    tensors: dict[str, memoryview | Place] = {}  # noqa: RUF012

    def __repr__(self) -> str:
        """Show kind and number, never the content."""
        return f"<{self.kind.name} {self.sequence}>"


def limits_of(kind: Kind) -> KindLimits:
    """Return the limits of *kind*."""
    return _LIMITS.get(kind, _SMALL)


def largest_head(kinds: frozenset[Kind]) -> int:
    """Return the bytes of the longest legal first part among `kinds`."""
    return HEADER.size + max(limits_of(kind).body for kind in kinds)


def encode(
    kind: Kind,
    body: Mapping[str, Any],
    *,
    incarnation: int,
    sequence: int,
    generation: int = 0,
    tensors: int = 0,
) -> bytes:
    """Return the first part of a message.

    Raises:
        EncodeError: The body does not fit the schema or the limits of `kind`.
    """
    what, caps = f"a {kind.name} message", limits_of(kind)
    if not fits(body, _SCHEMAS[kind]):
        raise refuse(what)
    packed = pack(body, what, size=caps.body, array=caps.array)
    return seal(
        (MAGIC, VERSION, kind, tensors, len(packed), incarnation, generation, sequence),
        packed,
    )


def seal(fields: Sequence[Any], packed: bytes) -> bytes:
    """Return a header of these fields, with its checksum, and the map after it."""
    head = HEADER.pack(*fields, 0)[:_CHECKED]
    checksum = zlib.crc32(packed, zlib.crc32(head))
    return b"%b%b%b" % (head, _CHECKSUM.pack(checksum), packed)


def decode(parts: Sequence[Buffer], *, accept: frozenset[Kind]) -> Message:
    """Check a received message and return it.

    Raises:
        ProtocolError: The message is invalid in any way.
    """
    kind, numbers, packed = _read_header(parts, accept)
    body = _unpack(kind, packed)
    incarnation, generation, sequence = numbers
    if kind is not Kind.START:
        if len(parts) > 1:
            raise ProtocolError(f"a {kind.name} message carries no tensors")
        _unpack_values(kind, body)
        return Message(kind, incarnation, sequence, body)
    body["request"] = unpack_request(body["request"])
    attached = attach(body["tensors"], parts[1:])
    return Message(kind, incarnation, sequence, body, generation, attached)


def _read_header(
    parts: Sequence[Buffer], accept: frozenset[Kind]
) -> tuple[Kind, tuple[int, int, int], memoryview]:
    if not 1 <= len(parts) <= 1 + MAX_TENSORS:
        raise ProtocolError(f"{len(parts)} parts, not 1 to {1 + MAX_TENSORS}")
    head = memoryview(parts[0])
    if len(head) < HEADER.size:
        raise ProtocolError(f"{len(head)} bytes, the header takes {HEADER.size}")
    magic, version, number, tensors, size, *numbers, checksum = HEADER.unpack_from(head)
    packed = head[HEADER.size :]
    if magic != MAGIC or version != VERSION:
        raise ProtocolError(f"not version {VERSION} of this protocol")
    if checksum != zlib.crc32(packed, zlib.crc32(head[:_CHECKED])):
        raise ProtocolError("a message was damaged on its way: its checksum differs")
    kind = _KINDS.get(number)
    if kind is None or kind not in accept:
        raise ProtocolError(f"kind {number} is not for this side")
    if size != len(head) - HEADER.size or tensors != len(parts) - 1:
        raise ProtocolError("the lengths in the header are not those of the message")
    incarnation, generation, sequence = numbers
    if (kind is Kind.START) != (0 < generation < 2**63) or generation >> 63:
        raise ProtocolError(f"a {kind.name} message of generation {generation}")
    return kind, (incarnation, generation, sequence), packed


def _unpack(kind: Kind, packed: memoryview) -> dict[str, Any]:
    caps = limits_of(kind)
    if len(packed) > caps.body:
        raise ProtocolError(f"a {kind.name} map of {len(packed)} > {caps.body} bytes")
    body = unpack(packed, f"the map of a {kind.name} message", array=caps.array)
    if type(body) is not dict or not fits(body, _SCHEMAS[kind]):
        raise ProtocolError(f"a {kind.name} message has wrong or missing fields")
    return body


def _unpack_values(kind: Kind, body: dict[str, Any]) -> None:
    """Unpack packed requests, and packed items into pairs with their cost."""
    if kind is Kind.TICK:
        body["tokens"] = unpack_tokens(body["tokens"])
        for chunk in body["chunks"]:
            chunk[2] = [(unpack_item(it), BASE_COST + len(it)) for it in chunk[2]]
    elif kind is Kind.CONTROL:
        for start in body["start"]:
            start[3] = unpack_request(start[3])
