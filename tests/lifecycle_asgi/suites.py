"""The test suites of web frameworks, with and without our middlewares.

    python tests/lifecycle_asgi/suites.py              all of them
    python tests/lifecycle_asgi/suites.py starlette    one of them
    python tests/lifecycle_asgi/suites.py quart --source quart=PATH
    python tests/lifecycle_asgi/suites.py mcp          our tests with the SDK of MCP

A test that passes alone passes under `LifecycleMiddleware`, and where a suite says so
under `Admission`, or is one of `EXCEPTIONS`, or this fails. The source of a framework
comes from PyPI, in the version that is installed; what its tests need and is not
installed goes into `build/suites`. Without a network, a suite is reported as skipped,
and the last line says so.

The SDK of MCP is installed there, too: LitServe does not run beside it.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build" / "suites"
SITE = BUILD / "site"
PLUGIN = Path(__file__).resolve().parent
MCP = PLUGIN / "test_mcp.py"
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet")
MIDDLEWARE, ON_DEMAND, ADMISSION = "65536", "0", "admission"


@dataclass(frozen=True)
class Suite:
    """The tests of one framework.

    Attributes:
        name: On PyPI.
        paths: Of the tests, in its source.
        options: Of pytest.
        wraps: What it runs under.
        limit: Seconds for one run, on a busy machine.
    """

    name: str
    paths: tuple[str, ...] = ("tests",)
    options: tuple[str, ...] = ("-p", "no:asyncio")
    wraps: tuple[str, ...] = (MIDDLEWARE,)
    limit: float = 1800.0


SUITES = (
    Suite("starlette", wraps=(MIDDLEWARE, ADMISSION)),
    Suite(
        "fastapi",
        options=("-p", "no:asyncio", "--ignore=tests/test_tutorial/test_graphql"),
        wraps=(MIDDLEWARE, ADMISSION),
    ),
    Suite(
        "sse-starlette",
        options=("-o", "asyncio_mode=auto"),
        wraps=(MIDDLEWARE, ADMISSION),
    ),
    Suite("quart", options=("-o", "asyncio_mode=auto")),
    Suite(
        "litestar",
        paths=("tests/e2e", "tests/unit/test_response", "tests/unit/test_asgi"),
        options=("-o", "asyncio_mode=auto"),
    ),
    Suite(
        "django",
        paths=("asgi", "handlers", "async"),
        options=("-p", "no:asyncio", "-c", os.devnull, "-o", "python_files=test*.py"),
    ),
)


@dataclass(frozen=True)
class Report:
    """What one run of a suite wrote.

    Attributes:
        outcomes: By the id of a test.
        calls: That went through the middleware, by the type of their scope.
    """

    outcomes: dict[str, str]
    calls: dict[str, int]


# By suite and middleware: tests that differ, and why they may.
_LIMITS = "tests/test_request_body_limits.py::test_"
_WHOLE = "Admission reads a body to its end before the application refuses it"
EXCEPTIONS: dict[tuple[str, str], dict[str, str]] = {
    ("fastapi", ADMISSION): {
        f"{_LIMITS}{name}[{loop}]": _WHOLE
        for name in (
            "limit_stops_consumption_before_endpoint",
            # Refused by its size, before a part of it is in a file.
            "multipart_rejection_closes_temporary_files",
        )
        for loop in ("asyncio", "trio")
    },
}


class Unavailable(Exception):
    """The source of a suite cannot be had."""


def fetch(suite: Suite) -> Path:
    """Return the unpacked source of the installed version.

    Raises:
        Unavailable: Not installed, no network, or a source without tests.
    """
    try:
        version = importlib.metadata.version(suite.name)
    except importlib.metadata.PackageNotFoundError:
        raise Unavailable("not installed") from None
    name = suite.name.replace("-", "_")  # as in the name of the archive
    folder = BUILD / f"{name}-{version}"
    if not folder.is_dir():
        BUILD.mkdir(parents=True, exist_ok=True)
        options = ("--no-deps", "--no-binary", suite.name, "--dest", str(BUILD))
        pin = f"{suite.name}=={version}"
        done = run([*PIP, "download", *options, pin], timeout=300)
        found = sorted(BUILD.glob(f"{name}-{version}.tar.gz"))
        if done.returncode or not found:
            raise Unavailable("PyPI cannot be reached")
        with tarfile.open(found[0]) as archive:
            archive.extractall(BUILD, filter="data")
    if not (folder / "tests").is_dir():
        raise Unavailable("the source on PyPI has no tests; use --source")
    return folder


def run(
    command: list[str], *, timeout: float, **options: object
) -> subprocess.CompletedProcess[str]:
    """Run *command*; a failure is the caller's to read."""
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout,
        **options,  # type: ignore[call-overload]
    )


