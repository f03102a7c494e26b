from __future__ import annotations

import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from lifecycle_engine import worker
from lifecycle_engine.sim_runner import SimRunner

LINK = ["--endpoint", "ipc:///tmp/nowhere", "--incarnation", "3"]


class Server:
    """Stands where the link's server does, and notes how it was made."""

    made: dict[str, Any]

    def __init__(self, endpoint: str, backend: Any, *, incarnation: int) -> None:
        type(self).made = {
            "endpoint": endpoint,
            "backend": backend,
            "incarnation": incarnation,
        }

    def run(self) -> None:
        """Return at once, as on SHUTDOWN."""


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> type[Server]:
    module = types.ModuleType("lifecycle_zmq")
    module.EngineServer = Server  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "lifecycle_zmq", module)
    return Server


def test_sim_worker_serves_its_scheduler(server: type[Server]) -> None:
    """The options reach runner, scheduler and link; SHUTDOWN is status 0."""
    options = ["--runner", "sim", "--max-batch", "3", "--max-tokens", "7"]
    assert worker.main([*options, *LINK]) == 0
    assert server.made["endpoint"] == "ipc:///tmp/nowhere"
    assert server.made["incarnation"] == 3
    backend = server.made["backend"]
    assert backend.status()["slots"] == 3
    with pytest.raises(Exception, match="expected 1 to 7"):
        backend.start("a", {"input_ids": [1], "max_tokens": 8}, {})


def test_sim_costs_are_options() -> None:
    """A load study sets the simulated costs on the command line."""
    options = worker._parser().parse_args(
        ["--runner", "sim", "--sim-decode-step", "0.25", "--slots", "5", *LINK]
    )
    runner = worker.build_runner(options)
    assert isinstance(runner, SimRunner)
    assert runner._cost.decode_step == 0.25
    assert runner.slots == 5


def test_torch_worker_loads_a_checkpoint(
    checkpoint: Path, server: type[Server]
) -> None:
    """The torch runner is built from a folder, with its own number of slots."""
    options = ["--checkpoint", str(checkpoint), "--threads", "1", "--max-length", "99"]
    assert worker.main([*options, "--slots", "2", "--max-batch", "2", *LINK]) == 0
    assert server.made["backend"].status()["slots_free"] == 2


def test_torch_worker_without_checkpoint_says_what_to_do(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Starting without a model ends with the option and the command that help."""
    with pytest.raises(SystemExit, match="lifecycle-engine checkpoint DIR"):
        worker.main(LINK)


@pytest.mark.parametrize("option", ["--max-batch", "--slots", "--max-length"])
def test_worker_refuses_counts_below_one(
    option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A count of zero is refused by name."""
    with pytest.raises(SystemExit):
        worker.main(["--runner", "sim", option, "0", *LINK])
    assert "0 is not 1 or more" in capsys.readouterr().err


def test_lost_device_ends_the_process_with_its_code(tmp_path: Path) -> None:
    """A device that is gone ends the process at once with status 77 and one line."""
    (tmp_path / "lifecycle_zmq.py").write_text(
        "from lifecycle_engine.runner import DeviceLost\n"
        "class EngineServer:\n"
        "    def __init__(self, *args, **options): pass\n"
        "    def run(self):\n"
        "        try:\n"
        "            raise DeviceLost('a CUDA error that stays')\n"
        "        except Exception:\n"
        "            pass\n"
    )
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r});"
        "from lifecycle_engine.worker import main; main(sys.argv[1:])"
    )
    result = subprocess.run(
        [sys.executable, "-c", code, "--runner", "sim", *LINK],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert result.returncode == 77
    assert result.stderr == "lifecycle-engine: a CUDA error that stays\n"
