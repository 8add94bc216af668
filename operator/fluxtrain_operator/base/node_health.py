"""NodeHealth: the conditions, taints and labels by which others mark a node, or its GPUs, as unhealthy."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, Any, ClassVar, NamedTuple

from pydantic import Field

from fluxtrain.contract.model_base import ApiModel, Rule
from fluxtrain.contract.resource.status import MAX_NODE_FAULTS
from fluxtrain.errors import ConfigError
from fluxtrain_operator.base.names import mapping, mappings, seconds
from fluxtrain_operator.base.settings import parse_json

_READY = "Ready"
"""A condition with rules of its own, see `planner.guard`."""
_MAX_MARKS = 64

Mark = Annotated[
    str,
    Field(
        pattern=r"^[A-Za-z0-9*_./-]*[A-Za-z0-9][A-Za-z0-9*_./-]*(=[A-Za-z0-9_.-]*)?$",
        max_length=381,
        title="NAME or NAME=VALUE, such as KernelDeadlock; * in the name stands for any characters",
    ),
]
Marks = Annotated[list[Mark], Field(max_length=_MAX_MARKS)]


class MarkLists(ApiModel):
    """Marks that mean unhealthy; without a value, a condition counts if it is True, others with any value."""

    rules: ClassVar = (
        Rule(
            "conditions",
            "must not name Ready: the operator has rules of its own for nodes that are not ready",
            lambda lists: not any(mark.partition("=")[0] == _READY for mark in lists.conditions),
            "true",
        ),
    )

    conditions: Marks = []
    """Types of node conditions."""
    taints: Marks = []
    """Keys of taints."""
    labels: Marks = []
    """Keys of labels."""


class NodeHealth(ApiModel):
    """What an administrator adds to the marks that the operator knows, and takes from them."""

    nodes: MarkLists = MarkLists()
    """Marks of whole nodes, for all jobs."""
    gpus: MarkLists = MarkLists()
    """Marks of GPUs, for jobs with GPUs."""
    ignored: Marks = []
    """Known marks that do not count."""


NO_ADDITIONS = NodeHealth()
KNOWN_NODE_MARKS = MarkLists(
    conditions=[
        # node-problem-detector, with its own configurations and those of AKS
        *("KernelDeadlock", "ReadonlyFilesystem", "XfsShutdown", "CorruptDockerOverlay2"),
        *("FrequentKubeletRestart", "FrequentContainerdRestart", "FrequentDockerRestart"),
        *("FrequentUnregisterNetDevice", "FilesystemCorruptionProblem"),
        *("KubeletUnhealthy", "KubeletProblem"),
        *("ContainerRuntimeUnhealthy", "ContainerRuntimeProblem"),
    ]
)
KNOWN_GPU_MARKS = MarkLists(
    conditions=[
        # AMD's GPU operator: those that its remediation reacts to, but for throttling and application faults
        *("AMDGPUUnhealthy", "AMDGPUProblem", "AMDGPUXgmi", "AMDGPUXgmiBandwidthPerformance"),
        *("AMDGPUBadPageRetirementThreshold", "AMDGPUHBMError", "AMDGPUHbmBandwidthPerformance"),
        *("AMDGPUOnDieEcc", "AMDGPUEndToEndCrc", "AMDGPUWafl", "AMDGPUPcieAer"),
        *("AMDGPUPcieLinkSpeedNotCorrect", "AMDGPUPcieLinkWidthNotCorrect"),
        *("AMDGPUPcieBandwidthPerformance", "AMDGPUGemmPerformance", "AMDGPUHplFailure"),
        *("AMDGPUAccuracyCheckFailureAcf", "AMDGPUBootFailed", "AMDGPUDeviceInternalError"),
        *("AMDGPUWatchdogTimeoutWdt", "AMDGPUHwsHang", "AMDGPUHardwareAssertionHwa"),
        "AMDGPUProgramFaultDueToHardwareError",
        # AKS, for NVIDIA's GPUs
        *("XIDErrors", "GPUMissing", "NVLinkStatusInactive", "IBLinkFlapping"),
    ],
    taints=["amd-gpu-unhealthy"],
    labels=["metricsexporter.amd.com.gpu.*.state=unhealthy"],  # AMD's device metrics exporter
)
_KINDS: Mapping[str, str] = {"conditions": "True", "taints": "", "labels": ""}
"""The value of a mark that has none; empty for any."""


@dataclass(frozen=True)
class Matcher:
    """Finds marks of one scope: a regular expression for each kind, on ``NAME=VALUE``."""

    patterns: Mapping[str, re.Pattern[str] | None]

    @staticmethod
    def of(known: MarkLists, added: MarkLists, ignored: Iterable[str]) -> Matcher:
        """Return the matcher of the marks in ``known`` and ``added``, without ``ignored`` ones."""
        left_out = set(ignored)
        patterns: dict[str, re.Pattern[str] | None] = {}
        for kind, default in _KINDS.items():
            marks = [m for m in getattr(known, kind) if m not in left_out]
            marks += getattr(added, kind)
            alternatives = "|".join(_expression(mark, default) for mark in marks)
            patterns[kind] = re.compile(alternatives) if marks else None
        return Matcher(patterns)

    def mark(self, kind: str, name: object, value: object) -> bool:
        pattern = self.patterns[kind]
        return pattern is not None and pattern.fullmatch(f"{name}={value or ''}") is not None


@dataclass(frozen=True)
class NodeMarks:
    """Reads from nodes why they, or their GPUs, are marked as unhealthy."""

    health: NodeHealth = NO_ADDITIONS

    @cached_property
    def _nodes(self) -> Matcher:
        return Matcher.of(KNOWN_NODE_MARKS, self.health.nodes, self.health.ignored)

    @cached_property
    def _gpus(self) -> Matcher:
        return Matcher.of(KNOWN_GPU_MARKS, self.health.gpus, self.health.ignored)

    def of_node(self, manifest: Mapping[str, Any]) -> str:
        """Return why the node in ``manifest`` is unhealthy; empty if it is not marked."""
        return _first_mark(self._nodes, manifest)

    def of_gpus(self, manifest: Mapping[str, Any]) -> str:
        """Return why GPUs of the node in ``manifest`` are unhealthy; empty if none is marked."""
        return _first_mark(self._gpus, manifest)


KNOWN_MARKS = NodeMarks()


def parse_node_health(text: str) -> NodeHealth:
    """Return the marks in the JSON ``text``; ConfigError with the field's path for wrong ones."""
    health = parse_json(NodeHealth, text, "nodeHealth")
    known = {
        m
        for lists in (KNOWN_NODE_MARKS, KNOWN_GPU_MARKS)
        for k in _KINDS
        for m in getattr(lists, k)
    }
    for number, mark in enumerate(health.ignored):
        if mark not in known:
            allowed = f"must be one of the known marks {', '.join(sorted(known))}"
            raise ConfigError(f"nodeHealth.ignored[{number}]", mark, allowed)
    return health


