"""Runs SPIN on the models: visits all states, seeds faults, generates traces.

As a script it visits all states, prints how many there are, and records this.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

HERE: Final = Path(__file__).parent
RESULTS: Final = HERE / "results.json"
MISSING: Final = [tool for tool in ("spin", "gcc") if shutil.which(tool) is None]

# Seconds after which a tool hangs; each takes less than thirty.
_HANGS: Final = 1800


@dataclass(frozen=True, slots=True)
class Run:
    """One visit of all states of a model.

    Attributes:
        model: Its file, without the suffix.
        options: Macros of the model.
        ltl: The formula to check, fairly; without one, the assertions.
    """

    model: str
    options: tuple[str, ...] = ()
    ltl: str | None = None

    @property
    def name(self) -> str:
        """The run in a word or two."""
        return " ".join((self.model, self.ltl or "assertions", *self.options))


# Without losses and timeouts, the protocol alone has to end every session.
RELIABLE: Final = ("LOSSES=0", "DOUBLES=1", "DEATHS=1", "TIMEOUTS=0")
# A message that was lost shows by the next one, so a session that another one follows
# becomes quiet. The last message of all is never missed: the model has no PING.
UNPROBED: Final = ("LOSSES=1", "DOUBLES=0", "DEATHS=0", "TIMEOUTS=0")
LOSSY: Final = ("LOSSES=2", "DOUBLES=1", "DEATHS=1", "TIMEOUTS=1")
# Faults of a shared gate, as many as are given; each worker makes one request.
_SHARED: Final = {
    "REQUESTS": 1,
    "KILLS": 0,
    "STOPS": 0,
    "DOUBTS": 0,
    "CUTS": 0,
    "CANCELS": 0,
}


def shared(**some: int) -> tuple[str, ...]:
    """Return the macros of `shared.pml` for these faults and no others."""
    return tuple(f"{name}={n}" for name, n in {**_SHARED, **some}.items())


STOPPED: Final = shared(STOPS=1, CUTS=1, DOUBTS=1)
KILLED: Final = shared(KILLS=1, CUTS=1, DOUBTS=1)
RUNS: Final = (
    Run("gate"),
    Run("gate", ltl="served"),
    Run("gate", ltl="ended"),
    Run("link"),
    Run("link", LOSSY),
    Run("link", RELIABLE, "quiet"),
    Run("link", RELIABLE, "all_quiet"),
    Run("link", UNPROBED, "quiet"),
    Run("shared", STOPPED),
    Run("shared", KILLED, "ends"),
    Run("shared", shared(KILLS=1, STOPS=1, REQUESTS=2)),
    Run("shared", shared(CANCELS=1, DOUBTS=1, REQUESTS=2)),
    Run("shared", (*shared(DOUBTS=1), "N=3", "SLOTS=2", "BEGUN")),
)
FAULTS: Final = (
    *(Run(model, (f"FAULT={n}",)) for model in ("gate", "link") for n in (1, 2, 3, 4)),
    Run("link", UNPROBED, "all_quiet"),
    *(Run("shared", (*STOPPED, f"FAULT={n}")) for n in (1, 2, 3, 4, 5, 8, 9, 10, 11)),
    Run("shared", (*shared(CANCELS=1, REQUESTS=2), "FAULT=6")),
    Run("shared", (*shared(DOUBTS=2), "FAULT=7")),
    Run("shared", (*shared(STOPS=1), "FAULT=12")),
    Run("shared", (*shared(DOUBTS=1), "FAULT=13")),
)


def _tool(argv: Sequence[str], cwd: Path) -> str:
    done = subprocess.run(
        argv, cwd=cwd, capture_output=True, text=True, timeout=_HANGS, check=False
    )
    assert done.returncode == 0, (
        f"{argv[0]}: {done.stdout[-2000:]}{done.stderr[-2000:]}"
    )
    return done.stdout


def visit(run: Run) -> dict[str, int]:
    """Visit all states; return how many there are, and how many errors."""
    macros = [f"-D{each}" for each in run.options]
    kind = ["-DSAFETY", "-DNOCLAIM"] if run.ltl is None else ["-DNFAIR=3"]
    if any(option.startswith("FAULT=") for option in run.options):
        kind.append("-DBFS")  # a fault that shows in few steps is found first
    claim = [] if run.ltl is None else ["-a", "-f", "-N", run.ltl]
    with tempfile.TemporaryDirectory() as directory:
        cwd = Path(directory)
        model = str(HERE / f"{run.model}.pml")
        _tool(["spin", *macros, "-a", model], cwd)
        _tool(
            [
                "gcc",
                "-O2",
                "-w",
                "-DCOLLAPSE",
                "-DNOREDUCE",
                *kind,
                "-o",
                "pan",
                "pan.c",
            ],
            cwd,
        )
        said = _tool(["./pan", *claim, "-m1000000"], cwd)
    assert "max search depth" not in said, said
    counts = {"errors": r"errors: (\d+)", "states": r"(\d+) states, stored"}
    counts["transitions"] = r"(\d+) transitions"
    found = {name: re.search(pattern, said) for name, pattern in counts.items()}
    counted = {name: int(match[1]) if match else -1 for name, match in found.items()}
    assert counted["errors"] or "Search not completed" not in said, said
    return counted


@dataclass(frozen=True, slots=True)
class Step:
    """One change of a trace: what, of which request or session, and what is seen then.

    Attributes:
        what: The change.
        who: The number of the request or session.
        amount: A cost or capacity, where the change has one.
        seen: What can be seen after it.
    """

    what: str
    who: int
    amount: int
    seen: tuple[int, ...]


def trace(model: str, seed: int, *options: str) -> list[Step]:
    """Return the changes of one random run of a model."""
    return list(_steps(_simulate(model, seed, options)))


def changes(model: str) -> set[str]:
    """Return the names of all changes that a model can make."""
    text = (HERE / f"{model}.pml").read_text()
    return set(re.findall(r"SHOW\((\w+),", text)) - {"what"}


def _simulate(model: str, seed: int, options: Sequence[str]) -> str:
    macros = [f"-D{each}" for each in ("TRACE", *options)]
    with tempfile.TemporaryDirectory() as directory:
        path = str(HERE / f"{model}.pml")
        argv = ["spin", *macros, f"-n{seed}", "-T", "-u5000", path]
        return _tool(argv, Path(directory))


def _steps(said: str) -> Iterator[Step]:
    for line in said.splitlines():
        if line.startswith("@ "):
            change, _, seen = line[2:].partition(" : ")
            what, *numbers = change.split()
            who, amount = (*map(int, numbers), 0)[:2]
            yield Step(what, who, amount, tuple(map(int, seen.split())))
    assert "Error" not in said, said


def results() -> dict[str, Any]:
    """Visit all states of all models, and find all faults."""
    visited = {}
    for run in RUNS:
        visited[run.name] = visit(run)
        print(run.name, visited[run.name], flush=True)
    return {"spin": version(), "runs": visited}


def version() -> str:
    """Return what SPIN says that it is."""
    return _tool(["spin", "-V"], HERE).strip()


if __name__ == "__main__":
    if MISSING:
        raise SystemExit(f"{' and '.join(MISSING)} not installed: nothing was checked")
    RESULTS.write_text(json.dumps(results(), indent=1) + "\n")
