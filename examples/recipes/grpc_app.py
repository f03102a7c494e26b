"""grpc.aio: a stream that ends when its client disconnects.

Run it: python -c 'import grpc_app; grpc_app.main(8000)'
"""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
from words import sessions, words

from lifecycle_asgi import request_scope


async def speak(_message: bytes, context: Any) -> None:
    """Stream words; grpc.aio cancels this on a disconnect."""
    async with request_scope() as client:
        async for word in client.own(words(client)):
            await context.write(word)


async def serve(port: int) -> None:
    """Serve until cancelled."""
    server = grpc.aio.server()
    handlers = {"speak": grpc.unary_stream_rpc_method_handler(speak)}
    server.add_registered_method_handlers("words", handlers)
    server.add_insecure_port(f"127.0.0.1:{port}")
    async with sessions:
        await server.start()
        await server.wait_for_termination()


def main(port: int) -> None:
    """Serve until interrupted."""
    asyncio.run(serve(port))
