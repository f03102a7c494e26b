"""Every case has a test or a reason."""

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "scripts" / "coverage_of_cases.py"


def test_names_a_test_or_a_reason_for_every_case():
    """The table of cases has no hole and no contradiction."""
    result = subprocess.run(
        [sys.executable, str(SCRIPT)], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout.splitlines()[-1]
    assert "peers-17" in result.stdout
