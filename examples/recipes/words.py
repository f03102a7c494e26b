"""Shared by the recipes: a stream of words with a session."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio

from lifecycle import Session, SessionRegistry, managed

sessions = SessionRegistry()  # made here, entered where the server starts


@asynccontextmanager
async def lifespan(_app: Any) -> AsyncIterator[None]:
    """Run the registry while the server runs."""
    async with sessions:
        yield


@managed(sessions=sessions, key=lambda _request: secrets.token_hex(8))
async def words(request: Any, session: Session) -> AsyncIterator[bytes]:
    """Say one word every ten milliseconds, for a minute."""
    request.attach(session)  # a disconnect is "client_gone"
    for number in range(6000):
        yield f"word {number}\n".encode()
        await anyio.sleep(0.01)
