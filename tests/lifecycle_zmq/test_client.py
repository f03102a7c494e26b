"""The client against an engine that says exactly what the test makes it say."""

from __future__ import annotations

import gc
import os
import resource
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest
import zmq
from zmq_wire import Kind, ZmqClientTransport, pack_tokens, wire

from lifecycle import EngineLost
from lifecycle_zmq import EngineClient, EngineFailed, RequestRejected

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("no_leaks")]


@asynccontextmanager
async def connected(fake: Any) -> AsyncIterator[EngineClient]:
    """A client that the fake engine has greeted."""
    async with EngineClient(fake.endpoint, incarnation=7, retry_after=3.0) as client:
        await fake.greet()
        with anyio.fail_after(20):
            await client.wait_ready()
        yield client


async def started(client: EngineClient, fake: Any, key: str = "a#1") -> Any:
    """A stream that the fake engine has accepted."""
    streams: list[Any] = []

    async def start() -> None:
        streams.append(await client.start(key, {}))

    with anyio.fail_after(20):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(start)
            assert await fake.hear() == ("START", key)
            fake.accept(key)
    return streams.pop()


async def ended(client: EngineClient, key: str, fake: Any) -> None:
    """End a stream and let the fake engine say DONE."""
    with anyio.fail_after(20):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(client.end, key)
            while await fake.hear() != ("END", key):
                pass
            fake.done(key)


async def test_start_returns_only_after_accepted(fake_engine: Any) -> None:
    """A start waits for ACCEPTED, not for the first item."""
    returned = anyio.Event()

    async def start() -> None:
        await client.start("a#1", {})
        returned.set()

    async with connected(fake_engine) as client, anyio.create_task_group() as tasks:
        tasks.start_soon(start)
        await fake_engine.hear()
        await anyio.wait_all_tasks_blocked()
        assert not returned.is_set()
        fake_engine.accept("a#1")
        with anyio.fail_after(20):
            await returned.wait()


async def test_start_raises_what_the_engine_refused_with(fake_engine: Any) -> None:
    """REJECTED reaches the caller with its code, and there is nothing left to end."""
    async with connected(fake_engine) as client:
        async with anyio.create_task_group() as tasks:

            async def start() -> None:
                with pytest.raises(RequestRejected, match="full: no") as caught:
                    await client.start("a#1", {})
                assert caught.value.code == "full"

            tasks.start_soon(start)
            await fake_engine.hear()
            fake_engine.reject("a#1", "full", "no")
        assert client.streams == 0
        await client.end("a#1")
        assert await fake_engine.hear_all() == []


async def test_start_before_ready_fails_at_once(fake_engine: Any) -> None:
    """Before READY nothing is sent and nothing waits."""
    async with EngineClient(fake_engine.endpoint, incarnation=7) as client:
        with anyio.fail_after(20), pytest.raises(EngineLost) as caught:
            await client.start("a#1", {})
        assert caught.value.reason == "starting"
        with pytest.raises(EngineLost):
            await client.status()
        await client.end("a#1")
        assert await fake_engine.hear() == ("STATUS", "")
        assert await fake_engine.hear_all() == []


@pytest.mark.parametrize("key", ["", "x" * 257, "taken", "\ud800", 5])
async def test_start_refuses_keys_it_cannot_use(fake_engine: Any, key: Any) -> None:
    """Empty, long, used, half a character, or a number: the caller's error; nothing is sent."""
    async with connected(fake_engine) as client:
        await started(client, fake_engine, "taken")
        with pytest.raises(ValueError, match="choose another"):
            await client.start(key, {})
        assert await fake_engine.hear_all() == []
        assert client.streams == 1


async def test_start_refuses_what_the_wire_cannot_carry(fake_engine: Any) -> None:
    """Limits are checked by the sender (`fault-44`)."""
    async with connected(fake_engine) as client:
        for request, code in (
            ({"x": "y" * 2**20}, "too_large"),
            ({"x": object()}, "unencodable"),
        ):
            with pytest.raises(RequestRejected) as caught:
                await client.start("a#1", request)
            assert caught.value.code == code
        assert client.streams == 0
        assert await fake_engine.hear_all() == []
        await started(client, fake_engine)


