"""`lifecycle serve` as a process: ready, drained, gone."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import struct
import sys
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest
from http_kit import ENV, answer_to, encoded, post, user
from serve_kit import CLI, served
from typer.testing import CliRunner

from lifecycle_engine.cli import cli, first_steps

pytestmark = pytest.mark.asyncio


async def begin_stream(client: Any, tokens: int) -> Any:
    """A stream that has its first chunk."""
    stream = await client.chat.completions.create(
        model="sim", messages=user("go", encoded()), max_tokens=tokens, stream=True
    )
    await anext(stream)
    return stream


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_exits_cleanly_when_idle(number: int) -> None:
    """An idle server exits with 0 and leaves no process (fault-62)."""
    async with served() as server:
        assert (await answer_to(server.port, ask()))[0] == 200
        assert await server.exit(number) == 0


async def test_serves_from_a_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    """`--engine ray`: pictures, streams and the engine's counters, from two actors."""
    pytest.importorskip("ray", reason="Ray is not installed")
    monkeypatch.setitem(ENV, "RAY_DEFAULT_OBJECT_STORE_MAX_MEMORY_BYTES", str(2**27))
    monkeypatch.setitem(ENV, "RAY_raylet_start_wait_time_s", "120")
    options = ("--engine", "ray", "--replicas", "2")
    # Ray says on starting what it likes.
    async with served(*options, quiet=False) as server, server.client() as client:
        stream = await begin_stream(client, 20)
        chunks = [chunk async for chunk in stream]
        assert chunks[-1].choices[0].finish_reason == "length"
        live = (await client._client.get(f"{server.admin}/_lifecycle/status")).json()
        assert live["engine"]["ready"]
        assert live["engine"]["status"]["ends"] == 1
        assert await server.exit(signal.SIGTERM) == 0


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("127.0.0.1:1", b"no Ray cluster answers at 127.0.0.1:1"),
        ("ray://127.0.0.1:1", b"ray://127.0.0.1:1 is for clients"),
    ],
)
async def test_says_that_there_is_no_cluster(address: str, words: bytes) -> None:
    """In a line, without what it was doing at that moment."""
    pytest.importorskip("ray", reason="Ray is not installed")
    argv = [*CLI, "serve", "--runner", "sim", "--port", "0", "--engine", "ray"]
    process = await asyncio.create_subprocess_exec(
        *[*argv, "--ray-address", address], stderr=asyncio.subprocess.PIPE, env=ENV
    )
    async with asyncio.timeout(120):
        _, errors = await process.communicate()
    assert errors.startswith(b"the engine did not start: " + words)
    assert errors.count(b"\n") == 1
    assert process.returncode == 1


def ask() -> bytes:
    """A short request."""
    return b'{"model":"sim","max_tokens":1,"messages":[{"role":"user","content":"a"}]}'


async def test_lets_streams_finish_and_takes_no_new_ones() -> None:
    """SIGTERM: newcomers are sent away, the stream ends whole (fault-24, fault-61)."""
    async with served("--drain", "600") as server, server.client() as client:
        stream = await begin_stream(client, 200)
        server.process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(120):
            while (await answer_to(server.port, ask()))[0] == 200:
                pass
        status, headers, document = await answer_to(server.port, ask())
        assert status == 503
        assert document["error"]["code"] == "shutting_down"
        assert headers["x-should-retry"] == "false"
        ready = await client._client.get(f"{server.address}/ready")
        assert (ready.status_code, ready.json()) == (503, {"status": "draining"})
        view = await client._client.get(f"{server.admin}/_lifecycle/snapshot")
        assert view.json()["engine"]["health"] == "draining"
        chunks = [chunk async for chunk in stream]
        assert chunks[-1].choices[0].finish_reason == "length"
        assert await server.exit() == 0


async def test_tells_streams_that_outlive_the_drain() -> None:
    """After the deadline streams get an error, and it exits (fault-61, peers-81, peers-82)."""
    async with served("--drain", "0.2") as server, server.client() as client:
        stream = await begin_stream(client, 4000)
        server.process.send_signal(signal.SIGTERM)
        with pytest.raises(openai.APIError) as caught:
            async for _ in stream:
                pass
        assert caught.value.code == "shutting_down"
        assert await server.exit() == 0


async def test_hurries_on_second_interrupt() -> None:
    """A second SIGINT does not wait for the drain (fault-62), and the log says so."""
    async with (
        served("--drain", "600", quiet=False) as server,
        server.client() as client,
    ):
        stream = await begin_stream(client, 4000)
        server.process.send_signal(signal.SIGINT)
        async with asyncio.timeout(120):
            while (await answer_to(server.port, ask()))[0] == 200:
                pass
        server.process.send_signal(signal.SIGINT)
        with pytest.raises(openai.APIError):
            async for _ in stream:
                pass
        assert await server.exit() == 0
        said = (await server.process.stderr.read()).decode()
        assert re.search(r"\d streams? left, for 600 s at most; Ctrl-C again", said)


