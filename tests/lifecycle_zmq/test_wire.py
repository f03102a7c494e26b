"""The wire format: what fits, what is refused, and by which error."""

from __future__ import annotations

import ast
import random
import struct
import time
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import lifecycle_zmq
from lifecycle_zmq import ProtocolError, wire
from lifecycle_zmq._errors import EncodeError
from lifecycle_zmq.wire import FROM_CLIENT, FROM_ENGINE, Kind

ALL = FROM_CLIENT | FROM_ENGINE
SAMPLES: dict[Kind, dict[str, Any]] = {
    Kind.START: {
        "key": "a#1",
        "request": {"ids": [1, 2, 3], "t": 0.5, "deep": {"x": [None, True, b"z"]}},
        "tensors": [],
    },
    Kind.CANCEL: {"key": "a#1"},
    Kind.END: {"key": "a#1"},
    Kind.STATUS: {"ask": 1},
    Kind.SHUTDOWN: {},
    Kind.READY: {},
    Kind.ACCEPTED: {"key": "a#1"},
    Kind.REJECTED: {"key": "a#1", "code": "full", "message": "no"},
    Kind.CHUNKS: {
        "chunks": [
            ["a#1", 0, [[1], [2]], None],
            ["b#1", 7, [], {"reason": "completed"}],
            [
                "c#1",
                0,
                [{"x": 1}],
                {"reason": "failed", "error": {"code": "c", "message": ""}},
            ],
        ]
    },
    Kind.DONE: {"key": "a#1"},
    Kind.REPORT: {"ask": 1, "status": {"starts": 3, "backend": {}}},
}


def _frame(kind: Kind, body: Any, /, **changes: Any) -> bytes:
    """Build a frame without any of the checks of `encode`."""
    packed = changes.pop("packed") if "packed" in changes else msgpack.packb(body)
    fields = {
        "magic": wire.MAGIC,
        "version": wire.VERSION,
        "kind": kind,
        "tensors": 0,
        "size": len(packed),
        "incarnation": 1,
        "sequence": 0,
    } | changes
    return wire.HEADER.pack(*fields.values()) + packed


def _start(tensors: dict[str, Any]) -> list[Any]:
    described, memory = wire.describe(tensors)
    body = {"key": "k", "request": {}, "tensors": described}
    head = wire.encode(Kind.START, body, incarnation=1, sequence=0, tensors=len(memory))
    return [head, *map(bytes, memory)]


@pytest.mark.parametrize("kind", list(Kind))
def test_decode_returns_what_encode_was_given(kind: Kind) -> None:
    """Each kind survives the way through the wire, header and body."""
    head = wire.encode(kind, SAMPLES[kind], incarnation=3, sequence=2**40)
    message = wire.decode([head], accept=ALL)
    assert message.kind is kind
    assert (message.incarnation, message.sequence) == (3, 2**40)
    assert message.body == SAMPLES[kind]


