from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

CHECK = Path(__file__).parents[2] / "benchmarks" / "gpu_check.py"


@pytest.mark.timeout(300)
def test_gpu_check_walks_its_lines_on_the_cpu(tmp_path: Path) -> None:
    """All but the CUDA calls runs here, so that nothing else fails where there is one."""
    parts = ("decode", "prefill", "memory", "scheduler", "copies")
    options = ["--device", "cpu", "--batch", "2", "--concurrent", "2"]
    options += ["--requests", "4", "--out", str(tmp_path / "report.json")]
    for part in parts:
        options += ["--only", part]
    done = subprocess.run(
        [sys.executable, CHECK, *options],
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    assert set(parts) <= set(report)
    assert set(report["decode"]) == {"off", "fake", "took_seconds"}
    assert set(report["memory"]) == {"strip_on", "strip_off", "took_seconds"}


def test_gpu_check_without_a_device_is_skipped() -> None:
    """Where there is no CUDA device the check says so and succeeds."""
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is one")
    done = subprocess.run(
        [sys.executable, CHECK], capture_output=True, text=True, check=True, timeout=100
    )
    assert "sees no CUDA device" in done.stdout
