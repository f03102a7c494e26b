"""The wire format: what fits, what is refused, and by which error."""

from __future__ import annotations

import ast
import re
import struct
import time
import tracemalloc
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import lifecycle_zmq
from lifecycle_zmq import EncodeError, ProtocolError, codec, protocol as wire
from lifecycle_zmq.codec import (
    is_token_list,
    pack_item,
    pack_request,
    pack_tokens,
    unpack_item,
    unpack_request,
)
from lifecycle_zmq.protocol import FROM_CLIENT, FROM_ENGINE, Kind
from lifecycle_zmq.shared_memory.tensors import MAX_TENSORS, Place, describe

ALL = FROM_CLIENT | FROM_ENGINE
REQUEST = {"ids": [1, 2, 3], "t": 0.5, "deep": {"x": [None, True, b"z"]}}
SAMPLES: dict[Kind, dict[str, Any]] = {
    Kind.START: {
        "key": "a#1",
        "window": 2**16,
        "request": msgpack.packb(REQUEST),
        "tensors": [],
    },
    Kind.CONTROL: {
        "start": [[7, "b#1", 2**16, msgpack.packb(REQUEST)]],
        "cancel": [1],
        "grant": [[2, 4096], [3, 1]],
        "end": [1, 2**62],
    },
    Kind.STATUS: {"ask": 1},
    Kind.PING: {"ask": 7},
    Kind.LEAVE: {"message": "m"},
    Kind.PONG: {"ask": 7},
    Kind.FAULT: {"message": "m"},
    Kind.SHUTDOWN: {},
    Kind.READY: {},
    Kind.TICK: {
        "accepted": [7, 8],
        "rejected": [[9, "full", "no"]],
        "tokens": pack_tokens([1, 0, 1, 5, 2, 4, 2, 6, 2**32 - 1]),
        "chunks": [
            [3, 0, [msgpack.packb([1.5]), msgpack.packb({"x": None})], None],
            [4, 7, [], {"reason": "completed"}],
            [5, 0, [], {"reason": "failed", "error": {"code": "c", "message": ""}}],
        ],
        "done": [6],
        "freed": [6, 2],
    },
    Kind.REPORT: {"ask": 1, "status": {"starts": 3, "backend": {}}},
}
# Requests and items are unpacked along with the message that they travel in.
READ = SAMPLES | {
    Kind.START: SAMPLES[Kind.START] | {"request": REQUEST},
    Kind.CONTROL: SAMPLES[Kind.CONTROL] | {"start": [[7, "b#1", 2**16, REQUEST]]},
    Kind.TICK: SAMPLES[Kind.TICK]
    | {
        "tokens": [(1, 0, [5]), (2, 4, [6, 2**32 - 1])],
        "chunks": [
            [3, 0, [([1.5], 64 + 10), ({"x": None}, 64 + 4)], None],
            *SAMPLES[Kind.TICK]["chunks"][1:],
        ],
    },
}
TICK: dict[str, Any] = {
    "accepted": [],
    "rejected": [],
    "tokens": b"",
    "chunks": [],
    "done": [],
    "freed": [],
}
CONTROL: dict[str, Any] = {"start": [], "cancel": [], "grant": [], "end": []}
START: dict[str, Any] = {"key": "a", "window": 1, "request": b"\x80", "tensors": []}


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
        "generation": int(kind is Kind.START),
        "sequence": 0,
    } | changes
    return wire.seal([*fields.values()], packed)


def _encode(kind: Kind, body: Any, **changes: int) -> bytes:
    header = {
        "incarnation": 1,
        "sequence": 0,
        "generation": int(kind is Kind.START),
    }
    return wire.encode(kind, body, **header | changes)


def _start(tensors: dict[str, Any]) -> list[Any]:
    described, memory = describe(tensors)
    body = START | {"tensors": described}
    head = _encode(Kind.START, body, tensors=len(memory))
    return [head, *map(bytearray, memory)]  # as writable as what is received


