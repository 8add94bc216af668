"""NodeHealth: the conditions, taints and labels by which others mark a node, or its GPUs, as unhealthy."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, ClassVar

from pydantic import Field

from fluxtrain.contract.resource.api_model import ApiModel
from fluxtrain.contract.strict_model import Rule
from fluxtrain.contract.validation import validate
from fluxtrain.errors import ConfigError
from fluxtrain_operator.mappings import mapping, mappings

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
        """Return whether ``name`` with ``value`` is a mark of ``kind``."""
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
    try:
        values = json.loads(text or "{}")
    except json.JSONDecodeError as error:
        raise ConfigError("nodeHealth", text, f"must be JSON: {error}") from None
    health = validate(NodeHealth, values, "nodeHealth")
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
