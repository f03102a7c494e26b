"""LitServe: a worker stops when its client leaves. Start it with `main(8000)`."""

from contextlib import AsyncExitStack
from multiprocessing import Manager
from typing import Any

from litserve import LitAPI, LitServer, server

from lifecycle_asgi import LifecycleMiddleware, request_of


class Handler(server.StreamingRequestHandler):
    """Has an entry in `wanted` for each request, until it is over."""

    async def _prepare_request(self, request: Any, kind: Any) -> Any:
        wanted = self.lit_api.wanted
        wanted[entry := str(id(request))] = True
        request_of(request.scope).own(AsyncExitStack()).callback(wanted.pop, entry)
        return {**await super()._prepare_request(request, kind), "entry": entry}


class Speak(LitAPI):
    """Speaks for as long as it is wanted, in a process that knows no clients."""

    def predict(self, request: Any) -> Any:
        while request["entry"] in self.wanted:
            yield "word\n"

    def encode_response(self, output: Any) -> Any:
        yield from output


def main(port: int) -> None:
    server.StreamingRequestHandler, api = Handler, Speak(stream=True)
    api.wanted = Manager().dict()
    run = LitServer(api, middlewares=[LifecycleMiddleware]).run
    run(port=port, generate_client_file=False)
