"""Modules in which something may happen before each statement of each function."""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Callable, Collection
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import CodeType
from typing import Any


class Statements:
    """Counts statements down, and calls a function when none is left.

    Attributes:
        left: How many to run before that.
    """

    def __init__(self, none_left: Callable[[], object]) -> None:
        self.left = sys.maxsize
        self._none_left = none_left

    def step(self) -> None:
        """Come to a statement."""
        self.left -= 1
        if self.left < 0:
            self._none_left()

    def load(self, names: Collection[str], *, whole: Collection[str] = ()) -> None:
        """Import modules with a step before each statement.

        Args:
            names: Of modules that nothing has imported yet.
            whole: Names of functions that get no steps. What they call may have some.
        """
        early = sorted(set(names) & set(sys.modules))
        assert not early, f"imported before: {early}"
        finder = _Finder(self, names, whole)
        sys.meta_path.insert(0, finder)
        try:
            for name in names:
                importlib.import_module(name)
        finally:
            sys.meta_path.remove(finder)


class _Finder:
    def __init__(self, *loads: Any) -> None:
        self._loads = loads

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if name not in self._loads[1]:
            return None
        spec = PathFinder.find_spec(name, path, target)
        assert spec is not None and spec.origin is not None
        spec.loader = _Loader(name, spec.origin, *self._loads)
        return spec


class _Loader(SourceFileLoader):
    def __init__(self, name: str, path: str, *loads: Any) -> None:
        super().__init__(name, path)
        self._statements, _, self._whole = loads

    def get_code(self, fullname: str) -> CodeType:
        # Not what is cached; nor is this.
        tree = ast.parse(self.get_data(self.path), self.path)
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and node.name not in self._whole:
                _add_steps(node)
        return compile(ast.fix_missing_locations(tree), self.path, "exec")

    def exec_module(self, module: Any) -> None:
        module.__step__ = self._statements.step
        super().exec_module(module)


def _add_steps(function: ast.FunctionDef) -> None:
    """Put a call before each statement, but for those of functions inside."""
    pending: list[ast.AST] = [function]
    while pending:
        node = pending.pop()
        for field in ("body", "orelse", "finalbody"):
            statements = getattr(node, field, None)
            if not isinstance(statements, list):
                continue
            stepped: list[ast.stmt] = []
            for each in statements:
                if not (isinstance(each, ast.Expr) and _is_text(each.value)):
                    call = ast.parse("__step__()").body[0]
                    stepped.append(ast.copy_location(call, each))
                stepped.append(each)
                if not isinstance(each, ast.FunctionDef | ast.ClassDef):
                    pending.append(each)
            setattr(node, field, stepped)
        pending += getattr(node, "handlers", [])


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)
