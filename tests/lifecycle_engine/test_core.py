"""The engine's requests, its queue of them, its slots, and whom it preempts."""

from __future__ import annotations

import contextlib
import math
from typing import Any

import pytest
from hypothesis import given, strategies as st

from lifecycle_engine import Prompt, Sampling, SimRunner
from lifecycle_engine.core.request import (
    EngineRequest,
    RequestQueue,
    Task,
    parse_request,
)
from lifecycle_engine.core.scheduler import choose_preemption
from lifecycle_engine.core.slots import ImageSpan, KVSlotCache, PrefixContents
from lifecycle_zmq import RequestRejected

RUNNER = SimRunner(max_length=64)
GOOD: dict[str, Any] = {
    "input_ids": [1, 2, 3],
    "max_tokens": 5,
    "stop_ids": [256],
    "temperature": 0.5,
    "seed": 7,
    "top_p": 0.9,
    "logprobs": 2,
    "client": "gateway",
    "tenant": "acme",
    "timeout": 30.0,
    "session": "talk",
}


def test_parse_complete_request() -> None:
    """Every field of a good request arrives as it was sent."""
    request = parse_request(GOOD, {"pixels": memoryview(bytes(48)).cast("f")}, RUNNER)
    assert request.prompt.input_ids == [1, 2, 3]
    assert request.max_tokens == 5
    assert request.stop_ids == {256}
    assert request.prompt.sampling == Sampling(0.5, 0.9, 7, 2)
    assert (request.owner, request.timeout) == (("gateway", "acme"), 30.0)
    assert request.nbytes == 48
    assert request.tensors == ("pixels",)
    assert (request.session, request.last_turn) == ("talk", False)
    assert request.prompt.session


def test_last_turn_is_not_resumable() -> None:
    """The runner gets a conversation only if a turn may follow."""
    last = parse_request(GOOD | {"last_turn": True}, {}, RUNNER)
    assert (last.session, last.last_turn) == ("talk", True)
    assert not last.prompt.session
    assert not parse_request(GOOD | {"session": None}, {}, RUNNER).prompt.session


def test_parse_applies_defaults() -> None:
    """Stop ids, temperature and seed may be left out: greedy until max_tokens."""
    request = parse_request({"input_ids": [0], "max_tokens": 1}, {}, RUNNER)
    assert request.stop_ids == frozenset()
    assert request.prompt.sampling == Sampling()
    assert (request.tenant, request.timeout) == ("", None)
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
        ("client", 1),
        ("tenant", 1),
        ("tenant", "x" * 257),
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
        parse_request(GOOD | {field: value}, {}, RUNNER)
    assert caught.value.code == "invalid_request"
    assert (field if field != "surprise" else "unknown") in caught.value.message


def test_reject_prompt_that_exceeds_the_slot() -> None:
    """Prompt and max_tokens together must fit a slot, to the token."""
    parse_request({"input_ids": [1] * 60, "max_tokens": 4}, {}, RUNNER)
    with pytest.raises(RequestRejected, match="the limit is 64") as caught:
        parse_request({"input_ids": [1] * 60, "max_tokens": 5}, {}, RUNNER)
    assert caught.value.code == "context_length_exceeded"


def test_reject_more_tokens_than_allowed() -> None:
    """The server's own bound on max_tokens holds below the slot's length."""
    parse_request(GOOD, {}, RUNNER, max_tokens=5)
    with pytest.raises(RequestRejected, match="expected 1 to 4"):
        parse_request(GOOD, {}, RUNNER, max_tokens=4)


def test_reject_tensors_of_another_model() -> None:
    """Tensors that the runner does not know are refused before anything is queued."""
    with pytest.raises(RequestRejected, match="expected pixels") as caught:
        parse_request(GOOD, {"pixel_values": memoryview(b"")}, RUNNER)
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
    """Any map is parsed or rejected; no other error is raised."""
    with contextlib.suppress(RequestRejected):
        parse_request(request_map, {}, RUNNER)


