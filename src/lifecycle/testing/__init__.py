"""Tools to test what is built on the library, and the library itself."""

# A map of the package:
#   _cancel      cancel_everywhere: a cancellation at each point where one can land
#   _explore     explore: each order of a small program, within a bound
#   _loop        SimLoop: an asyncio loop of virtual time and seeded order
#   _simulate    simulate: one run on it, with faults at steps and laws to check
#   _trio        the same two on trio
#   _reenter     reenter_everywhere: a finaliser between any two bytecodes
#   _engine      ScriptedEngine: an engine that does as it is told, and counts
#   _quiet       assert_quiescent, RecordingObserver
#   pytest_plugin    fails a test that leaves anything behind

from __future__ import annotations

from ._cancel import Attempt, cancel_everywhere
from ._engine import Script, ScriptedEngine
from ._explore import Explored, explore
from ._loop import Hang, SimLoop
from ._quiet import RecordingObserver, assert_quiescent
from ._reenter import Arm, reenter_everywhere
from ._simulate import Simulated, simulate
from ._trio import explore_trio, simulate_trio

__all__ = (
    "Arm",
    "Attempt",
    "Explored",
    "Hang",
    "RecordingObserver",
    "Script",
    "ScriptedEngine",
    "SimLoop",
    "Simulated",
    "assert_quiescent",
    "cancel_everywhere",
    "explore",
    "explore_trio",
    "reenter_everywhere",
    "simulate",
    "simulate_trio",
)
