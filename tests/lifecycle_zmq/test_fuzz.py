"""No frame does harm: the decoder and a running server under mutated messages."""

from __future__ import annotations

import asyncio
import importlib.util
import random
import sys
import threading
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import zmq
from zmq_wire import Kind, wire

from lifecycle_zmq import EngineServer

SECONDS = 8.0


@pytest.fixture(scope="module")
def fuzzer() -> ModuleType:
    """The fuzzer of messages, which is also a script."""
    return load("fuzz")


def load(name: str) -> ModuleType:
    """Import a script from this directory."""
    path = Path(__file__).with_name(f"{name}.py")
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # A dataclass looks its own module up.
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, name, module)
        spec.loader.exec_module(module)
    return module


@pytest.mark.skipif(sys.platform != "linux", reason="nothing is passed")
def test_streams_with_descriptors_leave_none(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Mutated, cut, with too many, too few or odd ones: `ProtocolError`, and no leak."""
    result: Any = load("fuzz_pair").fuzz(seed=20_261_122, seconds=60.0, frames=40_000)
    with capsys.disabled():
        print(f"\n{result}")
    assert result.frames > 1_000
    assert result.passed > result.frames / 4
    assert 0 < result.heard < result.frames
    assert result.refused > result.frames / 50
    assert result.left == 0
    assert result.peak < 2**20


@pytest.mark.parametrize("way", ["up", "down"])
@pytest.mark.parametrize("link", ["pair", "ipc"])
def test_link_heals_or_dies_at_both_ends(
    link: str, way: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """One message damaged, cut, lost, doubled or moved: nobody waits, both ends agree."""
    result: Any = asyncio.run(load("fuzz_link").fuzz(link, way, seed=5, count=64))
    with capsys.disabled():
        print(f"\n{link} {way}: {result}")
    assert result.wrong == []
    assert result.damaged > 32
    assert 16 < result.lost < result.damaged


def test_decode_raises_nothing_but_protocol_errors(
    fuzzer: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """Mutated frames: understood or `ProtocolError`, quick and small (`N8`, `S3`)."""
    result = fuzzer.fuzz(seed=20_261_120, seconds=SECONDS)
    with capsys.disabled():
        print(f"\n{result}")
    assert result.frames > 10_000
    assert 0.3 * result.frames < result.refused < result.frames
    assert result.median() < 1e-3
    assert max(result.seconds) < 50e-3  # a goal of 1 ms, and pauses of a busy machine
    assert result.peak < 2**20


class Nothing:
    """A backend that takes every request and produces nothing."""

    busy = False

    def start(self, key: str, request: Any, tensors: Any) -> None:
        """Take it."""

    def cancel(self, key: str) -> None:
        """Do nothing."""

    def end(self, key: str) -> None:
        """Do nothing."""

    def step(self) -> list[Any]:
        """Produce nothing."""
        return []

    def status(self) -> dict[str, Any]:
        """Tell nothing."""
        return {}


def test_server_survives_mutated_frames(fuzzer: Any, tmp_path: Path) -> None:
    """3,000 of them from one client: counted, and others are served (`fault-43`)."""
    endpoint = f"ipc://{tmp_path}/fuzzed"
    server = EngineServer(endpoint, Nothing(), incarnation=1, leave_with_parent=False)
    thread = threading.Thread(target=server.run)
    thread.start()
    legal = [it for it in fuzzer.seeds() if it[0][5] != Kind.SHUTDOWN]
    frames = fuzzer.mutated(random.Random(5), legal)
    with zmq.Context() as context:
        bad, good = (context.socket(zmq.DEALER) for _ in range(2))
        try:
            for socket in (bad, good):
                socket.setsockopt(zmq.LINGER, 0)
                socket.connect(endpoint)
            for _, parts in zip(range(3_000), frames, strict=False):
                bad.send_multipart([bytes(part) for part in parts])
            status = {"bad_frames": 0}
            # Two connections have no common order: ask until the other's are through.
            for ask in range(10_000):
                good.send(_message(Kind.STATUS, {"ask": ask}, ask))
                status = _report(good)
                if status["bad_frames"] > 1_000:
                    break
            assert status["bad_frames"] > 1_000
        finally:
            good.send(_message(Kind.SHUTDOWN, {}, ask + 1))
            thread.join(20)
            bad.close()
            good.close()
    assert not thread.is_alive()


def _message(kind: Kind, body: dict[str, Any], sequence: int) -> bytes:
    return wire.encode(kind, body, incarnation=1, sequence=sequence)


def _report(socket: Any) -> dict[str, Any]:
    while True:
        assert socket.poll(20_000)
        message = wire.decode(socket.recv_multipart(), accept=wire.FROM_ENGINE)
        if message.kind is Kind.REPORT:
            status: dict[str, Any] = message.body["status"]
            return status
