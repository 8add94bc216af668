"""Parsing of pods, nodes and progress: missing or malformed values have defaults."""

from __future__ import annotations

import math
from typing import Any

import pytest

from fluxtrain.contract.resource.status import ProgressStatus
from fluxtrain_operator.base import names
from fluxtrain_operator.base.reports import Progress, Straggler
from fluxtrain_operator.planner.guard import failure_of
from fluxtrain_operator.planner.observed import NodeView, Observed, Pod
from fluxtrain_operator.resources.scheduling import Queueing


def manifest(component: str = names.TRAINER, **status: Any) -> dict[str, Any]:
    return {
        "metadata": {
            "name": "job-3",
            "uid": "u",
            "creationTimestamp": "2026-01-01T00:00:00Z",
            "labels": {
                names.LABEL_COMPONENT: component,
                names.LABEL_INDEX: "3",
                names.LABEL_ATTEMPT: "2",
            },
            "annotations": {names.ANNOTATION_NODES: "2:8", names.ANNOTATION_REPLACEMENT: "5"},
        },
        "spec": {"nodeName": "node-1"},
        "status": status,
    }


def container(**state: Any) -> list[dict[str, Any]]:
    sidecar = {"name": "sidecar", "state": {"running": {}}}
    return [sidecar, {"name": names.TRAINER, "state": state}]


def test_a_running_pod_is_parsed() -> None:
    running = {"running": {"startedAt": "2026-01-01T00:00:10Z"}}
    ready = [{"type": "Ready", "status": "True"}]
    pod = Pod.from_object(
        manifest(phase="Running", conditions=ready, containerStatuses=container(**running))
    )
    assert (pod.index, pod.attempt, pod.replacement, pod.nodes) == (3, 2, 5, (2, 8))
    assert (pod.node, pod.ready, pod.running, pod.ended) == ("node-1", True, True, False)
    assert pod.started == pod.created + 10


def test_a_pod_has_ended_even_if_its_sidecar_runs() -> None:
    terminated = {
        "exitCode": 3,
        "reason": "Error",
        "message": "a\nb\n",
        "finishedAt": "2026-01-01T01:00:00Z",
    }
    pod = Pod.from_object(
        manifest(phase="Running", containerStatuses=container(terminated=terminated))
    )
    assert (pod.ended, pod.running, pod.exit_code) == (True, False, 3)
    failure = failure_of(pod)
    assert failure is not None
    assert (failure.reason, failure.error_line, failure.infrastructure) == ("Diverged", "b", False)


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        (
            {"conditions": [
                {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "no room"}
            ]},
            "Unschedulable: no room",
        ),
        (
            {"containerStatuses": container(waiting={"reason": "ImagePullBackOff", "message": "no such"})},
            "ImagePullBackOff: no such",
        ),
        ({"containerStatuses": container(waiting={"reason": "ContainerCreating"})}, "ContainerCreating"),
        ({}, ""),
    ],
)  # fmt: skip
def test_a_waiting_pod_has_a_reason(status: dict[str, Any], expected: str) -> None:
    assert Pod.from_object(manifest(**status)).waiting == expected


def test_a_scheduling_gate_is_parsed() -> None:
    gate = [{"type": "PodScheduled", "status": "False", "reason": "SchedulingGated"}]
    assert Pod.from_object(manifest(conditions=gate)).gated


def test_kueues_gate_and_finalizer_are_parsed() -> None:
    managed = manifest()
    managed["metadata"]["finalizers"] = [names.KUEUE_FINALIZER]
    managed["spec"]["schedulingGates"] = [{"name": names.KUEUE_GATE}]
    pod = Pod.from_object(managed)
    queueing = Queueing()
    assert (pod.gates, pod.finalizers) == ((names.KUEUE_GATE,), (names.KUEUE_FINALIZER,))
    assert (queueing.is_member(pod), queueing.is_never_admitted(pod)) == (True, False)
    managed["metadata"]["deletionGracePeriodSeconds"] = 0
    assert (pod.forced, Pod.from_object(managed).forced) == (False, True)
    del managed["metadata"]["finalizers"]
    assert queueing.is_never_admitted(Pod.from_object(managed))


