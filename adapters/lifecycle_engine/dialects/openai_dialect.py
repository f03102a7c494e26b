"""OpenAI's chat completions."""

from __future__ import annotations

import time

from lifecycle_engine.api_errors import ApiError
from lifecycle_engine.incoming import Incoming

from .answers import Answer, Streamed, Whole
from .dialect import Dialect, Document, dump
from .openai_schema import parse_request
from .openai_wire import Completion, Usage
from .replies import Reply


def _answer(reply: Reply, incoming: Incoming, model: str, usage: Usage) -> Answer:
    completion = Completion(
        id=f"chatcmpl-{reply.request_id}",
        created=int(time.time()),
        model=model,
        include_usage=incoming.include_usage,
    )
    kind = Streamed if incoming.stream else Whole
    return kind(completion, reply, usage, incoming.choices)


def _frame(document: Document) -> bytes:
    return b"data: " + dump(document) + b"\n\n"


def _error(error: ApiError, request_id: str | None) -> tuple[int, Document]:
    del request_id  # in a header
    return error.status, {"error": error.fields}


OPENAI = Dialect(
    parse=parse_request,
    answer=_answer,
    frame=_frame,
    end=b"data: [DONE]\n\n",
    error=_error,
    id_header=b"x-request-id",
)
