"""`lifecycle check` finds the faults of real servers, and no others."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import errno
import functools
import gc
import itertools
import json
import os
import resource
import shlex
import socket
import ssl
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import anyio.to_process
import anyio.to_thread
import pytest
from certificates import certificate
from ports import free_port

pytest.importorskip("psutil")
pytest.importorskip("typer")

import psutil

from lifecycle_tools.check import Finding, Report
from lifecycle_tools.check.client import Address, Response, ask
from lifecycle_tools.check.leaving import PHASES, Sign, judge_turns
from lifecycle_tools.check.neighbours import (
    ATTACKS,
    Attack,
    beside,
    judge,
    run_attack,
)
from lifecycle_tools.check.overload import burst
from lifecycle_tools.check.target import CannotCheck, Settings, Target

SERVER = Path(__file__).resolve().parents[1] / "kit" / "checked_server.py"
# Requests that the server works on at once.
LIMIT = 4
CHECK = "from lifecycle_tools import main; main()"


@contextlib.contextmanager
def serving(fault: str) -> Iterator[tuple[str, int]]:
    """Yield the URL and the process id of a server with that fault."""
    port = free_port()
    process = subprocess.Popen([sys.executable, SERVER, str(port), fault])
    try:
        until = time.monotonic() + 120
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), 5).close()
                break
            except OSError:
                assert process.poll() is None and time.monotonic() < until
                time.sleep(0.05)
        yield f"http://127.0.0.1:{port}", process.pid
    finally:
        process.kill()
        process.wait()


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command `lifecycle`."""
    return subprocess.run(
        [sys.executable, "-c", CHECK, *arguments],
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )


def checked(
    fault: str, folder: Path, *options: str
) -> tuple[int, dict[str, Finding], str]:
    """Check a server; return the exit status, the findings by name, and the table."""
    file = folder / "report.json"
    with serving(fault) as (url, pid):
        of = ["--pid", str(pid)] if options == FAULTS else []
        # On a busy machine, all takes longer.
        of += ["--seconds", "120"]
        done = run("check", url, *of, "--json", str(file), *options)
    assert done.returncode in (0, 1), done.stderr
    report = Report.read(file)
    assert report.failed == (done.returncode == 1)
    return done.returncode, {each.id: each for each in report.findings}, done.stdout


# The work of its requests lasts for some seconds.
FAULTS = "--only", "leave.unstreamed", "--only", "bomb.pixels", "--tokens", "400"
FAULTS += "--turns", "1"


def test_finds_what_a_careless_server_does(tmp_path):
    """Work without a client fails, by its CPU time; a decoded bomb, by its memory."""
    status, found, table = checked("careless", tmp_path, *FAULTS)
    assert status == 1
    assert found["leave.unstreamed"].verdict == found["bomb.pixels"].verdict == "fail"
    assert "CPU" in found["leave.unstreamed"].seen
    assert "more than 128 MiB" in found["bomb.pixels"].because
    assert "leave.unstreamed" in table


def test_passes_a_careful_server(tmp_path):
    """A server passes that ends work without a client, and refuses a bomb unread."""
    status, found, _ = checked("none", tmp_path, *FAULTS)
    verdicts = {name: each.verdict for name, each in found.items()}
    assert (status, verdicts) == (0, dict.fromkeys(verdicts, "pass"))
    assert len(verdicts) == 2


OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}"


def found_in_a_burst(answers: Iterator[bytes], concurrency: int) -> dict[str, Finding]:
    """Overload a server that gives these answers; return the findings by name."""

    async def answer(stream: Any) -> None:
        async with stream:
            await stream.receive()
            await stream.send(next(answers))

    async def both() -> list[Finding]:
        listener = await anyio.create_tcp_listener(local_host="127.0.0.1", backlog=1024)
        port = listener.extra(anyio.abc.SocketAttribute.local_port)
        address = Address.parse(f"http://127.0.0.1:{port}")
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(listener.serve, answer)
            found = await burst(Target(address, Settings(concurrency=concurrency)))
            tasks.cancel_scope.cancel()
        await listener.aclose()
        return found

    return {each.id: each for each in anyio.run(both)}


