"""Parsed requests, answers as they are written, and errors of the APIs, without a server."""

from __future__ import annotations

import base64
import json
import random
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest
from canaries import CANARY, CHAT, GENERATE, MESSAGES, RESPONSES, good, traces_of
from hypothesis import given, strategies as st

pytest.importorskip("opentelemetry.sdk")
pytest.importorskip("structlog")
pytest.importorskip("prometheus_client")

from lifecycle import (
    AdmissionTimeout,
    CostTooLarge,
    EngineLost,
    GateClosed,
    GateFull,
    SessionEnded,
    SessionExists,
    StartTimeout,
    StreamTimeout,
)
from lifecycle_asgi import json_body
from lifecycle_engine import ApiError, BadChat, BadImage, SimProcessor
from lifecycle_engine.api.anthropic_messages import parse_messages
from lifecycle_engine.api.base import (
    EventTemplate,
    Piece,
    ResponseWriter,
    StopStrings,
    TextDecoder,
    Usage,
    dump,
)
from lifecycle_engine.api.chat_request import UNSUPPORTED_EVERYWHERE, parse_request
from lifecycle_engine.api.generate import parse_generate
from lifecycle_engine.api.openai_chat import OPENAI
from lifecycle_engine.api.openai_responses import parse_responses
from lifecycle_engine.api.openapi import openapi_document
from lifecycle_engine.api.operations import page
from lifecycle_engine.errors import ChatTooLong, to_api_error
from lifecycle_engine.multimodal.limits import decode_data_url
from lifecycle_zmq import RequestRejected


def cut(pieces: list[str], stops: list[str]) -> tuple[str, bool]:
    """A text by its pieces, as a client would see it, and whether a stop came."""
    strings = StopStrings(stops)
    shown = ""
    for piece in pieces:
        shown += strings.push(piece)
        if strings.hit:
            return shown, True
    return shown + strings.flush(), False


@pytest.mark.parametrize(
    ("pieces", "stops", "shown"),
    [
        (["one two", " three"], ["two"], "one "),
        (["one t", "w", "o three"], ["two"], "one "),
        (["one t", "w", "e"], ["two"], "one twe"),
        (["aab"], ["ab", "b"], "a"),
        (["a", "a", "b"], ["aab"], ""),
        (["aa", "ab"], ["aab"], "a"),
        (["ab", "cd"], ["abcd", "c"], "ab"),
        (["abcd"], ["abcd", "c"], "ab"),
        (["abc"], ["bc", "abc", "c"], ""),
        (["x"], [], "x"),
    ],
)
def test_text_ends_before_the_first_stop(
    pieces: list[str], stops: list[str], shown: str
) -> None:
    """Wherever the pieces are cut, nothing of a stop string is ever shown."""
    assert cut(pieces, stops)[0] == shown


@given(
    st.lists(st.text("abc", max_size=4), max_size=12),
    st.lists(st.text("abc", min_size=1, max_size=4), max_size=3),
)
def test_pieces_are_cut_as_the_whole(pieces: list[str], stops: list[str]) -> None:
    """Piece by piece nothing else is shown than of the text up to its first stop."""
    text = "".join(pieces)
    ends = [(text.find(each) + len(each), each) for each in stops if each in text]
    shown, hit = cut(pieces, stops)
    assert hit == bool(ends)
    assert (shown, hit) == cut([text], stops)
    if not ends:
        assert shown == text
    else:
        assert text.startswith(shown)
        assert not any(each in shown for each in stops)
        assert any(text[len(shown) :].startswith(each) for _, each in ends)


def test_nothing_is_held_without_need() -> None:
    """Only what a stop string may begin with waits for further text."""
    strings = StopStrings(["STOP"])
    seen: list[Any] = [strings.push(piece) for piece in ("a S", "T", "A", "R", "x")]
    assert seen == ["a ", "", "STA", "R", "x"]


