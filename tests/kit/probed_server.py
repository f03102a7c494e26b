"""`lifecycle serve`, and how long its event loop keeps what is ready waiting.

python tests/kit/probed_server.py OPTIONS...; see `LoopProbe` for what it prints.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

_EVERY = 0.002
_REPORT = 0.1


class LoopProbe:
    """How late an event loop is, again and again.

    Wall time says what clients feel, and on a busy machine what others did to it. The
    processor time of the loop's own thread says what was its own doing.

    Args:
        tell: Given pairs of seconds: how late it was, and how much of that its own
            thread ran.
    """

    def __init__(self, tell: Callable[[list[tuple[float, float]]], None]) -> None:
        self._tell = tell

    async def run(self) -> None:
        """Probe until cancelled."""
        seen: list[tuple[float, float]] = []
        reported = time.monotonic()
        while True:
            wall, ran = time.monotonic(), time.thread_time()
            await asyncio.sleep(_EVERY)
            late = max(time.monotonic() - wall - _EVERY, 0.0)
            seen.append((late, min(late, time.thread_time() - ran)))
            if time.monotonic() - reported > _REPORT:
                self._tell(seen)
                seen, reported = [], time.monotonic()


def _print(seen: list[tuple[float, float]]) -> None:
    pairs = " ".join(f"{late:.6f}:{ran:.6f}" for late, ran in seen)
    print(f"lag {pairs}", flush=True)


def main() -> None:
    """Serve, with a probe beside it."""
    import uvicorn

    from lifecycle_engine.cli import main as command

    serve = uvicorn.Server.serve

    async def probed(server: uvicorn.Server, *args: Any, **kwargs: Any) -> None:
        probe = asyncio.create_task(LoopProbe(_print).run())
        try:
            await serve(server, *args, **kwargs)
        finally:
            probe.cancel()

    sys.argv[1:1] = ["serve"]
    with patch.object(uvicorn.Server, "serve", probed):
        command()


if __name__ == "__main__":
    main()
