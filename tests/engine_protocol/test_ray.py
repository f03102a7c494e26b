"""What only engines on Ray promise: replicas, the object store, actors and nodes."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest

from lifecycle import EngineLost, Payload, SessionRegistry
from lifecycle_zmq import GeneratorBackend, RequestRejected, Restarts

pytestmark = pytest.mark.anyio
BOUND = 600.0  # under load, an actor takes minutes to start


async def ready(engine: Any) -> None:
    """Wait until every replica serves."""
    with anyio.fail_after(BOUND):
        await engine.wait_ready(len(engine.places))
    assert all(engine.places)


def holder(engine: Any, key: str) -> int:
    """The number of the replica that has a stream."""
    (number,) = [n for n, it in enumerate(engine._replicas) if it.holds(key)]
    return number


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()


def in_store() -> int:
    """How many objects are in the object stores of all nodes."""
    from ray._private.internal_api import memory_summary

    text = memory_summary(stats_only=True)
    (line,) = [it for it in text.splitlines() if it.startswith("Plasma memory usage")]
    return int(line.split(",")[1].split()[0])


def referenced() -> int:
    """How many objects this process refers to."""
    from ray._private.worker import global_worker

    return len(global_worker.core_worker.get_all_reference_counts())


async def lost(stream: Any) -> str:
    with anyio.fail_after(BOUND), pytest.raises(EngineLost) as caught:
        async for _ in stream:
            pass
    return caught.value.reason


async def test_killed_actor_fails_only_its_own_streams(
    make_ray: Any, eventually: Any
) -> None:
    """SIGKILL of one replica fails its streams within a second, and no others."""
    async with make_ray(replicas=2) as engine:
        await ready(engine)
        streams = {n: [] for n in range(2)}
        for n in range(6):
            stream = await engine.start(f"s#{n}", {"forever": True})
            await anext(stream)
            streams[holder(engine, f"s#{n}")].append((f"s#{n}", stream))
        assert [len(streams[n]) for n in range(2)] == [3, 3]
        before = time.monotonic()
        os.kill(engine.places[0]["pid"], signal.SIGKILL)
        reasons = Counter([await lost(stream) for _, stream in streams[0]])
        assert time.monotonic() - before < 5
        assert reasons == {"died": 3}
        for key, stream in streams[0]:
            assert [item async for item in stream] == []
            with anyio.fail_after(BOUND):
                await engine.end(key)
        for key, stream in streams[1]:
            await anext(stream)
            await anext(stream)
            await engine.end(key)
        # Its place is taken by another actor, the other one is what it was.
        await eventually(lambda: all(engine.places))
        assert engine.incarnation == 3
        assert engine.streams == 0


@pytest.mark.slow
async def test_reports_a_killed_node_and_its_replica_comes_back(
    make_ray: Any, cluster: Any, eventually: Any, quick: Any
) -> None:
    """A whole node gone mid stream: its streams end, the other node's go on."""
    node = cluster.add_node(
        num_cpus=1, object_store_memory=80 * 2**20, resources={"second": 1}
    )
    cluster.wait_for_nodes()
    import ray
    from ray.util.placement_group import placement_group, remove_placement_group

    group = placement_group([{"CPU": 0.5}] * 2, strategy="STRICT_SPREAD")
    await anyio.to_thread.run_sync(ray.get, group.ready())
    head = ray.get_runtime_context().get_node_id()
    try:
        # How often an actor dies before Ray knows that its node is gone is chance.
        restarts = partial(quick, max_crashes=None)
        places = {"placement_group": group}
        async with make_ray(replicas=2, placement=places, restarts=restarts) as engine:
            await ready(engine)
            away = [it["node"] for it in engine.places].index(
                *({it["node"] for it in engine.places} - {head})
            )
            payload = np.arange(2**20)
            streams = {}
            for n in range(4):
                key = f"s#{n}"
                box = Payload({"x": payload})
                streams[key] = await engine.start(key, {"forever": True}, box)
                assert await anext(streams[key]) == [0]
            homes = {key: holder(engine, key) for key in streams}
            assert sorted(homes.values()) == [0, 0, 1, 1]
            await anyio.to_thread.run_sync(
                lambda: cluster.remove_node(node, allow_graceful=False)
            )
            for key, stream in streams.items():
                if homes[key] == away:
                    assert await lost(stream) in {"died", "node_died", "unreachable"}
                else:
                    await anext(stream)
                await engine.end(key)
            # Ray moves the place that was reserved there, once there is a node for it.
            cluster.add_node(num_cpus=1, object_store_memory=80 * 2**20)
            await eventually(lambda: all(engine.places), seconds=300)
            # More, if it was put back before Ray knew that the node was gone.
            assert engine.incarnation >= 3
    finally:
        remove_placement_group(group)


