"""The events of a live view, read over HTTP."""

from __future__ import annotations

import json
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import httpx2

_PATH: Final = "/_lifecycle"
_UNIX: Final = "unix:"
_CONNECT_SECONDS: Final = 5.0
# Events come every second; without any for so long, the server hangs.
_SILENT_SECONDS: Final = 10.0
_DATA: Final = "data: "


class NoLiveView(Exception):
    """An address has no live view, or it does not answer; the text says what to do."""


class Viewer:
    """Reads one live view, and asks it for changes.

    Args:
        url: Address of the server, or of its live view if that has another path, or
            ``unix:PATH`` of a socket.
        key: Sent as a bearer, such as the admin key of ``lifecycle serve``.
        cacert: PEM file of the authority of an HTTPS server. Default: the system's.

    Raises:
        OSError: *cacert* cannot be read.
    """

    def __init__(
        self, url: str, *, key: str | None = None, cacert: Path | None = None
    ) -> None:
        socket = url.removeprefix(_UNIX) if url.startswith(_UNIX) else None
        if socket is not None:
            url = "localhost"
        if "://" not in url:
            url = f"http://{url}"
        parsed = httpx2.URL(url)
        path = parsed.path.rstrip("/") or _PATH
        self.url = str(parsed.copy_with(path=path, query=None, fragment=None))
        self.shown_url = self.url if socket is None else f"{_UNIX}{socket}"
        self._asks = "asks for a key" if key is None else "asks for another key"
        # As bytes: a string would have to be ASCII.
        bearer = None if key is None else {b"authorization": f"Bearer {key}".encode()}
        context = None if cacert is None else ssl.create_default_context(cafile=cacert)
        self._client = httpx2.AsyncClient(
            timeout=httpx2.Timeout(_SILENT_SECONDS, connect=_CONNECT_SECONDS),
            trust_env=False,
            headers=bearer,
            transport=httpx2.AsyncHTTPTransport(
                uds=socket, verify=True if context is None else context
            ),
        )
        self._token = ""

    async def read(self, show: Callable[[dict[str, Any]], object]) -> None:
        """Call *show* with each snapshot, until the server ends the events.

        It does so now and then; call this again.

        Raises:
            NoLiveView: There is none, or it may not be seen from here.

        Cancellation:
            Closes the connection.
        """
        try:
            async with self._client.stream("GET", f"{self.url}/events") as answer:
                await self._check(answer)
                async for line in answer.aiter_lines():
                    if line.startswith(_DATA):
                        event = _printable(json.loads(line.removeprefix(_DATA)))
                        self._token = event["token"]
                        show(event)
        except httpx2.HTTPError as error:
            what = str(error) or type(error).__name__
            raise NoLiveView(f"{self.shown_url} does not answer: {what}") from error

    async def _check(self, answer: httpx2.Response) -> None:
        if answer.status_code == 403:
            await answer.aread()
            raise NoLiveView(f"{self.shown_url}: {_printable(answer.text)}")
        if answer.status_code == 401:
            raise NoLiveView(
                f"{self.shown_url} {self._asks}; give it with --admin-key, or the "
                "address of the operator's pages, which the server printed"
            )
        kind = answer.headers.get("content-type", "")
        if answer.status_code != 200 or not kind.startswith("text/event-stream"):
            raise NoLiveView(
                f"{self.shown_url} is no live view (status {answer.status_code}); give "
                f"the address that `lifecycle serve` prints for it, or wrap your "
                f"application in lifecycle_asgi.LiveView"
            )

    async def cancel(self, id_: str) -> str:
        """Cancel a request; return what the server says.

        Cancellation:
            The request may be cancelled or not.
        """
        return str(_printable(await self._post("cancel", id_)))

    async def holders(self, id_: str) -> dict[str, list[str]] | str:
        """Return the places that hold the bytes of a request, or what is wrong.

        Cancellation:
            At any time.
        """
        text = await self._post("holders", id_)
        try:
            found: dict[str, list[str]] = _printable(json.loads(text))
        except ValueError:
            return str(_printable(text))
        return found

    async def _post(self, what: str, id_: str) -> str:
        headers = {"x-lifecycle-token": self._token}
        try:
            answer = await self._client.post(
                f"{self.url}/{what}", content=id_, headers=headers
            )
        except httpx2.HTTPError as error:
            return f"{self.shown_url} does not answer: {error}"
        return answer.text

    async def aclose(self) -> None:
        """Close all connections.

        Cancellation:
            Some may stay open.
        """
        await self._client.aclose()


def _printable(value: Any) -> Any:
    """Return *value* without what a terminal obeys, such as a path that sets its title.

    Other control and format characters go, too: some turn the direction of a line.
    """
    if isinstance(value, str):
        return "".join(char if char.isprintable() else "\ufffd" for char in value)
    if isinstance(value, list):
        return [_printable(each) for each in value]
    if isinstance(value, dict):
        return {_printable(key): _printable(each) for key, each in value.items()}
    return value
