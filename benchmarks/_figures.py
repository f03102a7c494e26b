"""Result files of experiments, how figures are shown, and what machine they are of."""

from __future__ import annotations

import json
import os
import platform
import re
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).with_name("results")


def machine() -> dict[str, Any]:
    """Describe the machine without anything that identifies it."""
    info = Path("/proc/cpuinfo").read_text()
    model = re.search(r"^model name\s*: (.+)$", info, re.MULTILINE)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cpu": model[1] if model else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory / 2**30, 1),
        "system": f"{platform.system()} {platform.release().partition('-')[0]}",
        "python": platform.python_version(),
    }


def write(file: Path | None, found: dict[str, Any]) -> None:
    """Replace a file atomically with *found*; ``None`` writes nothing."""
    if file is None:
        return
    text = json.dumps(found, indent=1)
    # Lists of numbers, which are long, on a line each.
    text = re.sub(r"\[[\d\s.,]+\]", lambda it: "".join(it[0].split()), text)
    file.parent.mkdir(parents=True, exist_ok=True)
    fresh = file.with_suffix(".new")
    fresh.write_text(text + "\n")
    fresh.replace(file)


def missing(
    rows: Sequence[dict[str, Any]], repeat: int
) -> Iterator[tuple[dict[str, Any], int]]:
    """Yield the missing runs of all rows, alternating between them."""
    for turn in range(repeat):
        for row in rows:
            if all(run["turn"] != turn for run in row["runs"]):
                yield row, turn


def spread(values: Sequence[float], digits: int = 0) -> str:
    """Return the median with the minimum and the maximum."""
    low, middle, high = min(values), statistics.median(values), max(values)
    return f"{middle:.{digits}f} ({low:.{digits}f}-{high:.{digits}f})"


def goal(
    what: str, value: float, *, least: float = 0.0, most: float = float("inf")
) -> str:
    """Return a line that says whether a figure reaches its goal."""
    verdict = "reached" if least <= value <= most else "MISSED"
    limit = f"at least {least:g}" if least else f"at most {most:g}"
    return f"{what}: {value:.3f}, {limit}: {verdict}"
