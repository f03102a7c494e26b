"""Tiny random checkpoints of real model families, built offline.

Tests, benchmarks, the demo and ``make serve`` run on them;
``python -m tiny_checkpoint DIR`` writes one. They are not part of the wheel.
"""

from .build import FAMILIES, build, cached
from .configs import Sizes

__all__ = ("FAMILIES", "Sizes", "build", "cached")
