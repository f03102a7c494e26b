"""The events of a live view, read over HTTP."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Final

import httpx2

_PATH: Final = "/_lifecycle"
_CONNECT_SECONDS: Final = 5.0
# Events come every second; without any for so long, the server hangs.
_SILENT_SECONDS: Final = 10.0
_DATA: Final = "data: "


class NoLiveView(Exception):
    """An address has no live view, or it does not answer; the text says what to do."""


class Viewer:
    """Reads one live view, and asks it for changes.

    Args:
        url: Address of the server, or of its live view if that has another path.
    """

    def __init__(self, url: str) -> None:
        if "://" not in url:
            url = f"http://{url}"
        parsed = httpx2.URL(url)
        path = parsed.path.rstrip("/") or _PATH
        self.url = str(parsed.copy_with(path=path, query=None, fragment=None))
        timeout = httpx2.Timeout(_SILENT_SECONDS, connect=_CONNECT_SECONDS)
        self._client = httpx2.AsyncClient(timeout=timeout, trust_env=False)
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
                        event = json.loads(line.removeprefix(_DATA))
                        self._token = event["token"]
                        show(event)
        except httpx2.HTTPError as error:
            what = str(error) or type(error).__name__
            raise NoLiveView(f"{self.url} does not answer: {what}") from error

    async def _check(self, answer: httpx2.Response) -> None:
        if answer.status_code == 403:
            await answer.aread()
            raise NoLiveView(f"{self.url}: {answer.text}")
        kind = answer.headers.get("content-type", "")
        if answer.status_code != 200 or not kind.startswith("text/event-stream"):
            raise NoLiveView(
                f"{self.url} is no live view (status {answer.status_code}); wrap the "
                f"application in lifecycle_asgi.LiveView"
            )

    async def cancel(self, id_: str) -> str:
        """Cancel a request; return what the server says.

        Cancellation:
            The request may be cancelled or not.
        """
        return await self._post("cancel", id_)

    async def holders(self, id_: str) -> dict[str, list[str]] | str:
        """Return the places that hold the bytes of a request, or what is wrong.

        Cancellation:
            At any time.
        """
        text = await self._post("holders", id_)
        try:
            found: dict[str, list[str]] = json.loads(text)
        except ValueError:
            return text
        return found

    async def _post(self, what: str, id_: str) -> str:
        headers = {"x-lifecycle-token": self._token}
        try:
            answer = await self._client.post(
                f"{self.url}/{what}", content=id_, headers=headers
            )
        except httpx2.HTTPError as error:
            return f"{self.url} does not answer: {error}"
        return answer.text

    async def aclose(self) -> None:
        """Close all connections.

        Cancellation:
            Some may stay open.
        """
        await self._client.aclose()
