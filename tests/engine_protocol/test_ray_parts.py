"""Parts of an engine on Ray: routing, statistics, messages, and the cluster it joins."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import tempfile
import threading
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import pytest

ray = pytest.importorskip("ray", reason="Ray is not installed")

from ray.exceptions import (  # noqa: E402
    ActorDiedError,
    ActorUnavailableError,
    OutOfMemoryError,
    RayError,
)

from lifecycle_ray import engine, placement, router as _router  # noqa: E402
from lifecycle_ray.engine import _sum_counters  # noqa: E402
from lifecycle_ray.replica import RayTransport, ReorderBuffer, loss_reason  # noqa: E402
from lifecycle_ray.router import Router, conversation, weigh  # noqa: E402
from lifecycle_zmq import EncodeError, QueuedTransport  # noqa: E402


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
        self.router = Router(self.replicas, weigh, conversation)
        self._started = 0

    def __call__(self, session: str | None = None, **request: Any) -> int:
        """Start one and return the number of its replica."""
        self._started += 1
        key, nbytes = f"s{self._started}", request.pop("nbytes", 0)
        request |= {"session": session}
        replica: Any = self.router.place(key, request, nbytes)
        replica.keys.add(key)
        assert self.router.replica_of(key) is replica
        return list(self.replicas).index(replica)


def test_gives_a_request_to_the_replica_with_the_least_to_do() -> None:
    """Shares of tokens and of bytes are added; where both are alike, streams count."""
    place = Placed(3)
    assert [place(max_tokens=99) for _ in range(3)] == [0, 1, 2]
    assert place(nbytes=1000) == 0
    assert place(max_tokens=10) == 1
    assert place(max_tokens=10) == 2
    assert place.router.loads() == [(101, 1000), (111, 0), (111, 0)]
    assert place(nbytes=500) == 1
    assert place() == 2
    sides = Placed(2)
    assert [sides(max_tokens=899, nbytes=400), sides(max_tokens=99, nbytes=600)] == [
        0,
        1,
    ]
    assert sides() == 1
    empty = Placed(2)
    empty.router = Router(empty.replicas, lambda _: 0, conversation)
    assert [empty() for _ in range(4)] == [0, 1, 0, 1]


def test_counts_a_stream_as_long_as_its_replica_holds_it() -> None:
    """The end of a stream needs no notification."""
    place = Placed(2)
    assert [place(max_tokens=99), place(max_tokens=9)] == [0, 1]
    place.replicas[0].keys.clear()
    assert place.router.loads() == [(0, 0), (10, 0)]
    assert place.router.replica_of("s1") is None
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
    monkeypatch.setattr(_router, "_MAX_CONVERSATIONS", 2)
    place = Placed(2)
    homes = [place("a", max_tokens=1000), place("b"), place("a"), place("c")]
    assert homes == [0, 1, 0, 1]
    assert list(place.router._conversations.values()) == [0, 1]
    assert [place("a"), place()] == [0, 1]


@pytest.mark.parametrize(
    ("request_", "tokens", "name"),
    [
        ({}, 1, None),
        ({"input_ids": [1, 2], "max_tokens": 5}, 8, None),
        ({"input_ids": "text", "max_tokens": "5", "session": 7}, 1, None),
        ({"session": "s"}, 1, (None, "s")),
        ({"session": "s", "tenant": "k"}, 1, ("k", "s")),
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
    assert loss_reason(OutOfMemoryError("x"), "other") == "out_of_memory"
    assert loss_reason(ActorUnavailableError("x", b"1" * 16), "other") == "unreachable"
    assert loss_reason(ActorDiedError(), "other") == "died"
    assert loss_reason(gone, "other") == "node_died"
    assert loss_reason(RayError("x"), "other") == "other"


def test_adds_up_what_all_replicas_tell() -> None:
    """Numbers, also within mappings, and those that one of them lacks; nothing else."""
    one = {"starts": 1, "name": "a", "backend": {"live": 2, "keys": ["x"]}}
    two = {"starts": 2, "name": "b", "backend": {"live": 3, "more": 0.5}}
    sums = _sum_counters([one, two, {}])
    assert sums == {"starts": 3, "backend": {"live": 5, "more": 0.5}}


def test_calls_that_overtook_others_wait_for_them() -> None:
    """Pushes run in threads: the engine gets them in the order in which they were sent."""
    transport = QueuedTransport()
    order = ReorderBuffer(transport)
    for number in (2, 0, 3, 1, 4):
        order.put(number, [bytes([number])])
    got = []
    while (arrived := transport.receive()) is not None:
        got.append(arrived[1])
    assert got == [[bytes([n])] for n in range(5)]


@pytest.mark.anyio
@pytest.mark.parametrize("error", ["ObjectStoreFullError", "OutOfDiskError"])
async def test_no_room_for_a_payload_is_a_refusal(
    error: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing of it was sent, so no other request loses the engine."""

    def full(_: Any) -> None:
        raise getattr(ray.exceptions, error)("full")

    monkeypatch.setattr(ray, "put", full)
    link = RayTransport(None, list, on_reply=list, on_error=list)  # type: ignore[arg-type]
    with pytest.raises(EncodeError) as caught:
        link.send([b"head", b"tensor"])
    assert caught.value.code == "no_memory"
    link.close()


