"""The server's description of itself is true, whatever is sent by it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from http_kit import Server, make_engine
from schema_cases import attack, operations, target

from lifecycle import Gate
from lifecycle_engine import SimProcessor, create_app

pytestmark = pytest.mark.asyncio(loop_scope="module")
CASES = 60
LABELS = sorted(
    f"{method} {route.path_format}"
    for route in create_app(make_engine(), SimProcessor(), gate=Gate(bytes=1)).routes
    # The live view, which is for people, has none: it reads the method itself.
    for method in (route.methods or set()) - {"HEAD"}
)
POSTS = ["/v1/chat/completions", "/v1/responses", "/v1/messages", "/generate"]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def attacked() -> AsyncIterator[Server]:
    """One server for all requests, so that what one left is seen by the next."""
    async with target() as server:
        yield server


def url_of(server: Server) -> str:
    """Where it is."""
    return f"http://127.0.0.1:{server.port}"


@pytest.mark.parametrize("label", LABELS)
async def test_answers_made_up_requests_as_described(
    attacked: Server, label: str
) -> None:
    """Right or wrong, each gets an answer of the described shape, and none a failure.

    It comes soon, and nothing is left of the request. The full run is `make attack`.
    """
    url = url_of(attacked)
    found = {each.label: each for each in await asyncio.to_thread(operations, url)}
    once = partial(attack, url, found[label], cases=CASES, seed=1)
    tally = await asyncio.to_thread(once)
    assert tally.cases >= 1
    if label.split()[1] in POSTS:
        assert tally.cases >= CASES
        assert tally.statuses[200] >= 5
        assert tally.statuses[400] >= 20
    await attacked.quiet()


async def test_describes_every_route(attacked: Server) -> None:
    """What the application has and what it describes are the same."""
    async with (
        aiohttp.ClientSession() as http,
        http.get(f"{url_of(attacked)}/openapi.json") as answer,
    ):
        paths = (await answer.json())["paths"]
    described = {f"{method.upper()} {path}" for path in paths for method in paths[path]}
    assert described == set(LABELS)
    operations = [each for path in paths.values() for each in path.values()]
    assert len({each["operationId"] for each in operations}) == len(operations)
    assert all(each["summary"] and each["tags"] for each in operations)


async def test_lists_every_route_on_a_page(attacked: Server) -> None:
    """A browser shows all paths, and runs no script."""
    headers = {"host": "localhost:8"}
    async with (
        aiohttp.ClientSession() as http,
        http.get(f"{url_of(attacked)}/docs", headers=headers) as answer,
    ):
        text, policy = await answer.text(), answer.headers["content-security-policy"]
    assert policy == "default-src 'none'; style-src 'unsafe-inline'"
    for label in LABELS:
        assert f"<code>{label}</code>" in text
    assert "curl -s http://localhost:8/v1/chat/completions" in text


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("/v1/embeddings", "Embeddings are not served here"),
        ("/v1/completions", "POST /generate continues a prompt"),
        ("/v1/audio/speech", "Audio is not served here"),
        ("/v1/messages/count_tokens", "Token counts are not served here"),
        ("/v1/embeddingsx", "There is no such path"),
    ],
)
async def test_refuses_by_name_what_is_not_served(
    attacked: Server, path: str, message: str
) -> None:
    """A client of a known API learns that its endpoint is missing on purpose."""
    async with (
        aiohttp.ClientSession() as http,
        http.post(url_of(attacked) + path, json={"model": "sim"}) as answer,
    ):
        assert answer.status == 404
        assert message in (await answer.json())["error"]["message"]


DEEP = b"[" * 100_000
ODD: dict[str, bytes] = {
    "deep": b'{"x": ' + DEEP,
    "deep-objects": b'{"x":' * 50_000,
    "nan": b'{"temperature": NaN}',
    "infinite": b'{"temperature": 1e999}',
    "huge-integer": b'{"seed": ' + b"9" * 100_000 + b"}",
    "lone-surrogate": b'{"user": "\\ud800"}',
    "not-utf8": b'{"user": "\xff"}',
    "nul": b'{"user": "\\u0000"}\0',
    "twice": b'{"model": "sim", "model": 3}',
    "byte-order-mark": b"\xef\xbb\xbf{}",
    "utf-16": json.dumps({"model": "sim"}).encode("utf-16"),
    "many-values": b'{"x": [' + b"0," * 300_000 + b"0]}",
    "null": b"null",
    "empty": b"",
}


@pytest.mark.parametrize("path", POSTS)
async def test_refuses_odd_json(attacked: Server, path: str) -> None:
    """Each is the client's error, reported as such, and not quoted."""
    async with aiohttp.ClientSession() as http:
        for name, body in ODD.items():
            async with http.post(url_of(attacked) + path, data=body) as answer:
                told = await answer.json()
                assert answer.status == 400, name
                assert told["error"]["message"], name
                assert len(json.dumps(told)) < 1000, name
    await attacked.quiet()


@pytest.mark.parametrize("path", POSTS)
async def test_never_repeats_what_a_client_says(attacked: Server, path: str) -> None:
    """An error names the field and position, never its content."""
    canary = "canary-7f3a"
    wrong: list[dict[str, Any]] = [
        {"model": canary},
        {"temperature": canary},
        {"stop": [canary * 99]},
        {"metadata": {canary: 3}},
        {"tools": [{"name": canary}]},
        {"messages": [{"role": canary, "content": canary}]},
        {"messages": [{"role": "user", "content": [{"type": canary}]}]},
        {"messages": [{"role": "user", "content": {canary: canary}}]},
        {"input": [{"type": canary, "role": "user", "content": canary}]},
        {"images": [canary], "text": canary},
    ]
    chat = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2}
    right = {"/v1/responses": {"input": "x"}, "/generate": {"text": "x"}}
    async with aiohttp.ClientSession() as http:
        for fields in wrong:
            body = {"model": "sim", **right.get(path, chat), **fields}
            async with http.post(url_of(attacked) + path, json=body) as answer:
                told = await answer.text()
                assert canary not in told, fields
                assert answer.status < 500
    await attacked.quiet()


@pytest.mark.parametrize("path", [*POSTS, "/v1/requests/a%0d%0ab/cancel"])
async def test_lets_no_line_break_into_an_id(attacked: Server, path: str) -> None:
    """An id is refused, or never was one; it makes no header and no event."""
    for id_ in (
        b"a\rset-cookie: x",
        b"a\nset-cookie: x",
        b"a\0b",
        b"a b",
        b"\xff",
        b"",
    ):
        reader, writer = await asyncio.open_connection("127.0.0.1", attacked.port)
        head = f"POST {path} HTTP/1.1\r\nhost: here\r\nconnection: close\r\n".encode()
        writer.write(
            head + b"content-length: 2\r\nx-request-id: " + id_ + b"\r\n\r\n{}"
        )
        answer = await asyncio.wait_for(reader.read(), 20)
        writer.close()
        status = int(answer.split()[1])
        assert status in ({400, 404} if "cancel" in path else {400}), answer
        assert b"set-cookie" not in answer
    await attacked.quiet()
