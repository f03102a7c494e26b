from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest

import lifecycle
import lifecycle_zmq
from lifecycle import EngineLost, Payload
from lifecycle_engine import DeviceLost, SimRunner, worker
from lifecycle_zmq import RequestRejected, ZmqEngine

LINK = ["--endpoint", "ipc:///tmp/nowhere", "--incarnation", "3"]
WORKER = [sys.executable, "-m", "lifecycle_engine.worker"]
BOUND = 120.0


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> Any:
    """Run every anyio test on both backends."""
    return request.param


@pytest.fixture
def make_engine(tmp_path: Path) -> Callable[..., ZmqEngine]:
    """An engine whose worker imports what this process imported."""
    packages = (lifecycle_zmq, lifecycle)
    roots = [str(Path(package.__file__ or "").parents[1]) for package in packages]
    path = os.pathsep.join([str(tmp_path), *roots])

    def make(argv: list[str], **options: Any) -> ZmqEngine:
        env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
        return ZmqEngine(argv, env=env, directory=tmp_path, **options)

    return make


class Server:
    """Replaces the link's server, and records how it was created."""

    made: dict[str, Any]

    arena: Any = None

    def __init__(self, endpoint: str, backend: Any, **options: Any) -> None:
        type(self).made = {
            "endpoint": endpoint,
            "backend": backend,
            **options,
        }

    def run(self) -> None:
        """Return at once, as on SHUTDOWN."""


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> type[Server]:
    """The worker with a server that serves nothing."""
    monkeypatch.setattr(worker, "EngineServer", Server)
    return Server


def test_options_reach_scheduler_and_link(server: type[Server]) -> None:
    """The options reach runner, scheduler and link; SHUTDOWN is status 0."""
    options = ["--runner", "sim", "--max-batch", "3", "--max-tokens", "7"]
    assert worker.main([*options, *LINK]) == 0
    assert server.made["endpoint"] == "ipc:///tmp/nowhere"
    assert server.made["incarnation"] == 3
    backend = server.made["backend"]
    assert backend.status()["slots"] == 3
    with pytest.raises(RequestRejected, match="expected 1 to 7"):
        backend.start("a", {"input_ids": [1], "max_tokens": 8}, {})


def test_sim_costs_are_options() -> None:
    """A load study sets the simulated costs on the command line."""
    options = worker._parser().parse_args(
        ["--runner", "sim", "--sim-decode-step", "0.25", "--slots", "5", *LINK]
    )
    runner = worker.build_runner(options)
    assert isinstance(runner, SimRunner)
    assert runner._cost.decode_step == 0.25
    assert runner.slots == 5


def test_torch_worker_without_checkpoint_says_what_to_do() -> None:
    """Starting without a model ends with the option and the command that help."""
    with pytest.raises(SystemExit, match="needs --checkpoint DIR"):
        worker.main(LINK)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--runner", "sim", "--slots", "2", "--max-batch", "3"], "has 2 slots"),
        (["--checkpoint", "/nowhere/at/all"], "/nowhere/at/all"),
        (["--checkpoint", "/nowhere", "--device", "cuda"], "cannot start"),
    ],
)
def test_worker_that_cannot_start_says_why(options: list[str], message: str) -> None:
    """A wrong option or folder ends with one message, without a traceback."""
    with pytest.raises(SystemExit, match=message) as caught:
        worker.main([*options, *LINK])
    assert str(caught.value).startswith("lifecycle-engine: cannot start: ")


