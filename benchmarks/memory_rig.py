"""The server of one case of the memory experiment, in its two processes."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lifecycle_engine import SimRunner

BYTES_PER_PIXEL = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One server and its clients.

    Attributes:
        name: What the picture calls it.
        api: Whether the API process frees payloads at hand-off.
        engine: Whether the engine frees payloads after prefill.
        slots: Payloads that the gate has room for; 0 is any number.
        bytes: Bytes that the gate has room for; 0 is any number.
        arena: Bytes of the memory that payloads lie in; 0 sends them.
        clients: How many ask at a time, once each.
        pixels: Of each picture.
        tokens: Of each answer, at least.
        together: Whether no answer ends before all have begun, as long ones do not.
        prefill: Seconds that the engine takes for a payload.
        step: Seconds for one decode step of all streams.
        stall: Seconds that it stands still before the first payload, so that as many
            pile up as may.
    """

    name: str
    api: bool = True
    engine: bool = True
    slots: int = 0
    bytes: int = 0
    arena: int = 0
    clients: int = 128
    pixels: int = 512_000
    tokens: int = 8
    together: bool = False
    prefill: float = 0.03
    step: float = 0.002
    stall: float = 0.0

    @property
    def payload(self) -> int:
        """Bytes of one payload."""
        return self.pixels * BYTES_PER_PIXEL


def argv(case: Case) -> list[str]:
    """The command line of its server."""
    return [sys.executable, __file__, "serve", json.dumps(asdict(case))]


def serve(case: Case) -> None:
    """Be the API process."""
    from lifecycle import Gate, Payload
    from lifecycle_engine import (
        AppSettings,
        Deadlines,
        SimProcessor,
        create_app,
        in_arena,
    )
    from lifecycle_engine.server.run import run
    from lifecycle_zmq import ZmqEngine

    class Keeping(ZmqEngine):
        """Keeps each payload until the end of its stream, as uncleaned frames do."""

        def __init__(self, argv: Sequence[str], **options: Any) -> None:
            super().__init__(argv, **options)
            self._kept: dict[str, Any] = {}

        async def start(
            self, key: str, request: Mapping[str, Any], tensors: Any = None
        ) -> AsyncIterator[Any]:
            value = self._kept[key] = tensors.take()
            return await super().start(key, request, Payload(value))

        async def end(self, key: str) -> None:
            self._kept.pop(key, None)
            await super().end(key)

    # On a slow machine the last of so many waits for minutes, and is to be served.
    patient = Deadlines(start=600.0, first_token=600.0, idle=600.0)
    work = [sys.executable, __file__, "work", json.dumps(asdict(case))]
    kind = ZmqEngine if case.api else Keeping
    engine = kind(work, arena_bytes=case.arena)
    app = create_app(
        engine,
        SimProcessor(empty=in_arena(engine) if case.arena else None),
        gate=Gate(slots=case.slots or None, bytes=case.bytes or None, name="payloads"),
        settings=AppSettings(model="sim", threads=2, deadlines=patient),
    )
    say = partial(print, sep="\n", flush=True)
    run(
        app,
        host="127.0.0.1",
        port=0,
        announce=say,
        operator=("127.0.0.1", 0),
    )


def work(case: Case, rest: list[str]) -> None:
    """Be the engine process."""
    from lifecycle_engine import Scheduler
    from lifecycle_zmq import EngineServer

    parser = argparse.ArgumentParser()
    parser.add_argument("--endpoint", required=True)
    parser.add_argument("--incarnation", type=int, required=True)
    options, _ = parser.parse_known_args(rest)
    runner = _runner(case)
    if not case.engine:
        runner.keep = ("pixels",)  # nothing is stripped before the stream ends
    scheduler = Scheduler(runner, merge="concatenate")
    EngineServer(options.endpoint, scheduler, incarnation=options.incarnation).run()


def _runner(case: Case) -> SimRunner:
    from lifecycle_engine import Emitted, Prompt, SimCost, SimRunner

    class Crowded(SimRunner):
        """Ends its answers, if so configured, when the last of them has begun."""

        waited_for = case.clients + 1  # and the one that warms the server up
        stall = case.stall

        def prefill(
            self, slot: int, prompt: Prompt, start: int, stop: int
        ) -> Emitted | None:
            if self.waited_for == case.clients:
                time.sleep(self.stall)
                self.stall = 0.0
            emitted = super().prefill(slot, prompt, start, stop)
            self.waited_for -= emitted is not None
            return emitted

        def decode(self, slots: Sequence[int]) -> list[Emitted]:
            over = case.together and self.waited_for <= 0
            return [replace(each, last=over) for each in super().decode(slots)]

    cost = SimCost(
        0.0, case.prefill / case.pixels, decode_step=case.step, decode_lane=0.0
    )
    return Crowded(slots=case.clients, max_length=2**15, cost=cost)


if __name__ == "__main__":
    role, text, *others = sys.argv[1:]
    if role == "serve":
        serve(Case(**json.loads(text)))
    else:
        work(Case(**json.loads(text)), others)
