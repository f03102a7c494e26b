"""A real server on a real socket with a real engine process, for a whole module."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest
import pytest_asyncio

sys.path.insert(0, str(Path(__file__).parents[1] / "kit"))

from asgi_kit import serving  # noqa: E402
from http_kit import Quiet, make_engine  # noqa: E402
from lifecycle import Gate  # noqa: E402
from lifecycle_engine.app import AppSettings, create_app  # noqa: E402
from lifecycle_engine.service import Service  # noqa: E402
from lifecycle_engine.sim_processor import SimProcessor  # noqa: E402


@dataclass
class Server:
    """A running server and how to reach it."""

    port: int
    service: Service
    app: Any

    @property
    def url(self) -> str:
        """Where the SDK goes."""
        return f"http://127.0.0.1:{self.port}/v1"

    async def quiet(self) -> dict[str, Any]:
        """Wait until nothing is left of any request; returns the engine's counters."""
        async with asyncio.timeout(20):
            return await Quiet(self.service).reached()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server() -> AsyncIterator[Server]:
    """A server over the simulated engine, 600 MB of payload bytes."""
    engine = make_engine()
    app = create_app(
        engine,
        SimProcessor(),
        gate=Gate(bytes=600_000_000, max_waiting=64, max_wait=30, name="payloads"),
        settings=AppSettings(model="sim"),
    )
    async with serving(app) as port:
        await engine.wait_ready()
        yield Server(port, app.state.service, app)


@pytest_asyncio.fixture(loop_scope="module")
async def client(server: Server) -> AsyncIterator[openai.AsyncOpenAI]:
    """The real SDK, without retries."""
    async with openai.AsyncOpenAI(
        base_url=server.url, api_key="none", max_retries=0, timeout=20
    ) as client:
        yield client


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """What needs a real engine runs on asyncio here; zmq's own tests add trio."""
    return "asyncio"
