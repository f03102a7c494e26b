"""What all tests of the core share: the event loops, virtual time, no collector."""

import asyncio
import gc
import importlib.util
import logging
import sys
from collections.abc import Iterator

import pytest
import trio.testing

# Whatever schedules tasks of its own kind; the rest sees no difference.
ON_EVERY_LOOP = {
    "test_admission",
    "test_decorators",
    "test_gate",
    "test_generator_sessions",
    "test_in_thread",
    "test_init_done",
    "test_lease",
    "test_plain_readers",
    "test_sessions",
    "test_start",
    "test_stream",
}
LOOPS = ["asyncio", "trio"]
if importlib.util.find_spec("uvloop"):
    LOOPS.append("uvloop")
if sys.version_info >= (3, 12):
    LOOPS.append("eager")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run what depends on the loop on uvloop and with eager tasks as well."""
    chosen = any(
        "anyio_backend" in str(mark.args[0])
        for mark in metafunc.definition.iter_markers("parametrize")
    )
    module = metafunc.module.__name__.rpartition(".")[2]
    if "anyio_backend" in metafunc.fixturenames and not chosen:
        loops = LOOPS if module in ON_EVERY_LOOP else LOOPS[:2]
        metafunc.parametrize("anyio_backend", loops, indirect=True)


def eager_loop() -> asyncio.AbstractEventLoop:
    """Return a loop whose tasks run at once, up to where they first wait."""
    loop = asyncio.new_event_loop()
    loop.set_task_factory(asyncio.eager_task_factory)  # type: ignore[attr-defined]
    return loop


@pytest.fixture
def anyio_backend(request: pytest.FixtureRequest) -> object:
    """Each test runs on its event loops; ``virtual`` is trio without waiting."""
    options: dict[str, object] = {
        "virtual": ("trio", {"clock": trio.testing.MockClock(autojump_threshold=0)}),
        "uvloop": ("asyncio", {"use_uvloop": True}),
        "eager": ("asyncio", {"loop_factory": eager_loop}),
    }
    return options.get(request.param, request.param)


@pytest.fixture
def no_collector() -> Iterator[None]:
    """Reference counts alone must do; the collector comes too late."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.collect()


@pytest.fixture(autouse=True)
def _no_quiet_errors(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """An error that a loop or a library only logs fails the test as well."""
    yield
    expected = {"lifecycle"}
    logged = [
        record.getMessage()
        for when in ("setup", "call")
        for record in caplog.get_records(when)
        if record.levelno >= logging.ERROR and record.name not in expected
    ]
    assert not logged, logged
