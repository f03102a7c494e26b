"""Mutation score of the core: small mistakes that its tests do or do not notice.

    python scripts/mutation.py [--sample N] [--seconds S] [--seed N] [MODULE ...]
    python scripts/mutation.py --sample 500 --record
    python scripts/mutation.py --replay [--seconds S]

The mutants are those of cosmic-ray's operators, in a copy of the package, but for `==`
in place of `is` and the like, which mostly change nothing; one that differs in
annotations alone is none. A sample is new each time, unless --seed says which. Each
meets the tests that run one of its lines, first those that have caught most, until one
fails. Survivors that tests/core/survivors.toml names with a reason are not counted.

Which lines a test runs is measured first, which takes longer than all tests, and each
time that the core or a test has changed. So `--record` keeps a sample in
benchmarks/results/mutation.json, and goes on with it where it stopped: mutants that
were caught count as they are, those that lived are tried again, and those whose lines
have changed leave the sample. `--replay` plants those that were caught again, each
against the one test that caught it. A mutant whose lines or test are no longer there is
left out; where half of them are, the sample has to be recorded again.

All mutants must score 95 %. A sample must not be evidence of less than 93 %: the upper
end of the interval in which the score lies by 95 % (Wilson's) may not be below. A
replay is no score, as all its mutants were caught once: it finds tests that have become
blind, and must not be evidence of less than 95 %.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import json
import math
import random
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from cosmic_ray.ast import Visitor, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator, operator_names
from mutation_tests import (
    CORE,
    PACKAGE,
    ROOT,
    Coverage,
    Outcome,
    Run,
    check_unchanged,
    cover,
    warm_up,
)

KNOWN: Final = CORE / "survivors.toml"
RECORD: Final = ROOT / "benchmarks" / "results" / "mutation.json"
# They take arguments, and there are none that would suit all modules.
_ARGUED: Final = ("core/VariableInserter", "core/VariableReplacer")
# They differ for objects that are equal and not the same, which few of ours can be.
_IDENTITIES: Final = tuple(
    f"core/ReplaceComparisonOperator_{it}"
    for it in ("Eq_Is", "Is_Eq", "NotEq_IsNot", "IsNot_NotEq")
)
_LEFT_OUT: Final = (*_ARGUED, *_IDENTITIES)
_LEAST: Final = 0.95
_LEAST_SAMPLED: Final = 0.93
# A mutant that a test needs longer to catch, such as one that hangs, is not replayed.
_REPLAYED_SECONDS: Final = 60.0

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
        nth: How often the lines that differ are in the module before.
    """

    module: str
    operator: str
    occurrence: int
    code: str
    change: str
    lines: frozenset[int]
    nth: int


class _Count(Visitor):  # type: ignore[misc]
    def __init__(self, operator: Any) -> None:
        self.operator = operator
        self.found = 0

    def visit(self, node: Any) -> Any:
        self.found += sum(1 for _ in self.operator.mutation_positions(node))
        return node


