"""The prose uses the words of the field, in sentences that name their subject.

    python tests/test_words.py [PATH ...]

lists what the tests count below the given files and folders, or in everything.
"""

from __future__ import annotations

import ast
import functools
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
VAGUE = re.compile(r"\b(?:told|whoever|nobody|somebody|anybody)\b", re.IGNORECASE)
WHO = re.compile(r"(?:^|[.!?:;|]\s+)[\"'(*\-\s]*(Who\b[^.!?]{0,60})")
IN_NAMES = re.compile(
    r"(?:^|_)(?:who|whose|whom|whoever|told|nobody|somebody|anybody|everybody)(?:_|$)"
)
WORD = re.compile(r"[A-Za-z][A-Za-z'-]*")
PER_WORD = 0.1 / 1000
PARAGRAPH = 5 * 120
SHORT_PARAGRAPHS = ("README.md", "docs")
CODE = ("src", "adapters", "tools", "examples", "benchmarks", "scripts")
AREAS = {
    "docs": (
        *("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "docs"),
        "Makefile",
    ),
    "product code": CODE,
    "tests": ("tests",),
}


@dataclass(frozen=True, slots=True)
class Prose:
    """A piece of text, and where it is."""

    path: Path
    line: int
    text: str

    def __str__(self) -> str:
        start = " ".join(self.text.split())[:100]
        return f"{self.path.relative_to(ROOT)}:{self.line}: {start}"


def files(places: tuple[str, ...]) -> Iterator[Path]:
    """Find the files with prose below *places*."""
    for place in places:
        top = ROOT / place
        found = [top] if top.is_file() else sorted(top.rglob("*"))
        for path in found:
            inner = path.relative_to(ROOT).parts
            built = any(part in {"_build", "__pycache__", "results"} for part in inner)
            read = path.suffix in {".md", ".py", ".svg", ".json"}
            if (read or path.name == "Makefile") and not built:
                yield path


def prose(path: Path) -> Iterator[Prose]:
    """Read the prose of one file; of tests the docstrings alone, of make the help."""
    if path.suffix == ".py":
        inside = path.relative_to(ROOT).parts[0]
        yield from docstrings(path) if inside == "tests" else strings(path)
    elif path.suffix == ".svg":
        label = r"<(?:text|tspan|title|desc)[^>]*>([^<]+)"
        yield from matches(path, label)
    elif path.suffix == ".json":
        yield from matches(path, r'"(?:title|description|legendFormat)": "([^"]+)"')
    elif path.name == "Makefile":
        yield from matches(path, r"(?:^#|^\t@echo 'make \S+)\s+([^']+)")
    else:
        yield from markdown(path)


def matches(path: Path, pattern: str) -> Iterator[Prose]:
    """Read what *pattern* finds, line by line."""
    for number, line in enumerate(path.read_text().splitlines(), 1):
        for text in re.findall(pattern, line):
            yield Prose(path, number, text)


def markdown(path: Path) -> Iterator[Prose]:
    """Read a page: paragraphs, headings, list items and rows of tables, and its code."""
    block: list[str] = []
    start, fenced = 1, False
    for number, line in enumerate([*path.read_text().splitlines(), ""], 1):
        fence = line.lstrip().startswith("```")
        alone = fence or fenced or not line.strip() or line.startswith(("#", "|", ":"))
        begins = re.match(r"\s*(?:[-*]|\d+\.) ", line)
        if block and (alone or begins):
            yield Prose(path, start, "\n".join(block))
            block = []
        if fence:
            fenced = not fenced
        elif alone and line.strip():
            yield Prose(path, number, line)
        elif line.strip():
            start = start if block else number
            block.append(line)


def strings(path: Path) -> Iterator[Prose]:
    """Read the docstrings, other strings and comments of a program."""
    source = path.read_text()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield Prose(path, node.lineno, node.value)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield Prose(path, token.start[0], token.string.lstrip("# "))


def docstrings(path: Path) -> Iterator[Prose]:
    """Read the docstrings of a program."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, kinds) and (text := ast.get_docstring(node)):
            yield Prose(path, getattr(node, "lineno", 1), text)


@functools.cache
def all_prose(places: tuple[str, ...]) -> list[Prose]:
    """Read all prose below *places*, but for this file's own."""
    mine = Path(__file__).resolve()
    return [each for path in files(places) if path != mine for each in prose(path)]


def vague(found: list[Prose]) -> list[Prose]:
    """Return one entry for each word that names no one."""
    return [each for each in found for _ in VAGUE.findall(each.text)]


def who(found: list[Prose]) -> list[Prose]:
    """Return one entry for each sentence that begins with "Who"."""
    return [each for each in found for _ in WHO.findall(each.text)]


def long(found: list[Prose]) -> list[Prose]:
    """Return the paragraphs of pages that have more than five lines."""
    return [each for each in found if is_paragraph(each) and is_long(each.text)]


def unclear_names(places: tuple[str, ...]) -> list[str]:
    """Return the names of tests, and of their files, that do not name a subject."""
    found = []
    for path in files(places):
        if path.suffix == ".py" and path != Path(__file__).resolve():
            nodes = ast.walk(ast.parse(path.read_text()))
            kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
            names = [node.name for node in nodes if isinstance(node, kinds)]
            names = [path.stem, *(name for name in names if name.startswith("test_"))]
            unclear = [name for name in names if IN_NAMES.search(name)]
            found += [f"{path.relative_to(ROOT)}: {name}" for name in unclear]
    return found


def is_paragraph(each: Prose) -> bool:
    """Whether it is a paragraph or list item of a page."""
    return each.path.suffix == ".md" and not each.text.startswith(("#", "|", "<"))


def is_long(text: str) -> bool:
    """Whether it is more than five lines, as written or at 120 columns."""
    return text.count("\n") >= 5 or len(" ".join(text.split())) > PARAGRAPH


def shown(found: list[Prose]) -> str:
    """Write where they are, one a line."""
    return "\n".join(map(str, found))


@pytest.mark.parametrize("area", AREAS)
def test_names_its_subjects(area: str) -> None:
    """At most one word in ten thousand stands for a subject without naming it."""
    found = all_prose(AREAS[area])
    words = sum(len(WORD.findall(each.text)) for each in found)
    assert len(vague(found)) <= words * PER_WORD, shown(vague(found))


@pytest.mark.parametrize("area", AREAS)
def test_begins_no_sentence_with_who(area: str) -> None:
    """Sentences name clients, requests and engines, and do not begin with "Who"."""
    found = who(all_prose(AREAS[area]))
    assert found == [], shown(found)


def test_names_subjects_in_names_of_tests() -> None:
    """The name of a test is a verb and a condition, and names what they are about."""
    assert unclear_names(AREAS["tests"]) == []


def test_keeps_paragraphs_short() -> None:
    """A paragraph or list item of the documentation has at most five lines."""
    found = long(all_prose(SHORT_PARAGRAPHS))
    assert found == [], shown(found)


@pytest.mark.parametrize(
    ("text", "counted"),
    [
        ("The client is told.", 1),
        ("Nobody waits; Whoever does, waits.", 2),
        ("`who_holds` names what holds it.", 0),
    ],
)
def test_counts_vague_words(text: str, counted: int) -> None:
    """The words are found in any case, and not within names."""
    assert len(vague([Prose(ROOT / "README.md", 1, text)])) == counted


@pytest.mark.parametrize(
    ("name", "unclear"),
    [
        ("test_tells_who_waits", True),
        ("test_comes_back_when_told", True),
        ("whoever_leaves", True),
        ("test_holds_whole_messages", False),
    ],
)
def test_finds_words_in_names(name: str, unclear: bool) -> None:
    """The words are found between underscores alone."""
    assert bool(IN_NAMES.search(name)) is unclear


def test_reads_the_help_of_make() -> None:
    """What `make help` prints, and the comments, are prose as any other."""
    texts = {each.text for each in prose(ROOT / "Makefile")}
    assert any(text.startswith("run the server") for text in texts)
    assert any(text.startswith("PYTHON names another base") for text in texts)


@pytest.mark.parametrize(
    ("text", "counted"),
    [
        ("Who waits is served.", 1),
        ("It is full. Who waits is served. Clients who wait are not.", 1),
        ("the one who waits", 0),
    ],
)
def test_counts_sentences_with_who(text: str, counted: int) -> None:
    """A sentence counts wherever it stands in its text."""
    assert len(who([Prose(ROOT / "README.md", 1, text)])) == counted


def main() -> None:
    """List what the tests count."""
    given = [str(Path(each).resolve().relative_to(ROOT)) for each in sys.argv[1:]]
    places = [tuple(given)] if given else AREAS.values()
    for some in places:
        found = all_prose(some)
        words = sum(len(WORD.findall(each.text)) for each in found)
        kinds = {"vague": vague(found), "who": who(found), "long": long(found)}
        for name, each in kinds.items():
            print("\n".join(f"{name}: {one}" for one in each), end="\n" * bool(each))
        for name in unclear_names(some):
            print(f"name: {name}")
        counts = ", ".join(f"{len(each)} {name}" for name, each in kinds.items())
        print(f"{', '.join(some)}: {words} words, {counts}")


if __name__ == "__main__":
    main()