@pytest.mark.parametrize("kind", list(Kind))
def test_decode_returns_what_encode_was_given(kind: Kind) -> None:
    """Each kind survives the way through the wire, header and body."""
    number = 2**40 if kind is Kind.START else 0
    head = _encode(
        kind, SAMPLES[kind], incarnation=3, sequence=2**40, generation=number
    )
    message = wire.decode([head], accept=ALL)
    assert (message.kind, message.generation) == (kind, number)
    assert (message.incarnation, message.sequence) == (3, 2**40)
    assert message.body == READ[kind]


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
    x, y = tensors["x"], tensors["y"]
    assert isinstance(x, memoryview)
    assert isinstance(y, memoryview)
    assert (x.format, x.shape) == (letter, (2, 3))
    assert (x.tobytes(), y.tobytes()) == (raw, b"abc")
    assert x.readonly
    assert y.readonly


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (Kind.SHUTDOWN, {"more": 1}),
        (Kind.SHUTDOWN, ["key"]),
        (Kind.SHUTDOWN, None),
        (Kind.STATUS, {"ask": True}),
        (Kind.STATUS, {"ask": -1}),
        (Kind.STATUS, {"ask": 1.0}),
        (Kind.STATUS, {}),
        (Kind.START, START | {"key": 1}),
        (Kind.START, START | {"key": ""}),
        (Kind.START, START | {"key": "x" * 257}),
        (Kind.START, START | {"key": b"a"}),
        (Kind.START, START | {"window": 0}),
        (Kind.START, START | {"window": True}),
        (Kind.START, START | {"more": 1}),
        (Kind.START, START | {"request": {}}),
        *(
            (kind, fields)
            for packed in (
                b"",
                b"\xc1",
                b"\x80\x80",
                msgpack.packb([]),
                msgpack.packb({b"k": 1}),
                msgpack.packb({"k": {b"k": 1}}),
                b"\x81\xa1k\xc7\x00\x05",
                b"\x81\xa1k" + b"\x91" * 20 + b"\x01",
            )
            for kind, fields in (
                (Kind.START, START | {"request": packed}),
                (Kind.CONTROL, CONTROL | {"start": [[1, "k", 1, packed]]}),
            )
        ),
        (Kind.CONTROL, CONTROL | {"start": [[0, "k", 1, b"\x80"]]}),
        (Kind.CONTROL, CONTROL | {"start": [[1, "", 1, b"\x80"]]}),
        (Kind.CONTROL, CONTROL | {"start": [[1, "k", 0, b"\x80"]]}),
        (Kind.CONTROL, CONTROL | {"start": [[1, "k", 1]]}),
        (Kind.START, START | {"tensors": {}}),
        (Kind.START, START | {"tensors": [["x", "f", [1], None]]}),
        (Kind.CONTROL, {"cancel": [], "grant": [], "end": []}),
        (Kind.CONTROL, CONTROL | {"cancel": ["a"]}),
        (Kind.CONTROL, CONTROL | {"end": [0]}),
        (Kind.CONTROL, CONTROL | {"end": [True]}),
        (Kind.CONTROL, CONTROL | {"end": {}}),
        (Kind.CONTROL, CONTROL | {"grant": [[1]]}),
        (Kind.CONTROL, CONTROL | {"grant": [[1, 0]]}),
        (Kind.CONTROL, CONTROL | {"grant": [[1, 2**64 - 1]]}),
        (Kind.CONTROL, CONTROL | {"grant": [1]}),
        (Kind.REPORT, {"ask": 1, "status": {"x": {1: 2}}}),
        (Kind.TICK, TICK | {"accepted": [-1]}),
        (Kind.TICK, TICK | {"accepted": 1}),
        (Kind.TICK, TICK | {"rejected": [[1, "c"]]}),
        (Kind.TICK, TICK | {"rejected": [[1, "x" * 65, ""]]}),
        (Kind.TICK, TICK | {"rejected": [[1, "x", "y" * 4097]]}),
        (Kind.TICK, TICK | {"tokens": "text"}),
        (Kind.TICK, TICK | {"tokens": b"123"}),
        *(
            (Kind.TICK, TICK | {"tokens": pack_tokens(words)})
            for words in (
                [1],
                [1, 0],
                [1, 0, 1],
                [1, 0, 0, 5],
                [1, 0, 2, 5],
                [1, 0, 1, 5, 2, 0, 2, 5],
                [1, 0, 2, 5, 5, 2, 0, 2**32 - 1, 5],
                [1, 0, 0, 2, 0, 1, 5, 5],
            )
        ),
        (Kind.TICK, TICK | {"chunks": {}}),
        (Kind.TICK, TICK | {"chunks": [[1, 0, []]]}),
        (Kind.TICK, TICK | {"chunks": [["a", 0, [], None]]}),
        (Kind.TICK, TICK | {"chunks": [[1, -1, [], None]]}),
        (Kind.TICK, TICK | {"chunks": [[1, 0, {}, None]]}),
        (Kind.TICK, TICK | {"chunks": [[1, 0, [1], None]]}),
        (Kind.TICK, TICK | {"chunks": [[1, 0, [b""], None]]}),
        (Kind.TICK, TICK | {"chunks": [[1, 0, [b"\xc1"], None]]}),
        (Kind.TICK, TICK | {"chunks": [[1, 0, [b"\x01\x01"], None]]}),
        (Kind.TICK, TICK | {"chunks": [[1, 0, [b"\xc7\x00\x05"], None]]}),
        (Kind.TICK, TICK | {"chunks": [[1, 0, [b"\x91" * 20 + b"\x01"], None]]}),
        (Kind.TICK, TICK | {"chunks": [[1, 0, [], "completed"]]}),
        (Kind.TICK, TICK | {"chunks": [[1, 0, [], {"reason": []}]]}),
        (Kind.TICK, TICK | {"chunks": [[1, 0, [], {"reason": "bored"}]]}),
        (Kind.TICK, TICK | {"chunks": [[1, 0, [], {"reason": "failed"}]]}),
        (Kind.TICK, TICK | {"chunks": [[1, 0, [], {"reason": "completed", "x": 1}]]}),
        (
            Kind.TICK,
            TICK
            | {"chunks": [[1, 0, [], {"reason": "failed", "error": {"code": "c"}}]]},
        ),
    ],
)
def test_decode_refuses_foreign_fields(kind: Kind, body: Any) -> None:
    """A missing, unknown or wrongly typed field is a `ProtocolError` (`fault-43`, `S3`)."""
    with pytest.raises(ProtocolError):
        wire.decode([_frame(kind, body)], accept=ALL)


