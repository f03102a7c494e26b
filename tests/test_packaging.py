"""Guarantees about the distribution."""

import ast
import importlib
import importlib.metadata
import importlib.util
import inspect
import json
import re
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PACKAGES = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
NAMES = [Path(package).name for package in PACKAGES]
LIBRARIES = list(NAMES)
for library, needed in (("lifecycle_ray", "ray"), ("lifecycle_engine", "torch")):
    if importlib.util.find_spec(needed) is None:
        LIBRARIES.remove(library)
# What users import from: these, and nothing below them.
DOORS = {
    *NAMES,
    *(f"lifecycle.{name}" for name in ("debug", "events", "lowlevel", "shared")),
}
DOORS |= {"lifecycle.testing", "lifecycle.testing.pytest_plugin"}
# A framework, a server, and tests, are imported by their own name.
DOORS |= {"lifecycle_asgi.starlette", "lifecycle_asgi.testing"}
DOORS |= {"lifecycle_asgi.uvicorn_protocol", "lifecycle_asgi.litserve_plugin"}
DOORS |= {"lifecycle_asgi.prometheus", "lifecycle_asgi.opentelemetry"}
# Each tool is imported when its subcommand runs.
DOORS |= {f"lifecycle_tools.{name}" for name in ("check", "proxy", "top")}

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

# As on Windows: without what is of POSIX.
ELSEWHERE = """
import select, socket, sys
import anyio, asyncio, trio
sys.platform = "win32"
for name in ("fcntl", "resource"):
    sys.modules[name] = None
for name in [it for it in dir(select) if "poll" in it.lower()]:
    delattr(select, name)
del socket.AF_UNIX
import lifecycle, lifecycle_asgi
from lifecycle.shared import SharedGate
try:
    SharedGate("folder", slots=1)
except NotImplementedError as error:
    print(error)
"""


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run a fresh interpreter."""
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


def test_imports_core_without_any_extra() -> None:
    """The core and the ASGI adapter need anyio and nothing else."""
    done = run("-c", ALONE)
    assert done.returncode == 0, done.stderr


def test_imports_core_and_middleware_without_posix() -> None:
    """Where a gate cannot be shared and nothing is watched, the rest works."""
    completed = run("-c", ELSEWHERE)
    assert completed.returncode == 0, completed.stderr
    assert "a SharedGate needs Linux, not win32" in completed.stdout


@pytest.mark.parametrize(
    ("module", "missing", "extra"),
    [
        ("lifecycle_zmq", "msgpack", "zmq"),
        ("lifecycle_ray", "numpy", "ray"),
        ("lifecycle_asgi.opentelemetry", "opentelemetry", "observe"),
        ("lifecycle_asgi.prometheus", "prometheus_client", "observe"),
        ("lifecycle_tools.command", "typer", "tools"),
        ("lifecycle_tools.proxy", "h11", "tools"),
        ("lifecycle_tools.proxy", "websockets", "tools"),
        ("lifecycle_tools.check", "rich", "tools"),
        ("lifecycle_ray", "ray", "ray"),
        ("lifecycle_engine.cli", "typer", "engine"),
        ("lifecycle_engine.server.app", "starlette", "engine"),
        ("lifecycle_engine.multimodal.decode", "PIL", "engine"),
        ("lifecycle_engine.server.run", "uvicorn", "engine"),
    ],
)
def test_names_extra_that_is_missing(module: str, missing: str, extra: str) -> None:
    """A missing dependency raises an error that names its extra."""
    done = run("-c", f"import sys; sys.modules[{missing!r}] = None; import {module}")
    last = done.stderr.splitlines()[-1]
    assert f'needs {missing}; pip install "anyio-lifecycle[{extra}]"' in last


@pytest.mark.parametrize(
    ("code", "extra"),
    [
        ("from lifecycle_tools import main", "tools"),
        ("from lifecycle_engine.__main__ import main", "engine"),
    ],
)
def test_commands_name_the_extra_in_one_line(code: str, extra: str) -> None:
    """A command without what it needs ends with that, and in no traceback."""
    done = run("-c", f"import sys; sys.modules['typer'] = None; {code}; main()")
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert f'needs typer; pip install "anyio-lifecycle[{extra}]"' in line


def test_runs_models_without_what_serves() -> None:
    """With torch alone, runners and scheduler can be imported, as `gpu-check` does."""
    script = """
import sys

for name in ("starlette", "uvicorn", "httptools", "pydantic"):
    sys.modules[name] = None
import lifecycle_engine.processing.chat_processor
import lifecycle_engine.model.transformers_runner
import lifecycle_engine.core.scheduler
import lifecycle_engine.sim
import lifecycle_engine.worker
"""
    done = run("-c", script)
    assert done.returncode == 0, done.stderr


def test_imports_names_of_the_engine_when_they_are_used() -> None:
    """Neither process pays for what the other one needs: the package imports nothing."""
    script = """
import sys
import lifecycle_engine

assert "create_app" in dir(lifecycle_engine)
loaded = [name for name in sys.modules if name.startswith("lifecycle_engine.")]
assert loaded == [], loaded
from lifecycle_engine import ServerConfig

