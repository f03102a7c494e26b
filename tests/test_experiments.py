"""The experiments run, and their pictures show the figures that are in the tree."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PATH = os.pathsep.join(str(ROOT / name) for name in ("src", "adapters"))


def run(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a script of the benchmarks in a process of its own."""
    return subprocess.run(
        [sys.executable, ROOT / "benchmarks" / script, *arguments],
        env={**os.environ, "PYTHONPATH": PATH},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def results(name: str) -> dict[str, Any]:
    """The figures of an experiment that are in the tree."""
    found: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return found


@pytest.mark.parametrize("name", ["memory", "overload"])
def test_draws_the_figures_that_are_in_the_tree(name: str) -> None:
    """A picture is drawn anew whenever its figures are measured anew."""
    done = run("draw.py", "--check", name)
    assert done.returncode == 0, f"run python benchmarks/draw.py {name}\n{done.stderr}"


@pytest.mark.parametrize("name", ["memory", "overload"])
def test_says_what_machine_it_was_measured_on(name: str) -> None:
    """Figures come with their machine's kind, and with nothing that names it."""
    described = {"cpu", "cores", "memory_gib", "system", "python"}
    assert set(results(name)["machine"]) == described


def test_has_each_case_of_the_memory_experiment_as_often() -> None:
    """Every bar is as many servers, and every client of theirs got an answer."""
    rows = [row for rows in results("memory")["series"].values() for row in rows]
    assert rows
    assert len({len(row["runs"]) for row in rows}) == 1
    assert sum(run["failed"] for row in rows for run in row["runs"]) == 0


def test_runs_the_memory_experiment(tmp_path: Path) -> None:
    """In small, with real servers: every client is answered, every case written down."""
    file = tmp_path / "memory.json"
    done = run("memory.py", "--quick", "--only", "halves", "--json", str(file))
    assert done.returncode == 0, done.stderr
    written = file.read_text()
    rows = json.loads(written)["series"]["halves"]
    assert [len(row["runs"]) for row in rows] == [1, 1]
    for row in rows:
        (only,) = row["runs"]
        assert only["peak"] > only["before"] > 0
        assert only["series"]
    # Resumed with nothing missing, it starts no server and tells the same.
    again = run(
        "memory.py", "--quick", "--only", "halves", "--resume", "--json", str(file)
    )
    assert again.stdout == done.stdout
    assert file.read_text() == written


def test_runs_the_overload_experiment(tmp_path: Path) -> None:
    """In small, with real servers: each way of meeting ten times too many is tried."""
    file = tmp_path / "overload.json"
    done = run("overload.py", "--quick", "--json", str(file))
    assert done.returncode == 0, done.stderr
    rows = json.loads(file.read_text())["rows"]
    assert [row["way"] for row in rows] == ["gate", "none", "semaphore"]
    assert all(row["runs"][0]["offered"] > 0 for row in rows)
    assert all(row["runs"][0]["failed"] == 0 for row in rows)
    # What of a refusal is the server's is some of it, and so is what is its client's.
    (gate,) = rows[0]["runs"]
    assert 0 < gate["served_p99"] <= gate["refusal_p99"]
    assert 0 < gate["lateness_p99"] <= gate["refusal_p99"]
