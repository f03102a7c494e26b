"""The documentation names its subjects, in short paragraphs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
VAGUE = re.compile(r"\b(?:told|whoever|nobody|somebody|anybody)\b", re.IGNORECASE)
WHO = re.compile(r"(?:^|[.!?:;|]\s+)[\"'(*\-\s]*(Who\b[^.!?]{0,60})", re.MULTILINE)
WORD = re.compile(r"[A-Za-z][A-Za-z'-]*")
PER_WORD = 0.1 / 1000
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
CODE = sorted(
    path
    for top in ("src", "adapters", "tools", "examples", "benchmarks", "scripts")
    for path in (ROOT / top).rglob("*.py")
)
AREAS = {"pages": PAGES, "code": CODE}


def paragraphs(page: Path) -> Iterator[str]:
    """Yield the paragraphs and list items of a page, without code and tables."""
    block: list[str] = []
    fenced = False
    for line in [*page.read_text().splitlines(), ""]:
        fence = line.lstrip().startswith("```")
        ends = fence or fenced or not line.strip() or line[0] in "#|:<"
        if block and (ends or re.match(r"\s*(?:[-*]|\d+\.) ", line)):
            yield "\n".join(block)
            block = []
        fenced ^= fence
        if not ends:
            block.append(line)


@pytest.mark.parametrize("area", AREAS)
def test_names_its_subjects(area: str) -> None:
    """At most one word in ten thousand stands for a subject without naming it."""
    texts = {path: path.read_text() for path in AREAS[area]}
    words = sum(len(WORD.findall(text)) for text in texts.values())
    found = [(str(path), *it) for path in texts if (it := VAGUE.findall(texts[path]))]
    assert sum(len(each) - 1 for each in found) <= words * PER_WORD, found


@pytest.mark.parametrize("area", AREAS)
def test_begins_no_sentence_with_who(area: str) -> None:
    """Sentences name clients, requests and engines, and do not begin with "Who"."""
    found = [
        (str(it), *who) for it in AREAS[area] if (who := WHO.findall(it.read_text()))
    ]
    assert found == []


def test_keeps_paragraphs_short() -> None:
    """A paragraph or list item has at most five lines of 120 columns."""
    short = (ROOT / "README.md", *(ROOT / "docs").rglob("*.md"))
    found = [
        (str(page), text)
        for page in short
        for text in paragraphs(page)
        if text.count("\n") >= 5 or len(" ".join(text.split())) > 5 * 120
    ]
    assert found == []
