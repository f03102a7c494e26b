"""An engine that says what its tensors are and keeps them as asked; a script.

The request's ``keep`` is ``"start"`` (not at all), ``"end"``, ``"ever"``, a number of
steps, or ``"thread"`` (until a thread lets go, while the engine sleeps). One item says
what came; then the stream ends, unless it is to ``stay``.
"""

from __future__ import annotations

import argparse
import threading
import time
import zlib
from typing import Any
from urllib.parse import parse_qsl, urlencode

from lifecycle_zmq import EngineServer, Finish, Output, RequestRejected


class KeepingBackend:
    """Holds tensors for as long as each request wants."""

    def __init__(self) -> None:
        self._kept: dict[str, Any] = {}
        self._ever: list[Any] = []
        self._left: dict[str, int] = {}
        self._reported: dict[str, Output] = {}

    def start(
        self, key: str, request: dict[str, Any], tensors: dict[str, memoryview]
    ) -> None:
        """Look at the tensors, and keep or refuse them."""
        item = {name: _describe(view) for name, view in tensors.items()}
        keep = request["keep"]
        if keep == "refuse":
            raise RequestRejected("refused", "as asked")
        if keep == "raise":
            raise RuntimeError("as asked")
        if keep == "thread":
            threading.Thread(target=_let_go_later, args=(dict(tensors),)).start()
        elif keep == "ever":
            self._ever.append(tensors)
        elif keep != "start":
            self._kept[key] = tensors
            self._left[key] = keep if type(keep) is int else 10**9
        finish = None if "stay" in request else Finish("completed")
        self._reported[key] = Output(key, [item], finish)

    def cancel(self, key: str) -> None:
        """Let go, and end the stream at the next step."""
        self._forget(key)
        self._reported[key] = Output(key, (), Finish("cancelled"))

    def end(self, key: str) -> None:
        """Let go."""
        self._reported.pop(key, None)
        self._forget(key)

    def step(self) -> list[Output]:
        """Count the steps down and say what there is to say."""
        time.sleep(0.001)
        for key in list(self._left):
            self._left[key] -= 1
            if not self._left[key]:
                self._forget(key)
        reported, self._reported = list(self._reported.values()), {}
        return reported

    @property
    def busy(self) -> bool:
        """Whether steps are to be counted or something is to be said."""
        return bool(self._reported) or any(it < 10**9 for it in self._left.values())

    def status(self) -> dict[str, Any]:
        """Return how many requests hold their tensors."""
        return {"kept": len(self._kept)}

    def _forget(self, key: str) -> None:
        self._kept.pop(key, None)
        self._left.pop(key, None)


def _describe(view: memoryview) -> list[Any]:
    return [view.readonly, view.format, list(view.shape or ()), zlib.crc32(view)]


def _let_go_later(tensors: dict[str, memoryview]) -> None:
    time.sleep(0.05)
    tensors.clear()


def main() -> None:
    """Run one engine process."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--endpoint", required=True)
    parser.add_argument("--incarnation", type=int, required=True)
    parser.add_argument("--without-arena", action="store_true")
    options = parser.parse_args()
    endpoint = options.endpoint
    if options.without_arena:
        address, _, query = endpoint.partition("?")
        inherited = dict(parse_qsl(query))
        del inherited["arena"]
        endpoint = f"{address}?{urlencode(inherited)}"
    EngineServer(endpoint, KeepingBackend(), incarnation=options.incarnation).run()


if __name__ == "__main__":
    main()
