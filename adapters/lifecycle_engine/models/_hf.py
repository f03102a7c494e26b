"""The seam to transformers: looked up by name, typed as ``Any``.

Its annotations come and go between releases and describe less than it accepts;
behind this seam a release can change them without breaking our type check.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from typing import Any


def hf(name: str, module: str = "") -> Any:
    """Import ``transformers`` or a module of it and return one of its names."""
    where = f"transformers.{module}" if module else "transformers"
    return getattr(importlib.import_module(where), name)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Hold back progress bars, which only clutter the log of a process."""
    enabled = hf("is_progress_bar_enabled", "utils.logging")()
    hf("disable_progress_bar", "utils.logging")()
    try:
        yield
    finally:
        if enabled:
            hf("enable_progress_bar", "utils.logging")()
