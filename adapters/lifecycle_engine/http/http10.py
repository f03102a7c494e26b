"""Answers to HTTP/1.0, whose clients know no chunks and read until the end."""

from __future__ import annotations

from typing import Any


def undivided(app: Any, cycle: Any) -> Any:
    """An application whose answers of no declared length are sent as they are.

    uvicorn sends them in chunks, whoever asks, and closes behind them in HTTP/1.0.

    Args:
        app: The application.
        cycle: uvicorn's, of the one request that it will serve.
    """

    async def served(scope: Any, receive: Any, send: Any) -> None:
        declared = True

        async def sent(message: Any) -> None:
            nonlocal declared
            if message["type"] == "http.response.start":
                names = {bytes(name).lower() for name, _ in message.get("headers", ())}
                declared = b"content-length" in names
                if not declared:
                    cycle.chunked_encoding = False
            elif not declared:
                # As long as it says: each part is all that uvicorn waits for.
                cycle.expected_content_length = len(message.get("body", b""))
            await send(message)

        await app(scope, receive, sent)

    return served
