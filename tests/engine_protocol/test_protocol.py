"""What every engine promises, whatever carries its messages."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import anyio
import anyio.lowlevel
import numpy as np
import pytest

from lifecycle import EngineLost, Payload, SessionRegistry
from lifecycle_zmq import EngineFailed, RequestRejected

pytestmark = pytest.mark.anyio

BOUND = 120.0


async def ready(engine: Any) -> Any:
    with anyio.fail_after(BOUND):
        await engine.wait_ready()
    return engine


async def read(stream: Any) -> list[Any]:
    with anyio.fail_after(BOUND):
        return [item async for item in stream]


async def run(engine: Any, key: str, request: dict[str, Any]) -> list[Any]:
    """Start, read to the end and end one stream; return its items."""
    with anyio.fail_after(BOUND):
        items = await read(await engine.start(key, request))
        await engine.end(key)
    return items


async def quiet(engine: Any, eventually: Any) -> dict[str, Any]:
    """Wait until neither side has a stream; return the engine's counters."""

    async def empty() -> bool:
        return not engine.streams and not (await engine.status())["live"]

    await eventually(empty)
    status: dict[str, Any] = await engine.status()
    assert status["backend"]["live"] == []
    assert status["starts"] == status["ends"] + status["lost_with_peer"]
    assert status["bad_frames"] == status["duplicate_ends"] == 0
    return status


async def test_runs_once(make_engine: Any) -> None:
    """Entered again, whether it runs or has ended, an engine says so at once."""
    once = "runs once; make another one"
    async with make_engine() as engine:
        with pytest.raises(RuntimeError, match=once):
            await engine.__aenter__()
        await ready(engine)
    with pytest.raises(RuntimeError, match=once):
        await engine.__aenter__()


async def test_streams_items_in_order_and_ends(make_engine: Any) -> None:
    """Items arrive once, in order; END returns when the engine has forgotten."""
    async with make_engine() as engine:
        await ready(engine)
        assert engine.health == "serving"
        assert engine.incarnation == 1
        stream = await engine.start("a#1", {"count": 50})
        assert engine.streams == 1
        assert await read(stream) == [[n] for n in range(50)]
        assert await read(stream) == []
        with anyio.fail_after(BOUND):
            await engine.end("a#1")
        status = await engine.status()
        assert (status["live"], status["starts"], status["ends"]) == (0, 1, 1)
        assert engine.streams == 0
    assert not engine.ready
    with pytest.raises(EngineLost):
        await engine.start("a#2", {})


async def test_many_streams_share_an_engine(make_engine: Any) -> None:
    """A hundred streams at a time get their own items, all of them."""
    got: dict[str, list[Any]] = {}
    async with make_engine() as engine:
        await ready(engine)

        async def one(key: str, count: int) -> None:
            got[key] = await run(engine, key, {"count": count})

        async with anyio.create_task_group() as tasks:
            for n in range(100):
                tasks.start_soon(one, f"s#{n}", n)
    assert got == {f"s#{n}": [[i] for i in range(n)] for n in range(100)}


async def test_objects_that_cannot_merge_all_arrive(make_engine: Any) -> None:
    """A generic stream of 256 objects delivers 256, also to a slow reader."""
    async with make_engine(hold=2**20) as engine:
        await ready(engine)
        stream = await engine.start("a", {"count": 256, "distinct": True})
        got = 0
        async for item in stream:
            assert item["n"] == got
            got += 1
            if got % 64 == 0:
                await anyio.sleep(0.02)
        assert got == 256
        await engine.end("a")


async def test_error_before_first_output(make_engine: Any) -> None:
    """LMDeploy's *error before first output*: raised by the first read, once."""
    async with make_engine() as engine:
        await ready(engine)
        stream = await engine.start("a", {"fail_at": 0})
        with anyio.fail_after(BOUND), pytest.raises(EngineFailed) as caught:
            await anext(stream)
        assert caught.value.code == "asked"
        assert await read(stream) == []
        await engine.end("a")
        assert await run(engine, "b", {"count": 2}) == [[0], [1]]


