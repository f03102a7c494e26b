"""Reads ``mutants.toml``, and plants what stands there."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path


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


def read() -> list[Mutant]:
    """Return every mutant."""
    text = Path(__file__).with_suffix(".toml").read_text()
    return [Mutant(**mutant) for mutant in tomllib.loads(text)["mutant"]]


MUTANTS = read()