@pytest.mark.parametrize(
    "changes",
    [
        {"magic": b"XXXX"},
        {"version": 1},
        {"version": 2},
        {"version": 4},
        {"kind": 99},
        {"tensors": 1},
        {"generation": 1},
        {"size": 3},
        {"packed": b""},
        {"packed": b"\xc1"},
        {"packed": b"\x80\x80"},
        {"packed": b"\x81\xa3ask\xc7\x00\x05"},
        {"packed": b"\x81\xa3ask\xd6\xff\x00\x00\x00\x00"},
        {"packed": b"\x81\xa3ask\xa1\xff"},
        {"packed": b"\xdf\xff\xff\xff\xff"},
        {"packed": b"\xdd\xff\xff\xff\xff"},
        {"packed": b"\x81\xa3ask" + b"\x91" * 5000 + b"\xc0"},
        {"packed": b"\x81\x91\x01\x01"},
    ],
    ids=repr,
)
def test_decode_refuses_malformed_frames(changes: dict[str, Any]) -> None:
    """A broken header or map is a `ProtocolError`, extension types too (`fault-43`, `S3`)."""
    with pytest.raises(ProtocolError):
        wire.decode([_frame(Kind.STATUS, {"ask": 1}, **changes)], accept=ALL)


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
        [["x", "f", [3], None]],
        [["x", "f", [2, 0], None]],
        [["x", "f", [-2], None]],
        [["x", "f", [1] * 9, None]],
        [["x", "f", [2.0], None]],
        [["x", "f", [True, 2], None]],
        [["x", "e", [4], None]],
        [["x", "ff", [2], None]],
        [["x", ["f"], [2], None]],
        [["", "f", [2], None]],
        [["x", "f", [2], None], ["x", "f", [2], None]],
        [["x", "f"]],
        [["x", "f", [2]]],
        [["x", "f", [2], 0]],
        [["x", "f", [2], -1]],
        [["x", "f", [2], 0.0]],
        [["x", "f", [2], False]],
        [["x", "f", [2], None, None]],
        [["x", "f", [2], None], ["x", "f", [2], 0]],
        [["x", "f", [2], None], *[[f"{n}", "f", [2], 0] for n in range(7)]],
        [],
        [["x", "f", [2**39, 2**39], None]],
    ],
    ids=repr,
)
def test_decode_refuses_tensors_unlike_their_description(described: Any) -> None:
    """Shape, format, name and count must be those of the memory that came."""
    body = START | {"tensors": described}
    sent = [it for it in described if it[3:] != [0]]
    memory = [bytes(8)] * max(1, len(sent))
    head = _frame(Kind.START, body, tensors=len(memory))
    with pytest.raises(ProtocolError):
        wire.decode([head, *memory], accept=FROM_CLIENT)


