"""Which conditions, taints and labels mark a node, or its GPUs, as unhealthy."""

from __future__ import annotations

import json
from typing import Any

import pytest

from fluxtrain.errors import ConfigError
from fluxtrain_operator.base.node_health import (
    KNOWN_MARKS,
    NodeHealth,
    NodeMarks,
    parse_node_health,
)
from fluxtrain_operator.options import parse

IMAGE = "--image=example.org/trainer:1"
VARIABLE = "FLUXTRAIN_NODE_HEALTH"


def condition(kind: Any, status: Any = "True", reason: Any = "") -> dict[str, Any]:
    return {"status": {"conditions": [{"type": kind, "status": status, "reason": reason}]}}


def taint(key: Any, value: Any = None) -> dict[str, Any]:
    return {"spec": {"taints": [{"key": key, "value": value, "effect": "NoSchedule"}]}}


def label(key: str, value: str) -> dict[str, Any]:
    return {"metadata": {"labels": {key: value}}}


EXPORTER = "metricsexporter.amd.com.gpu.3.state"


@pytest.mark.parametrize(
    ("node", "of_node", "of_gpus"),
    [
        ({}, "", ""),
        (condition("Ready", "False"), "", ""),
        (condition("MemoryPressure"), "", ""),
        (condition("KernelDeadlock", "False"), "", ""),
        (condition("KernelDeadlock", "Unknown"), "", ""),
        (condition("KernelDeadlock", reason="DockerHung"), "condition KernelDeadlock=True (DockerHung)", ""),
        (condition("KernelDeadlockTwo"), "", ""),
        (condition("ReadonlyFilesystem"), "condition ReadonlyFilesystem=True", ""),
        (condition("AMDGPUXgmi"), "", "condition AMDGPUXgmi=True"),
        (condition("AMDGPUThrottle"), "", ""),
        (condition("AMDGPUGeneralApplicationFault"), "", ""),
        (condition("XIDErrors", reason="x" * 9999), "", f"condition XIDErrors=True ({'x' * 128})"),
        (taint("amd-gpu-unhealthy"), "", "taint amd-gpu-unhealthy"),
        (taint("amd-gpu-unhealthy", "AMDGPUXgmi"), "", "taint amd-gpu-unhealthy"),
        (taint("amd-gpu"), "", ""),
        (label(EXPORTER, "unhealthy"), "", f"label {EXPORTER}=unhealthy"),
        (label(EXPORTER, "healthy"), "", ""),
        (label("metricsexporterXamd.com.gpu.3.state", "unhealthy"), "", ""),
        ({"status": {"conditions": [None, 1, {"type": None}, {}]}}, "", ""),
        ({"metadata": None, "spec": {"taints": "all"}, "status": {"conditions": {}}}, "", ""),
    ],
)  # fmt: skip
def test_known_marks(node: dict[str, Any], of_node: str, of_gpus: str) -> None:
    assert (KNOWN_MARKS.of_node(node), KNOWN_MARKS.of_gpus(node)) == (of_node, of_gpus)


@pytest.mark.parametrize(
    ("kind", "mark", "node", "is_marked"),
    [
        ("conditions", "Broken", condition("Broken"), True),
        ("conditions", "Broken", condition("Broken", "False"), False),
        ("conditions", "DiskReady=False", condition("DiskReady", "False"), True),
        ("conditions", "DiskReady=False", condition("DiskReady"), False),
        ("conditions", "*Problem", condition("DiskProblem"), True),
        ("conditions", "*ady=False", condition("Ready", "False"), False),
        ("taints", "example.com/bad", taint("example.com/bad"), True),
        ("taints", "example.com/bad=disk", taint("example.com/bad", "disk"), True),
        ("taints", "example.com/bad=disk", taint("example.com/bad", "fan"), False),
        ("taints", "example.com/bad=", taint("example.com/bad"), True),
        ("taints", "example.com/bad=", taint("example.com/bad", "fan"), False),
        ("labels", "a.b/c-*=x", label("a.b/c-7", "x"), True),
        ("labels", "a.b/c-*=x", label("a.b/c-7", "y"), False),
        ("labels", "a.b/c", label("aXb/c", "x"), False),
        ("labels", "a.b/c", label("a.b/c", "x"), True),
    ],
)
@pytest.mark.parametrize("scope", ["nodes", "gpus"])
def test_added_marks(
    scope: str, kind: str, mark: str, node: dict[str, Any], is_marked: bool
) -> None:
    marks = NodeMarks(parse_node_health(json.dumps({scope: {kind: [mark]}})))
    found = {"nodes": marks.of_node(node), "gpus": marks.of_gpus(node)}
    assert bool(found.pop(scope)) == is_marked
    assert set(found.values()) == {""}, "a mark of one scope is none of the other"
    assert marks.of_gpus(taint("amd-gpu-unhealthy")), "known marks stay"


def test_known_marks_can_be_ignored() -> None:
    marks = NodeMarks(parse_node_health('{"ignored": ["KernelDeadlock", "amd-gpu-unhealthy"]}'))
    assert marks.of_node(condition("KernelDeadlock")) == ""
    assert marks.of_gpus(taint("amd-gpu-unhealthy")) == ""
    assert marks.of_node(condition("ReadonlyFilesystem"))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ("{", "nodeHealth: got '{'; must be JSON"),
        ([], "nodeHealth: got []; must be a mapping"),
        ({"cpus": {}}, "nodeHealth.cpus: no such field"),
        ({"nodes": {"annotations": []}}, "nodeHealth.nodes.annotations: no such field"),
        ({"nodes": {"conditions": ["a b"]}}, "nodeHealth.nodes.conditions[0]: got 'a b'"),
        ({"gpus": {"labels": ["ok", "*"]}}, "nodeHealth.gpus.labels[1]: got '*'"),
        ({"gpus": {"labels": [3]}}, "nodeHealth.gpus.labels[0]: got 3"),
        ({"gpus": {"taints": ["a=b=c"]}}, "nodeHealth.gpus.taints[0]"),
        ({"nodes": {"conditions": ["Ready"]}}, "must not name Ready"),
        ({"nodes": {"conditions": ["Ready=False"]}}, "must not name Ready"),
        ({"nodes": {"conditions": ["A"] * 65}}, "nodeHealth.nodes.conditions: got"),
        ({"ignored": ["KernelDeadlok"]}, "nodeHealth.ignored[0]: got 'KernelDeadlok'; must be one of"),
    ],
)  # fmt: skip
def test_invalid_marks_are_refused_at_the_start_with_their_path(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    values: Any,
    message: str,
) -> None:
    text = values if isinstance(values, str) else json.dumps(values)
    with pytest.raises(ConfigError, match="nodeHealth"):
        parse_node_health(text)
    monkeypatch.setenv(VARIABLE, text)
    with pytest.raises(SystemExit) as error:
        parse([IMAGE])
    assert error.value.code == 2
    written = capsys.readouterr().err
    assert f"error: --node-health or {VARIABLE}: " in written
    assert message in written


def test_the_command_line_wins_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert parse([IMAGE]).node_health == NodeHealth()
    monkeypatch.setenv(VARIABLE, '{"nodes": {"taints": ["a"]}}')
    assert parse([IMAGE]).node_health.nodes.taints == ["a"]
    assert parse(
        [IMAGE, '--node-health={"nodes": {"taints": ["b"]}}']
    ).node_health.nodes.taints == ["b"]