async def test_hurries_beside_an_engine_that_does_not_answer() -> None:
    """A stream in a stopped engine cannot be ended: the engine is killed (fault-62)."""
    async with (
        served("--drain", "600", quiet=False) as server,
        server.client() as client,
    ):
        stream = await begin_stream(client, 4000)
        psutil.Process(server.process.pid).children()[0].suspend()
        server.process.send_signal(signal.SIGINT)
        async with asyncio.timeout(120):
            while (await client._client.get(f"{server.address}/ready")).is_success:
                pass
        server.process.send_signal(signal.SIGINT)
        with pytest.raises(openai.APIError):
            async for _ in stream:
                pass
        # Given up at once: the drain would take ten minutes.
        assert await server.exit() == 0


async def test_is_killed_by_third_interrupt() -> None:
    """Not even an engine that is stopped keeps it then, nor outlives it (fault-62)."""
    async with (
        served("--drain", "600", quiet=False) as server,
        server.client() as client,
    ):
        stream = await begin_stream(client, 4000)
        psutil.Process(server.process.pid).children()[0].suspend()
        server.process.send_signal(signal.SIGINT)
        async with asyncio.timeout(120):
            while (await client._client.get(f"{server.address}/ready")).is_success:
                pass
        server.process.send_signal(signal.SIGINT)
        with pytest.raises(openai.APIError):
            async for _ in stream:
                pass
        assert await server.exit(signal.SIGINT) == -signal.SIGINT


async def test_answers_a_client_that_is_still_sending() -> None:
    """A body that is under way when the drain begins is not waited for (fault-15)."""
    async with served("--drain", "600", quiet=False) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        head = (
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 99\r\n"
        )
        writer.write(head + b"expect: 100-continue\r\n\r\n")
        async with asyncio.timeout(120):
            assert b"100" in await reader.readuntil(b"\r\n\r\n")  # it is being read
            writer.write(b'{"model')
            server.process.send_signal(signal.SIGTERM)
            answer = await reader.read()
        assert answer.startswith(b"HTTP/1.1 503 ")
        assert b"shutting_down" in answer
        writer.close()
        assert await server.exit() == 0
        (line,) = (await server.process.stderr.read()).splitlines()
        assert b" refused with 503 shutting_down: " in line


async def test_exits_in_time_though_client_never_reads() -> None:
    """A client that stopped reading does not keep the server up."""
    async with served("--drain", "0.2") as server:
        _, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 9"
        )
        await writer.drain()
        assert await server.exit(signal.SIGTERM) == 0
        writer.close()


@pytest.mark.parametrize("stream", ["true", "false"])
async def test_says_nothing_about_clients_that_hang_up(stream: str) -> None:
    """A client that leaves is no error: nothing is written, and the next is served."""
    async with served() as server, server.client() as client:
        body = ask().replace(b'"max_tokens":1', b'"max_tokens":4000,"stream":%s')
        _, writer = await post(server.port, body % stream.encode())
        url = f"{server.admin}/_lifecycle/status"
        async with asyncio.timeout(120):
            while not (await client._client.get(url)).json()["sessions"]["live"]:
                pass
            writer.transport.abort()
            while (await client._client.get(url)).json()["sessions"]["live"]:
                pass
        view = (await client._client.get(url)).json()
        assert view["sessions"]["outcomes"]["client_gone"] == 1
        assert await server.exit(signal.SIGTERM) == 0


@pytest.mark.parametrize("stream", ["true", "false"])
@pytest.mark.parametrize("reset", [True, False])
async def test_detects_a_disconnect_with_pipelined_requests(
    stream: str, reset: bool
) -> None:
    """What runs is ended and what is behind it not begun, without a word (fault-14)."""
    async with served() as server, server.client() as client:
        body = ask().replace(b'"max_tokens":1', b'"max_tokens":4000,"stream":%s')
        body = body % stream.encode()
        head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: here\r\n"
        whole = head + b"content-length: %d\r\n\r\n" % len(body) + body
        _, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(whole)
        url = f"{server.admin}/_lifecycle/status"

        async def sessions() -> Any:
            return (await client._client.get(url)).json()["sessions"]

        async with asyncio.timeout(120):
            while not (await sessions())["live"]:
                pass
            writer.write(whole * 3)
            await writer.drain()
            await client._client.get(f"{server.address}/health")
            if reset:
                writer.transport.abort()
            else:
                writer.close()
            while (await sessions())["live"]:
                pass
        after = await sessions()
        assert (after["opened"], after["outcomes"]["client_gone"]) == (1, 1)
        assert await server.exit(signal.SIGTERM) == 0