@pytest.mark.parametrize("option", ["--max-batch", "--slots", "--max-length"])
def test_worker_refuses_counts_below_one(
    option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The error for a count of zero names the option."""
    with pytest.raises(SystemExit):
        worker.main(["--runner", "sim", option, "0", *LINK])
    assert "0 is not 1 or more" in capsys.readouterr().err


@pytest.mark.anyio
async def test_sim_worker_streams_over_the_link(
    make_engine: Callable[..., ZmqEngine],
) -> None:
    """A real worker process accepts, streams, rejects, cancels and ends requests."""
    argv = [*WORKER, "--runner", "sim", "--max-batch", "2", "--sim-decode-step", "0"]
    with anyio.fail_after(BOUND):
        async with make_engine(argv) as engine:
            await engine.wait_ready()
            request = {"input_ids": [72, 105], "max_tokens": 5}
            pixels = {"pixels": np.ones((50, 6), np.float32)}
            source = await engine.start("a#1", request, Payload(pixels, nbytes=1200))
            items = [item async for item in source]
            assert [type(item) for item in items] == [list] * 5 + [dict]
            assert items[-1] == {"finish_reason": "length"}
            with pytest.raises(RequestRejected, match="max_tokens is 0"):
                await engine.start("b#1", request | {"max_tokens": 0})
            endless = await engine.start("c#1", request | {"max_tokens": 8000})
            await anext(endless)
            engine.cancel("c#1")
            rest = [item async for item in endless]
            assert all(type(item) is list for item in rest)
            for key in ("a#1", "c#1"):
                await engine.end(key)
            backend = (await engine.status())["backend"]
    assert backend["finished"]["completed"] == 1
    assert backend["finished"]["cancelled"] == 1
    assert backend["slots_free"] == 2
    assert backend["payload_bytes"] == 0


@pytest.mark.anyio
async def test_torch_worker_streams_what_generate_says(
    make_engine: Callable[..., ZmqEngine],
    checkpoint: Path,
    prepared: list[Any],
    expected: list[Any],
    anyio_backend_name: str,
) -> None:
    """Through process, link and scheduler, tokens equal those of `generate`."""
    if anyio_backend_name == "trio":
        pytest.skip("the torch worker is started once; the sim one runs on both")
    argv = [*WORKER, "--checkpoint", str(checkpoint), "--max-length", "512"]
    got: dict[int, list[int]] = {}

    async def run(engine: ZmqEngine, index: int) -> None:
        tensors = Payload(dict(prepared[index].tensors), nbytes=prepared[index].nbytes)
        source = await engine.start(f"k{index}", prepared[index].request, tensors)
        got[index] = [t async for item in source if type(item) is list for t in item]

    with anyio.fail_after(BOUND):
        async with make_engine(argv) as engine:
            await engine.wait_ready()
            async with anyio.create_task_group() as tasks:
                for index in range(6):
                    tasks.start_soon(run, engine, index)
    assert [got[index] for index in range(6)] == expected


LOST = """
import sys
from lifecycle_engine import worker
from lifecycle_engine import DeviceLost
from lifecycle_engine import SimRunner

class Dying(SimRunner):
    def decode(self, slots):
        raise DeviceLost("a CUDA error that stays")

worker.build_runner = lambda options: Dying()
sys.exit(worker.main())
"""


@pytest.mark.anyio
async def test_lost_device_ends_the_process(
    make_engine: Callable[..., ZmqEngine], tmp_path: Path
) -> None:
    """A lost device ends the worker with one log line; its streams fail."""
    (tmp_path / "dying.py").write_text(LOST)
    request, output = {"input_ids": [1], "max_tokens": 5}, ""
    with anyio.fail_after(BOUND):
        async with make_engine([sys.executable, "-m", "dying"]) as engine:
            # On a busy machine, the output may be that of the next process by then.
            while not output:
                await engine.wait_ready()
                # Which of the two raises depends on how fast the process dies.
                with pytest.raises(EngineLost) as caught:
                    source = await engine.start("a", request)
                    _ = [item async for item in source]
                assert caught.value.reason == "exit"
                output = engine.output
    assert output == "lifecycle-engine: a CUDA error that stays\n"


def test_lost_device_has_its_own_status(
    server: type[Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process exits at once with status 77, without running any `finally`."""

    def run(self: Server) -> None:
        raise DeviceLost("a CUDA error that stays")

    left: list[int] = []
    monkeypatch.setattr(Server, "run", run)
    monkeypatch.setattr(os, "_exit", left.append)
    worker.main(["--runner", "sim", *LINK])
    assert left == [77]
