"""What `benchmarks/conformance.py` finds of a server, by one of its checks."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "conformance.py"
# A guard against hanging.
SECONDS = 800.0


def report(name: str, folder: Path) -> dict[str, Any]:
    """Return the report on a server of the script's table, written to *folder*."""
    file = folder / "report.json"
    argv = (sys.executable, str(SCRIPT), "--servers", name)
    options = ("--only", "leave.connected", "--json", str(file))
    subprocess.run([*argv, *options], check=True, timeout=SECONDS)
    found: dict[str, Any] = json.loads(file.read_text())
    return found