def install() -> None:
    """Install what the tests need, apart from the environment of this checkout.

    Tests that miss something fail in the same way with and without the middleware.
    """
    ready = SITE / ".ready"
    pins = ROOT / "constraints" / "tested.txt"
    # What is installed there has a version, too.
    sys.path.append(str(SITE))
    newest = max(path.stat().st_mtime for path in (pins, ROOT / "pyproject.toml"))
    if ready.exists() and ready.stat().st_mtime > newest:
        return
    options = ("--no-deps", "--upgrade", "--target", str(SITE))
    group = ("--constraint", str(pins), "--group", f"{ROOT}/pyproject.toml:suites")
    if run([*PIP, "install", *options, *group], timeout=600).returncode == 0:
        ready.touch()


def outcomes(suite: Suite, folder: Path, wrap: str, *only: str) -> Report:
    """Run a suite, and return the outcome of each test by its id.

    Args:
        suite: What to run.
        folder: Its source.
        wrap: Empty, ``admission``, or the `read_ahead` of the middleware.
        only: Run these tests only.

    Raises:
        Unavailable: Its tests do not start without us.
    """
    report = BUILD / f"{suite.name}-{wrap or 'without'}.json"
    report.unlink(missing_ok=True)
    where = folder / "tests" if suite.name == "django" else folder
    # The source first: Django's tests are run by a program of their own otherwise.
    path = [str(PLUGIN), str(folder), str(where), str(SITE)]
    settings = {
        "SUITE_WRAP": wrap,
        "SUITE_REPORT": str(report),
        "PYTHONPATH": os.pathsep.join(path),
        "OMP_NUM_THREADS": "1",
    }
    quiet = ("-q", "--no-header", "--tb=short", "-o", "filterwarnings=")
    plugins = ("-p", "suites_plugin", "-p", "no:cacheprovider", "-p", "no:randomly")
    # Ids are the same for all tests and for some only with a root.
    command = [sys.executable, "-m", "pytest", *quiet, *plugins, *suite.options]
    command.append(f"--rootdir={where}")
    try:
        done = run(
            [*command, "--continue-on-collection-errors", *(only or suite.paths)],
            timeout=suite.limit,
            cwd=where,
            env={**os.environ, **settings},
        )
    except subprocess.TimeoutExpired:
        sys.exit(f"{suite.name} {wrap}: not done after {suite.limit:g} s")
    log = done.stdout[-1_000_000:] + done.stderr[-100_000:]
    report.with_suffix(".log").write_text(log)
    if not report.exists() and not wrap:
        raise Unavailable(f"its tests do not start; see {report.stem}.log")
    if not report.exists():
        sys.exit(f"{suite.name}: no report; see {report.with_suffix('.log')}\n{log}")
    found = json.loads(report.read_text())
    if wrap and not found["calls"].get("http"):
        sys.exit(f"{suite.name} {wrap}: no request went through the middleware")
    return Report(**found)


def with_mcp() -> None:
    """Run our own tests with the SDK of MCP.

    Raises:
        Unavailable: It could not be installed.
    """
    if importlib.util.find_spec("mcp") is None:  # `install` has added its place
        raise Unavailable("PyPI cannot be reached")
    paths = [str(SITE), os.environ.get("PYTHONPATH", "")]
    done = run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(MCP)],
        timeout=600,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
    )
    last = done.stdout.strip().rpartition("\n")[2]
    if done.returncode or "passed" not in last or "skipped" in last:
        sys.exit(f"{MCP.name} failed\n{done.stdout}{done.stderr}")
    print(f"{MCP.name}: {last}")


