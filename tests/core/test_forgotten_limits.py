"""A gate without limits, and a request without bytes, warn once."""

import inspect
import warnings
from collections.abc import AsyncGenerator

import pytest

from lifecycle import Gate, managed

pytestmark = pytest.mark.anyio


def test_warns_of_a_gate_without_limit() -> None:
    """Limits that are named as None are meant."""
    with pytest.warns(RuntimeWarning, match="has no limit") as caught:
        gate = Gate(name="all")
    assert caught[0].filename == __file__
    assert gate.statistics().slots is None
    Gate(slots=None)
    Gate(bytes=None, slots=None)


async def test_warns_once_of_a_request_without_bytes() -> None:
    """At a gate that limits bytes alone, and not where the bytes are named."""
    assert "bytes: 'int' = 0" in str(inspect.signature(Gate.admit))
    gate = Gate(bytes=10)
    gate.try_admit(bytes=0).release()
    (await gate.admit(bytes=0)).release()
    with pytest.warns(RuntimeWarning, match="named no bytes at gate 'gate'") as caught:
        (await gate.admit()).release()
    assert caught[0].filename == __file__
    (await gate.admit()).release()
    gate.try_admit().release()
    other = Gate(bytes=10)
    with pytest.warns(RuntimeWarning, match="named no bytes") as caught:
        other.try_admit().release()
    assert caught[0].filename == __file__
    assert gate.statistics().bytes_in_use == 0


async def test_warns_of_no_request_that_costs_slots() -> None:
    """A gate of slots, or of both, admits requests without bytes quietly."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for gate in (Gate(slots=1), Gate(slots=1, bytes=1)):
            (await gate.admit()).release()
            gate.try_admit().release()


async def test_warns_once_of_a_decorated_function_without_cost() -> None:
    """The decorator warns of forgotten bytes, and not of a cost of 0."""

    async def numbers() -> AsyncGenerator[int, None]:
        yield 1

    gate = Gate(bytes=10)
    stream = managed(gate=gate)(numbers)
    with pytest.warns(RuntimeWarning, match="named no bytes at gate 'gate'"):
        assert [item async for item in stream()] == [1]
    assert [item async for item in stream()] == [1]
    gate = Gate(bytes=10)
    for meant in (managed(gate=gate, cost=0), managed(gate=gate, cost=lambda: 0)):
        assert [item async for item in meant(numbers)()] == [1]


async def test_warns_by_the_limits_that_there_are() -> None:
    """A resized gate may limit bytes alone from then on, or no longer."""
    gate = Gate(bytes=10)
    gate.resize(bytes=None, slots=2)
    (await gate.admit()).release()
    gate.resize(slots=None)
    gate.try_admit().release()
    gate.resize(bytes=10)
    with pytest.warns(RuntimeWarning, match="named no bytes"):
        gate.try_admit().release()
    gate.resize(bytes=9)
    gate.try_admit().release()
    gate.resize(slots=1)
    gate.try_admit().release()
    gate = Gate(slots=2, bytes=10)
    gate.resize(bytes=9)
    gate.try_admit().release()