async def test_each_replica_has_a_gpu_of_its_own(
    make_ray: Any, cluster: Any, scripted: Any
) -> None:
    """Ray gives each actor what `Placement` asks for, and shows it no other device."""
    node = cluster.add_node(num_cpus=1, num_gpus=2, object_store_memory=80 * 2**20)

    def factory() -> Any:
        class Seeing(scripted.ScriptedBackend):
            def status(self) -> dict[str, Any]:
                return {"sees": os.environ["CUDA_VISIBLE_DEVICES"]}

        return Seeing(0.001)

    placement = {"num_gpus": 1, "num_cpus": 0}
    try:
        async with make_ray(factory=factory, replicas=2, placement=placement) as engine:
            await ready(engine)
            statuses = (await engine.status())["replicas"].values()
            assert {it["backend"]["sees"] for it in statuses} == {"0", "1"}
    finally:
        await anyio.to_thread.run_sync(cluster.remove_node, node)


async def test_object_store_is_empty_again(make_ray: Any, eventually: Any) -> None:
    """Payloads of streams that run, end and were cancelled in their start: none stays."""
    async with make_ray() as engine:
        await ready(engine)
        objects, references = in_store(), referenced()
        for n in range(6):
            box = Payload({"x": np.ones(2**20, np.uint8), "y": np.ones(2**19)})
            request = {"hold": True, "start_seconds": 0.05}
            with anyio.move_on_after(0.01 if n % 2 else BOUND):
                await engine.start(f"s#{n}", request, box)
        await eventually(lambda: in_store() == objects)
        with anyio.fail_after(BOUND):
            for n in range(6):
                await engine.end(f"s#{n}")
        status = await engine.status()
        assert status["backend"]["tensors_alive"] == 0
        assert len(status["backend"]["seen"]) == 12
        assert (status["starts"], status["live"]) == (6, 0)
        # The pull that is under way is one.
        await eventually(lambda: referenced() <= references + 1)
    assert in_store() == objects


async def test_requests_go_where_least_is_to_do(make_ray: Any, eventually: Any) -> None:
    """Tokens and bytes count until the end of a stream; a conversation stays."""
    async with make_ray(replicas=2) as engine:
        await ready(engine)
        hold = {"hold": True}
        await engine.start("long", hold | {"max_tokens": 1000})
        first = holder(engine, "long")
        for n in range(3):
            await engine.start(f"short#{n}", hold | {"max_tokens": 100})
            assert holder(engine, f"short#{n}") == 1 - first
        assert sorted(engine.loads) == [(303, 0), (1001, 0)]
        await engine.end("long")
        await engine.start("next", hold)
        assert holder(engine, "next") == first
        # Its place was chosen when the conversation began.
        for n in range(4):
            key = f"talk#{n}"
            await engine.start(key, hold | {"session": "talk", "max_tokens": 10**6})
            assert holder(engine, key) == holder(engine, "talk#0")
        for key in (
            "next",
            "short#0",
            "short#1",
            "short#2",
            *(f"talk#{n}" for n in range(4)),
        ):
            await engine.end(key)
        assert engine.loads == [(0, 0), (0, 0)]
        box = Payload({"x": np.ones(2**20, np.uint8)}, nbytes=2**20)
        await engine.start("bytes", hold, box)
        assert sorted(engine.loads) == [(0, 0), (1, 2**20)]
        await engine.end("bytes")


@pytest.mark.parametrize("kind", [ValueError, SystemExit, BaseException])
async def test_backend_that_cannot_be_made_says_why(
    make_ray: Any, kind: type[BaseException]
) -> None:
    """An error of the factory is the last word; again and again it is a breaker's case."""

    def factory() -> Any:
        raise kind("no such checkpoint")

    async with make_ray(
        factory=factory,
        restarts=lambda: Restarts(backoff=0.01, max_crashes=1, broken_for=60),
    ) as engine:
        with anyio.fail_after(BOUND), pytest.raises(EngineLost, match="no such check"):
            await engine.wait_ready()
        with anyio.fail_after(BOUND):
            while engine.health != "broken":
                with suppress(EngineLost):
                    await engine.wait_ready()
        with pytest.raises(EngineLost) as caught:
            await engine.start("a", {})
        assert caught.value.reason == "broken"
        with pytest.raises(EngineLost, match="broken"), anyio.move_on_after(0):
            await engine.wait_ready()


