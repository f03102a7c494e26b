"""What `lifecycle serve` writes on its outputs, as a process of its own."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import signal
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer
from http_kit import ENV, answer_to, encoded, post, user
from ports import free_port

from lifecycle_engine import ServerConfig
from lifecycle_engine.cli import reporting_failures

pytestmark = pytest.mark.asyncio
CLI = [sys.executable, "-m", "lifecycle_engine.cli", "serve", "--runner", "sim"]
CANARY = "canary-7f3a"
KEY = f"authorization: Bearer {CANARY}".encode()


def body(**fields: Any) -> bytes:
    """A request with an image."""
    ask = {"model": "sim", "messages": user(CANARY, encoded()), "max_tokens": 2}
    return json.dumps({**ask, **fields}).encode()


async def outputs(
    *options: str, ask: Any, env: dict[str, str] = ENV
) -> tuple[str, str]:
    """Run the command, *ask* its port, stop it; returns what it wrote on both outputs."""
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        *CLI, "--port", "0", *options, stdout=pipe, stderr=pipe, env=env
    )
    assert process.stdout is not None
    try:
        async with asyncio.timeout(120):
            line = (await process.stdout.readline()).decode()
            await ask(int(line.rpartition(":")[2]))
            process.send_signal(signal.SIGTERM)
            rest, errors = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 0
    return line + rest.decode(), errors.decode()


async def test_logs_each_request_as_a_line_of_json() -> None:
    """With `--log json` each request is one line, with its outcome and nothing it said."""
    pytest.importorskip("structlog")

    async def ask(port: int) -> None:
        assert (await answer_to(port, body(), KEY))[0] == 200
        assert (await answer_to(port, body(model=CANARY), KEY))[0] == 404
        long = {"stream": True, "max_tokens": 4000, "ignore_eos": True}
        reader, writer = await post(port, body(**long), KEY)
        await reader.readuntil(b"data: ")
        status, headers, _ = await answer_to(port, body(), KEY)
        assert status == 429
        assert int(headers["retry-after"]) >= 1
        writer.close()
        while (await answer_to(port, body(), KEY))[0] == 429:
            await asyncio.sleep(0.02)

    told, errors = await outputs("--log", "json", "--per-client", "1", ask=ask)
    lines = [json.loads(line) for line in errors.splitlines()]
    kept = [line for line in lines if line["status"] != 429]
    assert [line["outcome"] for line in kept] == [
        "completed",
        "refused",
        "client_gone",
        "completed",
    ]
    assert {line["level"] for line in lines} == {"info"}
    assert [line["status"] for line in kept][:2] == [200, 404]
    assert (kept[0]["images"], kept[0]["output_tokens"]) == (1, 2)
    assert all(line["timestamp"].endswith("Z") for line in lines)
    assert len(lines) > len(kept)
    assert CANARY not in told + errors


async def test_is_silent_while_nothing_fails() -> None:
    """By default only failures are logged; a refusal is none."""

    async def ask(port: int) -> None:
        assert (await answer_to(port, body(), KEY))[0] == 200
        assert (await answer_to(port, b"{", KEY))[0] == 400

    told, errors = await outputs(ask=ask)
    assert errors == ""
    assert CANARY not in told


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
async def test_serves_without_the_standard_streams(closed: str) -> None:
    """As of a service manager that gives it none; the exit status is the same."""
    port, status = free_port(), 0
    shell = ["sh", "-c", f'exec "$@" {closed}', "sh", *CLI, "--port", str(port)]
    process = await asyncio.create_subprocess_exec(*shell, env=ENV)
    try:
        async with asyncio.timeout(120):
            while status != 200 and process.returncode is None:
                await asyncio.sleep(0.1)
                with contextlib.suppress(OSError):
                    status = (await answer_to(port, body()))[0]
            if process.returncode is None:
                process.send_signal(signal.SIGTERM)
            assert (status, await process.wait()) == (200, 0)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


@pytest.mark.parametrize("proxy", [None, "10.9.9.9", "127.0.0.1"])
async def test_believes_no_forwarded_address_unless_configured(
    proxy: str | None, tmp_path: Path
) -> None:
    """Forged addresses and keys share one limit; behind a named proxy, each has one."""
    file = tmp_path / "keys"
    file.write_text("given-out\n")
    known = b"authorization: Bearer given-out"
    options = ["--per-client", "1", "--client-keys", str(file)]
    options += ["--proxy", proxy] if proxy else []

    async def ask(port: int) -> None:
        long = body(stream=True, max_tokens=4000, ignore_eos=True)
        reader, writer = await post(port, long, b"x-forwarded-for: 10.0.0.1", KEY)
        await reader.readuntil(b"data: ")
        made_up = b"x-forwarded-for: 10.0.0.2", b"authorization: Bearer made-up"
        expected = 200 if proxy == "127.0.0.1" else 429
        assert (await answer_to(port, body(), *made_up))[0] == expected
        assert (await answer_to(port, body(), known))[0] == 200
        writer.close()

    _, errors = await outputs(*options, ask=ask)
    assert errors == ""


async def test_tells_an_observer_of_ones_own_of_everything(tmp_path: Path) -> None:
    """With `--observer` a function hears of gates, sessions and requests alike."""
    (tmp_path / "watching.py").write_text(
        "import sys\n\ndef tell(event):\n    print(type(event).__name__, file=sys.stderr)\n"
    )

    async def ask(port: int) -> None:
        assert (await answer_to(port, body(), KEY))[0] == 200

    path = f"{tmp_path}{os.pathsep}{ENV.get('PYTHONPATH', '')}"
    own = {"env": {**ENV, "PYTHONPATH": path}}
    _, errors = await outputs("--observer", "watching:tell", ask=ask, **own)
    assert {"LeaseGranted", "SessionOpened", "RequestEnded"} <= set(errors.split())


async def test_tells_why_there_is_no_engine(capsys: pytest.CaptureFixture[str]) -> None:
    """uvicorn exits where the application does not start: one sentence says why."""
    service: Any = SimpleNamespace(failure=OSError("no room"))
    with (
        pytest.raises(typer.Exit) as caught,
        reporting_failures(service, ServerConfig()),
    ):
        sys.exit(3)
    assert caught.value.exit_code == 1
    assert capsys.readouterr().err == "the engine did not start: no room\n"


async def test_blames_no_address_for_a_limit(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Out of descriptors, any file can be the one that is not opened."""
    service: Any = SimpleNamespace(failure=None)
    error = OSError(errno.EMFILE, "Too many open files", "off.py")
    with pytest.raises(typer.Exit), reporting_failures(service, ServerConfig()):
        raise error
    said = capsys.readouterr().err
    assert said == "cannot start: Too many open files; raise the limit (ulimit -n)\n"