@pytest.mark.parametrize("letter", "?bBhHiIlLqQfd")
def test_decode_attaches_tensors_with_format_and_shape(letter: str) -> None:
    """A tensor arrives with its format, shape and bytes, without a copy."""
    raw = bytearray(range(6 * struct.calcsize(letter)))
    if letter == "?":
        raw = bytearray([0, 1] * 3)
    view = memoryview(raw).cast(letter, (2, 3))
    parts = _start({"x": view, "y": b"abc"})
    tensors = wire.decode(parts, accept=FROM_CLIENT).tensors
    assert list(tensors) == ["x", "y"]
    assert (tensors["x"].format, tensors["x"].shape) == (letter, (2, 3))
    assert tensors["x"].tobytes() == raw
    assert tensors["y"].tobytes() == b"abc"


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (Kind.END, {}),
        (Kind.END, {"key": "a", "more": 1}),
        (Kind.END, {"key": 1}),
        (Kind.END, {"key": ""}),
        (Kind.END, {"key": "x" * 257}),
        (Kind.END, {"key": b"a"}),
        (Kind.END, ["key"]),
        (Kind.END, None),
        (Kind.STATUS, {"ask": True}),
        (Kind.STATUS, {"ask": -1}),
        (Kind.STATUS, {"ask": 1.0}),
        (Kind.START, {"key": "a", "request": [], "tensors": []}),
        (Kind.START, {"key": "a", "request": {b"k": 1}, "tensors": []}),
        (Kind.START, {"key": "a", "request": {"k": {b"k": 1}}, "tensors": []}),
        (Kind.START, {"key": "a", "request": {}, "tensors": {}}),
        (Kind.START, {"key": "a", "request": {}, "tensors": [["x", "f", [1]]]}),
        (Kind.REJECTED, {"key": "a", "code": "x" * 65, "message": ""}),
        (Kind.REJECTED, {"key": "a", "code": "x", "message": "y" * 4097}),
        (Kind.REPORT, {"ask": 1, "status": {"x": {1: 2}}}),
        (Kind.CHUNKS, {"chunks": {}}),
        (Kind.CHUNKS, {"chunks": [["a", 0, []]]}),
        (Kind.CHUNKS, {"chunks": [["a", -1, [], None]]}),
        (Kind.CHUNKS, {"chunks": [["a", 0, {}, None]]}),
        (Kind.CHUNKS, {"chunks": [["a", 0, [], "completed"]]}),
        (Kind.CHUNKS, {"chunks": [["a", 0, [], {"reason": []}]]}),
        (Kind.CHUNKS, {"chunks": [["a", 0, [], {"reason": "bored"}]]}),
        (Kind.CHUNKS, {"chunks": [["a", 0, [], {"reason": "failed"}]]}),
        (Kind.CHUNKS, {"chunks": [["a", 0, [], {"reason": "completed", "x": 1}]]}),
        (
            Kind.CHUNKS,
            {"chunks": [["a", 0, [], {"reason": "failed", "error": {"code": "c"}}]]},
        ),
    ],
)
def test_decode_refuses_foreign_fields(kind: Kind, body: Any) -> None:
    """A missing, unknown or wrongly typed field is a `ProtocolError` (`fault-43`)."""
    with pytest.raises(ProtocolError):
        wire.decode([_frame(kind, body)], accept=ALL)


@pytest.mark.parametrize(
    "changes",
    [
        {"magic": b"XXXX"},
        {"version": 2},
        {"kind": 99},
        {"tensors": 1},
        {"size": 3},
        {"packed": b""},
        {"packed": b"\xc1"},
        {"packed": b"\x80\x80"},
        {"packed": b"\x81\xa3key\xc7\x00\x05"},
        {"packed": b"\x81\xa3key\xd6\xff\x00\x00\x00\x00"},
        {"packed": b"\x81\xa3key\xa1\xff"},
        {"packed": b"\xdf\xff\xff\xff\xff"},
        {"packed": b"\xdd\xff\xff\xff\xff"},
        {"packed": b"\x81\xa3key" + b"\x91" * 5000 + b"\xc0"},
        {"packed": b"\x81\x91\x01\x01"},
    ],
    ids=repr,
)
def test_decode_refuses_malformed_frames(changes: dict[str, Any]) -> None:
    """A broken header or map is a `ProtocolError`, extension types too (`fault-43`)."""
    with pytest.raises(ProtocolError):
        wire.decode([_frame(Kind.END, {"key": "a"}, **changes)], accept=ALL)


def test_decode_refuses_kinds_of_the_own_side() -> None:
    """A client that says READY, or an engine that says START, is not understood."""
    with pytest.raises(ProtocolError):
        wire.decode([_frame(Kind.READY, {})], accept=FROM_CLIENT)
    with pytest.raises(ProtocolError):
        wire.decode([_frame(Kind.SHUTDOWN, {})], accept=FROM_ENGINE)