async def test_stream_yields_items_then_ends(fake_engine: Any) -> None:
    """Items in order, across messages and chunks; the finish comes after the last."""
    async with connected(fake_engine) as client:
        stream = await started(client, fake_engine)
        fake_engine.chunk("a#1", 0, [1, 2])
        fake_engine.chunk("a#1", 2, [])
        fake_engine.chunk("a#1", 2, [3], {"reason": "completed"})
        with anyio.fail_after(20):
            assert [item async for item in stream] == [1, 2, 3]
            assert [item async for item in stream] == []


async def test_stream_raises_a_failure_once(fake_engine: Any) -> None:
    """A failed finish is raised after the items, once; then the stream has ended."""
    error = {"code": "oom", "message": "no memory"}
    async with connected(fake_engine) as client:
        stream = await started(client, fake_engine)
        finish = {"reason": "failed", "error": error}
        fake_engine.chunk("a#1", 0, [1], finish)
        with anyio.fail_after(20):
            assert await anext(stream) == 1
            with pytest.raises(EngineFailed, match="oom: no memory"):
                await anext(stream)
            with pytest.raises(StopAsyncIteration):
                await anext(stream)


async def test_cancelling_anext_loses_no_item(fake_engine: Any) -> None:
    """A reader cancelled in its wait finds the item at the next call."""
    async with connected(fake_engine) as client:
        stream = await started(client, fake_engine)
        for number in range(20):
            with anyio.move_on_after(0):
                await anext(stream)
            fake_engine.chunk("a#1", number, [number])
            with anyio.fail_after(20):
                assert await anext(stream) == number
        fake_engine.chunk("a#1", 20, [20, 21, 22, 23])
        got = []
        with anyio.fail_after(20):
            got.append(await anext(stream))
            with anyio.CancelScope() as scope:
                scope.cancel()
                got.append(await anext(stream))
            while len(got) < 4:
                got.append(await anext(stream))
        assert got == [20, 21, 22, 23]


async def test_second_reader_of_a_stream_is_refused(fake_engine: Any) -> None:
    """Two tasks cannot wait for an item; the first is not disturbed."""
    got = []

    async def read() -> None:
        got.append(await anext(stream))

    async with connected(fake_engine) as client:
        stream = await started(client, fake_engine)
        with anyio.fail_after(20):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(read)
                await anyio.wait_all_tasks_blocked()
                with pytest.raises(RuntimeError, match="another task"):
                    await anext(stream)
                fake_engine.chunk("a#1", 0, [1])
    assert got == [1]


async def test_end_sends_one_end_however_often_it_is_called(fake_engine: Any) -> None:
    """Repeated, concurrent and cancelled calls send one END in all (`peers-17`)."""
    async with connected(fake_engine) as client:
        await started(client, fake_engine)
        with anyio.move_on_after(0.01):
            await client.end("a#1")
        returned = []

        async def end() -> None:
            await client.end("a#1")
            returned.append(1)

        with anyio.fail_after(20):
            async with anyio.create_task_group() as tasks:
                for _ in range(3):
                    tasks.start_soon(end)
                assert await fake_engine.hear_all() == [("END", "a#1")]
                assert (returned, client.streams) == ([], 1)
                fake_engine.done("a#1")
        await client.end("a#1")
        assert (len(returned), client.streams) == (3, 0)
        assert await fake_engine.hear_all() == []


@pytest.mark.parametrize("accepted", [False, True])
async def test_end_after_a_cancelled_start_sends_one_end(
    fake_engine: Any, accepted: bool
) -> None:
    """A start that was cancelled in its wait is ended, after START (`fault-4`)."""
    async with connected(fake_engine) as client:
        with anyio.move_on_after(0.01) as scope:
            await client.start("a#1", {})
        assert scope.cancelled_caught
        if accepted:
            await fake_engine.hear()
            fake_engine.accept("a#1")
        await ended(client, "a#1", fake_engine)
        said = [what for what, _ in fake_engine.heard]
        assert said == ["STATUS", "START", "END"]
        assert client.streams == 0