async def test_more_slots_than_the_batch_has_let_conversations_rest() -> None:
    """With a batch of one, three people who talk in turns each find their slot again."""
    options = ("--max-batch", "1", "--kv-slots", "3")
    async with served(*options) as server, server.client() as client:
        read = []
        for turn in range(2):
            for name in ("a", "b", "c"):
                answer = await client.chat.completions.create(
                    model="sim",
                    messages=user("hello" + " again" * turn),
                    max_tokens=2,
                    prompt_cache_key=name,
                )
                read.append(answer.usage.prompt_tokens_details.cached_tokens)
        assert read[:3] == [0, 0, 0]
        assert min(read[3:]) >= len("user: hello")
        url = f"{server.admin}/_lifecycle/status"
        engine = (await client._client.get(url)).json()["engine"]["status"]["backend"]
        assert (engine["max_batch"], engine["slots"]) == (1, 3)
        assert engine["slots_evicted"] == 0
        assert await server.exit(signal.SIGTERM) == 0


async def test_admits_as_much_as_the_arena_has() -> None:
    """The gate's bytes are the arena's: who finds it full waits, and nothing is sent."""
    size = 2 * 2**20
    options = ("--arena-bytes", str(size), "--max-batch", "1")
    async with served(*options) as server, server.client() as client:
        url = f"{server.admin}/_lifecycle/status"
        requests = [
            client.chat.completions.create(
                model="sim", messages=user("see", encoded(150, 150)), max_tokens=1
            )
            for _ in range(24)
        ]
        answers = await asyncio.gather(*requests)
        assert len(answers) == 24
        status = (await client._client.get(url)).json()
        assert status["payloads"]["bytes"] == status["arena"]["size"] == size
        assert status["payloads"]["bytes_in_use"] == status["arena"]["used"] == 0
        assert (status["arena"]["refused"], status["arena"]["spilled"]) == (0, 0)
        assert await server.exit(signal.SIGTERM) == 0


@pytest.mark.parametrize(
    "said", [b"hello\r\n\r\n", b"GET / HTTP/1.1\r\na b: c\r\n\r\n"]
)
async def test_says_nothing_about_what_is_no_http(said: bytes) -> None:
    """Any client could otherwise fill the log (fault-19)."""
    async with served() as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(said)
        assert (await reader.read()).startswith(b"HTTP/1.1 400 ")
        writer.close()
        assert await server.exit(signal.SIGTERM) == 0


async def test_says_nothing_about_odd_pictures() -> None:
    """What a picture's tags are like is not the log's business."""
    odd = b"Exif\0\0II*\0\x08\0\0\0" + struct.pack("<H", 50)
    odd += b"".join(struct.pack("<HHII", 40000 + i, 7, 2**20, 8) for i in range(50))
    body = json.dumps(
        {"model": "sim", "messages": user(encoded(kind="JPEG", exif=odd))}
    )
    async with served() as server:
        assert (await answer_to(server.port, body.encode()))[0] == 200
        assert await server.exit(signal.SIGTERM) == 0


async def test_leaves_no_engine_when_killed() -> None:
    """SIGKILL of the server: the engine process goes by itself (fault-31)."""
    async with served() as server:
        assert await server.exit(signal.SIGKILL) == -signal.SIGKILL


async def test_prints_hints_that_work() -> None:
    """With --hints it says how to try it, with its own address and model."""
    async with served("--hints", "--model", "mine") as server:
        text = b""
        while b"Stop it" not in text:
            text += await server.process.stdout.readline()
        assert server.address.encode() in text
        assert b'"model": "mine"' in text
        assert b'api_key="none is needed"' in text
        assert await server.exit(signal.SIGTERM) == 0


@pytest.mark.parametrize(
    ("keyed", "key"), [(True, "YOUR_KEY"), (False, "none is needed")]
)
async def test_hints_have_a_place_for_a_key(*, keyed: bool, key: str) -> None:
    """Where the server asks for keys, both examples send one."""
    text = first_steps("http://a", "mine", keyed=keyed)
    curl, python = text.split("or with")
    assert f'api_key="{key}"' in python
    assert ("-H 'authorization: Bearer YOUR_KEY' \\\n    -H 'content" in curl) == keyed


async def test_says_so_when_port_is_taken() -> None:
    """A port in use is reported on one line, with status 1."""
    async with served() as server:
        argv = [*CLI, "serve", "--runner", "sim", "--port", str(server.port)]
        second = await asyncio.create_subprocess_exec(
            *argv, stderr=asyncio.subprocess.PIPE, env=ENV
        )
        _, errors = await second.communicate()
        assert second.returncode == 1
        assert b"in use" in errors
        assert b"Traceback" not in errors
        assert await server.exit(signal.SIGTERM) == 0