def test_sends_more_until_some_are_refused():
    """A server with much room is judged, too."""
    error = b'{"error": {"message": "full"}}'
    refusal = b"HTTP/1.1 503 Busy\r\nretry-after: 1\r\ncontent-length: %d\r\n\r\n%b"
    refusals = itertools.repeat(refusal % (len(error), error))
    found = found_in_a_burst(itertools.chain([OK] * 100, refusals), 16)
    assert found["overload.status"].sent == "256 requests at once"
    assert found["overload.retry_after"].seen == "236 of 236 refusals"
    assert {each.verdict for each in found.values()} == {"pass"}


def test_claims_nothing_without_a_refusal(monkeypatch):
    """Of as many requests as there are descriptors for, nothing about refusals."""
    monkeypatch.setattr(resource, "getrlimit", lambda _: (264, 264))
    found = found_in_a_burst(itertools.repeat(OK), 64)
    assert found["overload.status"].sent == "200 requests at once"
    assert found["overload.status"].verdict == "pass"
    assert found["overload.retry_after"].verdict == "not observable"


def sign(left: float, *, latency: bool = False) -> Sign:
    """What one turn saw: more than half of what is seen with clients that stay."""
    text = "next answer in {} s (stayed {})" if latency else "CPU {} s/s (stayed {})"
    return Sign(text, left, 1.0, works=left > 0.5)


@pytest.mark.parametrize(
    ("turns", "verdict", "seen"),
    [
        ([0.9, 0.8, 1.0], "fail", "CPU 0.80 to 1.00 s/s (stayed 1.00)"),
        ([0.0, 0.1, 0.0], "pass", "CPU 0.00 to 0.10 s/s (stayed 1.00)"),
        ([0.0, 0.9, 0.0], "too noisy", "CPU 0.00 to 0.90 s/s (stayed 1.00)"),
        ([0.0, 0.0, None], "too noisy", "CPU 0.00 s/s (stayed 1.00)"),
        ([None, None, None], "try more --tokens", "no sign of work"),
    ],
)
def test_turns_that_disagree_say_nothing(turns, verdict, seen):
    """A pass or a failure is what was seen each time."""
    signs = [[] if left is None else [sign(left)] for left in turns]
    found = judge_turns(PHASES[-1], signs)
    assert found.seen == seen
    if verdict in ("pass", "fail"):
        assert found.verdict == verdict
    else:
        assert found.verdict == "not observable"
        assert verdict in found.because


def test_one_sign_of_work_is_enough():
    """Where the others say nothing, or show no work."""
    both = [[sign(0.0), sign(1.0, latency=True)]] * 3
    assert judge_turns(PHASES[-1], both).verdict == "fail"
    once = [[sign(0.0), sign(1.0, latency=True)], [sign(0.0)], [sign(0.0)]]
    assert judge_turns(PHASES[-1], once).verdict == "pass"


@pytest.mark.parametrize(
    ("fault", "verdict"), [("refuses-badly", "fail"), ("none", "pass")]
)
def test_judges_refusals(fault, verdict, tmp_path):
    """Refusals without Retry-After, or without the API's error object, fail."""
    options = "--only", "overload", "--concurrency", "16"
    _, found, _ = checked(fault, tmp_path, *options)
    verdicts = {name: each.verdict for name, each in found.items()}
    assert verdicts == {
        "overload.status": "pass",
        "overload.retry_after": verdict,
        "overload.shape": verdict,
        "overload.prompt": "pass",
    }


def test_finds_that_one_client_shuts_the_others_out(tmp_path):
    """Where bodies are read one after another, slow ones keep all others waiting."""
    file = tmp_path / "report.json"
    with serving("one-at-a-time") as (url, _):
        options = "--only", "neighbours.slow_bodies", "--seconds", "1"
        done = run("check", url, *options, "--json", str(file))
    assert done.returncode == 1, done.stderr
    (found,) = Report.read(file).findings
    assert found.verdict == "fail"
    assert "of 10 not served" in found.seen  # one may be in time
    assert found.because == "A client keeps others from being served at all."


