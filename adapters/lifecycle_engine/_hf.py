"""The seam to transformers: looked up by name, typed as ``Any``.

Its annotations come and go between releases and describe less than it accepts;
behind this seam a release can change them without breaking our type check.
"""

from __future__ import annotations

import importlib
from typing import Any


def hf(name: str, module: str = "") -> Any:
    """Import ``transformers`` or a module of it and return one of its names."""
    where = f"transformers.{module}" if module else "transformers"
    return getattr(importlib.import_module(where), name)
