"""The forms in which one kind of request is asked and answered."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lifecycle_engine.api_errors import ApiError
    from lifecycle_engine.incoming import Incoming

    from .answers import Answer
    from .openai_schema import ChatRequest
    from .openai_wire import Usage
    from .replies import Reply

Document = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """One API: how it is read, how it answers, how it says no.

    Attributes:
        parse: A body to a checked request.
        answer: Makes what takes the pieces of an answer: of a reply, a request, the
            name of the model, and the usage, which is counted meanwhile.
        frame: A document to the bytes of one server-sent event.
        end: What follows the last event of a stream.
        stream_type: Of the content that is streamed.
        error: An error, and the id of its request, to a status and a document.
        id_header: The header in which the id of a request comes back.
    """

    parse: Callable[[bytes], ChatRequest]
    answer: Callable[[Reply, Incoming, str, Usage], Answer]
    frame: Callable[[Document], bytes]
    end: bytes
    error: Callable[[ApiError, str | None], tuple[int, Document]]
    id_header: bytes
    stream_type: bytes = b"text/event-stream; charset=utf-8"


def dump(document: Document) -> bytes:
    """A document as JSON."""
    return json.dumps(document, separators=(",", ":"), ensure_ascii=False).encode()


def named_event(document: Document) -> bytes:
    """A document as a server-sent event that bears the name of its type."""
    return b"event: %b\ndata: %b\n\n" % (document["type"].encode(), dump(document))
