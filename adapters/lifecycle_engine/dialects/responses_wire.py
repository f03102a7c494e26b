"""What a response of OpenAI's newer API looks like on its way to the client."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lifecycle_engine.api_errors import ApiError

from .dialect import Document
from .openai_wire import Usage
from .texts import Piece

_ITEM = {"item_id": "", "output_index": 0, "content_index": 0}


@dataclass(slots=True)
class ResponseText:
    """One response: what was said so far, and the documents that tell of it.

    It knows neither the request nor the connection, so that it may live as long as
    the client takes to read.

    Attributes:
        request_id: What the ids of the response and of its message are made of.
        model: The served model.
        usage: Counted by whoever reads the tokens.
        echo: Fields that repeat the request.
        created: Unix seconds.
        finish_reason: Known at the end.
        events: How many events were made, which numbers them.
    """

    request_id: str
    model: str
    usage: Usage
    echo: Mapping[str, Any]
    created: int = field(default_factory=lambda: int(time.time()))
    finish_reason: str | None = None
    events: int = 0
    _pieces: list[Piece] = field(default_factory=list, repr=False)

    def add(self, piece: Piece) -> None:
        """Take a piece of the text."""
        self._pieces.append(piece)

    def whole(self) -> Document:
        """The response when it is complete."""
        short = self.finish_reason == "length"
        status = "incomplete" if short else "completed"
        done = {} if short else {"completed_at": int(time.time())}
        why = {"reason": "max_output_tokens"} if short else None
        return {
            **self._response(status, [self._message(status)]),
            "incomplete_details": why,
            "usage": self._tokens(),
            **done,
        }

    def begin(self) -> list[Document]:
        """The events before the first piece."""
        response = self._response("in_progress", [])
        item = {**self._message("in_progress"), "content": []}
        return [
            self._event("response.created", response=response),
            self._event("response.in_progress", response=response),
            self._event("response.output_item.added", output_index=0, item=item),
            self._in_part("response.content_part.added", part=_part("", [])),
        ]

    def delta(self, piece: Piece) -> Document:
        """The event of one piece."""
        told = [_bare(each) for each in piece.logprobs or ()]
        kind = "response.output_text.delta"
        return self._in_part(kind, delta=piece.text, logprobs=told)

    def end(self) -> list[Document]:
        """The events behind the last piece."""
        whole = self.whole()
        item = whole["output"][0]
        part = item["content"][0]
        told = [_bare(each) for each in part["logprobs"]]
        kind = "response.output_text.done"
        return [
            self._in_part(kind, text=part["text"], logprobs=told),
            self._in_part("response.content_part.done", part=part),
            self._event("response.output_item.done", output_index=0, item=item),
            self._event(f"response.{whole['status']}", response=whole),
        ]

    def failure(self, error: ApiError) -> list[Document]:
        """The events that end a stream by an error.

        The first is what the API says. The SDK hands it out like any other event, so
        a second one follows, which it raises: that has the error as an object, too.
        """
        said = {"code": "server_error", "message": error.message}
        response = {
            **self._response("failed", [self._message("incomplete")]),
            "error": said,
            "usage": self._tokens(),
        }
        failed = self._event("response.failed", response=response)
        told = {name: error.fields[name] for name in ("code", "message", "param")}
        return [failed, self._event("error", **told, error=error.fields)]

    def _event(self, kind: str, **fields: Any) -> Document:
        number, self.events = self.events, self.events + 1
        return {"type": kind, "sequence_number": number, **fields}

    def _in_part(self, kind: str, **fields: Any) -> Document:
        return self._event(kind, **{**_ITEM, "item_id": self._item_id}, **fields)

    @property
    def _item_id(self) -> str:
        return f"msg_{self.request_id}"

    def _message(self, status: str) -> Document:
        text = "".join(piece.text for piece in self._pieces)
        told = [each for piece in self._pieces for each in piece.logprobs or ()]
        return {
            "id": self._item_id,
            "type": "message",
            "role": "assistant",
            "status": status,
            "content": [_part(text, told)],
        }

    def _response(self, status: str, output: list[Document]) -> Document:
        head = empty_response(self.request_id, self.model, self.created, status)
        return {**head, **self.echo, "output": output}

    def _tokens(self) -> Document:
        told = self.usage.document()
        return {
            "input_tokens": told["prompt_tokens"],
            "input_tokens_details": {
                "cached_tokens": self.usage.cached_tokens,
                "cache_write_tokens": 0,
            },
            "output_tokens": told["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": told["total_tokens"],
        }


def empty_response(request_id: str, model: str, created: int, status: str) -> Document:
    """What is true of any response here, before anything was said."""
    return {
        "id": f"resp_{request_id}",
        "object": "response",
        "created_at": created,
        "status": status,
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": None,
        "metadata": {},
        "model": model,
        "output": [],
        "parallel_tool_calls": True,
        "previous_response_id": None,
        "text": {"format": {"type": "text"}},
        "tool_choice": "auto",
        "tools": [],
        "truncation": "disabled",
        "usage": None,
    }


def _part(text: str, logprobs: list[Document]) -> Document:
    return {
        "type": "output_text",
        "text": text,
        "annotations": [],
        "logprobs": logprobs,
    }


def _bare(logprob: Document) -> Document:
    """As events tell it: without the bytes."""
    names = ("token", "logprob")
    top = [{name: each[name] for name in names} for each in logprob["top_logprobs"]]
    return {**{name: logprob[name] for name in names}, "top_logprobs": top}
