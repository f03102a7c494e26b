"""SPIN visits all states of the models, and the real code follows their traces."""

from __future__ import annotations

import asyncio
import json

import gate_replay
import link_replay
import model_checker
import pytest
from model_checker import FAULTS, RESULTS, RUNS, Run

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        bool(model_checker.MISSING),
        reason=f"not installed: {' and '.join(model_checker.MISSING)} "
        "(on Debian and Ubuntu: apt install spin gcc)",
    ),
]
REPLAYS = {"gate": gate_replay.replay, "link": link_replay.replay}


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.name)
def test_visits_all_states_without_an_error(run: Run) -> None:
    """No law is broken in any state, and there are as many states as recorded."""
    committed = json.loads(RESULTS.read_text())
    counted = model_checker.visit(run)
    assert counted["errors"] == 0
    if committed["spin"] == model_checker.version():
        assert counted == committed["runs"][run.name]


@pytest.mark.parametrize("run", FAULTS, ids=lambda run: run.name)
def test_finds_a_fault_in_a_model(run: Run) -> None:
    """A mistake that is made in a model breaks one of its laws."""
    assert model_checker.visit(run)["errors"] == 1


@pytest.mark.parametrize("model", sorted(REPLAYS))
def test_replays_traces_on_the_real_code(model: str) -> None:
    """After each change of a random trace, the real code looks like the model."""
    seen = set()
    for seed in range(1, 301):
        steps = model_checker.trace(model, seed)
        asyncio.run(REPLAYS[model](steps))
        seen |= {step.what for step in steps}
    assert seen == model_checker.changes(model)
