from __future__ import annotations

import contextlib
import math
from typing import Any

import pytest
from hypothesis import given, strategies as st

from lifecycle_engine.runner import Sampling
from lifecycle_engine.scheduling.backend import RequestRejected
from lifecycle_engine.scheduling.requests import parse
from lifecycle_engine.sim_runner import SimRunner

RUNNER = SimRunner(max_length=64)
GOOD: dict[str, Any] = {
    "input_ids": [1, 2, 3],
    "max_tokens": 5,
    "stop_ids": [256],
    "temperature": 0.5,
    "seed": 7,
    "top_p": 0.9,
    "logprobs": 2,
    "share": "somebody",
    "timeout": 30.0,
    "session": "talk",
}


def test_parse_complete_request() -> None:
    """Every field of a good request arrives as it was sent."""
    request = parse(GOOD, {"pixels": memoryview(bytes(48)).cast("f")}, RUNNER)
    assert request.prompt.input_ids == [1, 2, 3]
    assert request.max_tokens == 5
    assert request.stop_ids == {256}
    assert request.prompt.sampling == Sampling(0.5, 0.9, 7, 2)
    assert (request.share, request.timeout) == ("somebody", 30.0)
    assert request.nbytes == 48
    assert request.tensors == ("pixels",)
    assert (request.session, request.last_turn) == ("talk", False)
    assert request.prompt.session


def test_last_turn_leaves_no_slot_for_another() -> None:
    """The runner is told of a conversation only if a turn may follow."""
    last = parse(GOOD | {"last_turn": True}, {}, RUNNER)
    assert (last.session, last.last_turn) == ("talk", True)
    assert not last.prompt.session
    assert not parse(GOOD | {"session": None}, {}, RUNNER).prompt.session


def test_parse_applies_defaults() -> None:
    """Stop ids, temperature and seed may be left out: greedy until max_tokens."""
    request = parse({"input_ids": [0], "max_tokens": 1}, {}, RUNNER)
    assert request.stop_ids == frozenset()
    assert request.prompt.sampling == Sampling()
    assert (request.share, request.timeout) == ("", None)
    assert (request.session, request.last_turn) == (None, False)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("input_ids", []),
        ("input_ids", (1, 2)),
        ("input_ids", [1, True]),
        ("input_ids", [1, 2.0]),
        ("input_ids", [-1]),
        ("input_ids", [257]),
        ("input_ids", [2**80]),
        ("input_ids", b"abc"),
        ("input_ids", None),
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("max_tokens", True),
        ("max_tokens", 2.0),
        ("max_tokens", None),
        ("stop_ids", [257]),
        ("stop_ids", "x"),
        ("stop_ids", [0] * 257),
        ("temperature", 1),
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", 101.0),
        ("seed", -1),
        ("seed", 2**63),
        ("seed", 1.5),
        ("seed", False),
        ("top_p", 1),
        ("top_p", 1.1),
        ("logprobs", -1),
        ("logprobs", 21),
        ("logprobs", True),
        ("share", 1),
        ("share", "x" * 257),
        ("session", 1),
        ("session", "x" * 257),
        ("last_turn", 1),
        ("last_turn", None),
        ("timeout", 5),
        ("timeout", 0.0),
        ("timeout", -1.0),
        ("timeout", math.inf),
        ("surprise", 1),
    ],
)
def test_reject_bad_field(field: str, value: object) -> None:
    """A field of the wrong type or out of range is named in the refusal."""
    with pytest.raises(RequestRejected) as caught:
        parse(GOOD | {field: value}, {}, RUNNER)
    assert caught.value.code == "invalid_request"
    assert (field if field != "surprise" else "unknown") in caught.value.message


def test_reject_prompt_that_leaves_no_room() -> None:
    """Prompt and max_tokens together must fit a slot, to the token."""
    parse({"input_ids": [1] * 60, "max_tokens": 4}, {}, RUNNER)
    with pytest.raises(RequestRejected, match="the limit is 64") as caught:
        parse({"input_ids": [1] * 60, "max_tokens": 5}, {}, RUNNER)
    assert caught.value.code == "context_length_exceeded"


def test_reject_more_tokens_than_allowed() -> None:
    """The server's own bound on max_tokens holds below the slot's length."""
    parse(GOOD, {}, RUNNER, max_tokens=5)
    with pytest.raises(RequestRejected, match="expected 1 to 4"):
        parse(GOOD, {}, RUNNER, max_tokens=4)


def test_reject_tensors_of_another_model() -> None:
    """Tensors that the runner does not know are refused before anything is queued."""
    with pytest.raises(RequestRejected, match="expected pixels") as caught:
        parse(GOOD, {"pixel_values": memoryview(b"")}, RUNNER)
    assert caught.value.code == "invalid_tensors"


@given(
    st.dictionaries(
        st.sampled_from([*GOOD, "other"]),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats() | st.binary(),
            st.lists,
            max_leaves=4,
        ),
    )
)
def test_parse_anything_raises_only_refusals(request_map: dict[str, Any]) -> None:
    """Whatever map arrives, the answer is a request or a refusal."""
    with contextlib.suppress(RequestRejected):
        parse(request_map, {}, RUNNER)
