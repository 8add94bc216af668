"""How each loss of a pod counts, and what a batch/v1 Job with a podFailurePolicy would do with it.

The policy is the one that Kubernetes' documentation recommends: Ignore on DisruptionTarget, FailJob on exit
codes that no restart helps against, Count for all else. The statuses are those that the kubelet and the
controllers of Kubernetes write.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
from tests.operator.jobs import KEY, OWNER, make_training
from tests.operator.planner.invariants import as_manifest
from tests.operator.planner.pods import (
    NOW,
    causes,
    charged_and_free,
    condition,
    make_pod,
    message,
    plan_with,
    progress,
    running,
    with_status,
)

from fluxtrain.errors import EXIT_STORAGE, EXIT_UNFIT
from fluxtrain_operator.base.names import stamp
from fluxtrain_operator.controller.cache import Cache
from fluxtrain_operator.planner.guard import _TAKEN_REASONS
from fluxtrain_operator.planner.observed import NodeView, Pod

EMPTY_DIR = 'Usage of EmptyDir volume "tmp" exceeds the limit "20Mi". '
OF_POD = "Pod ephemeral local storage usage exceeds the total limit of containers 1Gi. "
OF_CONTAINER = 'Container trainer exceeded its local ephemeral storage limit "1Gi". '
PRESSURE = (
    "The node was low on resource: ephemeral-storage. Threshold quantity: 1Gi, available: 9Mi. "
)
SHUTDOWN = "Pod was terminated in response to imminent node shutdown."


class Loss(NamedTuple):
    """The end of one pod of two."""

    name: str
    cause: str
    """The cause that counts."""
    ours: str
    """``charged``, ``free`` or ``failed``."""
    policy: str
    """What the podFailurePolicy does."""
    code: int | None = None
    """Exit code of the main container; None if it never ran."""
    container: str = "Error"
    """Reason of the container's end."""
    reason: str = ""
    text: str = ""
    """Reason and message of the pod's status."""
    disruption: str = ""
    """Reason of DisruptionTarget."""
    deleting: bool = False
    has_probe: bool = False
    faults: tuple[str, ...] = ()
    """Faults of its node."""
    why: str = ""
    """Why the operator differs from the policy."""

    def pod(self) -> Pod:
        """Return the pod as the operator reads it from the API server."""
        manifest = as_manifest(make_pod(1), [OWNER])
        if self.has_probe:
            manifest["spec"]["containers"][0]["livenessProbe"] = {"exec": {"command": ["false"]}}
        state: dict[str, Any] = {"running": {"startedAt": stamp(NOW - 900)}}
        if self.code is not None:
            times = {"startedAt": stamp(NOW - 900), "finishedAt": stamp(NOW - 1)}
            state = {"terminated": {"exitCode": self.code, "reason": self.container, **times}}
        status = manifest["status"]
        has_ended = not self.deleting or self.code is not None
        status["phase"] = "Failed" if has_ended else "Running"
        status["containerStatuses"][0]["state"] = (
            state if self.code is not None or self.deleting else {}
        )
        status |= {"reason": self.reason, "message": self.text} if self.reason else {}
        if self.disruption:
            told = {"reason": self.disruption, "message": f"told by {self.disruption}"}
            status["conditions"].append({"type": "DisruptionTarget", "status": "True", **told})
        if self.deleting:
            manifest["metadata"]["deletionTimestamp"] = stamp(NOW + 100)
        cache = Cache(clock=lambda: NOW)
        cache.set_job(make_training())
        cache.set_pod(manifest)
        return Pod.from_object(cache.pods(KEY)[0])


BY_CONTROLLERS = (
    *("EvictionByEvictionAPI", "PreemptionByScheduler", "DeletionByTaintManager"),
    *("DeletionByPodGC", "TerminationByKubelet"),
)
"""All reasons of DisruptionTarget in Kubernetes' documentation."""
REJECTED = "UnexpectedAdmissionError"


def _deleted(name: str, reason: str, **how: Any) -> Loss:
    """Return the loss of a pod that others delete for a disruption."""
    return Loss(name, reason, "free", "Ignore", disruption=reason, deleting=True, **how)


def _by_kubelet(name: str, **how: Any) -> Loss:
    """Return the loss of a pod that the kubelet ends for its node."""
    reason = "TerminationByKubelet"
    return Loss(name, reason, "free", "Ignore", disruption=reason, **how)


def _free(name: str, cause: str, **how: Any) -> Loss:
    """Return a loss that is free here, and counts for the policy."""
    return Loss(name, cause, "free", "Count", **how)


