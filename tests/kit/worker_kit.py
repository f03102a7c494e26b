"""Clients of a server with several worker processes."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import suppress
from http.client import HTTPConnection
from typing import Any


class Client(HTTPConnection):
    """A connection that is kept, and with it the worker that accepted it."""

    def answer(self) -> dict[str, int]:
        """Return the document of the next response."""
        response = self.getresponse()
        assert response.status == 200
        found: dict[str, int] = json.loads(response.read())
        return found

    def ask(self) -> dict[str, int]:
        """Send a request without a body, which is not admitted."""
        self.request("GET", "/")
        return self.answer()


def connect(port: int, wanted: Callable[[int], bool]) -> Client | None:
    """Connect to whichever worker accepts; ``None`` if its process is not *wanted*."""
    client = Client("127.0.0.1", port, timeout=120)
    with suppress(ConnectionError):  # it does not listen yet, or this worker ends
        if wanted(client.ask()["pid"]):
            return client
    client.close()
    return None


def until(condition: Callable[[], Any]) -> Any:
    """Wait until *condition* holds, and return what it returned."""
    late = time.monotonic() + 120
    while not (found := condition()):
        assert time.monotonic() < late
        time.sleep(0.005)
    return found
