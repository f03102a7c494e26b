"""Import the installed wheel as a user would who asked for no extra."""

from __future__ import annotations

import importlib
import importlib.metadata
import sys

# What the core may bring along: anyio and what anyio itself needs.
ALLOWED = {"anyio-lifecycle", "anyio", "idna", "sniffio", "typing-extensions"}


def main() -> int:
    """Return 0 if the core and the ASGI adapter work with anyio alone."""
    installed = {
        dist.metadata["Name"].lower().replace("_", "-")
        for dist in importlib.metadata.distributions()
    }
    if extra := installed - ALLOWED:
        print(f"smoke: the core wheel brought {sorted(extra)} along", file=sys.stderr)
        return 1
    for name in ("lifecycle", "lifecycle_asgi"):
        module = importlib.import_module(name)
        if "site-packages" not in str(module.__file__):
            print(f"smoke: {name} came from {module.__file__}", file=sys.stderr)
            return 1
    version = importlib.metadata.version("anyio-lifecycle")
    print(f"the wheel of {version} imports with {', '.join(sorted(installed))}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
