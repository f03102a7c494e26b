"""What a chat completion looks like on its way to the client."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(slots=True)
class Usage:
    """Tokens of one request so far."""

    prompt_tokens: int = 0
    completion_tokens: int = 0

    def document(self) -> dict[str, int]:
        """As the API tells it."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
        }


@dataclass(frozen=True, slots=True)
class Completion:
    """The frame around all that is said about one request.

    Attributes:
        id: ``chatcmpl-…``.
        created: Unix seconds.
        model: The served model.
        include_usage: Whether streamed chunks carry a ``usage`` field.
    """

    id: str
    created: int
    model: str
    include_usage: bool = False

    def whole(self, text: str, finish_reason: str, usage: Usage) -> dict[str, Any]:
        """The answer to a request that does not stream."""
        message = {"role": "assistant", "content": text, "refusal": None}
        choice = {
            "index": 0,
            "message": message,
            "logprobs": None,
            "finish_reason": finish_reason,
        }
        head = self._head("chat.completion")
        return {**head, "choices": [choice], "usage": usage.document()}

    def first(self) -> dict[str, Any]:
        """The first chunk: the role."""
        return self._chunk({"role": "assistant", "content": "", "refusal": None})

    def text(self, text: str) -> dict[str, Any]:
        """A chunk of text."""
        return self._chunk({"content": text})

    def last(self, finish_reason: str) -> dict[str, Any]:
        """The last chunk of the choice."""
        return self._chunk({}, finish_reason)

    def usage(self, usage: Usage) -> dict[str, Any]:
        """The chunk behind the last one, if the client asked for it."""
        head = self._head("chat.completion.chunk")
        return {**head, "choices": [], "usage": usage.document()}

    def _chunk(
        self, delta: dict[str, Any], finish_reason: str | None = None
    ) -> dict[str, Any]:
        choice = {
            "index": 0,
            "delta": delta,
            "logprobs": None,
            "finish_reason": finish_reason,
        }
        chunk = {**self._head("chat.completion.chunk"), "choices": [choice]}
        if self.include_usage:
            chunk["usage"] = None
        return chunk

    def _head(self, kind: str) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
        }
