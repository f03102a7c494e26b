"""Requests made up from the server's own description, and what is to be true of each."""

from __future__ import annotations

import base64
import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import hypothesis
import requests
import schemathesis

# Otherwise imported in a thread, where pytest's parsing of it meets that of another
# thread: CPython 3.11 counts the depth of both in one place (gh-106905).
import schemathesis.specs.openapi.schemas
from http_kit import Server, encoded, png, running
from hypothesis import strategies
from prometheus_client import CollectorRegistry
from schemathesis import GenerationMode
from schemathesis.checks import CHECKS

from lifecycle_asgi.prometheus import Metrics
from lifecycle_engine import AppSettings, ChatDefaults

# Busy for a while is the one failure of the server that is none.
BUSY = (503, 529)
# On a machine with many other things to do.
SLOW = 30.0
NAMES = [
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
    "negative_data_rejection",
    "unsupported_method",
]
SETTINGS = hypothesis.settings(
    database=None,
    deadline=None,
    derandomize=False,
    phases=[hypothesis.Phase.generate, hypothesis.Phase.shrink],
    suppress_health_check=list(hypothesis.HealthCheck),
)


@dataclass
class Tally:
    """What came of the requests to one endpoint."""

    cases: int = 0
    slowest: float = 0.0
    statuses: Counter[int] = field(default_factory=Counter)


# Pictures, and what is none, where a schema asks for a URL or for base64.
_DATA = [base64.b64encode(data).decode() for data in (encoded(), png(8, 8), b"no", b"")]
_URLS = [*(f"data:image/png;base64,{data}" for data in _DATA), "https://here/x", "x:"]
schemathesis.openapi.format("uri", strategies.sampled_from(_URLS))
schemathesis.openapi.format("byte", strategies.sampled_from([*_DATA, "?"]))


def operations(url: str) -> list[Any]:
    """All that the server at *url* says it can do, with answers of a few tokens."""
    document = requests.get(f"{url}/openapi.json", timeout=600).json()
    for form in document["components"]["schemas"].values():
        for name, field_ in form.get("properties", {}).items():
            if name.startswith("max_") and name.endswith("tokens"):
                for each in field_.get("anyOf", [field_]):
                    if each.get("type") == "integer":
                        each["maximum"] = 300
    schema = schemathesis.openapi.from_dict(document)
    return [result.ok() for result in schema.get_all_operations()]


def attack(url: str, operation: Any, *, cases: int, seed: int) -> Tally:
    """Send *cases* requests to one endpoint, half of them wrong on purpose."""
    tally = Tally()
    checks = CHECKS.get_by_names(NAMES)
    with requests.Session() as session:

        def one(case: Any) -> None:
            began = time.monotonic()
            response = case.call(base_url=url, session=session, timeout=600)
            took = time.monotonic() - began
            tally.cases += 1
            tally.slowest = max(tally.slowest, took)
            tally.statuses[response.status_code] += 1
            found = response.status_code, response.text
            assert response.status_code < 500 or response.status_code in BUSY, found
            assert took < SLOW
            case.validate_response(response, checks=checks)

        modes = [GenerationMode.POSITIVE, GenerationMode.NEGATIVE]
        for mode in modes if operation.body or operation.headers else modes[:1]:
            share = cases // 2 if operation.body or operation.headers else cases
            test = hypothesis.given(case=operation.as_strategy(mode))(one)
            settings = hypothesis.settings(SETTINGS, max_examples=share)
            hypothesis.seed(seed)(settings(test))()
    return tally


@contextlib.asynccontextmanager
async def target() -> AsyncIterator[Server]:
    """A server that answers fast, of few tokens, and has metrics to tell."""
    defaults = ChatDefaults(max_tokens=16)
    settings = AppSettings(model="sim", defaults=defaults)
    options = ("--max-length=256", "--sim-decode-step=0", "--max-waiting=4096")
    metrics = Metrics(registry=CollectorRegistry())
    async with running(*options, settings=settings, metrics=metrics) as server:
        yield server