@pytest.mark.parametrize(
    "malformed",
    [
        {},
        {"metadata": None, "spec": None, "status": None},
        {"metadata": {"labels": {names.LABEL_INDEX: "x", names.LABEL_ATTEMPT: None}}},
        {"metadata": {"annotations": {names.ANNOTATION_NODES: "many"}}},
        {"status": {"conditions": [None, 1], "containerStatuses": {"a": 1}}},
        {"metadata": {"creationTimestamp": "yesterday", "deletionTimestamp": 3}},
    ],
)
def test_malformed_fields_of_a_pod_have_defaults(malformed: dict[str, Any]) -> None:
    pod = Pod.from_object(malformed)
    assert (pod.index, pod.phase, pod.nodes, pod.ended) == (0, "Pending", (1, 1), False)


@pytest.mark.parametrize("number", ["99999999999", "9" * 5000])
def test_a_huge_number_in_an_annotation_is_bounded(number: str) -> None:
    pod = Pod.from_object({"metadata": {"annotations": {names.ANNOTATION_REPLACEMENT: number}}})
    assert pod.replacement == 10**9


def test_pods_are_grouped_by_component() -> None:
    rendezvous = manifest(names.RENDEZVOUS)
    observed = Observed.from_objects(
        [rendezvous, manifest(), {"metadata": {}}], predecessors={"a": "Complete"}
    )
    assert [pod.index for pod in observed.pods] == [3]
    assert observed.rendezvous is not None
    assert observed.predecessors == {"a": "Complete"}


@pytest.mark.parametrize(
    ("node", "ready", "unhealthy"),
    [
        ({"status": {"conditions": [{"type": "Ready", "status": "True"}]}}, True, ""),
        ({"status": {"conditions": [{"type": "Ready", "status": "Unknown"}]}}, False, ""),
        ({"status": {}}, False, ""),
        (
            {"metadata": {"labels": {"metricsexporter.amd.com.gpu.3.state": "unhealthy"}}},
            False,
            "label metricsexporter.amd.com.gpu.3.state=unhealthy",
        ),
        ({"metadata": {"labels": {"metricsexporter.amd.com.gpu.3.state": "healthy"}}}, False, ""),
        (
            {"spec": {"taints": [{"key": "amd-gpu-unhealthy", "effect": "NoSchedule"}]}},
            False,
            "taint amd-gpu-unhealthy",
        ),
    ],
)
def test_a_node_is_parsed(node: dict[str, Any], ready: bool, unhealthy: str) -> None:
    view = NodeView.from_object(node)
    assert (view.ready, view.unhealthy) == (ready, unhealthy)


@pytest.mark.parametrize(
    ("node", "changes"),
    [
        ({}, {}),
        ({"spec": {"unschedulable": True}}, {"cordoned": True}),
        ({"spec": {"unschedulable": "yes"}}, {}),
        ({"metadata": {"creationTimestamp": "1970-01-01T00:01:00Z"}}, {"created": 60.0}),
        ({"metadata": {"name": "n1", "labels": {names.HOSTNAME: "n1"}}}, {"name": "n1"}),
        (
            {"metadata": {"name": "n1", "labels": {names.HOSTNAME: "host-1"}}},
            {"name": "n1", "hostname": "host-1"},
        ),
        (
            {"status": {"conditions": [{"type": "KernelDeadlock", "status": "True"}]}},
            {"problem": "condition KernelDeadlock=True"},
        ),
    ],
)
def test_what_else_is_read_of_a_node(node: dict[str, Any], changes: dict[str, Any]) -> None:
    assert NodeView.from_object(node) == NodeView(**{"name": "", "ready": False, **changes})


def test_progress_is_parsed() -> None:
    progress = Progress.from_json(
        {
            "phase": "step", "step": 7, "steps": 30, "epoch": 2, "epochs": 5, "samples": 56,
            "trainLoss": 0.123456789, "mfu": None,
            "samplesPerSecond": 8.5, "targetSamples": 7_077_888,
            "lastStepTime": 1_767_225_610.9, "checkpointStep": 5,
            "checkpointTime": 1_767_225_600.0, "processRestarts": 2, "port": 9464,
        }
    )  # fmt: skip
    assert progress is not None
    assert (progress.status.step, progress.status.samples) == (7, 56)
    found = (progress.status.steps, progress.status.epoch, progress.status.epochs)
    assert found == (30, 2, 5)
    assert (progress.status.train_loss, progress.status.mfu) == (0.123457, None)
    assert progress.status.target_samples == 7_077_888
    assert progress.status.last_step_time == "2026-01-01T00:00:10Z"
    assert progress.checkpoint is not None
    assert (progress.checkpoint.step, progress.process_restarts) == (5, 2)


