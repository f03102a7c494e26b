"""Compare a benchmark of this checkout with the same one of another, in one run.

    git worktree add --detach ../before COMMIT
    python benchmarks/before_after.py ../before core
    python benchmarks/before_after.py ../before link --rounds 1 --seconds 1

The two run in turns, so that both meet the same moments of a busy machine. A ratio is
the median of the ratios of the turns; above 1.00, this checkout is slower. Rows that
measure something that does not depend on the checkout show how much noise there is.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parents[1]
UNITS = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0}
# "  scrub    68 ns   66 ns - 72 ns   1.15" of core, with a unit on each figure;
TIMED = re.compile(r"^ {2}(\S.*?) {2,}([\d.,]+) (ns|us|ms|s) ")
# "  latency p50 ms   link   0.408  [0.408 .. 0.408]" of link.
PLAIN = re.compile(r"^ +(\S.*?) {2,}(\S+) +([\d.]+) {2}\[")
Rows = dict[tuple[int, str], float]


def rows(output: str) -> tuple[list[str], Rows]:
    """Read the titles of a benchmark, and the first figure of each row.

    A row is known by the number of its section, whose title may change, and its name.
    """
    titles: list[str] = []
    found: Rows = {}
    for line in output.splitlines():
        number = len(titles) - 1
        if match := TIMED.match(line):
            name, figure, unit = match.groups()
            found[number, name] = float(figure.replace(",", "")) * UNITS[unit]
        elif match := PLAIN.match(line):
            name, way, figure = match.groups()
            found[number, f"{name}, {way}"] = float(figure)
        elif line and not line.startswith(" "):
            titles.append(line)
    return titles, found


def measured(
    checkout: Path, benchmark: str, arguments: list[str]
) -> tuple[list[str], Rows]:
    """Run a benchmark of a checkout and return its titles and rows."""
    path = os.pathsep.join(str(checkout / each) for each in ("src", "adapters"))
    done = subprocess.run(
        [sys.executable, str(checkout / "benchmarks" / f"{benchmark}.py"), *arguments],
        cwd=checkout,
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return rows(done.stdout)


def ratio(name: str, before: float, after: float) -> float:
    """Return how much slower *after* is; of a rate, less is slower."""
    if not (before and after):
        return 1.0
    return before / after if "/s," in name else after / before


def main() -> None:
    """Print a row for each figure that both checkouts give."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("before", type=Path, help="the other checkout")
    parser.add_argument("benchmark", choices=("core", "link"))
    parser.add_argument("--turns", type=int, default=5, help="of each, 5 by default")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="its own options")
    options = parser.parse_args()
    checkouts = options.before.resolve(), HERE
    turns: list[tuple[Rows, Rows]] = []
    titles: list[str] = []
    for number in range(options.turns):
        print(f"turn {number + 1} of {options.turns}", file=sys.stderr)
        # The order changes, so that neither is always the one that runs warm.
        order = checkouts if number % 2 == 0 else checkouts[::-1]
        found = {it: measured(it, options.benchmark, options.arguments) for it in order}
        (_, before), (titles, after) = (found[it] for it in checkouts)
        turns.append((before, after))
    print(f"{'':42}{'ratio':>6}   least - most")
    shown = -1
    for number, name in turns[0][1]:
        row = number, name
        pairs = [
            (it[row], them[row]) for it, them in turns if row in it and row in them
        ]
        if not pairs:
            continue
        ratios = [ratio(name, *pair) for pair in pairs]
        if number != shown:
            print(titles[number])
            shown = number
        spread = f"{min(ratios):.2f} - {max(ratios):.2f}"
        print(f"  {name:<40}{statistics.median(ratios):6.3f}   {spread}")


if __name__ == "__main__":
    main()
