"""An engine in a thread, in a process by either transport, on Ray: one backend."""

from __future__ import annotations

import gc
import importlib.util
import os
import sys
import tempfile
import warnings
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import anyio
import pytest

import lifecycle_zmq
from lifecycle_zmq import Restarts, ThreadEngine, ZmqEngine

BOUND = 120.0
SCRIPTS = Path(__file__).parents[1] / "lifecycle_zmq"
KINDS = ("thread", "pair", "ipc", "ray", "generators")
# `make test` has trio with an engine in a thread and in a process, and every kind.
IN_PROVE = {("ipc", "trio"), ("generators", "trio")}
# What goes through other code on trio than on asyncio; an actor takes a second each.
RAY_ON_TRIO = {
    "test_streams_items_in_order_and_ends",
    "test_cancel_during_start_leaves_nothing",
    "test_death_fails_each_stream_once_and_a_new_engine_starts",
}


# The cluster that runs now, and what ends it.
_RUNNING: list[tuple[ExitStack, Any]] = []


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run each test of the protocol on every kind of engine, and on both loops."""
    if "make_engine" in metafunc.fixturenames:
        name = metafunc.function.__name__
        pairs = [
            pytest.param(
                (kind, backend),
                id=f"{kind}-{backend}",
                marks=[pytest.mark.slow] if (kind, backend) in IN_PROVE else [],
            )
            for kind in KINDS
            for backend in ("asyncio", "trio")
            if (kind, backend) != ("ray", "trio") or name in RAY_ON_TRIO
        ]
        metafunc.parametrize("engine_on", pairs, indirect=True)


@pytest.fixture
def engine_on(request: pytest.FixtureRequest) -> tuple[str, str]:
    """The kind of engine, and the event loop."""
    pair: tuple[str, str] = getattr(request, "param", ("ray", "asyncio"))
    return pair


@pytest.fixture
def anyio_backend(engine_on: tuple[str, str]) -> str:
    """The event loop."""
    return engine_on[1]


def load(name: str) -> ModuleType:
    """Import a script of the tests of the link."""
    spec = importlib.util.spec_from_file_location(name, SCRIPTS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def scripted() -> ModuleType:
    """The scripted engine, as a module."""
    return load("scripted_engine")


@pytest.fixture(scope="session")
def disconnects() -> ModuleType:
    """Clients that leave at random moments."""
    return load("disconnects")


@pytest.fixture
def cluster(scripted: ModuleType) -> Any:
    """A Ray of one node, to which a test may add others; one until others' tests run.

    No fixture of the session: a worker may run a test of another folder between two
    files of this one, before which Ray ends, and the second file needs a new one.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ray = pytest.importorskip("ray", reason="Ray is not installed")
    if not _RUNNING:
        with ExitStack() as stack, warnings.catch_warnings():
            # Earlier releases give advice at the start, and leave files open.
            warnings.simplefilter("ignore")
            made = start_ray(stack)
            gc.collect()
            ray.cloudpickle.register_pickle_by_value(scripted)
            _RUNNING.append((stack.pop_all(), made))
    return _RUNNING[0][1]


def start_ray(stack: ExitStack) -> Any:
    """Start a cluster of one node and join it; `stack` ends both."""
    import ray
    from ray.cluster_utils import Cluster

    path = os.pathsep.join(
        {
            str(Path(lifecycle_zmq.__file__).parents[1]),
            str(Path(sys.modules["lifecycle"].__file__ or "").parents[1]),
        }
    )
    environment = pytest.MonkeyPatch()
    stack.callback(environment.undo)
    environment.setenv("PYTHONPATH", path)
    # A busy machine takes its time.
    environment.setenv("RAY_raylet_start_wait_time_s", "120")
    # Its sockets' names must be short, which those of pytest's folders are not.
    folder = tempfile.TemporaryDirectory(prefix="lc-ray-", ignore_cleanup_errors=True)
    # Also for the file with the cluster's address, by which other processes join it.
    environment.setenv("RAY_TMPDIR", stack.enter_context(folder))
    made = Cluster(
        initialize_head=True,
        head_node_args={
            "num_cpus": 8,
            "object_store_memory": 128 * 2**20,
            "include_dashboard": False,
            # A node that is killed is known to be dead in twenty seconds; one
            # that a busy machine keeps waiting is not.
            "_system_config": {
                "health_check_initial_delay_ms": 0,
                "health_check_period_ms": 500,
                "health_check_failure_threshold": 40,
            },
        },
    )
    stack.callback(made.shutdown)
    ray.init(address=made.address, log_to_driver=False, logging_level="ERROR")
    stack.callback(ray.shutdown)
    return made


