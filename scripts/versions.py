"""Which versions of other packages are pinned, and which were tried.

    python scripts/versions.py update     pin the newest releases, if `make test` passes
    python scripts/versions.py canary     try the newest and the oldest permitted ones
    python scripts/versions.py table      write the table of docs/reference/versions.md

The first two try what is committed, in a clone under `build/versions`. A clone that
fails stays there for you to look at, and nothing else changes. Two files in
`constraints` record what passed: `tested.txt`, which `make` installs, and `oldest.txt`.
"""

from __future__ import annotations

import argparse
import json
import platform
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[1]
CLONES = ROOT / "build" / "versions"
TESTED = Path("constraints/tested.txt")
OLDEST = Path("constraints/oldest.txt")
HELD = Path("constraints/held.txt")
PAGE = ROOT / "docs/reference/versions.md"
MARK = "<!-- The table below is written by scripts/versions.py. -->\n"
OURS = "anyio-lifecycle"
# The tests of everything that other packages call, or that calls them. The first one
# says what no longer fits, where hundreds of the others would only fail.
FIRST = ("tests/test_canary.py",)
FACING = ("core", "engine_protocol", "http", "lifecycle_*")
# Where two old releases, or an old one and a tool of ours, warn of each other.
PERMITTED = {
    "newest": (),
    # The plugin of anyio before 4.15 imports a name that pytest has deprecated.
    "oldest": ("-W", "ignore::pytest.PytestRemovedIn10Warning"),
}
TESTED_HEADER = """\
# What `make` installs: exact versions with which `make test` passed,
# with CPython {python} on {system}. Written by `make update`; do not edit.
"""
OLDEST_HEADER = """\
# The oldest releases that pyproject.toml permits, with which the tests passed,
# with CPython {python} on {system}. Written by `make canary`; do not edit.
"""


