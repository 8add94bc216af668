"""What every node reports of itself in the MLPerf log: hardware, system, software; equal nodes as one record.

| key                | value                                                                            |
|--------------------|----------------------------------------------------------------------------------|
| fluxtrain_nodes    | ``nodes``, such as 0-3,5 in the order of the ranks, and their hardware           |
| fluxtrain_software | ``nodes``, and Python, fluxtrain, the commit and digest of its sources           |
| fluxtrain_packages | ``nodes``, and ``packages`` by name; several events, as a line has at most 4 KiB |

So lines are written whole to a pipe that others write to as well.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fluxtrain.distributed import World
from fluxtrain.mlperf.installed import packages
from fluxtrain.mlperf.machine import node_facts
from fluxtrain.mlperf.software import software_facts

NODES_KEY, SOFTWARE_KEY = "fluxtrain_nodes", "fluxtrain_software"
PACKAGES_KEY = "fluxtrain_packages"
_POSITIONS = re.compile(r"([0-9]{1,6})(?:-([0-9]{1,6}))?")
_MAX_CHARACTERS = 3000
"""Of the packages of one event: a pipe takes 4096 bytes at once."""


@dataclass(frozen=True)
class NodeRecord:
    """What one node, or several equal ones, reported."""

    nodes: str
    """Positions in the order of the ranks, such as 0-3,5."""
    hardware: Mapping[str, str]
    software: Mapping[str, str]
    packages: Mapping[str, str]


def gather(world: World) -> list[NodeRecord]:
    """Return the records of all nodes; every rank must call it."""
    own: list[str] = []
    if world.local_rank == 0:
        told = [node_facts(world.local_size), software_facts(), packages()]
        own = [json.dumps(told, sort_keys=True)]
    positions: dict[str, list[int]] = {}
    for node, text in enumerate(world.all_gather(own)):
        positions.setdefault(text, []).append(node)
    return [NodeRecord(_ranges(nodes), *json.loads(text)) for text, nodes in positions.items()]


def events(records: Sequence[NodeRecord]) -> Iterator[tuple[str, object]]:
    """Yield the events of ``records``."""
    for record in records:
        yield NODES_KEY, {"nodes": record.nodes, **record.hardware}
        yield SOFTWARE_KEY, {"nodes": record.nodes, **record.software}
        for part in _parts(record.packages):
            yield PACKAGES_KEY, {"nodes": record.nodes, "packages": part}


def read(values: Sequence[tuple[str, Any]]) -> list[NodeRecord]:
    """Return the records in the keys and ``values`` of a log; what is no record is left out."""
    found: dict[str, dict[str, dict[str, str]]] = {}
    for key, value in values:
        if key in (NODES_KEY, SOFTWARE_KEY, PACKAGES_KEY) and isinstance(value, dict):
            kinds = found.setdefault(str(value.get("nodes")), {})
            told = value.get("packages") if key == PACKAGES_KEY else value
            if isinstance(told, dict):
                kept = {str(name): str(text) for name, text in told.items() if name != "nodes"}
                kinds.setdefault(key, {}).update(kept)
    return [
        NodeRecord(
            nodes,
            kinds.get(NODES_KEY, {}),
            kinds.get(SOFTWARE_KEY, {}),
            kinds.get(PACKAGES_KEY, {}),
        )
        for nodes, kinds in found.items()
    ]


def num_nodes(record: NodeRecord) -> int:
    """Return the number of nodes of ``record``, 0 if its positions are none."""
    count = 0
    for part in record.nodes.split(","):
        if not (match := _POSITIONS.fullmatch(part)):
            return 0
        count += int(match[2] or match[1]) - int(match[1]) + 1
    return count


def _parts(installed: Mapping[str, str]) -> Iterator[dict[str, str]]:
    """Yield ``installed`` in parts that fit into a line each."""
    part: dict[str, str] = {}
    size = 0
    for name, version in installed.items():
        added = len(name) + len(version) + len('"": "", ')
        if part and size + added > _MAX_CHARACTERS:
            yield part
            part, size = {}, 0
        part[name] = version
        size += added
    if part:
        yield part


def _ranges(numbers: Sequence[int]) -> str:
    """Return ascending ``numbers`` as ranges, such as 0-3,5."""
    texts: list[str] = []
    first = last = numbers[0]
    for number in [*numbers[1:], None]:
        if number is not None and number == last + 1:
            last = number
            continue
        texts.append(str(first) if first == last else f"{first}-{last}")
        if number is not None:
            first = last = number
    return ",".join(texts)