def queue_of(*pairs: tuple[str, str]) -> RequestQueue[str]:
    """A queue of ``(client, key)`` pairs."""
    queue: RequestQueue[str] = RequestQueue()
    for client, key in pairs:
        queue.push(key, (client, ""), key)
    return queue


def test_clients_are_served_round_robin() -> None:
    """One request of each client in turn, each client's own in order."""
    queue = queue_of(("a", "1"), ("a", "2"), ("a", "3"), ("b", "4"), ("c", "5"))
    assert [queue.pop() for _ in range(5)] == ["1", "4", "5", "2", "3"]


@pytest.mark.parametrize("tenants", [1, 100])
def test_flood_of_one_client_delays_another_by_one(tenants: int) -> None:
    """A request that arrives behind a hundred of another client is next but one.

    However many tenants that client names; those take turns.
    """
    queue: RequestQueue[str] = RequestQueue()
    for number in range(200):
        queue.push(f"f{number}", ("flood", f"t{number // 2 % tenants}"), f"f{number}")
    queue.pop()
    queue.push("me", ("other", ""), "me")
    second = "f1" if tenants == 1 else "f2"
    assert [queue.pop(), queue.pop()] == [second, "me"]


def test_remove_from_the_middle() -> None:
    """A removed request is gone; the order of the others stays."""
    queue = queue_of(("a", "1"), ("a", "2"), ("b", "3"), ("a", "4"))
    assert queue.remove("2") == "2"
    assert queue.remove("2") is None
    assert queue.remove("3") == "3"
    assert [queue.pop(), queue.pop()] == ["1", "4"]
    assert len(queue) == 0


def test_push_front_puts_a_request_first_of_its_client() -> None:
    """It is first in its client's queue; the order of the clients stays."""
    queue = queue_of(("a", "1"), ("b", "3"), ("a", "2"))
    assert queue.clients == ["a", "b"]
    queue.push_front("0", ("a", ""), "0")
    queue.push_front("4", ("c", ""), "4")
    assert [queue.pop() for _ in range(len(queue))] == ["0", "3", "4", "1", "2"]


def test_pop_serves_a_client_out_of_turn() -> None:
    """Its first request is taken, and the client goes to the end of the round."""
    queue = queue_of(("a", "1"), ("b", "2"), ("b", "3"))
    assert queue.pop("b") == "2"
    assert queue.clients == ["a", "b"]
    with pytest.raises(LookupError):
        queue.pop("c")


def test_push_of_a_queued_key_raises() -> None:
    """A key is in the queue once."""
    queue = queue_of(("a", "1"))
    with pytest.raises(ValueError, match="already in the queue"):
        queue.push("1", ("b", ""), "x")


def test_pop_from_an_empty_queue_raises() -> None:
    """An empty queue returns no request."""
    with pytest.raises(LookupError):
        RequestQueue().pop()


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 9), st.integers(0, 2)))
)
def test_any_order_of_pushes_removes_and_pops_balances(
    acts: list[tuple[str, int, int]],
) -> None:
    """A request is queued, in its tenant's order, until it is removed or taken."""
    queue: RequestQueue[str] = RequestQueue()
    waiting: list[tuple[tuple[str, str], str]] = []
    for letter, number, act in acts:
        tenant = ("one" if letter == "a" else "other", letter)
        key = f"k{number}"
        if act == 0 and key not in queue:
            queue.push(key, tenant, key)
            waiting.append((tenant, key))
        elif act == 1:
            left = queue.remove(key)
            assert (left is None) == (key not in [each for _, each in waiting])
            waiting = [each for each in waiting if each[1] != key]
        elif act == 2 and waiting:
            taken = queue.pop()
            owner = next(of for of, each in waiting if each == taken)
            assert taken == next(each for of, each in waiting if of == owner)
            waiting.remove((owner, taken))
        assert sorted(queue) == sorted(each for _, each in waiting)
        assert len(queue) == len(waiting)


