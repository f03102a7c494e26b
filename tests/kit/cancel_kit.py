"""The application in process, and requests that are cancelled at each of their awaits."""

from __future__ import annotations

import json
from typing import Any

import anyio
from asgi_kit import Cancelled, ScriptedServer, http_scope
from http_kit import Quiet, png, user

from lifecycle import Gate

TOKENS = 3


def request(*, stream: bool) -> bytes:
    """The request whose every await is cancelled: an image, parsed in a thread."""
    ask = {"model": "sim", "messages": user("go" * 3000, png(40, 30)), "stream": stream}
    return json.dumps({**ask, "max_tokens": TOKENS}).encode()


class World:
    """A running application without a server, and one call of it at a time."""

    def __init__(self, app: Any, gate: Gate, tasks: Any) -> None:
        self.app, self.gate, self.tasks = app, gate, tasks
        self.service = app.state.service
        self.outcomes: dict[str, int] = {}

    async def once(
        self,
        run: Cancelled,
        *,
        stream: bool = False,
        queued: bool = False,
        path: str = "/v1/chat/completions",
        body: bytes | None = None,
        leaver: anyio.Event | None = None,
    ) -> Any:
        """One request, cancelled or left as *run* says; then all must be quiet."""
        body = request(stream=stream) if body is None else body
        server = ScriptedServer(body[:3000], body[3000:], waits=True)
        if leaver is not None:
            server.gone = leaver
        if run.kind == "leave":
            run.cancel = server.gone.set
        scope = http_scope(path)
        known = {task.id for task in anyio.get_running_tasks()}
        lease = self.gate.try_admit() if queued else None
        if lease is not None:
            self.tasks.start_soon(self._release_when_awaited, lease, run)
        await run.run(self.app(scope, server.receive, server.send))
        run.done = True
        status = await Quiet(self.service).reached()
        for _ in range(50):
            left = [t for t in anyio.get_running_tasks() if t.id not in known]
            if not left:
                break
            await anyio.lowlevel.checkpoint()
        assert not left, left
        return server, status

    async def _release_when_awaited(self, lease: Any, run: Cancelled) -> None:
        with lease:
            while not (self.gate.statistics().waiting or getattr(run, "done", False)):
                await anyio.lowlevel.checkpoint()
