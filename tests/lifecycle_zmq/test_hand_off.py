"""The payload is dead in this process when `start` first waits, whatever follows."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import anyio
import numpy as np
import pytest
from zmq_wire import ZmqClientTransport

from lifecycle import EngineLost, Payload
from lifecycle_zmq import EngineClient, RequestRejected, ZmqEngine

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("no_leaks")]


@pytest.fixture(autouse=True)
def no_collector() -> Iterator[None]:
    """Nothing here may need the collector."""
    gc.disable()
    yield
    gc.enable()


Boxed = tuple[Payload[Mapping[str, Any]], "weakref.ref[Any]"]


def boxed(**others: Any) -> Boxed:
    """A box with an array of 4 MiB, and a weak reference of the array."""
    array = np.arange(2**20, dtype=np.float32)
    watch = weakref.ref(array)
    return Payload({"pixels": array, **others}, nbytes=array.nbytes), watch


async def test_payload_is_dead_before_the_first_wait(fake_engine: Any) -> None:
    """While the engine has not even answered, the array is gone (`law 6`, `N10`)."""
    async with EngineClient(fake_engine.endpoint, incarnation=7) as client:
        await fake_engine.greet()
        await client.wait_ready()
        box, watch = boxed()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(client.start, "a#1", {"n": 1}, box)
            await anyio.wait_all_tasks_blocked()
            assert box.taken
            assert watch() is None
            tasks.cancel_scope.cancel()
        await fake_engine.hear()
        message = fake_engine.messages[-1]
        expected = np.arange(2**20, dtype=np.float32).tobytes()
        assert message.tensors["pixels"].tobytes() == expected
        assert message.tensors["pixels"].format == "f"


async def test_payload_is_dead_when_start_was_accepted(fake_engine: Any) -> None:
    """Success: dead when `start` returns, while the stream goes on."""
    async with EngineClient(fake_engine.endpoint, incarnation=7) as client:
        await fake_engine.greet()
        await client.wait_ready()
        box, watch = boxed()
        async with anyio.create_task_group() as tasks:

            async def start() -> None:
                stream = await client.start("a#1", {}, box)
                assert watch() is None
                assert stream is not None

            tasks.start_soon(start)
            await fake_engine.hear()
            fake_engine.accept("a#1")


async def test_payload_is_dead_when_start_was_refused(fake_engine: Any) -> None:
    """Refusal by the engine: dead although the exception is kept."""
    async with EngineClient(fake_engine.endpoint, incarnation=7) as client:
        await fake_engine.greet()
        await client.wait_ready()
        box, watch = boxed()
        kept: list[BaseException] = []
        async with anyio.create_task_group() as tasks:

            async def start() -> None:
                try:
                    await client.start("a#1", {}, box)
                except RequestRejected as error:
                    kept.append(error)

            tasks.start_soon(start)
            await fake_engine.hear()
            fake_engine.reject("a#1", "full", "no")
        assert len(kept) == 1
        assert watch() is None


def _bad_key(_: pytest.MonkeyPatch) -> tuple[str, Any, Boxed]:
    return "", {}, boxed()


def _bad_request(_: pytest.MonkeyPatch) -> tuple[str, Any, Boxed]:
    return "a#1", {"x": object()}, boxed()


def _bad_mapping(_: pytest.MonkeyPatch) -> tuple[str, Any, Boxed]:
    return "a#1", 5, boxed()


def _bad_tensor(_: pytest.MonkeyPatch) -> tuple[str, Any, Boxed]:
    return "a#1", {}, boxed(zeros=np.zeros((4, 4))[:, ::2])


def _bad_socket(monkeypatch: pytest.MonkeyPatch) -> tuple[str, Any, Boxed]:
    def send(_link: ZmqClientTransport, parts: Any) -> bool:
        local = list(parts)  # a frame that holds the memory when it raises
        raise ZeroDivisionError(len(local))

    monkeypatch.setattr(ZmqClientTransport, "send", send)
    return "a#1", {}, boxed()


def _no_socket(monkeypatch: pytest.MonkeyPatch) -> tuple[str, Any, Boxed]:
    def send(_link: ZmqClientTransport, parts: Any) -> bool:
        return False

    monkeypatch.setattr(ZmqClientTransport, "send", send)
    return "a#1", {}, boxed()


@pytest.mark.parametrize(
    ("prepare", "error"),
    [
        (_bad_key, ValueError),
        (_bad_request, RequestRejected),
        (_bad_mapping, TypeError),
        (_bad_tensor, RequestRejected),
        (_bad_socket, ZeroDivisionError),
        (_no_socket, EngineLost),
    ],
)
async def test_payload_is_dead_when_start_failed(
    fake_engine: Any,
    monkeypatch: pytest.MonkeyPatch,
    prepare: Callable[[pytest.MonkeyPatch], tuple[str, Any, Boxed]],
    error: type[Exception],
) -> None:
    """Error: dead although the exception, with its traceback, is kept."""
    async with EngineClient(fake_engine.endpoint, incarnation=7) as client:
        await fake_engine.greet()
        await client.wait_ready()
        key, request, (box, watch) = prepare(monkeypatch)
        kept: BaseException | None = None
        try:
            await client.start(key, request, box)
        except error as caught:
            kept = caught
        assert kept is not None
        assert kept.__traceback__ is not None
        assert watch() is None
        # Nothing to end; and after a send of unknown outcome, nothing to rely on.
        assert client.streams == 0
        assert (client.lost is None) is (error not in (ZeroDivisionError, EngineLost))
        monkeypatch.undo()
        del kept


async def test_start_leaves_the_error_being_handled_alone(fake_engine: Any) -> None:
    """Frames of an exception that the caller handles keep their locals."""

    def fail() -> None:
        evidence = "kept"
        raise KeyError(len(evidence))

    async with EngineClient(fake_engine.endpoint, incarnation=7) as client:
        try:
            fail()
        except KeyError as error:
            with pytest.raises(EngineLost):
                await client.start("a#1", {}, boxed()[0])
            inner = error.__traceback__ and error.__traceback__.tb_next
            assert inner is not None
            assert inner.tb_frame.f_locals == {"evidence": "kept"}
            del inner


async def test_payload_is_dead_when_no_engine_serves(
    make_engine: Callable[..., ZmqEngine],
) -> None:
    """EngineLost at once: dead although nothing was sent."""
    async with make_engine("--never-ready") as engine:
        box, watch = boxed()
        kept: BaseException | None = None
        try:
            await engine.start("a#1", {}, box)
        except EngineLost as error:
            kept = error
        assert kept is not None
        assert box.taken
        assert watch() is None
        del kept


async def test_payload_is_dead_when_the_client_is_not_ready(fake_engine: Any) -> None:
    """A refusal before anything was sent drops the payload all the same."""
    async with EngineClient(fake_engine.endpoint, incarnation=7) as client:
        box, watch = boxed()
        with pytest.raises(EngineLost):
            await client.start("a#1", {}, box)
        assert box.taken
        assert watch() is None


async def test_payload_is_dead_when_start_was_cancelled(
    make_engine: Callable[..., ZmqEngine],
) -> None:
    """Cancellation before, in and after the wait: dead, and ended exactly once."""
    async with make_engine() as engine:
        await engine.wait_ready()
        for number in range(30):
            key = f"a#{number}"
            box, watch = boxed()
            with anyio.move_on_after(number * 0.0002):
                await engine.start(key, {"hold": True}, box)
            if box.taken:
                assert watch() is None
            box.clear()
            assert watch() is None
            with anyio.fail_after(20):
                await engine.end(key)
        status = await engine.status()
        assert status["starts"] == status["ends"]
        assert (status["duplicate_ends"], status["ends_before_start"]) == (0, 0)
        assert status["backend"]["live"] == []


@pytest.mark.parametrize("how", ["accept", "reject", "raise_in_start"])
async def test_tensors_are_the_backends_alone(
    make_engine: Callable[..., ZmqEngine], how: str
) -> None:
    """Engine side: the server keeps no tensor once the backend's start returned."""
    async with make_engine() as engine:
        await engine.wait_ready()
        watch = await engine.start("watch", {"watch": True})
        for number, size in enumerate((10, 5_000, 100_000)):
            array = np.arange(size, dtype=np.int32).reshape(2, -1)
            box = Payload[Mapping[str, Any]]({"x": array, "y": b"small"})
            request = {"hold": True} if how == "accept" else {how: "because"}
            try:
                await engine.start(f"a#{number}", request, box)
            except RequestRejected as error:
                assert how != "accept"
                expected = "because" if how == "reject" else "internal"
                assert error.code == expected
                assert "because" not in error.message
            # The count of each step, without another message to the server between.
            waiting = len(watch._state.items)  # type: ignore[attr-defined]
            counts = [await anext(watch) for _ in range(waiting + 3)]
            assert counts[waiting:] == [[0]] * 3
        status = (await engine.status())["backend"]
        assert status["tensors_alive"] == 0
        assert [name for name, *_ in status["seen"]] == ["x", "y"] * 3
        assert status["seen"][0][1:] == ["i", [2, 5], 45]
