"""`lifecycle serve` with keys and with a certificate."""

from __future__ import annotations

import asyncio
import signal
import ssl
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from certificates import certificate
from http_kit import ENV, user
from serve_kit import CLI, Served, served
from typer.testing import CliRunner

from lifecycle_engine import ConfigError, ServerConfig, load_config, make_app
from lifecycle_engine.cli import cli

ASK = {"model": "sim", "messages": user("Hi"), "max_tokens": 3}


@pytest.mark.asyncio
async def test_serves_https_to_clients_with_a_key(tmp_path: Path) -> None:
    """By the server's own options; the keys of a file and of an option both count."""
    both, keys = certificate(tmp_path, "127.0.0.1"), tmp_path / "keys"
    keys.write_text("first\nsecond\n")
    options = ("--ssl-certfile", str(both), "--api-key-file", str(keys))
    async with served(*options, "--api-key", "third") as server:
        assert server.address.startswith("https://")
        trust = ssl.create_default_context(cafile=str(both))
        async with httpx.AsyncClient(verify=trust, base_url=server.address) as client:
            for key in ("first", "second", "third"):
                answer = await client.post(
                    "/v1/chat/completions", json=ASK, headers={"x-api-key": key}
                )
                assert answer.status_code == 200
            assert (await client.get("/v1/models")).status_code == 401
            assert (await client.get("/metrics")).status_code == 401
        async with httpx.AsyncClient() as client:  # the operator needs no TLS
            answer = await client.get(f"{server.admin}/metrics")
            assert answer.status_code == 200
        assert await server.exit(signal.SIGTERM) == 0


def test_prints_no_key(tmp_path: Path) -> None:
    """Neither the printed configuration nor an object of it shows a key."""
    options = ["--runner", "sim", "--api-key", "hush-1", "--admin-key", "hush-2"]
    shown = CliRunner().invoke(cli, ["serve", *options, "--print-config"])
    assert shown.exit_code == 0
    assert "# api_keys" in shown.output
    assert "hush" not in shown.output
    config = load_config({"access_api_keys": ["hush-1"]})
    assert config.access.api_keys == ("hush-1",)
    assert "hush" not in repr(config)
    file = tmp_path / "server.toml"
    for wrong in (
        '[access]\napi_keys = ["hush hush"]',
        '[access]\nadmin_keys = {mine = "hush"}',
        'access = "hush"',
    ):
        file.write_text(wrong)
        with pytest.raises(ConfigError) as refused:
            load_config({}, file=file)
        assert "hush" not in str(refused.value)


def config_of(**options: object) -> ServerConfig:
    """A simulated server with these options."""
    return load_config({"model_runner": "sim", **options})


def test_refuses_to_start_without_what_it_should_ask_for(tmp_path: Path) -> None:
    """A file without a key would let all in; a certificate is read at the start."""
    empty = tmp_path / "empty"
    empty.write_text("\n")
    with pytest.raises(ConfigError, match="holds no key"):
        make_app(config_of(access_api_key_file=str(empty)))
    with pytest.raises(ConfigError, match="key of no certificate"):
        make_app(config_of(http_ssl_keyfile=str(empty)))
    for wrong in (empty, tmp_path / "none"):
        with pytest.raises(ConfigError, match="cannot be served"):
            make_app(config_of(http_ssl_certfile=str(wrong)))


@pytest.mark.asyncio
async def test_says_that_descriptors_are_few() -> None:
    """A limit that leaves few connections is named at the start, with the remedy."""
    limited = 'ulimit -n 300; exec "$@"'
    argv = [*CLI, "serve", "--runner", "sim", "--port", "0"]
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        "sh", "-c", limited, "sh", *argv, stdout=pipe, stderr=pipe, env=ENV
    )
    try:
        async with asyncio.timeout(120):
            assert process.stderr is not None
            said = (await process.stderr.readline()).decode()
        assert "limited to 300, which leaves 44 for connections" in said
        assert "ulimit -n" in said
    finally:
        process.terminate()
        await process.communicate()


@asynccontextmanager
async def https(folder: Path, *options: str) -> AsyncIterator[tuple[Served, Any]]:
    """A server of three connections, and a client that trusts it and tries again."""
    both = certificate(folder, "127.0.0.1")
    trust = ssl.create_default_context(cafile=str(both))
    options = (*options, "--ssl-certfile", str(both), "--max-connections", "3")
    # On a busy machine, a handshake of its own may take longer than the limit.
    again = httpx.AsyncHTTPTransport(verify=trust, retries=6)
    async with (
        served(*options) as server,
        httpx.AsyncClient(transport=again, base_url=server.address) as client,
    ):
        yield server, client


async def silent(server: Served, stack: ExitStack) -> asyncio.StreamReader:
    """A connection that begins to shake hands, and goes no further."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    stack.callback(writer.close)
    writer.write(b"\x16\x03\x01")
    return reader


async def ended(reader: asyncio.StreamReader) -> None:
    """Return when the server has cut a connection."""
    async with asyncio.timeout(50):  # by itself, an event loop allows 60 s
        with suppress(ConnectionError):
            assert await reader.read() == b""


@pytest.mark.asyncio
async def test_counts_handshakes_as_connections(tmp_path: Path) -> None:
    """One too many is cut at once, and none delays the exit."""
    async with https(tmp_path, "--header-timeout", "600") as (server, _):
        with ExitStack() as stack:
            held = [await silent(server, stack) for _ in range(3)]
            await ended(await silent(server, stack))
            assert not any(reader.at_eof() for reader in held)
            assert await server.exit(signal.SIGTERM, within=50) == 0


@pytest.mark.asyncio
async def test_ends_handshakes_in_the_time_of_a_head(tmp_path: Path) -> None:
    """Then others are served again."""
    async with https(tmp_path, "--header-timeout", "1") as (server, client):
        with ExitStack() as stack:
            for reader in [await silent(server, stack) for _ in range(3)]:
                await ended(reader)
        assert (await client.get("/health")).status_code == 200
        assert await server.exit(signal.SIGTERM) == 0
