"""Lets the torchvision of PyPI, which was built for CUDA, import beside a torch for CPUs.

It does if two of its operators, which no test calls, are declared before.
"""

from __future__ import annotations

import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from typing import Any


class Declarer(MetaPathFinder):
    """Declares the operators at the first import of torchvision; finds nothing."""

    def __init__(self) -> None:
        self._library: Any = None

    def find_spec(self, name: str, *_args: Any) -> ModuleSpec | None:
        """Leave all modules to other finders."""
        if name == "torchvision" and self._library is None:
            import torch

            if torch.version.cuda is None:
                self._library = torch.library.Library("torchvision", "DEF")
                schema = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
                for operator in ("nms", "qnms"):
                    self._library.define(operator + schema)
        return None


sys.meta_path.insert(0, Declarer())
