"""LitServe: a worker stops on a disconnect. Run `main(Speak(stream=True))`."""

from contextlib import AsyncExitStack
from multiprocessing import Manager
from typing import Any

from litserve import LitAPI, LitServer, server

from lifecycle_asgi import LifecycleMiddleware, request_of


class Leavable(server.BaseRequestHandler):  # in `wanted` until it is over
    async def _prepare_request(self: Any, request: Any, kind: Any) -> Any:
        more = {"entry": str(id(request)), "of": request_of(request.scope)}
        return {**await super()._prepare_request(request, kind), **more}

    async def _submit_request(self: Any, document: Any) -> Any:
        over, wanted = document.pop("of").own(AsyncExitStack()), self.lit_api.wanted
        wanted[document["entry"]] = True
        over.callback(wanted.pop, document["entry"])
        queued = await super()._submit_request(document)
        over.callback(self.server.response_buffer.pop, queued[0], None)
        return queued


class Speak(LitAPI):  # runs in a worker process, which sees no disconnects
    def predict(self, request: Any) -> Any:
        while request["entry"] in self.wanted:
            yield "word\n"

    def encode_response(self, output: Any) -> Any:
        yield from output


def main(api: Any, **options: Any) -> None:
    for name in ("StreamingRequestHandler", "RegularRequestHandler"):
        setattr(server, name, type(name, (Leavable, getattr(server, name)), {}))
    api.wanted = Manager().dict()
    LitServer(api, middlewares=[LifecycleMiddleware]).run(**options)
