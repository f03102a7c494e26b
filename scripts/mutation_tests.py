"""Run the core's tests against a changed module, in a process that is warm already.

What tests import from elsewhere is imported once; each run is a fork that imports the
package from a copy with the change in it.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

import coverage
import pytest

ROOT: Final = Path(__file__).resolve().parents[1]
PACKAGE: Final = ROOT / "src" / "lifecycle"
CORE: Final = ROOT / "tests" / "core"
CACHE: Final = ROOT / "build" / "mutation"

Outcome = Literal["caught", "lives", "not run"]

# It plants mutants itself.
_LEFT_OUT: Final = CORE / "test_mutants.py"
_WARM: Final = ("trio.testing", "anyio.pytest_plugin", "hypothesis.stateful", "uvloop")
# Seconds of one test, and of one run: a mutant may hang.
_TEST_HANGS: Final = 40
_RUN_HANGS: Final = 400.0
# Tests that run before the files of all others are read: mostly one of them fails.
_FIRST: Final = 20
_OPTIONS: Final = (
    *("-q", "-x", "-p", "no:cacheprovider", "-p", "no:randomly"),
    # What is imported already holds no assertion of ours.
    *("-W", "ignore::pytest.PytestAssertRewriteWarning"),
)


class _Recorder:
    """Notes which lines each test runs, and for how long."""

    def __init__(self, measuring: coverage.Coverage) -> None:
        self.measuring = measuring
        self.seconds: dict[str, float] = {}

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self.measuring.switch_context(item.nodeid)
        return (yield)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        before = self.seconds.get(report.nodeid, 0.0)
        self.seconds[report.nodeid] = before + report.duration


class _Chosen:
    """Runs chosen tests in a given order, and writes down which has begun or failed."""

    def __init__(self, order: list[str], latest: Path, failed: Path) -> None:
        self.rank = {test: rank for rank, test in enumerate(order)}
        self.latest = latest
        self.failed = failed

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = [item for item in items if item.nodeid in self.rank]
        items.sort(key=lambda item: self.rank[item.nodeid])

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.latest.write_text(nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed.write_text(report.nodeid)


@dataclass(slots=True)
class Coverage:
    """Which tests run which lines.

    Attributes:
        seconds: What each test takes.
        tests: The tests by module and line; those of ``""`` ran as it was imported.
        caught: How many mutants each test has caught.
    """

    seconds: dict[str, float]
    tests: dict[str, dict[str, list[str]]]
    caught: Counter[str] = field(default_factory=Counter)

    def order(self, module: str, lines: frozenset[int]) -> list[str]:
        """Return the tests to run for a change of *lines*, the likeliest first."""
        by_line = self.tests.get(module, {})
        found = {test for line in lines for test in by_line.get(str(line), [])}
        if not found or "" in found:
            found = set(self.seconds)  # it runs as the module is imported
        return sorted(
            found - {""},
            key=lambda it: (-self.caught[it], self.seconds.get(it, 0.0)),
        )


class Run:
    """One run of tests, in a process of its own.

    Args:
        directory: An empty one, for the copy of the package.
        module: The module that is changed.
        code: What it says instead.
        order: The tests.
    """

    def __init__(self, directory: Path, module: str, code: str, order: list[str]):
        self._latest, self._failed = directory / "latest", directory / "failed"
        self._began = time.monotonic()
        shutil.copytree(PACKAGE, directory / PACKAGE.name, ignore=_without_caches)
        (directory / PACKAGE.name / f"{module}.py").write_text(code)
        self._pid = os.fork()
        if not self._pid:
            _in_child(directory, order, self._latest, self._failed)

    @property
    def seconds(self) -> float:
        """Since it began."""
        return time.monotonic() - self._began

    def poll(self) -> tuple[Outcome, str] | None:
        """Return the outcome and the test that failed, or ``None`` while it runs."""
        pid, status = os.waitpid(self._pid, os.WNOHANG)
        hangs = not pid and self._hangs()
        if not pid and not hangs and self.seconds < _RUN_HANGS:
            return None
        with suppress(ProcessLookupError):
            os.killpg(self._pid, signal.SIGKILL)
        failed = self._failed.read_text() if self._failed.exists() else ""
        if not pid:
            os.waitpid(self._pid, 0)
            # No test that ran has noticed, unless its own limit could not end it.
            hung = self._latest.read_text() if hangs else ""
            return ("caught" if failed or hung else "lives"), failed or hung
        if os.waitstatus_to_exitcode(status) == pytest.ExitCode.NO_TESTS_COLLECTED:
            return "not run", ""
        return ("caught" if status or failed else "lives"), failed

    def _hangs(self) -> bool:
        """Whether the last test has gone on for long after its limit."""
        with suppress(FileNotFoundError):
            return time.time() - self._latest.stat().st_mtime > 2 * _TEST_HANGS
        return False


def check_unchanged(tests: list[str]) -> None:
    """Raise unless *tests* pass without a mutant: or every one seems caught.

    Raises:
        SystemExit: One fails.
    """
    module = "_lock"
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as directory:
        code = (PACKAGE / f"{module}.py").read_text()
        run = Run(Path(directory), module, code, tests)
        while (found := run.poll()) is None:
            time.sleep(0.1)
        if found[0] != "lives":
            log = (Path(directory) / "log").read_text()
            raise SystemExit(f"no mutant was tried, as tests fail:\n{log}")


def _without_caches(_: str, names: list[str]) -> list[str]:
    return [name for name in names if name == "__pycache__"]


def _in_child(directory: Path, order: list[str], latest: Path, failed: Path) -> None:
    os.setsid()
    with (directory / "log").open("wb") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    if len(order) > _FIRST:
        pid = os.fork()
        if pid and (status := os.waitpid(pid, 0)[1]):
            os._exit(max(os.waitstatus_to_exitcode(status), 1))
        order = order[_FIRST:] if pid else order[:_FIRST]
    sys.path.insert(0, str(directory))
    os.environ["PYTHONPATH"] = str(directory)
    files = sorted({test.partition("::")[0] for test in order})
    options = [*_OPTIONS, f"--timeout={_TEST_HANGS}", "-m", "not slow"]
    code = 1
    try:
        code = pytest.main([*options, *files], plugins=[_Chosen(order, latest, failed)])
    except BaseException:  # noqa: BLE001 - shown, and ends this process
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(int(code))


def warm_up() -> None:
    """Import what tests import from elsewhere: once, as runs are forks."""
    os.chdir(ROOT)
    for name in _WARM:
        with suppress(ImportError):
            importlib.import_module(name)


def cover() -> Coverage:
    """Return which tests run which lines, measured again if one has changed.

    Raises:
        SystemExit: A test fails: or every mutant would seem caught.
    """
    files = sorted([*PACKAGE.glob("*.py"), *CORE.rglob("*.py")])
    texts = b"\0".join(it.read_bytes() for it in files)
    known = CACHE / f"{hashlib.sha256(texts).hexdigest()[:16]}.json"
    if not known.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        pid = os.fork()
        if not pid:
            try:
                _measure(known)
            except BaseException:  # noqa: BLE001 - shown, and ends this process
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(1)
        if os.waitpid(pid, 0)[1]:
            raise SystemExit(f"tests fail without a mutant; see {CACHE / 'log'}")
    return Coverage(**json.loads(known.read_text()))


def _measure(known: Path) -> None:
    with (CACHE / "log").open("wb") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    # Of the measurers this one alone knows which test runs.
    os.environ["COVERAGE_CORE"] = "ctrace"
    measuring = coverage.Coverage(
        data_file=str(known.with_suffix(".coverage")),
        source_pkgs=[PACKAGE.name],
        config_file=False,
    )
    recorder = _Recorder(measuring)
    measuring.start()
    options = [*_OPTIONS, "-m", "not slow", f"--ignore={_LEFT_OUT}"]
    code = pytest.main([*options, str(CORE.relative_to(ROOT))], plugins=[recorder])
    measuring.stop()
    measuring.save()
    if code:
        raise SystemExit(f"pytest ended with {code!r}")
    tests: dict[str, Any] = {}
    data = measuring.get_data()
    for file in data.measured_files():
        tests[Path(file).stem] = data.contexts_by_lineno(file)
    known.write_text(json.dumps({"seconds": recorder.seconds, "tests": tests}))
    os._exit(0)
