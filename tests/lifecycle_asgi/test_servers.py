"""Every server tells, through the middleware, that a client left (fault-14)."""

from __future__ import annotations

import pytest
import servers
from servers import FORMS, KINDS, LEAVES, STACKS, Kind

# For a busy machine; the table in docs/reference/servers.md has the milliseconds.
WITHIN_S = 2.0


@pytest.mark.parametrize("stack", STACKS)
@pytest.mark.parametrize("kind", KINDS, ids=[kind.name for kind in KINDS])
def test_hears_client_leave(kind: Kind, stack: str) -> None:
    """Above, below and without BaseHTTPMiddleware; FIN, RST and half-close."""
    if not kind.installed:
        pytest.skip(f"{kind.package} is not installed")
    with servers.running(kind, stack) as server:
        for form in FORMS.keys() - kind.deaf:
            for how in LEAVES:
                seconds, gone = server.leave(form, how)
                assert gone, (form, how)
                assert seconds < WITHIN_S, (form, how)
