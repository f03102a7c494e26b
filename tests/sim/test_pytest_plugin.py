"""The plugin, in test suites of its users."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from lifecycle.testing import pytest_plugin

pytest_plugins = ["pytester"]

HEADER = """
import asyncio, contextlib, functools, os, subprocess, sys, threading
import anyio, pytest
from lifecycle import Gate, Payload, SessionRegistry

KEPT = []
"""

LEAVERS = {
    "lease": "KEPT.append(Gate(slots=1).try_admit())",
    "session": (
        "async def main():\n"
        "    async with SessionRegistry() as sessions:\n"
        "        KEPT.append(sessions.open('a'))\n"
        "        await anyio.sleep_forever()\n"
        "loop = asyncio.new_event_loop()\n"
        "KEPT.append((loop, loop.create_task(main())))\n"
        "loop.call_later(0.01, loop.stop)\n"
        "loop.run_forever()"
    ),
    "payload": "KEPT.append(Payload(b'pixels', nbytes=6))",
    "task": (
        "loop = asyncio.new_event_loop()\n"
        "KEPT.append((loop, loop.create_task(asyncio.sleep(9), name='sleeper')))\n"
        "loop.call_soon(loop.stop)\n"
        "loop.run_forever()"
    ),
    "descriptor": "KEPT.append(open(os.devnull))",
    "thread": (
        "KEPT.append(threading.Event())\n"
        "threading.Thread(target=KEPT[-1].wait, name='waiter', daemon=True).start()"
    ),
    "child": (
        "KEPT.append(subprocess.Popen([sys.executable, '-c', 'input()'], stdin=-1))"
    ),
}


def suite(pytester: pytest.Pytester, tests: str) -> pytest.RunResult:
    """Run *tests* with the plugin switched on."""
    pytester.makeconftest('pytest_plugins = ["lifecycle.testing.pytest_plugin"]')
    pytester.makepyfile(HEADER + tests)
    return pytester.runpytest_subprocess("-p", "no:cacheprovider", "-p", "no:anyio")


def indented(code: str) -> str:
    """Return *code* as the body of a function."""
    return "".join(f"    {line}\n" for line in code.splitlines())


def test_fails_each_test_that_leaves_something_behind(pytester):
    """Each kind of leftover fails the test that leaves it, and no other, by name."""
    tests = (f"def test_{kind}():\n{indented(LEAVERS[kind])}\n" for kind in LEAVERS)
    innocent = "def test_is_innocent_{}(): pass\n"
    result = suite(
        pytester,
        "".join(test + innocent.format(i) for i, test in enumerate(tests)),
    )
    result.assert_outcomes(passed=2 * len(LEAVERS), errors=len(LEAVERS))
    for kind in LEAVERS:
        result.stdout.fnmatch_lines(
            [f"*ERROR at teardown of test_{kind} *", "left behind:", f"  {kind} *"]
        )


def test_passes_a_suite_that_cleans_up(pytester):
    """What is given back, closed, joined and waited for is no leftover."""
    result = suite(
        pytester,
        """
async def serve():
    gate = Gate(slots=1)
    async with SessionRegistry() as sessions:
        with sessions.open("a") as session:
            box = session.box(b"pixels")
            with await gate.admit():
                await anyio.to_thread.run_sync(functools.partial(len, "work"))

@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_serves(backend):
    anyio.run(serve, backend=backend)

def test_waits():
    subprocess.run([sys.executable, "-c", ""])
    thread = threading.Thread(target=int)
    thread.start()
    thread.join()

@pytest.fixture(scope="module")
def held():
    with Gate(slots=1).try_admit() as lease, open(os.devnull) as file:
        yield lease, file

def test_uses_what_a_wider_fixture_holds(held): pass
def test_uses_it_again(held): pass

@pytest.fixture
def lent():
    with Gate(slots=1).try_admit() as lease:
        yield lease

def test_is_given_what_its_fixture_takes_back(lent): pass
""",
    )
    result.assert_outcomes(passed=6)


def test_finds_what_is_there_and_nothing_else(tmp_path):
    """Threads, descriptors and children are seen while they live."""
    before = pytest_plugin._look()
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait, name="waiter")
    thread.start()
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    kinds = {kind for kind, _ in pytest_plugin._look().keys() - before.keys()}
    assert kinds == {"thread", "descriptor", "child"}
    child.communicate(b"\n")
    stop.set()
    thread.join()
    assert not pytest_plugin._look().keys() - before.keys()
    assert pytest_plugin._paths("no such folder") == []
    assert pytest_plugin._read(tmp_path / "no such file") == ""


def test_works_within_the_same_process(pytester):
    """A payload that stays in its box, one that is taken, and one excused."""
    pytester.makepyfile(
        HEADER + "payload = Payload(1)\n"
        "def test_keeps(): KEPT.append(Payload(2))\n"
        "def test_takes(): payload.take()\n"
        "@pytest.mark.leaves\n"
        "def test_may(): KEPT.append(Payload(3))\n"
    )
    result = pytester.runpytest_inprocess(
        "-p", "no:cacheprovider", plugins=[pytest_plugin]
    )
    result.assert_outcomes(passed=3, errors=1)
    result.stdout.fnmatch_lines(["left behind:", "  payload *"])


def test_excuses_a_test_from_what_it_names(pytester):
    """The marker excuses the kinds that it names, or everything."""
    leaves = indented(LEAVERS["descriptor"])
    result = suite(
        pytester,
        f"@pytest.mark.leaves('descriptor')\ndef test_one():\n{leaves}\n"
        f"@pytest.mark.leaves\ndef test_all():\n{leaves}\n"
        f"@pytest.mark.leaves('thread')\ndef test_other():\n{leaves}\n",
    )
    result.assert_outcomes(passed=3, errors=1)


def test_forgives_what_only_a_cycle_kept(pytester):
    """A payload in a garbage cycle is collected before a test fails for it."""
    result = suite(
        pytester,
        "def test_makes_a_cycle():\n"
        "    payload = Payload([])\n"
        "    payload._value.append(payload)\n",
    )
    result.assert_outcomes(passed=1)
