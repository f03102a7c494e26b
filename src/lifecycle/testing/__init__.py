"""What it takes to test code that uses the library, and the library itself."""

from __future__ import annotations

from ._engine import Script, ScriptedEngine
from ._explore import Explored, explore
from ._loop import Hang, SimLoop
from ._simulate import Simulated, simulate
from ._trio import explore_trio, simulate_trio

__all__ = (
    "Explored",
    "Hang",
    "Script",
    "ScriptedEngine",
    "SimLoop",
    "Simulated",
    "explore",
    "explore_trio",
    "simulate",
    "simulate_trio",
)
