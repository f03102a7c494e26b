"""One model on several ranks: its tokens, its memory, and the end of a rank."""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import anyio
import psutil
import pytest

pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from engine_kit import Kit  # noqa: E402

from lifecycle import EngineLost, Payload  # noqa: E402
from lifecycle_engine.config import (  # noqa: E402
    ConfigError,
    EngineConfig,
    ModelConfig,
    ServerConfig,
)
from lifecycle_engine.factory import make_app, worker_argv  # noqa: E402
from lifecycle_engine.model.tensor_parallel import (  # noqa: E402
    HeadSplit,
    _store,
    distributed_config,
)
from lifecycle_engine.worker import make_backend  # noqa: E402
from lifecycle_zmq import ZmqEngine  # noqa: E402

BOUND = 240.0
WORKER = [sys.executable, "-m", "lifecycle_engine.worker", "--max-length", "4096"]


@pytest.fixture
def anyio_backend() -> str:
    """The link is tested on both backends elsewhere."""
    return "asyncio"


def text(queries: int, keys: int, name: str = "Qwen3") -> Any:
    """The config of a language model with that many heads."""
    heads = {"num_attention_heads": queries, "num_key_value_heads": keys}
    return getattr(transformers, f"{name}Config")(**heads)


@pytest.mark.parametrize(
    ("queries", "keys", "ranks", "wanted"),
    [
        (32, 8, 4, HeadSplit(8, 2)),
        (32, 8, 8, HeadSplit(4, 1)),
        (32, 8, 16, HeadSplit(2, 1, 2)),
        (4, 1, 2, HeadSplit(2, 1, 2)),
    ],
)
def test_heads_are_split(queries: int, keys: int, ranks: int, wanted: Any) -> None:
    """A rank has its part of the query heads, and of the key heads one or more."""
    assert HeadSplit.of(text(queries, keys), ranks) == wanted


@pytest.mark.parametrize(
    ("queries", "keys", "ranks", "fits"),
    [(4, 2, 3, "1, 2, 4"), (12, 4, 3, "1, 2, 4, 12"), (8, 8, 16, "1, 2, 4, 8")],
)
def test_heads_that_cannot_be_split_are_refused(
    queries: int, keys: int, ranks: int, fits: str
) -> None:
    """The error has the numbers of heads, and those of ranks that fit."""
    heads = f"{queries} query heads and {keys} key heads"
    with pytest.raises(ValueError, match=f"tp is {ranks}; .*{heads} .* {fits} ranks"):
        distributed_config(text(queries, keys), ranks)


