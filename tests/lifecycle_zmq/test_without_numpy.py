"""Where numpy is not installed: the link works, and an arena says what it needs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import sys
sys.modules["numpy"] = None
import anyio
from lifecycle import EngineLost, Payload
from lifecycle_zmq import Arena, ZmqEngine

async def main():
    async with ZmqEngine(sys.argv[1:], arena_bytes=0) as engine:
        await engine.wait_ready()
        box = Payload({"x": memoryview(bytes(2**20)).cast("d", (2, 2**16))})
        stream = await engine.start("a#1", {"count": 2}, box)
        print([item async for item in stream])
        print((await engine.status())["backend"]["seen"])
    for make in (lambda: Arena(4096), ZmqEngine(sys.argv[1:], arena_bytes=1).__aenter__):
        try:
            made = make()
            await made
        except ModuleNotFoundError as error:
            print(error.name, error)

anyio.run(main)
"""
ENGINE = """
import sys
sys.modules["numpy"] = None
import runpy
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
REMEDY = 'an arena needs numpy; pip install "anyio-lifecycle[zmq]"'


@pytest.fixture
def bare_argv(engine_argv: list[str], tmp_path: Path) -> list[str]:
    """The scripted engine in an interpreter that has no numpy."""
    script = tmp_path / "bare.py"
    script.write_text(ENGINE)
    return [sys.executable, str(script), *engine_argv[1:]]


def test_link_works_and_the_arena_names_its_extra(
    bare_argv: list[str], environment: dict[str, str], tmp_path: Path
) -> None:
    """Payloads are sent; asking for an arena raises an error that names the extra."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *bare_argv],
        env=environment | {"TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    items, seen, *refusals = done.stdout.splitlines()
    assert items == "[[0], [1]]"
    assert seen == "[['x', 'd', [2, 65536], 0]]"
    assert [line.startswith(f"numpy {REMEDY}") for line in refusals] == [True, True]


@pytest.mark.anyio
async def test_engine_that_lacks_it_says_so(
    bare_argv: list[str], environment: dict[str, str], tmp_path: Path
) -> None:
    """If only the engine's interpreter lacks it, the error has the engine's output."""
    from lifecycle import EngineLost
    from lifecycle_zmq import ZmqEngine

    settings = {"env": environment, "directory": tmp_path}
    async with ZmqEngine(bare_argv, arena_bytes=2**20, **settings) as engine:
        with pytest.raises(EngineLost) as caught:
            await engine.wait_ready()
    assert REMEDY in str(caught.value)
