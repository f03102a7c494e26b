"""The server's own description of itself, as OpenAPI, made from what it checks with."""

from __future__ import annotations

from typing import Any

from pydantic.json_schema import models_json_schema

from lifecycle_engine.incoming import ID_PATTERN

from .dialect import Document
from .forms import NOWHERE, Form, Unsupported
from .generate_schema import UNSUPPORTED as NOT_IN_GENERATE, GenerateRequest
from .messages_schema import UNSUPPORTED as NOT_IN_MESSAGES, MessagesRequest
from .openai_schema import UNSUPPORTED as NOT_IN_CHAT, ChatRequest
from .responses_schema import UNSUPPORTED as NOT_IN_RESPONSES, ResponsesRequest

_REFS = "#/components/schemas/{model}"
_FORMS: dict[str, tuple[type[Form], Unsupported, str, list[str]]] = {
    "/v1/chat/completions": (
        ChatRequest,
        NOT_IN_CHAT,
        "text/event-stream",
        ["id", "object", "created", "model", "choices", "usage"],
    ),
    "/v1/responses": (
        ResponsesRequest,
        NOT_IN_RESPONSES,
        "text/event-stream",
        ["id", "object", "created_at", "model", "status", "output", "usage"],
    ),
    "/v1/messages": (
        MessagesRequest,
        NOT_IN_MESSAGES,
        "text/event-stream",
        ["id", "type", "role", "model", "content", "stop_reason", "usage"],
    ),
    "/generate": (
        GenerateRequest,
        NOT_IN_GENERATE,
        "application/x-ndjson",
        ["id", "model", "outputs", "usage"],
    ),
}
_STATUSES = {
    400: "The request is wrong",
    404: "There is no such model, or no such path",
    408: "The body stood still, or came too slowly",
    409: "A live request has this id",
    413: "It can never fit, or breaks a limit",
    429: "Its share is used up; come back later",
    499: "It was cancelled",
    500: "The server or its engine failed",
    503: "Full, closing, or without its engine; come back later",
    504: "The engine took too long",
}
_OBJECTS = {
    "/v1/models": ["data"],
    "/health": ["status"],
    "/openapi.json": ["openapi", "paths"],
    "/_lifecycle/status": ["ready", "sessions", "engine", "process"],
    "/_lifecycle/requests": ["requests"],
}


def describe(model: str) -> Document:
    """Describe a server as OpenAPI 3.1.

    Args:
        model: The one that it serves.
    """
    forms = [(form, "validation") for form, *_ in _FORMS.values()]
    _, made = models_json_schema(forms, ref_template=_REFS)  # type: ignore[arg-type]
    schemas = made["$defs"]
    for form, unsupported, *_ in _FORMS.values():
        fields = schemas[form.__name__]["properties"]
        fields["model"] = {"enum": [model]}
        for name, harmless in (*NOWHERE.items(), *unsupported.items()):
            fields[name] = {"enum": [None, *harmless], "description": "Not supported"}
    schemas |= {"Error": _ERROR, "AnthropicError": _ANTHROPIC_ERROR}
    paths = {path: {"post": _generating(path)} for path in _FORMS}
    paths |= {path: {"get": _getting(names)} for path, names in _OBJECTS.items()}
    return {
        "openapi": "3.1.0",
        "info": {"title": "lifecycle-engine", "version": "1"},
        "paths": paths | _others(model),
        "components": {"schemas": schemas},
    }


def _generating(path: str) -> Document:
    form, _, streamed, names = _FORMS[path]
    error = "AnthropicError" if path == "/v1/messages" else "Error"
    whole = {
        "application/json": {"schema": _object(names)},
        streamed: {"schema": _EVENT if "event" in streamed else {"type": "object"}},
    }
    statuses = dict(_STATUSES)
    if path == "/v1/messages":
        statuses[529] = statuses.pop(503)
    return {
        "parameters": [_parameter("x-request-id", "header", _ID)],
        "requestBody": {
            "required": True,
            "content": {"application/json": {"schema": _ref(form.__name__)}},
        },
        "responses": {
            "200": {"description": "The answer", "content": whole},
            **{
                str(status): _failing(status, text, error)
                for status, text in statuses.items()
            },
        },
    }


def _others(model: str) -> Document:
    ready = _getting(["status"])
    ready["responses"]["503"] = ready["responses"]["200"]
    plain = {"text/plain": {"schema": {"type": "string"}}}
    metrics = {"200": {"description": "For Prometheus", "content": plain}}
    metrics["404"] = {"description": "There are none", "content": plain}
    one = _getting(["id"], 404)
    one["parameters"] = [_parameter("model", "path", {"type": "string"}, model)]
    stored = {"responses": {"404": _failing(404, "There are none")}, "parameters": _IDS}
    cancelled = _getting(["id", "status"], 404) | {"parameters": _IDS}
    return {
        "/ready": {"get": ready},
        "/metrics": {"get": {"responses": metrics}},
        "/v1/models/{model}": {"get": one},
        "/v1/responses/{id}": {"get": stored, "delete": stored},
        "/v1/responses/{id}/cancel": {"post": cancelled},
        "/_lifecycle/requests/{id}/cancel": {"post": cancelled},
    }


def _getting(names: list[str], *statuses: int) -> Document:
    content = {"application/json": {"schema": _object(names)}}
    responses: Document = {"200": {"description": "The answer", "content": content}}
    for status in statuses:
        responses[str(status)] = _failing(status, _STATUSES[status])
    return {"responses": responses}


def _failing(status: int, description: str, error: str = "Error") -> Document:
    failing: Document = {
        "description": description,
        "content": {"application/json": {"schema": _ref(error)}},
    }
    if status in (429, 503):
        failing["headers"] = {"retry-after": {"schema": {"type": "string"}}}
    return failing


def _parameter(name: str, place: str, schema: Document, *examples: str) -> Document:
    made = {"name": name, "in": place, "required": place == "path", "schema": schema}
    return made | ({"example": examples[0]} if examples else {})


def _object(names: list[str]) -> Document:
    return {"type": "object", "required": names}


def _ref(name: str) -> Document:
    return {"$ref": _REFS.format(model=name)}


_EVENT = {
    **_object(["data"]),
    "properties": {"data": {"type": "string"}, "event": {"type": "string"}},
}
_ID = {"type": "string", "pattern": f"^{ID_PATTERN}$"}
_IDS = [_parameter("id", "path", {"type": "string", "minLength": 1})]
_NULLABLE: Any = {"type": ["string", "null"]}
_ERROR = {
    **_object(["error"]),
    "additionalProperties": False,
    "properties": {
        "error": {
            **_object(["message", "type", "param", "code"]),
            "additionalProperties": False,
            "properties": {
                "message": {"type": "string", "minLength": 1},
                "type": {"type": "string"},
                "param": _NULLABLE,
                "code": _NULLABLE,
            },
        }
    },
}
_ANTHROPIC_ERROR = {
    **_object(["type", "error", "request_id"]),
    "additionalProperties": False,
    "properties": {
        "type": {"const": "error"},
        "request_id": _NULLABLE,
        "error": {
            **_object(["type", "message"]),
            "additionalProperties": False,
            "properties": {
                "type": {"type": "string"},
                "message": {"type": "string", "minLength": 1},
            },
        },
    },
}
