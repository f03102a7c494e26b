"""Frames on the wire: a fixed header, one capped msgpack map, raw tensors.

A message is one ZMQ message of one to eight parts. The first part is the header
followed by the map; each further part is the memory of one tensor, described by the
map. Numbers in the header are big-endian:

====== ==== =========================================================
offset size field
====== ==== =========================================================
0      4    magic ``LCZQ``
4      1    version, 1
5      1    kind
6      2    number of tensor parts
8      4    bytes of the map
12     4    incarnation of the engine
16     8    sequence number, from 0 per sender and connection
====== ==== =========================================================

Both sides check every message against the same schema, the sender before it sends:
no extension types, string keys, exact types, no unknown and no missing field. Nothing
here can run code that a peer chose, and `decode` raises `ProtocolError` only.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import msgpack

from . import _schema
from ._errors import EncodeError, ProtocolError

MAGIC = b"LCZQ"
VERSION = 1
HEADER = struct.Struct("!4sBBHIIQ")
MAX_TENSORS = 7
# libzmq drops a longer part without a word, so the sender checks first.
MAX_TENSOR_BYTES = 4 * 2**30

Buffer = bytes | bytearray | memoryview
is_key = _schema.is_key
MAX_CODE = _schema.MAX_CODE
MAX_TEXT = _schema.MAX_TEXT


class Kind(IntEnum):
    """What a message says; below 16 the client speaks, from 16 on the engine."""

    START = 1
    CANCEL = 2
    END = 3
    STATUS = 4
    SHUTDOWN = 5
    READY = 16
    ACCEPTED = 17
    REJECTED = 18
    CHUNKS = 19
    DONE = 20
    REPORT = 21


FROM_CLIENT = frozenset(kind for kind in Kind if kind < Kind.READY)
FROM_ENGINE = frozenset(Kind) - FROM_CLIENT


@dataclass(frozen=True, slots=True)
class Caps:
    """The limits of one kind: bytes of the map, and elements of one array in it."""

    body: int
    array: int


_SMALL = Caps(body=64 * 2**10, array=2**10)
# A prompt of 128 Ki tokens fits; so does a tick of 4 Ki streams.
_CAPS = {
    Kind.START: Caps(body=2**20, array=2**17),
    Kind.CHUNKS: Caps(body=2**18, array=2**14),
}
_KINDS = {int(kind): kind for kind in Kind}
_SCHEMAS: dict[Kind, _schema.Schema] = {
    Kind.START: _schema.START,
    Kind.CANCEL: _schema.KEY,
    Kind.END: _schema.KEY,
    Kind.STATUS: _schema.STATUS,
    Kind.SHUTDOWN: _schema.EMPTY,
    Kind.READY: _schema.EMPTY,
    Kind.ACCEPTED: _schema.KEY,
    Kind.REJECTED: _schema.REJECTED,
    Kind.CHUNKS: _schema.CHUNKS,
    Kind.DONE: _schema.KEY,
    Kind.REPORT: _schema.REPORT,
}


@dataclass(frozen=True, slots=True, repr=False)
class Message:
    """A message that passed every check.

    Attributes:
        kind: What it says.
        incarnation: The engine process it belongs to.
        sequence: Its number in the sender's connection.
        body: The fields of its kind.
        tensors: START only: name to memory, with format and shape, not copied.
    """

    kind: Kind
    incarnation: int
    sequence: int
    body: dict[str, Any]
    tensors: dict[str, memoryview] = field(default_factory=dict)


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
    tensors: int = 0,
) -> bytes:
    """Return the first part of a message.

    Args:
        kind: What it says.
        body: The fields of `kind`, of plain types.
        incarnation: The engine process it is for or from.
        sequence: Its number in this connection.
        tensors: How many parts of memory will follow.

    Raises:
        EncodeError: The body does not fit the schema or the caps of `kind`.
    """
    caps = caps_of(kind)
    if not _schema.fits(body, _SCHEMAS[kind]):
        raise EncodeError(
            "unencodable",
            f"a {kind.name} message takes plain values only (None, bool, int, float, "
            f"str, bytes, list, dict with str keys) nested up to "
            f"{_schema.MAX_DEPTH} deep; convert what it holds before",
        )
    try:
        packed: bytes = msgpack.packb(body)
    except (ValueError, OverflowError):  # a lone surrogate, an int beyond 64 bits
        raise EncodeError(
            "unencodable",
            f"a {kind.name} message holds text that is not Unicode or an integer "
            "beyond 64 bits; replace it before",
        ) from None
    if len(packed) > caps.body or _schema.longest(body) > caps.array:
        raise EncodeError(
            "too_large",
            f"a {kind.name} message of {len(packed)} bytes exceeds the limit of "
            f"{caps.body} bytes and {caps.array} elements an array; send less",
        )
    head = HEADER.pack(
        MAGIC, VERSION, kind, tensors, len(packed), incarnation, sequence
    )
    return head + packed


def decode(parts: Sequence[Buffer], *, accept: frozenset[Kind]) -> Message:
    """Check a received message and return what it says.

    Args:
        parts: The parts of the message, as received.
        accept: The kinds that the other side may send.

    Raises:
        ProtocolError: Anything at all is wrong with it.
    """
    if not 1 <= len(parts) <= 1 + MAX_TENSORS:
        raise ProtocolError(f"{len(parts)} parts, not 1 to {1 + MAX_TENSORS}")
    head = memoryview(parts[0])
    if len(head) < HEADER.size:
        raise ProtocolError(f"{len(head)} bytes, the header takes {HEADER.size}")
    magic, version, number, tensors, size, incarnation, sequence = HEADER.unpack_from(
        head
    )
    if magic != MAGIC or version != VERSION:
        raise ProtocolError(f"not version {VERSION} of this protocol")
    kind = _KINDS.get(number)
    if kind is None or kind not in accept:
        raise ProtocolError(f"kind {number} is not for this side")
    if size != len(head) - HEADER.size or tensors != len(parts) - 1:
        raise ProtocolError("the lengths in the header are not those of the message")
    body = _unpack(kind, head[HEADER.size :])
    if kind is not Kind.START:
        if tensors:
            raise ProtocolError(f"a {kind.name} message carries no tensors")
        return Message(kind, incarnation, sequence, body)
    attached = _attach(body["tensors"], parts[1:])
    return Message(kind, incarnation, sequence, body, attached)


def describe(tensors: Mapping[str, Any]) -> tuple[list[list[Any]], list[memoryview]]:
    """Return what START says of `tensors`, and their memory, not copied.

    Args:
        tensors: Name to any C-contiguous buffer of a plain native format.

    Raises:
        EncodeError: A tensor has no such buffer, or there are too many or too large.
    """
    if len(tensors) > MAX_TENSORS:
        raise EncodeError(
            "too_large", f"{len(tensors)} tensors, at most {MAX_TENSORS}; join some"
        )
    described: list[list[Any]] = []
    memory: list[memoryview] = []
    for name, value in tensors.items():
        view = _view(name, value)
        described.append([name, view.format, list(view.shape or ())])
        memory.append(view)
    return described, memory


def _view(name: str, value: Any) -> memoryview:
    try:
        view = memoryview(value)
    except (TypeError, ValueError):  # no buffer, or a format that buffers lack
        raise EncodeError(
            "unencodable",
            f"tensor {name!r} gives no buffer; pass a numpy array or bytes",
        ) from None
    if not view.c_contiguous or view.format not in _schema.ITEMSIZE or not view.nbytes:
        raise EncodeError(
            "unencodable",
            f"tensor {name!r} has format {view.format!r} and {view.nbytes} bytes; make "
            f"it C-contiguous, not empty and of one of {''.join(_schema.ITEMSIZE)}",
        )
    if view.nbytes > MAX_TENSOR_BYTES:
        raise EncodeError(
            "too_large",
            f"tensor {name!r} has {view.nbytes} bytes, at most {MAX_TENSOR_BYTES}",
        )
    return view


def _unpack(kind: Kind, packed: memoryview) -> dict[str, Any]:
    caps = caps_of(kind)
    if len(packed) > caps.body:
        raise ProtocolError(f"a {kind.name} map of {len(packed)} > {caps.body} bytes")
    try:
        body = msgpack.unpackb(
            packed,
            max_array_len=min(caps.array, len(packed)),
            max_map_len=min(_schema.MAX_MAP, len(packed)),
            # Lets an extension of no bytes through: a type that the schema refuses.
            max_ext_len=0,
        )
    except (ValueError, RecursionError):
        # Not chained: the cause would hold the frame, and with it a prompt.
        raise ProtocolError(f"the map of a {kind.name} message is malformed") from None
    if type(body) is not dict or not _schema.fits(body, _SCHEMAS[kind]):
        raise ProtocolError(f"the fields of a {kind.name} message are not its own")
    return body


def _attach(
    described: list[list[Any]], memory: Sequence[Buffer]
) -> dict[str, memoryview]:
    if len(described) != len(memory):
        raise ProtocolError(f"{len(memory)} tensors, {len(described)} described")
    attached: dict[str, memoryview] = {}
    for (name, letter, shape), raw in zip(described, memory, strict=True):
        view = memoryview(raw)
        if name in attached or math.prod(shape) * _schema.ITEMSIZE[letter] != len(view):
            raise ProtocolError("a tensor is not what its description says")
        attached[name] = view.cast(letter, shape)
    return attached
