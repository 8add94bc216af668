"""What a release was made of: an in-toto Statement v1 with the provenance predicate v1 of SLSA."""

from __future__ import annotations

import json
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from supply_chain.checksums import sha256
from supply_chain.locks import LOCKS, lock_path, read_lock
from supply_chain.sbom import purl

STATEMENT = "https://in-toto.io/Statement/v1"
PREDICATE = "https://slsa.dev/provenance/v1"
BUILD_TYPE = "https://fluxtrain.dev/build/release/v1"


@dataclass(frozen=True)
class Build:
    """Who made a release, of which sources."""

    commit: str
    """The commit's hash."""
    seconds: int
    """The commit's time in seconds after 1970, which all files of the release get."""
    builder: str
    """A URI that names who builds; whoever checks decides whom to trust."""
    source: str = ""
    """A URI of the repository; may be empty."""


def statement(build: Build, root: Path, files: list[Path]) -> dict[str, Any]:
    """Return the statement about ``files``, made of the sources in ``root``; it has no date of its own."""
    source = {"name": "source", "digest": {"gitCommit": build.commit}}
    if build.source:
        source["uri"] = build.source
    tools = tomllib.loads((root / "pyproject.toml").read_text())["build-system"]["requires"]
    definition = {
        "buildType": BUILD_TYPE,
        "externalParameters": {"commit": build.commit, "sourceDateEpoch": build.seconds},
        "internalParameters": {"buildRequires": tools},
        "resolvedDependencies": [source, *_inputs(root)],
    }
    return {
        "_type": STATEMENT,
        "subject": [{"name": path.name, "digest": {"sha256": sha256(path)}} for path in files],
        "predicateType": PREDICATE,
        "predicate": {
            "buildDefinition": definition,
            "runDetails": {"builder": {"id": build.builder}},
        },
    }


def _inputs(root: Path) -> list[dict[str, Any]]:
    """Return the locks, and every file that an image may install by them, each once."""
    found = [
        {"name": f"images/{path.name}", "digest": {"sha256": sha256(path)}}
        for path in (lock_path(image, root) for image in LOCKS)
    ]
    packages = {package for image in LOCKS for package in read_lock(image, root)}
    files = {(purl(package), digest) for package in packages for digest in package.hashes}
    return found + [{"uri": name, "digest": {"sha256": digest}} for name, digest in sorted(files)]


def encoded(value: dict[str, Any]) -> bytes:
    """Return ``value`` as JSON, for people too."""
    return (json.dumps(value, indent=1) + "\n").encode()