def test_decode_tells_what_lies_in_the_arena() -> None:
    """Each tensor is in its place or in the next part; the order is the sender's."""
    body = START | {
        "tensors": [["x", "f", [2], 8], ["y", "B", [3], None], ["z", "d", [1, 2], 0]]
    }
    parts = [_frame(Kind.START, body, tensors=1), b"abc"]
    tensors = wire.decode(parts, accept=FROM_CLIENT).tensors
    assert list(tensors) == ["x", "y", "z"]
    assert tensors["x"] == Place(8, "f", [2])
    assert tensors["z"] == Place(0, "d", [1, 2])
    assert tensors["y"] == b"abc"


def test_decode_refuses_tensors_beside_other_kinds() -> None:
    """Only START carries memory."""
    with pytest.raises(ProtocolError):
        wire.decode([_frame(Kind.CONTROL, CONTROL, tensors=1), b"x"], accept=ALL)


@pytest.mark.parametrize(
    "packed",
    [
        b"\x81\xa6chunks" + b"\xdd\x00\x00\x3f\xff" * 50_000,
        b"\x81\xa6chunks" + b"\xdc\x3f\xff" * 80_000,
        b"\xdf\x00\x00\x03\xff" * 50_000,
        b"\x81\xa6chunks\xdd\x00\x03\xff\xff" + b"\xc0" * (2**18 - 1),
        msgpack.packb({"chunks": [[]] * 60_000}),
        b"",
    ],
    ids=["nested", "short", "maps", "long", "empties", "nothing"],
)
def test_decode_refuses_huge_claims_without_memory(packed: bytes) -> None:
    """What an array claims to hold costs nothing unless it is there (`fault-44`)."""
    frame = _frame(Kind.TICK, None, packed=packed)
    begin = time.thread_time()
    with pytest.raises(ProtocolError):
        wire.decode([frame], accept=ALL)
    assert time.thread_time() - begin < 0.25
    tracemalloc.start()
    try:
        with pytest.raises(ProtocolError):
            wire.decode([frame], accept=ALL)
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("size", [255, 256, 257, 2_000, 16_000])
def test_reader_takes_little_for_what_short_messages_claim(size: int) -> None:
    """Also where a message is so short that it is not walked through (`fault-44`)."""
    claim = b"\xdc" + size.to_bytes(2, "big")
    item = claim * (size // len(claim)) + bytes(size % len(claim))
    tracemalloc.start()
    try:
        for read in (unpack_request, unpack_item):
            with pytest.raises(ProtocolError):
                read(item)
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


def test_decode_refuses_the_same_claims_in_an_item() -> None:
    """An item is a frame within the frame, and as little believed (`fault-44`)."""
    item = b"\xdd\x00\x00\x3f\xff" * 50_000
    frame = _frame(Kind.TICK, TICK | {"chunks": [[1, 0, [item], None]]})
    tracemalloc.start()
    try:
        with pytest.raises(ProtocolError):
            wire.decode([frame], accept=ALL)
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


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
    """The sender checks the limits; no error text shows content (`fault-44`, `S4`)."""
    with pytest.raises(EncodeError) as caught:
        pack_request(body)
    assert caught.value.code == code
    assert "xxx" not in str(caught.value)
    assert "ud800" not in str(caught.value)


def test_encode_refuses_deep_nesting() -> None:
    """Nesting beyond the limit is refused by both sides, a legal depth by neither."""
    deep: Any = 1
    for _ in range(15):
        deep = [deep]
    assert unpack_request(pack_request({"d": deep})) == {"d": deep}
    too_deep = {"d": [[deep]]}
    for refused in (pack_request, pack_item):
        with pytest.raises(EncodeError):
            refused(too_deep)
    for read in (unpack_request, unpack_item):
        with pytest.raises(ProtocolError):
            read(msgpack.packb(too_deep))


@pytest.mark.parametrize(
    ("tensors", "code"),
    [
        ({"x": [1, 2]}, "unencodable"),
        ({"x": b""}, "unencodable"),
        ({"x": memoryview(bytes(8))[::2]}, "unencodable"),
        ({"x": np.zeros(2, "datetime64[s]")}, "unencodable"),
        ([b"x"], "unencodable"),
        ({str(n): b"x" for n in range(8)}, "too_large"),
    ],
    ids=["list", "empty", "strided", "dates", "nameless", "eight"],
)
def test_describe_refuses_what_cannot_be_sent(tensors: Any, code: str) -> None:
    """Tensors without plain contiguous memory are refused before anything is sent."""
    with pytest.raises(EncodeError) as caught:
        describe(tensors)
    assert caught.value.code == code


def test_describe_takes_as_many_as_may_be() -> None:
    """Seven; each is named, and is sent."""
    tensors = {str(n): b"x" * (n + 1) for n in range(7)}
    described, memory = describe(tensors)
    assert [it[0] for it in described] == list(tensors)
    assert [bytes(it) for it in memory] == list(tensors.values())


def test_describe_refuses_a_tensor_that_wants_a_gradient() -> None:
    """A tensor without plain memory raises an error, and nothing breaks."""
    torch = pytest.importorskip("torch")
    with pytest.raises(EncodeError) as caught:
        describe({"x": torch.ones(2, requires_grad=True)})
    assert caught.value.code == "unencodable"


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
    packed = [pack_item(item) for item in items]
    head = _encode(Kind.TICK, TICK | {"chunks": [[1, 0, packed, None]]})
    ((_, _, pairs, _),) = wire.decode([head], accept=ALL).body["chunks"]
    assert [item for item, _ in pairs] == items
    assert [cost for _, cost in pairs] == [64 + len(it) for it in packed]


token_lists = st.lists(
    st.tuples(
        st.integers(1, 2**32 - 1),
        st.integers(0, 2**32 - 1),
        st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=4),
    ),
    max_size=6,
)


