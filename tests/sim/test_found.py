"""What the simulation found in the core, as the smallest program that shows it."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from functools import partial
from typing import Any
from weakref import ref

import anyio
import pytest

from lifecycle import CostTooLarge, Gate, Lease, Session, SessionRegistry, managed
from lifecycle.testing import Script, ScriptedEngine, simulate, simulate_trio


@pytest.mark.parametrize("run", [simulate, simulate_trio])
@pytest.mark.parametrize("style", ["two_phase", "generator"])
def test_keeps_the_lease_of_a_managed_start_after_its_consumer_left(run, style):
    """A start that goes on alone keeps its bytes until it settles (fault-3, peers-8).

    They were released with the consumer, while the payload was still on its way
    to the engine: leaving clients could fill the memory that the gate guards.
    """
    engine = ScriptedEngine(Script(start_delay=1.0, item_delay=math.inf))
    gate = Gate(bytes=10)

    async def main() -> None:
        async with SessionRegistry() as sessions:
            decorate = managed(
                gate=gate, cost=7, sessions=sessions, key=lambda _: "a", scrub="image"
            )

            def start(session: Session, image: Any) -> Any:
                return session.start(
                    partial(engine.start, session.key, image),
                    end=lambda _: engine.end(session.key),
                )

            async def two_phase(image: Any, *, session: Session) -> Any:
                return await start(session, image)

            async def generator(image: Any, *, session: Session) -> AsyncIterator[Any]:
                async for item in await start(session, image):
                    yield item

            function = decorate(two_phase if style == "two_phase" else generator)
            with anyio.move_on_after(0.5):
                async with function(b"pixels") as stream:
                    await anext(stream)
            assert engine.live, "the start goes on"
            assert gate.statistics().bytes_in_use == 7
            await anyio.sleep(1.0)
            assert gate.statistics().bytes_in_use == 0
            assert not engine.live

    run(main)


@pytest.mark.parametrize("run", [simulate, simulate_trio])
def test_keeps_the_lease_that_a_managed_function_passed_to_its_start(run):
    """A lease that was given to `Session.start` is the start's alone (fault-3)."""
    engine = ScriptedEngine(Script(start_delay=1.0))
    gate = Gate(bytes=10)

    async def main() -> None:
        async with SessionRegistry() as sessions:

            @managed(gate=gate, cost=7, sessions=sessions, key=lambda: "a")
            async def function(*, lease: Lease, session: Session) -> Any:
                return await session.start(
                    partial(engine.start, session.key),
                    end=lambda _: engine.end(session.key),
                    lease=lease,
                )

            with anyio.move_on_after(0.5):
                async with function() as stream:
                    await anext(stream)
            assert gate.statistics().bytes_in_use == 7
            await anyio.sleep(1.0)
            assert gate.statistics().bytes_in_use == 0

    run(main)


class Blob:
    """A payload that can be watched."""


@pytest.mark.parametrize("run", [simulate, simulate_trio])
def test_forgets_the_arguments_of_a_managed_call_that_was_refused(run):
    """A refusal that is kept does not keep what was asked for (peers-49).

    Its traceback named the frame that had waited for admission, and that frame
    still had the call in a local variable.
    """
    gate = Gate(bytes=10)

    @managed(gate=gate, cost=11)
    async def function(image: object) -> AsyncIterator[object]:
        yield image

    async def main() -> None:
        image = Blob()
        seen = ref(image)
        stream = function(image)
        del image
        with pytest.raises(CostTooLarge) as refused:
            async with stream:
                await anext(stream)
        assert refused.value.__traceback__ is not None
        assert seen() is None

    run(main)
