"""What streaming over HTTP costs the API process, beside bare Starlette.

    python benchmarks/http_streams.py [--rounds 3] [--streams 1 16 128 512]
          [--rate 50] [--seconds 4] [--ways starlette server ...] [--json FILE]

Each cell is one way, one number of streams, and one kind of load: events at a rate
(``--rate`` per stream and second), a flood (as fast as they come), and short answers
that are not streamed. The server is a new process; the clients are another. Processor
time is that of the API process alone, between the first request and the last answer,
after a warm-up. The ways take turns, and a ratio is the median of the ratios within
each round.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from _figures import machine, write
from http_streams_app import WAYS

HERE = Path(__file__).parent
TICKS = os.sysconf("SC_CLK_TCK")
KINDS = ("rate", "flood", "short")


@dataclass(frozen=True, slots=True)
class Figures:
    """What one server took for one load.

    Attributes:
        cpu_ms: Of the API process, for 1,000 events or answers.
        per_second: Events or answers.
        first_ms: Median until the first event, or until the answer.
        gap_p50_ms: Between two reads of a stream; 0 for short answers.
        gap_p99_ms: Likewise.
    """

    cpu_ms: float
    per_second: float
    first_ms: float
    gap_p50_ms: float
    gap_p99_ms: float


def processor_seconds(pid: int) -> float:
    """Return the processor time that a process has taken, children apart."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def load(port: int, streams: int, tokens: int, kind: str) -> dict[str, Any]:
    """Run the clients once; all of them must be answered."""
    argv = [sys.executable, str(HERE / "http_streams_load.py")]
    argv += [str(port), str(streams), str(tokens), kind]
    done = subprocess.run(argv, stdout=subprocess.PIPE, timeout=600, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    if found["failed"]:
        what = f"{found['failed']} of {streams} clients got no answer"
        raise RuntimeError(f"{what}; the first got {found['instead']}")
    return found


def measure(way: str, streams: int, kind: str, rate: float, seconds: float) -> Figures:
    """Start a server, warm it up, and measure one load."""
    rate = rate if kind == "rate" else 0.0
    argv = [sys.executable, str(HERE / "http_streams_app.py")]
    server = subprocess.Popen(
        [*argv, way, str(streams), str(rate)], stdout=subprocess.PIPE
    )
    try:
        assert server.stdout is not None
        port = int(server.stdout.readline().rpartition(b":")[2])
        shape = "short" if kind == "short" else "stream"
        load(port, streams, 10, shape)
        # Some 4,000 short answers and 15,000 events a second; more streams share them.
        each = {"rate": rate, "flood": 15_000 / streams, "short": 2_000 / streams}
        tokens = max(int(each[kind] * seconds), 5)
        before = processor_seconds(server.pid)
        found = load(port, streams, tokens, shape)
        spent = processor_seconds(server.pid) - before
    finally:
        server.terminate()
        try:
            server.wait(20)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()
    gaps = sorted(found["gaps"]) or [0.0]
    hundredths = statistics.quantiles(gaps, n=100) if len(gaps) > 1 else gaps * 99
    return Figures(
        cpu_ms=spent * 1e6 / found["events"],
        per_second=found["events"] / found["seconds"],
        first_ms=statistics.median(found["first"]) * 1e3,
        gap_p50_ms=hundredths[49] * 1e3,
        gap_p99_ms=hundredths[98] * 1e3,
    )


def median(name: str, figures: list[Figures]) -> float:
    """Return the median of a figure over the rounds."""
    return float(statistics.median(getattr(each, name) for each in figures))


def ratio(name: str, figures: list[Figures], basis: list[Figures]) -> float:
    """Return the median of the ratios within each round."""
    pairs = zip(figures, basis, strict=True)
    return float(
        statistics.median(
            getattr(one, name) / (getattr(other, name) or 1.0) for one, other in pairs
        )
    )


def report(cell: str, taken: dict[str, list[Figures]]) -> None:
    """Print the figures of one cell, each beside the first way's."""
    basis = next(iter(taken))
    print(f"\n{cell}\n{'':12}{'CPU ms/1,000':>13}{'spread':>16}{'ratio':>7}", end="")
    print(f"{'per second':>12}{'first ms':>10}{'gap p50':>9}{'p99':>8}{'ratio':>7}")
    for way, figures in taken.items():
        least, most = (f(each.cpu_ms for each in figures) for f in (min, max))
        cpu, first, middle, late = (
            median(name, figures)
            for name in ("cpu_ms", "first_ms", "gap_p50_ms", "gap_p99_ms")
        )
        print(
            f"  {way:<10}{cpu:13.1f}{f'{least:.1f} - {most:.1f}':>16}"
            f"{ratio('cpu_ms', figures, taken[basis]):7.2f}"
            f"{median('per_second', figures):12,.0f}"
            f"{first:10.1f}{middle:9.2f}{late:8.2f}"
            f"{ratio('gap_p99_ms', figures, taken[basis]):7.2f}",
            flush=True,
        )


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 16, 128, 512])
    parser.add_argument("--rate", type=float, default=50.0)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found: dict[str, Any] = {"machine": machine(), "rate": options.rate, "cells": {}}
    for kind in options.kinds:
        for streams in options.streams:
            taken: dict[str, list[Figures]] = {way: [] for way in options.ways}
            for _ in range(options.rounds):
                for way, figures in taken.items():
                    cell = way, streams, kind, options.rate, options.seconds
                    figures.append(measure(*cell))
            name = f"{kind}, {streams} at a time"
            report(name, taken)
            found["cells"][name] = {
                way: [asdict(each) for each in figures]
                for way, figures in taken.items()
            }
            write(options.json, found)


if __name__ == "__main__":
    main()
