"""A real server on a real socket with a real engine process, for a whole module."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest_asyncio
from http_kit import Server, running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server() -> AsyncIterator[Server]:
    """A server over the simulated engine, with 600 MB for payloads."""
    async with running() as server:
        yield server


@pytest_asyncio.fixture(loop_scope="module")
async def client(server: Server) -> AsyncIterator[Any]:
    """The real SDK, without retries."""
    async with server.client() as client:
        yield client
