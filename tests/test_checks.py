"""`make quick`, `make test` and `make prove`: no test is in none of them, and failures have names."""

import importlib.util
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
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
    found = [*selections(check.TEST), *selections(check.PROVE)]
    assert len(found) >= 3
    for path in TESTS.rglob("test_*.py"):
        takers = [each for each in found if each.takes(path, slow=slow)]
        assert len(takers) == 1, (path, takers)


def test_runs_what_is_slow_in_the_long_command_only() -> None:
    """The command of the README is the short one."""
    path = TESTS / "sim" / "test_world.py"
    assert not any(each.takes(path, slow=True) for each in selections(check.TEST))
    assert any(each.takes(path, slow=True) for each in selections(check.PROVE))


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
    assert proven >= {"attack.py", "disconnects.py", "endurance.py", "fuzz.py"}
    assert proven >= {"fuzz_pair.py", "hang_ups.py", "shutdowns.py"}


def commands(groups: Any) -> list[str]:
    """All words of all command lines."""
    return [
        word
        for group in groups
        for part in group
        for argv in part.argv
        for word in argv
    ]


def test_checks_style_types_documentation_and_coverage() -> None:
    """Nothing that had to pass before is left out."""
    words = set(commands(check.TEST)) | set(commands(check.PROVE))
    assert {"lint", "types", "docs", "wheel", "--cov-fail-under=100"} <= words


def test_runs_both_commands_before_a_change_lands() -> None:
    """The short command comes first, the long rest after it."""
    assert "for target in test prove; do" in (ROOT / ".ci" / "run").read_text()
    makefile = (ROOT / "Makefile").read_text()
    for target in ("quick", "test", "prove"):
        assert f"scripts/check.py {target} " in makefile


def test_needs_no_slow_test_while_one_works() -> None:
    """`make quick` runs the tests of the core and of ASGI."""
    found = list(selections(check.quick()))
    for folder in ("core", "lifecycle_asgi"):
        for path in (TESTS / folder).glob("test_*.py"):
            assert sum(each.takes(path, slow=False) for each in found) == 1, path
    slow = TESTS / "sim" / "test_world.py"
    assert not any(each.takes(slow, slow=True) for each in found)


def python(code: str) -> list[str]:
    """A command that runs some code."""
    return [sys.executable, "-c", code]


@pytest.fixture
def run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> Any:
    """Run groups of made-up parts; returns the status and what was printed."""
    monkeypatch.setattr(check, "LOGS", tmp_path / "checks")

    def run(*groups: Any, only: tuple[str, ...] = ()) -> tuple[int, str, str]:
        monkeypatch.setattr(check, "PROVE", groups)
        monkeypatch.setattr(sys, "argv", ["check.py", "prove", *only])
        status = check.main()
        printed = capsys.readouterr()
        return status, printed.out, printed.err

    return run


def test_prints_a_line_for_each_part_and_the_sum(run: Any) -> None:
    """Its name, its time and its last words."""
    one = check.part("one", python("print(1)"), python("print('two said')"))
    status, printed, errors = run((one, check.part("side", python(""))))
    assert (status, errors) == (0, "")
    assert re.search(r"^one +\d+ s +two said$", printed, re.MULTILINE)
    assert re.search(r"^side +\d+ s$", printed, re.MULTILINE)
    assert printed.splitlines()[-1].startswith("prove: all passed in ")


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


def test_runs_some_parts_only(run: Any) -> None:
    """As in `make prove ARGS=wheel`."""
    good, bad = check.part("good", python("")), check.part("bad", python("no"))
    assert run((good, bad), only=("good",))[0] == 0
    with pytest.raises(SystemExit):
        run((good, bad), only=("ugly",))


def test_looks_at_the_files_that_changed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What differs from main, committed or not, and what git does not know yet."""

    def git(*arguments: str) -> None:
        user = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
        subprocess.run(["git", *user, *arguments], cwd=tmp_path, check=True)

    monkeypatch.setattr(check, "ROOT", tmp_path)
    for name in ("same", "committed", "edited", "removed"):
        (tmp_path / f"{name}.py").touch()
    git("init", "-q", "-b", "main")
    git("add", "-A")
    git("commit", "-q", "-m", "base")
    assert check.changed_files() == []
    git("checkout", "-q", "-b", "work")
    (tmp_path / "committed.py").write_text("1")
    git("commit", "-q", "-a", "-m", "work")
    (tmp_path / "edited.py").write_text("1")
    (tmp_path / "removed.py").unlink()
    (tmp_path / "new.py").touch()
    assert check.changed_files() == ["committed.py", "edited.py", "new.py"]


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


def test_shows_the_last_line_of_a_part_that_takes_long(
    run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A log of CI shows how far it came."""
    monkeypatch.setattr(check, "SECONDS_BETWEEN_LINES", 0.0)
    long = check.part("long", python("print('halfway', flush=True); input()"))
    status, printed, _ = run((check.part("done", python("")), long))
    assert status == 1
    assert re.search(r"^  done +\d+ s", printed, re.MULTILINE)