async def test_end_without_start_sends_nothing(fake_engine: Any) -> None:
    """A start cancelled before it began sent nothing: no END either (`fault-3`)."""
    async with connected(fake_engine) as client:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(client.start, "a#1", {})
            tasks.cancel_scope.cancel()
        sent = await fake_engine.hear_all()
        await client.end("b#1")
        client.cancel("b#1")
        if sent:  # the task ran up to its first wait before it was cancelled
            assert sent == [("START", "a#1")]
            await ended(client, "a#1", fake_engine)
        else:
            await client.end("a#1")
        assert await fake_engine.hear_all() == []


async def test_end_before_a_refusal_waits_for_done(fake_engine: Any) -> None:
    """END and REJECTED may cross; the stream is over with DONE, reported once each."""
    async with connected(fake_engine) as client:
        with anyio.move_on_after(0.01):
            await client.start("a#1", {})
        with anyio.move_on_after(0.01):
            await client.end("a#1")
        assert await fake_engine.hear_all() == [("START", "a#1"), ("END", "a#1")]
        fake_engine.reject("a#1", "full", "no")
        fake_engine.done("a#1")
        with anyio.fail_after(20):
            await client.end("a#1")
        assert (client.streams, client.lost) == (0, None)


async def test_end_ends_a_reader(fake_engine: Any) -> None:
    """A reader in its wait sees the stream end; late items are dropped, not faults."""
    async with connected(fake_engine) as client:
        stream = await started(client, fake_engine)
        with anyio.fail_after(20):
            async with anyio.create_task_group() as tasks:

                async def read() -> None:
                    assert [item async for item in stream] == []

                tasks.start_soon(read)
                await anyio.wait_all_tasks_blocked()
                tasks.start_soon(client.end, "a#1")
                assert await fake_engine.hear() == ("END", "a#1")
                fake_engine.chunk("a#1", 0, [1])
                finish = {"reason": "cancelled"}
                fake_engine.chunk("a#1", 1, [], finish)
                fake_engine.done("a#1")
        assert client.lost is None


async def test_cancel_is_sent_once_and_not_for_a_finished_stream(
    fake_engine: Any,
) -> None:
    """CANCEL goes out once, and the stream ends without an error."""
    async with connected(fake_engine) as client:
        stream = await started(client, fake_engine)
        client.cancel("a#1")
        client.cancel("a#1")
        assert await fake_engine.hear_all() == [("CANCEL", "a#1")]
        finish = {"reason": "cancelled"}
        fake_engine.chunk("a#1", 0, [1], finish)
        with anyio.fail_after(20):
            assert [item async for item in stream] == [1]
        other = await started(client, fake_engine, "b#1")
        finish = {"reason": "completed"}
        fake_engine.chunk("b#1", 0, [], finish)
        with anyio.fail_after(20):
            assert [item async for item in other] == []
        client.cancel("b#1")
        await other.aclose()
        assert await fake_engine.hear_all() == []


async def test_closing_a_stream_cancels_it_and_leaves_its_end_to_the_owner(
    fake_engine: Any,
) -> None:
    """`aclose` sends CANCEL without waiting; END is still sent by `end`, once."""
    async with connected(fake_engine) as client:
        stream = await started(client, fake_engine)
        with anyio.CancelScope() as scope:
            scope.cancel()
            await stream.aclose()
        await stream.aclose()
        assert [item async for item in stream] == []
        assert await fake_engine.hear_all() == [("CANCEL", "a#1")]
        await ended(client, "a#1", fake_engine)
        assert client.streams == 0


async def test_dropping_a_stream_keeps_nothing_and_loses_no_end(
    fake_engine: Any, eventually: Any
) -> None:
    """A dropped stream buffers nothing more and is ended like any other."""
    async with connected(fake_engine) as client:
        stream = await started(client, fake_engine)
        fake_engine.chunk("a#1", 0, ["x"])
        with anyio.fail_after(20):
            assert await anext(stream) == "x"
        state = client._table.keys["a#1"]
        del stream
        fake_engine.chunk("a#1", 1, ["y"])
        await eventually(lambda: state.received == 2)
        assert not state.items
        await ended(client, "a#1", fake_engine)


