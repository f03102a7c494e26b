"""A closed `Admission` reads no further body, at whatever moment it is closed."""

from __future__ import annotations

from typing import Any

import anyio
import pytest
from asgi_kit import ScriptedServer, http_scope

from lifecycle_asgi import Admission, responses

pytestmark = pytest.mark.anyio
DECLARED = 1_000_000


async def refuse_to_work(scope: Any, receive: Any, send: Any) -> None:
    """No request comes this far."""
    raise AssertionError


class Sending(ScriptedServer):
    """Sends a first part, and then one more for each event of `more` that is set."""

    def __init__(self) -> None:
        super().__init__(b"first")
        self.messages.pop()
        self.more: list[anyio.Event] = []

    async def receive(self) -> Any:
        """The next part, when it comes."""
        if self.messages or self.gone.is_set():
            return await super().receive()
        self.more.append(anyio.Event())
        await self.more[-1].wait()
        if self.gone.is_set():
            return {"type": "http.disconnect"}
        return {"type": "http.request", "body": b"more", "more_body": True}

    def leave(self) -> None:
        """Disconnect."""
        self.gone.set()
        for event in self.more:
            event.set()


@pytest.mark.parametrize("moment", ["between", "at_a_part", "at_the_grant"])
async def test_refuses_a_body_that_is_incomplete_when_it_closes(moment: str) -> None:
    """Also if a part of it, or its lease, comes in the very moment."""
    admission = Admission(refuse_to_work, environment={})
    server, bodies = Sending(), admission.gates[1]
    headers = [(b"content-length", str(DECLARED).encode())]
    scope = http_scope("/v1/chat/completions", headers=headers)
    taken = bodies.try_admit(bytes=bodies.statistics().bytes or 0)
    if moment != "at_the_grant":
        taken.release()
    with anyio.fail_after(120):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(admission, scope, server.receive, server.send)
            await anyio.wait_all_tasks_blocked()
            assert bodies.statistics().waiting == (moment == "at_the_grant")
            if moment == "at_a_part":
                server.more[-1].set()
                await anyio.lowlevel.checkpoint()
            taken.release()
            admission.close()
            await anyio.wait_all_tasks_blocked()
            assert server.status == 503
            assert b"shutting_down" in server.body
            assert bodies.statistics().bytes_in_use == 0
            server.leave()
    assert not admission._reading


async def test_refuses_by_the_head_what_comes_after_that() -> None:
    """And waits for no body of it."""
    admission, server = Admission(refuse_to_work, environment={}), Sending()
    admission.close()
    admission.close()
    scope = http_scope("/v1/chat/completions", headers=[(b"content-length", b"9")])
    with anyio.fail_after(120):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(admission, scope, server.receive, server.send)
            await anyio.wait_all_tasks_blocked()
            assert server.status == 503
            server.leave()


@pytest.mark.parametrize("refused_first", [False, True])
async def test_waits_for_no_rest_of_a_body_when_it_closes(
    refused_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client that stays has its answer, and keeps no server from its end."""
    monkeypatch.setattr(responses, "LINGER_SECONDS", 1e6)
    limit = 1 if refused_first else DECLARED
    admission = Admission(refuse_to_work, environment={}, max_body=limit)
    headers = [(b"content-length", str(DECLARED).encode())]
    scope, server = http_scope("/v1/chat/completions", headers=headers), Sending()
    with anyio.fail_after(120):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(admission, scope, server.receive, server.send)
            await anyio.wait_all_tasks_blocked()
            assert server.status == (413 if refused_first else None)
            admission.close()
    assert server.complete.is_set()
