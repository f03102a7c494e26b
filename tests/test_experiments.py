"""The experiments run, and their charts show the committed figures."""

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
WAYS = ("none", "admission")
PATH = os.pathsep.join(str(ROOT / name) for name in ("src", "adapters", "tools"))

PICTURES = ["memory", "overload", "peers_vllm", "peers_lmdeploy"]


def run(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a script of the benchmarks in a process of its own."""
    return subprocess.run(
        [sys.executable, ROOT / "benchmarks" / script, *arguments],
        env={**os.environ, "PYTHONPATH": PATH},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


def results(name: str) -> dict[str, Any]:
    """Return the committed figures of an experiment."""
    found: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return found


@pytest.mark.parametrize("name", PICTURES)
def test_draws_the_figures_that_are_in_the_tree(name: str) -> None:
    """A chart shows its committed figures."""
    done = run("draw.py", "--check", name)
    assert done.returncode == 0, f"run python benchmarks/draw.py {name}\n{done.stderr}"


@pytest.mark.parametrize("name", PICTURES)
def test_says_what_machine_it_was_measured_on(name: str) -> None:
    """Figures name the kind of machine, and nothing that identifies it."""
    described = {"cpu", "cores", "memory_gib", "system", "python"}
    assert set(results(name)["machine"]) == described


def test_has_each_case_of_the_memory_experiment_as_often() -> None:
    """Every bar has the same number of runs, and every client got an answer."""
    rows = [row for rows in results("memory")["series"].values() for row in rows]
    assert rows
    assert len({len(row["runs"]) for row in rows}) == 1
    assert sum(run["failed"] for row in rows for run in row["runs"]) == 0


@pytest.mark.slow
def test_runs_the_memory_experiment(tmp_path: Path) -> None:
    """A small run with real servers answers every client and records every case."""
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


@pytest.mark.slow
def test_runs_the_overload_experiment(tmp_path: Path) -> None:
    """A small run with real servers tries each way of handling overload."""
    file = tmp_path / "overload.json"
    # A busy machine offers less than the server takes, and then nothing is refused.
    for _ in range(10):
        done = run("overload.py", "--quick", "--json", str(file))
        assert done.returncode == 0, done.stderr
        rows = json.loads(file.read_text())["rows"]
        if rows[0]["runs"][0]["refusal_p99"] is not None:
            break
    assert [row["way"] for row in rows] == ["gate", "none", "semaphore"]
    assert all(row["runs"][0]["offered"] > 0 for row in rows)
    assert all(row["runs"][0]["failed"] == 0 for row in rows)
    # What of a refusal is the server's is some of it, and so is what is its client's.
    (gate,) = rows[0]["runs"]
    assert 0 < gate["served_p99"] <= gate["refusal_p99"]
    assert 0 < gate["lateness_p99"] <= gate["refusal_p99"]


def test_compares_two_checkouts_row_by_row(tmp_path: Path) -> None:
    """A ratio above one means slower here, of a time as of a rate."""
    program = """if True:
        import sys
        sys.path.insert(0, "benchmarks")
        import before_after as it
        core = "a title\\n  scrub      68 ns   66 ns - 72 ns   1.15\\n"
        link = "starts\\n  starts/s      link      50.0  [49.0 .. 51.0]\\n"
        (title,), found = it.rows(core)
        assert (title, found) == ("a title", {(0, "scrub"): 68e-9}), found
        _, ((row, before),) = it.rows(link)[0], it.rows(link)[1].items()
        assert (row, before) == ((0, "starts/s, link"), 50.0)
        assert it.ratio(row[1], before, 25.0) == 2.0
        assert it.ratio("scrub", 68e-9, 136e-9) == 2.0
    """
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def flood_of_one_stream(seconds: float, json_file: Path) -> Any:
    """Run one cell of the experiment with streams over HTTP."""
    cell = ("--streams", "1", "--kinds", "flood", "--ways", "server", "--rounds", "1")
    more = ("--seconds", str(seconds), "--json", str(json_file))
    return run("http_streams.py", *cell, *more)


def test_measures_a_flood_of_one_stream(tmp_path: Path) -> None:
    """One stream gets all tokens of a flood, more than the model takes by default."""
    done = flood_of_one_stream(0.6, tmp_path / "found.json")
    assert done.returncode == 0, done.stderr
    cells = json.loads((tmp_path / "found.json").read_text())["cells"]
    (figures,) = cells["flood, 1 at a time"]["server"]
    assert figures["per_second"] > 0
    assert figures["first_ms"] > 0


def test_says_what_clients_got_instead_of_an_answer(tmp_path: Path) -> None:
    """A request that the server refuses ends the experiment with the refusal."""
    done = flood_of_one_stream(100, tmp_path / "found.json")
    assert done.returncode == 1
    assert "1 of 1 clients got no answer; the first got HTTP/1.1 400" in done.stderr
    assert "context_length_exceeded" in done.stderr


def test_keeps_vllm_within_the_budget_in_the_figures() -> None:
    """With the middleware vLLM grew by at most 1.15 budgets, and served all clients."""
    found = results("peers_vllm")
    limit = 1.15 * found["settings"]["budget_mib"]
    rows = [row for row in found["rows"] if row["way"] == "admission"]
    assert max(row["clients"] for row in rows) == 512
    for row in rows:
        assert row["peak"] - row["base"] <= limit
        assert row["answers"]["200"] == row["clients"]


def test_keeps_lmdeploy_within_the_budget_in_the_figures() -> None:
    """LMDeploy grew beyond the budget without the middleware, and not with it."""
    found = results("peers_lmdeploy")
    limit = 1.15 * found["settings"]["budget_mib"]
    most = max(row["clients"] for row in found["rows"])
    assert most >= 128
    for row in found["rows"]:
        grown = row["peak"] - row["base"]
        if row["way"] == "admission":
            assert grown <= limit
            assert row["answers"]["200"] == row["clients"]
        elif row["clients"] == most:
            assert grown > 2 * limit


def test_ends_what_litellm_left_running_in_the_figures() -> None:
    """With the middleware the backend of LiteLLM stops within two seconds."""
    rows = results("peers_litellm")["rows"]
    after = {way: [r["worked_after"] for r in rows if r["way"] == way] for way in WAYS}
    assert len(after["none"]) == len(after["admission"]) == 3
    assert max(after["admission"]) <= 2
    assert min(after["none"]) >= 10


@pytest.mark.parametrize("name", ["peers_vllm", "peers_litellm", "peers_lmdeploy"])
def test_explains_experiments_with_other_servers_without_them(name: str) -> None:
    """Without vLLM and LiteLLM their experiments still say what their options are."""
    done = run(f"{name}.py", "--help")
    assert done.returncode == 0, done.stderr
    assert "--ways" in done.stdout


def test_finds_the_platform_plugin_for_vllm(tmp_path: Path) -> None:
    """The metadata written for vLLM lead to the plug-in that chooses its platform."""
    program = """if True:
        import importlib.metadata as metadata, pathlib, sys
        sys.path[:0] = ["benchmarks", sys.argv[1]]
        import peers_vllm_rig as rig
        rig.install_plugin(pathlib.Path(sys.argv[1]))
        (entry,) = metadata.entry_points(group="vllm.platform_plugins", name="peers")
        assert entry.load() is rig.platform
    """
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
