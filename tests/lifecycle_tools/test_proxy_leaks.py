"""Nothing is left after many requests; `long_run.py` alone is the long form."""

import subprocess
import sys
from pathlib import Path


def test_leaves_nothing_after_many_requests():
    """After 2,000 requests, half of them left, no descriptor and no megabytes stay."""
    script = Path(__file__).parent / "long_run.py"
    command = [sys.executable, str(script), "--requests", "2000"]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
