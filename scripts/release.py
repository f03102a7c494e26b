"""Build a release, and look at it as a stranger would who installs it.

    python scripts/release.py [--links URL --images URL] [--to FOLDER]

What is committed is built, in a folder of its own. There the links of the README lead
to URL, as a package index shows it without the files beside it, and the bill of
materials lies beside the code. Without URL, as in `make release-check`, they lead to a
host that does not exist; without FOLDER, nothing is kept.
"""

from __future__ import annotations

import argparse
import email
import os
import re
import shutil
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
import tomllib
import venv
import zipfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parents[1]
NOWHERE = "https://example.invalid/"
BILL = "sbom.json"
WHEEL_TABLE = "[tool.hatch.build.targets.wheel]\n"
# What the core may bring along: anyio and what anyio itself needs.
ALLOWED = {"anyio-lifecycle", "anyio", "idna", "sniffio", "typing-extensions"}
MOST_KIB = 768
MOST_IMPORT_RATIO = 2.0
IMPORTS = {
    # The first event loop that a program starts imports anyio's backend.
    "anyio": "import anyio._backends._asyncio",
    "lifecycle": "import anyio._backends._asyncio, lifecycle",
}
RUNS = 9


def main() -> None:
    """Build, check, and keep the files where somebody wants them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--links", default=f"{NOWHERE}blob/", help="of files")
    parser.add_argument("--images", default=f"{NOWHERE}raw/", help="of pictures")
    parser.add_argument("--to", type=Path, help="folder for the two files")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        sdist, wheel = build(work, options.links, options.images)
        text = described(wheel)
        print(f"contents   {contents(wheel)}")
        print(f"README     {rendered(text)}")
        print(f"alone      {alone(wheel, work / 'alone')}")
        print(f"import     {import_ratio(work / 'alone')}")
        if options.to is not None:
            options.to.mkdir(parents=True, exist_ok=True)
            for file in (sdist, wheel):
                print(shutil.copy(file, options.to))


def failed(*words: object) -> SystemExit:
    """Return what ends this with a reason."""
    return SystemExit(f"release: {' '.join(map(str, words))}")


def run(*argv: str | Path, cwd: Path = ROOT, **env: str) -> str:
    """Return what a command prints; end with its last lines if it fails."""
    done = subprocess.run(
        [str(each) for each in argv],
        cwd=cwd,
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise failed(*argv, "failed:\n", done.stderr[-2000:])
    return done.stdout


def build(work: Path, links: str, images: str) -> tuple[Path, Path]:
    """Return the sdist and the wheel, after each was built twice to the same bytes."""
    staged = stage(work / "tree", links, images)
    epoch = run("git", "log", "-1", "--format=%ct").strip()
    built = []
    hatch = (sys.executable, "-m", "hatchling", "build")
    for folder in (work / "first", work / "second"):
        run(*hatch, "-d", folder, cwd=staged, SOURCE_DATE_EPOCH=epoch)
        (sdist,), (wheel,) = folder.glob("*.tar.gz"), folder.glob("*.whl")
        built.append((sdist, wheel))
    unpacked = work / "unpacked"
    with tarfile.open(sdist) as archive:
        archive.extractall(unpacked, filter="data")
    (source,), third = unpacked.iterdir(), work / "third"
    run(*hatch, "-t", "wheel", "-d", third, cwd=source, SOURCE_DATE_EPOCH=epoch)
    (again,) = third.glob("*.whl")
    for one, other in (*zip(*built, strict=True), (wheel, again)):
        if one.read_bytes() != other.read_bytes():
            raise failed(one.name, "is different each time that it is built")
    print("build      the same bytes twice, and once more from the sdist")
    return built[0]


def stage(tree: Path, links: str, images: str) -> Path:
    """Return a copy of what is committed, with the bill and a README for an index."""
    archive = tree.with_suffix(".tar")
    run("git", "archive", "--format=tar", f"--output={archive}", "HEAD")
    with tarfile.open(archive) as packed:
        packed.extractall(tree, filter="data")
    (tree / BILL).write_text(run(sys.executable, ROOT / "scripts" / "sbom.py"))
    project = tree / "pyproject.toml"
    before, table, after = project.read_text().partition(WHEEL_TABLE)
    project.write_text(f'{before}{table}sbom-files = ["{BILL}"]\n{after}')
    readme = tree / "README.md"
    readme.write_text(absolute(readme.read_text(), links, images))
    return tree


def absolute(text: str, links: str, images: str) -> str:
    """Return Markdown whose links and images are at these addresses."""

    def at(found: re.Match[str]) -> str:
        target, picture = found["target"], found["picture"] or ""
        if re.match(r"[a-z]+:|#", target):
            return found[0]
        if not (ROOT / target.partition("#")[0]).exists():
            raise failed("the README leads to", target, "which does not exist")
        return f"{picture}[{found['text']}]({images if picture else links}{target})"

    link = r"(?P<picture>!?)\[(?P<text>[^\]]*)\]\((?P<target>[^)\s]+)\)"
    # Code keeps its brackets.
    parts = re.split(r"(^```.*?^```$)", text, flags=re.MULTILINE | re.DOTALL)
    return "".join(
        part if part.startswith("```") else re.sub(link, at, part) for part in parts
    )


def described(wheel: Path) -> email.message.Message:
    """Return the metadata of a wheel, which is what an index shows."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (
            it for it in archive.namelist() if it.endswith(".dist-info/METADATA")
        )
        return email.message_from_bytes(archive.read(name))