@settings(max_examples=200, deadline=None)
@given(token_lists)
def test_token_lists_survive_the_wire(lists: list[tuple[int, int, list[int]]]) -> None:
    """The compact form loses nothing, whatever the lengths are."""
    assert all(is_token_list(tokens) for _, _, tokens in lists)
    words = [
        word
        for stream, item, tokens in lists
        for word in (stream, item, len(tokens), *tokens)
    ]
    block = pack_tokens(words)
    head = _encode(Kind.TICK, TICK | {"tokens": block})
    assert wire.decode([head], accept=ALL).body["tokens"] == lists


@pytest.mark.parametrize(
    "item",
    [[], [-1], [2**32], [True], [1.0], [1, None], [1, -1], (1,), "1", [1] * 40_000],
    ids=lambda it: repr(it)[:12],
)
def test_other_lists_do_not_take_the_compact_form(item: Any) -> None:
    """Only lists that it brings back unchanged do."""
    assert not is_token_list(item)


def test_repr_of_a_message_tells_no_content() -> None:
    """A log line about a frame shows its kind and number (law 12)."""
    head = wire.encode(
        Kind.START, SAMPLES[Kind.START], incarnation=1, sequence=3, generation=1
    )
    assert repr(wire.decode([head], accept=ALL)) == "<START 3>"