def test_gives_no_slot_to_two_tasks() -> None:
    """A slot that is freed twice is an error, with and without ``-O``."""
    slots = KVSlotCache(RUNNER)
    request = parse_request(GOOD, {}, RUNNER)
    first, second = Task("a", request, 0, None), Task("b", request, 0, None)
    slots.acquire(first)
    second.slot = first.slot
    slots.release(first)
    with pytest.raises(RuntimeError, match="^slot 0 was freed before$"):
        slots.release(second)
    assert slots.report()["slots_free"] == RUNNER.slots


# A prompt as pieces: words, or images of one to three tokens each.
IMAGE = 99
pieces = st.lists(
    st.integers(0, 3) | st.tuples(st.integers(1, 3), st.sampled_from([b"a", b"b"])),
    max_size=8,
)


def contents(parts: list[int | tuple[int, bytes]]) -> PrefixContents:
    """The contents of a slot after a prompt of such pieces."""
    ids: list[int] = []
    pictures = []
    for part in parts:
        if isinstance(part, int):
            ids.append(part)
        else:
            count, digest = part
            pictures.append(ImageSpan(len(ids), digest * count))
            ids += [IMAGE] * count
    return PrefixContents(ids, pictures)


def origins(parts: list[int | tuple[int, bytes]]) -> list[tuple[int, ...]]:
    """What each position was computed from; for an image, the whole image."""
    made: list[tuple[int, ...]] = []
    for part in parts:
        if isinstance(part, int):
            made.append((part,))
        else:
            count, digest = part
            made += [(IMAGE, at, *digest, count) for at in range(count)]
    return made


@given(one=pieces, other=pieces, common=pieces)
def test_common_prefix_has_equal_origins(
    one: list[int | tuple[int, bytes]],
    other: list[int | tuple[int, bytes]],
    common: list[int | tuple[int, bytes]],
) -> None:
    """It has no differing position, and at least all common pieces."""
    left, right = contents([*common, *one]), contents([*common, *other])
    shared = left.common_prefix(right)
    assert shared == right.common_prefix(left)
    assert origins([*common, *one])[:shared] == origins([*common, *other])[:shared]
    assert shared >= len(contents(common).ids)


def test_another_image_ends_the_common_prefix_at_its_start() -> None:
    """Its tokens are equal, its pixels are not."""
    one, other = contents([1, (3, b"a"), 2]), contents([1, (3, b"b"), 2])
    assert one.common_prefix(one) == 5
    assert one.common_prefix(other) == 1


def test_repr_shows_no_content() -> None:
    """The repr has neither tokens nor digests."""
    assert repr(contents([1, 2, (2, b"a")])) == "PrefixContents()"


def task(client: str, *, stripped: bool = False, image: bool = False) -> Task:
    """A task in prefill."""
    tensors = ("pixels",) if image else ()
    request = EngineRequest(
        Prompt([1], {}), 1, frozenset(), 0, "", client, None, tensors
    )
    return Task(client, request, 0, None, stripped=stripped)


def test_client_without_a_slot_preempts_one_with_several() -> None:
    """The newest prompt of the client with several slots is preempted."""
    first, second, other = task("a"), task("a"), task("b")
    assert choose_preemption(["c"], [first, second, other], []) == (second, "c")
    assert choose_preemption(["c"], [first, other], []) is None
    assert choose_preemption(["c"], [first, other], [task("a")]) == (first, "c")
    assert choose_preemption(["a", "b"], [first, second, other], []) is None
    assert choose_preemption(["a", "c"], [first, second, other], []) == (second, "c")


def test_only_replayable_prompts_are_preempted() -> None:
    """A running stream keeps its slot, and so does a prompt whose image is freed."""
    gone, again = task("a", stripped=True, image=True), task("a", stripped=True)
    assert choose_preemption(["b"], [gone, gone], []) is None
    assert choose_preemption(["b"], [again, gone], []) == (again, "b")
    assert choose_preemption(["b"], [], [task("a"), task("a")]) is None
