"""Write what the wheel brings along with all its extras, as CycloneDX 1.6.

It reads what is installed, without network access. The ready-made generators list whole
environments: here that would be the test tools of whatever has an extra for them.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from importlib.metadata import (
    Distribution,
    PackageMetadata,
    PackageNotFoundError,
    distribution,
)
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = "anyio-lifecycle"


def main() -> None:
    """Print the bill; end with an error where a part of it is not installed."""
    needs: dict[str, set[str]] = {}
    asked: dict[str, set[str]] = {}
    extras = distribution(ROOT).metadata.get_all("Provides-Extra") or []
    line = [Requirement(f"{ROOT}[{','.join(extras)}]")]
    while line:
        wanted = line.pop()
        name = canonicalize_name(wanted.name)
        if name in needs and wanted.extras <= asked[name]:
            continue
        asked.setdefault(name, set()).update(wanted.extras)
        further = list(requirements(installed(name), asked[name]))
        needs[name] = {str(canonicalize_name(it.name)) for it in further} - {name}
        line += further
    print(json.dumps(bill(needs), indent=2))


def installed(name: str) -> Distribution:
    """Return what is installed under a name."""
    try:
        return distribution(name)
    except PackageNotFoundError:
        sys.exit(f"sbom: {name} is not installed; run this by: make sbom")


def requirements(of: Distribution, extras: set[str]) -> Iterator[Requirement]:
    """Yield what it requires here, with these extras of it."""
    for text in of.requires or []:
        need = Requirement(text)
        marker = need.marker
        if marker is None or any(
            marker.evaluate({"extra": it}) for it in ("", *extras)
        ):
            yield need


def bill(needs: dict[str, set[str]]) -> dict[str, Any]:
    """Return the document; the same installation gives the same one."""
    refs = {name: purl(name) for name in sorted(needs)}
    return {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": component(ROOT)},
        "components": [component(name) for name in refs if name != ROOT],
        "dependencies": [
            {"ref": ref, "dependsOn": [refs[it] for it in sorted(needs[name])]}
            for name, ref in refs.items()
        ],
    }


def component(name: str) -> dict[str, Any]:
    """Return one package as CycloneDX has it."""
    metadata = distribution(name).metadata
    told: dict[str, Any] = {
        "type": "library",
        "bom-ref": purl(name),
        "name": metadata["Name"],
        "version": metadata["Version"],
        "purl": purl(name),
    }
    if "License-Expression" in metadata:
        told["licenses"] = [{"expression": metadata["License-Expression"]}]
    else:
        told["licenses"] = [{"license": {"name": it}} for it in licences(metadata)]
    return told


def licences(metadata: PackageMetadata) -> list[str]:
    """Return what a package without a licence expression says of its licence."""
    classifiers = metadata.get_all("Classifier") or []
    named = [it for it in classifiers if it.startswith("License :: ")]
    if named:
        return [it.rpartition(" :: ")[2] for it in named]
    # A name, a sentence or the whole text: the first line has to do.
    return [it.splitlines()[0] for it in metadata.get_all("License") or [] if it]


def purl(name: str) -> str:
    """Return the address of a package and its version, as scanners know it."""
    # A local version, such as "+cpu", is escaped there.
    version = distribution(name).version.replace("+", "%2B")
    return f"pkg:pypi/{name}@{version}"


if __name__ == "__main__":
    main()
