"""OpenAI's responses, whole or as typed events."""

from __future__ import annotations

from lifecycle_engine.incoming import Incoming

from .dialect import Dialect, named_event
from .openai_dialect import OPENAI
from .openai_wire import Usage
from .replies import Reply
from .responses_schema import parse_responses
from .responses_wire import ResponseText
from .texts import Piece


class ResponseAnswer:
    """The answer to one request.

    Args:
        reply: The response.
        text: What it tells.
        stream: Whether it is sent as it comes.
    """

    def __init__(self, reply: Reply, text: ResponseText, *, stream: bool) -> None:
        self._reply, self._text, self._stream = reply, text, stream
        self._begun = False

    async def piece(self, index: int, piece: Piece) -> None:
        """Take a piece; the first one begins the stream.

        Cancellation:
            The response may be cut.
        """
        del index  # there is one answer
        self._text.add(piece)
        if self._stream:
            await self._begin()
            if piece.text or piece.logprobs:
                await self._reply.event(self._text.delta(piece))

    async def finished(self, index: int, finish_reason: str, stop: str | None) -> None:
        """Take the end."""
        del index, stop  # this API has no stop strings
        self._text.finish_reason = finish_reason

    async def done(self) -> None:
        """Answer, or end the stream.

        Cancellation:
            As for `piece`.
        """
        if not self._stream:
            await self._reply.json(200, self._text.whole())
            return
        await self._begin()
        await self._reply.done(*self._text.end())

    async def _begin(self) -> None:
        if self._begun:
            return
        self._begun = True
        self._reply.failure = self._text.failure
        await self._reply.event(*self._text.begin())


def _answer(
    reply: Reply, incoming: Incoming, model: str, usage: Usage
) -> ResponseAnswer:
    text = ResponseText(str(reply.request_id), model, usage, incoming.echo)
    return ResponseAnswer(reply, text, stream=incoming.stream)


RESPONSES = Dialect(
    parse=parse_responses,
    answer=_answer,
    frame=named_event,
    end=b"",
    error=OPENAI.error,
    id_header=b"x-request-id",
)
