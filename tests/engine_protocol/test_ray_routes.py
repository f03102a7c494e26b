"""Which replica gets which request, and what is told of several: no cluster needed."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("ray", reason="Ray is not installed")

from ray.exceptions import (
    ActorDiedError,
    ActorUnavailableError,
    OutOfMemoryError,
    RayError,
)

from lifecycle_ray import _routes
from lifecycle_ray._replica import told
from lifecycle_ray._routes import Routes, conversation, weigh
from lifecycle_ray.engine import _sums


class Here:
    """A replica, as far as its streams and its readiness go."""

    def __init__(self) -> None:
        self.ready = True
        self.keys: set[str] = set()

    def holds(self, key: str) -> bool:
        """Whether it has a stream."""
        return key in self.keys


class Placed:
    """Requests that are placed on replicas and stay until they are ended."""

    def __init__(self, count: int) -> None:
        self.replicas: Any = [Here() for _ in range(count)]
        self.routes = Routes(self.replicas, weigh, conversation)
        self._started = 0

    def __call__(self, session: str | None = None, **request: Any) -> int:
        """Start one and return the number of its replica."""
        self._started += 1
        key, nbytes = f"s{self._started}", request.pop("nbytes", 0)
        request |= {"session": session}
        replica: Any = self.routes.place(key, request, nbytes)
        replica.keys.add(key)
        assert self.routes.of(key) is replica
        return list(self.replicas).index(replica)


def test_gives_a_request_to_the_replica_with_the_least_to_do() -> None:
    """Shares of tokens and of bytes are added; where both are alike, streams count."""
    place = Placed(3)
    assert [place(max_tokens=99) for _ in range(3)] == [0, 1, 2]
    assert place(nbytes=1000) == 0
    assert place(max_tokens=10) == 1
    assert place(max_tokens=10) == 2
    assert place.routes.loads() == [(101, 1000), (111, 0), (111, 0)]
    assert place(nbytes=500) == 1
    assert place() == 2
    sides = Placed(2)
    assert [sides(max_tokens=899, nbytes=400), sides(max_tokens=99, nbytes=600)] == [
        0,
        1,
    ]
    assert sides() == 1
    empty = Placed(2)
    empty.routes = Routes(empty.replicas, lambda _: 0, conversation)
    assert [empty() for _ in range(4)] == [0, 1, 0, 1]


def test_counts_a_stream_as_long_as_its_replica_holds_it() -> None:
    """However it ended: nobody has to tell of it."""
    place = Placed(2)
    assert [place(max_tokens=99), place(max_tokens=9)] == [0, 1]
    place.replicas[0].keys.clear()
    assert place.routes.loads() == [(0, 0), (10, 0)]
    assert place.routes.of("s1") is None
    assert place(max_tokens=9) == 0


def test_passes_over_a_replica_that_takes_nothing() -> None:
    """However little it has to do; where none does, one of them says when to come."""
    place = Placed(2)
    place.replicas[0].ready = False
    assert [place() for _ in range(5)] == [1] * 5
    place.replicas[1].ready = False
    assert place() == 0


def test_keeps_a_conversation_where_its_replica_serves() -> None:
    """With however much to do; when that is gone it has another home, and keeps that."""
    place = Placed(2)
    assert place("talk", max_tokens=1000) == 0
    assert [place(), place(), place("talk")] == [1, 1, 0]
    place.replicas[0].ready = False
    assert place("talk") == 1
    place.replicas[0].ready = True
    place.replicas[0].keys.clear()
    assert [place("talk"), place("other")] == [1, 0]


def test_remembers_the_latest_conversations_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Their number is bounded; a turn of one makes it the latest again."""
    monkeypatch.setattr(_routes, "_REMEMBERED", 2)
    place = Placed(2)
    homes = [place("a", max_tokens=1000), place("b"), place("a"), place("c")]
    assert homes == [0, 1, 0, 1]
    assert list(place.routes._homes.values()) == [0, 1]
    assert [place("a"), place()] == [0, 1]


@pytest.mark.parametrize(
    ("request_", "tokens", "name"),
    [
        ({}, 1, None),
        ({"input_ids": [1, 2], "max_tokens": 5}, 8, None),
        ({"input_ids": "text", "max_tokens": "5", "session": 7}, 1, None),
        ({"session": "s"}, 1, (None, "s")),
        ({"session": "s", "share": "k"}, 1, ("k", "s")),
    ],
)
def test_weighs_what_it_knows_of_a_request(
    request_: dict[str, Any], tokens: int, name: Any
) -> None:
    """Prompt and limit of the bundled engine, and whose conversation it is."""
    assert (weigh(request_), conversation(request_)) == (tokens, name)


def test_says_in_a_word_what_became_of_an_actor() -> None:
    """Each way of Ray to lose one has its own; anything else is as the caller says."""
    gone = ActorDiedError()
    gone.error_msg = "The actor died because its node has died."
    assert told(OutOfMemoryError("x"), "other") == "out_of_memory"
    assert told(ActorUnavailableError("x", b"1" * 16), "other") == "unreachable"
    assert told(ActorDiedError(), "other") == "died"
    assert told(gone, "other") == "node_died"
    assert told(RayError("x"), "other") == "other"


def test_adds_up_what_all_replicas_tell() -> None:
    """Numbers, also within mappings, and those that one of them lacks; nothing else."""
    one = {"starts": 1, "name": "a", "backend": {"live": 2, "keys": ["x"]}}
    two = {"starts": 2, "name": "b", "backend": {"live": 3, "more": 0.5}}
    sums = _sums([one, two, {}])
    assert sums == {"starts": 3, "backend": {"live": 5, "more": 0.5}}
