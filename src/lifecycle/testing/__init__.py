"""Tools to test what is built on the library, and the library itself."""

# A map of the package:
#   cancellation     cancel_everywhere: a cancellation at each point where one can land
#   simulation       simulate, simulate_trio: one run in virtual time, in a seeded
#                    order, with faults at steps and laws to check
#   fakes            ScriptedEngine, RecordingObserver, assert_quiescent
#   pytest_plugin    fails a test that leaves anything behind

from __future__ import annotations

from .cancellation import Attempt, cancel_everywhere
from .fakes import RecordingObserver, Script, ScriptedEngine, assert_quiescent
from .simulation import Deadlock, SimLoop, Simulated, simulate, simulate_trio

__all__ = (
    "Attempt",
    "Deadlock",
    "RecordingObserver",
    "Script",
    "ScriptedEngine",
    "SimLoop",
    "Simulated",
    "assert_quiescent",
    "cancel_everywhere",
    "simulate",
    "simulate_trio",
)
