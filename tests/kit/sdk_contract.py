"""Documents against the SDKs' own models, in the strictest reading.

The SDKs read leniently: unknown fields are kept and missing ones become ``None``. Here
a field that a model does not have is a mistake, and so is one that it needs.
"""

from __future__ import annotations

import datetime as dt
import json
import types
import typing
from typing import Any

import anthropic.types as a
import openai.types as o
import openai.types.responses as r
from anthropic.types.shared import ErrorResponse
from openai.types import chat
from openai.types.shared import ErrorObject
from pydantic import BaseModel

# JSON has no time of its own.
_PLAIN = {str: str, bool: bool, type(None): type(None), dt.datetime: str}


def mistakes(kind: Any, value: Any, path: str = "$") -> list[str]:
    """What of *value* is not as the type *kind* says; empty if all is."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if kind in (Any, object):
        return []
    if origin is typing.Annotated:
        return mistakes(args[0], value, path)
    if origin in (typing.Union, types.UnionType):
        tries = [mistakes(each, value, path) for each in args]
        return min(tries, key=len) if all(tries) else []
    if origin is typing.Literal:
        return [] if value in args else [f"{path}: not one of {args}"]
    if origin is list:
        if not isinstance(value, list):
            return [f"{path}: no list"]
        return [
            each
            for at, item in enumerate(value)
            for each in mistakes(args[0], item, f"{path}[{at}]")
        ]
    if origin is dict:
        if not isinstance(value, dict):
            return [f"{path}: no object"]
        return [
            each
            for name, item in value.items()
            for each in mistakes(args[1], item, f"{path}.{name}")
        ]
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return _of_model(kind, value, path)
    return _of_plain(kind, value, path)


def _of_plain(kind: Any, value: Any, path: str) -> list[str]:
    if kind is int:
        good = type(value) is int
    elif kind is float:
        good = type(value) in (int, float)
    else:
        assert kind in _PLAIN, f"{path}: {kind}"
        good = type(value) is _PLAIN[kind]
    return [] if good else [f"{path}: {type(value).__name__} for {kind}"]


def _of_model(kind: type[BaseModel], value: Any, path: str) -> list[str]:
    if not isinstance(value, dict):
        return [f"{path}: no object"]
    fields = {field.alias or name: field for name, field in kind.model_fields.items()}
    needed = {name for name, field in fields.items() if field.is_required()}
    found = [
        f"{path}.{name}: {kind.__name__} lacks it" for name in value.keys() - fields
    ]
    found += [f"{path}.{name}: missing" for name in needed - value.keys()]
    for name in value.keys() & fields:
        found += mistakes(fields[name].annotation, value[name], f"{path}.{name}")
    return found


class _Error(BaseModel):
    """The body of OpenAI's errors: the SDK has no model of its own for it."""

    error: ErrorObject


class _Output(BaseModel):
    """One answer of ours."""

    text: str
    finish_reason: typing.Literal["stop", "length"]
    stop: str | None
    logprobs: list[chat.ChatCompletionTokenLogprob] | None = None


class _Outputs(BaseModel):
    """The body of our own plain endpoint, as the documentation has it."""

    id: str
    model: str
    outputs: list[_Output]
    usage: o.CompletionUsage


class _Text(BaseModel):
    """A line of its stream: more of one answer."""

    index: int
    text: str
    logprobs: list[chat.ChatCompletionTokenLogprob] | None = None


class _End(BaseModel):
    """A line of its stream: the end of one answer."""

    index: int
    text: typing.Literal[""]
    finish_reason: typing.Literal["stop", "length"]
    stop: str | None


class _Last(BaseModel):
    """The last line of its stream."""

    id: str
    model: str
    usage: o.CompletionUsage


class _Models(BaseModel):
    object: typing.Literal["list"]
    data: list[o.Model]


WHOLE = {
    "/v1/chat/completions": chat.ChatCompletion,
    "/v1/responses": r.Response,
    "/v1/messages": a.Message,
    "/generate": _Outputs,
    "/v1/models": _Models,
    "/v1/models/sim": o.Model,
}
EVENTS = {
    "/v1/chat/completions": chat.ChatCompletionChunk,
    "/v1/responses": r.ResponseStreamEvent,
    "/v1/messages": a.RawMessageStreamEvent,
    "/generate": _Text | _End | _Last,
}


def error_of(path: str) -> type[BaseModel]:
    """The model of a body that is an error."""
    return ErrorResponse if path.startswith("/v1/messages") else _Error


def mistakes_of_event(path: str, document: Any) -> list[str]:
    """What is wrong with one event of a stream, an error among them."""
    if path == "/v1/responses" and "error" in document:
        # As the API says it, and as an object besides, which the SDK raises.
        flat = {name: it for name, it in document.items() if name != "error"}
        found = mistakes(r.ResponseErrorEvent, flat)
        return found + mistakes(ErrorObject, document["error"], "$.error")
    if "error" in document:
        return mistakes(error_of(path), document)
    return mistakes(EVENTS[path], document)


def events(path: str, body: bytes) -> list[Any]:
    """The documents of a stream, whose bytes are framed as its API has it."""
    if path == "/generate":
        assert body.endswith(b"\n")
        return [json.loads(line) for line in body.splitlines()]
    blocks = body.decode().split("\n\n")
    assert blocks.pop() == ""
    if path == "/v1/chat/completions" and blocks[-1] == "data: [DONE]":
        blocks.pop()
    found = []
    for block in blocks:
        *named, data = block.split("\n")
        document = json.loads(data.removeprefix("data: "))
        assert data == f"data: {json.dumps(document, separators=(',', ':'))}"
        unnamed = path == "/v1/chat/completions"
        assert named == ([] if unnamed else [f"event: {document['type']}"])
        found.append(document)
    return found