def _expression(mark: str, default: str) -> str:
    name, separator, value = mark.partition("=")
    wanted = value if separator else default
    expected = re.escape(wanted) if separator or default else ".*"
    return f"{re.escape(name).replace(re.escape('*'), '.*')}={expected}"


def _first_mark(matcher: Matcher, manifest: Mapping[str, Any]) -> str:
    spec, status = mapping(manifest, "spec"), mapping(manifest, "status")
    for condition in mappings(status, "conditions"):
        kind, value = condition.get("type"), condition.get("status")
        if kind != _READY and matcher.mark("conditions", kind, value):
            reason = str(condition.get("reason") or "")[:128]
            return f"condition {kind}={value}" + (f" ({reason})" if reason else "")
    for taint in mappings(spec, "taints"):
        if matcher.mark("taints", taint.get("key"), taint.get("value")):
            return f"taint {taint.get('key')}"
    for key, value in mapping(mapping(manifest, "metadata"), "labels").items():
        if matcher.mark("labels", key, value):
            return f"label {key}={value}"
    return ""


# Distrust of nodes: the sum of the faults attributed to each, which halves every four hours. Pure.
#
# The faults are those in the statuses of all jobs. They were written by the operator, but others
# may edit them: invalid ones are left out, and no number of them excludes more than a part of the
# nodes.


HALF_LIFE_SECONDS = 4 * 3600.0
EXCLUDED_FROM = 2.5
"""Three faults within an hour, never two."""
FORGOTTEN_BELOW = 1 / 16
"""A single fault is forgotten after 16 hours."""
SAME_FAULT_SECONDS = 60.0
"""Faults of a node within this time, such as those of all its pods, count as one."""
EXCLUDED_PERCENT = 20
"""Part of the nodes that may be excluded."""
MAX_EXCLUDED, MAX_AVOIDED = 64, 32
"""Limits of the lists in a pod's affinity."""
_AHEAD_SECONDS = 300.0
"""A fault that is further in the future is not believed: the clocks of two leaders differ by less."""
_MAX_NAME, _MAX_REASON = 253, 64

