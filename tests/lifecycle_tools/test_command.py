"""The command `lifecycle`: what its subcommands import, and what they say is missing."""

import subprocess
import sys

import pytest

MAIN = "from lifecycle_tools import main; main()"
HEAVY = {"uvicorn", "textual", "psutil", "torch", "lifecycle_engine"}


def run(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a fresh interpreter."""
    return subprocess.run(
        [sys.executable, "-c", script, *arguments],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


@pytest.mark.parametrize(
    ("module", "needed"),
    [
        ("lifecycle_tools", set()),
        ("lifecycle_tools.top", {"textual"}),
        ("lifecycle_tools.check.command", set()),
        ("lifecycle_tools.proxy.command", set()),
    ],
)
def test_imports_only_what_a_tool_needs(module: str, needed: set[str]) -> None:
    """No tool imports what another one needs: `lifecycle top` has no web server."""
    loaded = f"import sys, {module}\nprint(*({HEAVY} & {{*sys.modules}}))"
    done = run(loaded)
    assert done.returncode == 0, done.stderr
    assert set(done.stdout.split()) == needed


@pytest.mark.parametrize("command", ["serve", "doctor", "top", "check", "proxy"])
def test_has_every_tool_as_a_subcommand(command: str) -> None:
    """Each subcommand shows its own help, under the name of the command."""
    done = run(MAIN, command, "--help")
    assert done.returncode == 0, done.stderr
    assert f"lifecycle {command} [OPTIONS]" in " ".join(done.stdout.split())


def test_serves_as_the_command_of_the_engine_does() -> None:
    """`lifecycle serve` passes its options on to the bundled engine."""
    options = ["serve", "--runner", "sim", "--max-waiting", "7", "--print-config"]
    engine = run("from lifecycle_engine.cli import main; main()", *options)
    assert "max_waiting = 7" in engine.stdout, engine.stderr
    done = run(MAIN, *options)
    assert (done.returncode, done.stdout) == (0, engine.stdout)


@pytest.mark.parametrize(
    ("command", "missing", "extra"),
    [
        (["top"], "textual", "tools"),
        (["check", "http://127.0.0.1:9"], "rich", "tools"),
        (["proxy", "--upstream", "http://127.0.0.1:9"], "h11", "tools"),
        (["proxy", "--upstream", "http://127.0.0.1:9"], "uvicorn", "tools"),
        (["proxy", "--upstream", "http://127.0.0.1:9"], "httptools", "tools"),
        (["serve", "--runner", "sim"], "starlette", "engine"),
    ],
)
def test_names_a_missing_extra_in_one_line(
    command: list[str], missing: str, extra: str
) -> None:
    """A subcommand without its extra says what to install, and nothing else."""
    done = run(f"import sys; sys.modules[{missing!r}] = None\n{MAIN}", *command)
    assert done.returncode == 2, done.stderr
    (line,) = done.stderr.splitlines()
    assert missing in line
    assert f'pip install "anyio-lifecycle[{extra}]"' in line


def test_proxy_starts_with_no_metrics_that_nobody_finds(monkeypatch) -> None:
    """Without a page for the registry, the proxy asks for a port of its own."""
    monkeypatch.setenv("LIFECYCLE_METRICS", "server")
    options = ["--upstream", "http://127.0.0.1:9", "--idle-timeout=-1"]
    done = run(MAIN, "proxy", *options)
    assert done.returncode == 2, done.stderr
    assert "LIFECYCLE_METRICS must be a port" in " ".join(done.stderr.split())


def test_top_needs_a_terminal() -> None:
    """In a job without one it ends, where nobody could press a key."""
    done = run(MAIN, "top", "http://127.0.0.1:9")
    assert done.returncode == 2
    assert "needs a terminal" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_top_ends_without_standard_streams() -> None:
    """As of a service manager that gives it none."""
    closed = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", sys.executable, "-c", MAIN]
    done = subprocess.run([*closed, "top"], timeout=60, check=False)
    assert done.returncode == 2