async def test_backend_may_take_its_time_to_be_made(
    make_ray: Any, scripted: Any
) -> None:
    """An owner counts as gone when it has pulled and does not any more, not before."""

    def factory() -> Any:
        time.sleep(1.5)
        return scripted.ScriptedBackend(0.001)

    async with make_ray(factory=factory, owner_timeout=0.4) as engine:
        await ready(engine)
        stream = await engine.start("a", {"hold": True})
        with anyio.move_on_after(2):
            await anext(stream)
        assert engine.incarnation == 1
        await engine.end("a")


async def test_step_that_hangs_is_stalled_and_the_actor_replaced(
    make_ray: Any, eventually: Any
) -> None:
    """A loop that makes no turn for too long is given up, and its process is gone."""
    async with make_ray(stalled_after=1.0, busy_after=0.5) as engine:
        await ready(engine)
        pid = engine.places[0]["pid"]
        stream = await engine.start("a", {"count": 9, "sleep_at": 0, "seconds": 600})
        await eventually(lambda: engine.health == "busy")
        assert await lost(stream) == "stalled"
        await eventually(lambda: not alive(pid))
        await eventually(lambda: engine.ready)
        await engine.end("a")


async def test_actor_that_is_stopped_is_silent_and_replaced(
    make_ray: Any, eventually: Any
) -> None:
    """The streams of a stopped process fail, and it is killed."""
    async with make_ray(silent_after=2.0) as engine:
        await ready(engine)
        pid = engine.places[0]["pid"]
        stream = await engine.start("a", {"forever": True})
        os.kill(pid, signal.SIGSTOP)
        assert await lost(stream) == "silent"
        await eventually(lambda: not alive(pid))
        await engine.end("a")


