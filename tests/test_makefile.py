"""The messages of `make` on machines that lack a requirement.

The set-up script runs in a copy of the project beside stand-ins for `python3`
and `df`, so that no test needs an old machine or a full disk.
"""

import fcntl
import os
import select
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

pytestmark = pytest.mark.skipif(
    shutil.which("make") is None, reason="make is not installed"
)


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """Return a copy of the files `make` needs, with an empty folder `bin`."""
    project = tmp_path / "project"
    for name in ("Makefile", "pyproject.toml", "constraints", "scripts"):
        source, target = ROOT / name, project / name
        target.parent.mkdir(exist_ok=True)
        (shutil.copytree if source.is_dir() else shutil.copy)(source, target)
    (tmp_path / "bin").mkdir()
    return project


def stand_in(copy: Path, name: str, script: str) -> None:
    """Put a shell script in front of the real command *name*."""
    path = copy.parent / "bin" / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def begin(copy: Path, *args: str) -> subprocess.Popen[str]:
    """Start `make` in the copy, with the stand-ins first on the path."""
    path = f"{copy.parent / 'bin'}:/usr/bin:/bin"
    return subprocess.Popen(
        ["make", *args],
        cwd=copy,
        env={"PATH": path, "HOME": os.environ.get("HOME", "/")},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def make(copy: Path, *args: str) -> subprocess.CompletedProcess[str]:
    """Run `make` in the copy to its end."""
    process = begin(copy, *args)
    try:
        output, errors = process.communicate(timeout=600)
    finally:
        process.kill()
    return subprocess.CompletedProcess(args, process.returncode, output, errors)


def test_lists_targets_for_unknown_one(copy: Path) -> None:
    """An unknown target fails and lists the targets."""
    done = make(copy, "tests")
    assert done.returncode != 0
    assert "no target 'tests'" in done.stderr
    assert "make demo" in done.stderr


def test_lists_targets_without_one(copy: Path) -> None:
    """Plain `make` lists the targets and builds nothing."""
    done = make(copy)
    assert done.returncode == 0
    assert "make test" in done.stdout
    assert not (copy / ".venv").exists()


def test_names_remedy_for_old_python(copy: Path) -> None:
    """The message names Python 3.9 and the remedy."""
    for name in ("python3", *(f"python3.{minor}" for minor in range(11, 15))):
        stand_in(copy, name, 'test "$1" = --version && echo Python 3.9.2')
    done = make(copy, "lint")
    assert done.returncode != 0
    assert "3.11 or newer" in done.stderr
    assert "Python 3.9.2" in done.stderr
    assert "apt install python3" in done.stderr


def test_names_remedy_for_missing_venv(copy: Path) -> None:
    """On Debian without python3-venv, the message names the package to install."""
    real = sys.executable
    stand_in(
        copy,
        "python3",
        f'case "$*" in *ensurepip*) exit 1;; *) exec {real} "$@";; esac',
    )
    done = make(copy, "lint")
    assert done.returncode != 0
    assert "apt install python3-venv" in done.stderr


def test_names_space_needed_on_full_disk(copy: Path) -> None:
    """A full disk fails before anything is downloaded."""
    stand_in(copy, "python3", f'exec {sys.executable} "$@"')
    row = "/dev/x 1000 900 100 90% /"
    stand_in(copy, "df", f"echo Filesystem; echo '{row}'")
    done = make(copy, "lint")
    assert done.returncode != 0
    assert "about 3 GB" in done.stderr
    assert "100 MiB are free" in done.stderr
    assert not (copy / ".venv").exists()


@pytest.mark.skipif(shutil.which("flock") is None, reason="flock is not installed")
def test_says_that_it_waits_for_another_one(copy: Path) -> None:
    """Two concurrent commands set up one environment, and the second says it waits."""
    stand_in(copy, "python3", 'test "$1" = --version && echo Python 3.9.2')
    with (copy / "scripts" / "setup.sh").open() as script:
        fcntl.flock(script, fcntl.LOCK_EX)
        process = begin(copy, "lint", "PYTHON=python3")
        assert process.stderr is not None
        assert select.select([process.stderr], [], [], 30)[0]
        assert "waits for another make" in process.stderr.readline()
    _, errors = process.communicate(timeout=600)
    assert "Python 3.9.2" in errors


def test_shows_pip_failure(copy: Path) -> None:
    """When pip fails, the end of its log and the next step are shown."""
    pip = 'case "$*" in *"-m pip"*) echo "no route to the mill" >&2; exit 1;; esac'
    venv = 'mkdir -p .venv/bin; cp "$0" .venv/bin/python; exit 0'
    stand_in(
        copy,
        "python3",
        f'{pip}\ncase "$*" in *"-m venv"*) {venv};; esac\nexec {sys.executable} "$@"',
    )
    done = make(copy, "lint")
    assert done.returncode != 0
    assert "no route to the mill" in done.stderr
    assert "updating pip failed" in done.stderr
    assert ".venv/setup.log" in done.stderr
    assert not (copy / ".venv" / ".ready").exists()


@pytest.mark.parametrize("same", [True, False])
def test_makes_the_environment_anew_for_another_python(copy: Path, same: bool) -> None:
    """One of another version than the Python that is named is not what was asked for."""
    venv, real = copy / ".venv", f'exec {sys.executable} "$@"'
    (venv / "bin").mkdir(parents=True)
    other = "" if same else 'case "$*" in *version_info[[]:*) echo 3.99; exit;; esac\n'
    (venv / "bin" / "python").write_text(f"#!/bin/sh\n{other}{real}\n")
    (venv / "bin" / "python").chmod(0o755)
    (venv / ".ready").touch()
    stand_in(copy, "python3", f'case "$*" in *"-m venv"*) exit 1;; esac\n{real}')
    done = make(copy, ".venv/.ready", "PYTHON=python3")
    assert ("Setting up .venv" in done.stderr) is not same
    assert (done.returncode == 0) is same
    assert (venv / "bin" / "python").exists() is same
