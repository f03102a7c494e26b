"""Bad input: a clear 4xx in OpenAI's shape, nothing lost, the next request fine."""

from __future__ import annotations

import asyncio
import gzip
import json
import re
import struct
from typing import Any

import httpx
import openai
import pytest
from http_kit import (
    GatedProcessor,
    Server,
    answer_to,
    data_url,
    encoded,
    png,
    png_chunk,
    running,
    user,
)

from lifecycle_engine import (
    AppSettings,
    BadChat,
    BadImage,
    Chat,
    ChatTooLong,
    MediaLimits,
    Prepared,
)

pytestmark = pytest.mark.asyncio(loop_scope="module")
TEXT = [{"role": "user", "content": "hello"}]
CALLS = {"role": "assistant", "tool_calls": [{"id": "1", "type": "function"}]}
DEEP = "[" * 300 + "]" * 300


def image(url: str, role: str = "user") -> list[dict[str, Any]]:
    """Messages with one image URL."""
    part = {"type": "image_url", "image_url": {"url": url}}
    return [{"role": role, "content": [part]}]


def ask(**changes: Any) -> bytes:
    """A request body with *changes*."""
    return json.dumps({"model": "sim", "messages": TEXT, **changes}).encode()


def apng(frames: int) -> bytes:
    """A PNG that declares an animation of *frames*."""
    whole = encoded(64, 64)
    data = struct.pack(">II", frames, 0)
    return whole[:33] + png_chunk(b"acTL", data) + whole[33:]