LOSSES = (
    _deleted("drain", "EvictionByEvictionAPI"),
    _deleted("preemption", "PreemptionByScheduler"),
    _deleted("NoExecute", "DeletionByTaintManager"),
    _deleted("device taint", "DeletionByDeviceTaintManager"),
    _deleted("drain, it saved", "EvictionByEvictionAPI", code=75),
    _deleted("drain, it was killed", "EvictionByEvictionAPI", code=137, has_probe=True),
    Loss(
        "garbage collection",
        "DeletionByPodGC",
        "free",
        "Ignore",
        reason="",
        disruption="DeletionByPodGC",
    ),
    _by_kubelet("node pressure", code=137, reason="Evicted", text=PRESSURE),
    _by_kubelet("node shutdown", code=75, reason="Terminated", text=SHUTDOWN),
    _by_kubelet(
        "critical pod",
        code=143,
        reason="Preempting",
        text="Preempted in order to admit critical pod",
    ),
    Loss(
        "an error meanwhile",
        "EvictionByEvictionAPI",
        "free",
        "Ignore",
        1,
        disruption="EvictionByEvictionAPI",
    ),
    Loss("emptyDir limit", "Evicted", "charged", "Count", 137, reason="Evicted", text=EMPTY_DIR),
    Loss(
        "emptyDir limit, it saved",
        "Evicted",
        "charged",
        "Count",
        75,
        reason="Evicted",
        text=EMPTY_DIR,
    ),
    Loss("pod's storage limit", "Evicted", "charged", "Count", 143, reason="Evicted", text=OF_POD),
    Loss(
        "container's storage limit",
        "Evicted",
        "charged",
        "Count",
        reason="Evicted",
        text=OF_CONTAINER,
    ),
    Loss("liveness", "ProbeFailed", "charged", "Count", 137, has_probe=True),
    Loss("liveness, it saved", "ProbeFailed", "charged", "Count", 75, has_probe=True),
    Loss("liveness, SIGTERM", "ProbeFailed", "charged", "Count", 143, has_probe=True),
    Loss("program", "ProgramError", "charged", "Count", 1),
    Loss("memory limit", "OOMKilled", "charged", "Count", 137, container="OOMKilled"),
    Loss("bad job", "", "failed", "FailJob", 2),
    Loss("diverged", "", "failed", "FailJob", 3),
    Loss("output not writable", "StorageError", "charged", "Count", EXIT_STORAGE),
    _free("killed", "Killed", code=137, faults=("Killed",), why="nobody in the pod sends SIGKILL"),
    _free("asked to stop", "Stopped", code=75, why="no probe: somebody on the node stopped it"),
    _free(
        "rejected",
        REJECTED,
        reason=REJECTED,
        text="Allocate failed",
        faults=(REJECTED,),
        why="of the device plugin",
    ),
    _free(
        "rejected, ran before",
        REJECTED,
        code=137,
        reason=REJECTED,
        faults=(REJECTED,),
        why="the kubelet was restarted",
    ),
    _free(
        "unfit node",
        "UnfitNode",
        code=EXIT_UNFIT,
        faults=("UnfitNode",),
        why="the preflight blames the node",
    ),
    *(
        _free(
            f"{reason}, old kubelet",
            reason,
            code=143,
            reason=reason,
            text="by the kubelet",
            why="of the node",
        )
        for reason in ("Preempting", "Preempted", "Terminated")
    ),
    _free("no CPU left", "OutOfcpu", reason="OutOfcpu", why="a race of the scheduler"),
    _free(
        "no GPU left", "OutOfamdcomgpu", reason="OutOfamd.com/gpu", why="a race of the scheduler"
    ),
    _free("node affinity", "NodeAffinity", reason="NodeAffinity", why="labels of the node changed"),
    _free(
        "node shuts down",
        "NodeShutdown",
        reason="NodeShutdown",
        text="Pod was rejected as the node is shutting down.",
        why="rejected",
    ),
    _free(
        "old shutdown",
        "Shutdown",
        code=137,
        reason="Shutdown",
        text="Node is shutting, evicting pods",
        why="kubelets without the condition",
    ),
    _free(
        "rejected for pressure",
        "NodePressure",
        reason="Evicted",
        text="The node had condition: [DiskPressure]. ",
        why="rejected",
    ),
    _free(
        "pressure, old kubelet",
        "NodePressure",
        code=137,
        reason="Evicted",
        text=PRESSURE,
        why="kubelets without the condition",
    ),
    _free(
        "node unreachable",
        "NodeLost",
        code=137,
        reason="NodeLost",
        text="unresponsive",
        why="of the node",
    ),
)


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.name)
def test_each_loss_counts_by_its_true_cause_as_a_pod_failure_policy_would_count_it(
    loss: Loss,
) -> None:
    job, pods = running(restart={"maxRestarts": 3}), (make_pod(0), loss.pod())
    nodes = {name: NodeView(name) for name in ("node-0", "node-1", "node-2")}
    result = plan_with(job, *pods, progress=progress(), nodes=nodes)
    status = result.status
    expected = {"charged": (1, 0), "free": (0, 1), "failed": (0, 0)}[loss.ours]
    assert (charged_and_free(status), status.phase == "Failed") == (expected, loss.ours == "failed")
    assert causes(status) == ({loss.cause: 1} if loss.cause else {})
    assert tuple(fault.reason for fault in status.node_faults) == loss.faults
    same = {"Ignore": "free", "Count": "charged", "FailJob": "failed"}[loss.policy] == loss.ours
    assert same == (not loss.why), "a difference has its reason"
    if loss.cause:
        events = [event for event in result.events if event.reason == loss.cause]
        assert events, "an event names the cause"
        told = loss.text.strip() or (f"told by {loss.disruption}" if loss.disruption else "job-1")
        assert any(told in event.message for event in events), "what the kubelet says is kept"
    for later in (NOW + 1, NOW + 700):
        again = plan_with(with_status(job, status), *pods, progress=progress(), now=later)
        assert charged_and_free(again.status) == expected, "it counts once"


