"""The doctor finds problems, suggests remedies and changes nothing."""

from __future__ import annotations

import errno
import os
import resource
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from lifecycle_engine.cli import cli

STATES = {"  ok": "fine", "note": "note", " BAD": "bad"}


@dataclass
class Finding:
    """A line of the command, and the remedy on the next one."""

    state: str
    what: str
    found: str
    remedy: str = ""


def examine(*options: str) -> list[Finding]:
    """Return what the command prints."""
    result = CliRunner().invoke(cli, ["doctor", *options])
    findings: list[Finding] = []
    for line in result.stdout.splitlines():
        if line.startswith("      -> "):
            findings[-1].remedy = line.removeprefix("      -> ")
        else:
            what, _, words = line[6:].partition(": ")
            findings.append(Finding(STATES[line[:4]], what, words))
    assert result.exit_code == any(each.state == "bad" for each in findings)
    return findings


def found(what: str) -> Finding:
    """The finding about *what*."""
    return next(each for each in examine() if each.what == what)


def test_has_a_remedy_for_whatever_is_not_fine() -> None:
    """Each reported problem has a remedy."""
    for finding in examine():
        assert (finding.state == "fine") == (not finding.remedy), finding


def test_finds_an_extra_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing package is named, with the command that installs it."""
    version = metadata.version

    def without(name: str) -> str:
        if name == "msgpack":
            raise metadata.PackageNotFoundError
        return version(name)

    monkeypatch.setattr(metadata, "version", without)
    finding = found("extra zmq")
    assert finding.state == "note"
    assert "msgpack" in finding.found
    assert 'pip install "anyio-lifecycle[zmq]"' in finding.remedy


def test_knows_every_extra() -> None:
    """Each optional dependency is checked."""
    document = Path(__file__).parents[2] / "pyproject.toml"
    extras = tomllib.loads(document.read_text())["project"]["optional-dependencies"]
    found = {finding.what for finding in examine()}
    assert found >= {f"extra {name}" for name in extras}


def test_finds_the_other_distribution_of_our_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two distributions that overwrite each other are an error."""
    version = metadata.version
    monkeypatch.setattr(
        metadata,
        "version",
        lambda name: "0.6" if name == "lifecycle" else version(name),
    )
    assert found("names").state == "bad"


def test_finds_few_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    """A limit that a busy server would reach is reported, with the command to raise it."""
    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, 4096))
    finding = found("open files")
    assert finding.state == "note"
    assert finding.remedy == "ulimit -n 4096"


@pytest.mark.parametrize(
    ("call", "what"), [("memfd_create", "memfd"), ("pidfd_open", "pidfd")]
)
def test_finds_what_a_kernel_lacks(
    call: str, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python has a function for it all the same."""

    def refuse(*_: object) -> int:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(os, call, refuse, raising=False)
    assert (found(what).state, found(what).found) == ("note", "not on this system")


def test_finds_a_folder_too_long_for_sockets(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Socket paths are short; a long folder is found before the engine fails."""
    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(long))
    assert found("temporary files").state == "bad"


def test_runs_as_a_command() -> None:
    """The command prints one line per finding, and fails on an error."""
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "from lifecycle_engine.cli import main; main()",
            "doctor",
        ],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == (" BAD" in done.stdout), done.stderr
    assert "  ok  Python: 3." in done.stdout


@pytest.mark.parametrize("length", [None, 100])
def test_estimates_the_memory_of_slots(
    checkpoint: Path, model: Any, length: int | None
) -> None:
    """The estimate equals the runner's memory, without loading the model."""
    from lifecycle_engine import TransformersRunner

    runner = TransformersRunner(model, slots=3, max_length=length)
    options = [] if length is None else [f"--max-length={length}"]
    *_, last = examine(f"--checkpoint={checkpoint}", "--kv-slots=3", *options)
    assert (last.state, last.what) == ("fine", "KV slots")
    assert f"for {runner.max_length} tokens in float32" in last.found
    assert f"padding {runner.cache.nbytes / 2**20:.1f} MiB" in last.found


def test_reports_an_unusable_checkpoint(tmp_path: Path) -> None:
    """A damaged file or an unsupported family, with a remedy; a missing one ends it."""
    pytest.importorskip("transformers")
    for name, text, words in (
        ("nothing", "{", ""),
        ("gpt", '{"model_type": "gpt2"}', "known are"),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(text)
        *_, last = examine(f"--checkpoint={tmp_path / name}")
        assert (last.state, last.what) == ("bad", "checkpoint")
        assert words in last.found
        assert last.remedy
    missing = f"--checkpoint={tmp_path / 'missing'}"
    assert CliRunner().invoke(cli, ["doctor", missing]).exit_code == 2
