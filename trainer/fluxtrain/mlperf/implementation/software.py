"""The software of the runs of a result, as their nodes reported it: the same in all of them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fluxtrain.errors import UNSET, ConfigError
from fluxtrain.mlperf.evidence import Run
from fluxtrain.mlperf.node_records import NodeRecord, read
from fluxtrain.mlperf.software import SOURCE, source_digest

NODES_FILE = "nodes.json"
"""Of a package, beside its code."""
_MAX_SHOWN = 3
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+!-]*")


@dataclass(frozen=True)
class Software:
    """Versions, commit and digest of the sources, and packages of all nodes of all runs."""

    python: str
    fluxtrain: str
    revision: str
    """Empty if nobody knows it."""
    source_sha256: str
    in_container: bool
    packages: Mapping[str, str]

    @property
    def requirements(self) -> str:
        """Return the lines of requirements.txt, without fluxtrain, which is enclosed."""
        others = [f"{name}=={version}" for name, version in self.packages.items()]
        return "".join(f"{line}\n" for line in others if not line.startswith("fluxtrain=="))

    def no_name(self) -> str | None:
        """Return what is no name or version, so that it must not get into files that are run."""
        known = (self.python, self.fluxtrain, self.revision)
        texts = [*self.packages, *self.packages.values(), *filter(None, known)]
        return next((text for text in texts if not _NAME.fullmatch(text)), None)


def records(run: Run) -> list[NodeRecord]:
    """Return what the nodes of ``run`` reported."""
    return read([(line.key, line.value) for line in run.events])


def reported_nodes(runs: Sequence[Run]) -> dict[str, list[dict[str, Any]]]:
    """Return the records of the nodes of each run, as NODES_FILE has them."""
    return {
        f"result_{index}": [asdict(record) for record in records(run)]
        for index, run in enumerate(runs)
    }


def ran_software(runs: Sequence[Run]) -> Software:
    """Return the software of all nodes of ``runs``; raise ConfigError if one has none, or another one."""
    found: dict[str, Software] = {}
    for run in runs:
        told = [record for record in records(run) if record.software and record.packages]
        if not told:
            text = "its log does not say which software ran; repeat the run with this version"
            raise ConfigError(run.name, UNSET, text)
        for record in told:
            found[f"{run.name}, nodes {record.nodes}"] = _software(record)
    for place, each in found.items():
        if (name := each.no_name()) is not None:
            raise ConfigError(place, name, "is no name or version of a package, as a log has them")
    (first_place, first), *others = found.items()
    for place, other in others:
        if other != first:
            text = f"ran other software than {first_place}: {_difference(first, other)}"
            raise ConfigError(place, UNSET, text)
    return first


def require_sources(software: Software, folder: Path = SOURCE) -> None:
    """Raise ConfigError unless ``folder`` holds the sources that ran."""
    if source_digest(folder) != software.source_sha256:
        ran = software.revision or f"version {software.fluxtrain}, of an unknown commit"
        text = f"not the sources that ran ({ran}); package with those"
        raise ConfigError("fluxtrain", str(folder), text)


def _software(record: NodeRecord) -> Software:
    told = record.software
    return Software(
        told.get("python", ""),
        told.get("fluxtrain", ""),
        told.get("revision", ""),
        told.get("source_sha256", ""),
        told.get("container") == "yes",
        record.packages,
    )


def _difference(first: Software, other: Software) -> str:
    """Return in words where two differ."""
    texts = [
        f"{name} {getattr(other, name) or 'unknown'} instead of {getattr(first, name) or 'unknown'}"
        for name in ("python", "fluxtrain", "revision", "source_sha256", "in_container")
        if getattr(first, name) != getattr(other, name)
    ]
    names = sorted({*first.packages, *other.packages})
    texts += [
        f"{name} {other.packages.get(name, 'none')} instead of {first.packages.get(name, 'none')}"
        for name in names
        if first.packages.get(name) != other.packages.get(name)
    ]
    more = f", and {len(texts) - _MAX_SHOWN} more" if len(texts) > _MAX_SHOWN else ""
    return ", ".join(texts[:_MAX_SHOWN]) + more