def test_the_ranks_of_a_node_are_parsed() -> None:
    first = {
        "rank": 0,
        "phase": "step",
        "step": 7,
        "secondsInPhase": 9.5,
        "secondsSinceProgress": 2,
    }
    second = {**first, "rank": 1, "stepSeconds": 0.5, "stack": "wait (queue:7)\nmore"}
    invalid = [None, 7, {}, {**first, "phase": "walking"}, {**first, "secondsSinceProgress": "7"}]
    progress = Progress.from_json({**first, "ranks": [first, second, *invalid]})
    assert progress is not None
    ranks = [(r.rank, r.step, r.seconds_since_progress, r.stack) for r in progress.ranks]
    assert ranks == [(0, 7, 2.0, ""), (1, 7, 2.0, "wait (queue:7)")]
    assert progress.seconds_since_progress == 2.0
    alone = Progress.from_json(first)
    assert alone is not None
    assert alone.ranks == progress.ranks[:1], "a process whose node has no list reports itself"
    many = Progress.from_json({"ranks": [first] * 100_000})
    assert many is not None
    assert len(many.ranks) == 64
    silent = Progress.from_json({"phase": "step"})
    assert silent is not None
    assert (silent.phase, silent.ranks, silent.seconds_since_progress) == ("step", (), None)


def test_the_ranks_that_agents_report_are_parsed() -> None:
    first = {"rank": 3, "pod": "uid-1", "phase": "step", "step": 7, "secondsSinceProgress": 2}
    frozen = {**first, "rank": 2, "frozen": True, "generation": 4, "stack": "its state"}
    invalid = [None, 7, {}, {**first, "pod": 7}, {**first, "pod": ""}, {**first, "pod": "x" * 65}]
    invalid += [{**first, "phase": "walking"}, {**first, "secondsSinceProgress": "7"}]
    progress = Progress.from_agents({"ranks": [first, frozen, *invalid], "step": 9, "trainLoss": 1})
    assert progress is not None
    assert (progress.by_agents, progress.rank, progress.phase) == (True, 2, "step")
    assert progress.status == ProgressStatus(), "nothing of the run"
    assert [(r.rank, r.pod, r.frozen, r.generation) for r in progress.ranks] == [
        (3, "uid-1", False, 0),
        (2, "uid-1", True, 4),
    ]
    assert progress.of_pods({"uid-1"}) == progress
    assert progress.of_pods({"uid-2"}) is None
    many = Progress.from_agents({"ranks": [first] * 100_000})
    assert many is not None
    assert len(many.ranks) == 64
    for answer in (None, 7, [], {}, {"ranks": None}, {"ranks": {}}, {"ranks": invalid}):
        assert Progress.from_agents(answer) is None, answer
    for value in (1, "true", None, [True]):
        unclear = Progress.from_agents({"ranks": [{**first, "frozen": value}]})
        assert unclear is not None
        assert not unclear.ranks[0].frozen


@pytest.mark.parametrize(
    ("value", "generation"),
    [(3, 3), (0, 0), (-1, 0), (True, 0), ("3", 0), (None, 0), (1.5, 0), (10**400, 2**31 - 1)],
)
def test_the_generation_of_a_rank_is_bounded(value: object, generation: int) -> None:
    first = {"rank": 0, "phase": "step", "secondsSinceProgress": 2}
    for values in ({**first, "generation": value}, {"ranks": [{**first, "generation": value}]}):
        progress = Progress.from_json(values)
        assert progress is not None
        assert [rank.generation for rank in progress.ranks] == [generation]


@pytest.mark.parametrize(
    "value",
    [math.nan, math.inf, -math.inf, 1e400, -1, 10**30, 10**400, True, "7", None, [], {}],
    ids=repr,
)
def test_invalid_values_of_a_trainer_leave_the_status_valid(value: object) -> None:
    keys = (
        "step", "samples", "trainLoss", "lastStepTime", "firstStepTime", "checkpointStep",
        "processRestarts", "trainSeconds", "trainSecondsBefore", "secondsSinceStep",
    )  # fmt: skip
    progress = Progress.from_json(dict.fromkeys(keys, value))
    assert progress is not None
    assert 0 <= progress.status.step < 2**31
    assert 0 <= progress.status.samples <= 2**53
    numbers = (
        progress.status.train_loss,
        progress.train_seconds_before,
        progress.seconds_since_step,
    )
    for number in numbers:
        assert number is None or math.isfinite(number)
    assert progress.status.last_step_time is None


