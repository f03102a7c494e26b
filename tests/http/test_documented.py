"""The commands in the reference of the HTTP API work as they stand."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
from pathlib import Path

import pytest
from http_kit import Server
from sdk_contract import EVENTS, WHOLE, events, mistakes, mistakes_of_event

pytestmark = pytest.mark.asyncio(loop_scope="module")
PAGE = Path(__file__).parents[2] / "docs" / "reference" / "http.md"
COMMANDS = re.findall(
    r"^```sh\n(curl .*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL
)
ADDRESS = "http://127.0.0.1:8000"


def path_of(command: str) -> str:
    """What a command asks for."""
    found = re.search(rf"{ADDRESS}(\S+)", command)
    assert found is not None
    return found[1]


async def test_shows_a_command_for_every_endpoint() -> None:
    """Nothing that generates is without an example."""
    assert {path_of(command) for command in COMMANDS} == set(EVENTS)


@pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl here")
@pytest.mark.parametrize("command", COMMANDS, ids=path_of)
async def test_runs_its_commands(server: Server, command: str) -> None:
    """Each is answered, in the form of its API."""
    there = command.replace(ADDRESS, f"http://127.0.0.1:{server.port}")
    process = await asyncio.create_subprocess_shell(
        there.replace("curl ", "curl --fail --max-time 30 ", 1),
        stdout=asyncio.subprocess.PIPE,
    )
    told, _ = await process.communicate()
    assert process.returncode == 0
    path = path_of(command)
    if '"stream": true' in command:
        found = events(path, told)
        assert len(found) > 2
        assert [each for one in found for each in mistakes_of_event(path, one)] == []
    else:
        assert mistakes(WHOLE[path], json.loads(told)) == []
    await server.quiet()