@pytest.mark.anyio
async def test_message_that_did_not_arrive_loses_the_engine() -> None:
    """Whatever the error: the actor would wait for that message for ever."""
    pushed: Future[None] = Future()
    pushed.set_exception(TypeError("of whatever kind"))
    actor: Any = SimpleNamespace(
        push=SimpleNamespace(remote=lambda *_: SimpleNamespace(future=lambda: pushed)),
        pull=SimpleNamespace(remote=lambda *_: SimpleNamespace(future=Future)),
    )
    errors: list[BaseException] = []
    with anyio.fail_after(120):
        async with anyio.create_task_group() as tasks:

            def failed(error: BaseException) -> None:
                errors.append(error)
                tasks.cancel_scope.cancel()

            link = RayTransport(actor, lambda _: True, on_reply=list, on_error=failed)
            await link.pump(lambda: link.send([b"head"]))
    assert [type(error) for error in errors] == [TypeError]
    assert not link.send([b"head"])


BOUND = 120  # seconds, for what takes ten
JOIN = """
import sys, ray
from lifecycle_ray.placement import join_cluster
local = {"num_cpus": 1, "object_store_memory": 80 * 2**20, "logging_level": "ERROR"}
assert join_cluster(None, local)
assert not join_cluster(None, local)
print(ray.get_runtime_context().gcs_address)
ray.shutdown()
"""