def contents(wheel: Path) -> str:
    """Check what is in the wheel, and nothing else; return its size."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        project = tomllib.load(file)
    targets = project["tool"]["hatch"]["build"]["targets"]
    packages = {PurePosixPath(each).name for each in targets["wheel"]["packages"]}
    about = f"anyio_lifecycle-{project['project']['version']}.dist-info"
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    if (found := {name.partition("/")[0] for name in names}) != {*packages, about}:
        raise failed("the wheel has", sorted(found))
    wanted = {f"{package}/py.typed" for package in packages}
    wanted |= {f"{about}/licenses/{it}" for it in project["project"]["license-files"]}
    wanted |= {f"{about}/sboms/{BILL}", f"{about}/entry_points.txt"}
    if missing := wanted - {*names}:
        raise failed("the wheel lacks", sorted(missing))
    if odd := [it for it in names if "/test_" in it or it.endswith((".pyc", ".svg"))]:
        raise failed("the wheel has", odd)
    if (kib := wheel.stat().st_size / 1024) > MOST_KIB:
        raise failed(f"the wheel has {kib:.0f} KiB; {MOST_KIB} are enough")
    return f"{len(packages)} typed packages, licences and a bill, {kib:.0f} KiB"


def rendered(metadata: email.message.Message) -> str:
    """Render the description as an index does; return how many links it has."""
    from readme_renderer import markdown

    text = metadata.get_payload(decode=True)
    html = markdown.render(text.decode()) if isinstance(text, bytes) else None
    if not html or metadata["Description-Content-Type"] != "text/markdown":
        raise failed("an index would show the README as plain text")
    found = re.findall(r'(?:href|src)="([^"]*)"', html)
    if relative := [it for it in found if not it.startswith(("https://", "#"))]:
        raise failed("links that lead nowhere on an index:", relative)
    if "](" in re.sub(r"<(code|pre).*?</\1>", "", html, flags=re.DOTALL):
        raise failed("a link is shown as text")
    return f"rendered, with {len(found)} links and pictures, all absolute"


def alone(wheel: Path, home: Path) -> str:
    """Install the wheel beside anyio, and run its commands; return what came along."""
    venv.create(home, with_pip=False)
    pip = (sys.executable, "-m", "pip", "--python", home / "bin" / "python")
    constraints = ROOT / "constraints" / "tested.txt"
    run(*pip, "install", "--quiet", "--constraint", constraints, wheel)
    listed = run(*pip, "list", "--format=freeze").split()
    names = {each.partition("==")[0].replace("_", "-") for each in listed}
    if extra := names - ALLOWED:
        raise failed("the wheel brings along", sorted(extra))
    for name in ("lifecycle", "lifecycle_asgi"):
        code = f"import {name}; print({name}.__file__)"
        if "site-packages" not in (file := run(*isolated(home), code, cwd=home)):
            raise failed(name, "came from", file)
    for said in commands(home):
        if said.returncode == 0 or "anyio-lifecycle[" not in said.stderr:
            raise failed(*said.args, "does not name what to install:", said.stderr)
        if "Traceback" in said.stderr:
            raise failed(*said.args, "ends in a traceback:", said.stderr)
    return f"imports with {', '.join(sorted(names))}; its commands say what they need"


def isolated(home: Path) -> tuple[str | Path, ...]:
    """Return how to run code with the packages of an environment alone."""
    return home / "bin" / "python", "-I", "-c"


def commands(home: Path) -> Iterator[subprocess.CompletedProcess[str]]:
    """Run each command that the wheel installs, with nothing that it needs there."""
    env = {name: os.environ[name] for name in os.environ if name != "PYTHONPATH"}
    for path in sorted((home / "bin").glob("lifecycle*")):
        for arguments in ([], ["--help"], ["serve", "model"]):
            yield subprocess.run(
                [str(path), *arguments],
                cwd=home,
                env=env,
                capture_output=True,
                text=True,
                check=False,
            )


def import_ratio(home: Path) -> str:
    """Return how long `import lifecycle` takes, beside anyio with its own backend."""
    seconds: dict[str, list[float]] = {name: [] for name in IMPORTS}
    for _ in range(RUNS):
        for name, code in IMPORTS.items():
            began = time.perf_counter()
            run(*isolated(home), code, cwd=home)
            seconds[name].append(time.perf_counter() - began)
    best = {name: min(each) for name, each in seconds.items()}
    if (ratio := best["lifecycle"] / best["anyio"]) > MOST_IMPORT_RATIO:
        raise failed(f"import lifecycle takes {ratio:.1f} times as long as anyio")
    told = (f"{name} {statistics.median(each):.3f} s" for name, each in seconds.items())
    return f"{ratio:.2f} times anyio and its backend ({', '.join(told)}, medians)"


if __name__ == "__main__":
    main()
