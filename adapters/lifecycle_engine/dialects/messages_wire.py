"""What Anthropic's messages look like on their way to the client."""

from __future__ import annotations

from typing import Any

from lifecycle_engine.api_errors import ApiError
from lifecycle_engine.incoming import Incoming

from .dialect import Dialect, Document, named_event
from .messages_schema import parse_messages
from .openai_wire import Usage
from .replies import Reply
from .texts import Piece

# Only what the SDK's own model of an error knows; statuses say the rest.
_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    504: "timeout_error",
}
# What the SDK knows as "overloaded"; 503 is any other failure to it.
_OVERLOADED = 529


class Message:
    """The answer to one request, whole or as events.

    Args:
        reply: The response.
        model: The served model.
        usage: Counted by whoever reads the tokens.
        stream: Whether the answer is sent as it comes.
    """

    def __init__(self, reply: Reply, model: str, usage: Usage, *, stream: bool) -> None:
        self._reply, self._usage, self._stream = reply, usage, stream
        self._model = model
        self._text: list[str] = []
        self._reason: str | None = None
        self._stop: str | None = None
        self._begun = False

    async def piece(self, index: int, piece: Piece) -> None:
        """Take a piece; the first one begins the stream.

        Cancellation:
            The response may be cut.
        """
        del index  # there is one answer
        if not self._stream:
            self._text.append(piece.text)
            return
        await self._begin()
        if piece.text:
            delta = {"type": "text_delta", "text": piece.text}
            await self._event("content_block_delta", index=0, delta=delta)

    async def finished(self, index: int, finish_reason: str, stop: str | None) -> None:
        """Take the end.

        Cancellation:
            As for `piece`.
        """
        del index
        self._reason = "max_tokens" if finish_reason == "length" else "end_turn"
        if stop is not None:
            self._reason, self._stop = "stop_sequence", stop
        if self._stream:
            await self._begin()
            await self._event("content_block_stop", index=0)

    async def done(self) -> None:
        """Answer, or end the stream.

        Cancellation:
            As for `piece`.
        """
        if not self._stream:
            content = [{"type": "text", "text": "".join(self._text)}]
            await self._reply.json(200, self._message(content))
            return
        delta = {"stop_reason": self._reason, "stop_sequence": self._stop}
        usage = {"output_tokens": self._usage.completion_tokens}
        await self._event("message_delta", delta=delta, usage=usage)
        await self._event("message_stop")
        await self._reply.done()

    async def _begin(self) -> None:
        if self._begun:
            return
        self._begun = True
        await self._event("message_start", message=self._message([]))
        block = {"type": "text", "text": ""}
        await self._event("content_block_start", index=0, content_block=block)

    async def _event(self, kind: str, **fields: Any) -> None:
        await self._reply.event({"type": kind, **fields})

    def _message(self, content: list[Document]) -> Document:
        usage = self._usage
        return {
            "id": f"msg_{self._reply.request_id}",
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
            "stop_reason": self._reason,
            "stop_sequence": self._stop,
            "usage": {
                # This API counts what was cached beside the input, not in it.
                "input_tokens": usage.prompt_tokens - usage.cached_tokens,
                "cache_read_input_tokens": usage.cached_tokens,
                "output_tokens": usage.completion_tokens,
            },
        }


def _answer(reply: Reply, incoming: Incoming, model: str, usage: Usage) -> Message:
    return Message(reply, model, usage, stream=incoming.stream)


def _error(error: ApiError, request_id: str | None) -> tuple[int, Document]:
    status = _OVERLOADED if error.status == 503 else error.status
    kind = "invalid_request_error" if status < 500 else "api_error"
    kind = "overloaded_error" if status == _OVERLOADED else _KINDS.get(status, kind)
    told = {"type": kind, "message": error.message}
    return status, {"type": "error", "error": told, "request_id": request_id}


ANTHROPIC = Dialect(
    parse=parse_messages,
    answer=_answer,
    frame=named_event,
    end=b"",
    error=_error,
    id_header=b"request-id",
)