async def test_stream_repr_shows_no_item(fake_engine: Any) -> None:
    """What a stream holds does not show in its `repr` (`S9`)."""
    async with connected(fake_engine) as client:
        stream = await started(client, fake_engine)
        fake_engine.chunk("a#1", 0, ["canary", "canary"])
        with anyio.fail_after(20):
            await anext(stream)
        assert repr(stream) == "<EngineStream 'a#1' waiting=1>"


FAULTS: dict[str, Any] = {
    "gap": lambda fake: fake.chunk("a#1", 1, [1]),
    "repeat": lambda fake: fake.say(Kind.REPORT, {"ask": 0, "status": {}}, sequence=0),
    "lost": lambda fake: fake.tick(header={"sequence": 99}),
    "older": lambda fake: fake.tick(header={"incarnation": 6}),
    "bad item": lambda fake: fake.tick(chunks=[[1, 0, [b"\xc1"], None]]),
    "bad tokens": lambda fake: fake.tick(tokens=b"\x09\x00\x00\x00"),
    "unknown tokens": lambda fake: fake.tick(tokens=pack_tokens([9, 0, 1, 5])),
    "tokens gap": lambda fake: fake.tick(tokens=pack_tokens([1, 1, 1, 5])),
    "unknown": lambda fake: fake.chunk("zz", 0, [1]),
    "done": lambda fake: fake.done("a#1"),
    "twice": lambda fake: fake.accept("a#1"),
    "ready": lambda fake: fake.say(Kind.READY, {}),
    "garbage": lambda fake: fake.say_raw(b"\x80\x04canary"),
    "client kind": lambda fake: fake.say(Kind.SHUTDOWN, {}),
    "many parts": lambda fake: fake.say_raw(*[b"x"] * 200),
    "flipped": lambda fake: fake.say_raw(_flipped(fake, -1)),
    "version 2": lambda fake: fake.say_raw(_flipped(fake, 4)),
    "FAULT": lambda fake: fake.say(Kind.FAULT, {"message": "this"}),
    "new FAULT": lambda fake: fake.say(Kind.FAULT, {"message": "this"}, sequence=0),
}


def _flipped(fake: Any, at: int) -> bytes:
    """A legal message with one bit of it changed."""
    said = wire.encode(Kind.PONG, {"ask": 0}, incarnation=7, sequence=fake.sent)
    head = bytearray(said)
    head[at] ^= 1
    return bytes(head)