UNCERTAIN = 0.5
"""Weight of a fault that another program may have caused; the node is distrusted if it is repeated."""
WEIGHTS: Mapping[str, float] = {
    "NodeLost": 1.0,
    "AgentLost": 1.0,
    "KubeletUnresponsive": 1.0,
    "UnhealthyGPU": 1.0,
    "UnhealthyNode": 1.0,
    "HardwareError": 1.0,
    "UnfitNode": 1.0,
    "NoProgress": 1.0,
}
"""Weights of the reasons; UNCERTAIN for any other."""


class Fault(NamedTuple):
    """A fault attributed to a node."""

    node: str
    reason: str
    time: float
    """Unix time."""


class Score(NamedTuple):
    """The distrust of one node at a time."""

    value: float = 0.0
    time: float = 0.0
    """Unix time at which it had this value."""
    latest: float = float("-inf")
    """Unix time of its newest fault."""

    def at(self, now: float) -> float:
        """Return the value at ``now``; it does not grow if the clock goes back."""
        return self.value * _decay(now - self.time)


def faults_of(status: object) -> tuple[Fault, ...]:
    """Return the valid faults in a job's ``status`` as it was read, at most MAX_NODE_FAULTS."""
    listed = status.get("nodeFaults") if isinstance(status, Mapping) else None
    newest = listed[-MAX_NODE_FAULTS:] if isinstance(listed, list) else []
    faults = (_fault(values) for values in newest)
    return tuple(fault for fault in faults if fault is not None)


def score(faults: Iterable[Fault], now: float, created: float = 0.0) -> Score:
    """Return the distrust of the node of ``faults``, which was ``created`` then, at ``now``.

    Of faults within SAME_FAULT_SECONDS of the first of them, the heaviest counts.
    """
    counted = sorted(f for f in faults if created <= f.time <= now + _AHEAD_SECONDS)
    events: list[tuple[float, float]] = []
    for fault in sorted(counted, key=lambda fault: fault.time):
        weight = WEIGHTS.get(fault.reason, UNCERTAIN)
        if events and fault.time < events[-1][0] + SAME_FAULT_SECONDS:
            first, heaviest = events.pop()
            events.append((first, max(heaviest, weight)))
        else:
            events.append((fault.time, weight))
    value = sum(weight * _decay(now - time) for time, weight in events)
    return Score(value, now, max((f.time for f in counted), default=float("-inf")))


@dataclass(frozen=True)
class Distrust:
    """The distrust of all nodes at one time."""

    scores: Mapping[str, Score] = field(default_factory=dict)
    """By name, the most distrusted first; nodes whose faults are forgotten are left out."""
    now: float = 0.0

    def of(self, node: str) -> float:
        """Return the distrust of ``node``, 0 if it has had no fault lately."""
        known = self.scores.get(node)
        return known.at(self.now) if known is not None else 0.0

    def excluded(self, candidates: Collection[str]) -> tuple[str, ...]:
        """Return those of ``candidates`` that new pods exclude: at most EXCLUDED_PERCENT, the worst first."""
        most = min(MAX_EXCLUDED, len(candidates) * EXCLUDED_PERCENT // 100)
        distrusted = [n for n in self.scores if n in candidates and self.of(n) >= EXCLUDED_FROM]
        return tuple(distrusted[:most])

    def avoided(self) -> tuple[str, ...]:
        """Return the nodes that new pods avoid if there are others: at most MAX_AVOIDED, the worst first."""
        return tuple(self.scores)[:MAX_AVOIDED]

    def would_exclude(self, fault: Fault) -> bool:
        """Return whether a node reaches EXCLUDED_FROM by one more ``fault``."""
        known, before = self.scores.get(fault.node, Score()), self.of(fault.node)
        if fault.time < known.latest + SAME_FAULT_SECONDS:
            return False
        return before < EXCLUDED_FROM <= before + WEIGHTS.get(fault.reason, UNCERTAIN)


NO_DISTRUST = Distrust()


def ordered(scores: Mapping[str, Score], now: float) -> Distrust:
    """Return the distrust with ``scores``, the most distrusted first, at ``now``."""
    known = [(name, score) for name, score in scores.items() if score.at(now) >= FORGOTTEN_BELOW]
    known.sort(key=lambda item: (-item[1].at(now), item[0]))
    return Distrust(dict(known), now)


def _decay(age: float) -> float:
    return math.exp2(-max(0.0, age) / HALF_LIFE_SECONDS)


def _fault(values: object) -> Fault | None:
    if not isinstance(values, Mapping):
        return None
    node, reason, time = values.get("node"), values.get("reason"), seconds(values.get("time"))
    if not isinstance(node, str) or not isinstance(reason, str) or time is None:
        return None
    is_short = 0 < len(node) <= _MAX_NAME and len(reason) <= _MAX_REASON
    return Fault(node, reason, time) if is_short else None