BODIES: dict[str, tuple[bytes, int, str | None, str]] = {
    "empty": (b"", 400, None, "invalid_json"),
    "not-json": (b"hello", 400, None, "invalid_json"),
    "not-utf8": (b'{"user": "\xff\xfe"}', 400, None, "invalid_json"),
    "lone-surrogate": (b'{"user": "\\ud800"}', 400, None, "invalid_json"),
    "nan": (ask(temperature=float("nan")), 400, None, "invalid_json"),
    "nan-ignored-field": (ask(unheard_of=float("nan")), 400, None, "invalid_json"),
    "too-deep": (b'{"x": ' + DEEP.encode() + b"}", 400, None, "invalid_json"),
    "huge-integer": (b'{"seed": ' + b"9" * 5000 + b"}", 400, None, "invalid_json"),
    "array": (b"[]", 400, None, "invalid_type"),
    "no-model": (
        b'{"messages": []}',
        400,
        "model",
        "missing_required_parameter",
    ),
    "no-messages": (ask(messages=[]), 400, "messages", "invalid_value"),
    "other-model": (ask(model="gpt"), 404, "model", "model_not_found"),
    "negative-max-tokens": (ask(max_tokens=-1), 400, "max_tokens", "invalid_value"),
    "zero-max-tokens": (ask(max_tokens=0), 400, "max_tokens", "invalid_value"),
    "endless-max-tokens": (
        ask(max_tokens=10**6),
        400,
        None,
        "context_length_exceeded",
    ),
    "float-max-tokens": (ask(max_tokens=1.5), 400, "max_tokens", "invalid_type"),
    "bool-max-tokens": (ask(max_tokens=True), 400, "max_tokens", "invalid_type"),
    "text-temperature": (ask(temperature="hot"), 400, "temperature", "invalid_type"),
    "high-temperature": (ask(temperature=3), 400, "temperature", "invalid_value"),
    "text-stream": (ask(stream="yes"), 400, "stream", "invalid_type"),
    "number-user": (ask(user=7), 400, "user", "invalid_type"),
    "long-user": (ask(user="u" * 257), 400, "user", "invalid_value"),
    "negative-seed": (ask(seed=-1), 400, "seed", "invalid_value"),
    "stop-number": (ask(stop=3), 400, "stop", "invalid_type"),
    "options-alone": (
        ask(stream_options={"include_usage": True}),
        400,
        "stream_options",
        "invalid_value",
    ),
    "many-answers": (ask(n=17), 400, "n", "invalid_value"),
    "no-answers": (ask(n=0), 400, "n", "invalid_value"),
    "five-stops": (ask(stop=["x"] * 5), 400, "stop", "invalid_value"),
    "empty-stop": (ask(stop=["x", ""]), 400, "stop[1]", "invalid_value"),
    "stop-numbers": (ask(stop=[3]), 400, "stop[0]", "invalid_type"),
    "high-top-p": (ask(top_p=1.5), 400, "top_p", "invalid_value"),
    "text-logprobs": (ask(logprobs="yes"), 400, "logprobs", "invalid_type"),
    "many-logprobs": (
        ask(logprobs=True, top_logprobs=21),
        400,
        "top_logprobs",
        "invalid_value",
    ),
    "top-logprobs-alone": (
        ask(top_logprobs=2),
        400,
        "top_logprobs",
        "invalid_value",
    ),
    "calls": (
        ask(messages=[*TEXT, {**CALLS, "content": "hi"}]),
        400,
        "messages[1]",
        "invalid_value",
    ),
    "calls-alone": (
        ask(messages=[*TEXT, {**CALLS, "content": None}]),
        400,
        "messages[1]",
        "invalid_value",
    ),
    "tools": (ask(tools=[{}]), 400, "tools", "unsupported_parameter"),
    "endless-text": (
        ask(messages=[{"role": "user", "content": "x" * (2**20 + 1)}]),
        400,
        "messages",
        "context_length_exceeded",
    ),
    "role": (
        ask(messages=[{"role": "tool", "content": "x"}]),
        400,
        "messages[0].role",
        "invalid_value",
    ),
    "no-content": (
        ask(messages=[{"role": "user", "content": None}]),
        400,
        "messages[0].content",
        "invalid_type",
    ),
    "part-type": (
        ask(messages=[{"role": "user", "content": [{"type": "odd"}]}]),
        400,
        "messages[0].content[0].type",
        "invalid_value",
    ),
    "part-audio": (
        ask(messages=[{"role": "user", "content": [{"type": "input_audio"}]}]),
        400,
        "messages[0].content[0].type",
        "unsupported_media",
    ),
    "part-empty": (
        ask(messages=[{"role": "user", "content": [{"type": "text"}]}]),
        400,
        "messages[0].content[0]",
        "missing_required_parameter",
    ),
    "image-of-system": (
        ask(messages=image(data_url(b""), "system")),
        400,
        "messages[0]",
        "invalid_value",
    ),
}

IMAGES: dict[str, tuple[str, int, str]] = {
    "remote": ("https://example.com/a.png", 400, "remote_image_unsupported"),
    "file": ("file:///etc/passwd", 400, "remote_image_unsupported"),
    "no-url": ("iVBORw0KGgo=", 400, "invalid_image_url"),
    "not-base64-form": ("data:image/png,xyz", 400, "invalid_image_url"),
    "text-type": ("data:text/plain;base64,aGk=", 400, "invalid_image_url"),
    "bad-base64": ("data:image/png;base64,iVBOR\n==", 400, "invalid_base64"),
    "base64-not-ascii": ("data:image/png;base64,é", 400, "invalid_base64"),
    "excess-base64": ("data:image/png;base64,aGk=aGk=", 400, "invalid_base64"),
    "not-an-image": (data_url(b"hello, world" * 9), 400, "invalid_image"),
    "nothing": (data_url(b""), 400, "invalid_image"),
    "svg": (
        data_url(b"<svg xmlns='http://www.w3.org/2000/svg'/>"),
        400,
        "invalid_image",
    ),
    "truncated-header": (data_url(encoded()[:20]), 400, "invalid_image"),
    "truncated-data": (data_url(encoded(200, 200)[:-40]), 400, "invalid_image"),
    "truncated-jpeg": (
        data_url(encoded(300, 300, "JPEG")[:-400]),
        400,
        "invalid_image",
    ),
    "one-pixel": (data_url(encoded(1, 1)), 400, "image_too_small"),
    "thin": (data_url(encoded(500, 1)), 400, "image_too_small"),
    "bomb-7k": (data_url(png(7000, 7000)), 413, "image_too_large"),
    "bomb-11k": (data_url(png(11000, 11000)), 413, "image_too_large"),
    "bomb-30k": (data_url(png(30000, 30000)), 413, "image_too_large"),
    "many-frames": (data_url(apng(100)), 413, "image_too_large"),
}


