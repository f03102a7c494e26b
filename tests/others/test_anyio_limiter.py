"""anyio's own tests of its limiter and semaphore, run with gates in their place.

The wheel has no tests, so the source of the installed version comes from PyPI, once;
without a network this is skipped. Two tests are left out. The one asks for the class of
the limiter that anyio's own threads use. The other cancels an admission that had no
need to wait: it takes no checkpoint, so there is nothing to cancel, and the lease is
its caller's.
"""

import importlib.metadata
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

BUILD = Path(__file__).resolve().parents[2] / "build" / "anyio"
NOT_A_CONTRACT = (
    "test_current_default_thread_limiter",
    "test_cancel_during_acquire_on_behalf_of",
)


def source() -> str:
    """Return anyio's tests of what synchronises tasks, of the version installed."""
    version = importlib.metadata.version("anyio")
    archive = BUILD / f"anyio-{version}.tar.gz"
    if not archive.exists():
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download"]
        what = [
            "--no-deps",
            "--no-binary=:all:",
            f"--dest={BUILD}",
            f"anyio=={version}",
        ]
        got = subprocess.run([*pip, *what], capture_output=True, check=False)
        if got.returncode or not archive.exists():
            pytest.skip(f"the source of anyio {version} cannot be downloaded")
    with tarfile.open(archive) as files:
        member = f"anyio-{version}/tests/test_synchronization.py"
        found = files.extractfile(member)
        assert found is not None
        return found.read().decode()


@pytest.mark.slow
def test_passes_what_anyio_asks_of_a_limiter_and_a_semaphore(tmp_path: Path) -> None:
    """Counts, order, refusals and cancellation are those of anyio, on both loops."""
    tests = tmp_path / "theirs"
    tests.mkdir()
    (tests / "__init__.py").touch()
    (tests / "test_synchronization.py").write_text(source())
    gates = Path(__file__).with_name("anyio_gates.py")
    shutil.copy(gates, tests / "conftest.py")
    (tmp_path / "pytest.ini").write_text("[pytest]\nanyio_mode = auto\n")
    chosen = "(TestCapacityLimiter or TestSemaphore)"
    chosen += "".join(f" and not {name}" for name in NOT_A_CONTRACT)
    options = ["-q", "-p", "no:cacheprovider", "-p", "no:asyncio", "--timeout=300"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, "-k", chosen],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed
    assert int(passed[1]) >= 60