@pytest.mark.slow
@pytest.mark.parametrize("source", ["environment", "file"])
def test_starts_private_cluster_where_a_dead_one_is_named(source: str) -> None:
    """Neither RAY_ADDRESS nor the file of a killed cluster makes it connect there."""
    with (
        # Ray's sockets need a short path.
        tempfile.TemporaryDirectory(prefix="lc-ray-", ignore_cleanup_errors=True) as to,
        socket.create_server(("127.0.0.1", 0)) as dead,
    ):
        address = f"127.0.0.1:{dead.getsockname()[1]}"
        environment = os.environ | {"RAY_TMPDIR": to}
        environment.pop("RAY_ADDRESS", None)
        if source == "environment":
            environment["RAY_ADDRESS"] = address
        else:
            folder = Path(to, "ray")
            folder.mkdir()
            (folder / "ray_current_cluster").write_text(address)
        done = subprocess.run(
            [sys.executable, "-c", JOIN],
            env=environment,
            capture_output=True,
            text=True,
            timeout=BOUND,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.strip() not in ("", address)
        dead.setblocking(False)
        with pytest.raises(BlockingIOError):  # no connection waits there
            dead.accept()


STAYS = """
import threading
import ray
from lifecycle_ray.placement import join_cluster
local = {"num_cpus": 1, "object_store_memory": 80 * 2**20, "logging_level": "ERROR"}
leave = []
start = threading.Thread(target=lambda: leave.append(join_cluster(None, local)))
start.start()
start.join()

@ray.remote
def double(number):
    return 2 * number

print(ray.get(double.remote(21)))
leave[0]()
print(ray.is_initialized(), [it.name for it in threading.enumerate()])
"""


def test_private_cluster_survives_the_thread_that_asked_for_it() -> None:
    """A pool ends the thread in which an engine was entered, once it was idle."""
    with tempfile.TemporaryDirectory(
        prefix="lc-ray-", ignore_cleanup_errors=True
    ) as to:
        done = subprocess.run(
            [sys.executable, "-c", STAYS],
            env=os.environ | {"RAY_TMPDIR": to, "RAY_raylet_start_wait_time_s": "120"},
            capture_output=True,
            text=True,
            timeout=2 * BOUND,
            check=False,
        )
    assert done.stdout.splitlines() == ["42", "False ['MainThread']"], done.stderr


@pytest.fixture
def inits(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Return the options of each call of `ray.init`, which does nothing."""
    calls: list[dict[str, Any]] = []
    monkeypatch.setattr(ray, "is_initialized", lambda: bool(calls))
    monkeypatch.setattr(ray, "init", lambda **options: calls.append(options))
    return calls


def test_starts_private_cluster_without_address(inits: list[dict[str, Any]]) -> None:
    """Ray is asked for a local cluster, once in a process."""
    assert placement.join_cluster(None, {"num_cpus": 2})
    assert not placement.join_cluster(None, {"num_cpus": 2})
    (options,) = inits
    assert options["address"] == "local"
    assert options["num_cpus"] == 2


def test_refuses_address_among_local_options(inits: list[dict[str, Any]]) -> None:
    """The options of a private cluster do not say that another one is joined."""
    with pytest.raises(ValueError, match="'auto'; pass it as address="):
        placement.join_cluster(None, {"address": "auto"})
    assert inits == []


def test_joins_named_cluster(inits: list[dict[str, Any]]) -> None:
    """The address reaches Ray as it was given."""
    assert placement.join_cluster("auto", {})
    assert [options["address"] for options in inits] == ["auto"]


def test_raises_what_joining_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error of `ray.init` reaches the caller from the thread that ran it."""

    def fail(**options: Any) -> None:
        raise ConnectionError(f"Could not find {options['address']}")

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", fail)
    with pytest.raises(ConnectionError, match="Could not find auto"):
        placement.join_cluster("auto", {})


def test_fails_in_time_when_cluster_never_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A head that accepts a connection and is silent does not block the start."""
    answered = threading.Event()
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", lambda **_: answered.wait(BOUND))
    monkeypatch.setattr(placement, "_JOIN_SECONDS", 0.01)
    with socket.create_server(("127.0.0.1", 0)) as head:
        address = f"127.0.0.1:{head.getsockname()[1]}"
        with pytest.raises(ConnectionError, match=f"answers at {address}.*0.01 s"):
            placement.join_cluster(address, {})
    answered.set()


@pytest.mark.anyio
async def test_joins_no_cluster_for_an_engine_that_was_entered(monkeypatch) -> None:
    """To join takes seconds, or fails for another reason."""
    joined = []
    monkeypatch.setattr(engine, "join_cluster", lambda *_: joined.append(1))
    once = engine.RayEngine("package:name", replicas=2)
    once.close()
    with pytest.raises(RuntimeError, match="runs once"):
        await once.__aenter__()
    assert joined == []


@pytest.mark.asyncio
async def test_leaves_the_cluster_that_nobody_waited_for(monkeypatch) -> None:
    """A cancellation of asyncio ends the wait, and not the thread that joins."""
    joining, joined, left = (threading.Event() for _ in range(3))

    def join(*_: Any) -> Any:
        joining.set()
        assert joined.wait(60)
        return left.set

    monkeypatch.setattr(engine, "join_cluster", join)
    entering = asyncio.create_task(engine.RayEngine("package:name").__aenter__())
    try:
        assert await anyio.to_thread.run_sync(joining.wait, 60)
        entering.cancel()
        with pytest.raises(asyncio.CancelledError):
            await entering
    finally:
        joined.set()
    assert await anyio.to_thread.run_sync(left.wait, 60)
