"""Run the parts of `make quick`, `make test` or `make prove`, with a line for each.

    python scripts/check.py quick|test|prove [--repeat] [PART ...]

Parts on one line of the tables below run side by side, lines one after another. What a
part prints goes to build/checks/PART.log, and to the terminal if the part fails; then
no other part begins, and the last line names the one that failed. A part that still
runs shows its last line every minute, and has failed if it prints nothing for half an
hour.

With --repeat, as in CI, a part of `prove` that fails runs once more, with nothing
beside it: of tests, those that failed. If it then passes, the run goes on, and its last
line calls it unsteady.
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, date, datetime
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LOGS = ROOT / "build" / "checks"
LISTED = "tests/unsteady.toml"
UNSTEADY = ROOT / LISTED
MOST_UNSTEADY = 3
MOST_UNSTEADY_DAYS = 7
PYTHON = sys.executable
BIN = Path(PYTHON).parent

# A worker takes a gigabyte where it loads torch and transformers. Three more than
# cores, up to six: with two more, tests of servers left a third of two cores idle.
WORKERS = max(2, min((os.cpu_count() or 2) + 3, 6))
# In the order of tests/conftest.py, in which the longest files come first.
ORDER = ("--dist", "loadfile", "--no-loadscope-reorder")
# The slowest tests, for who makes a part faster.
SLOWEST = ("--durations=30", "--durations-min=5")
PYTEST = (PYTHON, "-m", "pytest", "-q", "-n", str(WORKERS), *ORDER, *SLOWEST)
# Guards against a part that hangs. Not its whole time, which grows on a busy machine:
# idle, none of them is silent for longer than five minutes.
MOST_SILENT_SECONDS = 1800.0
SECONDS_BETWEEN_LINES = 60.0
# Apart, so that tests which walk the heap do not find torch and eight frameworks there.
PURE = ("tests/core", "tests/sim", "tests/others")
# Of these, without coverage, which makes schedules ten times as slow.
SCHEDULES = ("tests/sim/test_world.py", "tests/sim/test_shared_schedules.py")
COVERAGE = ("--cov=lifecycle", "--cov-report=term-missing:skip-covered")
# What mypy and flake8-async are strict with.
PRODUCT = ("src/", "adapters/", "tools/", "examples/")
ASYNC_RULES = (
    "--isolated",
    "--select=ASYNC1,ASYNC2,ASYNC3",
    "--extend-ignore=ASYNC109,ASYNC124",
)


@dataclass(frozen=True, slots=True)
class Part:
    """A command that has to succeed.

    Attributes:
        name: One word.
        argv: The command, or several, run one after another.
        again: What to add where the last one runs once more.
    """

    name: str
    argv: tuple[tuple[str, ...], ...]
    again: tuple[str, ...] = ()

    def repeated(self) -> Part:
        """Return the same part, to be run a second time."""
        *first, last = self.argv
        return replace(self, argv=(*first, last + self.again))


def part(name: str, *argv: Sequence[str]) -> Part:
    """Return a part of these commands."""
    return Part(name, tuple(tuple(each) for each in argv))


def tests(name: str, select: str, *arguments: str) -> Part:
    """Return a part that runs the tests whose markers match *select*."""
    # To repeat only those that failed. A cache of its own knows of no earlier run.
    kept = f"--override-ini=cache_dir={LOGS / name}.cache"
    run_tests = part(name, [*PYTEST, kept, "-m", select, *arguments])
    return replace(run_tests, again=("--last-failed",))


def make(target: str) -> Part:
    """Return a part that is a target of the Makefile."""
    # Arguments of `make prove` are not the target's.
    return part(target, ["make", "--no-print-directory", target, "ARGS="])


LINK = "tests/lifecycle_zmq"
ENDURANCE = f"{LINK}/endurance.py"
HANG_UPS = "tests/http/hang_ups.py"
FRAMING = "tests/lifecycle_tools/framing.py"
RAY_STORM = "tests/engine_protocol/ray_disconnects.py"
PROVE = (
    # Fifty thousand schedules, every planted mistake, the models, slow checkpoints.
    # Beside them what mostly waits: other projects' own tests, with and without the
    # middleware, and clients of three minutes. And flake8 on all files.
    (
        tests("slow", "slow", "tests"),
        part("suites", [PYTHON, "tests/lifecycle_asgi/suites.py"]),
        part("hang_ups", [PYTHON, HANG_UPS, "--minutes", "3", "--every", "5"]),
        make("lint"),
    ),
    (
        part(
            "disconnects",
            [PYTHON, f"{LINK}/disconnects.py", "--count", "30000"],
            [PYTHON, f"{LINK}/disconnects.py", "--count", "30000", "--trio"],
        ),
        part("fuzz", [PYTHON, f"{LINK}/fuzz.py", "--frames", "2000000"]),
    ),
    # Which kill and wait, for two minutes each.
    (
        part(
            "endurance",
            [PYTHON, ENDURANCE, "kills", "--count", "100"],
            [PYTHON, ENDURANCE, "orphans", "--count", "100"],
            [PYTHON, ENDURANCE, "stops", "--count", "20"],
            [PYTHON, ENDURANCE, "holds", "--minutes", "0.5", "--engines", "4"],
        ),
        part(
            "fuzz_pair",
            [PYTHON, f"{LINK}/fuzz_pair.py", "--frames", "1000000"],
            # Conversations with one damaged message, on each link in each direction.
            [PYTHON, f"{LINK}/fuzz_link.py", "--count", "4000"],
        ),
        part("shutdowns", [PYTHON, "tests/http/shutdowns.py", "--count", "60"]),
        part("framing", [PYTHON, FRAMING, "--count", "80000"]),
    ),
    (
        # Recorded mutants, each against the test that caught it; and a new sample.
        part(
            "mutation",
            [PYTHON, "scripts/mutation.py", "--replay", "--seconds=300"],
            [PYTHON, "scripts/mutation.py", "--seconds=600"],
        ),
        part("attack", [PYTHON, "tests/http/attack.py", "100"]),
    ),
    (
        part("release", [PYTHON, "scripts/release.py"]),
        part("ray", [PYTHON, RAY_STORM, "--count", "2000"]),
    ),
)


def quick() -> tuple[tuple[Part, ...], ...]:
    """Return what is checked while one works: changed files, the core, ASGI."""
    checks = [lint()]
    typed = changed_files(*PRODUCT, "benchmarks/", "scripts/", "docs/")
    if typed:
        checks.append(part("types", [str(BIN / "mypy"), "--no-error-summary", *typed]))
    suites = ("tests/core", "tests/lifecycle_asgi")
    return ((*checks, tests("tests", "not slow and not thorough", *suites)),)


def before_push() -> tuple[tuple[Part, ...], ...]:
    """Return what `make test` checks: all but what takes long, and the wheel."""
    others = (f"--ignore={each}" for each in PURE)
    covered = [*COVERAGE, "--cov-fail-under=100", *PURE]
    covered += [f"--ignore={each}" for each in SCHEDULES]
    return (
        (
            *(lint(), make("types"), make("docs")),
            tests("core", "not slow", *covered),
            tests("schedules", "not slow", *SCHEDULES),
        ),
        (tests("others", "not slow", "tests", *others),),
    )


def changed_files(*under: str) -> list[str]:
    """Return Python files in these folders that differ from where this left main."""

    def git(*arguments: str) -> list[str]:
        done = subprocess.run(
            ["git", *arguments],  # noqa: S607 - the user's own git
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
        return done.stdout.splitlines()

    base = git("merge-base", "HEAD", "main") or git("merge-base", "HEAD", "origin/main")
    names = git("diff", "--name-only", *(base or ["HEAD"]), "--", "*.py")
    names += git("ls-files", "--others", "--exclude-standard", "--", "*.py")
    there = (each for each in set(names) if (ROOT / each).exists())
    return sorted(each for each in there if each.startswith(under))


def lint() -> Part:
    """Return ruff on all files, and on changed ones flake8, which takes a minute."""
    argv = [[str(BIN / "ruff"), "check", "--quiet", "."]]
    argv.append([str(BIN / "ruff"), "format", "--quiet", "--check", "."])
    if changed := changed_files(*PRODUCT):
        argv.append([str(BIN / "flake8"), *ASYNC_RULES, *changed])
    return part("lint", *argv)


@dataclass(slots=True)
class Running:
    """A part that runs.

    Attributes:
        part: What runs.
        log: Where its output goes.
        began: When, by the monotonic clock.
        printed: Bytes that it had printed when it was last polled.
        heard: When that number last changed.
        shown: When its line was last printed.
        process: Of the command that runs now.
    """

    part: Part
    log: Path
    began: float = field(default_factory=time.monotonic)
    printed: int = 0
    heard: float = field(default_factory=time.monotonic)
    shown: float = field(default_factory=time.monotonic)
    process: subprocess.Popen[bytes] | None = None
    _next: int = 0

    def poll(self) -> int | None:
        """Begin the next command if one has ended; return the status after the last."""
        status = self.process.poll() if self.process else 0
        if status == 0 and self._next < len(self.part.argv):
            with self.log.open("ab") as output:
                self.process = subprocess.Popen(
                    self.part.argv[self._next],
                    cwd=ROOT,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    process_group=0,
                )
            self._next += 1
            return None
        if status is None and self._silent_seconds() > MOST_SILENT_SECONDS:
            self.stop()
            with self.log.open("a") as output:
                silence = f"ended after {MOST_SILENT_SECONDS:.0f} s without output"
                output.write(f"\n{self.part.name}: {silence}\n")
            return 124  # as `timeout` says it
        return status

    def _silent_seconds(self) -> float:
        printed, now = self.log.stat().st_size, time.monotonic()
        if printed != self.printed:
            self.printed, self.heard = printed, now
        return now - self.heard

    def show(self) -> None:
        """Print the line again if a minute has passed."""
        if time.monotonic() - self.shown > SECONDS_BETWEEN_LINES:
            self.shown = time.monotonic()
            print(f"  {self.line()}", flush=True)

    def stop(self) -> None:
        """End the command and all that it started."""
        if self.process and self.process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(10)
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)

    def line(self) -> str:
        """Return what is to be said of it: its time and its last words."""
        text = self.log.read_text(errors="replace").strip().splitlines()
        seconds = time.monotonic() - self.began
        last = text[-1] if text else ""
        return f"{self.part.name:<12}{seconds:6.0f} s  {last}"[:120].rstrip()


def run(group: Sequence[Part]) -> list[Part]:
    """Run parts side by side.

    Returns:
        One that failed, as it is to be repeated, and those that it cut short.
    """
    running = [Running(each, LOGS / f"{each.name}.log") for each in group]
    try:
        while running:
            for each in list(running):
                status = each.poll()
                if status is None:
                    each.show()
                    continue
                running.remove(each)
                if status != 0:
                    sys.stderr.write(each.log.read_text(errors="replace"))
                    # With any other status, pytest has left out tests that never ran.
                    part = each.part.repeated() if status == 1 else each.part
                    return [part, *(it.part for it in running)]
                print(each.line(), flush=True)
            time.sleep(0.05)
    finally:
        for each in running:
            each.stop()
    return []


def run_all(
    groups: Sequence[Sequence[Part]], *, repeat: bool
) -> tuple[Part | None, list[Part]]:
    """Run groups one after another, until a part fails.

    Args:
        groups: The parts.
        repeat: Run a part that fails once more, with nothing beside it.

    Returns:
        The part that failed, if any, and those that passed the second time alone.
    """
    unsteady: list[Part] = []
    for group in groups:
        left = list(group)
        while left := run(left):
            failed = left.pop(0)
            if not repeat:
                return failed, unsteady
            print(f"{failed.name} failed; once more, and alone", flush=True)
            if run([failed]):
                return failed, unsteady
            unsteady.append(failed)
    return None, unsteady


@dataclass(frozen=True, slots=True)
class Unsteady:
    """A part that is known to fail now and then.

    Attributes:
        part: Its name.
        reason: What is known of it.
        date: When it was listed.
    """

    part: str
    reason: str
    date: date


def known_unsteady() -> list[Unsteady]:
    """Return the entries of tests/unsteady.toml, whatever their age.

    Raises:
        ValueError: An entry names no part, gives no reason, or is one too many.
    """
    tables = tomllib.loads(UNSTEADY.read_text()).get("unsteady", [])
    names = {each.name for group in PROVE for each in group}
    found = []
    for table in tables:
        if set(table) != {"part", "reason", "date"} or type(table["date"]) is not date:
            raise ValueError(f"an entry has part, reason and date, unlike {table}")
        if table["part"] not in names:
            raise ValueError(f"no part {table['part']!r} in {', '.join(sorted(names))}")
        if not str(table["reason"]).strip():
            raise ValueError(f"{table['part']} has no reason")
        found.append(Unsteady(**table))
    if len(found) > MOST_UNSTEADY:
        raise ValueError(f"{len(found)} entries, of {MOST_UNSTEADY} at most; mend some")
    return found


def outdated(entries: Sequence[Unsteady], today: date) -> str | None:
    """Return what is to be done about an entry that is too old, if any is."""
    for each in entries:
        # A day ahead: the date may be that of another time zone.
        if not -1 <= (today - each.date).days <= MOST_UNSTEADY_DAYS:
            return (
                f"{each.part} is listed with the date {each.date}, which counts for "
                f"{MOST_UNSTEADY_DAYS} days; mend the part, or remove the entry"
            )
    return None


def main() -> int:
    """Run the command line; 1 if a part failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", choices=("quick", "test", "prove"))
    parser.add_argument("parts", nargs="*", help="run these parts only")
    parser.add_argument(
        "--repeat", action="store_true", help="run a part of prove that fails once more"
    )
    options = parser.parse_intermixed_args()
    if options.repeat and options.what != "prove":
        parser.error(f"--repeat is for prove; {options.what} has to pass at once")
    groups = {"quick": quick, "test": before_push}.get(options.what, lambda: PROVE)()
    names = [each.name for group in groups for each in group]
    if unknown := set(options.parts) - set(names):
        parser.error(f"no part {sorted(unknown)} in {', '.join(names)}")
    # A background job of a shell ignores SIGINT, and so would all that it starts.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # Ended from outside, it takes along what it started.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    # The tests start hundreds of processes, each of which would compile our code.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    shutil.rmtree(LOGS, ignore_errors=True)
    LOGS.mkdir(parents=True)
    print(f"{options.what}: {', '.join(options.parts or names)}; logs in build/checks")
    known = known_unsteady() if options.repeat else []
    if problem := outdated(known, datetime.now(UTC).date()):
        return fail(options.what, f"{LISTED}: {problem}")
    began = time.monotonic()
    chosen = options.parts or names
    failed, unsteady = run_all(
        [[each for each in group if each.name in chosen] for group in groups],
        repeat=options.repeat,
    )
    if failed:
        return fail(options.what, failed.name)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(
        f"{options.what}: all passed in {time.monotonic() - began:.0f} s, "
        f"{used.ru_utime + used.ru_stime:.0f} s of processor time"
    )
    for each in unsteady:
        listed = each.name in {entry.part for entry in known}
        what = "" if listed else f" (not in {LISTED}: add it with a reason, or mend it)"
        print(f"unsteady: {each.name}{what}")
    return 0


def fail(what: str, why: str) -> int:
    """Say in the last line, and in a file for .ci/run, why a run failed."""
    (LOGS / "failed").write_text(f"{why}\n")
    print(f"{what}: failed: {why}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