def end_ray() -> None:
    """End the cluster, if one runs."""
    while _RUNNING:
        _RUNNING.pop()[0].close()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """End Ray with the last test of this folder: others measure times."""
    if nextitem is None or nextitem.path.parent != item.path.parent:
        end_ray()


def pytest_sessionfinish() -> None:
    """End Ray after a run that stopped at a failure, too."""
    end_ray()


@pytest.fixture
def quick() -> Callable[[], Restarts]:
    """Restarts that a test need not wait for."""
    return partial(Restarts, backoff=0.05)


@pytest.fixture
def make_ray(
    request: pytest.FixtureRequest, scripted: ModuleType, quick: Callable[[], Restarts]
) -> Callable[..., Any]:
    """Engines on Ray; `placement` are options of `Placement`."""
    request.getfixturevalue("cluster")
    from lifecycle_ray import Placement, RayEngine

    def make(
        *, placement: dict[str, Any] | None = None, step: float = 0.001, **options: Any
    ) -> Any:
        options.setdefault("factory", partial(scripted.ScriptedBackend, step))
        options.setdefault("restarts", quick)
        return RayEngine(
            placement=Placement(**{"num_cpus": 0.25} | (placement or {})), **options
        )

    return make


@pytest.fixture
def make_engine(
    request: pytest.FixtureRequest,
    engine_on: tuple[str, str],
    tmp_path: Path,
    scripted: ModuleType,
    quick: Callable[[], Restarts],
) -> Callable[..., Any]:
    """An engine of the kind that the test runs on, with these options."""
    kind = engine_on[0]
    if kind == "ray":
        return request.getfixturevalue("make_ray")

    def make_thread(**options: Any) -> Any:
        backend = partial(scripted.ScriptedBackend, options.pop("step", 0.001))
        return ThreadEngine(backend, restarts=quick(), **options)

    generators = kind == "generators"

    def make_zmq(**options: Any) -> Any:
        script = "scripted_generators.py" if generators else "scripted_engine.py"
        argv = [sys.executable, str(SCRIPTS / script)]
        for name, value in options.items():
            argv += [f"--{name}", str(value)]
        path = os.pathsep.join(
            {
                str(Path(lifecycle_zmq.__file__).parents[1]),
                str(Path(sys.modules["lifecycle"].__file__ or "").parents[1]),
            }
        )
        env = {**os.environ, "PYTHONPATH": path, "GENERATORS": engine_on[1]}
        transport: Any = "pair" if generators else kind
        return ZmqEngine(
            argv, env=env, transport=transport, directory=tmp_path, backoff=0.05
        )

    return make_thread if kind == "thread" else make_zmq


@pytest.fixture
def eventually() -> Callable[..., Any]:
    """Wait for a condition, which may be a coroutine function, within a bound."""

    async def wait(condition: Callable[[], Any], *, seconds: float = BOUND) -> None:
        with anyio.fail_after(seconds):
            while True:
                found = condition()
                if hasattr(found, "__await__"):
                    with suppress(lifecycle_zmq.ProtocolError):
                        found = await found
                if found:
                    return
                await anyio.sleep(0.005)

    return wait
