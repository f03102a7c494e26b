"""Mutation score of the core: small mistakes that its tests do or do not notice.

    python scripts/mutation.py [--sample N] [--seed N] [--seconds S] [MODULE ...]

The mutants are those of cosmic-ray's operators, in a copy of the package; one that
differs in annotations alone is none. Each meets the tests that run one of its lines,
first those that have caught most, until one fails. Survivors that
tests/core/survivors.toml names with a reason are not counted.

All mutants must score 95 %. A sample is reported, with the interval in which the score
lies by 95 % (Wilson's), and judges nothing: how large it is depends on the machine.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import math
import random
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from cosmic_ray.ast import Visitor, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator, operator_names
from mutation_tests import CORE, PACKAGE, Coverage, Run, check_unchanged, cover

KNOWN: Final = CORE / "survivors.toml"
# They take arguments, and there are none that would suit all modules.
_LEFT_OUT: Final = ("core/VariableInserter", "core/VariableReplacer")
_LEAST: Final = 0.95

MODULES: Final = sorted(
    it.stem for it in PACKAGE.glob("*.py") if it.stem not in ("__init__", "lowlevel")
)


@dataclass(frozen=True, slots=True)
class Mutant:
    """One mistake.

    Attributes:
        module: Where it is made.
        operator: How.
        occurrence: Which of the places that the operator finds there.
        code: The whole module, with the mistake.
        change: The lines that differ, as in a diff.
        lines: Where they are in the module.
    """

    module: str
    operator: str
    occurrence: int
    code: str
    change: str
    lines: frozenset[int]


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
    old, new = code.splitlines(), mutated.splitlines()
    change, lines = list[str](), set[int]()
    for tag, i, j, k, m in difflib.SequenceMatcher(None, old, new, False).get_opcodes():
        if tag != "equal":
            change += [f"- {line}".rstrip() for line in old[i:j]]
            change += [f"+ {line}".rstrip() for line in new[k:m]]
            lines |= _statements(code, range(i + 1, max(j, i + 1) + 1))
    change_text = "\n".join(change)
    return Mutant(module, operator, occurrence, mutated, change_text, frozenset(lines))


def _statements(code: str, changed: range) -> set[int]:
    """Return the lines of the innermost statements that *changed* lines are in."""
    found = set(changed)
    for line in changed:
        around = [
            node
            for node in ast.walk(ast.parse(code))
            if isinstance(node, ast.stmt)
            and node.lineno <= line <= (node.end_lineno or line)
        ]
        if around:
            inner = max(around, key=lambda it: it.lineno)
            found |= {inner.lineno, line}
    return found


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
    parser.add_argument(
        "--jobs", type=int, default=2, help="runs at once (%(default)s)"
    )
    options = parser.parse_args()
    wanted = {name for each in options.modules for name in (each, f"_{each}")}
    modules = [each for each in MODULES if not wanted or each in wanted]
    if not modules:
        parser.error(f"no such module; there are {', '.join(MODULES)}")
    drawn = [place for module in modules for place in places(module)]
    random.Random(options.seed).shuffle(drawn)  # noqa: S311 - seeded on purpose
    covered = cover()
    check_unchanged(covered)
    trial = Trial(covered, known())
    trial.run(drawn, options.sample, options.seconds, options.jobs)
    tried, lived = trial.tried, len(trial.survivors)
    low, high = interval(tried - lived, tried)
    print(
        f"{tried} of at most {len(drawn)} mutants, seed {options.seed}: {lived} lived "
        f"unexplained, a score of {1 - lived / max(tried, 1):.1%} "
        f"({low:.1%} to {high:.1%}, by 95 %); {trial.explained} more are explained"
    )
    sampled = options.sample is not None or options.seconds is not None
    return int(not sampled and 1 - lived / max(tried, 1) < _LEAST)


def interval(hits: int, tries: int) -> tuple[float, float]:
    """Return Wilson's interval of a share that was *hits* of *tries*, by 95 %."""
    if not tries:
        return 0.0, 1.0
    z = 1.96
    share, spread = hits / tries, z * z / tries
    half = z * math.sqrt(share * (1 - share) / tries + spread / tries / 4)
    middle = share + spread / 2
    return (middle - half) / (1 + spread), (middle + half) / (1 + spread)


class Trial:
    """What became of the mutants that were tried.

    Args:
        coverage: Which tests run which lines.
        reasons: Why survivors that are known live, by module and change.
    """

    def __init__(self, coverage: Coverage, reasons: dict[tuple[str, str], str]):
        self.coverage = coverage
        self.reasons = reasons
        self.tried = self.explained = 0
        self.survivors: list[Mutant] = []
        self._running: dict[Mutant, tuple[Run, tempfile.TemporaryDirectory[str]]] = {}

    def run(
        self,
        drawn: list[tuple[str, str, int]],
        sample: int | None,
        seconds: float | None,
        jobs: int,
    ) -> None:
        """Try mutants in order, *jobs* at once."""
        began = time.monotonic()
        for place in drawn:
            if self.tried == sample:
                break
            if seconds and time.monotonic() - began > seconds:
                break
            mutant = make(*place)
            if mutant is None:
                continue
            if (mutant.module, mutant.change) in self.reasons:
                self.explained += 1
                continue
            self._begin(mutant)
            while len(self._running) >= jobs:
                self._poll()
        while self._running:
            self._poll()

    def _begin(self, mutant: Mutant) -> None:
        self.tried += 1
        if self.tried % 20 == 0:
            print(f"{self.tried} tried, {len(self.survivors)} live", flush=True)
        directory = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        order = self.coverage.order(mutant.module, mutant.lines)
        run = Run(Path(directory.name), mutant.module, mutant.code, order)
        self._running[mutant] = run, directory

    def _poll(self) -> None:
        time.sleep(0.02)
        for mutant, (run, directory) in list(self._running.items()):
            found = run.poll()
            if found is None:
                continue
            del self._running[mutant]
            directory.cleanup()
            outcome, test = found
            if outcome == "lives":
                self.survivors.append(mutant)
                what = f"{mutant.module} {mutant.operator} {mutant.occurrence}"
                print(f"lives: {what}\n{mutant.change}", flush=True)
            else:
                self.coverage.caught[test] += 1


if __name__ == "__main__":
    sys.exit(main())
