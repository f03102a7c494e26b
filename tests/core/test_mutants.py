"""Each mistake of mutants.toml is caught by the test that is named there."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pytest

import lifecycle

HERE: Final = Path(__file__).parent
PACKAGE: Final = Path(lifecycle.__file__).parent
TESTED_BY: Final = (
    *("adaptive", "regressions", "error_inputs"),
    *("shared_fence", "shared_folder", "shared_gate", "shared_processes"),
    "shared_rows",
)
# A mutant may hang where the code does not.
_HANGS: Final = 600.0
# As many at a time: some wait for a minute for what their mistake keeps from them.
_AT_A_TIME: Final = 4
# Copied here: pytest changes it between two tests, while threads start processes.
_ENVIRONMENT: Final = dict(os.environ)


@dataclass(frozen=True, slots=True)
class Mutant:
    """A mistake in the core.

    Attributes:
        name: What goes wrong.
        file: The module that it is in.
        old: What the module says.
        new: What the mutant says instead.
        test: The test that catches it.
    """

    name: str
    file: str
    old: str
    new: str
    test: str

    def plant(self, root: Path) -> None:
        """Copy the package to *root*, with the mistake in it."""
        copy = root / PACKAGE.name
        shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
        module = copy / self.file
        text = module.read_text()
        assert text.count(self.old) == 1, f"{self.name} fits {text.count(self.old)} x"
        module.write_text(text.replace(self.old, self.new))

    def caught_in(self, root: Path, *, seconds: int = 60) -> str:
        """Return what caught it in the copy under *root*; empty if it lives."""
        argv = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-x",
            "-p",
            "no:cacheprovider",
            f"--timeout={seconds}",
        ]
        argv += [str(HERE / f"test_{name}.py") for name in TESTED_BY]
        argv += ["-k", f"test_{self.test}"]
        environment = {**_ENVIRONMENT, "PYTHONPATH": str(root)}
        try:
            done = subprocess.run(
                argv,
                env=environment,
                cwd=HERE.parents[1],
                capture_output=True,
                text=True,
                timeout=_HANGS,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return "it hung"
        # Of a lease that its mistake lost, pytest may complain as late as at its end.
        assert done.returncode in {0, 1}, done.stdout[-2000:] + done.stderr[-2000:]
        assert re.search(r"\d (passed|failed)", done.stdout), "it ran no test"
        lines = (done.stdout + done.stderr).splitlines()
        failed = [it for it in lines if it.startswith(("FAILED", "ERROR"))]
        return (failed or lines[-1:])[0] if done.returncode else ""


MUTANTS: Final = [
    Mutant(**each)
    for each in tomllib.loads((HERE / "mutants.toml").read_text())["mutant"]
]


@pytest.fixture(scope="module")
def verdicts(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Mapping[str, Future[str]]]:
    """What caught each of the mutants that this run asks for."""

    def hunt(mutant: Mutant) -> str:
        root = tmp_path_factory.mktemp(mutant.name)
        mutant.plant(root)
        return mutant.caught_in(root)

    tests = [
        each for each in request.session.items if isinstance(each, pytest.Function)
    ]
    asked = [
        test.callspec.params["mutant"]
        for test in tests
        if test.function is test_catches_mutant
    ]
    # Before threads do: the second to ask for it would empty it.
    tmp_path_factory.getbasetemp()
    with ThreadPoolExecutor(_AT_A_TIME) as pool:
        yield {each.name: pool.submit(hunt, each) for each in asked}
        pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_fits_the_code(mutant: Mutant, tmp_path: Path) -> None:
    """A planted mistake replaces a text that the module has exactly once."""
    mutant.plant(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_catches_mutant(mutant: Mutant, verdicts: Mapping[str, Future[str]]) -> None:
    """A planted mistake fails the test that is named for it."""
    assert verdicts[mutant.name].result(), f"{mutant.name} lives"


@pytest.mark.slow
def test_passes_without_a_mutant(tmp_path: Path) -> None:
    """The same tests pass in an unchanged copy."""
    nothing = Mutant("nothing", "_lease.py", "class Lease(", "class Lease(", "")
    nothing.plant(tmp_path)
    # No test fails because the machine is busy.
    assert not nothing.caught_in(tmp_path, seconds=500)