@pytest.mark.parametrize("name", ["uploads", "slow_readers", "pictures", "flood"])
def test_serves_a_small_client_beside_each_attack(name):
    """The attackers run in a process of their own, and are gone afterwards."""
    with serving("none") as (url, pid):
        address = Address.parse(url)
        settings = Settings(seconds=60, tokens=8)
        attack = next(each for each in ATTACKS if each.name == name)
        target = Target(address, settings)
        small = dataclasses.replace(attack, clients=LIMIT - 1)
        found = anyio.run(functools.partial(beside, target, attack=small, requests=10))
        assert found.id == f"neighbours.{name}" and "not served" not in found.seen
        children = psutil.Process().children(recursive=True)
        assert [each.pid for each in children] == [pid]


@pytest.mark.parametrize(
    ("beside", "verdict", "seen"),
    [
        ([0.024] * 2, "pass", "p99 10 ms alone, 24 ms beside it: 1.9 times"),
        ([0.027] * 2, "fail", "p99 10 ms alone, 27 ms beside it: 2.2 times"),
        ([0.01] * 98 + [0.5] * 2, "fail", "500 ms beside it: 49.5 times"),
        ([0.01] * 99 + [None], "fail", "1 of 100 not served"),
    ],
)
def test_judges_a_neighbour_by_its_slowest_requests(beside, verdict, seen):
    """By the p99, and by whether each request was served."""
    attack = Attack("uploads", "sent", 1, 2.0)
    found = judge(attack, [0.01] * 100, beside, 15.0)
    assert found.verdict == verdict and seen in found.seen


def test_asks_as_another_client():
    """From another address of this host, or with another key in place of the first."""
    local = Address.parse("http://127.0.0.1:1", (("Authorization", "Bearer mine"),))
    assert Settings().neighbour(local).source == "127.0.0.2"
    keyed = Settings(neighbour_key="other").neighbour(local)
    assert keyed.headers == (("Authorization", "Bearer other"),)
    assert keyed.source is None


@pytest.mark.parametrize("url", ["http://192.0.2.1", "http://[::1]:8000"])
def test_refuses_to_be_two_clients_from_one_address(url):
    """The server would take both for one, and the verdict would be about that."""
    with pytest.raises(CannotCheck, match="another with --neighbour-key"):
        Settings().neighbour(Address.parse(url))


def test_says_nothing_of_an_attack_on_a_client_that_is_not_served_alone():
    """As on a host without the second address, or of a server that went down before."""
    target = Target(Address.parse(f"http://127.0.0.1:{free_port()}"), Settings())
    found = anyio.run(functools.partial(beside, target, attack=ATTACKS[0], requests=10))
    assert found.verdict == "not observable"
    assert found.seen == "10 of 10 not served alone"
    assert "serve 127.0.0.2, too" in found.because


def test_other_client_asks_the_same_server():
    """Another address of this host may be another server."""
    address = Settings().neighbour(Address.parse("http://127.0.0.3:1"))
    with socket.create_server(("127.0.0.3", 0)) as server:
        address = dataclasses.replace(address, port=server.getsockname()[1])

        async def connect() -> None:
            await (await address.connect()).aclose()

        anyio.run(connect)
        connection, (source, _) = server.accept()
        connection.close()
        assert source == "127.0.0.2"