def test_the_limit_that_a_pod_has_exceeded_is_the_last_error_of_the_job() -> None:
    job = running(restart={"maxRestarts": 0})
    (own_limit,) = (loss for loss in LOSSES if loss.name == "emptyDir limit")
    result = plan_with(job, make_pod(0), own_limit.pod(), progress=progress())
    assert condition(result.status, "Failed") == ("True", "RestartsExhausted")
    assert EMPTY_DIR.strip() in message(result.status, "Failed")
    assert result.status.last_error == EMPTY_DIR.strip()


DRAINED = {"disruption": "EvictionByEvictionAPI", "disruption_message": "Eviction API: evicting"}


def test_a_pod_that_vanished_before_the_operator_planned_counts_once() -> None:
    job, gone = running(), make_pod(1, uid="pod-gone", **DRAINED)
    first = plan_with(job, make_pod(0), progress=progress(), gone=(gone,))
    assert causes(first.status) == {"EvictionByEvictionAPI": 1}
    job = with_status(job, first.status)
    for pods, others in (((), (gone,)), ((make_pod(1, uid="next"),), ()), ((gone,), ())):
        again = plan_with(job, make_pod(0), *pods, progress=progress(), gone=others)
        assert charged_and_free(again.status) == (0, 1)


def test_a_pod_that_is_deleted_for_a_lost_node_and_then_by_a_taint_counts_once() -> None:
    job = running()
    nodes = {f"node-{n}": NodeView(f"node-{n}", ready=n != 1, since=NOW - 60) for n in range(7)}
    first = plan_with(job, make_pod(0), make_pod(1), nodes=nodes)
    assert causes(first.status) == {"NodeLost": 1}
    tainted = make_pod(1, deleting=True, deletion_deadline=NOW + 100, disruption="DeletionByPodGC")
    again = plan_with(with_status(job, first.status), make_pod(0), tainted, nodes=nodes)
    assert causes(again.status) == {"NodeLost": 1}


def test_all_pods_of_a_large_job_that_are_preempted_at_once_count_once_each() -> None:
    job = running(nodes={"min": 1, "max": 100})
    lost = [
        make_pod(n, job, uid=f"pod-{n}", deleting=True, deletion_deadline=NOW + 99, **DRAINED)
        for n in range(100)
    ]
    for left in (lost, lost[40:], lost[90:], []):
        result = plan_with(job, *left)
        job = with_status(job, result.status)
        assert charged_and_free(result.status) == (0, 100)
    assert len(result.status.restarts.counted_pods) == 16, "few of those that are gone are kept"


@pytest.mark.parametrize("spec", [{"lifecycle": {"suspend": True}}], ids=["suspended"])
def test_a_job_that_holds_no_pods_loses_none(spec: dict[str, Any]) -> None:
    job = with_status(running(**spec), running().status)
    pod = make_pod(1, job, deleting=True, deletion_deadline=NOW + 99, **DRAINED)
    assert charged_and_free(plan_with(job, make_pod(0, job), pod).status) == (0, 0)


def test_a_group_that_kueue_preempts_counts_once_by_kueues_reason() -> None:
    job = running(scheduling={"queueName": "team"}, nodes={"min": 2, "max": 2})
    stop = {
        "queue_stop": "WorkloadEvictedDueToPreempted",
        "finalizers": ("kueue.x-k8s.io/managed",),
    }
    pods = [make_pod(n, job, deleting=True, deletion_deadline=NOW + 99, **stop) for n in range(2)]
    status = plan_with(job, *pods).status
    assert (charged_and_free(status), causes(status)) == (
        (0, 1),
        {"WorkloadEvictedDueToPreempted": 1},
    )


def test_the_table_has_each_reason_that_the_kubelet_and_the_controllers_give() -> None:
    given = {name for loss in LOSSES for name in (loss.disruption, loss.reason)}
    assert given >= {*_TAKEN_REASONS, *BY_CONTROLLERS, REJECTED}
    assert {loss.policy for loss in LOSSES} == {"Ignore", "Count", "FailJob"}
    assert {loss.ours for loss in LOSSES} == {"free", "charged", "failed"}