@pytest.mark.parametrize("parts", [[], [b""], [b"x" * 23], [b"x"] * 9, [b""] * 20_000])
def test_decode_refuses_wrong_parts(parts: list[bytes]) -> None:
    """No part, a short header and too many parts are refused."""
    with pytest.raises(ProtocolError):
        wire.decode(parts, accept=ALL)


@pytest.mark.parametrize(
    "described",
    [
        [["x", "f", [3]]],
        [["x", "f", [2, 0]]],
        [["x", "f", [-2]]],
        [["x", "f", [1] * 9]],
        [["x", "f", [2.0]]],
        [["x", "f", [True, 2]]],
        [["x", "e", [4]]],
        [["x", "ff", [2]]],
        [["x", ["f"], [2]]],
        [["", "f", [2]]],
        [["x", "f", [2]], ["x", "f", [2]]],
        [["x", "f"]],
        [],
        [["x", "f", [2**39, 2**39]]],
    ],
    ids=repr,
)
def test_decode_refuses_tensors_unlike_their_description(described: Any) -> None:
    """Shape, format, name and count must be those of the memory that came."""
    body = {"key": "k", "request": {}, "tensors": described}
    memory = [bytes(8)] * max(1, len(described))
    head = _frame(Kind.START, body, tensors=len(memory))
    with pytest.raises(ProtocolError):
        wire.decode([head, *memory], accept=FROM_CLIENT)


def test_decode_refuses_tensors_beside_other_kinds() -> None:
    """Only START carries memory."""
    with pytest.raises(ProtocolError):
        wire.decode([_frame(Kind.END, {"key": "a"}, tensors=1), b"x"], accept=ALL)


def test_decode_refuses_huge_claims_quickly() -> None:
    """A megabyte of nested or empty lists costs no time and no memory (`fault-44`)."""
    empties = msgpack.packb({"chunks": [[]] * 60_000})
    nested = b"\x81\xa6chunks" + b"\xdd\x00\x00\x3f\xff" * 50_000
    for packed in (empties, nested):
        begin = time.perf_counter()
        with pytest.raises(ProtocolError):
            wire.decode([_frame(Kind.CHUNKS, None, packed=packed)], accept=ALL)
        assert time.perf_counter() - begin < 0.25


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ({"k": object()}, "unencodable"),
        ({"k": {1, 2}}, "unencodable"),
        ({"k": 2**70}, "unencodable"),
        ({"k": "\ud800"}, "unencodable"),
        ({1: 2}, "unencodable"),
        ({"k": "x" * 2**20}, "too_large"),
        ({"k": [0] * (2**17 + 1)}, "too_large"),
        ({"k": {"k": [[0] * (2**17 + 1)]}}, "too_large"),
    ],
    ids=["object", "set", "int", "surrogate", "int-key", "bytes", "array", "inner"],
)
def test_encode_refuses_what_the_other_side_would(body: Any, code: str) -> None:
    """The sender checks the limits; no error text shows content (`fault-44`)."""
    full = {"key": "k", "request": body, "tensors": []}
    with pytest.raises(EncodeError) as caught:
        wire.encode(Kind.START, full, incarnation=1, sequence=0)
    assert caught.value.code == code
    assert "xxx" not in str(caught.value)
    assert "ud800" not in str(caught.value)


def test_encode_refuses_deep_nesting() -> None:
    """Nesting beyond the limit is refused by both sides, a legal depth by neither."""
    deep: Any = 1
    for _ in range(15):
        deep = [deep]
    body = {"key": "k", "request": {"d": deep}, "tensors": []}
    head = wire.encode(Kind.START, body, incarnation=1, sequence=0)
    assert wire.decode([head], accept=ALL).body == body
    body["request"] = {"d": [[deep]]}
    with pytest.raises(EncodeError):
        wire.encode(Kind.START, body, incarnation=1, sequence=0)
    with pytest.raises(ProtocolError):
        wire.decode([_frame(Kind.START, body)], accept=ALL)