def test_a_handshake_that_breaks_off_is_no_response():
    """A server may go down at any moment."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = Address.parse(f"https://127.0.0.1:{server.getsockname()[1]}")
        ask_it = functools.partial(ask, address, b"", timeout=30)

        async def both() -> Response:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(anyio.to_thread.run_sync, hang_up)
                return await ask_it()

        def hang_up() -> None:
            connection, _ = server.accept()
            connection.recv(1)
            connection.shutdown(socket.SHUT_WR)
            connection.close()

        assert anyio.run(both).status == 0


def test_needs_enough_open_files(tmp_path):
    """A flood of fewer requests than the table says would be another check."""
    file = tmp_path / "report.json"
    options = "--only", "neighbours.flood", "--json", str(file)
    with serving("none") as (url, _):
        check = shlex.join([sys.executable, "-c", CHECK, "check", url, *options])
        limited = ["sh", "-c", f"ulimit -n 256; exec {check}"]
        done = subprocess.run(limited, capture_output=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    (found,) = Report.read(file).findings
    assert found.verdict == "not observable"
    assert found.seen == "a limit of 256 open files"


def test_uploads_are_as_long_as_they_say():
    """A server must not find the beginning of another request behind them."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = Address.parse(f"http://127.0.0.1:{server.getsockname()[1]}")
        attack = next(each for each in ATTACKS if each.name == "uploads")
        small = dataclasses.replace(attack, clients=1)
        seen = []

        def read() -> None:
            connection, _ = server.accept()
            with connection, connection.makefile("rb") as file:
                head = b"".join(iter(file.readline, b"\r\n"))
                length = int(head.lower().split(b"content-length: ")[1].split()[0])
                while length and (data := file.read1(min(length, 2**20))):
                    length -= len(data)
                connection.settimeout(0.5)
                with contextlib.suppress(TimeoutError):
                    seen.append(connection.recv(1))
                seen.append(length)

        async def both() -> None:
            async with anyio.create_task_group() as tasks:
                attacking = functools.partial(
                    anyio.to_process.run_sync, cancellable=True
                )
                tasks.start_soon(attacking, run_attack, address, Settings(), small)
                await anyio.to_thread.run_sync(read)
                tasks.cancel_scope.cancel()

        anyio.run(both)
        assert seen == [0]


class SocketOfMacOS(socket.socket):
    """A socket that takes no larger segments than are the default there."""

    def setsockopt(self, level, name, value):
        """Set an option."""
        if (level, name) == (socket.IPPROTO_TCP, socket.TCP_MAXSEG) and value > 512:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        super().setsockopt(level, name, value)


@pytest.mark.parametrize("kind", [socket.socket, SocketOfMacOS])
def test_slow_readers_keep_a_server_from_sending(kind, monkeypatch):
    """In megabytes of buffers, a whole stream would be gone at once."""
    monkeypatch.setattr(socket, "socket", kind)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = Address.parse(f"http://127.0.0.1:{server.getsockname()[1]}")
        with address.connect_narrow(), server.accept()[0] as connection:
            connection.settimeout(0.5)
            sent = 0
            with contextlib.suppress(TimeoutError):
                while sent < 2**20:
                    sent += connection.send(b" " * 200)
    assert 0 < sent < 2**19


def test_attack_ends_with_the_check():
    """However the check ends: nobody would look for an attacker that is left."""
    with serving("none") as (url, _):
        argv = [sys.executable, "-c", CHECK, "check", url, "--neighbours"]
        with subprocess.Popen(argv, stderr=subprocess.DEVNULL) as check:
            process = psutil.Process(check.pid)
            until = time.monotonic() + 60
            while not (attackers := process.children()):
                assert time.monotonic() < until and check.poll() is None
                time.sleep(0.02)
            while not attackers[0].net_connections():
                assert time.monotonic() < until
                time.sleep(0.02)
            check.kill()
        left = psutil.wait_procs(attackers, timeout=60)[1]
        for each in left:
            each.kill()
        assert left == []


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("no-api", "404 at /v1/chat/completions: it has no such API"),
        ("other-api", "has no 'choices': this is no such API"),
        ("needs-key", "give a key with --api-key"),
    ],
)
def test_says_why_a_server_cannot_be_checked(fault, said):
    """What serves no honest request is one sentence and status 2, without a table."""
    with serving(fault) as (url, _):
        done = run("check", url)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1 and said in done.stderr
    assert done.stdout == ""


def test_says_that_no_server_is_there():
    """A port that nothing listens on is one sentence and status 2."""
    port = free_port()
    done = run("check", f"http://127.0.0.1:{port}")
    assert done.returncode == 2
    said = f"no server accepts connections at 127.0.0.1 port {port}"
    assert len(done.stderr.splitlines()) == 1 and said in done.stderr


