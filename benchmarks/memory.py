"""Peak memory of a multimodal server: with a gate, with early freeing, with both.

    python benchmarks/memory.py [--quick] [--repeat 5] [--only SERIES]
          [--json FILE] [--resume]

Runs the bundled server with its simulated engine, whose buffers are real, and requests
streams about images. Each run measures the peak memory of both processes and requests
per second. The series:

* halves: payloads kept by both processes until the end of their stream, as in a frame
  or dict that is not cleaned up; freed by the API process only; by the engine only; by
  both; behind a gate over bytes with neither and with both. The streams are long: none
  ends before the last has begun. Payloads are sent over the socket.
* processing, engine: a gate that is off, 1, 2, 4 and 8 payloads wide, and over bytes,
  where the API process limits the throughput and where the engine does. Both processes
  free payloads, the answers are short, and payloads are in shared memory, as in the
  next series.
* clients: 16 to 512 of them behind one gate over bytes. The engine stalls at first,
  until as many payloads are queued as the gate admits, and then holds its copy of each
  for longer than a memory sample takes.

Every run starts a new server. The runs of all cases alternate, so that a slow minute of
the machine does not affect a single case. With ``--resume`` runs that are in the file
are not repeated.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from _client import Server, about_picture, ask, unwind_when_terminated
from _figures import RESULTS, machine, missing, write
from _memory_of import Watch
from memory_report import failed, goals, table
from memory_rig import Case, argv
from rich.console import Console
from rich.progress import Progress

_MIB = 2**20
BUDGET = 512 * _MIB
LARGE_BUDGET = 1024 * _MIB
_LIMIT = 900.0


@dataclass(frozen=True, slots=True)
class Run:
    """Measurements of one run of a case; sizes in bytes.

    Attributes:
        turn: Number of the repetition.
        before: Memory of both processes before the first request.
        peak: Peak memory of both processes.
        api: Peak resident memory of the API process.
        engine: Peak resident memory of the engine.
        rate: Requests per second.
        failed: Requests without a complete answer.
        why: Distinct reasons of the failures.
        series: ``[seconds, resident and then proportional size of each process]``.
    """

    turn: int
    before: int
    peak: int
    api: int
    engine: int
    rate: float
    failed: int
    why: list[str]
    series: list[list[float]]


def cases() -> dict[str, list[Case]]:
    """Return all series."""
    long = Case(name="", together=True, tokens=30_000, prefill=0.01, step=0.015)
    short = Case(name="", prefill=0.02, arena=2**30, stall=1.0)
    gates = [
        replace(short, name="off"),
        *(replace(short, name=str(n), slots=n) for n in (1, 2, 4, 8)),
        replace(short, name="512 MiB", bytes=BUDGET),
    ]
    many = replace(
        short,
        pixels=2_800_000,
        bytes=LARGE_BUDGET,
        arena=LARGE_BUDGET + 256 * _MIB,
        prefill=0.03,
        stall=10.0,
    )
    return {
        "halves": [
            replace(long, name="neither frees", api=False, engine=False),
            replace(long, name="server frees", engine=False),
            replace(long, name="engine frees", api=False),
            replace(long, name="both free"),
            replace(long, name="gate only", bytes=BUDGET, api=False, engine=False),
            replace(long, name="both free, gate", bytes=BUDGET),
        ],
        "processing": gates,
        "engine": [replace(case, prefill=0.2) for case in gates],
        "clients": [replace(many, name=str(n), clients=n) for n in (16, 64, 256, 512)],
    }


def quick(series: dict[str, list[Case]]) -> dict[str, list[Case]]:
    """Return the first and the last case of each series, with few clients."""

    def less(case: Case) -> Case:
        return replace(case, clients=8, pixels=2**16, prefill=0.005, stall=0.0)

    return {
        name: [less(case) for case in (found[0], found[-1])]
        for name, found in series.items()
    }


async def measure(case: Case, turn: int) -> Run:
    """Start a server, send all requests, and stop it.

    Raises:
        TimeoutError: The answers took more than fifteen minutes.
    """
    async with Server(argv(case)) as server, asyncio.timeout(_LIMIT):
        # One request first, so that one-time allocations are not measured.
        await ask(server.port, about_picture(1000, 2))
        request = about_picture(case.pixels, case.tokens)
        with Watch((server.pid, server.engine)) as watch:
            began = time.perf_counter()
            asking = [ask(server.port, request) for _ in range(case.clients)]
            answers = await asyncio.gather(*asking)
            took = time.perf_counter() - began
    return Run(
        turn=turn,
        before=watch.before,
        peak=watch.peak,
        api=watch.peaks[0],
        engine=watch.peaks[1],
        rate=round(case.clients / (took - case.stall), 2),
        failed=sum(map(bool, answers)),
        why=sorted(set(filter(None, answers))),
        series=watch.series,
    )


def resumed(series: dict[str, Any], before: dict[str, Any]) -> None:
    """Take over the runs of those cases that were measured before."""
    for name, rows in series.items():
        for row in rows:
            for old in before.get(name, []):
                if old["case"] == row["case"]:
                    row["runs"] = old["runs"]


def run_all(found: dict[str, Any], file: Path | None, repeat: int) -> None:
    """Run what is missing; the file is complete after each run.

    Only the first run of a case keeps its time series.
    """
    rows = [row for rows in found["series"].values() for row in rows]
    todo = list(missing(rows, repeat))
    with Progress(console=Console(stderr=True)) as progress:
        bar = progress.add_task("", total=len(todo))
        for row, turn in todo:
            case = Case(**row["case"])
            progress.update(bar, description=f"{case.name}, {turn + 1}")
            run = asdict(asyncio.run(measure(case, turn)))
            if turn:
                del run["series"]
            row["runs"].append(run)
            write(file, found)
            progress.advance(bar)


def main() -> None:
    """Run the command line."""
    unwind_when_terminated()
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--only", choices=cases())
    parser.add_argument("--quick", action="store_true", help="a minute, to try it out")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--json", type=Path, help="by default, that of the picture")
    options = parser.parse_args()
    if options.json is None and not options.quick:
        options.json = RESULTS / "memory.json"
    series = quick(cases()) if options.quick else cases()
    if options.only:
        series = {options.only: series[options.only]}
    found: dict[str, Any] = {
        "machine": machine(),
        "budget": dict.fromkeys(series, BUDGET) | {"clients": LARGE_BUDGET},
        "series": {
            name: [{"case": asdict(case), "runs": []} for case in rows]
            for name, rows in series.items()
        },
    }
    if options.resume and options.json is not None and options.json.exists():
        resumed(found["series"], json.loads(options.json.read_text())["series"])
    run_all(found, options.json, 1 if options.quick else options.repeat)
    out = Console(width=120)
    for name, rows in found["series"].items():
        out.print(table(name, rows))
    if not options.quick:
        for line in goals(found):
            out.print(line)
    if failed(found):
        sys.exit("some requests got no whole answer")


if __name__ == "__main__":
    main()
