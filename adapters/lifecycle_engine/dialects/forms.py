"""Checking a JSON body against a form: what is wrong is told, nothing is kept."""

from __future__ import annotations

from codecs import BOM_UTF8
from collections.abc import Mapping
from typing import Any, TypeVar

import pydantic_core
from pydantic import BaseModel, ConfigDict, ValidationError

from lifecycle_asgi.media import TooDeep, find_media
from lifecycle_engine.api_errors import ApiError, bad_request

F = TypeVar("F", bound="Form")
# Fields, each with the values that change nothing.
Unsupported = Mapping[str, tuple[Any, ...]]

# What no API here can do, and servers and clients of them know by these names: whoever
# sends it counts on it.
NOWHERE: Unsupported = {
    "add_generation_prompt": (True,),
    "allowed_token_ids": (),
    "bad_words": ([],),
    "best_of": (1,),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "do_sample": (True,),
    "documents": ([],),
    "ebnf": (),
    "echo": (False,),
    "frequency_penalty": (0,),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "include_stop_str_in_output": (False,),
    "json_schema": (),
    "logit_bias": ({},),
    "max_new_tokens": (),
    "min_new_tokens": (0,),
    "min_tokens": (0,),
    "mm_processor_kwargs": ({},),
    "no_repeat_ngram_size": (0,),
    "presence_penalty": (0,),
    "prompt_logprobs": (),
    "regex": (),
    "repetition_penalty": (1,),
    "response_format": ({"type": "text"},),
    "skip_special_tokens": (True,),
    "stop_token_ids": ([],),
    "structured_outputs": ({},),
    "thinking": ({"type": "disabled"},),
    "truncate_prompt_tokens": (),
    "typical_p": (1,),
    "use_beam_search": (False,),
}
# Each costs a hundred bytes and a microsecond in which nothing else runs. A text
# that has more commas and brackets than this has more tokens than the wire takes.
_MAX_VALUES = 2**18
# Of a body that is wrong anyway, to say better why.
_MAX_LOOKED_AT = 2**12
# Objects whose keys a client makes up.
_KEYS_OF_CLIENTS = ("metadata",)


class Form(BaseModel):
    """What a request is checked against, field by field."""

    model_config = ConfigDict(
        strict=True, extra="ignore", allow_inf_nan=False, hide_input_in_errors=True
    )

    def __repr_args__(self) -> list[tuple[str, Any]]:
        """Show nothing: a request is what its client said."""
        return []


def either(**fields: str) -> dict[str, Any]:
    """What a schema says besides, where one of some *fields* has to be there.

    Args:
        fields: The JSON type of each.
    """
    return {
        "anyOf": [
            {"required": [name], "properties": {name: {"type": kind}}}
            for name, kind in fields.items()
        ]
    }


def checked(form: type[F], body: bytes, unsupported: Unsupported) -> F:
    """Check a body against a form.

    Args:
        form: What it has to be.
        body: JSON.
        unsupported: Fields that would change the answer and are not supported, beside
            `NOWHERE`, each with the values that change nothing.

    Raises:
        ApiError: 400, with the path of the first offending field in ``param``.
            Neither it nor its context refers to the body.
    """
    document = _parse_json(body)
    unsupported = {**NOWHERE, **unsupported}
    try:
        request = form.model_validate(document)
    except ValidationError as error:
        mistake = error.errors(include_input=False, include_url=False)[0]
        foreign = _foreign(document)
    else:
        _refuse_unsupported(document, unsupported)
        return request
    if foreign is not None:
        raise foreign
    param = _param(mistake["loc"], unsupported)
    words = mistake["msg"] if param else "The body has to be a JSON object"
    if mistake["type"] == "union_tag_invalid":  # whose words are the client's own
        words = f"type should be one of {mistake['ctx']['expected_tags']}"
    raise bad_request(
        f"{words} (at {param})" if param else words,
        param=param,
        code=_code(mistake["type"]),
    )


def _parse_json(body: bytes) -> object:
    """Decode JSON with nothing that only Python allows, at most 200 levels deep.

    A byte order mark is let pass: some shells set one before all that they write.
    """
    body = body.removeprefix(BOM_UTF8)
    # Also counts what stands in texts; base64, where bodies are long, has none.
    if sum(body.count(mark) for mark in (b",", b"[", b"{")) > _MAX_VALUES:
        problem = f"The body has more than {_MAX_VALUES} values; send less"
        raise bad_request(problem, code="invalid_json")
    try:
        return pydantic_core.from_json(body, allow_inf_nan=False, cache_strings="keys")
    except ValueError as error:
        message = str(error)
    raise bad_request(f"The body is not valid JSON: {message}", code="invalid_json")


def _foreign(document: object) -> ApiError | None:
    """What to say of video, audio and files, which no form here has a place for."""
    try:
        found = find_media(document, max_values=_MAX_LOOKED_AT)
    except TooDeep:
        return None
    for media in found:
        if media.kind != "image":
            problem = f"Input of {media.kind} is not supported; send text and images"
            param = f"{media.path}.type"
            return bad_request(problem, param=param, code="unsupported_media")
    return None


def _refuse_unsupported(document: Any, unsupported: Unsupported) -> None:
    for name, harmless in unsupported.items():
        value = document.get(name)
        if value is not None and not any(_same(value, each) for each in harmless):
            message = f"{name} is not supported by this server; leave it out"
            raise bad_request(message, param=name, code="unsupported_parameter")


def _same(value: object, harmless: object) -> bool:
    # In JSON, unlike here, false is not 0 and true is not 1.
    return value == harmless and isinstance(value, bool) is isinstance(harmless, bool)


def _param(loc: tuple[int | str, ...], unsupported: Unsupported) -> str | None:
    if loc and (loc[0] in unsupported or loc[0] in _KEYS_OF_CLIENTS):
        return str(loc[0])  # what follows may name the branch of a union, or a key
    path = ""
    for step in loc:
        dot = "." if path else ""
        path += f"[{step}]" if isinstance(step, int) else f"{dot}{step}"
    return path or None


def _code(kind: str) -> str:
    if kind == "missing":
        return "missing_required_parameter"
    return "invalid_type" if kind.endswith("_type") else "invalid_value"
