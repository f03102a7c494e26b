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


def cut_at(number: int, sent: list[Any]) -> Any:
    """A ``send`` that waits before its message of that number, and is cut there."""

    async def send(message: Any) -> None:
        nonlocal number
        number -= 1
        if number == 0:
            raise Cut
        sent.append(message)

    return send


async def test_finishes_document_that_was_cut_behind_its_head() -> None:
    """A head that declares a length is followed by that body, not by an error."""
    sent: list[Any] = []
    reply = Reply(cut_at(2, sent), OPENAI)
    with pytest.raises(Cut):
        await reply.json(200, {"a": 1})
    await reply.error(ERROR)
    head, body = sent
    assert dict(head["headers"])[b"content-length"] == b"%d" % len(body["body"])
    assert body["body"] == b'{"a":1}'


@pytest.mark.parametrize("way", ["json", "event", "done", "error"])
async def test_answers_with_an_error_what_was_cut_before_its_head(way: str) -> None:
    """A head that was not sent is no beginning: the error brings one of its own."""
    sent: list[Any] = []
    reply = Reply(cut_at(1, sent), OPENAI)
    answers = {
        "json": lambda: reply.json(200, {"a": 1}),
        "event": lambda: reply.event({"a": 1}),
        "done": lambda: reply.done({"a": 1}),
        "error": lambda: reply.error(ERROR),
    }
    with pytest.raises(Cut):
        await answers[way]()
    await reply.error(ERROR)
    head, body = sent
    assert (head["type"], head["status"]) == ("http.response.start", 503)
    assert b"shutting_down" in body["body"]


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
