"""The operator's listener of `lifecycle serve`: where it is, and who gets there."""

from __future__ import annotations

import asyncio
import signal
import socket
import stat
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from http_kit import ENV, user
from serve_kit import CLI, Served, served

from lifecycle_engine import ConfigError, load_config, make_app
from lifecycle_engine.config import HttpConfig
from lifecycle_engine.server.listener import operating
from lifecycle_engine.server.uvicorn_protocol import ConnectionLimits

pytestmark = pytest.mark.asyncio
PATHS = ("/metrics", "/_lifecycle", "/_lifecycle/status", "/_lifecycle/requests")
LONG = {"model": "sim", "messages": user("Hi"), "max_tokens": 4000, "stream": True}
LONG |= {"ignore_eos": True}


def viewer(server: Served, **more: Any) -> httpx.AsyncClient:
    """A client of the operator's listener."""
    if server.admin.startswith("unix:"):
        more["transport"] = httpx.AsyncHTTPTransport(uds=server.admin[5:])
        return httpx.AsyncClient(base_url="http://server", timeout=60, **more)
    return httpx.AsyncClient(base_url=server.admin, timeout=60, **more)


async def test_shows_operators_pages_apart_from_clients() -> None:
    """A proxy on the machine reaches the public address alone, as this client does."""
    async with served() as server:
        assert server.admin != server.address
        async with httpx.AsyncClient(base_url=server.address, timeout=60) as client:
            for path in PATHS:
                assert (await client.get(path)).status_code == 404
            for path in ("cancel", "holders", "requests/any/cancel"):
                answer = await client.post(f"/_lifecycle/{path}", json={})
                assert answer.status_code == 404
        async with viewer(server) as client:
            for path in PATHS:
                assert (await client.get(path)).status_code == 200
            # Nothing of the API: a forgotten firewall shows no more than it must.
            assert (await client.get("/v1/models")).status_code == 404
        assert await server.exit(signal.SIGTERM) == 0


async def test_serves_operator_on_a_socket_of_one_user(tmp_path: Path) -> None:
    """Only this user may connect; the socket goes with the server."""
    path = tmp_path / "operator"
    abandoned = socket.socket(socket.AF_UNIX)
    abandoned.bind(str(path))
    abandoned.close()  # as a server that was killed leaves it
    async with served("--admin-listen", f"unix:{path}") as server:
        assert server.admin == f"unix:{path}"
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        async with viewer(server) as client:
            assert (await client.get("/_lifecycle/status")).json()["ready"]
        assert b"in use" in await refusal("--admin-listen", f"unix:{path}")
        async with viewer(server) as client:  # which is still its own
            assert (await client.get("/_lifecycle/status")).json()["ready"]
        assert await server.exit(signal.SIGTERM) == 0
    assert not path.exists()


async def test_leaves_the_socket_of_its_successor(tmp_path: Path) -> None:
    """That may have come while this one, which had stopped to listen, was ending."""
    path, limits = tmp_path / "operator", ConnectionLimits()
    with ExitStack() as later:
        with operating(None, path, limits) as server:
            assert server is not None
            await server.start()
            await server.stop()
            later.enter_context(operating(None, path, limits))
        assert path.exists()
    assert not path.exists()


async def test_serves_operator_until_the_drain_is_over() -> None:
    """The drain is seen, no viewer delays the exit, and then the port is free."""
    async with served() as server, viewer(server) as client:
        events = client.stream("GET", "/_lifecycle/events")
        api = httpx.AsyncClient(base_url=server.address, timeout=60)
        chat = api.stream("POST", "/v1/chat/completions", json=LONG)
        async with api, chat as answer, asyncio.timeout(120):
            lines = answer.aiter_lines()
            await anext(lines)
            server.process.send_signal(signal.SIGTERM)
            while (await client.get("/_lifecycle/status")).json()["ready"]:
                pass
            async with events as shown:
                await anext(shown.aiter_lines())
                server.process.send_signal(signal.SIGINT)  # ends the drain
                assert await server.exit() == 0
        with pytest.raises(httpx.ConnectError):
            await client.get("/_lifecycle/status")


async def test_serves_no_operator_where_it_is_off() -> None:
    """Then its pages are nowhere."""
    async with served("--admin-listen", "off") as server:
        async with httpx.AsyncClient(base_url=server.address) as client:
            for path in PATHS:
                assert (await client.get(path)).status_code == 404
        assert await server.exit(signal.SIGTERM) == 0


async def test_asks_the_operator_for_an_admin_key(tmp_path: Path) -> None:
    """Where there are any, by option or file; clients' keys are none."""
    file = tmp_path / "admin_key"
    file.write_text("filed\n")
    keys = ("--api-key", "theirs", "--admin-key", "mine", "--admin-key-file", str(file))
    async with served(*keys) as server, viewer(server) as client:
        for key, status in (("mine", 200), ("filed", 200), ("theirs", 401), ("", 401)):
            for path in PATHS:
                answer = await client.get(path, headers={"x-api-key": key})
                assert answer.status_code == status
        assert await server.exit(signal.SIGTERM) == 0


async def refusal(*options: str) -> bytes:
    """What `lifecycle serve` says when it does not start."""
    process = await asyncio.create_subprocess_exec(
        *[*CLI, "serve", "--runner", "sim", "--port", "0", *options],
        stderr=asyncio.subprocess.PIPE,
        env=ENV,
    )
    async with asyncio.timeout(120):
        _, errors = await process.communicate()
    assert process.returncode == 1
    assert b"Traceback" not in errors
    return errors


