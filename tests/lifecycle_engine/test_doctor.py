"""The doctor finds what is wrong, says what to do, and changes nothing."""

from __future__ import annotations

import resource
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from lifecycle_engine import doctor


def found(what: str) -> doctor.Finding:
    """The finding about *what*."""
    return next(each for each in doctor.examine() if each.what == what)


def test_has_a_remedy_for_whatever_is_not_fine() -> None:
    """Nobody is told of a problem without a way out."""
    for finding in doctor.examine():
        assert (finding.state == "fine") == (not finding.remedy), finding


def test_finds_an_extra_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is not installed is named, with the command that brings it."""
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
    """Whatever may be installed besides is looked for."""
    document = Path(__file__).parents[2] / "pyproject.toml"
    extras = tomllib.loads(document.read_text())["project"]["optional-dependencies"]
    found = {finding.what for finding in doctor.examine()}
    assert found >= {f"extra {name}" for name in extras}


def test_finds_the_other_distribution_of_our_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two distributions that overwrite each other are a fault."""
    version = metadata.version
    monkeypatch.setattr(
        metadata,
        "version",
        lambda name: "0.6" if name == "lifecycle" else version(name),
    )
    assert found("names").state == "bad"


def test_finds_few_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    """A limit that a busy server would meet is told, with the command that lifts it."""
    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, 4096))
    finding = found("open files")
    assert finding.state == "note"
    assert finding.remedy == "ulimit -n 4096"


def test_finds_a_place_too_long_for_sockets(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Sockets have short names; a long folder is found before the engine fails."""
    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(long))
    assert found("temporary files").state == "bad"


def test_runs_as_a_command() -> None:
    """The command prints a line a finding and fails where something is bad."""
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "from lifecycle_engine.cli import main; main()",
            "doctor",
        ],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == (" BAD" in done.stdout), done.stderr
    assert "  ok  Python: 3." in done.stdout


@pytest.mark.parametrize("length", [None, 100])
def test_knows_what_the_slots_of_a_checkpoint_take(
    checkpoint: Path, model: Any, length: int | None
) -> None:
    """As many bytes as a runner of it then has, without loading it."""
    from lifecycle_engine.models.transformers_runner import TransformersRunner

    runner = TransformersRunner(model, slots=3, max_length=length)
    *_, last = doctor.examine(checkpoint, slots=3, max_length=length)
    assert (last.state, last.what) == ("fine", "KV slots")
    assert f"for {runner.max_length} tokens in float32" in last.found
    assert f"padding {runner.cache.nbytes / 2**20:.1f} MiB" in last.found


def test_tells_of_a_checkpoint_that_cannot_be_served(tmp_path: Path) -> None:
    """No folder of one, or one of a family that is not known, and what to do."""
    pytest.importorskip("transformers")
    (tmp_path / "gpt").mkdir()
    (tmp_path / "gpt" / "config.json").write_text('{"model_type": "gpt2"}')
    for name, words in (("nothing", ""), ("gpt", "known are")):
        *_, last = doctor.examine(tmp_path / name)
        assert (last.state, last.what) == ("bad", "checkpoint")
        assert words in last.found
        assert last.remedy