@pytest.mark.parametrize(
    "engine_on", [("ray", "trio"), ("ray", "asyncio")], indirect=True
)
async def test_loop_that_stood_still_gives_no_actor_up(make_ray: Any) -> None:
    """What the actor said meanwhile is there, and was not read yet."""
    async with make_ray(silent_after=1.0, stalled_after=1.0, owner_timeout=60) as it:
        await ready(it)
        stream = await it.start("a", {"forever": True})
        await anext(stream)
        for _ in range(3):
            time.sleep(1.5)  # noqa: ASYNC251 - the fault
            for _ in range(300):  # which takes longer than the next look
                await anext(stream)
        assert it.incarnation == 1
        await it.end("a")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_streams_of_a_lost_owner_are_ended(
    cluster: Any, eventually: Any, tmp_path: Path, number: signal.Signals
) -> None:
    """A driver killed: Ray ends its actor. A driver stopped: the actor ends its streams."""
    file = tmp_path / "live"
    script = Path(__file__).with_name("ray_owner.py")
    with subprocess.Popen(  # noqa: ASYNC220
        [sys.executable, str(script), cluster.address, str(file)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as owner:
        try:
            assert owner.stdout is not None
            said = await anyio.to_thread.run_sync(owner.stdout.readline)
            pid = int(said.split()[1])
            assert file.read_text() == "live 1"
            owner.send_signal(number)
            if number == signal.SIGKILL:
                await eventually(lambda: not alive(pid))
                return
            await eventually(lambda: file.read_text() == "live 0")
            assert alive(pid)
            # Back again, it learns that its stream is over; and is not left waiting.
            owner.send_signal(signal.SIGCONT)
            said = await anyio.to_thread.run_sync(owner.stdout.readline)
            assert said.startswith("lost ")
            await eventually(lambda: not alive(pid))
        finally:
            owner.kill()


async def test_clients_leave_while_actors_die(
    make_ray: Any, eventually: Any, disconnects: Any
) -> None:
    """Random disconnects, payloads and kills at once: nothing left in any place."""
    draw = random.Random(3)
    async with make_ray(
        replicas=2, restarts=lambda: Restarts(backoff=0.01, max_crashes=None)
    ) as engine:
        await ready(engine)
        objects = in_store()
        ends: Counter[str] = Counter()
        async with SessionRegistry() as sessions:

            async def client(n: int) -> None:
                box = Payload({"x": np.ones(2**18, np.uint8)})
                # The first of a wave stays, however long a busy machine takes.
                stay = draw.expovariate(1 / 0.05) if n % 20 else BOUND
                with anyio.move_on_after(stay):
                    try:
                        with sessions.open(f"r{n}") as session:
                            source = await session.start(
                                lambda: engine.start(session.key, {"count": 20}, box),
                                end=lambda _: engine.end(session.key),
                            )
                            async with session.stream(source) as items:
                                ends["whole"] += len([it async for it in items]) == 20
                    except EngineLost as error:
                        ends[error.reason] += 1

            for wave in range(4):
                async with anyio.create_task_group() as tasks:
                    for n in range(20):
                        tasks.start_soon(client, 20 * wave + n)
                    if wave % 2:
                        await anyio.sleep(0.02)  # some of the wave are answered then
                        place = engine.places[wave // 2]
                        if place:
                            os.kill(place["pid"], signal.SIGKILL)
                await eventually(lambda: all(engine.places))
            await eventually(lambda: not list(sessions.live()))
        assert ends["whole"]
        assert engine.streams == 0
        assert engine.loads == [(0, 0), (0, 0)]
        status = await engine.status()
        assert status["live"] == status["backend"]["tensors_alive"] == 0
        await eventually(lambda: in_store() == objects)


async def test_address_of_a_client_is_refused(make_ray: Any) -> None:
    """A process that is no member of the cluster has no object store."""
    with pytest.raises(ValueError, match="run this on a node"):
        async with make_ray(address="ray://127.0.0.1:10001"):
            pass


async def test_waits_for_no_more_replicas_than_there_are() -> None:
    """It would wait forever, or fail without a clear reason."""
    pytest.importorskip("ray", reason="Ray is not installed")
    from lifecycle_ray import RayEngine

    for number in (0, 2):
        with pytest.raises(ValueError, match=f"{number} replicas of 1; wait for 1"):
            await RayEngine("a:b").wait_ready(number)
    with pytest.raises(ValueError, match="0 replicas are too few"):
        RayEngine("a:b", replicas=0)


async def test_says_that_it_was_not_entered() -> None:
    """As any engine does: a mistake is raised as it is, and in no group."""
    pytest.importorskip("ray", reason="Ray is not installed")
    from lifecycle_ray import RayEngine

    engine = RayEngine("a:b", replicas=2)
    for call in (engine.wait_ready, engine.status):
        with pytest.raises(RuntimeError, match="enter the engine"):
            await call()


async def test_reports_at_once_that_nothing_listens_at_an_address() -> None:
    """Ray itself would be silent for ten minutes."""
    pytest.importorskip("ray", reason="Ray is not installed")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
    from lifecycle_ray import RayEngine

    with pytest.raises(ConnectionError, match="ray start --head"):
        async with RayEngine("nothing:here", address=address):
            pass


@pytest.mark.parametrize("cancelled", [False, True])
async def test_loop_goes_on_while_the_cluster_is_left(
    monkeypatch: pytest.MonkeyPatch, cancelled: bool
) -> None:
    """Ray takes seconds to end, in which this process may have others to serve."""
    ray = pytest.importorskip("ray", reason="Ray is not installed")
    from lifecycle_ray import RayEngine

    leaving, served = threading.Event(), threading.Event()
    left: list[bool] = []

    def shutdown() -> None:
        leaving.set()
        left.append(served.wait(20))

    async def serve() -> None:
        assert await anyio.to_thread.run_sync(leaving.wait, 20)
        served.set()

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", lambda **_: None)
    monkeypatch.setattr(ray, "shutdown", shutdown)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(serve)
        with anyio.CancelScope() as scope:
            engine = RayEngine("nothing:here")
            engine._replicas.clear()  # there is no cluster that they could run on
            async with engine:
                if cancelled:
                    scope.cancel()
    assert left == [True]


async def test_runs_an_async_generator_for_each_request(make_ray: Any) -> None:
    """Its event loop is in the actor's one thread, woken by what is pushed to it."""

    def make() -> GeneratorBackend:
        async def serve(key: str, request: Any, tensors: Any) -> AsyncIterator[Any]:
            if "reject" in request:
                raise RequestRejected("full", "as asked")
            for number in range(request["count"]):
                await anyio.sleep(0.001)
                yield [number]

        return GeneratorBackend(serve, backend="trio")

    async with make_ray(factory=make) as engine:
        await ready(engine)
        with anyio.fail_after(BOUND):
            stream = await engine.start("a", {"count": 20})
            with pytest.raises(RequestRejected):
                await engine.start("b", {"reject": True})
            assert [item async for item in stream] == [[it] for it in range(20)]
            await engine.end("a")
            assert (await engine.status())["backend"]["generators"] == 0