def maps(pid: int) -> str:
    """Return the files that a process has mapped."""
    return Path(f"/proc/{pid}/maps").read_text(encoding="utf-8", errors="replace")


async def test_serves_images_with_torch(tmp_path: Path) -> None:
    """The torch engine answers an image over a checkpoint on disk.

    With steps of fixed shapes, and a slot for one request with images.
    """
    folder = tmp_path / "tiny"
    build = [sys.executable, "-m", "tiny_checkpoint", folder]
    built = await asyncio.create_subprocess_exec(*build, env=ENV)
    assert await built.wait() == 0
    options = ["--checkpoint", str(folder), "--max-batch", "2"]
    options += ["--graphs", "fake", "--bucket", "1", "--bucket", "2"]
    options += ["--media-slots", "1"]
    async with served(*options, runner="torch") as server, server.client() as client:
        stream = await client.chat.completions.create(
            model="tiny",
            messages=user("What is this?", encoded(64, 48, "JPEG")),
            max_tokens=5,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = [chunk async for chunk in stream]
        assert chunks[-1].usage.completion_tokens <= 5
        assert chunks[-2].choices[0].finish_reason in ("stop", "length")
        url = f"{server.admin}/_lifecycle/status"
        status = (await client._client.get(url)).json()
        assert status["payloads"]["slots"] == 1
        # Only the engine needs torch; here it would be memory for nothing.
        assert "libtorch" not in maps(server.process.pid)
        assert "libtorch" in maps(status["engine"]["pid"])
        assert await server.exit(signal.SIGTERM) == 0


async def test_says_in_a_line_which_module_is_missing() -> None:
    """A missing module is named with the extra that brings it, without a traceback."""
    code = "import sys; sys.modules['starlette'] = None; "
    code += "from lifecycle_engine import cli; cli.main()"
    process = await asyncio.create_subprocess_exec(
        *[sys.executable, "-c", code, "serve", "--port", "0", "--runner", "sim"],
        stderr=asyncio.subprocess.PIPE,
        env=ENV,
    )
    async with asyncio.timeout(120):
        _, errors = await process.communicate()
    assert process.returncode
    assert b"pip install" in errors
    assert errors.count(b"\n") == 1, errors


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ([], b"--runner sim simulates a model"),
        (["--checkpoint", "nowhere"], b"--local-dir nowhere"),
        (["--runner", "sim", "--kv-slots", "7"], b"7 cannot hold a batch of 8"),
        (["--runner", "sim", "--graphs", "on"], b"graphs need --runner torch"),
        (["--runner", "sim", "--bucket", "2"], b"2 has no effect without graphs"),
        (["--runner", "sim", "--tp", "2"], b"2 has no effect with --runner sim"),
        *(
            (["--runner", "sim", f"--{name}", value], b"--" + name.encode())
            for name, value in [
                ("max-body", "-1"),
                ("drain", "-1"),
                ("kv-slots", "0"),
                ("max-batch", "0"),
                ("max-length", "-1"),
                ("max-wait", "-1"),
                ("max-waiting", "-1"),
                ("media-slots", "0"),
                ("bytes", "-5"),
                ("port", "99999"),
                ("proxy", "10.0.0.5/8"),
                ("proxy", "proxy.example"),
                ("slots", "-1"),
                ("threads", "0"),
            ]
        ),
    ],
)
async def test_refuses_options_that_make_no_sense(
    options: list[str], words: bytes
) -> None:
    """A wrong option is named, with status 2, before anything is started."""
    settings = {"COLUMNS": "200", "NO_COLOR": "1"}
    result = CliRunner().invoke(cli, ["serve", "--port", "0", *options], env=settings)
    assert result.exit_code == 2, result.output
    assert words in result.output.encode()


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (
            "factory.worker_argv = lambda *_, **__: ['sh', '-c', 'echo no legs; exit 3']",
            b"the engine did not start",
        ),
        (
            "from lifecycle_engine.server.service import Service; Service.running = None",
            b"startup failed",
        ),
    ],
)
async def test_says_why_it_cannot_start(code: str, words: bytes) -> None:
    """A server without an engine says so and ends, and does not serve."""
    code = f"from lifecycle_engine import cli, factory\n{code}\ncli.main()"
    process = await asyncio.create_subprocess_exec(
        *[sys.executable, "-c", code, "serve", "--runner", "sim", "--port", "0"],
        stderr=asyncio.subprocess.PIPE,
        env={**ENV, "COLUMNS": "200"},
    )
    async with asyncio.timeout(120):
        _, errors = await process.communicate()
    assert words in errors
    assert process.returncode not in (0, None)