class _WithoutTypes(ast.NodeTransformer):
    def visit_Call(self, node: ast.Call) -> ast.AST:
        called = ast.unparse(node.func)
        if called == "TypeVar":
            node.keywords = []
        elif called == "dataclass":  # slots only save memory
            node.keywords = [it for it in node.keywords if it.arg != "slots"]
        return self.generic_visit(node)

    def visit_arg(self, node: ast.arg) -> ast.AST:
        node.annotation = None
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        node.annotation = ast.Constant(0)
        return self.generic_visit(node)

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        decorators = node.decorator_list
        node.decorator_list = [it for it in decorators if ast.unparse(it) != "final"]
        return self.generic_visit(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.returns = None
        return self.generic_visit(node)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> ast.AST:
        node.returns = None
        return self.generic_visit(node)


def meaning(code: str) -> str:
    """Return what *code* does, as text: without what it says of types."""
    return ast.dump(_WithoutTypes().visit(ast.parse(code)))


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
    change, lines, nth = list[str](), set[int](), 0
    for tag, i, j, k, m in difflib.SequenceMatcher(None, old, new, False).get_opcodes():
        if tag != "equal":
            change += [f"- {line}".rstrip() for line in old[i:j]]
            change += [f"+ {line}".rstrip() for line in new[k:m]]
            lines |= _statements(code, range(i + 1, max(j, i + 1) + 1))
            nth = sum(old[at : at + j - i] == old[i:j] for at in range(i))
    change_text = "\n".join(change)
    return Mutant(
        module, operator, occurrence, mutated, change_text, frozenset(lines), nth
    )


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
    parser.add_argument("--sample", type=int, help="try this many, drawn by a seed")
    parser.add_argument("--seed", type=int)
    parser.add_argument("--seconds", type=float, help="begin none after these many")
    parser.add_argument(
        "--jobs", type=int, default=2, help="runs at once (%(default)s)"
    )
    parser.add_argument("--record", action="store_true", help=f"write {RECORD.name}")
    parser.add_argument("--replay", action="store_true", help=f"try {RECORD.name}")
    options = parser.parse_args()
    wanted = {name for each in options.modules for name in (each, f"_{each}")}
    modules = [each for each in MODULES if not wanted or each in wanted]
    if not modules:
        parser.error(f"no such module; there are {', '.join(MODULES)}")
    warm_up()
    if options.replay:
        return replay(options.seconds, options.jobs)
    if options.seed is None:  # of what is recorded it says how to go on
        options.seed = 1 if options.record else random.randrange(10**6)  # noqa: S311
    drawn = [place for module in modules for place in places(module)]
    random.Random(options.seed).shuffle(drawn)  # noqa: S311 - seeded on purpose
    covered = cover()
    check_unchanged(covered.order("", frozenset())[::40])
    trial = Trial(covered, known())
    if options.record:
        trial.on_done = lambda: record(len(drawn), options.seed, trial)
        trial.resume(json.loads(RECORD.read_text()), options.jobs)
    trial.run(drawn, options.sample, options.seconds, options.jobs)
    tried, lived = trial.tried, len(trial.survivors)
    print(summary(len(drawn), options.seed, trial))
    sampled = options.sample is not None or options.seconds is not None
    if sampled:
        return int(interval(tried - lived, tried)[1] < _LEAST_SAMPLED)
    return int(1 - lived / max(tried, 1) < _LEAST)


def score(tried: int, lived: int) -> str:
    """Return a line that says how many mutants were caught."""
    low, high = interval(tried - lived, tried)
    return (
        f"{lived} lived unexplained, a score of {1 - lived / max(tried, 1):.1%} "
        f"({low:.1%} to {high:.1%}, by 95 %)"
    )


def summary(of: int, seed: int, trial: Trial) -> str:
    """Return a line about what a trial has found so far."""
    told = score(trial.tried, len(trial.survivors))
    return (
        f"{trial.tried} of at most {of} mutants, seed {seed}: "
        f"{told}; {trial.explained} more are explained"
    )


def record(of: int, seed: int, trial: Trial) -> None:
    """Keep what a trial has found so far, for `replay` and to go on."""
    found = {
        "command": f"python {' '.join(sys.argv)}",
        "python": ".".join(map(str, sys.version_info[:3])),
        "summary": summary(of, seed, trial),
        "lived": [
            {"module": it.module, "change": it.change, "nth": it.nth}
            for it in trial.survivors
        ],
        "caught": trial.catches,
    }
    RECORD.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")


def replay(seconds: float | None, jobs: int) -> int:
    """Plant the recorded mutants again; 1 if too many live, or too few are there."""
    entries = json.loads(RECORD.read_text())["caught"]
    entries = [it for it in entries if it["seconds"] <= _REPLAYED_SECONDS]
    random.Random(1).shuffle(entries)  # noqa: S311 - seeded on purpose
    ready = [(each, code) for each in entries if (code := plant(each)) is not None]
    check_unchanged(sorted({each["test"] for each, _ in ready}))
    caught = lived = missing = 0

    def done(entry: dict[str, Any], outcome: Outcome, *_: object) -> None:
        nonlocal caught, lived, missing
        caught += outcome == "caught"
        missing += outcome == "not run"
        if outcome == "lives":
            lived += 1
            print(f"lives: {entry['module']} in {entry['test']}\n{entry['change']}")

    runs = Runs(done)
    began = time.monotonic()
    for entry, code in ready:
        if seconds and time.monotonic() - began > seconds:
            break
        runs.begin(entry, entry["module"], code, [entry["test"]], jobs)
    runs.finish()
    missing += len(entries) - len(ready)
    tried = caught + lived
    print(f"{caught} of {tried} recorded mutants are caught again; {missing} changed")
    if missing > len(entries) / 2:
        print("record a new sample: make mutation ARGS='--sample 500 --record'")
        return 1
    return int(interval(caught, tried)[1] < _LEAST)


def plant(entry: dict[str, Any]) -> str | None:
    """Return the module with a recorded mistake, or ``None`` where it has changed."""
    if not (ROOT / entry["test"].partition("::")[0]).exists():
        return None
    code = (PACKAGE / f"{entry['module']}.py").read_text()
    lines = entry["change"].splitlines()
    old, new = ([it[2:] for it in lines if it[0] == sign] for sign in "-+")
    text = code.splitlines()
    found = [i for i in range(len(text)) if text[i : i + len(old)] == old]
    if not old or len(found) <= entry["nth"]:
        return None
    place = found[entry["nth"]]
    return "\n".join([*text[:place], *new, *text[place + len(old) :], ""])


def planted(entry: dict[str, Any]) -> Mutant | None:
    """Return the mutant of an entry, or ``None`` where its lines have changed."""
    mutated = plant({"test": "", **entry})
    if mutated is None:
        return None
    code = (PACKAGE / f"{entry['module']}.py").read_text()
    matching = difflib.SequenceMatcher(
        None, code.splitlines(), mutated.splitlines(), autojunk=False
    )
    lines = set[int]()
    for tag, i, j, *_ in matching.get_opcodes():
        if tag != "equal":
            lines |= _statements(code, range(i + 1, max(j, i + 1) + 1))
    where = (entry["module"], "", 0, mutated, entry["change"], frozenset(lines))
    return Mutant(*where, entry["nth"])


def interval(hits: int, tries: int) -> tuple[float, float]:
    """Return Wilson's interval of a share that was *hits* of *tries*, by 95 %."""
    if not tries:
        return 0.0, 1.0
    z = 1.96
    share, spread = hits / tries, z * z / tries
    half = z * math.sqrt(share * (1 - share) / tries + spread / tries / 4)
    middle = share + spread / 2
    return (middle - half) / (1 + spread), (middle + half) / (1 + spread)


class Runs:
    """Runs of tests, some at once.

    Args:
        done: Called with what a run was begun for, its outcome, the test that failed,
            and the seconds that it took.
    """

    def __init__(self, done: Callable[[Any, Outcome, str, float], None]) -> None:
        self._done = done
        self._running: list[tuple[Any, Run, tempfile.TemporaryDirectory[str]]] = []

    def begin(
        self, what: object, module: str, code: str, order: list[str], jobs: int
    ) -> None:
        """Begin a run, and return when fewer than *jobs* are left."""
        directory = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        run = Run(Path(directory.name), module, code, order)
        self._running.append((what, run, directory))
        while len(self._running) >= jobs:
            self._poll()

    def finish(self) -> None:
        """Return when all have ended."""
        while self._running:
            self._poll()

    def _poll(self) -> None:
        time.sleep(0.02)
        for each in list(self._running):
            what, run, directory = each
            if (found := run.poll()) is not None:
                self._running.remove(each)
                directory.cleanup()
                self._done(what, *found, run.seconds)


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
        self.catches: list[dict[str, Any]] = []
        self.on_done: Callable[[], object] = object
        self._seen: set[tuple[str, str, int]] = set()
        self._runs = Runs(self._done)

    def resume(self, found: dict[str, Any], jobs: int) -> None:
        """Count what was caught, and try what lived once more."""
        for entry in found["caught"]:
            if plant(entry) is not None:
                self._seen.add((entry["module"], entry["change"], entry["nth"]))
                self.catches.append(entry)
        self.tried = len(self.catches)
        for entry in found["lived"]:
            mutant = planted(entry)
            if mutant and (mutant.module, mutant.change) not in self.reasons:
                self._begin(mutant, jobs)
        self._runs.finish()

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
            if mutant is None or self._is_seen(mutant):
                continue
            if (mutant.module, mutant.change) in self.reasons:
                self.explained += 1
                continue
            self._begin(mutant, jobs)
        self._runs.finish()

    def _is_seen(self, mutant: Mutant) -> bool:
        return (mutant.module, mutant.change, mutant.nth) in self._seen

    def _begin(self, mutant: Mutant, jobs: int) -> None:
        self.tried += 1
        self._seen.add((mutant.module, mutant.change, mutant.nth))
        if self.tried % 20 == 0:
            print(f"{self.tried} tried, {len(self.survivors)} live", flush=True)
        order = self.coverage.order(mutant.module, mutant.lines)
        self._runs.begin(mutant, mutant.module, mutant.code, order, jobs)

    def _done(
        self, mutant: Mutant, outcome: Outcome, test: str, seconds: float
    ) -> None:
        if outcome != "caught":
            self.survivors.append(mutant)
            what = f"{mutant.module} {mutant.operator} {mutant.occurrence}"
            print(f"lives: {what}\n{mutant.change}", flush=True)
            self.on_done()
            return
        self.coverage.caught[test] += 1
        # Where the package could not even be imported, any test notices.
        order = self.coverage.order(mutant.module, mutant.lines)
        self.catches.append(
            {
                "module": mutant.module,
                "change": mutant.change,
                "nth": mutant.nth,
                "test": test or order[0],
                "seconds": round(seconds, 1),
            }
        )
        self.on_done()


if __name__ == "__main__":
    sys.exit(main())
