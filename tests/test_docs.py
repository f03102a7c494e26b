"""The code of the documentation runs and prints what the pages say.

The `python` blocks of a page are run in order as one program; a `text` block
right after one is what the program has printed since the last such block.
Blocks that need a running server are marked `python no-run`; a page whose blocks are
marked `python needs=aiohttp` is skipped where that is not installed.
"""

import importlib.util
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import lifecycle

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
BLOCK = re.compile(r"^```(\S+)( [^\n]*)?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# Printed between blocks, to separate their output.
MARK = "\x1e"


def program(page: Path) -> tuple[str, list[str]]:
    """Return the code of *page* and its expected output, block by block."""
    code: list[str] = []
    expected: list[str] = []
    for language, info, text in BLOCK.findall(page.read_text()):
        if language == "python" and "no-run" not in info:
            code.append(text)
        elif language == "text" and code:
            code.append(f"print({MARK!r})\n")
            expected.append(text)
    return "\n".join(code), expected


def needs(page: Path) -> set[str]:
    """Return the packages that the blocks of *page* need."""
    infos = (info for _, info, _ in BLOCK.findall(page.read_text()))
    return {name for info in infos for name in re.findall(r"(?:=|,)(\w+)", info)}


CODE_PAGES = [page for page in PAGES if program(page)[0]]


@pytest.mark.parametrize(
    "page", CODE_PAGES, ids=[str(page.relative_to(ROOT)) for page in CODE_PAGES]
)
def test_runs_code_of_page(page: Path, tmp_path: Path) -> None:
    """The code of a page runs as it stands and prints what the page shows."""
    for name in sorted(needs(page)):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"the page is about {name}, which is not installed")
    code, expected = program(page)
    script = tmp_path / "page.py"
    script.write_text(code)
    done = subprocess.run(
        [sys.executable, "-W", "error", script],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    printed = done.stdout.split(f"{MARK}\n")[: len(expected)]
    assert printed == expected


def test_runs_code_in_readme() -> None:
    """The README has code, and that code is run."""
    assert ROOT / "README.md" in CODE_PAGES


def test_describes_the_library_alike_in_every_place() -> None:
    """The README, the package index and `help(lifecycle)` begin with one sentence."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    readme = (ROOT / "README.md").read_text().partition("<!-- what -->")[2]
    assert readme.lstrip().startswith(f"**{project['description']}**")
    assert lifecycle.__doc__ is not None
    assert lifecycle.__doc__.splitlines()[0] == f"{project['description']}."


def test_links_to_files_that_exist() -> None:
    """A relative link leads to an existing file."""
    for page in [*PAGES, *ROOT.glob("*.md")]:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_names_files_that_exist() -> None:
    """Every file of the source that a page names by its path exists."""
    for page in [*PAGES, ROOT / "CONTRIBUTING.md"]:
        for named in re.findall(
            r"`((?:src|adapters|tests)/[\w/.]+)`", page.read_text()
        ):
            assert (ROOT / named).exists(), f"{page.name}: {named}"


def test_names_only_targets_that_make_has() -> None:
    """Every `make` command in the documentation is one that the Makefile has."""
    targets = set(
        re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    )
    for page in [*PAGES, ROOT / "CONTRIBUTING.md"]:
        named = set(re.findall(r"`make ([a-z-]+)", page.read_text()))
        assert named <= targets, page.name


def test_shows_the_states_that_its_script_draws() -> None:
    """The picture of the state machines is up to date."""
    script = ROOT / "scripts" / "draw_states.py"
    done = subprocess.run([sys.executable, script, "--check"], timeout=600, check=False)
    assert done.returncode == 0, "run python scripts/draw_states.py"
