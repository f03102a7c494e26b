"""What decorators keep of a signature, as mypy and pyright see it."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

import lifecycle

TYPED = Path(__file__).parent / "typed"
SOURCE = Path(lifecycle.__file__).parents[1]
FILES = [TYPED / "accepted.py", TYPED / "rejected.py"]


def marked() -> set[int]:
    """Lines of `rejected.py` that a type checker is to reject."""
    lines = FILES[1].read_text().splitlines()
    return {at for at, line in enumerate(lines, 1) if line.endswith("# rejected")}


def run(*command: object, cwd: Path) -> str:
    """Return what a type checker prints."""
    done = subprocess.run(
        [sys.executable, "-m", *map(str, command)],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    return done.stdout


@pytest.mark.thorough
def test_keeps_signatures_for_mypy(tmp_path: Path) -> None:
    """Strict mypy accepts every right call and rejects every wrong one."""
    pytest.importorskip("mypy")
    settings = f"[mypy]\nstrict = true\nmypy_path = {SOURCE}:{TYPED}\n"
    # As in pyproject.toml.
    settings += (
        "[mypy-lifecycle._signatures]\ndisable_error_code = misc, unused-ignore\n"
    )
    (tmp_path / "mypy.ini").write_text(settings)
    options = ("--config-file", tmp_path / "mypy.ini", "--cache-dir", tmp_path)
    printed = run("mypy", *options, *FILES, cwd=tmp_path)
    found = {
        line.split(": error: ")[0] for line in printed.splitlines() if "error:" in line
    }
    expected = {(FILES[1].name, at) for at in marked()}
    places = {
        (Path(p).name, int(at)) for p, _, at in (f.rpartition(":") for f in found)
    }
    assert places == expected, printed


@pytest.mark.thorough
def test_keeps_signatures_for_pyright(tmp_path: Path) -> None:
    """Pyright accepts and rejects the same calls."""
    name = "pyright" if importlib.util.find_spec("pyright") else "basedpyright"
    if importlib.util.find_spec(name) is None:
        pytest.skip("pyright is not installed; pip install basedpyright")
    settings = {"extraPaths": [str(SOURCE), str(TYPED)], "reportMissingImports": True}
    (tmp_path / "pyrightconfig.json").write_text(
        json.dumps(
            {**settings, "typeCheckingMode": "standard", "include": [str(TYPED)]}
        )
    )
    options = ("--outputjson", "--pythonpath", sys.executable)
    printed = run(name, *options, "--project", tmp_path, cwd=tmp_path)
    errors = [
        (Path(each["file"]).name, each["range"]["start"]["line"] + 1)
        for each in json.loads(printed)["generalDiagnostics"]
        if each["severity"] == "error"
    ]
    assert set(errors) == {(FILES[1].name, at) for at in marked()}, errors
