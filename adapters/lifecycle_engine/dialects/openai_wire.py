"""What a chat completion looks like on its way to the client."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(slots=True)
class Usage:
    """Tokens of one request so far.

    Attributes:
        prompt_tokens: Of the prompt, once, however many answers it gets.
        completion_tokens: Of all answers.
        cached_tokens: Those of the prompt that the engine still held from an earlier
            turn of the conversation, and so did not read again.
    """

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0

    def document(self) -> dict[str, Any]:
        """As the API tells it."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
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

    def whole(
        self,
        choices: Sequence[tuple[str, str, list[dict[str, Any]] | None]],
        usage: Usage,
    ) -> dict[str, Any]:
        """The answer to a request that does not stream.

        Args:
            choices: Text, finish reason and log probabilities of each.
            usage: Of all together.
        """
        documents = [
            {
                "index": index,
                "message": {"role": "assistant", "content": text, "refusal": None},
                "logprobs": _logprobs(logprobs),
                "finish_reason": reason,
            }
            for index, (text, reason, logprobs) in enumerate(choices)
        ]
        head = self._head("chat.completion")
        return {**head, "choices": documents, "usage": usage.document()}

    def first(self, index: int) -> dict[str, Any]:
        """The first chunk of a choice: the role."""
        delta = {"role": "assistant", "content": "", "refusal": None}
        return self._chunk(index, delta)

    def text(
        self, index: int, text: str, logprobs: list[dict[str, Any]] | None = None
    ) -> dict[str, Any]:
        """A chunk of text."""
        return self._chunk(index, {"content": text}, logprobs=logprobs)

    def last(self, index: int, finish_reason: str) -> dict[str, Any]:
        """The last chunk of a choice."""
        return self._chunk(index, {}, finish_reason)

    def usage(self, usage: Usage) -> dict[str, Any]:
        """The chunk behind the last one, if the client asked for it."""
        head = self._head("chat.completion.chunk")
        return {**head, "choices": [], "usage": usage.document()}

    def _chunk(
        self,
        index: int,
        delta: dict[str, Any],
        finish_reason: str | None = None,
        logprobs: list[dict[str, Any]] | None = None,
    ) -> dict[str, Any]:
        choice = {
            "index": index,
            "delta": delta,
            "logprobs": _logprobs(logprobs),
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


def _logprobs(content: list[dict[str, Any]] | None) -> dict[str, Any] | None:
    return None if content is None else {"content": content, "refusal": None}
