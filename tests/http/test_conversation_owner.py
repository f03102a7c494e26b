"""Conversations belong to the client that the server knows, whatever names are sent."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from http_kit import answer_to, make_engine, running, user

from lifecycle_asgi import ClientIdentity
from lifecycle_engine import AppSettings

pytestmark = pytest.mark.asyncio
MINE, YOURS = b"authorization: Bearer mine", b"authorization: Bearer yours"


class Talk:
    """Turns of one server's conversations, and what was cached of them."""

    def __init__(self, server: Any) -> None:
        self._server = server

    async def cached(self, text: str, *headers: bytes, **more: Any) -> int:
        """Tokens that a turn did not have to read."""
        named = {"user": "me", "prompt_cache_key": "talk"} | more
        ask = {"model": "sim", "messages": user(text), "max_tokens": 5, **named}
        body = json.dumps(ask).encode()
        status, _, document = await answer_to(self._server.port, body, *headers)
        assert status == 200
        await self._server.quiet()
        details = document["usage"].get("prompt_tokens_details") or {}
        return int(details.get("cached_tokens") or 0)


async def test_another_client_neither_hits_nor_evicts_by_name() -> None:
    """With the same words of user, conversation and prompt, each has its own slot."""
    settings = AppSettings(model="sim", client=ClientIdentity(["mine", "yours"]))
    async with asyncio.timeout(120), running(settings=settings) as server:
        talk = Talk(server)
        assert await talk.cached("a secret", MINE) == 0
        assert await talk.cached("a secret", YOURS) == 0
        assert await talk.cached("a secret", b"authorization: Bearer made up") == 0
        assert (
            await talk.cached("a secret") > 0
        )  # as of an address, like the one before
        for text in ("something else", "and more", "a secret"):
            await talk.cached(text, YOURS)
        assert await talk.cached("a secret and more", MINE) >= len("a secret")


async def test_a_client_that_floods_evicts_what_was_left_for_longest() -> None:
    """Retained slots are spare capacity: any request may use them."""
    settings = AppSettings(model="sim", client=ClientIdentity(["mine", "yours"]))
    engine = make_engine("--max-batch=2", "--slots=2")
    async with (
        asyncio.timeout(120),
        running(engine=engine, settings=settings) as server,
    ):
        talk = Talk(server)
        assert await talk.cached("a secret", MINE) == 0
        for number in range(2):
            await talk.cached("x", YOURS, prompt_cache_key=f"talk-{number}")
        assert await talk.cached("a secret", MINE) == 0


async def test_users_of_one_client_have_conversations_of_their_own() -> None:
    """As does the same user of the same client, again and again."""
    async with asyncio.timeout(120), running() as server:
        talk = Talk(server)
        assert await talk.cached("a secret", user="me") == 0
        assert await talk.cached("a secret", user="you") == 0
        assert await talk.cached("a secret", user="me") > 0


async def test_names_of_shares_are_distinct_and_say_nothing() -> None:
    """No pair of client and user is another pair's name, nor readable in it."""
    identity = ClientIdentity()
    pairs = [(b"a", "bc"), (b"ab", "c"), (b"", "abc"), (b"abc", ""), (b"", "")]
    names = {identity.tenant_id(client, named) for client, named in pairs}
    assert len(names) == len(pairs)
    assert {len(name) for name in names} == {32}
    assert identity.tenant_id(b"a", "bc") == identity.tenant_id(b"a", "bc")
    assert ClientIdentity().tenant_id(b"a", "bc") not in names
    assert identity.tenant_id(b"a", "\ud800")
