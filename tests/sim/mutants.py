"""Reads ``mutants.toml`` and the like, and plants what stands there."""

from __future__ import annotations

import shutil
import tomllib
from dataclasses import dataclass
from pathlib import Path

import lifecycle

PACKAGE = Path(lifecycle.__file__).parent


@dataclass(frozen=True, slots=True)
class Mutant:
    """One planted mistake.

    Attributes:
        name: What goes wrong, in words that fit a test id.
        file: Module of the core.
        patches: Texts and what stands there instead.
    """

    name: str
    file: str
    patches: list[list[str]]

    def apply(self, source: str) -> str:
        """Return *source* with the mistake in it."""
        for old, new in self.patches:
            found = source.count(old)
            assert found == 1, (
                f"{self.name}: {found} places in {self.file} read {old!r}; "
                f"write the mutant anew"
            )
            source = source.replace(old, new)
        return source


def read(path: Path) -> list[Mutant]:
    """Return every mutant of a file."""
    return [Mutant(**mutant) for mutant in tomllib.loads(path.read_text())["mutant"]]


def plant(mutant: Mutant, root: Path) -> None:
    """Copy the package to *root*, with the mistake in it."""
    copy = root / PACKAGE.name
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    module = copy / mutant.file
    module.write_text(mutant.apply(module.read_text()))


MUTANTS = read(Path(__file__).with_suffix(".toml"))
