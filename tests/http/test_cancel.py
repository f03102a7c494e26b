"""Cancel the request at every await of its path, against a real engine process.

The application is called in process, as a server would; gates, threads, ZeroMQ and
the engine are real. One server serves all points of a kind, so that what one
cancelled request left behind would be seen by all that follow.
"""

from __future__ import annotations

import anyio
import pytest
from asgi_kit import KINDS, Cancelled, ScriptedServer
from cancel_kit import World
from descriptors import descriptors_before, open_descriptors
from http_kit import make_engine

from lifecycle import Gate
from lifecycle_engine import AppSettings, SimProcessor, create_app


async def every_point(kind: str, when: str, *, stream: bool, queued: bool) -> int:
    """Go through all points in one world; returns how many there were."""
    gate = Gate(bytes=10**9, slots=1, name="payloads")
    app = create_app(
        make_engine(),
        SimProcessor(),
        gate=gate,
        settings=AppSettings(model="sim"),
    )
    async with app.router.lifespan_context(app), anyio.create_task_group() as tasks:
        world = World(app, gate, tasks)
        await world.service.engine.wait_ready()
        warm = Cancelled(0, kind, when)
        await world.once(warm, stream=stream, queued=queued)
        descriptors = descriptors_before()
        for at in range(1, 500):
            run = Cancelled(at, kind, when)
            server, _ = await world.once(run, stream=stream, queued=queued)
            check(run, server, stream=stream)
            assert open_descriptors() == descriptors
            if not run.hit:
                return at - 1
    raise AssertionError("no end of suspension points")


def check(run: Cancelled, server: ScriptedServer, *, stream: bool) -> None:
    """The cancellation came out, or the response was whole before it could."""
    where = f"{run.kind} {run.when} point {run.at}"
    if run.kind == "leave":
        assert not run.propagated, where
        assert server.status in (200, 499) or server.offered, where
    elif run.kind == "native":
        assert run.propagated == run.hit, where
    else:
        assert run.propagated or server.complete.is_set(), where
    if not run.hit:
        assert server.status == 200, server.body
        end = b"data: [DONE]\n\n" if stream else b"}"
        assert server.body.endswith(end)


@pytest.mark.parametrize("queued", [False, True], ids=["free", "queued"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(
    ("backend", "kind", "when"),
    [*KINDS, ("asyncio", "leave", "early"), ("trio", "leave", "early")],
)
def test_leaves_nothing_wherever_it_is_cancelled(
    backend: str, kind: str, when: str, stream: bool, queued: bool
) -> None:
    """No lease, session, payload, task, engine session or descriptor is left.

    END is sent exactly once and never before START, and a cancellation reaches its
    caller (peers-17, faults 1 to 9).
    """

    async def main() -> int:
        with anyio.fail_after(800):
            return await every_point(kind, when, stream=stream, queued=queued)

    assert anyio.run(main, backend=backend) >= 6
