"""Fields that a form knows and does not support: described and checked alike."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from lifecycle_engine.api_errors import ApiError
from lifecycle_engine.dialects.forms import NOWHERE
from lifecycle_engine.dialects.generate_schema import parse_generate
from lifecycle_engine.dialects.messages_schema import parse_messages
from lifecycle_engine.dialects.openai_schema import parse_request
from lifecycle_engine.dialects.openapi import describe
from lifecycle_engine.dialects.responses_schema import parse_responses

CHAT = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
FORMS: dict[str, tuple[Callable[[bytes], Any], dict[str, Any]]] = {
    "ChatRequest": (parse_request, CHAT),
    "MessagesRequest": (parse_messages, CHAT),
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
    fields = describe("sim")["components"]["schemas"][name]["properties"]
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
    for field in NOWHERE:
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