async def test_final_output_once(make_engine: Any) -> None:
    """LMDeploy's *final output once*: a failure comes after all items, never again."""
    async with make_engine() as engine:
        await ready(engine)
        stream = await engine.start("a", {"fail_at": 3})
        got = []
        with anyio.fail_after(BOUND), pytest.raises(EngineFailed):
            async for item in stream:
                got += [item]
        assert got == [[0], [1], [2]]
        for _ in range(3):
            assert await read(stream) == []
        await engine.end("a")


async def test_cancel_during_start_leaves_nothing(
    make_engine: Any, eventually: Any
) -> None:
    """LMDeploy's *cancel during start*: the client leaves; END follows the start."""
    async with make_engine() as engine:
        await ready(engine)
        async with SessionRegistry() as sessions:

            async def client() -> None:
                with sessions.open("a") as session:
                    await session.start(
                        lambda: engine.start(
                            session.key, {"forever": True, "start_seconds": 0.1}
                        ),
                        end=lambda _: engine.end(session.key),
                    )

            for _ in range(3):
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(client)
                    await eventually(lambda: engine.streams)
                    tasks.cancel_scope.cancel()
                await eventually(lambda: not engine.streams)
        status = await quiet(engine, eventually)
        assert status["starts"] == status["ends"] == 3


async def test_cancel_after_start(make_engine: Any, eventually: Any) -> None:
    """LMDeploy's *cancel after start*: the stream ends early, and is ended once."""
    async with make_engine() as engine:
        await ready(engine)
        stream = await engine.start("a", {"forever": True})
        assert await anext(stream) == [0]
        engine.cancel("a")
        engine.cancel("a")
        engine.cancel("unknown")
        await read(stream)
        await engine.end("a")
        await engine.end("a")
        status = await quiet(engine, eventually)
        assert status["backend"]["calls"].count("cancel a") == 1
        assert status["backend"]["calls"].count("end a") == 1


async def test_result_after_drop(make_engine: Any, eventually: Any) -> None:
    """LMDeploy's *result after drop*: nothing of a dropped stream is seen any more."""
    async with make_engine() as engine:
        await ready(engine)
        stream = await engine.start("a", {"forever": True})
        await anext(stream)
        with anyio.fail_after(BOUND):
            await engine.end("a")
        assert await read(stream) == []
        await quiet(engine, eventually)
        # The same name again is another stream: nothing late hits it.
        assert await run(engine, "a", {"count": 5}) == [[n] for n in range(5)]
        assert await read(stream) == []
        await quiet(engine, eventually)


async def test_reader_that_leaves_loses_no_item_of_another(make_engine: Any) -> None:
    """Closing one stream stops it in the engine; its neighbour goes on."""
    async with make_engine() as engine:
        await ready(engine)
        other = await engine.start("b", {"count": 200})
        stream = await engine.start("a", {"forever": True})
        await anext(stream)
        await stream.aclose()
        assert await read(stream) == []
        assert await read(other) == [[n] for n in range(200)]
        for key in "ab":
            await engine.end(key)


async def test_refusals_leave_nothing_to_end(make_engine: Any, eventually: Any) -> None:
    """A refusal of the engine, an error in its start, a limit: each one's own error."""
    async with make_engine() as engine:
        await ready(engine)
        for request, code in (
            ({"reject": "full"}, "full"),
            ({"raise_in_start": "x"}, "internal"),
            ({"x": "y" * 2**20}, "too_large"),
            ({"x": object()}, "unencodable"),
        ):
            with anyio.fail_after(BOUND), pytest.raises(RequestRejected) as caught:
                await engine.start("a", request)
            assert caught.value.code == code
        assert engine.streams == 0
        await engine.end("a")
        status = await quiet(engine, eventually)
        assert (status["starts"], status["rejected"]) == (0, 2)


