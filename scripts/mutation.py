"""Mutation score of the core: small mistakes that its tests do or do not notice.

    python scripts/mutation.py [--sample N] [--seed N] [--seconds S] [MODULE ...]

The mutants are those of cosmic-ray's operators, in a copy of the package; one that
differs in annotations alone is none. Each is run against the tests of its module, and
against all tests of the core if it lives. Survivors that tests/core/survivors.toml
names with a reason are not counted.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import os
import random
import shutil
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from cosmic_ray.ast import Visitor, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator, operator_names
from cosmic_ray.testing import run_tests
from cosmic_ray.work_item import TestOutcome

ROOT: Final = Path(__file__).resolve().parents[1]
PACKAGE: Final = ROOT / "src" / "lifecycle"
CORE: Final = ROOT / "tests" / "core"
KNOWN: Final = CORE / "survivors.toml"
# They take arguments, and there are none that would suit all modules.
_LEFT_OUT: Final = ("core/VariableInserter", "core/VariableReplacer")
# Of one run of tests; a mutant may hang.
_HANGS: Final = 900.0
# Of all mutants; a sample is too small to judge by, and reports only.
_LEAST: Final = 0.95

TESTS: Final = {
    "_decorators": ("decorators", "scrub"),
    "_eventloop": ("regressions", "lowlevel", "gate", "admission", "start"),
    "_exceptions": ("mistakes", "retry_after", "admission"),
    "_gate": ("regressions", "lease", "gate", "admission", "gate_reentrancy", "fair"),
    "_lock": ("gate_reentrancy", "gate"),
    "_managed_stream": ("decorators", "scrub", "mistakes"),
    "_payload": ("payload", "regressions", "scrub"),
    "_queues": ("queues", "regressions", "retry_after", "fair"),
    "_session": ("sessions", "start", "regressions"),
    "_sessions": ("sessions", "mistakes", "regressions"),
    "_signatures": ("decorators", "scrub"),
    "_start": ("start", "sessions"),
    "_stream": ("stream", "watchdog", "sessions"),
    "_thread_iterator": ("in_thread",),
    "_validation": ("mistakes", "admission"),
    "debug": ("debug", "debug_holders", "debug_snapshot"),
    "events": ("events",),
    "lowlevel": ("lowlevel",),
}


@dataclass(frozen=True, slots=True)
class Mutant:
    """One mistake.

    Attributes:
        module: Where it is made.
        operator: How.
        occurrence: Which of the places that the operator finds there.
        code: The whole module, with the mistake.
        change: The lines that differ, as in a diff.
    """

    module: str
    operator: str
    occurrence: int
    code: str
    change: str


class _Count(Visitor):  # type: ignore[misc]
    def __init__(self, operator: Any) -> None:
        self.operator = operator
        self.found = 0

    def visit(self, node: Any) -> Any:
        self.found += sum(1 for _ in self.operator.mutation_positions(node))
        return node


class _WithoutAnnotations(ast.NodeTransformer):
    def visit_arg(self, node: ast.arg) -> ast.AST:
        node.annotation = None
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        node.annotation = ast.Constant(0)
        return self.generic_visit(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.returns = None
        return self.generic_visit(node)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> ast.AST:
        node.returns = None
        return self.generic_visit(node)


def meaning(code: str) -> str:
    """Return what *code* does, as text: without annotations, which are never run."""
    return ast.dump(_WithoutAnnotations().visit(ast.parse(code)))


def places(module: str) -> Iterator[tuple[str, str, int]]:
    """Return module, operator and occurrence of every mutant of a module."""
    tree = get_ast((PACKAGE / f"{module}.py").read_text())
    for name in sorted(operator_names()):
        if name not in _LEFT_OUT:
            counting = _Count(get_operator(name)())
            counting.walk(tree)
            yield from ((module, name, number) for number in range(counting.found))


def make(module: str, operator: str, occurrence: int) -> Mutant | None:
    """Return a mutant, unless it does the same as the module."""
    code = (PACKAGE / f"{module}.py").read_text()
    mutated = mutate_code(code, get_operator(operator)(), occurrence)
    try:
        if mutated is None or meaning(mutated) == meaning(code):
            return None
    except SyntaxError:  # an operator took `*` for a product
        return None
    lines = difflib.ndiff(code.splitlines(), mutated.splitlines())
    change = [line.rstrip() for line in lines if line.startswith(("- ", "+ "))]
    return Mutant(module, operator, occurrence, mutated, "\n".join(change))


def command(tests: Sequence[str]) -> str:
    """Return a command that fails if one of *tests* does."""
    argv = [sys.executable, "-m", "pytest", "-q", "-x", "--timeout=60"]
    argv += ["-p", "no:cacheprovider", "-p", "no:randomly", "-m", "'not slow'"]
    return " ".join([*argv, *tests])


def lives(mutant: Mutant, copy: Path) -> bool:
    """Whether all tests of the core pass with the mutant in the copied package."""
    own = [str(CORE / f"test_{each}.py") for each in TESTS[mutant.module]]
    others = [str(CORE), f"--ignore={CORE / 'test_mutants.py'}"]
    module = copy / f"{mutant.module}.py"
    whole = module.read_text()
    module.write_text(mutant.code)
    try:
        outcomes = (run_tests(command(each), _HANGS)[0] for each in (own, others))
        return all(outcome is TestOutcome.SURVIVED for outcome in outcomes)
    finally:
        module.write_text(whole)


def check_copy(copy: Path) -> None:
    """Raise unless tests pass in the unchanged copy: or every mutant seems caught."""
    files = {CORE / f"test_{each}.py" for own in TESTS.values() for each in own}
    if absent := sorted(it.name for it in files if not it.exists()):
        raise SystemExit(f"no such tests: {', '.join(absent)}; correct TESTS")
    found = run_tests(command([str(CORE / "test_regressions.py")]), _HANGS)
    if found[0] is not TestOutcome.SURVIVED:
        raise SystemExit(f"no mutant was tried, as tests fail in {copy}:\n{found[1]}")


def known() -> dict[tuple[str, str], str]:
    """Return why each survivor that is known lives, by module and change."""
    if not KNOWN.exists():
        return {}
    entries = tomllib.loads(KNOWN.read_text()).get("survivor", [])
    return {(it["module"], it["change"].strip()): it["reason"] for it in entries}


def main() -> int:
    """Run the command line; 1 if too many mutants live."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("modules", nargs="*", help="without _ or .py, as in gate")
    parser.add_argument("--sample", type=int, help="try this many, drawn by --seed")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, help="begin none after these many")
    options = parser.parse_args()
    wanted = {name for each in options.modules for name in (each, f"_{each}")}
    modules = [each for each in TESTS if not wanted or each in wanted]
    if not modules:
        parser.error(f"no such module; there are {', '.join(TESTS)}")
    drawn = [place for module in modules for place in places(module)]
    random.Random(options.seed).shuffle(drawn)  # noqa: S311 - seeded on purpose
    found = len(drawn)
    tried, survivors = run(drawn, options.sample, options.seconds)
    score = 1 - len(survivors) / tried if tried else 1.0
    print(
        f"{tried} of at most {found} mutants, seed {options.seed}: "
        f"{len(survivors)} lived unexplained, a score of {score:.1%}"
    )
    sampled = options.sample is not None or options.seconds is not None
    return int(not sampled and score < _LEAST)


def run(
    drawn: list[tuple[str, str, int]], sample: int | None, seconds: float | None
) -> tuple[int, list[Mutant]]:
    """Try mutants in order; return how many, and those that lived unexplained."""
    began, tried, survivors, reasons = time.monotonic(), 0, list[Mutant](), known()
    with tempfile.TemporaryDirectory() as directory:
        copy = Path(directory) / PACKAGE.name
        shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
        os.environ["PYTHONPATH"] = directory
        check_copy(copy)
        for place in drawn:
            if tried == sample or (seconds and time.monotonic() - began > seconds):
                break
            mutant = make(*place)
            if mutant is None or (mutant.module, mutant.change) in reasons:
                continue
            tried += 1
            if tried % 20 == 0:
                print(f"{tried} tried, {len(survivors)} live", flush=True)
            if lives(mutant, copy):
                survivors.append(mutant)
                what = f"{mutant.module} {mutant.operator} {mutant.occurrence}"
                print(f"lives: {what}\n{mutant.change}", flush=True)
    return tried, survivors


if __name__ == "__main__":
    sys.exit(main())
