"""Where the scheduler gets `strip` from."""

from __future__ import annotations

from collections.abc import Iterable, MutableMapping
from typing import Any


def strip(mapping: MutableMapping[str, Any], *, keep: Iterable[str] = ()) -> None:
    """Empty a payload mapping in place but for the listed dotted paths."""
    kept: dict[str, Any] = {}
    for path in keep:
        source: Any = mapping
        target = kept
        *parents, last = path.split(".")
        for name in parents:
            source = source[name]
            target = target.setdefault(name, {})
        target[last] = source[last]
    mapping.clear()
    mapping.update(kept)
