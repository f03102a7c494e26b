"""The request map of a START, checked field by field.

Types are exact: what arrives came over a wire, where ``True`` for 1 or a float
for a count is a mistake to be told, not to be guessed at.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lifecycle_engine.runner import Prompt, Runner, Sampling

from .backend import RequestRejected

_FIELDS = frozenset(
    {
        "input_ids",
        "last_turn",
        "logprobs",
        "max_tokens",
        "min_p",
        "seed",
        "session",
        "share",
        "stop_ids",
        "temperature",
        "timeout",
        "top_k",
        "top_p",
    }
)
_MAX_STOP_IDS = 256
_MAX_TEMPERATURE = 100.0
_MAX_LOGPROBS = 20
_MAX_TOP_K = 2**31 - 1
_MAX_NAME = 256
_MAX_TIMEOUT = 86400.0


@dataclass(frozen=True, slots=True)
class Request:
    """A request that the runner can run.

    Attributes:
        prompt: For the runner.
        max_tokens: At least 1; fits the slot together with the prompt.
        stop_ids: Tokens that end the stream and are not part of it.
        nbytes: Of the tensors.
        share: Whose request it is: shares get free slots in turn.
        timeout: Seconds from its start until it has to be done; ``None`` is as
            long as it takes.
        tensors: Names of the tensors that it came with.
        session: Which of its share's conversations it is a turn of: the next turn
            of the same one may go on from this one's slot.
        last_turn: No turn follows: nothing is kept for one.
    """

    prompt: Prompt
    max_tokens: int
    stop_ids: frozenset[int]
    nbytes: int
    share: str = field(default="", repr=False)
    timeout: float | None = None
    tensors: tuple[str, ...] = ()
    session: str | None = field(default=None, repr=False)
    last_turn: bool = False


def parse(
    request: Mapping[str, Any],
    tensors: Mapping[str, memoryview],
    runner: Runner,
    *,
    max_tokens: int | None = None,
) -> Request:
    """Check a request map against a runner.

    Args:
        request: ``input_ids`` and ``max_tokens``; optionally ``stop_ids``, what
            `Sampling` has, ``share``, ``timeout``, ``session`` and ``last_turn``.
        tensors: Buffers by name. The mapping is copied, the buffers are not.
        runner: Whose limits hold.
        max_tokens: The most that a request may ask for; ``None``: what fits.

    Raises:
        RequestRejected: ``invalid_request``, ``context_length_exceeded`` or
            ``invalid_tensors``.
    """
    unknown = set(request) - _FIELDS
    if unknown:
        raise _invalid(f"{len(unknown)} unknown fields; known are {_known()}")
    ids = _token_ids(request, "input_ids", runner.vocab_size)
    if not ids:
        raise _invalid("input_ids is empty; at least one token is needed")
    stop_ids = _token_ids(request, "stop_ids", runner.vocab_size)
    if len(stop_ids) > _MAX_STOP_IDS:
        raise _invalid(f"{len(stop_ids)} stop_ids; at most {_MAX_STOP_IDS}")
    count = _max_tokens(request, max_tokens)
    if len(ids) + count > runner.max_length:
        raise RequestRejected(
            "context_length_exceeded",
            f"{len(ids)} prompt tokens and {count} max_tokens are {len(ids) + count}; "
            f"the limit is {runner.max_length}: shorten the prompt or max_tokens",
        )
    share, timeout = _name(request, "share"), _timeout(request)
    session = None
    if request.get("session") is not None:
        session = _name(request, "session")
    last = _last_turn(request)
    kept = session is not None and not last
    prompt = Prompt(ids, dict(tensors), _sampling(request), session=kept)
    try:
        runner.check(prompt)
    except ValueError as error:
        prompt.tensors.clear()
        raise RequestRejected("invalid_tensors", str(error)) from None
    nbytes = sum(memoryview(tensor).nbytes for tensor in tensors.values())
    return Request(
        prompt,
        count,
        frozenset(stop_ids),
        nbytes,
        share,
        timeout,
        tuple(tensors),
        session,
        last,
    )


def _known() -> str:
    return ", ".join(sorted(_FIELDS))


def _invalid(message: str) -> RequestRejected:
    return RequestRejected("invalid_request", message)


def _token_ids(request: Mapping[str, Any], name: str, vocab_size: int) -> list[int]:
    ids = request.get(name, [])
    if type(ids) is not list:
        raise _invalid(f"{name} is a {type(ids).__name__}; expected a list of int")
    if any(type(token) is not int for token in ids):
        raise _invalid(f"{name} has elements that are not int")
    if ids and not (min(ids) >= 0 and max(ids) < vocab_size):
        raise _invalid(f"{name} has ids outside of 0 to {vocab_size - 1}")
    return ids


def _max_tokens(request: Mapping[str, Any], limit: int | None) -> int:
    count = request.get("max_tokens")
    if type(count) is not int:
        raise _invalid(f"max_tokens is a {type(count).__name__}; expected an int")
    if count < 1 or (limit is not None and count > limit):
        bound = "1 or more" if limit is None else f"1 to {limit}"
        raise _invalid(f"max_tokens is {count}; expected {bound}")
    return count


def _sampling(request: Mapping[str, Any]) -> Sampling:
    temperature = _number(request, "temperature", 0.0, high=_MAX_TEMPERATURE)
    top_p = _number(request, "top_p", 1.0, high=1.0)
    min_p = _number(request, "min_p", 0.0, high=1.0)
    logprobs = _count(request, "logprobs", None, high=_MAX_LOGPROBS)
    top_k = _count(request, "top_k", 0, high=_MAX_TOP_K) or 0
    return Sampling(temperature, top_p, _seed(request), logprobs, top_k, min_p)


def _number(
    request: Mapping[str, Any], name: str, default: float, *, high: float
) -> float:
    value = request.get(name, default)
    if type(value) is not float:
        raise _invalid(f"{name} is a {type(value).__name__}; expected a float")
    if not (math.isfinite(value) and 0 <= value <= high):
        raise _invalid(f"{name} is {value}; expected 0 to {high}")
    return value


def _timeout(request: Mapping[str, Any]) -> float | None:
    if request.get("timeout") is None:
        return None
    seconds = _number(request, "timeout", 0.0, high=_MAX_TIMEOUT)
    if not seconds:
        raise _invalid("timeout is 0.0; expected more, or none")
    return seconds


def _name(request: Mapping[str, Any], name: str) -> str:
    value = request.get(name, "")
    if type(value) is not str:
        raise _invalid(f"{name} is a {type(value).__name__}; expected a str")
    if len(value) > _MAX_NAME:
        raise _invalid(f"{name} has {len(value)} characters; at most {_MAX_NAME}")
    return value


def _last_turn(request: Mapping[str, Any]) -> bool:
    value = request.get("last_turn", False)
    if type(value) is not bool:
        raise _invalid(f"last_turn is a {type(value).__name__}; expected a bool")
    return value


def _count(
    request: Mapping[str, Any], name: str, default: int | None, *, high: int
) -> int | None:
    value = request.get(name)
    if value is None:
        return default
    if type(value) is not int:
        raise _invalid(f"{name} is a {type(value).__name__}; expected an int or none")
    if not 0 <= value <= high:
        raise _invalid(f"{name} is {value}; expected 0 to {high}")
    return value


def _seed(request: Mapping[str, Any]) -> int | None:
    value = request.get("seed")
    if value is None:
        return None
    if type(value) is not int:
        raise _invalid(f"seed is a {type(value).__name__}; expected an int or nothing")
    if not 0 <= value < 2**63:
        raise _invalid("seed is out of range; expected 0 to 2**63 - 1")
    return value