async def test_key_in_use_is_refused_until_it_is_ended(make_engine: Any) -> None:
    """Two streams never share a key; the first one does not notice."""
    async with make_engine() as engine:
        await ready(engine)
        stream = await engine.start("a", {"count": 30})
        with pytest.raises(ValueError, match="choose another"):
            await engine.start("a", {"count": 1})
        assert await read(stream) == [[n] for n in range(30)]
        await engine.end("a")
        assert await run(engine, "a", {"count": 1}) == [[0]]


@pytest.mark.parametrize("size", [8, 2**20])
async def test_payload_is_dead_at_hand_off_on_both_sides(
    make_engine: Any, eventually: Any, size: int
) -> None:
    """The tensor is freed once the engine has read it, while its stream continues."""
    async with make_engine() as engine:
        await ready(engine)
        array = np.arange(size, dtype=np.uint8)
        watch = weakref.ref(array)
        gc.disable()
        try:
            box = Payload({"x": array})
            del array
            stream = await engine.start("a", {"hold": True}, box)
            assert box.taken
            await eventually(lambda: watch() is None)
        finally:
            gc.enable()

        async def released() -> bool:
            return not (await engine.status())["backend"]["tensors_alive"]

        await eventually(released)
        seen = (await engine.status())["backend"]["seen"]
        assert seen == [["x", "B", [size], sum(range(min(size, 64)))]]
        await engine.end("a")
        assert await read(stream) == []


async def test_payload_is_dead_when_refused(make_engine: Any, eventually: Any) -> None:
    """A refused request's tensor is gone although its error is kept."""
    async with make_engine() as engine:
        await ready(engine)
        array = np.ones(2**18)
        watch = weakref.ref(array)
        box = Payload({"x": array})
        del array
        kept: BaseException | None = None
        try:
            await engine.start("a", {"reject": "full"}, box)
        except RequestRejected as error:
            kept = error
        assert kept is not None
        await eventually(lambda: watch() is None)

        async def released() -> bool:
            return not (await engine.status())["backend"]["tensors_alive"]

        await eventually(released)


async def test_slow_reader_costs_its_own_stream_only(
    make_engine: Any, eventually: Any
) -> None:
    """A client that reads nothing ends as slow_client; the others continue."""
    async with make_engine(hold=32 * 2**10, stall=0.3) as engine:
        await ready(engine)
        request = {"forever": True, "size": 8_000, "each": 8, "merge": "never"}
        slow = await engine.start("slow", request)

        async def given_up() -> bool:
            return bool((await engine.status())["slow_clients"])

        await eventually(given_up)
        assert await run(engine, "b", {"count": 20}) == [[n] for n in range(20)]
        with pytest.raises(EngineFailed) as caught:
            await read(slow)
        assert caught.value.code == "slow_client"
        await engine.end("slow")
        await quiet(engine, eventually)


async def test_outputs_merge_while_the_reader_is_slow(make_engine: Any) -> None:
    """Without credit token lists are joined: fewer items, every token, in order."""
    async with make_engine(step=0, hold=2**20) as engine:
        await ready(engine)
        stream = await engine.start("a", {"count": 6000, "merge": "concatenate"})
        with anyio.fail_after(BOUND):
            while (await engine.status())["backend"]["live"]:
                await anyio.sleep(0.01)
        items = await read(stream)
        assert [token for item in items for token in item] == list(range(6000))
        assert len(items) < 6000
        await engine.end("a")


async def test_step_that_raises_fails_its_streams_not_the_engine(
    make_engine: Any, eventually: Any
) -> None:
    """Every stream of a failed step fails once; the engine continues to serve."""
    async with make_engine() as engine:
        await ready(engine)
        stream = await engine.start("a", {"raise_at": 2})
        with anyio.fail_after(BOUND), pytest.raises(EngineFailed) as caught:
            await read(stream)
        # Of generators, only the one that raised has failed.
        assert caught.value.code in {"step_failed", "internal"}
        await engine.end("a")
        assert await run(engine, "b", {"count": 1}) == [[0]]
        assert engine.incarnation == 1


