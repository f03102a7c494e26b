"""SPIN visits all states of the models, and the real code follows their traces."""

from __future__ import annotations

import asyncio
import json
import re
import sys

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
NAMED = r"\b(Folder|Leader|Member|SharedGate)\.(\w+)"
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


@pytest.mark.skipif(sys.platform != "linux", reason="OFD locks")
def test_names_the_methods_that_make_the_steps_of_a_shared_gate() -> None:
    """What the comments of the model name is in the code."""
    from lifecycle.shared import SharedGate, leader, member, rows

    parts = SharedGate, leader.Leader, member.Member, rows.Folder
    classes = {each.__name__: each for each in parts}
    text = (model_checker.HERE / "shared.pml").read_text()
    named = set(re.findall(NAMED, text))
    assert len(named) > 15
    assert {(it, name) for it, name in named if not hasattr(classes[it], name)} == set()
