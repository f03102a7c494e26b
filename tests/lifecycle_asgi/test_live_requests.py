"""The list of live requests forgets what has ended, also where no viewer looks at it."""

from __future__ import annotations

from typing import Any

import pytest
from asgi_kit import ScriptedServer, http_scope

from lifecycle import SessionRegistry
from lifecycle_asgi import LifecycleMiddleware
from lifecycle_asgi.events import LiveRequests

pytestmark = pytest.mark.anyio
SCOPE = {"method": "POST", "path": "/", "headers": []}


async def test_forgets_requests_after_late_sessions() -> None:
    """A thousand clients that left before their session had closed leave two entries at most."""
    requests = LiveRequests((), lambda _: "client")
    async with SessionRegistry() as sessions:
        most = 0
        for number in range(1000):
            request = requests.begin(SCOPE)
            session = sessions.open(str(number))
            request.claim(session)
            requests.end(request)
            assert request.id in requests.found
            session.close("client_gone")
            await session.quiet()
            most = max(most, len(requests.found))
    assert most <= 2


async def test_keeps_requests_with_open_sessions() -> None:
    """One session that stays open holds up none of the others."""
    requests = LiveRequests((), lambda _: "client")
    async with SessionRegistry() as sessions:
        open_ = requests.begin(SCOPE)
        kept = sessions.open("open")
        open_.claim(kept)
        requests.end(open_)
        for number in range(100):
            request = requests.begin(SCOPE)
            session = sessions.open(str(number))
            request.claim(session)
            requests.end(request)
            session.close("client_gone")
            await session.quiet()
        assert open_.id in requests.found
        assert len(requests.found) <= 3
        kept.close("completed")


async def test_has_requests_of_every_path() -> None:
    """Those that no observer hears of, too, until they end."""
    requests, shown = LiveRequests((), lambda _: "client"), []

    async def app(_scope: Any, _receive: Any, _send: Any) -> None:
        shown.extend(each.what for each in requests.found.values())

    server = ScriptedServer()
    watched = LifecycleMiddleware(app, operation=lambda _: None, live=requests)
    await watched(http_scope("/v1/models"), server.receive, server.send)
    assert shown == ["POST /v1/models"]
    assert requests.found == {}
