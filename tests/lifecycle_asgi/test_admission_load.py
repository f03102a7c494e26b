"""What `Admission` tells load balancers: how full its lanes are, in each response."""

from __future__ import annotations

from typing import Any

import anyio
import pytest
from asgi_kit import ScriptedServer, http_scope

from lifecycle_asgi import Admission, AdmissionSettings, MemoryEstimate

pytestmark = pytest.mark.anyio
LOAD = b"endpoint-load-metrics"
PRICE = {"price": lambda *_: MemoryEstimate(work=300)}


def answering(*headers: tuple[bytes, bytes]) -> Any:
    """Return an application whose responses have *headers*."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send(
            {"type": "http.response.start", "status": 200, "headers": [*headers]}
        )
        await send({"type": "http.response.body", "body": b"x"})

    return app


async def reports(admission: Admission, body: bytes = b"") -> list[bytes]:
    """Send a request; return the reports in its response."""
    server = ScriptedServer(body)
    del server.messages[-1]
    server.messages[-1]["more_body"] = False
    headers = [(b"content-length", b"%d" % len(body))] if body else []
    with anyio.fail_after(120):
        scope = http_scope(headers=headers)
        scope["method"] = "POST" if body else "GET"
        await admission(scope, server.receive, server.send)
    start = next(it for it in server.sent if it["type"] == "http.response.start")
    return [value for name, value in start["headers"] if name == LOAD]


async def test_each_response_says_how_full_the_lanes_are() -> None:
    """One without a body, one that is admitted, and one that is refused."""
    admission = Admission(
        answering(),
        environment={"LIFECYCLE_LOAD_HEADER": "1"},
        bytes=1600,
        slots=4,
        max_waiting=0,
        **PRICE,
    )
    idle = b"TEXT application_utilization=0.0000, mem_utilization=0.0000"
    assert await reports(admission) == [idle + b", named_metrics.waiting=0"]
    # 300 of 1,200 bytes for requests and of 1,600 in all, and one of four slots.
    work = b"TEXT application_utilization=0.2525, mem_utilization=0.1894"
    (report,) = await reports(admission, b"x")
    assert report == work + b", named_metrics.waiting=0"
    slots = admission.gates[-1]
    with await slots.admit(slots=4):
        (report,) = await reports(admission, b"x")
    assert report.startswith(b"TEXT application_utilization=1.0000, mem_uti")


async def test_a_report_of_the_application_stays() -> None:
    """A server that reports its own load knows more."""
    admission = Admission(
        answering((LOAD, b"TEXT cpu_utilization=0.5")), environment={}, load_header=True
    )
    assert await reports(admission) == [b"TEXT cpu_utilization=0.5"]


async def test_says_nothing_unless_asked() -> None:
    """Clients would see it, too."""
    assert await reports(Admission(answering(), environment={})) == []
    with pytest.raises(TypeError, match="load_header must be True or False, not 'no'"):
        AdmissionSettings(load_header="no")  # type: ignore[arg-type]
