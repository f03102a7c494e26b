"""What all tests of the core share: both event loops, virtual time, no collector."""

import gc
import logging
from collections.abc import Iterator

import pytest
import trio.testing


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> object:
    """Each test runs on asyncio and on trio; ``virtual`` is trio without waiting."""
    if request.param == "virtual":
        return "trio", {"clock": trio.testing.MockClock(autojump_threshold=0)}
    return request.param


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