@pytest.mark.parametrize(("told", "counted"), [(3, 3), (9, 5)])
def test_no_more_is_cached_than_was_asked(told: int, counted: int) -> None:
    """Whatever an engine says: what was read of a prompt is never less than nothing."""
    usage = Usage(prompt_tokens=5)
    text = TextDecoder(SimProcessor().detokenizer(), usage)
    items = [{"cached_tokens": told}, [104], {"finish_reason": "stop"}]
    assert text_of(text, items) == "h"
    assert (usage.cached_tokens, usage.completion_tokens) == (counted, 1)


@pytest.mark.parametrize("together", [True, False])
def test_no_token_behind_a_stop_is_counted(together: bool) -> None:
    """Tokens that wait for a slow reader come at once, with the same report."""
    usage = Usage(prompt_tokens=1)
    text = TextDecoder(SimProcessor().detokenizer(), usage, ["STOP"])
    tokens = list(b"one STOP two")
    items = [tokens] if together else [[token] for token in tokens]
    assert text_of(text, [*items, {"finish_reason": "length"}]) == "one "
    assert (usage.completion_tokens, text.finish_reason) == (8, "stop")


def text_of(text: TextDecoder, items: list[Any]) -> str:
    """The text of *items*, as the reader of a stream takes it."""
    parts = []
    for item in items:
        parts.append(text.push(item) or Piece(""))
        if text.stop is not None:
            break
    else:
        parts.append(text.flush())
    return "".join(piece.text for piece in parts)


@pytest.mark.parametrize("text", ["a", "", '"\\\n\x00', "é€😀", "\u2028"])
def test_encodes_events_of_text_as_any_other(text: str) -> None:
    """An event that is made from a template is the one that its document makes."""

    def document(text: str) -> dict[str, Any]:
        return {"id": "\x00x", "choices": [{"delta": {"content": text}, "n": 1.5}]}

    assert EventTemplate(dump, document).event(text) == dump(document(text))


ERROR = ApiError(503, "The server is shutting down", code="shutting_down")


class Cut(Exception):
    """Something ended the request."""


@pytest.fixture
def anyio_backend() -> str:
    """One is enough: nothing waits here."""
    return "asyncio"


def cut_at(number: int, sent: list[Any]) -> Any:
    """A ``send`` that waits before its message of that number, and is cut there."""

    async def send(message: Any) -> None:
        nonlocal number
        number -= 1
        if number == 0:
            raise Cut
        sent.append(message)

    return send


@pytest.mark.anyio
async def test_finishes_document_that_was_cut_behind_its_head() -> None:
    """A head that declares a length is followed by that body, not by an error."""
    sent: list[Any] = []
    reply = ResponseWriter(cut_at(2, sent), OPENAI)
    with pytest.raises(Cut):
        await reply.json(200, {"a": 1})
    await reply.error(ERROR)
    head, body = sent
    assert dict(head["headers"])[b"content-length"] == b"%d" % len(body["body"])
    assert body["body"] == b'{"a":1}'


@pytest.mark.anyio
@pytest.mark.parametrize("way", ["json", "event", "done", "error"])
async def test_answers_with_an_error_what_was_cut_before_its_head(way: str) -> None:
    """A head that was not sent is no beginning: the error brings one of its own."""
    sent: list[Any] = []
    reply = ResponseWriter(cut_at(1, sent), OPENAI)
    answers = {
        "json": lambda: reply.json(200, {"a": 1}),
        "event": lambda: reply.event({"a": 1}),
        "done": lambda: reply.done({"a": 1}),
        "error": lambda: reply.error(ERROR),
    }
    with pytest.raises(Cut):
        await answers[way]()
    await reply.error(ERROR)
    head, body = sent
    assert (head["type"], head["status"]) == ("http.response.start", 503)
    assert b"shutting_down" in body["body"]


@pytest.mark.anyio
async def test_ends_stream_with_error() -> None:
    """What has begun as events ends with one more."""
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    reply = ResponseWriter(send, OPENAI)
    await reply.event({"a": 1})
    await reply.error(ERROR)
    assert b"shutting_down" in sent[-1]["body"]
    assert not sent[-1]["more_body"]