@pytest.mark.parametrize("fault", FAULTS)
async def test_fault_of_the_engine_fails_its_waiters(
    fake_engine: Any, fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A broken protocol loses this engine, nothing more (`fault-40`, `fault-46`)."""
    async with connected(fake_engine) as client:
        stream = await started(client, fake_engine)
        reported: list[str] = []

        async def wait_for(awaitable: Any) -> None:
            with pytest.raises(EngineLost) as caught:
                await awaitable
            assert caught.value.retry_after == 3.0
            assert "canary" not in str(caught.value)
            reported.append(caught.value.reason)

        with anyio.fail_after(20):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(wait_for, anext(stream))
                tasks.start_soon(wait_for, client.start("b#1", {}))
                tasks.start_soon(wait_for, client.status())
                await fake_engine.hear()
                await fake_engine.hear()
                FAULTS[fault](fake_engine)
        assert reported == ["protocol"] * 3
        with pytest.raises(StopAsyncIteration):
            await anext(stream)
        with pytest.raises(EngineLost):
            await client.start("c#1", {})
        with anyio.fail_after(20):
            await client.end("a#1")
            await client.end("b#1")
        assert client.streams == 0
    (line,) = caplog.messages
    assert line.startswith("engine 7 is lost: protocol: ")
    assert ("the engine received this" in line) == ("FAULT" in fault)
    assert "canary" not in caplog.text


async def test_tokens_without_credit_are_a_fault(fake_engine: Any) -> None:
    """A window's worth of token lists is taken, and not one more."""
    async with connected(fake_engine) as client:
        await started(client, fake_engine)
        fit = -(-(2**16) // 68)
        words = [it for n in range(fit) for it in (1, n, 1, n)]
        fake_engine.tick(tokens=pack_tokens(words))
        with anyio.move_on_after(0.1):
            await client.wait_lost()
        assert client.lost is None
        fake_engine.tick(tokens=pack_tokens([1, fit, 1, 0]))
        with anyio.fail_after(20):
            await client.wait_lost()
        assert client.lost == "protocol"


async def test_item_without_credit_is_a_fault(fake_engine: Any) -> None:
    """One item may exceed the window, none may follow: memory here is bounded."""
    async with connected(fake_engine) as client:
        stream = await started(client, fake_engine)
        fake_engine.chunk("a#1", 0, [bytes(2**17)])
        with anyio.fail_after(20):
            assert len(await anext(stream)) == 2**17
            assert await fake_engine.hear() == ("GRANT", "a#1")
        assert fake_engine.granted == {"a#1": 64 + 5 + 2**17}
        fake_engine.chunk("a#1", 1, [bytes(2**17), 1])
        with anyio.fail_after(20):
            await client.wait_lost()
        assert client.lost == "protocol"


@pytest.mark.parametrize("compact", [False, True])
async def test_reader_grants_what_it_has_read_in_few_messages(
    fake_engine: Any, compact: bool
) -> None:
    """Credit comes back by half windows, all streams of a turn in one message."""
    keys = [f"s#{number}" for number in range(8)]
    items = [[n] for n in range(500)] if compact else [f"{n:03}" for n in range(500)]
    async with connected(fake_engine) as client:
        streams = [await started(client, fake_engine, key) for key in keys]
        for key in keys:
            generation = fake_engine.generations[key]
            if compact:
                words = [it for n in range(500) for it in (generation, n, 1, n)]
                fake_engine.tick(tokens=pack_tokens(words))
            else:
                fake_engine.chunk(key, 0, items)
        await started(client, fake_engine, "last")  # all of it has arrived
        before = len(fake_engine.messages)
        with anyio.fail_after(20):
            for stream in streams:
                assert [await anext(stream) for _ in items] == items
            said = await fake_engine.hear_all()
    assert sorted(said) == [("GRANT", key) for key in keys]
    assert len(fake_engine.messages) - before < 4
    # Half a window was reached within the run; what came after is not granted yet.
    assert set(fake_engine.granted.values()) == {482 * 68}


async def test_items_after_the_finish_are_a_fault(fake_engine: Any) -> None:
    """One terminal event per stream, none after it; the finish itself counts."""
    async with connected(fake_engine) as client:
        stream = await started(client, fake_engine)
        finish = {"reason": "completed"}
        fake_engine.chunk("a#1", 0, [1], finish)
        fake_engine.chunk("a#1", 1, [2])
        with anyio.fail_after(20):
            await client.wait_lost()
            assert [item async for item in stream] == [1]
        assert client.lost == "protocol"


async def test_losing_the_engine_delivers_what_had_arrived_first(
    fake_engine: Any,
) -> None:
    """Items that arrived are read before the loss is raised, once."""
    async with connected(fake_engine) as client:
        stream = await started(client, fake_engine)
        fake_engine.chunk("a#1", 0, [1, 2])
        with anyio.fail_after(20):
            assert await anext(stream) == 1
        client.mark_failed("killed")
        client.mark_failed("later")
        assert await anext(stream) == 2
        with pytest.raises(EngineLost) as caught:
            await anext(stream)
        assert caught.value.reason == "killed"
        with pytest.raises(StopAsyncIteration):
            await anext(stream)


async def test_leaving_the_client_tells_every_waiter(fake_engine: Any) -> None:
    """Closing is a loss as well: no waiter is left behind."""
    async with anyio.create_task_group() as tasks, connected(fake_engine) as client:
        stream = await started(client, fake_engine)

        async def read() -> None:
            with pytest.raises(EngineLost) as caught:
                await anext(stream)
            assert caught.value.reason == "closed"

        tasks.start_soon(read)
        await anyio.wait_all_tasks_blocked()
    assert not client.ready


async def test_client_of_an_impossible_address_leaves_nothing_open() -> None:
    """An address that cannot be one is an error at once."""
    with pytest.raises(zmq.ZMQError):
        async with EngineClient("nowhere", incarnation=7):
            pass


async def test_error_of_the_block_is_not_wrapped(fake_engine: Any) -> None:
    """What the block raises comes out as it is, not in a group."""
    with pytest.raises(KeyError):
        async with EngineClient(fake_engine.endpoint, incarnation=7):
            raise KeyError("mine")


async def test_end_works_while_everything_around_is_cancelled(
    fake_engine: Any,
) -> None:
    """A clean-up under an outer cancellation still gets its DONE (`peers-24`)."""
    done = False
    with anyio.CancelScope() as outer:
        async with connected(fake_engine) as client:
            await started(client, fake_engine)
            outer.cancel()
            with anyio.CancelScope(shield=True):
                await ended(client, "a#1", fake_engine)
                done = True
            await anyio.lowlevel.checkpoint()
    assert done
    assert outer.cancelled_caught


async def test_fault_of_the_client_ends_its_waiters_only(
    fake_engine: Any,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """An unexpected error in the background task is reported, not raised."""
    async with connected(fake_engine) as client:
        stream = await started(client, fake_engine)

        def broken(*_: object, **__: object) -> None:
            raise ZeroDivisionError("canary")

        monkeypatch.setattr(wire, "decode", broken)
        fake_engine.chunk("a#1", 0, [1])
        with anyio.fail_after(20), pytest.raises(EngineLost) as caught:
            await anext(stream)
        assert caught.value.reason == "client_fault"
    (line,) = caplog.messages
    assert "client_fault: ZeroDivisionError at test_client.py:" in line
    assert "canary" not in caplog.text


async def test_send_that_swallows_the_news_of_a_message_handles_it(
    fake_engine: Any,
) -> None:
    """Messages that arrive while the client sends are seen without another event."""
    async with connected(fake_engine) as client:
        stream = await started(client, fake_engine)
        received = 0
        with anyio.fail_after(20):
            for number in range(300):
                fake_engine.chunk("a#1", number, [number])
                client._sender.send_now(Kind.STATUS, {"ask": 0})
                if number % 3 == 0:
                    await anyio.lowlevel.checkpoint()
            async for item in stream:
                assert item == received
                received += 1
                if received == 300:
                    break


async def test_hang_up_of_the_engine_is_seen_at_the_next_send(
    fake_engine: Any, eventually: Any
) -> None:
    """Without a connection nothing is queued for another engine (`fault-47`, `S4`).

    It is reported a second later: the end of the process comes first and says more.
    """
    async with connected(fake_engine) as client:
        await started(client, fake_engine)
        fake_engine.close()
        number, begin = 0, anyio.current_time()

        async def try_once() -> bool:
            nonlocal number
            number += 1
            with anyio.move_on_after(0.01), pytest.raises(EngineLost):
                await client.start(f"n#{number}", {})
            return client.lost is not None

        with anyio.fail_after(20):
            while not await try_once():
                pass
        assert client.lost == "disconnected"
        assert anyio.current_time() - begin > 0.9
        gc.collect()


async def test_hang_up_of_the_engine_is_noticed_by_an_idle_client(
    fake_engine: Any,
) -> None:
    """As of an engine that cannot take a message in, and lives (`fault-47`)."""
    async with connected(fake_engine) as client:
        stream = await started(client, fake_engine)
        fake_engine.close()
        with anyio.fail_after(20), pytest.raises(EngineLost) as caught:
            await anext(stream)
        assert caught.value.reason == "disconnected"


async def test_refuses_to_connect_without_descriptors(tmp_path: Path) -> None:
    """The socket library would end the process; the caller gets an error instead."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    hoard = [os.dup(0)]
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hoard[0] + 8, hard))
        with suppress(OSError):
            while True:
                hoard.append(os.dup(0))
        os.close(hoard.pop())
        with pytest.raises(OSError, match="open files"):
            ZmqClientTransport(f"ipc://{tmp_path}/e", lambda _: True)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for descriptor in hoard:
            os.close(descriptor)
