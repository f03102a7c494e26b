"""Names of transformers, imported when they are used and typed as ``Any``.

Reading the families or the cache folder must not cost the import of torch.
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
    """Hide progress bars: building writes nothing to the terminal."""
    enabled = hf("is_progress_bar_enabled", "utils.logging")()
    hf("disable_progress_bar", "utils.logging")()
    try:
        yield
    finally:
        if enabled:
            hf("enable_progress_bar", "utils.logging")()
