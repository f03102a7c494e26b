"""`make quick`, `make test` and `make prove`: no test is in none of them, and failures have names."""

import importlib.util
import re
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from _pytest.mark.expression import Expression

ROOT = Path(__file__).resolve().parents[1]
TESTS = ROOT / "tests"


def load() -> Any:
    """Import the script of the three commands."""
    spec = importlib.util.spec_from_file_location("check", ROOT / "scripts/check.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


check = load()


@dataclass(frozen=True)
class Selection:
    """What one run of pytest takes of the tests."""

    markers: str
    paths: list[str]
    ignored: list[str]

    def takes(self, path: Path, *, slow: bool) -> bool:
        """Whether a test of that file is run, if it is slow or not."""

        def within(folders: list[str]) -> bool:
            return any(path.is_relative_to(ROOT / folder) for folder in folders)

        chosen = Expression.compile(self.markers).evaluate(
            lambda name, **_: slow if name == "slow" else False
        )
        return chosen and within(self.paths) and not within(self.ignored)


def selections(groups: Any) -> Iterator[Selection]:
    """Read the selections off the command lines."""
    for argv in (argv for group in groups for part in group for argv in part.argv):
        if "pytest" in argv:
            options = argv[argv.index("pytest") + 1 :]
            markers = options[options.index("-m") + 1]
            ignored = [it.partition("=")[2] for it in options if "--ignore=" in it]
            paths = [it for it in options if (ROOT / it).exists()]
            yield Selection(markers, paths, ignored)


@pytest.mark.parametrize("slow", [True, False])
def test_runs_every_test_in_one_of_two_commands(slow: bool) -> None:
    """What `make test` leaves out runs in `make prove`, and nothing runs twice."""
    found = [*selections(check.before_push()), *selections(check.PROVE)]
    assert len(found) >= 3
    for path in TESTS.rglob("test_*.py"):
        takers = [each for each in found if each.takes(path, slow=slow)]
        assert len(takers) == 1, (path, takers)


def test_runs_every_script_of_the_tests() -> None:
    """A script that proves something is run by `make prove`, or by a test."""
    sources = {path: path.read_text() for path in TESTS.rglob("*.py")}
    proven = {Path(it).name for it in commands(check.PROVE) if it.endswith(".py")}
    for path, source in sources.items():
        if path.match("test_*.py") or '__name__ == "__main__"' not in source:
            continue
        named = re.compile(rf"\b{path.stem}\b")
        users = [it for it in sources if it != path and named.search(sources[it])]
        assert path.name in proven or users, path
    assert proven >= {f"{it}.py" for it in ("attack", "endurance", "fuzz", "hang_ups")}


def commands(groups: Any) -> list[str]:
    """All words of all command lines."""
    return list(chain(*(argv for part in chain(*groups) for argv in part.argv)))


def test_runs_both_commands_before_a_change_lands() -> None:
    """The short command comes first, the long rest after it; only that may repeat."""
    last = (ROOT / ".ci" / "run").read_text().splitlines()[-2:]
    assert last == ["run test", "run prove ARGS=--repeat"]
    makefile = (ROOT / "Makefile").read_text()
    for target in ("quick", "test", "prove"):
        assert f"scripts/check.py {target} " in makefile


def python(code: str) -> list[str]:
    """A command that runs some code."""
    return [sys.executable, "-c", code]


@pytest.fixture
def run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> Iterator[Any]:
    """Run groups of made-up parts; returns the status and what was printed."""
    monkeypatch.setattr(check, "LOGS", tmp_path / "checks")
    monkeypatch.setattr(check, "UNSTEADY", tmp_path / "unsteady.toml")
    check.UNSTEADY.touch()

    def run(*groups: Any, only: tuple[str, ...] = ()) -> tuple[int, str, str]:
        monkeypatch.setattr(check, "PROVE", groups)
        monkeypatch.setattr(sys, "argv", ["check.py", "prove", *only])
        status = check.main()
        printed = capsys.readouterr()
        return status, printed.out, printed.err

    before = signal.getsignal(signal.SIGTERM)
    yield run
    signal.signal(signal.SIGTERM, before)


def test_names_the_part_that_failed_in_its_last_line(run: Any, tmp_path: Path) -> None:
    """What it printed is shown; what runs beside it is ended, and nothing else begins."""
    fails = check.part("fails", python("print('why'); raise SystemExit(3)"))
    beside = check.part("beside", python("import time; time.sleep(600)"))
    never = check.part("never", python(f"open({str(tmp_path / 'ran')!r}, 'w')"))
    status, _, errors = run((fails, beside), (never,))
    assert status == 1
    assert "why" in errors
    assert errors.splitlines()[-1] == "prove: failed: fails"
    assert (tmp_path / "checks" / "failed").read_text() == "fails\n"
    assert not (tmp_path / "ran").exists()


def test_ends_a_part_that_hangs(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has failed once it is silent; its output is shown, its processes are gone."""
    monkeypatch.setattr(check, "MOST_SILENT_SECONDS", 3.0)
    slow = "import time\nfor _ in range(40): print(1, flush=True); time.sleep(0.1)"
    slowly = check.part("slowly", python(slow))
    assert run((slowly,))[0] == 0
    hangs = check.part("hangs", python(slow + "\ntime.sleep(600)"))
    status, _, errors = run((hangs,))
    assert status == 1
    assert "hangs: ended after 3 s without output" in errors
    assert errors.splitlines()[-1] == "prove: failed: hangs"


def test_takes_along_what_it_started(run: Any) -> None:
    """Ended by a signal, it ends its parts before itself."""
    ends = python("import os, time; os.kill(os.getppid(), 15); time.sleep(600)")
    with pytest.raises(SystemExit):
        run((check.part("ends", ends),))


UNLISTED = " (not in tests/unsteady.toml: add it with a reason, or mend it)"


def entry(part: str, *, days: int = 0, reason: str = "known") -> str:
    """An entry of tests/unsteady.toml, of some days ago."""
    then = datetime.now(UTC).date() - timedelta(days)
    return f"[[unsteady]]\npart = '{part}'\nreason = '{reason}'\ndate = {then}\n"


def fails_until(path: Path, runs: int) -> list[str]:
    """A command that fails until it has run so often; each run is a line of a file."""
    return python(
        f"with open({str(path)!r}, 'a+') as log:\n"
        "    log.write('ran\\n'); log.seek(0)\n"
        f"    raise SystemExit(len(log.readlines()) < {runs})"
    )


def test_repeats_a_part_with_nothing_beside_it(run: Any, tmp_path: Path) -> None:
    """What ran beside it is cut short and runs again; then the rest does."""
    pid, late = tmp_path / "pid", tmp_path / "late"
    fails = python(
        "import os, pathlib, time\n"
        f"pid = pathlib.Path({str(pid)!r})\n"
        "if not pid.with_name('failed').exists():\n"
        "    pid.with_name('failed').touch()\n"
        "    for _ in range(6000):\n"
        "        if pid.exists(): raise SystemExit(1)\n"
        "        time.sleep(0.01)\n"
        "try: os.kill(int(pid.read_text()), 0)\n"
        "except ProcessLookupError: pid.with_name('alone').touch()"
    )
    beside = python(
        "import os, pathlib, time\n"
        f"pid = pathlib.Path({str(pid)!r})\n"
        "if pid.exists(): pid.with_name('again').touch(); raise SystemExit\n"
        "new = pid.with_name('new'); new.write_text(str(os.getpid())); new.rename(pid)\n"
        "time.sleep(600)"
    )
    group = check.part("fails", fails), check.part("beside", beside)
    after = check.part("after", python(f"open({str(late)!r}, 'w')"))
    status, printed, _ = run(group, (after,), only=("--repeat",))
    assert status == 0
    assert (tmp_path / "alone").exists()
    assert (tmp_path / "again").exists()
    assert late.exists()
    assert printed.splitlines()[-1] == f"unsteady: fails{UNLISTED}"


@pytest.mark.thorough
def test_repeats_only_the_tests_that_failed(run: Any, tmp_path: Path) -> None:
    """What has passed would only get another chance to fail."""
    path = tmp_path / "test_two.py"
    path.write_text(
        "import os\ndef test_good(): os.mkdir(__file__ + '.good')\n"
        "def test_bad(): assert os.path.exists(p := __file__ + '.bad') or os.mkdir(p)"
    )
    assert run((check.tests("two", "not slow", str(path)),), only=("--repeat",))[0] == 0
    # Ended early, pytest knows nothing of the others.
    ended = check.Part("ended", (tuple(python("raise SystemExit(2)")),), ("-c",))
    assert check.run([ended]) == [ended]


def test_repeats_nothing_unless_it_is_asked_to(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither in `make prove` of a user, nor ever in `make test`."""
    fails = check.part("fails", fails_until(tmp_path / "runs", 2))
    assert run((fails,))[0] == 1
    assert (tmp_path / "runs").read_text() == "ran\n"
    monkeypatch.setattr(sys, "argv", ["check.py", "test", "--repeat"])
    monkeypatch.setattr(check, "before_push", lambda: ((fails,),))
    with pytest.raises(SystemExit):
        check.main()
    assert (tmp_path / "runs").read_text() == "ran\n"


def test_refuses_an_entry_that_is_older_than_a_week(run: Any, tmp_path: Path) -> None:
    """Only where parts are repeated: a stranger's `make prove` ignores the calendar."""
    good = check.part("good", fails_until(tmp_path / "runs", 1))
    for days in (8, -3):  # a day more or less, if midnight passes
        check.UNSTEADY.write_text(entry("good", days=days))
        status, _, errors = run((good,), only=("--repeat",))
        assert status == 1
        assert "tests/unsteady.toml: good is listed with the date" in errors
        assert "mend the part, or remove the entry" in errors
        failed = (tmp_path / "checks" / "failed").read_text()
        assert failed == errors.partition("prove: failed: ")[2]
        assert not (tmp_path / "runs").exists()
    assert run((good,))[0] == 0