@pytest.mark.parametrize("lacks", [AttributeError, PermissionError])
def test_ranks_meet_where_there_is_no_nameless_file(
    lacks: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Python that was built for an old glibc has none, a sandbox may forbid it."""

    def has_none(name: str) -> int:
        raise lacks(name)

    monkeypatch.setattr(os, "memfd_create", has_none, raising=False)
    with ExitStack() as stack:
        store = Path(_store(stack))
        assert list(store.parent.iterdir()) == []
    assert not store.parent.exists()


def test_model_without_a_plan_is_refused() -> None:
    """transformers knows how to cut most models, and not all."""
    with pytest.raises(ValueError, match="no tensor parallel plan for stablelm"):
        distributed_config(text(4, 4, "StableLm"), 2)


def test_wrong_number_of_ranks_starts_none(kits: Callable[[str], Any]) -> None:
    """The command line ends with the sentence, before any process starts."""
    argv = ["--checkpoint", str(kits("qwen3").folder), "--tp", "3"]
    with pytest.raises(SystemExit, match="cannot start: tp is 3; the model's 4 query"):
        make_backend(argv)
    with pytest.raises(SystemExit, match="graphs is on and tp is 3"):
        make_backend([*argv, "--graphs", "on"])
    assert psutil.Process().children() == []


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"executor": "ray"}, "engine.tp: 2 needs an engine in a process"),
        ({"graphs": "on"}, "engine.graphs: on is for one process, and --tp is 2"),
        ({"buckets": (2,)}, "engine.buckets: 2 has no effect without graphs"),
    ],
)
def test_settings_that_need_one_process_are_refused(
    tmp_path: Path, options: Any, words: str
) -> None:
    """They are refused where they stand, before the checkpoint is read."""
    (tmp_path / "config.json").write_text("{}")
    config = ServerConfig(
        model=ModelConfig(checkpoint=tmp_path, device="cuda"),
        engine=EngineConfig(tp=2, **options),
    )
    with pytest.raises(ConfigError, match=words):
        make_app(config)


def test_server_hands_the_ranks_on(tmp_path: Path) -> None:
    """The option reaches the command line of the engine process."""
    argv = worker_argv(ServerConfig(engine=EngineConfig(tp=2)), tmp_path)
    assert argv[argv.index("--tp") + 1] == "2"


@pytest.mark.anyio
async def test_nothing_is_left_of_a_start_that_is_killed(
    tmp_path: Path, kits: Callable[[str], Any]
) -> None:
    """The other rank is still importing then, and has met no other."""
    argv = [*WORKER, "--checkpoint", str(kits("qwen3").folder), "--tp", "2"]
    argv += ["--endpoint=", "--incarnation=1"]
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    with anyio.fail_after(BOUND):
        # Its standard input is a pipe that only this process holds.
        async with await anyio.open_process(argv, env=env) as rank_0:
            process = psutil.Process(rank_0.pid)
            while not (others := process.children()):
                await anyio.sleep(0.01)
            rank_0.kill()
            await gone(others[0])
    assert list(tmp_path.iterdir()) == []


LOADING = """
import os, sys
from lifecycle_engine.model.tensor_parallel import load_tensor_parallel
before = dict(os.environ)
options = {"slots": 2, "max_length": 64}
load_tensor_parallel(sys.argv[1], ranks=2, device="cpu", **options)
left = {name: os.environ.get(name) for name in {*before, *os.environ}}
print([name for name in sorted(left) if left[name] != before.get(name)], flush=True)
os._exit(0)
"""


@pytest.mark.anyio
async def test_loading_leaves_the_environment_as_it_was(
    kits: Callable[[str], Any],
) -> None:
    """What the engine process starts later, and its own libraries, are of no rank."""
    argv = [sys.executable, "-c", LOADING, str(kits("qwen3").folder)]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    with anyio.fail_after(BOUND):
        done = await anyio.run_process(argv, env=env, stderr=None)
    assert done.stdout.decode().splitlines()[-1] == "[]"


def multi_query(config: Any) -> None:
    """One key head, which both ranks have a copy of."""
    config.num_key_value_heads = 1


class Served:
    """A checkpoint behind a real engine process with two ranks."""

    def __init__(self, kit: Kit, engine: ZmqEngine) -> None:
        self.kit, self.engine = kit, engine

    async def stream(self, key: str, prepared: Any) -> AsyncIterator[int]:
        payload = Payload(dict(prepared.tensors), nbytes=prepared.nbytes)
        source = await self.engine.start(key, prepared.request, payload)
        async for item in source:
            if type(item) is list:
                for token in item:
                    yield token

    async def tokens(self, prepared: list[Any]) -> list[list[int]]:
        got: dict[int, list[int]] = {}

        async def run(at: int) -> None:
            got[at] = [each async for each in self.stream(f"k{at}", prepared[at])]

        async with anyio.create_task_group() as tasks:
            for at in range(len(prepared)):
                tasks.start_soon(run, at)
        return [got[at] for at in range(len(prepared))]

    async def check_tokens(self, picture: Callable[..., bytes], share: float) -> None:
        """Greedy and sampled tokens are those of one process; KV is a share of its."""
        kit, alone = self.kit, self.kit.runner(max_length=4096, slots=8)
        prepared = [
            kit.prepare("Hello there."),
            kit.prepare("Write a long story about a heap. " * 3),
            kit.prepare("Chance", temperature=1.0, seed=7),
            kit.prepare("Chance", temperature=0.8, top_p=0.9, seed=8),
        ]
        if kit.images:
            prepared.append(kit.prepare("See?", picture(90, 120), picture(64, 64)))
        wanted = kit.serve(prepared, chunk=16, max_length=4096)
        assert await self.tokens(prepared) == wanted
        assert len({token for tokens in wanted for token in tokens}) > 3
        status = (await self.engine.status())["backend"]["runner"]
        assert status["kv_bytes"] == alone.cache.nbytes * share

    async def lose_streams(self, victim: psutil.Process) -> None:
        """Kill a process while two requests stream; each is told once."""
        endless = self.kit.prepare("Hello")
        endless.request["max_tokens"] = 3500
        streaming = {key: anyio.Event() for key in ("a", "b")}
        told = []

        async def wait(key: str) -> None:
            with pytest.raises(EngineLost):
                async for _ in self.stream(key, endless):
                    streaming[key].set()
            told.append(key)

        async with anyio.create_task_group() as tasks:
            for key in streaming:
                tasks.start_soon(wait, key)
            for event in streaming.values():
                await event.wait()
            victim.kill()
        assert sorted(told) == ["a", "b"]

    def processes(self) -> tuple[psutil.Process, psutil.Process]:
        """The engine process, and the other rank that it started."""
        engine = psutil.Process(self.engine.pid)
        (other,) = engine.children()
        return engine, other


async def gone(process: psutil.Process) -> None:
    """Wait for the end of a process."""
    while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
        await anyio.sleep(0.02)


def serve(kit: Kit, folder: Path) -> Served:
    """Not yet started; a text model drafts for itself."""
    argv = [*WORKER, "--checkpoint", str(kit.folder), "--tp", "2", "--chunk", "16"]
    if not kit.images:
        argv += ["--speculative", f"draft={kit.folder}"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    return Served(kit, ZmqEngine(argv, env=env, directory=folder))


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("family", "change", "share", "victim"),
    [
        ("qwen3_vl", None, 0.5, 0),
        pytest.param("llama", multi_query, 1.0, 1, marks=pytest.mark.slow),
    ],
)
async def test_two_ranks_serve_as_one_and_end_as_one(
    tmp_path: Path,
    picture: Callable[..., bytes],
    family: str,
    change: Any,
    share: float,
    victim: int,
) -> None:
    """Tokens are those of one process, also while the API process drains.

    A killed rank takes the other with it.
    """
    kit = Kit(tmp_path / "model", family, change=change)
    served = serve(kit, tmp_path)
    with anyio.fail_after(BOUND):
        async with served.engine:
            await served.engine.wait_ready()
            processes = served.processes()
            for process in processes:  # as a service manager does at a stop
                process.terminate()
            await served.check_tokens(picture, share)
            await served.lose_streams(processes[victim])
            for process in processes:
                await gone(process)
            if victim == 0:
                return
            await served.engine.wait_ready()
            engine, other = served.processes()
            assert engine.pid != processes[0].pid
            other.kill()  # between two requests, when no collective would fail
            await gone(engine)