@pytest.mark.anyio
@pytest.mark.parametrize("way", ["json", "done", "error"])
async def test_sends_nothing_after_a_complete_response(way: str) -> None:
    """A request that fails once its client has all of it sends no second end (fault-61)."""
    sent: list[Any] = []
    reply = ResponseWriter(cut_at(100, sent), OPENAI)
    answers = {
        "json": lambda: reply.json(200, {"a": 1}),
        "done": lambda: reply.done({"a": 1}),
        "error": lambda: reply.error(ERROR),
    }
    await answers[way]()
    complete = list(sent)
    await reply.error(ERROR)
    assert sent == complete


ONE_MESSAGE = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
FORMS: dict[str, tuple[Callable[[bytes], Any], dict[str, Any]]] = {
    "ChatRequest": (parse_request, ONE_MESSAGE),
    "MessagesRequest": (parse_messages, ONE_MESSAGE),
    "ResponsesRequest": (parse_responses, {"input": "x"}),
    "GenerateRequest": (parse_generate, {"text": "x"}),
}
# Those that Python takes for the same are in it, too.
VALUES = (None, False, True, 0, 1, 0.0, 1.0, 2, "", "none", "auto", [], {}, [0])


def accepted(parse: Callable[[bytes], Any], body: dict[str, Any]) -> bool:
    """Whether a form takes this."""
    try:
        parse(json.dumps({"model": "sim", **body}).encode())
    except ApiError as refusal:
        assert refusal.status == 400
        return False
    return True


def described(value: Any, values: list[Any]) -> bool:
    """Whether it is one of *values* in JSON, where 1 and 1.0 are and true is not."""
    return any(
        value == each and isinstance(value, bool) == isinstance(each, bool)
        for each in values
    )


@pytest.mark.parametrize("name", FORMS)
def test_takes_what_changes_nothing_and_no_more(name: str) -> None:
    """A value is taken exactly where the server's description of itself has it."""
    parse, right = FORMS[name]
    fields = openapi_document("sim")["components"]["schemas"][name]["properties"]
    unsupported = {
        field: told["enum"]
        for field, told in fields.items()
        if told.get("description") == "Not supported"
    }
    assert len(unsupported) > 5
    for field, values in unsupported.items():
        for value in (*VALUES, *values):
            told = accepted(parse, {**right, field: value})
            assert told == described(value, values), (field, value)


@pytest.mark.parametrize("name", FORMS)
def test_refuses_by_name_what_other_servers_do(name: str) -> None:
    """An answer that is made without it is not the one that was asked for."""
    parse, right = FORMS[name]
    for field in UNSUPPORTED_EVERYWHERE:
        with pytest.raises(ApiError) as caught:
            parse(json.dumps({"model": "sim", **right, field: {"x": 2}}).encode())
        assert caught.value.fields["param"] == field


