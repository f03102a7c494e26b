"""Try our drop-ins in other people's servers, each by its own command line.

    python scripts/strangers.py [NAME ...]

For each server, or those that you name, ``tests/strangers/NAME.txt`` has the releases
that .venv lacks or has others of. They are installed in ``build/strangers/NAME``, which
finds everything else in .venv. There ``tests/strangers/test_NAME.py`` runs. A server
that cannot be installed is skipped, and one without such a file runs in .venv.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TESTS = ROOT / "tests" / "strangers"
ENVIRONMENTS = ROOT / "build" / "strangers"
PYTHON = Path("bin/python")
PREFIX = "test_"
INSTALL = ("install", "--quiet", "--no-deps", "--disable-pip-version-check")
# A guard against a download that hangs; idle, vLLM takes less than a minute.
MOST_SECONDS = 600.0


def names() -> list[str]:
    """Return the servers that there are tests of."""
    return sorted(path.stem[len(PREFIX) :] for path in TESTS.glob(f"{PREFIX}*.py"))


def environment(name: str) -> Path | None:
    """Return the environment of a server; `None` if it cannot be installed.

    One that was made from the same requirements is used again.
    """
    wanted, folder = TESTS / f"{name}.txt", ENVIRONMENTS / name
    if not wanted.exists():
        return Path(sys.prefix)
    stamp = folder / "requirements.txt"
    if stamp.is_file() and stamp.read_bytes() == wanted.read_bytes():
        return folder
    print(f"strangers: installing {name}", flush=True)
    shutil.rmtree(folder, ignore_errors=True)
    venv.create(folder, symlinks=True)
    own = sysconfig.get_path("purelib", vars={"base": str(folder)})
    # After its own packages, and with the files of .venv that name our source.
    shared = sysconfig.get_path("purelib")
    line = f"import site; site.addsitedir({shared!r})\n"
    Path(own, "shared.pth").write_text(line)
    pip = [sys.executable, "-m", "pip", "--python", str(folder / PYTHON)]
    try:
        subprocess.run(
            [*pip, *INSTALL, "-r", str(wanted)], check=True, timeout=MOST_SECONDS
        )
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired):
        return None
    shutil.copy(wanted, stamp)
    return folder


def passes(name: str, folder: Path) -> bool:
    """Run the tests of a server in its environment; whether they pass."""
    print(f"strangers: {name}", flush=True)
    test = str(TESTS / f"{PREFIX}{name}.py")
    argv = (str(folder / PYTHON), "-m", "pytest", "-q", "-p", "no:cacheprovider", test)
    return subprocess.run(argv, check=False, cwd=ROOT).returncode == 0


def main() -> int:
    """Run the command line; 1 if a test failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(names()))
    options = parser.parse_args()
    if unknown := set(options.names) - set(names()):
        parser.error(f"no server {sorted(unknown)} in {', '.join(names())}")
    failed = []
    for name in options.names or names():
        folder = environment(name)
        if folder is None:
            print(f"strangers: {name} skipped: its packages cannot be installed")
        elif not passes(name, folder):
            failed.append(name)
    if failed:
        print(f"strangers: failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