def test_package_imports_no_pickle() -> None:
    """No module of the link can unpickle or run what a peer sent (`S1`, `peers-88`)."""
    banned = {"pickle", "marshal", "dill", "shelve", "cloudpickle"}
    calls = {"recv_pyobj", "send_pyobj", "eval", "exec"}
    for path in Path(lifecycle_zmq.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                assert not banned & {name.name for name in node.names}
            elif isinstance(node, ast.ImportFrom):
                assert node.module not in banned
            elif isinstance(node, ast.Attribute | ast.Name):
                name = node.attr if isinstance(node, ast.Attribute) else node.id
                assert name not in calls


# The page about the wire says what the code does; its own code runs with the docs ------

PAGE = (Path(__file__).parents[2] / "docs" / "reference" / "wire.md").read_text()
UNITS = {"KiB": 2**10, "MiB": 2**20}


def rows(width: int) -> list[list[str]]:
    """The rows of all tables of that many columns."""
    lines = [line.strip("| ").split(" | ") for line in PAGE.splitlines()]
    return [[cell.strip() for cell in line] for line in lines if len(line) == width]


def test_page_lists_every_kind_with_its_limits() -> None:
    """Number, name, sender and both limits of each kind are those of the code."""
    said = {}
    for number, name, sender, size, array in rows(5):
        if number.isdigit():
            count, unit = size.split()
            limits = (int(count) * UNITS[unit], int(array))
            said[int(number), name] = (sender, *limits)
    assert said == {
        (int(kind), kind.name): (
            "client" if kind in FROM_CLIENT else "engine",
            wire.limits_of(kind).body,
            wire.limits_of(kind).array,
        )
        for kind in Kind
    }


def test_page_lists_the_header_byte_by_byte() -> None:
    """Offsets and sizes are those that are packed, and leave no gap."""
    fields = [
        (int(offset), int(size), text)
        for offset, size, text in rows(3)
        if offset.isdigit() and size.isdigit()
    ]
    assert [size for _, size, _ in fields] == [4, 1, 1, 2, 4, 4, 8, 8, 4]
    assert [at for at, _, _ in fields] == [0, 4, 5, 6, 8, 12, 16, 24, 32]
    assert fields[-1][0] + fields[-1][1] == wire.HEADER.size
    assert wire.MAGIC.hex(" ") in fields[0][2]
    assert fields[1][2] == f"version, {wire.VERSION}"


def test_page_lists_the_fields_of_every_kind() -> None:
    """Each field of a map has a row or a sentence in the section of its kind."""
    sections = re.split(r"^### ", PAGE, flags=re.MULTILINE)[1:]
    for kind, schema in wire._SCHEMAS.items():
        (section,) = (it for it in sections if f"{kind.name}, {kind}" in it)
        for name in schema:
            assert f"`{name}`" in section


def test_page_names_the_other_limits() -> None:
    """Depth, entries of a map, what an item costs and may take: as in the code."""
    flat = " ".join(PAGE.split())
    for text in (
        f"nesting beyond {codec.MAX_DEPTH} levels",
        f"no map beyond {codec.MAX_MAP} entries",
        f"An item costs {codec.BASE_COST} plus its bytes",
        f"at most {codec.MAX_ITEM // 1024} KiB",
        f"one to {MAX_TENSORS + 1} parts".replace("8", "eight"),
    ):
        assert text in flat
