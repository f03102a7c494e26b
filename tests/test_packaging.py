"""What is promised about the package as such."""

import ast
import importlib
import importlib.metadata
import importlib.util
import inspect
import json
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PACKAGES = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
NAMES = [Path(package).name for package in PACKAGES]
# The bundled engine is an application: its package imports nothing, so that
# neither of its processes pays for what the other one needs.
LIBRARIES = [name for name in NAMES if name != "lifecycle_engine"]
if importlib.util.find_spec("ray") is None:
    LIBRARIES.remove("lifecycle_ray")

# Runs in a fresh interpreter: fails on the import of anything but anyio, what
# anyio needs, and the standard library.
ALONE = """
import sys
ALLOWED = set(sys.stdlib_module_names) | {
    "anyio", "idna", "sniffio", "typing_extensions", "exceptiongroup",
    "lifecycle", "lifecycle_asgi",
}
class Wall:
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        if top not in ALLOWED and not top.startswith(("_", "sitecustomize")):
            raise ImportError(f"{name} is not part of the core")
sys.meta_path.insert(0, Wall())
import lifecycle, lifecycle_asgi
"""


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run a fresh interpreter."""
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_imports_core_without_any_extra() -> None:
    """The core and the ASGI adapter need anyio and nothing else."""
    done = run("-c", ALONE)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("module", "missing", "extra"),
    [
        ("lifecycle_zmq", "msgpack", "zmq"),
        ("lifecycle_ray", "numpy", "ray"),
        ("lifecycle_otel", "opentelemetry", "otel"),
        ("lifecycle_metrics", "prometheus_client", "metrics"),
        ("lifecycle_ray", "ray", "ray"),
        ("lifecycle_engine.cli", "typer", "engine"),
        ("lifecycle_engine.app", "starlette", "engine"),
        ("lifecycle_engine.images.estimate", "PIL", "engine"),
        ("lifecycle_engine.http.serve", "uvicorn", "engine"),
    ],
)
def test_names_extra_that_is_missing(module: str, missing: str, extra: str) -> None:
    """Whoever lacks a dependency is told which extra brings it."""
    done = run("-c", f"import sys; sys.modules[{missing!r}] = None; import {module}")
    last = done.stderr.splitlines()[-1]
    assert f'needs {missing}; pip install "anyio-lifecycle[{extra}]"' in last


def test_runs_models_without_what_serves() -> None:
    """A Python with torch alone loads runners and the scheduler, as `gpu-check` does."""
    script = """
import sys

for name in ("starlette", "uvicorn", "httptools", "pydantic"):
    sys.modules[name] = None
import lifecycle_engine.chats.chat_processor
import lifecycle_engine.models.transformers_runner
import lifecycle_engine.scheduler
import lifecycle_engine.sim_runner
import lifecycle_engine.worker
"""
    done = run("-c", script)
    assert done.returncode == 0, done.stderr


def exports(name: str) -> Iterator[tuple[str, Any]]:
    """Yield the public classes and functions of the package *name*."""
    module = importlib.import_module(name)
    for public in module.__all__:
        thing = getattr(module, public)
        if inspect.isclass(thing) or inspect.isfunction(thing):
            yield public, thing


@pytest.mark.parametrize("name", LIBRARIES)
def test_sorts_public_names(name: str) -> None:
    """`__all__` is a sorted tuple, each name is there, and none is private."""
    module = importlib.import_module(name)
    assert isinstance(module.__all__, tuple)
    assert list(module.__all__) == sorted(module.__all__)
    assert len(set(module.__all__)) == len(module.__all__)
    for public in module.__all__:
        assert hasattr(module, public), public
        assert not public.startswith("_")


@pytest.mark.parametrize("name", LIBRARIES)
def test_documents_public_names(name: str) -> None:
    """Whoever asks for help on a public class, method or function gets some."""
    for public, thing in exports(name):
        assert inspect.getdoc(thing), public
        if not inspect.isclass(thing):
            continue
        for attribute, member in vars(thing).items():
            function = getattr(member, "fget", None) or member
            if not attribute.startswith("_") and inspect.isroutine(function):
                assert inspect.getdoc(getattr(thing, attribute)), attribute


@pytest.mark.parametrize("name", LIBRARIES)
def test_hides_private_modules_in_tracebacks(name: str) -> None:
    """A public class says it is from the package, not from a private module."""
    for public, thing in exports(name):
        parts = thing.__module__.split(".")
        assert not any(part.startswith("_") for part in parts), public


@pytest.mark.parametrize("name", NAMES)
def test_ships_type_marker(name: str) -> None:
    """Type checkers read our annotations from the installed package."""
    folder = Path(importlib.import_module(name).__file__ or "").parent
    assert (folder / "py.typed").exists()


def test_names_every_extra_in_the_readme() -> None:
    """An extra that the README does not mention is one that nobody finds."""
    readme = (ROOT / "README.md").read_text()
    for extra in PROJECT["project"]["optional-dependencies"]:
        assert f"[{extra}]" in readme, extra


def test_says_what_it_depends_on_and_what_it_defends() -> None:
    """The core needs anyio; all that is needed has a least version (S10)."""
    (core,) = PROJECT["project"]["dependencies"]
    assert core.startswith("anyio>=4.14.2")
    for wanted in PROJECT["project"]["optional-dependencies"].values():
        for each in wanted:
            assert ">=" in each or each.startswith("anyio-lifecycle["), each
    threats = (ROOT / "SECURITY.md").read_text()
    for who in ("another user on the machine | yes", "of the same user | no"):
        assert who in threats


def test_lists_what_it_brings_along_and_no_tool_of_ours() -> None:
    """`make sbom` has all that the extras need, in versions, and nothing else (S10)."""
    done = run(ROOT / "scripts" / "sbom.py")
    assert done.returncode == 0, done.stderr
    bill = json.loads(done.stdout)
    versions = {it["name"]: it["version"] for it in bill["components"]}
    assert {"anyio", "idna", "pyzmq", "torch", "openai"} <= set(versions)
    assert not {"pytest", "ruff", "anyio-lifecycle"} & set(versions)
    assert versions["anyio"] == importlib.metadata.version("anyio")
    known = {it["bom-ref"] for it in bill["components"]}
    known.add(bill["metadata"]["component"]["bom-ref"])
    needs = {it["ref"]: it["dependsOn"] for it in bill["dependencies"]}
    assert set(needs) == known
    assert known == known.union(*needs.values())


def test_parses_on_the_oldest_python() -> None:
    """Every file of the product is Python 3.11."""
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            ast.parse(path.read_text(), feature_version=(3, 11))