def requirements() -> Iterator[Requirement]:
    """Yield what users of the package bring along, or run it beside."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    lists = [project["project"]["dependencies"], project["dependency-groups"]["peers"]]
    lists += project["project"]["optional-dependencies"].values()
    for each in (Requirement(each) for wanted in lists for each in wanted):
        if each.name != OURS:
            yield each


def oldest() -> dict[str, str]:
    """Return the lowest version that pyproject.toml permits, by name.

    Where two extras differ the higher one counts: both are installed here.
    """
    found: dict[str, str] = {}
    for each in requirements():
        name = canonicalize_name(each.name)
        for limit in each.specifier:
            if limit.operator == ">=":
                found[name] = max(found.get(name, "0"), limit.version, key=Version)
    return found


def read_pins(path: Path) -> dict[str, str]:
    """Return the versions of a file of constraints, by name."""
    lines = (ROOT / path).read_text().splitlines()
    rows = [line.split("==") for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(name): version for name, version in rows}


def write_pins(path: Path, header: str, versions: Mapping[str, str]) -> None:
    """Write a file of constraints.

    The local part of a version is left out: ``2.13.0+cpu`` is a build for machines
    without CUDA, and another machine needs another build of the same release.
    """
    rows = {canonicalize_name(name): version for name, version in versions.items()}
    rows.pop(canonicalize_name(OURS), None)
    system = f"{platform.system()} {platform.machine()}"
    text = header.format(python=platform.python_version(), system=system)
    for name in sorted(rows):
        text += f"{name}=={rows[name].partition('+')[0]}\n"
    (ROOT / path).write_text(text)


def pip(python: Path, *arguments: str) -> Any:
    """Run pip; return the JSON that it prints."""
    command = [str(python), "-m", "pip", *arguments]
    done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT)
    return json.loads(done.stdout)


def installed(python: Path) -> dict[str, str]:
    """Return the version of every distribution in the environment of *python*."""
    rows = pip(python, "list", "--format=json")
    return {row["name"]: row["version"] for row in rows}


def resolved(python: Path, group: str) -> dict[str, str]:
    """Return what pip would install of a dependency group, without what that needs."""
    options = ("--quiet", "--dry-run", "--ignore-installed", "--no-deps")
    found = pip(python, "install", *options, "--report", "-", "--group", group)
    rows = [each["metadata"] for each in found["install"]]
    return {row["name"]: row["version"] for row in rows}


def clone(name: str, pins: Mapping[str, str]) -> Path:
    """Clone what is committed, with these pins in place of its own."""
    folder = CLONES / name
    shutil.rmtree(folder, ignore_errors=True)
    git = ("git", "clone", "--quiet", "--no-hardlinks", str(ROOT), str(folder))
    subprocess.run(git, check=True)
    lines = [f"{name}=={version}\n" for name, version in pins.items()]
    (folder / TESTED).write_text("".join(lines))
    return folder


def passes(folder: Path, *command: str) -> bool:
    """Run a command in a clone; whether it succeeded."""
    return subprocess.run(command, check=False, cwd=folder).returncode == 0


def update() -> int:
    """Pin the newest releases if `make test` passes with them."""
    folder = clone("update", read_pins(HELD))
    if not passes(folder, "make", ".venv/.docs"):
        return not_updated(folder, "the newest releases cannot be installed")
    python = folder / ".venv/bin/python"
    versions = resolved(python, "suites") | installed(python)
    # Before the tests, which compare both files with what is installed.
    write_pins(folder / TESTED, TESTED_HEADER, versions)
    made = passes(folder, str(python), "scripts/versions.py", "table")
    if not (made and passes(folder, "make", "test")):
        return not_updated(folder, "make test fails with the newest releases")
    for path in (TESTED, PAGE.relative_to(ROOT)):
        shutil.copy(folder / path, ROOT / path)
    shutil.rmtree(folder)
    print(f"update: wrote {TESTED}; git diff shows what moved")
    return 0


def not_updated(folder: Path, why: str) -> int:
    """Say why the pins stay as they were."""
    print(
        f"update: {why}, so {TESTED} is as it was; see {folder.relative_to(ROOT)}. "
        f"Mend what fails, or hold a release back in {HELD} and say why",
        file=sys.stderr,
    )
    return 1


def canary(names: list[str]) -> int:
    """Try the newest and the oldest releases; 1 if the tests fail with either."""
    failed = [each for each in names if not try_releases(each)]
    for each in failed:
        where = (CLONES / each).relative_to(ROOT)
        print(f"canary: failed with the {each} releases; see {where}", file=sys.stderr)
    return 1 if failed else 0


def try_releases(which: str) -> bool:
    """Run the tests with the newest or the oldest releases; whether they pass."""
    folder = clone(which, read_pins(HELD) if which == "newest" else oldest())
    print(f"canary: installing the {which} releases", flush=True)
    tests = folder / "tests"
    paths = [str(path) for each in FACING for path in sorted(tests.glob(each))]
    pytest = (".venv/bin/python", "-m", "pytest", "-q", "-m", "not slow")
    run = (*pytest, *PERMITTED[which])
    side_by_side = ("-n", "4", "--dist", "loadfile", "--no-loadscope-reorder")
    if not (
        passes(folder, "make", ".venv/.ready")
        and passes(folder, *run, "-x", *FIRST)
        and passes(folder, *run, *side_by_side, *paths)
    ):
        return False
    if which == "oldest":
        write_pins(OLDEST, OLDEST_HEADER, installed(folder / ".venv/bin/python"))
    shutil.rmtree(folder)
    print(f"canary: passed with the {which} releases", flush=True)
    return True


def untried() -> list[str]:
    """Return packages whose oldest permitted release is not the one that was tried."""
    tried = read_pins(OLDEST)
    wrong = [
        name
        for name, lowest in oldest().items()
        if name not in tried or Version(tried[name]) != Version(lowest)
    ]
    for name in wrong:
        print(f"{name}: run `make canary ARGS=oldest`", file=sys.stderr)
    return wrong


def table(*, check: bool) -> int:
    """Write the table of the documentation, or compare it."""
    before = PAGE.read_text(encoding="utf-8")
    rows = ["| package | oldest | pinned |", "| --- | --- | --- |"]
    lowest, newest = oldest(), read_pins(TESTED)
    rows += [f"| {name} | {lowest[name]} | {newest[name]} |" for name in sorted(lowest)]
    after = before.partition(MARK)[0] + MARK + "\n" + "\n".join(rows) + "\n"
    if check:
        return int(before != after or bool(untried()))
    PAGE.write_text(after, encoding="utf-8")
    return 0


def main() -> int:
    """Run the command line; 1 if something failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("update")
    which = ("newest", "oldest")
    tried = commands.add_parser("canary")
    tried.add_argument("which", nargs="?", choices=which)
    shown = commands.add_parser("table")
    shown.add_argument("--check", action="store_true")
    options = parser.parse_args()
    if options.command == "update":
        return update()
    if options.command == "canary":
        return canary([options.which] if options.which else list(which))
    return table(check=options.check)


if __name__ == "__main__":
    sys.exit(main())