@pytest.mark.parametrize(
    ("since", "finished"),
    [(2.0, "2026-01-01T00:00:12Z"), (None, None), (0.0, "2026-01-01T00:00:10Z")],
)
def test_a_termination_message_is_as_old_as_the_end_of_its_pod(
    since: float | None, finished: str | None
) -> None:
    message = '{"rank": 0, "lastStepTime": 1767225610.9, "secondsSinceStep": 0.3}'
    terminated = {"exitCode": 1, "message": message, "finishedAt": finished}
    pod = Pod.from_object(manifest(containerStatuses=container(terminated=terminated)))
    assert pod.final_progress is not None
    assert pod.final_progress.seconds_since_step == since


STRAGGLER = {"rank": 3, "host": "job-1", "pod": "uid-1", "cause": "data", "slowdown": 1.41421}


def test_a_straggler_is_parsed() -> None:
    progress = Progress.from_json({"straggler": STRAGGLER})
    assert progress is not None
    assert progress.straggler == Straggler(3, "uid-1", "data", 1.41)


@pytest.mark.parametrize(
    "change",
    [
        *(
            {"slowdown": s}
            for s in (math.nan, math.inf, -1.0, 0, 1.0, 1e9, 10**400, True, "2", None)
        ),
        *({"rank": rank} for rank in (-1, 2**31, 10**400, 1.5, True, "3", None)),
        *({"cause": cause} for cause in ("", "network", None, 1, [], {})),
    ],
    ids=repr,
)
def test_a_straggler_with_an_invalid_value_is_ignored(change: dict[str, object]) -> None:
    progress = Progress.from_json({"step": 7, "straggler": {**STRAGGLER, **change}})
    assert progress is not None
    assert (progress.status.step, progress.straggler) == (7, None)


@pytest.mark.parametrize("straggler", [None, 1, "rank 3", [], [STRAGGLER], {}])
def test_what_is_no_straggler_is_ignored(straggler: object) -> None:
    progress = Progress.from_json({"straggler": straggler})
    assert progress is not None
    assert progress.straggler is None


@pytest.mark.parametrize("pod", [None, 7, [], "x" * 10**6])
def test_the_pod_of_a_straggler_is_bounded(pod: object) -> None:
    straggler = Straggler.from_json({**STRAGGLER, "pod": pod})
    assert straggler is not None
    assert len(straggler.pod) <= 64


@pytest.mark.parametrize("answer", [None, 1, "x", []])
def test_an_answer_that_is_no_mapping_has_no_progress(answer: object) -> None:
    assert Progress.from_json(answer) is None


@pytest.mark.parametrize(
    ("message", "text", "step"),
    [
        ('{"message": "a\\nb", "rank": 0, "step": 7}', "a\nb", 7),
        ('{"rank": 0, "step": 7}', "", 7),
        ("\x1b[31mred\x1b[0m\x07 \x1b]0;title\x07text\r\n\x00end", "red  text\n end", None),
        ('{"message": "a\\u001b[2Jb\\u202ec"}', "ab c", None),
        ('{"message": "killed", "rank": 4, "step": 7}', "killed", None),  # only rank 0's counts
        ('{"message": "no step yet"}', "no step yet", None),
        ("the end of a log\nof some lines", "the end of a log\nof some lines", None),
        ('{"message": "cut off by kube', '{"message": "cut off by kube', None),
        ("[" * 5000, "[" * 5000, None),
        ("17", "17", None),
        ('{"message": {"odd": 1}}', "{'odd': 1}", None),
        (None, "", None),
    ],
    ids=lambda value: repr(value)[:20],
)
def test_a_termination_message_is_parsed(message: object, text: str, step: int | None) -> None:
    terminated = {"exitCode": 1, "message": message}
    pod = Pod.from_object(manifest(containerStatuses=container(terminated=terminated)))
    assert pod.message == text
    assert (pod.final_progress.status.step if pod.final_progress else None) == step