async def test_death_fails_each_stream_once_and_a_new_engine_starts(
    make_engine: Any, eventually: Any
) -> None:
    """Readers, starters and askers each get the reason once; END returns; it is back."""
    reasons: list[str] = []
    async with make_engine() as engine:
        await ready(engine)
        streams = [await engine.start(f"s#{n}", {"hold": True}) for n in range(8)]

        async def reader(stream: Any) -> None:
            with pytest.raises(EngineLost) as caught:
                await read(stream)
            reasons.append(caught.value.reason)
            assert caught.value.retry_after is not None
            assert await read(stream) == []

        async def starter() -> None:
            with pytest.raises(EngineLost) as caught:
                await read(await engine.start("last", {"leave_at": 0}))
            reasons.append(caught.value.reason)

        with anyio.fail_after(BOUND):
            async with anyio.create_task_group() as tasks:
                for stream in streams:
                    tasks.start_soon(reader, stream)
                await anyio.lowlevel.checkpoint()
                tasks.start_soon(starter)
            for n in range(8):
                await engine.end(f"s#{n}")
            await engine.end("last")
        assert len(reasons) == 9
        assert len(set(reasons)) == 1 and reasons[0] != "closed"
        assert engine.streams == 0
        await eventually(lambda: engine.incarnation == 2 and engine.ready)
        assert await run(engine, "s#0", {"count": 2}) == [[0], [1]]
        assert (await engine.status())["starts"] == 1


async def test_request_without_an_engine_is_refused_at_once(make_engine: Any) -> None:
    """While none serves a start says when to come back, and drops the payload."""
    async with make_engine() as engine:
        array = np.ones(8)
        watch = weakref.ref(array)
        box = Payload({"x": array})
        del array
        with anyio.fail_after(120), pytest.raises(EngineLost) as caught:
            await engine.start("a", {}, box)
        assert caught.value.retry_after is not None
        assert watch() is None
        await engine.end("a")


async def test_closing_fails_all_streams(make_engine: Any) -> None:
    """Pending requests fail when the engine is closed, and the block is left."""
    engine = make_engine()
    reasons = []

    async def reader(stream: Any) -> None:
        with pytest.raises(EngineLost) as caught:
            await read(stream)
        reasons.append(caught.value.reason)

    with anyio.fail_after(BOUND):
        async with anyio.create_task_group() as tasks:
            async with engine:
                await ready(engine)
                stream = await engine.start("a", {"hold": True})
                tasks.start_soon(reader, stream)
                await anyio.lowlevel.checkpoint()
                engine.close()
    assert reasons == ["closed"]
    assert engine.health == "closed"


async def test_end_works_while_everything_around_is_cancelled(
    make_engine: Any, eventually: Any
) -> None:
    """A clean-up under an outer cancellation still reaches the engine."""
    async with make_engine() as engine:
        await ready(engine)
        done = False
        with anyio.CancelScope() as outer:
            await engine.start("a", {"forever": True})
            outer.cancel()
            with anyio.CancelScope(shield=True), anyio.fail_after(BOUND):
                await engine.end("a")
                done = True
        assert done
        await quiet(engine, eventually)


async def test_clients_that_leave_at_random_leave_nothing(
    make_engine: Any, disconnects: Any
) -> None:
    """Three hundred sessions that break off anywhere: both sides are empty after."""
    async with make_engine(step=0) as engine:
        await ready(engine)
        with anyio.fail_after(BOUND):
            async with SessionRegistry() as sessions:
                fates = await disconnects.disconnect(
                    engine, sessions, count=300, seed=7
                )
            assert sum(fates.values()) == 300
            await disconnects.check_nothing_left(engine)
            assert not list(sessions.live())