assert ServerConfig().http.port == 8000
heavy = {"torch", "starlette", "typer", "numpy"} & set(sys.modules)
assert heavy == set(), heavy
"""
    done = run("-c", script)
    assert done.returncode == 0, done.stderr


def test_names_what_a_package_does_not_export() -> None:
    """A name that the engine does not export is an `AttributeError`, as of any module."""
    module = importlib.import_module("lifecycle_engine")
    with pytest.raises(AttributeError, match="lifecycle_engine.*no_such_name"):
        _ = module.no_such_name


IMPORT = re.compile(r"^\s*(?:>>> )?(?:from|import) (lifecycle[\w.]*)", re.MULTILINE)
DIRECTIVE = re.compile(r"^\.\. auto(\w+):: (lifecycle[\w.]*)", re.MULTILINE)
SHOWN = sorted(
    path
    for pattern in ("*.md", "docs/**/*.md", "examples/**/*.py")
    for path in ROOT.glob(pattern)
)


@pytest.mark.parametrize("path", SHOWN, ids=lambda path: str(path.relative_to(ROOT)))
def test_shows_imports_from_the_top_of_packages(path: Path) -> None:
    """What users are shown to import is exported at the top of its package."""
    text = path.read_text()
    shown = set(IMPORT.findall(text))
    for kind, name in DIRECTIVE.findall(text):
        shown.add(name if kind == "module" else name.rpartition(".")[0])
    assert shown - DOORS == set()


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
    """Every public class, method and function has a docstring."""
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
    """The `__module__` of a public class is the package, not a private module."""
    for public, thing in exports(name):
        parts = thing.__module__.split(".")
        assert not any(part.startswith("_") for part in parts), public


@pytest.mark.parametrize("name", NAMES)
def test_ships_type_marker(name: str) -> None:
    """The installed package has a marker for type checkers."""
    folder = Path(importlib.import_module(name).__file__ or "").parent
    assert (folder / "py.typed").exists()


def test_names_every_extra_in_the_readme() -> None:
    """The README mentions every extra."""
    readme = (ROOT / "README.md").read_text()
    for extra in PROJECT["project"]["optional-dependencies"]:
        assert f"[{extra}]" in readme, extra


def test_says_what_it_depends_on_and_what_it_defends() -> None:
    """The core needs only anyio; each dependency has a minimum version (S10)."""
    (core,) = PROJECT["project"]["dependencies"]
    assert core.startswith("anyio>=4.14.2")
    for wanted in PROJECT["project"]["optional-dependencies"].values():
        for each in wanted:
            assert ">=" in each or each.startswith("anyio-lifecycle["), each
    threats = (ROOT / "SECURITY.md").read_text()
    for who in ("another user on the machine | yes", "of the same user | no"):
        assert who in threats


def wanted() -> Iterator[Requirement]:
    """Everything that the extras and the dependency groups name."""
    lists = [*PROJECT["project"]["optional-dependencies"].values()]
    lists += [
        PROJECT["project"]["dependencies"],
        *PROJECT["dependency-groups"].values(),
    ]
    for each in (each for named in lists for each in named if isinstance(each, str)):
        requirement = Requirement(each)
        if requirement.name not in {"anyio-lifecycle", "matplotlib"}:
            yield requirement


def test_pins_a_permitted_release_of_everything_that_make_installs() -> None:
    """`constraints/tested.txt` has an exact version of each, within its range, and of pip."""
    lines = (ROOT / "constraints" / "tested.txt").read_text().splitlines()
    rows = [line.split("==") for line in lines if not line.startswith("#")]
    pins = {canonicalize_name(name): version for name, version in rows}
    assert {"pip", "hatchling", "setuptools", "torch"} <= set(pins)
    for each in wanted():
        assert each.specifier.contains(pins[canonicalize_name(each.name)]), each
    assert not [line for line in lines if "+" in line or "/" in line]


def test_shows_the_table_of_versions_that_was_tried() -> None:
    """The page has the ranges of pyproject.toml and the pins of today."""
    done = run(ROOT / "scripts" / "versions.py", "table", "--check")
    assert done.returncode == 0, "run python scripts/versions.py table"


def test_lists_what_it_brings_along_and_no_tool_of_ours() -> None:
    """`make sbom` lists exactly the dependencies of the extras, with versions (S10)."""
    done = run(ROOT / "scripts" / "sbom.py")
    assert done.returncode == 0, done.stderr
    bill = json.loads(done.stdout)
    versions = {it["name"]: it["version"] for it in bill["components"]}
    assert {"anyio", "idna", "pyzmq", "torch"} <= set(versions)
    assert not {"pytest", "ruff", "anyio-lifecycle"} & set(versions)
    assert versions["anyio"] == importlib.metadata.version("anyio")
    known = {it["bom-ref"] for it in bill["components"]}
    known.add(bill["metadata"]["component"]["bom-ref"])
    needs = {it["ref"]: it["dependsOn"] for it in bill["dependencies"]}
    assert set(needs) == known
    assert known == known.union(*needs.values())


def test_reads_its_files_from_a_zip(tmp_path: Path) -> None:
    """As `zipapp` and other tools pack an application with its libraries."""
    archive = tmp_path / "all.zip"
    with zipfile.ZipFile(archive, "w") as packed:
        for package in PACKAGES:
            for file in (ROOT / package).rglob("*.*"):
                if file.suffix in (".py", ".html"):
                    packed.write(file, file.relative_to((ROOT / package).parent))
    code = "import lifecycle_asgi as it; print(it.__file__); it.LiveView(None)"
    script = f"import sys; sys.path.insert(0, {str(archive)!r}); {code}"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(str(archive))


def test_leaves_tools_of_the_checkout_out_of_the_wheel() -> None:
    """The wheel contains the six packages, and no demo, builder or benchmark."""
    folders = {path.parent.name for path in ROOT.glob("*/*/__init__.py")}
    assert folders == {*NAMES, "lifecycle_demo", "tiny_checkpoint"}
    assert not [package for package in PACKAGES if package.startswith("tools")]
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            source = path.read_text()
            for name in ("lifecycle_demo", "tiny_checkpoint", "import openai"):
                assert name not in source, path


def test_parses_on_the_oldest_python() -> None:
    """Every file of the product parses as Python 3.11."""
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            ast.parse(path.read_text(), feature_version=(3, 11))