@contextmanager
def taken() -> Iterator[str]:
    """An address that another process listens on."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"127.0.0.1:{listener.getsockname()[1]}"


async def test_names_the_address_that_is_taken() -> None:
    """The operator's and its option, not that of clients."""
    with taken() as address:
        errors = (await refusal("--admin-listen", address)).decode()
    assert f"cannot listen on {address} (--admin-listen)" in errors
    assert "in use" in errors
    assert "off" in errors


@pytest.mark.parametrize(
    ("port", "given", "expected"),
    [
        (8000, None, ("127.0.0.1", 18000)),
        (0, None, ("127.0.0.1", 0)),
        (65535, None, ("127.0.0.1", 55535)),
        (8000, "[::1]:9", ("::1", 9)),
        (8000, "off", None),
    ],
)
async def test_listens_for_the_operator_on_this_machine(
    port: int, given: str | None, expected: tuple[str, int] | None
) -> None:
    """By default at the next port, wherever clients are listened for."""
    options = {"http_host": "0.0.0.0", "http_port": port, "http_admin_listen": given}
    assert load_config(options).http.operator_address == expected


@pytest.mark.parametrize(
    "address", ["0.0.0.0:9", "[::]:9", "10.0.0.1:9", "a.example:9"]
)
async def test_refuses_to_show_requests_to_other_machines(
    address: str, tmp_path: Path
) -> None:
    """Without an admin key, which is the only way in from elsewhere."""
    options = {"model_runner": "sim", "http_admin_listen": address}
    with pytest.raises(ConfigError, match="--admin-key"):
        make_app(load_config(options))
    make_app(load_config({**options, "access_admin_keys": ["key"]}))
    empty = tmp_path / "empty"
    empty.touch()
    with pytest.raises(ConfigError, match="--admin-key-file: .*holds no key"):
        make_app(load_config({**options, "access_admin_key_file": str(empty)}))


@pytest.mark.parametrize(
    "address", ["8001", ":8001", "unix:", "::1:8001", "127.0.0.1:70000", "a:b", "on"]
)
async def test_refuses_what_is_no_address(address: str) -> None:
    """The value and the forms that there are get named."""
    with pytest.raises(ConfigError, match="give"):
        load_config({"http_admin_listen": address})


async def test_gives_the_engine_no_key() -> None:
    """Keys of the environment are read, and stay with the server."""
    keys = {
        "LIFECYCLE_API_KEYS": "theirs-7",
        "LIFECYCLE_ACCESS_ADMIN_KEY": "mine-7",
    }
    async with served(env=keys) as server:
        async with viewer(server, headers={"x-api-key": "mine-7"}) as client:
            status = (await client.get("/_lifecycle/status")).json()
        environment = Path(f"/proc/{status['engine']['pid']}/environ").read_bytes()
        assert b"PYTHONPATH" in environment
        assert b"theirs-7" not in environment
        assert b"mine-7" not in environment
        assert await server.exit(signal.SIGTERM) == 0


@pytest.mark.parametrize(
    ("options", "warned"),
    [
        (("--host", "0.0.0.0"), True),
        (("--host", "0.0.0.0", "--api-key", "theirs"), False),
        (("--host", "127.0.0.1"), False),
    ],
)
async def test_says_that_no_key_is_asked_for(
    options: tuple[str, ...], warned: bool
) -> None:
    """Where other machines may reach the server; in one line, with the remedy."""
    async with served(*options, quiet=False) as server:
        assert await server.exit(signal.SIGTERM) == 0
        errors = (await server.process.stderr.read()).decode()
    assert errors.count("\n") == warned
    assert ("--api-key-file" in errors) == warned


async def test_starts_where_the_next_port_is_taken() -> None:
    """Another server's, or that of the next of several of ours; the line says so."""
    with free_pair() as (port, next_port), socket.create_server(next_port):
        async with served("--port", str(port)) as server:
            assert not server.admin.endswith(f":{next_port[1]}")
            assert server.said.startswith(f"port {next_port[1]} is taken; ")
            async with viewer(server) as client:
                assert (await client.get("/_lifecycle/status")).json()["ready"]
            assert await server.exit(signal.SIGTERM) == 0


@contextmanager
def free_pair() -> Iterator[tuple[int, tuple[str, int]]]:
    """A free port, and the operator's address beside it, which is free, too."""
    for _ in range(100):
        with suppress(OSError), socket.create_server(("127.0.0.1", 0)) as first:
            port = first.getsockname()[1]
            address = HttpConfig(port=port).operator_address
            assert isinstance(address, tuple)
            socket.create_server(address).close()
            break
    yield port, address


async def test_does_not_wait_for_a_socket_whose_server_hangs(tmp_path: Path) -> None:
    """Nobody accepts there, and it has no room for another connection."""
    path = tmp_path / "operator"
    with socket.socket(socket.AF_UNIX) as hanging, ExitStack() as clients:
        hanging.bind(str(path))
        hanging.listen(0)
        for _ in range(3):
            client = clients.enter_context(socket.socket(socket.AF_UNIX))
            client.setblocking(False)
            client.connect_ex(str(path))
        assert b"in use" in await refusal("--admin-listen", f"unix:{path}")


async def test_names_the_paths_that_it_has() -> None:
    """None of those of clients, which are elsewhere."""
    async with served() as server, viewer(server) as client:
        for path in ("/", "/v1/models", "/_lifecycle/none"):
            message = (await client.get(path)).json()["error"]["message"]
            assert "/_lifecycle/status" in message
            assert "/v1" not in message
            assert "--admin-listen" not in message
        assert await server.exit(signal.SIGTERM) == 0