@pytest.mark.parametrize("name", FORMS)
def test_takes_how_to_draw_in_every_form(name: str) -> None:
    """Also where the API has no such field, as those who serve models by it have."""
    parse, right = FORMS[name]
    asked = {"temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1}
    request = parse(json.dumps({"model": "sim", **right, **asked}).encode())
    assert {field: getattr(request, field) for field in asked} == asked
    silent = parse(json.dumps({"model": "sim", **right}).encode())
    assert {getattr(silent, field) for field in asked} == {None}


def header(error: ApiError, name: str) -> str | None:
    """One header of *error*."""
    return {k.decode(): v.decode() for k, v in error.headers}.get(name)


@pytest.mark.parametrize(
    ("error", "status", "code", "after"),
    [
        (CostTooLarge("no"), 413, "request_too_large", None),
        (GateFull("no", retry_after=2.2), 503, "server_overloaded", "3"),
        (AdmissionTimeout("no", retry_after=60.0), 503, "server_overloaded", "60"),
        (GateFull("no"), 503, "server_overloaded", "1"),
        (GateClosed("no"), 503, "shutting_down", None),
        (EngineLost("no", reason="oom", retry_after=500.0), 503, "engine_lost", "60"),
        (StartTimeout("no"), 504, "engine_timeout", "1"),
        (StreamTimeout("no", deadline="idle"), 504, "engine_timeout", "1"),
        (SessionExists("no"), 409, "session_busy", "1"),
        (SessionEnded("no", outcome="shutdown"), 503, "shutting_down", None),
        (SessionEnded("no", outcome="cancelled"), 499, "cancelled", None),
        (BadImage("image 1 is damaged"), 400, "invalid_image", None),
        (BadChat("no"), 400, "invalid_value", None),
        (ChatTooLong("no"), 400, "context_length_exceeded", None),
        (RequestRejected("duplicate_key", "no"), 500, "engine_error", None),
        (ApiError(429, "no", code="c", retry_after=0.2), 429, "c", "1"),
    ],
)
def test_describes_every_error(
    error: Exception, status: int, code: str, after: str | None
) -> None:
    """Each refusal and failure has its status, code, and time to come back."""
    told = to_api_error(error)
    assert told is not None
    assert (told.status, told.code, header(told, "retry-after")) == (
        status,
        code,
        after,
    )
    if after is None:
        assert header(told, "retry-after-ms") is None
    family = told.fields["type"]
    assert family == (
        "rate_limit_error"
        if status == 429
        else "server_error"
        if status >= 500
        else "invalid_request_error"
    )


def test_describes_no_mistake_of_ours() -> None:
    """Unknown values are left out."""
    assert to_api_error(KeyError("secret")) is None


def refusal_of(call: Callable[[], object]) -> int | None:
    """The status that *call* is refused with, if it is."""
    try:
        call()
    except ApiError as error:
        return error.status
    return None


@given(st.binary(max_size=100))
def test_accepts_or_refuses_any_bytes(body: bytes) -> None:
    """Whatever bytes come, they are refused with a 400."""
    with pytest.raises(ApiError) as caught:
        parse_request(body)
    assert caught.value.status == 400


COUNT = 2_000_000
BOMBS = {
    "lists": b'{"x":[' + b"[]," * COUNT + b"[]]}",
    "numbers": b'{"x":[' + b"1," * COUNT + b"1]}",
    "maps": b'{"x":[' + b"{}," * COUNT + b"{}]}",
    "parts": json.dumps(
        {"model": "m", "messages": [{"role": "user", "content": [1] * 100_000}]}
    ).encode(),
    "texts": json.dumps(
        {
            "model": "m",
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": ""}] * 40_000}
            ],
        }
    ).encode(),
    "messages": json.dumps({"model": "m", "messages": [1] * 100_000}).encode(),
    "stop": json.dumps({"model": "m", "messages": [], "stop": [1] * 100_000}).encode(),
    "bias": json.dumps(
        {
            "model": "m",
            "messages": [],
            "logit_bias": {str(i): "" for i in range(70_000)},
        }
    ).encode(),
}


@pytest.mark.parametrize("body", BOMBS.values(), ids=BOMBS)
def test_refuses_bomb_of_values(body: bytes) -> None:
    """A body is not unpacked into, or blamed for, millions of values (fault-16)."""
    tracemalloc.start()
    status = refusal_of(lambda: parse_request(body))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert status == 400
    assert peak < 32 * 2**20