def is_error(document: Any, param: str | None, code: str) -> bool:
    """Whether *document* is an error of OpenAI's shape, about this."""
    error = document["error"]
    assert set(document) == {"error"}
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert error["message"]
    return (error["param"], error["code"]) == (param, code)


async def is_fine(server: Any, client: Any) -> None:
    """Nothing is left, and the next request is answered."""
    await server.quiet()
    answer = await client.chat.completions.create(
        model="sim", messages=user("hi", encoded()), max_tokens=1
    )
    assert answer.choices[0].message.content
    await server.quiet()


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
async def test_refuses_body(server: Any, client: Any, body: Any) -> None:
    """A body that is not as documented is refused with the field that is wrong."""
    raw, status, param, code = body
    answered, _, document = await answer_to(server.port, raw)
    assert answered == status, document
    assert is_error(document, param, code), document
    await is_fine(server, client)


@pytest.mark.parametrize("case", IMAGES.values(), ids=IMAGES)
async def test_refuses_image(server: Any, client: Any, case: Any) -> None:
    """What is no image, or too much of one, is refused as such (fault-17)."""
    url, status, code = case
    with pytest.raises(openai.APIStatusError) as caught:
        await client.chat.completions.create(model="sim", messages=image(url))
    error = caught.value
    assert error.status_code == status
    assert error.code == code
    assert error.type == "invalid_request_error"
    assert error.param.startswith("messages")
    await is_fine(server, client)


async def test_refuses_more_frames_than_allowed(server: Any, client: Any) -> None:
    """Images are counted over the whole request."""
    with pytest.raises(openai.APIStatusError) as caught:
        await client.chat.completions.create(
            model="sim", messages=user(*[encoded()] * 65)
        )
    assert caught.value.status_code == 413
    assert "65 images" in caught.value.message
    await is_fine(server, client)


async def test_refuses_more_pixels_than_allowed(server: Any, client: Any) -> None:
    """Pixels are added up over the whole request."""
    with pytest.raises(openai.APIStatusError) as caught:
        await client.chat.completions.create(
            model="sim", messages=user(*[png(6000, 6000)] * 5)
        )
    assert caught.value.status_code == 413
    assert "180000000 pixels" in caught.value.message
    await is_fine(server, client)


@pytest.mark.parametrize(
    "name",
    [b"\xff\xfe", b"a b", b"../../x", b"x" * 129, b"", b"caf\xc3\xa9", b"a;b"],
)
async def test_refuses_id_that_is_no_name(server: Any, client: Any, name: Any) -> None:
    """Ids that could not be logged or sent back are refused (fault-19, S7)."""
    status, headers, document = await answer_to(
        server.port, ask(), b"x-request-id: " + name
    )
    assert status == 400
    assert is_error(document, "x-request-id", "invalid_id")
    assert re.fullmatch("[0-9a-f]+", headers["x-request-id"])  # one that is drawn
    await is_fine(server, client)


