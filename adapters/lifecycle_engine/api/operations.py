"""What the server does and does not: operations by name, and a page of them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from html import escape
from typing import Final


@dataclass(frozen=True, slots=True)
class Operation:
    """A method of a path.

    Attributes:
        id: Unique; what generated clients call it.
    """

    tag: str
    method: str
    path: str
    id: str
    summary: str


TAGS: Final = {
    "Generate": "Answers to conversations and prompts, whole or streamed.",
    "Manage": "Models, stored responses, and the end of what runs.",
    "Observe": "What probes and programs ask.",
}
"""What each group of operations is for."""

_LISTED: Final = {
    "Generate": {
        ("POST", "/v1/chat/completions"): (
            "createChatCompletion",
            "As OpenAI's Chat API",
        ),
        ("POST", "/v1/responses"): ("createResponse", "As OpenAI's Responses API"),
        ("POST", "/v1/messages"): ("createMessage", "As Anthropic's Messages API"),
        ("POST", "/generate"): ("generate", "Continue a prompt, without an SDK"),
    },
    "Manage": {
        ("GET", "/v1/models"): ("listModels", "List the model that is served"),
        ("GET", "/v1/models/{model}"): ("getModel", "Describe the model"),
        ("POST", "/v1/requests/{id}/cancel"): (
            "cancelRequest",
            "End a running request",
        ),
        ("POST", "/v1/responses/{id}/cancel"): (
            "cancelResponse",
            "End a running response",
        ),
        ("GET", "/v1/responses/{id}"): ("getResponse", "Refused: none is stored"),
        ("DELETE", "/v1/responses/{id}"): ("deleteResponse", "Refused: none is stored"),
    },
    "Observe": {
        ("GET", "/health"): ("getHealth", "Say that the server is alive"),
        ("GET", "/ready"): ("getReady", "Say whether a request would be served now"),
        ("GET", "/openapi.json"): ("getOpenapi", "Describe the API for programs"),
        ("GET", "/docs"): ("getDocs", "Describe the API on a page"),
    },
}

OPERATIONS: Final = tuple(
    Operation(tag, method, path, id_, summary)
    for tag, listed in _LISTED.items()
    for (method, path), (id_, summary) in listed.items()
)
"""All operations of the public API."""

# Paths of the APIs that clients know, which this server does not have.
_NOT_SERVED: Final = {
    "/v1/assistants": "Assistants",
    "/v1/audio": "Audio",
    "/v1/batches": "Batches",
    "/v1/completions": "Text completions; POST /generate continues a prompt",
    "/v1/conversations": "Stored conversations",
    "/v1/embeddings": "Embeddings",
    "/v1/files": "Files",
    "/v1/fine_tuning": "Fine-tuning",
    "/v1/images": "Image generation",
    "/v1/messages/batches": "Batches",
    "/v1/messages/count_tokens": "Token counts",
    "/v1/moderations": "Moderation",
    "/v1/realtime": "Realtime sessions",
    "/v1/rerank": "Reranking",
    "/v1/score": "Scoring",
    "/v1/threads": "Threads",
    "/v1/uploads": "Uploads",
    "/v1/vector_stores": "Vector stores",
    "/v1/videos": "Video generation",
    "/tokenize": "Token counts",
}


def no_such_path(path: str) -> str:
    """Return the message of a 404, which says what there is instead."""
    for known, what in _NOT_SERVED.items():
        if path == known or path.startswith(known + "/"):
            name, _, instead = what.partition("; ")
            message = f"{name} are" if name.endswith("s") else f"{name} is"
            message += " not served here"
            return f"{message}; {instead or 'GET /docs lists what is'}"
    posts = ", ".join(each.path for each in OPERATIONS if each.tag == "Generate")
    return f"There is no such path. POST to {posts}; GET /docs lists all paths"


_PAGE: Final = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>API of {model}</title>
<style>
:root {{ color-scheme: light dark }}
body {{ font: 16px/1.5 system-ui, sans-serif; margin: 2rem auto; padding: 0 1rem;
  max-width: 48rem; overflow-wrap: anywhere }}
code, pre {{ font: 14px/1.5 ui-monospace, monospace }}
pre {{ border: 1px solid; border-radius: 4px; padding: 1rem; overflow-x: auto }}
table {{ border-collapse: collapse; width: 100% }}
td {{ padding: .3rem 1rem .3rem 0; vertical-align: top }}
</style>
<h1>API of {model}</h1>
<p><a href="openapi.json">openapi.json</a> describes each field for programs.</p>
<pre>{example}</pre>
{groups}</html>
"""


def page(model: str, base: str) -> str:
    """Return a page of HTML that lists all operations. It runs no script."""
    groups = "".join(
        f"<h2>{tag}</h2>\n<p>{text}</p>\n<table>\n{_rows(tag)}</table>\n"
        for tag, text in TAGS.items()
    )
    said = {"role": "user", "content": "Say something"}
    body = json.dumps({"model": model, "messages": [said]})
    quoted = body.replace("'", "'\\''")
    example = (
        f"curl -s {base}/v1/chat/completions \\\n"
        f"  -H 'content-type: application/json' \\\n  -d '{quoted}'"
    )
    return _PAGE.format(model=escape(model), example=escape(example), groups=groups)


def _rows(tag: str) -> str:
    return "".join(
        f"<tr><td><code>{each.method} {each.path}</code><td>{escape(each.summary)}\n"
        for each in OPERATIONS
        if each.tag == tag
    )