def test_says_that_a_certificate_is_not_trusted(tmp_path):
    """Of a server that has signed its own, and how to trust it."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate(tmp_path, "127.0.0.1"))
    with socket.create_server(("127.0.0.1", 0)) as server:

        def shake_hands() -> None:
            connection, _ = server.accept()
            with contextlib.suppress(OSError), connection:
                context.wrap_socket(connection, server_side=True).close()

        thread = threading.Thread(target=shake_hands)
        thread.start()
        done = run("check", f"https://127.0.0.1:{server.getsockname()[1]}")
        thread.join(60)
    assert done.returncode == 2
    assert "not trusted" in done.stderr and "SSL_CERT_FILE" in done.stderr


def test_runs_one_attack_of_neighbours(tmp_path):
    """``--only`` narrows ``--neighbours``."""
    file = tmp_path / "report.json"
    options = "--neighbours", "--only", "slow_b", "--seconds", "1"
    with serving("one-at-a-time") as (url, _):
        run("check", url, *options, "--json", str(file))
    assert [each.id for each in Report.read(file).findings] == [
        "neighbours.slow_bodies"
    ]


# anyio leaves the pipes of a worker that was killed. Where the loop closes before it hears
# of the death, as on a busy machine, asyncio cannot close them.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("once", ["it starts", "it attacks"])
def test_says_that_the_attack_was_killed(once):
    """An attack that is no more has no verdict, and ends no check."""
    with serving("none") as (url, _):
        settings = Settings(seconds=60, tokens=8)
        target = Target(Address.parse(url), settings)
        small = dataclasses.replace(ATTACKS[0], clients=1)

        def kill() -> None:
            until = time.monotonic() + 60
            while time.monotonic() < until:
                for each in psutil.Process().children(recursive=True):
                    with contextlib.suppress(psutil.Error):
                        if "anyio.to_process" in each.cmdline() and (
                            once == "it starts" or each.net_connections()
                        ):
                            each.kill()
                            return
                time.sleep(0.001)

        async def both() -> Finding:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(anyio.to_thread.run_sync, kill)
                return await beside(target, attack=small, requests=20)

        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)
            found = anyio.run(both)
            gc.collect()
    assert (found.verdict, found.seen) == (
        "not observable",
        "the attack's process ended",
    )


def test_server_that_stays_busy_fails(monkeypatch):
    """The next attack would be compared with what this one has left."""

    async def busy(_: Target) -> bool:
        return False

    monkeypatch.setattr(Target, "settle", busy)
    with serving("none") as (url, _):
        target = Target(Address.parse(url), Settings(seconds=60, tokens=8))
        small = dataclasses.replace(ATTACKS[0], clients=1)
        found = anyio.run(functools.partial(beside, target, attack=small, requests=10))
    assert found.verdict == "fail"
    assert found.because.startswith("The server does not come to rest")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["ftp://here"], "no http:// or https:// URL"),
        (["http://192.0.2.1"], "--i-may-test-this-server"),
        (["http://127.0.0.1", "--pid", "4194305"], "no such process"),
        (["http://127.0.0.1", "--only", "nothing"], "no check has a name"),
        (["http://127.0.0.1", "--body", "[]"], "takes a JSON object"),
    ],
)
def test_refuses_wrong_arguments(arguments, said):
    """A wrong argument ends with status 2 before anything is sent."""
    done = run("check", *arguments)
    assert done.returncode == 2
    assert said in " ".join(done.stderr.replace("│", " ").split())


def test_compares_reports(tmp_path):
    """Reports become one table with a column for each server; other files are refused."""
    files = []
    for name, verdict in (("one", "pass"), ("two", "fail")):
        found = Finding("overload.status", "sent", "seen", verdict, "because")
        report = Report(name, "2026-01-01", "0", {}, (found,))
        files.append(tmp_path / f"{name}.json")
        files[-1].write_text(report.to_json())
    done = run("check-compare", *map(str, files))
    assert "| check | one | two |" in done.stdout
    assert "| overload.status | pass: seen | fail: seen |" in done.stdout
    files[0].write_text(json.dumps({}))
    assert run("check-compare", str(files[0])).returncode == 2


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_reads_metrics_from_an_address_of_their_own() -> None:
    """A server may keep them from its clients."""
    text = b'lifecycle_engine_requests_running{model="m"} 3\n'

    async def answer(
        reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        assert (await reader.readline()).startswith(b"GET /metrics ")
        head = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n"
        writer.write(head % len(text) + text)
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        metrics = Address.parse(f"http://127.0.0.1:{port}", ())
        nowhere = Address.parse(f"http://127.0.0.1:{free_port()}", ())
        assert await Target(nowhere, Settings(metrics=metrics)).running() == 3
