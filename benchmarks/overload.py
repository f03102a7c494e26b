"""Goodput and latency of a server at up to ten times its capacity.

    python benchmarks/overload.py [--quick] [--repeat 3] [--seconds 8] [--json FILE]
          [--resume]

Image requests arrive in an open loop, at times that do not depend on the answers, at
0.5 to 10 times the capacity of the server. Each client disconnects after two seconds.
The bundled server with its simulated engine is measured three times: behind a gate that
rejects excess requests, with no admission control, and with the semaphore in a
middleware that is often written instead.

Goodput is complete answers within the deadline per second. Every run starts a new
server, and the runs of all cases alternate.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from _client import Server, unwind_when_terminated
from _figures import RESULTS, machine, missing, write
from overload_report import goals, quantile, table
from overload_rig import BATCH, DEADLINE, STEP, TOKENS, WAYS, argv
from rich.console import Console
from rich.progress import Progress

LOADS = (0.5, 1.0, 2.0, 5.0, 10.0)
# Seconds until the server is saturated; earlier requests are not counted.
_WARM = 2.0
_LOAD = Path(__file__).with_name("overload_load.py")


@dataclass(frozen=True, slots=True)
class Run:
    """Results of one run; times in milliseconds, from the scheduled arrival.

    `overload_load` separates the latency of the server from that of its clients.

    Attributes:
        turn: Number of the repetition.
        offered: Requests per second.
        goodput: Complete answers within the deadline per second.
        refused: Refusals per second.
        late: Client timeouts per second.
        failed: Other failures per second.
        p50: Median latency of complete answers.
        p99: p99 latency of complete answers.
        refusal_p50: Median latency of refusals.
        refusal_p99: p99 latency of refusals.
        served_p99: p99 of the server's part of it: from the connection to the answer.
        lateness_p99: p99 of the clients' part of it: late starts and late reads.
        load: Fraction of a processor that the clients used.
    """

    turn: int
    offered: float
    goodput: float
    refused: float
    late: float
    failed: float
    p50: float | None
    p99: float | None
    refusal_p50: float | None
    refusal_p99: float | None
    served_p99: float | None
    lateness_p99: float | None
    load: float


async def ask(port: int, rate: float, seconds: float, seed: int) -> dict[str, Any]:
    """Run the clients against a server; return their results."""
    arguments = [port, rate, seconds, DEADLINE, seed]
    process = await asyncio.create_subprocess_exec(
        sys.executable, _LOAD, *map(str, arguments), stdout=asyncio.subprocess.PIPE
    )
    output, _ = await asyncio.wait_for(process.communicate(), seconds + 60)
    found: dict[str, Any] = json.loads(output)
    return found


async def measure(way: str, rate: float, seconds: float, turn: int) -> Run:
    """Start a server, overload it, and stop it."""
    async with Server(argv(way)) as server:
        found = await ask(server.port, rate, seconds, turn)
    counted = [entry for entry in found["asks"] if entry[0] >= _WARM]
    times: dict[str, list[float]] = {"ok": [], "refused": [], "late": [], "failed": []}
    for _, what, took, _ in counted:
        times[what].append(took)
    refusals = [entry for entry in counted if entry[1] == "refused"]
    span = seconds - _WARM
    return Run(
        turn=turn,
        offered=round(len(counted) / span, 2),
        goodput=round(len(times["ok"]) / span, 2),
        refused=round(len(times["refused"]) / span, 2),
        late=round(len(times["late"]) / span, 2),
        failed=round(len(times["failed"]) / span, 2),
        p50=quantile(times["ok"], 0.5),
        p99=quantile(times["ok"], 0.99),
        refusal_p50=quantile(times["refused"], 0.5),
        refusal_p99=quantile(times["refused"], 0.99),
        served_p99=quantile([served for *_, served in refusals], 0.99),
        lateness_p99=quantile(
            [round(took - its, 2) for *_, took, its in refusals], 0.99
        ),
        load=round(found["cpu"] / seconds, 3),
    )


def rows() -> list[dict[str, Any]]:
    """Return all cases, without runs."""
    return [{"way": way, "load": load, "runs": []} for load in LOADS for way in WAYS]


def main() -> None:
    """Run the command line."""
    unwind_when_terminated()
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--repeat", type=int, default=3)
    add("--seconds", type=float, default=8.0, help="duration of each run")
    add("--quick", action="store_true", help="one short run of each case")
    add("--resume", action="store_true")
    add("--json", type=Path, help="results file; default: the one of the chart")
    options = parser.parse_args()
    if options.json is None and not options.quick:
        options.json = RESULTS / "overload.json"
    capacity = BATCH / (TOKENS * STEP)
    settings = {"capacity": round(capacity, 2), "deadline": DEADLINE, "slots": BATCH}
    found: dict[str, Any] = {"machine": machine(), "settings": settings, "rows": rows()}
    if options.quick:
        options.repeat, options.seconds = 1, _WARM + 0.5
        found["rows"] = [row for row in rows() if row["load"] == LOADS[-1]]
    elif options.resume and options.json.exists():
        found["rows"] = json.loads(options.json.read_text())["rows"]
    todo = list(missing(found["rows"], options.repeat))
    with Progress(console=Console(stderr=True)) as progress:
        bar = progress.add_task("", total=len(todo))
        for row, turn in todo:
            what = f"{row['way']}, {row['load']} times, {turn + 1}"
            progress.update(bar, description=what)
            rate = capacity * row["load"]
            run = asyncio.run(measure(row["way"], rate, options.seconds, turn))
            row["runs"].append(asdict(run))
            write(options.json, found)
            progress.advance(bar)
    out = Console(width=156)
    out.print(table(found))
    if not options.quick:
        for line in goals(found):
            out.print(line)


if __name__ == "__main__":
    main()