@pytest.mark.parametrize(
    ("tensors", "code"),
    [
        ({"x": [1, 2]}, "unencodable"),
        ({"x": b""}, "unencodable"),
        ({"x": memoryview(bytes(8))[::2]}, "unencodable"),
        ({"x": np.zeros(2, "datetime64[s]")}, "unencodable"),
        ({str(n): b"x" for n in range(8)}, "too_large"),
    ],
    ids=["list", "empty", "strided", "dates", "eight"],
)
def test_describe_refuses_what_cannot_be_sent(tensors: Any, code: str) -> None:
    """Tensors without plain contiguous memory are refused before anything is sent."""
    with pytest.raises(EncodeError) as caught:
        wire.describe(tensors)
    assert caught.value.code == code


plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False)
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
    | st.binary(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.text(st.characters(exclude_categories=["Cs"]), max_size=5),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@settings(max_examples=200, deadline=None)
@given(st.lists(plain, max_size=5))
def test_items_survive_the_wire(items: list[Any]) -> None:
    """Any plain value comes out as it went in."""
    body = {"chunks": [["k", 0, items, None]]}
    head = wire.encode(Kind.CHUNKS, body, incarnation=1, sequence=0)
    assert wire.decode([head], accept=ALL).body == body


def test_decode_raises_nothing_but_protocol_errors() -> None:
    """20,000 mutated frames: understood or `ProtocolError`, each quick (`N8`)."""
    draw = random.Random(20_261_120)
    seeds = [[_frame(kind, body)] for kind, body in SAMPLES.items()]
    seeds.append(_start({"x": memoryview(bytes(48)).cast("f", (3, 4)), "y": b"abc"}))
    refused = 0
    slowest = 0.0
    for _ in range(20_000):
        parts = _mutate(draw, [bytearray(part) for part in draw.choice(seeds)])
        begin = time.perf_counter()
        try:
            wire.decode(parts, accept=ALL)
        except ProtocolError:
            refused += 1
        slowest = max(slowest, time.perf_counter() - begin)
    assert 10_000 < refused < 20_000
    assert slowest < 0.25


def _mutate(draw: random.Random, parts: list[bytearray]) -> list[bytearray]:
    """Flip, cut, repeat or insert in a part, then often mend the length."""
    target = draw.choice(parts)
    for _ in range(draw.randint(1, 3)):
        at = draw.randrange(len(target) + 1)
        match draw.randrange(5):
            case 0 if at < len(target):
                target[at] = draw.randrange(256)
            case 1:
                del target[at : at + draw.randint(1, 9)]
            case 2:
                target[at:at] = target[at : at + draw.randint(1, 40)] * draw.randint(
                    1, 9
                )
            case 3:
                nasty = b"\xc1\xc7\xd4\xdd\xdf\xdb\xc6\x91\x81\xcf\xff\x00"
                target[at:at] = bytes(draw.choices(nasty, k=draw.randint(1, 8)))
            case _:
                parts.append(bytearray(draw.randbytes(draw.randint(0, 8))))
    head = parts[0]
    if draw.random() < 0.8 and len(head) >= wire.HEADER.size:
        struct.pack_into("!HI", head, 6, len(parts) - 1, len(head) - wire.HEADER.size)
    return parts


def test_package_imports_no_pickle() -> None:
    """No module of the link can unpickle or run what a peer sent (`S1`)."""
    banned = {"pickle", "marshal", "dill", "shelve", "cloudpickle"}
    calls = {"recv_pyobj", "send_pyobj", "eval", "exec"}
    for path in Path(lifecycle_zmq.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                assert not banned & {name.name for name in node.names}
            elif isinstance(node, ast.ImportFrom):
                assert node.module not in banned
            elif isinstance(node, ast.Attribute | ast.Name):
                name = node.attr if isinstance(node, ast.Attribute) else node.id
                assert name not in calls
