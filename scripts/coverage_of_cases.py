"""Print which tests cover which case, and fail where one has neither test nor reason.

The cases are in ``tests/cases.toml``, in a few words each. A test covers one by
naming it in a docstring: its own, its class's or its module's. What no test
covers stands in ``tests/cases_not_covered.toml`` with the reason.
"""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TESTS = ROOT / "tests"

# `peers-17`, `fault-22`, `B4`, `N4` and `S4`; also several after one another.
NAME = re.compile(r"\b(?:(peers|fault)-|([BNS]))(\d+)\b")

Case = tuple[str, int]


def main() -> int:
    """Print the table; 1 if it has a hole, 2 if it contradicts itself."""
    cases = read("cases.toml")
    reasons = read("cases_not_covered.toml")
    covered = coverage()
    holes: list[Case] = []
    for case, words in cases.items():
        tests = covered.get(case, [])
        print(f"{label(case):<9} {words}")
        for test in tests:
            print(f"{'':<11}{test}")
        if not tests:
            print(f"{'':<11}not covered: {reasons.get(case, 'NO TEST AND NO REASON')}")
            if case not in reasons:
                holes.append(case)
    tested = sum(case in covered for case in cases)
    print(f"\n{len(cases)} cases, {tested} covered, {len(reasons)} with a reason")
    stale = [label(case) for case in reasons if case in covered or case not in cases]
    if stale:
        print(f"have a reason and a test, or are no case: {', '.join(stale)}")
        return 2
    if holes:
        print(f"neither a test nor a reason: {', '.join(map(label, holes))}")
    return bool(holes)


def read(name: str) -> dict[Case, str]:
    """Return the cases of a file, with what it says of each."""
    tables = tomllib.loads((TESTS / name).read_text())
    return {
        (kind, int(number)): words
        for kind, table in tables.items()
        for number, words in table.items()
    }


def coverage() -> dict[Case, list[str]]:
    """Return the tests that name each case, by file and function."""
    covered: dict[Case, list[str]] = defaultdict(list)
    for path in sorted(TESTS.rglob("*.py")):
        for name, text in docstrings(ast.parse(path.read_text())):
            where = f"{path.relative_to(ROOT)}::{name}".removesuffix("::")
            for family, letter, number in NAME.findall(text):
                case = family or letter, int(number)
                if where not in covered[case]:
                    covered[case].append(where)
    return covered


def docstrings(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Yield each docstring with the name of what it belongs to."""
    for node in ast.walk(tree):
        if isinstance(
            node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
        ):
            yield getattr(node, "name", ""), ast.get_docstring(node) or ""


def label(case: Case) -> str:
    """Return a case as tests name it."""
    kind, number = case
    return f"{kind}{number}" if len(kind) == 1 else f"{kind}-{number}"


if __name__ == "__main__":
    sys.exit(main())
