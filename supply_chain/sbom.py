"""CycloneDX documents of both images' Python packages; the same lock gives the same bytes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from supply_chain.locks import EXTRAS, IMAGES, ROOT, Package, read_lock

BASES = "Packages of the base images are not listed: `syft IMAGE` lists them."
"""What `make sbom` says of its documents."""


def document(image: str, version: str, root: Path = ROOT) -> dict[str, Any]:
    """Return the CycloneDX 1.6 document of ``image``."""
    packages = read_lock(image, root)
    optional = _optional(packages, root) if image == "trainer" else []
    own = {
        "type": "container",
        "bom-ref": f"fluxtrain-{image}",
        "name": f"fluxtrain/{image}",
        "version": version,
        "licenses": [{"license": {"id": "Apache-2.0"}}],
    }
    parts = [f"pkg:pypi/fluxtrain@{version}", *map(purl, packages)]
    notes = [{"name": "fluxtrain:base-image", "value": _BASES[image]}]
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": own, "properties": notes},
        "components": [
            _library("fluxtrain", version, parts[0]),
            *map(_component, packages),
            *optional,
        ],
        "dependencies": [{"ref": own["bom-ref"], "dependsOn": parts}],
    }


_BASES = {
    "operator": "the packages of the base image (Python, its system libraries) are not listed",
    "trainer": "torch for AMD GPUs, ROCm, RCCL and others of the base image are not listed",
}


def write(folder: Path, version: str, root: Path = ROOT) -> list[Path]:
    """Write the documents of both images to ``folder`` and return their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{image}-{version}.cdx.json" for image in IMAGES]
    for image, path in zip(IMAGES, paths, strict=True):
        path.write_text(json.dumps(document(image, version, root), indent=2) + "\n")
    return paths


def purl(package: Package) -> str:
    """Return the package URL."""
    return f"pkg:pypi/{package.name.lower().replace('_', '-')}@{package.version}"


def _library(name: str, version: str, purl: str) -> dict[str, Any]:
    return {"type": "library", "bom-ref": purl, "name": name, "version": version, "purl": purl}


def _optional(installed: Sequence[Package], root: Path) -> list[dict[str, Any]]:
    """Return what only EXTRA_PACKAGES add to ``installed``, each once, with the extras that bring it."""
    known, found = {purl(package) for package in installed}, dict[str, dict[str, Any]]()
    for extra in EXTRAS:
        for package in read_lock(extra, root):
            if purl(package) in known:
                continue
            part = found.setdefault(purl(package), {**_component(package), "scope": "optional"})
            part.setdefault("properties", []).append(
                {"name": "fluxtrain:extra-package", "value": extra}
            )
    return list(found.values())


def _component(package: Package) -> dict[str, Any]:
    """Return a library with the hashes of all files that pip may install of it."""
    found = _library(package.name, package.version, purl(package))
    hashes = [{"alg": "SHA-256", "content": digest} for digest in package.hashes]
    found["externalReferences"] = [{"type": "distribution", "url": purl(package), "hashes": hashes}]
    if package.marker:
        found["properties"] = [{"name": "fluxtrain:only-where", "value": package.marker}]
    return found
