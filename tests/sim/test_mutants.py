"""Every planted mistake is found by the harnesses, in seconds.

A proof is worth what it would have found. Each mutant is planted in a copy of
the package, in a process of its own; the working tree is never touched.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from mutants import MUTANTS, PACKAGE, Mutant, plant

HUNT = Path(__file__).parent / "hunt.py"

# Copied here: pytest changes it between two tests, while threads start processes.
ENVIRONMENT = dict(os.environ)
# Seconds of processor time that a mutant may live.
LIMIT = 10.0


def hunt(root: Path) -> dict[str, object]:
    """Hunt in the package under *root*; say what was found, and how soon."""
    environment = {**ENVIRONMENT, "PYTHONPATH": str(root), "PYTHONWARNINGS": "ignore"}
    result = subprocess.run(
        [sys.executable, str(HUNT), "--seconds", str(LIMIT)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=200 * LIMIT,
        check=False,
    )
    lines = result.stdout.splitlines()
    assert lines, result.stderr[-2000:]
    return json.loads(lines[-1])


@pytest.fixture(scope="module")
def finds(tmp_path_factory):
    """What was found in each mutant; two are hunted at a time."""

    def find(mutant: Mutant) -> dict[str, object] | str:
        root = tmp_path_factory.mktemp(mutant.name)
        try:
            plant(mutant, root)
            return hunt(root)
        except AssertionError as error:
            return str(error)
        finally:
            shutil.rmtree(root, ignore_errors=True)

    # Before threads do: the second to ask for it would empty it.
    tmp_path_factory.getbasetemp()
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        yield {m.name: pool.submit(find, m) for m in MUTANTS}
        pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_fits_the_code(mutant, tmp_path):
    """Each mistake can be planted where it belongs."""
    plant(mutant, tmp_path)


@pytest.mark.slow
def test_finds_nothing_in_the_core_itself(tmp_path):
    """The same hunt comes back empty-handed from the package as it is."""
    shutil.copytree(PACKAGE, tmp_path / PACKAGE.name)
    assert "by" not in hunt(tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", [mutant.name for mutant in MUTANTS])
def test_catches_mutant(finds, name):
    """A planted mistake is caught within ten seconds of processor time (N2)."""
    found = finds[name].result()
    assert isinstance(found, dict), found
    assert "by" in found, f"{name} lived: {found}"
    print(f"{name}: {found}")
