"""Which conditions, taints and labels mark a node as unhealthy, and the distrust that its faults add up to.

Sums, decay and limits; statuses that others have edited.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from fluxtrain.errors import ConfigError
from fluxtrain_operator.base.names import stamp
from fluxtrain_operator.base.node_health import (
    EXCLUDED_FROM,
    EXCLUDED_PERCENT,
    KNOWN_MARKS,
    MAX_AVOIDED,
    MAX_EXCLUDED,
    Distrust,
    Fault,
    NodeHealth,
    NodeMarks,
    Score,
    faults_of,
    ordered,
    parse_node_health,
    score,
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


NOW = 1_800_000_000.0
HOUR = 3600.0
LOST = "NodeLost"


def faults(*hours_ago: float, reason: str = LOST) -> list[Fault]:
    return [Fault("a", reason, NOW - hours * HOUR) for hours in hours_ago]


@pytest.mark.parametrize(
    ("listed", "value"),
    [
        ([], 0.0),
        (faults(0), 1.0),
        (faults(4), 0.5),
        (faults(16), 1 / 16),
        (faults(0, 4, 8), 1.75),
        (faults(0, reason="Killed"), 0.5),
        (faults(0, reason="OfANewerOperator"), 0.5),
        (faults(0, 59 / HOUR, 59 / HOUR), 2 ** (-59 / (4 * HOUR))),  # one event
        (faults(0, 60 / HOUR), 1 + 2 ** (-60 / (4 * HOUR))),
        ([*faults(0, reason="Killed"), *faults(30 / HOUR)], 2 ** (-30 / (4 * HOUR))),
        (faults(-299 / HOUR), 1.0),  # another leader's clock is ahead
        (faults(-301 / HOUR), 0.0),
        (faults(-10_000), 0.0),
    ],
)
def test_the_sum_of_the_faults_of_a_node_decays(listed: list[Fault], value: float) -> None:
    assert score(listed, NOW).value == pytest.approx(value, rel=1e-3)
    assert score(listed[::-1], NOW) == score(listed, NOW), "in any order"


@pytest.mark.parametrize(
    ("hours_ago", "is_excluded"),
    [
        ((), False),
        ((0,), False),
        ((0, 0.1), False),  # threshold - 1
        ((0, 0.5, 1), True),
        ((0, 0.98, 1), True),  # any three within an hour
        ((0.02, 0.04, 0), True),
        ((1, 1.5, 2), False),  # decayed
        (tuple(n / 10 for n in range(16)), True),
    ],
)
def test_three_faults_within_an_hour_exclude_a_node(
    hours_ago: tuple[float, ...], is_excluded: bool
) -> None:
    distrust = ordered({"a": score(faults(*hours_ago), NOW)}, NOW)
    assert bool(distrust.excluded([*"abcde"])) == is_excluded
    assert bool(distrust.avoided()) == bool(hours_ago), "from the first fault on"


def test_faults_before_the_creation_of_a_node_are_those_of_an_earlier_one() -> None:
    listed = faults(0, 2, 4)
    assert score(listed, NOW, created=NOW - HOUR).value == 1.0
    assert score(listed, NOW, created=NOW + HOUR).value == 0.0


def test_distrust_does_not_grow_while_the_clock_goes_back() -> None:
    distrust = Distrust({"a": score(faults(0, 0.1), NOW)}, NOW - 100 * HOUR)
    assert distrust.of("a") <= 2.0


@pytest.mark.parametrize("num_nodes", [0, 1, 4, 5, 9, 10, 500, 5000])
@pytest.mark.parametrize("num_distrusted", [0, 1, 3, 5000])
def test_only_a_part_of_the_nodes_is_excluded_the_worst_first(
    num_nodes: int, num_distrusted: int
) -> None:
    nodes = {f"n{number}" for number in range(num_nodes)}
    values = {f"n{n}": Score(10.0 + n, NOW, NOW) for n in range(num_distrusted)}
    distrust = ordered(values, NOW)
    excluded = distrust.excluded(nodes)
    most = min(MAX_EXCLUDED, num_nodes * EXCLUDED_PERCENT // 100)
    assert len(excluded) == min(most, num_distrusted, num_nodes)
    worst = [f"n{n}" for n in reversed(range(min(num_nodes, num_distrusted)))]
    assert list(excluded) == worst[: len(excluded)]
    assert len(distrust.avoided()) == min(MAX_AVOIDED, num_distrusted)


def test_forgotten_nodes_are_left_out() -> None:
    assert not ordered({"a": Score(1 / 17, NOW, NOW)}, NOW).scores
    assert not ordered({"a": Score(1.0, NOW, NOW)}, NOW + 16.1 * HOUR).scores
    assert Distrust().of("a") == 0.0


@pytest.mark.parametrize(
    ("before", "reason", "is_new"),
    [
        ((), LOST, False),
        ((0.1, 0.2), LOST, True),
        ((0.1, 0.2), "Killed", False),
        ((0.1, 0.2, 0.3), LOST, False),  # excluded already
        ((0.005, 0.2), LOST, False),  # the same fault, of another pod
    ],
)
def test_a_fault_that_excludes_a_node_is_known(
    before: tuple[float, ...], reason: str, is_new: bool
) -> None:
    distrust = ordered({"a": score(faults(*before), NOW)}, NOW)
    assert distrust.would_exclude(Fault("a", reason, NOW)) == is_new
    after = distrust.of("a") + (1.0 if reason == LOST else 0.5)
    assert not is_new or after >= EXCLUDED_FROM


GOOD = {"node": "a", "reason": LOST, "time": stamp(NOW), "pod": "u"}


@pytest.mark.parametrize(
    ("status", "count"),
    [
        (None, 0),
        ([], 0),
        ({}, 0),
        ({"nodeFaults": None}, 0),
        ({"nodeFaults": "many"}, 0),
        ({"nodeFaults": [GOOD]}, 1),
        ({"nodeFaults": [None, 3, "a", [], {}, GOOD]}, 1),
        ({"nodeFaults": [{**GOOD, "node": ""}, {**GOOD, "node": "a" * 254}, {**GOOD, "node": 1}]}, 0),
        ({"nodeFaults": [{**GOOD, "reason": "a" * 65}, {**GOOD, "reason": None}]}, 0),
        ({"nodeFaults": [{**GOOD, "time": "soon"}, {**GOOD, "time": 1}]}, 0),
        ({"nodeFaults": [{**GOOD, "more": {"of": "it"}}]}, 1),
        ({"nodeFaults": [GOOD] * 10_000}, 16),
    ],
)  # fmt: skip
def test_malformed_faults_of_a_status_are_left_out(status: Any, count: int) -> None:
    assert len(faults_of(status)) == count