@pytest.mark.parametrize("name", [b"\x1b[31mred", b"nul\0"])
async def test_refuses_header_that_is_no_header(server: Any, name: Any) -> None:
    """What the HTTP parser refuses never gets as far as an endpoint (fault-19)."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(b"GET /health HTTP/1.1\r\nx-request-id: " + name + b"\r\n\r\n")
    assert (await reader.read()).startswith(b"HTTP/1.1 400")
    writer.close()
    await writer.wait_closed()


async def test_returns_id_that_is_a_name(server: Any) -> None:
    """A decent id comes back, and names the completion."""
    status, headers, document = await answer_to(
        server.port, ask(max_tokens=1), b"x-request-id: Abc-1._"
    )
    assert status == 200
    assert headers["x-request-id"] == "abc-1._"
    assert document["id"] == "chatcmpl-Abc-1._"


@pytest.mark.parametrize("declared", [True, False])
async def test_refuses_body_of_200_megabytes(
    server: Any, client: Any, declared: bool
) -> None:
    """A 200 MB body is 413 and is never in memory (fault-16, S7)."""
    piece = b"x" * 2**20

    async def pieces() -> Any:
        for _ in range(200):
            yield piece

    headers = {"content-type": "application/json"}
    if declared:
        headers["content-length"] = str(200 * 2**20)
    before = _peak()
    answer = await client._client.post(
        f"{server.url}/chat/completions", content=pieces(), headers=headers
    )
    assert answer.status_code == 413
    assert is_error(answer.json(), None, "request_too_large")
    assert _peak() - before < 120 * 2**20
    await is_fine(server, client)


def _peak() -> int:
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


async def test_ignores_fields_it_does_not_know(server: Any, client: Any) -> None:
    """Fields of other servers, and harmless ones, are no reason to refuse."""
    answer = await client.chat.completions.create(
        model="sim",
        messages=TEXT,
        max_completion_tokens=2,
        n=1,
        top_p=1,
        stop=[],
        seed=3,
        user="somebody",
        metadata={"a": "b"},
        store=False,
        response_format={"type": "text"},
        extra_body={"unheard_of": {"deep": [1, 2]}},
    )
    assert answer.usage.completion_tokens == 2
    await server.quiet()


@pytest.mark.parametrize("encoding", ["gzip", "br", "x-odd"])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/generate"])
async def test_refuses_compressed_body(
    server: Any, client: Any, path: str, encoding: str
) -> None:
    """What to do about it is said, not that the body is no JSON."""
    answer = await client._client.post(
        f"http://127.0.0.1:{server.port}{path}",
        content=gzip.compress(b"{}"),
        headers={"content-encoding": encoding},
    )
    assert answer.status_code == 400
    assert is_error(answer.json(), "content-encoding", "unsupported_encoding")
    assert "without content-encoding" in answer.text
    await server.quiet()


@pytest.mark.parametrize("body", [b"null", b"[]", b"1", b'"text"'])
async def test_says_that_a_body_is_an_object(
    server: Any, client: Any, body: bytes
) -> None:
    """A body that is no object gets a clear error, without names of our types."""
    url = f"http://127.0.0.1:{server.port}/generate"
    answer = await client._client.post(url, content=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == "The body must be a JSON object"
    await server.quiet()


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("get", "/v1/chat/completions", 405), ("get", "/v1/nothing", 404)],
)
async def test_answers_wrong_paths_in_shape(
    server: Any, client: Any, method: str, path: str, status: int
) -> None:
    """Paths and methods that do not exist are errors of the same shape."""
    answer = await client._client.get(f"http://127.0.0.1:{server.port}{path}")
    assert answer.status_code == status
    assert answer.json()["error"]["type"] == "invalid_request_error"


LONG = {
    "/v1/chat/completions": ({"messages": user("x" * 60)}, "messages"),
    "/v1/responses": ({"input": "x" * 60}, "input"),
    "/generate": ({"text": "x" * 60}, "text"),
    "/generate-chat": ({"messages": user("x" * 60)}, "messages"),
}
PICTURES = {
    "/v1/chat/completions": ({"messages": user(png(8, 8), png(8, 8))}, "messages"),
    "/v1/responses": (
        {
            "input": [
                {
                    "role": "user",
                    "content": [
                        {"type": "input_image", "image_url": data_url(png(8, 8))}
                    ]
                    * 2,
                }
            ]
        },
        "input",
    ),
    "/generate": ({"text": "", "images": [data_url(png(8, 8))] * 2}, "images"),
}


@pytest.mark.parametrize("asked", ["text", "pictures", "pixels"])
async def test_names_the_field_of_its_own_api(asked: str) -> None:
    """The error for too large a value names its field."""
    cases = LONG if asked == "text" else PICTURES
    limits = MediaLimits(request_pixels=100)
    if asked == "pictures":
        limits = MediaLimits(images=1)
    settings = AppSettings(model="sim", text_chars=50, media=limits)
    async with asyncio.timeout(120), running(settings=settings) as server:
        for path, (ask, field) in cases.items():
            url = f"http://127.0.0.1:{server.port}{path.removesuffix('-chat')}"
            async with httpx.AsyncClient() as http:
                told = await http.post(url, json={"model": "sim", **ask})
            assert told.status_code == (400 if asked == "text" else 413)
            assert told.json()["error"]["param"] == field


@pytest.mark.parametrize("error", [BadChat("no"), BadImage("no"), ChatTooLong("no")])
async def test_names_the_field_of_what_the_processor_refuses(error: Exception) -> None:
    """Errors that are found after the body is read also name their field."""

    class Refusing(GatedProcessor):
        def prepare(self, chat: Chat) -> Prepared:
            raise error

    cases = LONG if type(error) is BadChat else PICTURES
    async with asyncio.timeout(120), running(processor=Refusing()) as server:
        for path, (ask, field) in cases.items():
            url = f"http://127.0.0.1:{server.port}{path.removesuffix('-chat')}"
            async with httpx.AsyncClient() as http:
                told = await http.post(url, json={"model": "sim", **ask})
            assert told.status_code == 400
            assert told.json()["error"]["param"] == field
        await server.quiet()


async def test_reads_past_a_byte_order_mark(server: Server) -> None:
    """Editors and shells write one before what is JSON otherwise."""
    status, _, document = await answer_to(
        server.port, b"\xef\xbb\xbf" + ask(max_tokens=1)
    )
    assert status == 200, document
    await server.quiet()


async def test_refuses_body_compressed_on_its_way(server: Server) -> None:
    """A transfer coding that is not supported is refused as well."""
    body = ask(max_tokens=1)
    chunks = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\n")
    writer.write(b"connection: close\r\ntransfer-encoding: gzip, chunked\r\n\r\n")
    writer.write(chunks)
    head, _, answer = (await reader.read()).partition(b"\r\n\r\n")
    writer.close()
    assert head.startswith(b"HTTP/1.1 400 ")
    assert is_error(json.loads(answer), "transfer-encoding", "unsupported_encoding")
    await server.quiet()


@pytest.mark.parametrize(
    ("path", "header"),
    [("/v1/chat/completions", "x-request-id"), ("/v1/messages", "request-id")],
)
@pytest.mark.parametrize("name", ["Abc-1", ""])
async def test_names_request_that_is_refused_by_its_size(
    server: Server, path: str, header: str, name: str
) -> None:
    """Every refusal has a request id, whatever layer refused it."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    named = f"x-request-id: {name}\r\n" if name else ""
    asked = f"POST {path} HTTP/1.1\r\nhost: x\r\n{named}connection: close\r\n"
    writer.write(f"{asked}content-length: {2**31}\r\n\r\n".encode())
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    assert head.startswith("HTTP/1.1 413 ")
    id_ = head.partition(f"\r\n{header}: ")[2].partition("\r\n")[0]
    assert id_ == (name or id_) != ""
    if path == "/v1/messages":
        length = int(head.partition("content-length: ")[2].partition("\r\n")[0])
        assert json.loads(await reader.readexactly(length))["request_id"] == id_
    writer.close()
