"""Result files of experiments, and a description of the machine."""

from __future__ import annotations

import json
import os
import platform
import re
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
