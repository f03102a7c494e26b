"""The gate of several processes under random schedules, with kills and stops."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from mutants import Mutant, plant, read

SOAK = Path(__file__).with_name("shared_soak.py")
MUTANTS = read(Path(__file__).with_name("shared_mutants.toml"))
# Schedules that a mutant may live for; each takes some hundredths of a second.
LIMIT = 2_000
# Copied here: pytest changes it between two tests, while threads start processes.
ENVIRONMENT = dict(os.environ)

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="OFD locks")


def run(*options: object, root: Path | None = None) -> list[str]:
    """Run schedules in processes of their own, and return what was printed."""
    pytest.importorskip("greenlet")
    paths = {} if root is None else {"PYTHONPATH": str(root)}
    # Removed here as well: after a timeout, nobody does it there.
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        done = subprocess.run(
            [sys.executable, str(SOAK), "--folder", folder, *map(str, options)],
            env={**ENVIRONMENT, **paths},
            capture_output=True,
            text=True,
            timeout=900,
            check=False,
        )
    assert done.stdout, done.stderr[-2000:]
    return done.stdout.splitlines()


def soak(*options: object, root: Path | None = None) -> dict[str, object]:
    """Run schedules; say how many, and what was found."""
    return dict(json.loads(run(*options, root=root)[-1]))


def test_keeps_its_laws_in_some_schedules() -> None:
    """Nothing is over-admitted and nobody is forgotten, in the first of them."""
    found = soak(80)
    print(f"{found['schedules']} schedules, {found['steps']} steps")
    assert found["failure"] is None, found["failure"]
    assert found["schedules"] == 80


def test_repeats_a_schedule(tmp_path) -> None:
    """A seed alone is enough to see a failure again, on any file system."""
    for seed in (4, 5, 6):
        first = run("--seed", seed)
        assert len(first) > 600
        assert first == run("--seed", seed, "--folder", tmp_path)


def test_leaves_no_files(tmp_path) -> None:
    """What schedules left goes with them, also when they are told to end."""
    pytest.importorskip("greenlet")
    command = [sys.executable, str(SOAK), "100000", "--folder", str(tmp_path)]
    with subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.PIPE) as process:
        guard = threading.Timer(120, process.kill)
        guard.start()
        try:
            assert process.stdout.readline().endswith(b" schedules\n")
            assert list(tmp_path.iterdir())
            process.terminate()
            assert process.wait(120) == 143
        finally:
            guard.cancel()
            process.kill()
    assert list(tmp_path.iterdir()) == []


def test_tells_an_error_from_a_broken_law(tmp_path) -> None:
    """A thread that ends by an error is a failure, and no find."""
    patch = ["        now = self._clock()\n        if self._leaves", "        1 / 0"]
    patch[1] += "\n        if self._leaves"
    plant(Mutant("raises", "shared/member.py", [patch]), tmp_path)
    found = soak(1, root=tmp_path)
    assert "ZeroDivisionError" in str(found["failure"])
    assert not found["broken"]


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_keeps_its_laws_in_many_schedules() -> None:
    """The same for as many schedules as there is time for."""
    processes = os.cpu_count() or 1
    found = soak(1_000_000, "--first", 1000, "--seconds", 60, "--processes", processes)
    print(f"{found['schedules']} schedules, {found['steps']} steps")
    assert found["failure"] is None, found["failure"]
    assert found["schedules"]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_fits_the_code(mutant: Mutant, tmp_path: Path) -> None:
    """A planted mistake replaces what the code says, in each place once."""
    plant(mutant, tmp_path)


@pytest.fixture(scope="module")
def finds(tmp_path_factory):
    """What was found in each mutant; two are hunted at a time.

    Nothing is found where there is no mistake: a law that is broken there as well would
    be broken in all mutants.
    """
    sound = soak(LIMIT // 10)
    assert sound["failure"] is None, sound["failure"]

    def find(mutant: Mutant) -> dict[str, object] | str:
        root = tmp_path_factory.mktemp(mutant.name)
        try:
            plant(mutant, root)
            return soak(LIMIT, root=root)
        except AssertionError as error:
            return str(error)
        finally:
            shutil.rmtree(root, ignore_errors=True)

    # Before threads do: the second to ask for it would empty it.
    tmp_path_factory.getbasetemp()
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        yield {m.name: pool.submit(find, m) for m in MUTANTS}
        pool.shutdown(cancel_futures=True)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", [mutant.name for mutant in MUTANTS])
def test_catches_mutant(finds, name) -> None:
    """A planted mistake breaks a law before long."""
    found = finds[name].result()
    assert isinstance(found, dict), found
    assert found["failure"] is not None, f"{name} lived: {found}"
    assert found["broken"], f"an error, and no law: {found['failure']}"
    print(f"{name}: in schedule {found['schedules']}")
