"""Frames on the wire: a fixed header, one capped msgpack map, raw tensors.

A message has one to eight parts. The first part is the header followed by the map;
each further part is the memory of one tensor, described by the map. Numbers in the
header are big-endian:

====== ==== =========================================================
offset size field
====== ==== =========================================================
0      4    magic ``LCZQ``
4      1    version, 2
5      1    kind
6      2    number of tensor parts
8      4    bytes of the map
12     4    incarnation of the engine
16     8    generation of the stream that a START begins, else 0
24     8    sequence number, from 0 per sender and connection
====== ==== =========================================================

A client numbers the streams that it starts, from 1 and ever upwards: a *generation*
names a stream in all that is said of it later, and no two streams share one.

Both sides check every message against the same schema, the sender before it sends:
no extension types, string keys, exact types, no unknown and no missing field. Nothing
here can run code that a peer chose, and `decode` raises `ProtocolError` only. What
the fields mean is in docs/reference/wire.md.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple

from lifecycle_zmq._errors import ProtocolError
from lifecycle_zmq.memory.tensors import (
    MAX_TENSOR_BYTES,
    MAX_TENSORS,
    Buffer,
    Place,
    attach,
    describe,
)
from lifecycle_zmq.protocol import schema
from lifecycle_zmq.protocol.items import (
    BASE_COST,
    unpack_item,
    unpack_request,
    unpack_tokens,
)
from lifecycle_zmq.protocol.plain import pack, refuse, unpack
from lifecycle_zmq.protocol.tick_form import pack_block, unpack_block

__all__ = (
    "FROM_CLIENT",
    "FROM_ENGINE",
    "HEADER",
    "MAGIC",
    "MAX_CODE",
    "MAX_TENSORS",
    "MAX_TENSOR_BYTES",
    "MAX_TEXT",
    "VERSION",
    "Buffer",
    "Caps",
    "Kind",
    "Message",
    "Place",
    "caps_of",
    "decode",
    "describe",
    "encode",
    "is_key",
    "largest_head",
)

MAGIC = b"LCZQ"
VERSION = 2
HEADER = struct.Struct("!4sBBHIIQQ")

is_key = schema.is_key
MAX_CODE = schema.MAX_CODE
MAX_TEXT = schema.MAX_TEXT


class Kind(IntEnum):
    """What a message says; below 16 the client speaks, from 16 on the engine."""

    START = 1
    CONTROL = 2
    STATUS = 3
    SHUTDOWN = 4
    READY = 16
    TICK = 17
    REPORT = 18


FROM_CLIENT = frozenset(kind for kind in Kind if kind < Kind.READY)
FROM_ENGINE = frozenset(Kind) - FROM_CLIENT


@dataclass(frozen=True, slots=True)
class Caps:
    """The limits of one kind: bytes of the map, and elements of one array in it."""

    body: int
    array: int


_SMALL = Caps(body=64 * 2**10, array=2**10)
# The longest request or item fits; so does a tick of 4 Ki streams.
_CAPS = {
    Kind.START: Caps(body=2**20 + 2**15, array=2**10),
    Kind.CONTROL: Caps(body=64 * 2**10, array=2**12),
    Kind.TICK: Caps(body=2**18 + 2**15, array=2**14),
}
_KINDS = {int(kind): kind for kind in Kind}
_SCHEMAS: dict[Kind, schema.Schema] = {
    Kind.START: schema.START,
    Kind.CONTROL: schema.CONTROL,
    Kind.STATUS: schema.STATUS,
    Kind.SHUTDOWN: schema.EMPTY,
    Kind.READY: schema.EMPTY,
    Kind.TICK: schema.TICK,
    Kind.REPORT: schema.REPORT,
}


class Message(NamedTuple):
    """A message that passed every check.

    Attributes:
        kind: What it says.
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
    # Nobody changes this one: only a START, which has its own, is taken from.
    tensors: dict[str, memoryview | Place] = {}  # noqa: RUF012

    def __repr__(self) -> str:
        """Show what it is, never what it says."""
        return f"<{self.kind.name} {self.sequence}>"


def caps_of(kind: Kind) -> Caps:
    """Return the limits of `kind`."""
    return _CAPS.get(kind, _SMALL)


def largest_head(kinds: frozenset[Kind]) -> int:
    """Return the bytes of the longest legal first part among `kinds`."""
    return HEADER.size + max(caps_of(kind).body for kind in kinds)


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

    Args:
        kind: What it says.
        body: The fields of `kind`, of plain types.
        incarnation: The engine process it is for or from.
        sequence: Its number in this connection.
        generation: The number of the stream that a START begins.
        tensors: How many parts of memory will follow.

    Raises:
        EncodeError: The body does not fit the schema or the caps of `kind`.
    """
    packed = pack_block(body) if kind is Kind.TICK else None
    if packed is None:
        packed = _pack(kind, body)
    head = HEADER.pack(
        MAGIC, VERSION, kind, tensors, len(packed), incarnation, generation, sequence
    )
    return head + packed


def _pack(kind: Kind, body: Mapping[str, Any]) -> bytes:
    what = f"a {kind.name} message"
    if not schema.fits(body, _SCHEMAS[kind]):
        raise refuse(what)
    caps = caps_of(kind)
    return pack(body, what, size=caps.body, array=caps.array)


def decode(parts: Sequence[Buffer], *, accept: frozenset[Kind]) -> Message:
    """Check a received message and return what it says.

    Args:
        parts: The parts of the message, as received.
        accept: The kinds that the other side may send.

    Raises:
        ProtocolError: Anything at all is wrong with it.
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
    magic, version, number, tensors, size, *numbers = HEADER.unpack_from(head)
    if magic != MAGIC or version != VERSION:
        raise ProtocolError(f"not version {VERSION} of this protocol")
    kind = _KINDS.get(number)
    if kind is None or kind not in accept:
        raise ProtocolError(f"kind {number} is not for this side")
    if size != len(head) - HEADER.size or tensors != len(parts) - 1:
        raise ProtocolError("the lengths in the header are not those of the message")
    incarnation, generation, sequence = numbers
    if (kind is Kind.START) != (0 < generation < 2**63) or generation >> 63:
        raise ProtocolError(f"a {kind.name} message of generation {generation}")
    return kind, (incarnation, generation, sequence), head[HEADER.size :]


def _unpack(kind: Kind, packed: memoryview) -> dict[str, Any]:
    if kind is Kind.TICK and (body := unpack_block(packed)) is not None:
        return body
    caps = caps_of(kind)
    if len(packed) > caps.body:
        raise ProtocolError(f"a {kind.name} map of {len(packed)} > {caps.body} bytes")
    body = unpack(packed, f"the map of a {kind.name} message", array=caps.array)
    if type(body) is not dict or not schema.fits(body, _SCHEMAS[kind]):
        raise ProtocolError(f"the fields of a {kind.name} message are not its own")
    return body


def _unpack_values(kind: Kind, body: dict[str, Any]) -> None:
    """Replace packed requests by themselves, packed items by pairs with their cost."""
    if kind is Kind.TICK:
        body["tokens"] = unpack_tokens(body["tokens"])
        for chunk in body["chunks"]:
            chunk[2] = [(unpack_item(it), BASE_COST + len(it)) for it in chunk[2]]
    elif kind is Kind.CONTROL:
        for start in body["start"]:
            start[3] = unpack_request(start[3])
