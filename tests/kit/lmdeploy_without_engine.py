"""An engine for LMDeploy that computes nothing, in the place of its own.

`install` gives it the name of the module that LMDeploy imports for its engine, and
imports nothing: the command line, the routes, the sessions and the tokenizer are its
own. The number of tokens that a request asks for decides: `WHOLE` are there at once; of
`BEGUN`, there is the first; of `QUEUED`, there is none, as behind a full scheduler. The
last two end when they are cancelled. Lines on stdout say what comes and what ends.

With the variable `GENERATES`, all tokens are generated instead, and nothing is said.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from importlib import import_module
from typing import Any

from pace import PAUSE, work

# A letter in the tokenizer of the tiny checkpoint.
TOKEN = 64
WHOLE, BEGUN, QUEUED = 3, 10, 20
STARTUP = "import lmdeploy_without_engine\nlmdeploy_without_engine.install()\n"


class Handle:
    """A place in the engine."""

    def __init__(self) -> None:
        self._cancelled = asyncio.Event()

    async def async_stream_infer(
        self, session_id: int, *, gen_config: Any, **_inputs: Any
    ) -> AsyncIterator[Any]:
        """Yield an answer, or wait for the end of the request."""
        messages = import_module("lmdeploy.messages")
        kinds, output = messages.ResponseType, messages.EngineOutput
        self._cancelled.clear()
        asked = gen_config.max_new_tokens
        if "GENERATES" in os.environ:
            for number in range(asked):
                await asyncio.sleep(PAUSE)
                if self._cancelled.is_set():
                    yield output(kinds.CANCEL, [])
                    return
                work()
                last = number == asked - 1
                yield output(kinds.FINISH if last else kinds.SUCCESS, [TOKEN])
            return
        print(f"engine has {session_id}", flush=True)
        if asked < QUEUED:
            yield output(kinds.SUCCESS, [TOKEN])
        if asked == WHOLE:
            yield output(kinds.FINISH, [TOKEN] * (WHOLE - 1))
            return
        await self._cancelled.wait()
        yield output(kinds.CANCEL, [])

    async def async_cancel(self, session_id: int) -> None:
        """End the request."""
        if "GENERATES" not in os.environ:
            print(f"engine cancelled {session_id}", flush=True)
        self._cancelled.set()


class Engine:
    """As far as LMDeploy knows its engine.

    Args:
        config: Of LMDeploy.
    """

    def __init__(self, config: Any) -> None:
        self.engine_config = config

    @classmethod
    def from_pretrained(cls, _model: str, *, engine_config: Any, **_: Any) -> Engine:
        """Return an engine without a model."""
        return cls(engine_config)

    def create_instance(self) -> Handle:
        """Return a place."""
        return Handle()

    def start_loop(self) -> None:
        """Nothing to start."""

    def close(self) -> None:
        """Nothing to close."""

    async def get_health_status(self) -> dict[str, Any]:
        """Well."""
        return {"alive": True, "message": "", "schedule_metrics": None}


def install() -> None:
    """Be the module of LMDeploy's engine."""
    sys.modules["lmdeploy.pytorch.engine"] = sys.modules[__name__]
