"""One response, whatever cuts it."""

from __future__ import annotations

from typing import Any

import pytest

from lifecycle_engine.api_errors import ApiError
from lifecycle_engine.dialects.openai_dialect import OPENAI
from lifecycle_engine.dialects.replies import Reply

pytestmark = pytest.mark.anyio
ERROR = ApiError(503, "The server is shutting down", code="shutting_down")


class Cut(Exception):
    """Something ended the request."""


@pytest.fixture
def anyio_backend() -> str:
    """One is enough: nothing waits here."""
    return "asyncio"


async def test_finishes_document_that_was_cut_behind_its_head() -> None:
    """A head that declares a length is followed by that body, not by an error."""
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)
        if len(sent) == 1:
            raise Cut

    reply = Reply(send, OPENAI)
    with pytest.raises(Cut):
        await reply.json(200, {"a": 1})
    await reply.error(ERROR)
    head, body = sent
    assert dict(head["headers"])[b"content-length"] == b"%d" % len(body["body"])
    assert body["body"] == b'{"a":1}'


async def test_ends_stream_with_error() -> None:
    """What has begun as events ends with one more."""
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    reply = Reply(send, OPENAI)
    await reply.event({"a": 1})
    await reply.error(ERROR)
    assert b"shutting_down" in sent[-1]["body"]
    assert not sent[-1]["more_body"]
