"""Which requests may do what: keys, the operator's endpoints, cancels, web pages."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import pytest_asyncio
from http_kit import Server, running, user

from lifecycle_asgi import ClientIdentity
from lifecycle_engine import AccessRules, AppSettings

pytestmark = pytest.mark.asyncio(loop_scope="module")
KEYS = ("mine", "yours")
MINE, YOURS, ADMIN = (
    {"authorization": f"Bearer {key}"} for key in (*KEYS, "operator's")
)
ASK = {"model": "sim", "messages": user("Hi"), "max_tokens": 3}
STATUS, CHAT = "/_lifecycle/status", "/v1/chat/completions"


def settings(**rules: Any) -> AppSettings:
    """Settings with these rules, and clients by the keys of the tests."""
    access = AccessRules(**rules)
    return AppSettings(model="sim", client=ClientIdentity(KEYS), access=access)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def guarded() -> AsyncIterator[Server]:
    """A server with two API keys, and a key of the operator."""
    rules = {"api_keys": KEYS, "admin_keys": ("operator's",)}
    # Slow enough for a request to be cancelled.
    async with running("--sim-decode-step=0.02", settings=settings(**rules)) as server:
        yield server


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def open_server() -> AsyncIterator[Server]:
    """A server without keys."""
    async with running("--sim-decode-step=0.02", settings=settings()) as server:
        yield server


async def status(
    server: Server, path: str, headers: dict[str, str] | None = None, **more: Any
) -> int:
    """Ask once, the operator's listener for its paths; returns the status.

    *more* of ``local`` is the client's address, and of ``port`` the server's.
    """
    local = more.pop("local", "127.0.0.1")
    operators = path.startswith(("/_lifecycle", "/metrics"))
    port = more.pop("port", server.admin_port if operators else server.port)
    transport = httpx.AsyncHTTPTransport(local_address=local)
    async with httpx.AsyncClient(transport=transport, timeout=120) as client:
        url = f"http://127.0.0.1:{port}{path}"
        method = more.pop("method", "POST" if "json" in more else "GET")
        return (await client.request(method, url, headers=headers, **more)).status_code


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({}, 401),
        ({"authorization": "Bearer mine2"}, 401),
        ({"authorization": "Basic bWluZTptaW5l"}, 401),
        (ADMIN, 401),
        (MINE, 200),
        ({"x-api-key": "yours"}, 200),
    ],
)
@pytest.mark.parametrize(
    "path", [CHAT, "/v1/messages", "/v1/responses", "/v1/models", "/openapi.json"]
)
async def test_asks_for_an_api_key(
    guarded: Server, path: str, headers: dict[str, str], expected: int
) -> None:
    """All but probes need the key of a client."""
    ask = {"json": ASK} if path == CHAT else {}
    if path in ("/v1/messages", "/v1/responses"):
        ask, expected = {"json": {}}, 400 if expected == 200 else expected
    assert await status(guarded, path, headers, **ask) == expected


@pytest.mark.parametrize("path", ["/health", "/ready"])
async def test_leaves_probes_open(guarded: Server, path: str) -> None:
    """An orchestrator has no key."""
    assert await status(guarded, path) == 200


@pytest.mark.parametrize("path", [STATUS, "/_lifecycle/requests", "/metrics"])
async def test_asks_the_operator_for_another_key(guarded: Server, path: str) -> None:
    """The key of a client shows nothing of the others; a browser may send Basic."""
    found = 404 if path == "/metrics" else 200  # the tests' server has no metrics
    assert await status(guarded, path, ADMIN) == found
    assert await status(guarded, path, MINE) == 401
    assert await status(guarded, path) == 401
    basic = httpx.BasicAuth("any", "operator's")
    assert await status(guarded, path, auth=basic) == found


async def test_refuses_before_a_byte_of_the_body(guarded: Server) -> None:
    """A request without a key has its answer before it sends its body."""
    reader, writer = await asyncio.open_connection("127.0.0.1", guarded.port)
    head = b"POST %b HTTP/1.1\r\nhost: x\r\ncontent-length: 60000000\r\n\r\n"
    writer.write(head % CHAT.encode())
    async with asyncio.timeout(60):
        assert (await reader.readline()).split()[1] == b"401"
    writer.close()


OPERATORS = [STATUS, "/_lifecycle/requests", "/_lifecycle", "/_lifecycle/snapshot"]


@pytest.mark.parametrize("path", [*OPERATORS, "/metrics"])
async def test_shows_clients_nothing_of_the_operator(
    open_server: Server, path: str
) -> None:
    """The public listener has none of its paths, whoever asks, by whatever proxy."""
    for local in ("127.0.0.1", "127.0.0.3"):
        ask = status(open_server, path, port=open_server.port, local=local)
        assert await ask == 404
    cancel = "/_lifecycle/requests/any/cancel"
    ask = status(open_server, cancel, method="POST", port=open_server.port)
    assert await ask == 404
    assert await status(open_server, path) == (404 if path == "/metrics" else 200)


async def test_shows_other_pages_nothing_of_the_operator() -> None:
    """Neither by another name of this machine, nor to pages that clients may use."""
    page = {"origin": "https://chat.example"}
    async with running(settings=settings(origins=(page["origin"],))) as server:
        assert await status(server, "/v1/models", page) == 200
        assert await status(server, STATUS, page) == 403
        assert await status(server, STATUS, {"host": "evil.example"}) == 421
    # Any name is for clients, who have keys or a proxy in front.
    async with running(settings=settings(hosts=("*", "ops.example"))) as server:
        assert await status(server, "/v1/models", {"host": "evil.example"}) == 200
        assert await status(server, STATUS, {"host": "evil.example"}) == 421
        assert await status(server, STATUS, {"host": "ops.example"}) == 200


async def cancelled(server: Server, path: str, request: Any, **asks: Any) -> list[int]:
    """Start a long request, let *asks* cancel it in turn; returns their statuses."""
    headers = {"x-request-id": "chosen", **request}
    body = {**ASK, "max_tokens": 5000}
    running_ = asyncio.create_task(status(server, CHAT, headers, json=body))
    await server.until(lambda: server.service.sessions.statistics().live)
    found = [await status(server, path, method="POST", **ask) for ask in asks.values()]
    server.service.sessions.close_all("cancelled")
    await running_
    await server.quiet()
    return found


@pytest.mark.parametrize(
    "path", ["/v1/requests/chosen/cancel", "/v1/responses/resp_chosen/cancel"]
)
async def test_cancels_only_for_the_client(guarded: Server, path: str) -> None:
    """Another client is answered as if there were no such request."""
    yours, mine = {"headers": YOURS}, {"headers": MINE}
    found = await cancelled(guarded, path, MINE, none={}, yours=yours, mine=mine)
    assert found == [401, 404, 200]


async def test_cancels_any_for_the_operator(guarded: Server) -> None:
    """The admin key cancels the request of any client."""
    path = "/_lifecycle/requests/chosen/cancel"
    assert await cancelled(guarded, path, MINE, ask={"headers": ADMIN}) == [200]


async def test_cancels_no_chosen_id_without_a_key(open_server: Server) -> None:
    """An address is no proof, as all clients of a proxy have the same one."""
    path = "/v1/requests/chosen/cancel"
    assert await cancelled(open_server, path, {}, same={}) == [404]
    path = "/_lifecycle/requests/chosen/cancel"
    assert await cancelled(open_server, path, {}, operator={}) == [200]


async def test_cancels_by_an_id_that_the_response_named(open_server: Server) -> None:
    """The server drew it, so that only its client knows it, from wherever it asks."""
    client = httpx.AsyncClient(base_url=f"http://127.0.0.1:{open_server.port}")
    ask = {**ASK, "max_tokens": 5000, "stream": True}
    async with client, client.stream("POST", CHAT, json=ask, timeout=60) as answer:
        path = f"/v1/requests/{answer.headers['x-request-id']}/cancel"
        guess = f"/v1/requests/{'0' * 24}/cancel"
        assert await status(open_server, guess, method="POST") == 404
        asked = status(open_server, path, method="POST", local="127.0.0.3")
        assert await asked == 200
        assert "cancelled" in (await answer.aread()).decode()
    await open_server.quiet()


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({"host": "evil.example:8000"}, 421),
        ({"host": "127.0.0.1.evil.example"}, 421),
        ({"host": "[::1]evil.example"}, 421),
        ({"host": "[:::]"}, 421),
        ({"host": "[127.0.0.1]"}, 421),
        ({"host": "localhost:1"}, 200),
        ({"host": "a.localhost"}, 200),
        ({"host": "[::1]:8000"}, 200),
        ({"host": "engine"}, 200),
        ({"origin": "https://evil.example"}, 403),
        ({"origin": "null"}, 403),
        ({"host": "here:80", "origin": "http://here:80"}, 200),
        ({"host": "here:80", "origin": "http://here:81"}, 403),
        ({"sec-fetch-site": "cross-site"}, 403),
        ({"sec-fetch-site": "same-origin"}, 200),
        ({"content-type": "text/plain;charset=utf-8"}, 415),
        ({"content-type": "application/x-www-form-urlencoded"}, 415),
        ({"content-type": "multipart/form-data; boundary=x"}, 415),
        ({"content-type": "application/json; charset=utf-8"}, 200),
    ],
    ids=str,
)
async def test_refuses_what_pages_of_other_sites_send(
    open_server: Server, headers: dict[str, str], expected: int
) -> None:
    """Neither by another name of this machine, nor as a form."""
    body = json.dumps(ASK).encode()
    asked = status(open_server, CHAT, headers, content=body, method="POST")
    assert await asked == expected


async def test_permits_named_pages() -> None:
    """Pages of a permitted origin may ask in advance, and read the answers."""
    page = {"origin": "https://chat.example"}
    rules = {"origins": ("https://chat.example",), "hosts": ("llm.example",)}
    async with running(settings=settings(**rules)) as server:
        async with httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{server.port}"
        ) as client:
            asked = {"access-control-request-method": "POST"}
            asked["access-control-request-headers"] = "authorization"
            answer = await client.options(CHAT, headers=page | asked)
            assert answer.status_code == 200
            allowed = answer.headers["access-control-allow-origin"]
            assert allowed == "https://chat.example"
            answer = await client.post(CHAT, headers=page, json=ASK)
            assert answer.headers["access-control-allow-origin"] == allowed
            other = {"origin": "https://evil.example"}
            answer = await client.post(CHAT, headers=other, json=ASK)
            assert answer.status_code == 403
            assert "access-control-allow-origin" not in answer.headers
        assert await status(server, "/health", {"host": "llm.example"}) == 200


async def test_answers_no_page_by_default(open_server: Server) -> None:
    """CORS is off: no header permits a page to read an answer."""
    url = f"http://127.0.0.1:{open_server.port}/v1/models"
    async with httpx.AsyncClient() as client:
        answer = await client.get(url)
    assert not [name for name in answer.headers if name.startswith("access-control")]