def compare(suite: Suite, folder: Path) -> tuple[str, bool]:
    """Return lines of the table, and whether all runs agree."""
    # Each from a source of its own: some tests write where they are.
    with (
        tempfile.TemporaryDirectory(dir=BUILD) as copies,
        ThreadPoolExecutor(3) as runners,
    ):

        def start(wrap: str) -> Future[Report]:
            copy = Path(copies, wrap or "without", folder.name)
            shutil.copytree(folder, copy)
            return runners.submit(outcomes, suite, copy, wrap)

        runs = {wrap: start(wrap) for wrap in ("", *suite.wraps)}
        without = runs.pop("").result().outcomes
        if not without:
            raise Unavailable("no test was collected")
        reports = {wrap: each.result() for wrap, each in runs.items()}
    pairs = [
        judge(suite, folder, wrap, without, report) for wrap, report in reports.items()
    ]
    return "\n".join(line for line, _ in pairs), all(same for _, same in pairs)


def judge(
    suite: Suite, folder: Path, wrap: str, without: dict[str, str], report: Report
) -> tuple[str, bool]:
    """Return a line of the table, and whether nothing differs without a reason."""
    found = report.outcomes
    excepted = EXCEPTIONS.get((suite.name, wrap), {})
    differ = [each for each in without if found.get(each) != without[each]]
    unknown = [each for each in differ if each not in excepted]
    strict: list[str] = []
    if unknown and wrap == MIDDLEWARE:
        # A limit on bodies inside the application needs it.
        again = outcomes(suite, folder, ON_DEMAND, *unknown).outcomes
        strict = [each for each in unknown if again.get(each) == without[each]]
        unknown = [each for each in unknown if each not in strict]
    for name in unknown:
        print(f"{name}: {without[name]}, {wrap} {found.get(name)}")
    for name in strict:
        print(f"{name}: the same with read_ahead=0 only")
    stale = [each for each in excepted if each not in differ and each in without]
    for name in stale:
        print(f"{name}: no exception under {wrap} any more")
    passed = Counter(without.values())["passed"]
    numbers = (len(without), passed, len(unknown), len(strict), len(excepted))
    calls = (report.calls.get("http", 0), report.calls.get("websocket", 0))
    title = f"{suite.name} {folder.name.rpartition('-')[2]}"
    kind = "Admission" if wrap == ADMISSION else "LifecycleMiddleware"
    row = " | ".join(map(str, (title, kind, *numbers, *calls)))
    return f"| {row} |", not unknown and not stale


def main() -> int:
    """Run the command line; 1 if a suite gives another result."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", help="suites, instead of all")
    parser.add_argument("--source", action="append", default=[], help="NAME=PATH")
    options = parser.parse_args()
    sources = dict(each.split("=", 1) for each in options.source)
    if unknown := set(options.names) - {"mcp", *(each.name for each in SUITES)}:
        parser.error(f"no suite {sorted(unknown)}")
    install()
    rows, skipped, agree = [], [], True
    if "mcp" in (options.names or ["mcp"]):
        try:
            with_mcp()
        except Unavailable as reason:
            skipped.append(f"mcp ({reason})")
    for suite in SUITES:
        if options.names and suite.name not in options.names:
            continue
        try:
            given = sources.get(suite.name)
            folder = Path(given).resolve() if given else fetch(suite)
            row, same = compare(suite, folder)
        except Unavailable as reason:
            skipped.append(f"{suite.name} ({reason})")
            continue
        rows.append(row)
        agree = agree and same
    print(
        "| suite | under | tests | pass without | differ with | only with read_ahead=0 "
        "| exceptions | requests | WebSockets |"
    )
    print("| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
    print("\n".join(rows))
    print(f"compared {len(rows)}, SKIPPED: {', '.join(skipped) or 'none'}")
    return 0 if agree else 1


if __name__ == "__main__":
    sys.exit(main())
