from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

CHECK = Path(__file__).parents[2] / "benchmarks" / "gpu_check.py"


# A finder without pyzmq, for every process that is started.
WITHOUT = """
import sys
class Finder:
    def __init__(self, finder): self.finder = finder
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] != "zmq":
            return self.finder.find_spec(name, path, target)
    def __getattr__(self, name): return getattr(self.finder, name)
sys.meta_path[:] = [Finder(each) for each in sys.meta_path]
"""


def check(tmp_path: Path, *options: str, path: Path | None = None) -> tuple[str, Any]:
    """Run it on the CPU; return its output and its report."""
    out = tmp_path / "report.json"
    argv = [sys.executable, CHECK, "--device", "cpu", "--out", out, *options]
    paths = [*([str(path)] if path else []), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        argv,
        capture_output=True,
        text=True,
        check=False,
        timeout=1800,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, json.loads(out.read_text())


@pytest.mark.slow
@pytest.mark.timeout(2000)
def test_gpu_check_runs_on_the_cpu(tmp_path: Path) -> None:
    """Everything but the CUDA calls is tested without a GPU."""
    options = ["--batch", "2", "--concurrent", "2", "--requests", "4"]
    options += ["--budget", "1800"]  # a busy machine leaves nothing out, either
    _, report = check(tmp_path, *options, "--skip", "identity", "--skip", "death")
    parts = {"decode", "copies", "arena", "memory", "prefill", "scheduler"}
    assert parts <= set(report)
    assert "left_out" not in report
    assert set(report["decode"]) == {"off", "fake", "took_seconds"}
    assert set(report["memory"]) == {"strip_on", "strip_off", "took_seconds"}


@pytest.mark.slow
@pytest.mark.timeout(2000)
def test_gpu_check_runs_without_pyzmq(tmp_path: Path) -> None:
    """Parts that need it are reported as skipped; the others run."""
    (tmp_path / "sitecustomize.py").write_text(WITHOUT)
    only = [f"--only={part}" for part in ("prefill", "scheduler", "death")]
    output, report = check(tmp_path, *only, path=tmp_path)
    assert report["prefill"]["parameters"] > 0
    assert report["scheduler"]["skipped"] == "pyzmq"
    assert report["death"]["skipped"] == ["zmq"]
    assert output.count("left out: ") == 2


def test_gpu_check_finds_modules_in_wheels(tmp_path: Path) -> None:
    """Where nothing can be installed; installed packages take precedence."""
    (tmp_path / "wheels").mkdir()
    with zipfile.ZipFile(tmp_path / "wheels" / "some-1-py3-none-any.whl", "w") as wheel:
        wheel.writestr("lifecycle_carried.py", "")
        wheel.writestr("torch.py", "raise RuntimeError")
    script = (
        "import subprocess, sys, pathlib, gpu_check\n"
        "gpu_check._unpack(*map(pathlib.Path, sys.argv[1:]))\n"
        "import lifecycle_carried, torch\n"
        "code = 'import lifecycle_carried'\n"
        "subprocess.run([sys.executable, '-c', code], check=True)\n"
    )
    subprocess.run(
        [sys.executable, "-c", script, tmp_path / "wheels", tmp_path / "unpacked"],
        check=True,
        timeout=600,
        cwd=CHECK.parent,
    )


def test_gpu_check_reports_the_parts_over_budget(tmp_path: Path) -> None:
    """It lists the skipped parts, and how to run them."""
    output, report = check(tmp_path, "--budget", "0", "--skip", "memory")
    assert report["left_out"][:2] == ["identity", "decode"]
    assert "memory" not in report["left_out"]
    assert "--only identity --only decode --only copies" in output


def test_gpu_check_without_a_device_is_skipped() -> None:
    """Without a CUDA device the check says so and succeeds."""
    import torch

    if torch.cuda.is_available():
        pytest.skip("a device is present")
    done = subprocess.run(
        [sys.executable, CHECK], capture_output=True, text=True, check=True, timeout=600
    )
    assert "sees no CUDA device" in done.stdout


def test_gpu_check_continues_after_a_failing_part(tmp_path: Path) -> None:
    """One failure must not skip the later parts."""
    script = (
        "import sys, gpu_check\n"
        "gpu_check.bandwidth = lambda device: [][0]\n"
        "sys.exit(gpu_check.main(sys.argv[1:]))\n"
    )
    only = ["--device=cpu", "--only=copies", "--only=arena"]
    out = tmp_path / "report.json"
    done = subprocess.run(
        [sys.executable, "-c", script, *only, "--out", out],
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
        cwd=CHECK.parent,
    )
    assert done.returncode == 1, done.stderr
    assert "IndexError" in done.stderr
    assert "failed: copies" in done.stdout
    report = json.loads(out.read_text())
    assert report["copies"]["failed"] == "IndexError"
    assert report["arena"]["the arena"]["identical"]


def test_zombie_counts_as_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An engine whose parent was killed may stay a zombie."""
    monkeypatch.syspath_prepend(str(CHECK.parent))
    from gpu_memory import seconds_until
    from gpu_process import gone

    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        assert not gone(child.pid)
    finally:
        child.kill()
    seconds_until(lambda: gone(child.pid), within=30)
    assert child.stdin is not None
    child.stdin.close()
    child.wait()
    assert gone(child.pid)
