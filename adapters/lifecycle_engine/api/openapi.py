"""The OpenAPI description of the server, generated from its validation schemas."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

from pydantic.json_schema import models_json_schema

from lifecycle_engine.api.anthropic_messages import (
    UNSUPPORTED as NOT_IN_MESSAGES,
    MessagesRequest,
)
from lifecycle_engine.api.base import Document
from lifecycle_engine.api.chat_request import (
    UNSUPPORTED as NOT_IN_CHAT,
    UNSUPPORTED_EVERYWHERE,
    ChatRequest,
    Schema,
    Unsupported,
)
from lifecycle_engine.api.generate import (
    UNSUPPORTED as NOT_IN_GENERATE,
    GenerateRequest,
)
from lifecycle_engine.api.openai_responses import (
    UNSUPPORTED as NOT_IN_RESPONSES,
    ResponsesRequest,
)
from lifecycle_engine.api.operations import OPERATIONS, TAGS
from lifecycle_engine.api.request_body import ID_PATTERN

_REFS = "#/components/schemas/{model}"
_ENDPOINTS: dict[str, tuple[type[Schema], Unsupported, str, list[str]]] = {
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
    400: "The request is invalid",
    404: "The model or the path does not exist",
    408: "The body arrived too slowly",
    409: "A running request has this id",
    413: "The request exceeds a limit",
    429: "The client has too many requests; try again later",
    499: "The request was cancelled",
    500: "The server or its engine failed",
    503: "The server is full, shutting down, or without an engine; try again later",
    504: "The engine took too long",
}
_OBJECTS = {
    "/v1/models": ["data"],
    "/health": ["status"],
    "/openapi.json": ["openapi", "paths"],
}


def openapi_document(model: str) -> Document:
    """Return the OpenAPI 3.1 document of a server."""
    models = [(schema, "validation") for schema, *_ in _ENDPOINTS.values()]
    _, made = models_json_schema(models, ref_template=_REFS)  # type: ignore[arg-type]
    schemas = made["$defs"]
    for schema, unsupported, *_ in _ENDPOINTS.values():
        fields = schemas[schema.__name__]["properties"]
        fields["model"] = {"enum": [model]}
        for name, neutral in (*UNSUPPORTED_EVERYWHERE.items(), *unsupported.items()):
            fields[name] = {"enum": [None, *neutral], "description": "Not supported"}
    schemas |= {"Error": _ERROR, "AnthropicError": _ANTHROPIC_ERROR}
    paths = {path: {"post": _generate(path)} for path in _ENDPOINTS}
    paths |= {path: {"get": _get(names)} for path, names in _OBJECTS.items()}
    paths |= _other_paths(model)
    for each in OPERATIONS:
        said = {"tags": [each.tag], "operationId": each.id, "summary": each.summary}
        path, method = paths[each.path], each.method.lower()
        path[method] = said | path[method]
    return {
        "openapi": "3.1.0",
        "info": {"title": "lifecycle", "version": version("anyio-lifecycle")},
        "tags": [{"name": name, "description": text} for name, text in TAGS.items()],
        "paths": paths,
        "components": {"schemas": schemas},
    }


def _generate(path: str) -> Document:
    schema, _, streamed, names = _ENDPOINTS[path]
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
            "content": {"application/json": {"schema": _ref(schema.__name__)}},
        },
        "responses": {
            "200": {"description": "The answer", "content": whole},
            **{
                str(status): _error_response(status, text, error)
                for status, text in statuses.items()
            },
        },
    }


def _other_paths(model: str) -> Document:
    ready = _get(["status"])
    ready["responses"]["503"] = ready["responses"]["200"]
    one = _get(["id"], 404)
    one["parameters"] = [_parameter("model", "path", {"type": "string"}, model)]
    stored = {
        "responses": {"404": _error_response(404, "Not available")},
        "parameters": _IDS,
    }
    cancelled = _get(["id", "status"], 404) | {"parameters": _IDS}
    html = {"text/html": {"schema": {"type": "string"}}}
    docs = {"responses": {"200": {"description": "The page", "content": html}}}
    return {
        "/docs": {"get": docs},
        "/ready": {"get": ready},
        "/v1/models/{model}": {"get": one},
        "/v1/responses/{id}": {"get": stored, "delete": stored},
        "/v1/responses/{id}/cancel": {"post": cancelled},
        "/v1/requests/{id}/cancel": {"post": cancelled},
    }


def _get(names: list[str], *statuses: int) -> Document:
    content = {"application/json": {"schema": _object(names)}}
    responses: Document = {"200": {"description": "The answer", "content": content}}
    for status in statuses:
        responses[str(status)] = _error_response(status, _STATUSES[status])
    return {"responses": responses}


def _error_response(status: int, description: str, error: str = "Error") -> Document:
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
