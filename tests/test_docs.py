"""The documentation tells the truth: its code runs and prints what it says.

The `python` blocks of a page are run in order as one program; a `text` block
right after one is what the program has printed since the last such block.
Blocks that need a running server are marked `python no-run`; a page whose blocks are
marked `python needs=aiohttp` is skipped where that is not installed.
"""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
BLOCK = re.compile(r"^```(\S+)( [^\n]*)?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# Printed between blocks, to tell what each one has written.
MARK = "\x1e"


def program(page: Path) -> tuple[str, list[str]]:
    """Return the code of *page* and what it is said to print, block by block."""
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
    """Return the packages that the blocks of *page* say they need."""
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
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    printed = done.stdout.split(f"{MARK}\n")[: len(expected)]
    assert printed == expected


def test_runs_code_in_readme() -> None:
    """The README has code, and that code is run."""
    assert ROOT / "README.md" in CODE_PAGES


def test_links_to_files_that_exist() -> None:
    """A relative link leads to a file of the project."""
    for page in [*PAGES, *ROOT.glob("*.md")]:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_names_only_targets_that_make_has() -> None:
    """Every `make` command in the documentation is one that the Makefile has."""
    targets = set(
        re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    )
    for page in [*PAGES, ROOT / "CONTRIBUTING.md"]:
        named = set(re.findall(r"`make ([a-z-]+)", page.read_text()))
        assert named <= targets, page.name


def test_shows_the_states_that_its_script_draws() -> None:
    """The picture of the state machines is drawn anew after each change of them."""
    script = ROOT / "scripts" / "draw_states.py"
    done = subprocess.run([sys.executable, script, "--check"], timeout=60, check=False)
    assert done.returncode == 0, "run python scripts/draw_states.py"