def test_takes_long_text_of_commas() -> None:
    """What bounds the values leaves room for the text of a long table."""
    table = "1234.5," * (2**20 // 7)
    messages = [{"role": "user", "content": table}]
    body = json.dumps({"model": "m", "messages": messages}).encode()
    assert parse_request(body).messages[0].content[0].text == table


# Base64 of more than is copied, and of other lengths around it.
DATA = base64.b64encode(random.Random(1).randbytes(2**20)).decode()
LONG_URL = f"data:image/png;base64,{DATA}"
SOURCE = {"type": "base64", "media_type": "image/png", "data": DATA}


def large(parse: Callable[[bytes], Any], **fields: Any) -> bytes:
    """A body of each form with a large image, and *fields*."""
    image: dict[str, Any] = {"type": "image_url", "image_url": {"url": LONG_URL}}
    body: dict[str, Any] = {"model": "sim", "max_tokens": 1}
    if parse is parse_messages:
        image = {"type": "image", "source": SOURCE}
    if parse is parse_responses:
        image = {"type": "input_image", "image_url": LONG_URL}
        asked = [{"role": "user", "content": [image]}]
        return json.dumps({"model": "sim", "input": asked, **fields}).encode()
    if parse is parse_generate:
        return json.dumps({**body, "text": "x", "images": [DATA], **fields}).encode()
    messages = [{"role": "user", "content": [image]}]
    return json.dumps({**body, "messages": messages, **fields}).encode()


def outcome(parse: Callable[[bytes], Any], body: bytes) -> Any:
    """What a form makes of a body: its fields and its images, or the refusal."""
    try:
        request = parse(body)
        parts = [part for message in request.messages for part in message.content]
        urls = [part.image_url.url for part in parts if part.image_url is not None]
        images = [decode_data_url(url, param="x") for url in urls]
    except ApiError as refusal:
        return refusal.status, refusal.code, refusal.param, str(refusal)
    texts = [(type(part.text), part.text) for part in parts]
    return request.model_dump(exclude={"messages"}), request.echo, texts, images


def at_once(parse: Callable[[bytes], Any], body: bytes) -> Any:
    """The same of a parser that copies every string."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_body, "_MIN_BODY", 2**40)
        return outcome(parse, body)


TEXT = "say \u4e2d " * 2**18
FIELDS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "model": {"model": DATA},
    "user": {"user": DATA},
    "unknown": {"unheard_of": [DATA, {DATA: DATA}]},
    "tools": {"tools": [DATA]},
    "metadata": {"metadata": {"user_id": DATA}},
    "stop": {"stop": DATA},
    "instructions": {"instructions": LONG_URL},
    "system": {"system": TEXT},
    "text": {"text": LONG_URL},
    "messages": {"messages": [{"role": "user", "content": TEXT}]},
    "role": {"messages": [{"role": DATA, "content": "x"}]},
    "kind": {"messages": [{"role": "user", "content": [{"type": DATA}]}]},
    "part": {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": LONG_URL}]},
        ]
    },
    "video": {"input": [{"role": "user", "content": [{"type": "input_video"}]}, DATA]},
    "padding": {"images": [f"{DATA[:-1]}="]},
    "space": {"images": [f"{DATA[: 2**19]} {DATA[2**19 :]}"]},
    "https": {"images": [f"https://{DATA}"]},
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", FIELDS)
def test_reads_strings_in_the_body_as_any_other(form: str, name: str) -> None:
    """Wherever a long string is, the answer is that to one which was copied."""
    parse = FORMS[form][0]
    body = large(parse, **FIELDS[name])
    assert outcome(parse, body) == at_once(parse, body)


@pytest.mark.parametrize("form", FORMS)
def test_copies_no_large_image(form: str) -> None:
    """It is decoded from the body: neither a parser nor a copy of it holds the lock."""
    parse = FORMS[form][0]
    body = large(parse)
    tracemalloc.start()
    request = parse(body)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < len(body) / 2
    url = request.messages[0].content[0].image_url.url
    assert isinstance(url, json_body.LongText)
    assert len(decode_data_url(url, param="x")) == 2**20


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("parse", "path"),
    [
        (parse_request, CHAT),
        (parse_messages, MESSAGES),
        (parse_responses, RESPONSES),
        (parse_generate, GENERATE),
    ],
)
async def test_shows_no_canary_of_parsed_requests(parse: Any, path: str) -> None:
    """The `repr` and the `str` of a request, whole and part by part, say nothing of it."""
    for where, ask in good(CANARY):
        if where == path:
            request = parse(json.dumps(ask).encode())
            parts = [part for message in request.messages for part in message.content]
            shown = f"{request!r} {request} {request.messages!r} {parts!r}"
            assert not [word for word in traces_of(CANARY) if word in shown]


def test_page_shows_names_as_text() -> None:
    """The name of a model and of a host are no HTML."""
    text = page("<b>it's</b>", "http://<i>")
    assert "<b>" not in text
    assert "<i>" not in text
    assert "it&#x27;\\&#x27;&#x27;s" in text  # the shell takes it, too
