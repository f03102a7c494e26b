"""SharedGate over real processes: kills, stops, forks, users and folders."""

import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from shared_endurance import run
from shared_kit import Process, wait_until

from lifecycle.shared import SharedGate

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="OFD locks"),
    pytest.mark.thorough,
]


@pytest.fixture
def start(tmp_path):
    made = []

    def start(**options):
        made.append(Process(tmp_path / "gate", **options or {"slots": 2}))
        assert made[-1].ask("join")
        return made[-1]

    yield start
    for each in made:
        each.close()


def pair(start, **options):
    """Return a leader and a follower."""
    leader = start(**options)
    assert leader.ask("admit", "first", {})[0] == "got"
    assert leader.ask("release", "first") == "released"
    follower = start(**options)
    assert follower.ask("admit", "first", {})[0] == "got"
    assert follower.ask("release", "first") == "released"
    found = []

    def one_leads():
        found[:] = sorted((leader, follower), key=lambda it: not it.ask("leads"))
        return found[0].ask("leads") and not found[1].ask("leads")

    wait_until(one_leads)  # a busy machine may have deposed the first one
    return found


@pytest.mark.parametrize("killed", ["leader", "follower"])
def test_gives_back_what_a_killed_worker_held(start, killed) -> None:
    """What a worker held comes back when it is killed, and who waits gets it."""
    leader, follower = pair(start)
    dies, lives = (leader, follower) if killed == "leader" else (follower, leader)
    assert dies.ask("admit", "all", {"slots": 2})[0] == "got"
    lives.send("admit", "next", {"slots": 2})
    dies.kill()
    assert lives.answer()[:2] == ["got", "next"]
    wait_until(lambda: lives.ask("leads"))
    assert lives.ask("join") == [2, 2]


def test_goes_on_in_order_after_a_kill(start) -> None:
    """Who waits in several workers keeps its place when the leader is killed."""
    leader, one = pair(start, slots=1)
    two = start(slots=1)
    assert leader.ask("admit", "all", {})[0] == "got"
    asked = [one, two, two, one, two]
    for number, each in enumerate(asked):
        each.send("admit", number, {})
        seen = number + 1
        wait_until(lambda seen=seen: waiting(leader) == seen)
    leader.kill()
    for number, each in enumerate(asked):
        assert each.answer()[:2] == ["got", number]
        assert each.ask("release", number) == "released"


def waiting(process):
    return process.ask("waiting")


def test_replaces_a_leader_that_is_stopped(start) -> None:
    """A stopped leader keeps what it holds and nothing else; back, it follows."""
    leader, follower = pair(start)
    assert leader.ask("admit", "one", {})[0] == "got"
    leader.stop()
    assert follower.ask("admit", "other", {})[0] == "got"
    wait_until(lambda: follower.ask("leads"))
    follower.send("admit", "too much", {})
    leader.send("release", "one")
    leader.signal(signal.SIGCONT)
    assert leader.answer() == "released"
    assert follower.answer()[:2] == ["got", "too much"]
    leader.send("admit", "again", {})
    assert follower.ask("release", "other") == "released"
    assert leader.answer()[:2] == ["got", "again"]


def test_grants_to_others_beside_a_stopped_follower(start) -> None:
    """A follower that is stopped while it waits shuts nobody out."""
    leader, follower = pair(start, slots=4)
    assert leader.ask("admit", "all", {"slots": 4})[0] == "got"
    for number in range(8):
        follower.send("admit", number, {})
    wait_until(lambda: waiting(leader) == 8)
    follower.stop()
    assert leader.ask("release", "all") == "released"
    for number in range(4):
        assert leader.ask("admit", number, {})[0] == "got"
    follower.signal(signal.SIGCONT)
    for number in range(4):
        assert leader.ask("release", number) == "released"
    got = [follower.answer()[1] for _ in range(4)]
    assert sorted(got) == [0, 1, 2, 3]


def test_gives_back_what_a_killed_parent_held(start) -> None:
    """A forked child keeps nothing alive, and its copy of a lease releases nothing."""
    parent = start(slots=1)
    assert parent.ask("admit", "all", {})[0] == "got"
    child = parent.ask("fork")
    try:
        other = start(slots=1)
        other.send("admit", "next", {})
        wait_until(lambda: waiting(parent) == 1)
        parent.kill()
        assert other.answer()[:2] == ["got", "next"]
        os.kill(child, 0)
    finally:
        os.kill(child, signal.SIGKILL)


def test_lets_a_forked_child_be_a_worker(start) -> None:
    """A gate that was made before a fork serves each child as a worker of its own."""
    parent = start(slots=2)
    assert parent.ask("admit", "one", {})[0] == "got"
    assert parent.ask("fork and admit") == [2, 2]
    wait_until(lambda: parent.ask("join") == [2, 1])


def test_changes_the_capacity_for_all(start) -> None:
    """A worker that comes with another capacity changes it, and says so."""
    leader, follower = pair(start, slots=1)
    other = start(slots=3)
    assert other.ask("admit", "all", {"slots": 3})[0] == "got"
    assert leader.ask("join") == [3, 3]
    wait_until(lambda: follower.ask("join") == [3, 3])  # the leader tells it
    assert "had 1 slots and any bytes, and this worker changes that" in str(
        other.ask("warnings")
    )
    assert leader.ask("warnings") == follower.ask("warnings") == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may become another user")
def test_refuses_another_user() -> None:
    """Another user does not get into the folder."""
    script = """
import os, sys
from lifecycle.shared import SharedGate
gate = SharedGate(sys.argv[1] + "/gate", slots=2)
gate.try_admit().release()
if os.fork() == 0:
    os.setuid(65534)
    try:
        gate.try_admit()
    except PermissionError as error:
        print("refused:", error.strerror)
else:
    os.wait()
"""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        done = subprocess.run(
            [sys.executable, "-c", script, folder],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    assert done.stdout == "refused: Permission denied\n", done.stderr


def test_cleans_up_after_workers_that_were_all_killed(start, tmp_path) -> None:
    """Who comes after a crash of all gets the whole budget, and removes what is left."""
    for _ in range(3):
        leader, follower = pair(start)
        assert follower.ask("admit", "all", {"slots": 2})[0] == "got"
        leader.kill()
        follower.kill()
    gate = SharedGate(tmp_path / "gate", slots=2)
    wait_until(lambda: gate.statistics().slots_in_use == 0)
    gate.try_admit(slots=2).release()
    names = sorted(each.name.partition(".")[0] for each in Path(gate.folder).iterdir())
    assert names == ["leader", "row", "sock"]
    gate.close()
    gate._member.loop._thread.join(60)


def test_never_exceeds_its_capacity_under_kills_and_stops(tmp_path) -> None:
    """Random kills and stops: nothing over capacity, and no waiter is lost."""
    result = run(tmp_path, count=4, seed=1)
    assert result["over"] == result["lost"] == result["failed"] == 0, json.dumps(result)
    assert result["grants"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["kills", "stops", "both"])
def test_endures_kills_and_stops(tmp_path, mode) -> None:
    """The same for longer: mostly stops, which alone find a missing fence."""
    result = run(tmp_path, count=30, seed=2, mode=mode)
    assert result["over"] == result["lost"] == result["failed"] == 0, json.dumps(result)
