"""``why``: what is said of each state that a job can be in; the status is the planner's."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from tests.operator.kubectl.objects import (
    make_event,
    make_pod,
    make_training,
    running,
    state_of,
    taken,
    unscheduled,
    waiting,
)
from tests.operator.planner import pods
from tests.operator.planner.pods import LONG_AGO, NOW

from fluxtrain.contract.resource.status import Condition, Restarts, Status, read_status
from fluxtrain.errors import ConfigError
from fluxtrain_operator.base import names
from fluxtrain_operator.base.job import Manifest
from fluxtrain_operator.base.names import stamp
from fluxtrain_operator.base.reports import Straggler
from fluxtrain_operator.kubectl.client import JobObjects
from fluxtrain_operator.kubectl.why import explanation
from fluxtrain_operator.planner.observed import (
    CreateFailure,
    NodeView,
    name_conflict,
    no_pod_group,
    restored,
)
from fluxtrain_operator.planner.status import invalid_spec_status
from fluxtrain_operator.resources.scheduling import GroupState

RUNNING = (running(0), running(1), running(0, names.RENDEZVOUS))
STARTED = (running(0, started=NOW - 90), running(1, started=NOW - 90))
SLOW = Straggler(rank=9, pod="uid-job-1", cause="compute", slowdown=1.4)
QUEUED = {"scheduling": {"queueName": "team-a"}}
VOLCANO = {"scheduling": {"gang": "Volcano", "queueName": "team"}}
NO_API = no_pod_group(
    {
        "apiVersion": "scheduling.volcano.sh/v1beta1",
        "kind": "PodGroup",
        "metadata": {"name": "job-gang"},
    },
    "the cluster does not serve it",
)
NO_GPU = "0/8 nodes are available: 8 Insufficient amd.com/gpu."
NOT_FOUND = "rpc error: code = NotFound desc = trainer:2: not found"
NO_CLAIM = '0/8 nodes are available: persistentvolumeclaim "data" not found.'
UNBOUND = "0/8 nodes are available: pod has unbound immediate PersistentVolumeClaims"
NO_QUOTA = CreateFailure("Pod", "job-rendezvous", "QuotaExceeded", "exceeded quota: small")
NO_LIMITS = replace(
    NO_QUOTA, message="failed quota: small: must specify limits.cpu for: rendezvous"
)
LIMIT = 'Usage of EmptyDir volume "tmp" exceeds the limit "20Mi".'
PRESSURE = "The node was low on resource: memory. Threshold quantity: 100Mi, available: 9Mi."
REJECTED = "Allocate failed due to no healthy devices present, which is unexpected"
SHUTDOWN = "Pod was rejected as the node is shutting down."
NO_SECRET = 'MountVolume.SetUp failed for volume "key": secret "job-key" not found'
TAINTED = "Taint manager: deleting due to NoExecute taint"
PREEMPTED = "default-scheduler: preempting to accommodate a higher priority pod"
FOREIGN = {"metadata": {"name": "job-0", "namespace": "team"}}
OWNER = {"kind": "Deployment", "name": "shop", "controller": True}
SHOP = {"metadata": {"name": "job", "namespace": "team", "ownerReferences": [OWNER]}}
WORKLOAD = {
    "status": {
        "conditions": [
            {"type": "QuotaReserved", "status": "False", "message": "insufficient quota for cpu."}
        ]
    }
}


def trains(seconds_ago: float = 5.0, **changes: Any) -> Any:
    """Return the answer of a rank 0 that made its last step a while ago."""
    answer = pods.progress(seconds_ago)
    values = {"train_loss": 0.51234, "remaining_seconds": 7800.0, **changes}
    return replace(answer, status=answer.status.model_copy(update=values))


def ended(code: int, message: str, index: int = 0) -> Manifest:
    """Return a pod whose trainer exited a minute ago, after two hours."""
    times = {"startedAt": stamp(LONG_AGO), "finishedAt": stamp(NOW - 60)}
    state = {"terminated": {"exitCode": code, "message": message, **times}}
    phase = "Failed" if code else "Succeeded"
    containers = [{"name": "trainer", "image": "trainer:1", "state": state}]
    return make_pod(index, phase=phase, containerStatuses=containers)


def restarted_soon() -> JobObjects:
    """Return a job whose program has failed a second time, seconds after its start."""
    times = {"startedAt": stamp(NOW - 5), "finishedAt": stamp(NOW - 2)}
    state = {"terminated": {"exitCode": 1, "message": "ValueError: no", **times}}
    pod = make_pod(0, phase="Failed", containerStatuses=[{"name": "trainer", "state": state}])
    before = Status(
        phase="Restarting",
        attempt=1,
        restarts=Restarts(gang=1, charged=1, causes={"ProgramError": 1}),
    )
    return state_of(pod, running(1), before=before)


def refused(reason: str, message: str) -> JobObjects:
    failure = CreateFailure("Pod", "job-0", reason, message, retry_time=math.inf)
    return state_of(create_failures=(failure,))


def mounting(claim: str, pod: Manifest) -> Manifest:
    volume = {"name": "v", "persistentVolumeClaim": {"claimName": claim}}
    return {**pod, "spec": {**pod["spec"], "volumes": [volume]}}


def gated(*gates: str, spec: Manifest | None = None) -> tuple[Manifest, ...]:
    pods = [unscheduled(n, "SchedulingGated", "Scheduling is blocked", spec) for n in range(2)]
    for pod in pods:
        pod["spec"]["schedulingGates"] = [{"name": gate} for gate in gates]
        pod["metadata"]["finalizers"] = [names.KUEUE_FINALIZER]
    return tuple(pods)


def without_status(seconds_ago: float, claim: Manifest | None = None) -> JobObjects:
    job = make_training()
    job["metadata"]["creationTimestamp"] = stamp(NOW - seconds_ago)
    return JobObjects(job, claim=claim)


def drained() -> JobObjects:
    """Return a job a minute after a drain, whose next pod is not there yet."""
    before = loses(taken("", "Eviction API: evicting", "EvictionByEvictionAPI")).job["status"]
    text = "job-1 on node-1: Eviction API: evicting"
    event = make_event("EvictionByEvictionAPI", text, kind="Warning", seconds_ago=60)
    return state_of(
        running(0), running(0, names.RENDEZVOUS), before=read_status(before), events=(event,)
    )


def claimed(holder: str, seconds_ago: float) -> Manifest:
    """Return the Lease of a namespace that ``holder`` renewed a while ago."""
    return {"spec": {"holderIdentity": holder, "renewTime": stamp(NOW - seconds_ago)}}


def loses(pod: Manifest, **more: Any) -> JobObjects:
    """Return a job of two nodes that has trained, and loses one ``pod``."""
    rendezvous = running(0, names.RENDEZVOUS)
    return state_of(running(0), pod, rendezvous, before=trained(), progress=trains(), **more)


def rejected() -> JobObjects:
    error = ConfigError("spec.run.optim.learning_rate", -1, "must be greater than 0")
    return JobObjects(make_training(invalid_spec_status(Status(), 1, error, NOW - 60)))


def being_deleted() -> JobObjects:
    objects = state_of(*RUNNING, progress=trains())
    deletion = {"deletionTimestamp": stamp(NOW - 600), "finalizers": ["example.org/hold"]}
    objects.job["metadata"] |= deletion
    return objects


def trained() -> Status:
    return read_status(state_of(*RUNNING, progress=trains()).job["status"])


def admitted_long_ago() -> Status:
    times = {"last_transition_time": stamp(LONG_AGO)}
    status = trained()
    admitted = [c.model_copy(update=times) for c in status.conditions]
    return status.model_copy(update={"conditions": admitted, "active_since": stamp(LONG_AGO)})


def deadline(seconds: int) -> dict[str, Any]:
    return {"lifecycle": {"activeDeadlineSeconds": seconds}}


def last_step(seconds_ago: float) -> JobObjects:
    """Return a job that should train, but made its last step a while ago."""
    objects = state_of(*RUNNING, progress=trains())
    objects.job["status"]["progress"]["lastStepTime"] = stamp(NOW - seconds_ago)
    return objects


def unknown_phase() -> JobObjects:
    condition = Condition(
        type="Ready", status="False", reason="Teleporting", lastTransitionTime=stamp(NOW)
    )
    return JobObjects(make_training(Status(phase="Teleporting", conditions=[condition])))


def stuck() -> JobObjects:
    """Return a job with a pod that a lost node does not delete."""
    pod = running(1)
    pod["metadata"]["deletionTimestamp"] = stamp(NOW - 3600)
    objects = state_of(running(0))
    return replace(objects, pods=(*objects.pods, pod))


def kept() -> JobObjects:
    """Return a job with a pod that has ended, was deleted, and is kept by a finalizer."""
    objects = stuck()
    objects.pods[-1]["metadata"]["finalizers"] = ["example.org/audit"]
    objects.pods[-1]["status"]["phase"] = "Failed"
    return objects


NODE_LOST = {"node-1": NodeView("node-1", ready=False, since=NOW - 600)} | {
    f"spare-{n}": NodeView(f"spare-{n}") for n in range(4)
}
STATES: dict[str, tuple[JobObjects, tuple[str, ...]]] = {
    "just_created": (without_status(3), ("created 3s ago", "That takes a few seconds")),
    "operator_not_running": (
        without_status(600),
        ("created 10m ago", "written no status", "operator may not be running"),
    ),
    "other_manager": (
        replace(without_status(9), job=make_training(managedBy="example.org/other")),
        ("left to example.org/other by spec.managedBy",),
    ),
    "being_deleted": (being_deleted(), ("was deleted 10m ago", "example.org/hold")),
    "invalid_spec": (
        rejected(),
        ("InvalidSpec", "spec.run.optim.learning_rate: got -1", "deleted and created again"),
    ),
    "complete": (
        state_of(ended(0, ""), ended(0, "", 1), before=trained()),
        ("(Complete) completed 0s ago at step 7",),
    ),
    "failed_with_exit_code_and_line": (
        state_of(ended(2, "setup\nDataError: /data/train is empty"), running(1)),
        ("InvalidJob", "exit code 2", "DataError: /data/train is empty", "correct what"),
    ),
    "diverged": (state_of(ended(3, "loss is nan"), running(1)), ("Diverged", "learning rate")),
    "restarts_exhausted": (
        state_of(ended(1, "ValueError: no"), running(1), spec={"restart": {"maxRestarts": 0}}),
        ("RestartsExhausted", "0 restarts are used up", "ValueError: no", "maxRestarts"),
    ),
    "deadline": (
        state_of(*RUNNING, before=admitted_long_ago(), spec=deadline(60)),
        ("DeadlineExceeded", "active for more than 60 s", "activeDeadlineSeconds"),
    ),
    "suspended": (
        state_of(spec={"lifecycle": {"suspend": True}}),
        ("suspended by spec.lifecycle.suspend", '"suspend":false', "-n team"),
    ),
    "about_to_be_suspended": (
        state_of(*RUNNING, spec={"lifecycle": {"suspend": True}}),
        ("about to be suspended: 2 pods",),
    ),
    "waiting_for_another_job": (
        state_of(
            spec={"lifecycle": {"startAfter": ["prepare"]}}, predecessors={"prepare": "Running"}
        ),
        ("prepare is Running", "It starts when those jobs are complete"),
    ),
    "waiting_for_a_failed_job": (
        state_of(
            spec={"lifecycle": {"startAfter": ["prepare"]}}, predecessors={"prepare": "Failed"}
        ),
        ("prepare is Failed; recreate it, or take it out of spec.lifecycle.startAfter.",),
    ),
    "waiting_for_a_job_that_does_not_exist": (
        state_of(spec={"lifecycle": {"startAfter": ["prepare"]}}),
        ("prepare does not exist",),
    ),
    "name_conflict": (
        state_of(create_failures=(name_conflict("Pod", FOREIGN, "job"),)),
        (
            "(Pending) waits: Pod job-0 already exists and has no owner",
            "give the job another name: kubectl delete --ignore-not-found -n team pod/job-0",
        ),
    ),
    "name_conflicts": (
        state_of(
            create_failures=(
                name_conflict("Pod", FOREIGN, "job"),
                name_conflict("Service", SHOP, "job"),
            )
        ),
        (
            "(Pending) waits: 2 objects have names that the job needs: Service job belongs to",
            "Deployment shop, 1 without an owner; give the job another name",
            "without an owner: kubectl delete --ignore-not-found -n team pod/job-0.",
        ),
    ),
    "restored": (
        state_of(create_failures=(restored(FOREIGN),)),
        ("(Pending) waits: Pod job-0, which a backup brought back without its owner, is replaced",),
    ),
    "predecessor_terminating": (
        refused("PredecessorTerminating", "Pod job-0 of an earlier job is being deleted"),
        ("of an earlier job", "Nothing needs to be done"),
    ),
    "quota": (
        refused("QuotaExceeded", "exceeded quota: small, requested: pods=1"),
        ("exceeded quota: small", "kubectl describe quota -n team"),
    ),
    "pod_security": (
        refused("PodSecurity", "violates PodSecurity restricted"),
        ("violates PodSecurity", "spec.podTemplate"),
    ),
    "webhook": (
        refused("PodsRefused", "admission webhook says no"),
        ("admission webhook says no", "tries again every minute"),
    ),
    "kueue": (
        state_of(*gated(names.KUEUE_GATE, spec=QUEUED), spec=QUEUED, workload=WORKLOAD),
        (
            "waits for Kueue to admit its pods in the queue team-a: insufficient quota for cpu.",
            "kubectl describe workload job-1 -n team",
        ),
    ),
    "kueue_without_a_workload": (
        state_of(*gated(names.KUEUE_GATE, spec=QUEUED), spec=QUEUED),
        ("waits for Kueue to admit its pods in the queue team-a.",),
    ),
    "kueue_places_pods": (
        state_of(*gated("kueue.x-k8s.io/topology", spec=QUEUED), spec=QUEUED),
        ("waits for Kueue to admit its pods in the queue team-a.",),
    ),
    "no_pod_groups": (
        state_of(create_failures=(NO_API,), spec=VOLCANO),
        (
            "waits: spec.scheduling.gang needs PodGroup job-gang of scheduling.volcano.sh/v1beta1, but",
            "the cluster does not serve it",
            "the chart's value gangs",
        ),
    ),
    "volcano": (
        state_of(spec=VOLCANO, group_state=GroupState("Pending", "no room")),
        (
            "waits: the pod group job-gang waits in Volcano's queue team: no room.",
            "`kubectl describe podgroups.scheduling.volcano.sh -n team -l fluxtrain.dev/job=job`",
        ),
    ),
    "other_gate": (
        state_of(*gated("example.org/gate")),
        ("example.org/gate", "Whoever set the gate must remove it"),
    ),
    "unschedulable": (
        state_of(running(0), unscheduled(1, "Unschedulable", NO_GPU)),
        ("1 of at least 2 nodes are up", f"job-1 cannot be scheduled: {NO_GPU}", "Free or add"),
    ),
    "all_unschedulable": (
        state_of(*(unscheduled(n, "Unschedulable", NO_GPU) for n in range(2))),
        ("0 of at least 2 nodes are up", "job-0 (and 1 more like it) cannot be scheduled"),
    ),
    "claim_missing": (
        state_of(running(0), unscheduled(1, "Unschedulable", NO_CLAIM)),
        ('available: persistentvolumeclaim "data" not found', "Create the Persistent"),
    ),
    "claim_missing_and_pods_not_read": (
        replace(
            state_of(running(0), unscheduled(1, "Unschedulable", NO_CLAIM)),
            pods=(),
            unread=("pods (forbidden: user bob)",),
        ),
        ('persistentvolumeclaim "data" not found', "Create the Persistent"),
    ),
    "claim_unbound": (
        state_of(running(0), mounting("data", unscheduled(1, "Unschedulable", UNBOUND))),
        (f"{UNBOUND} (it mounts data)", "kubectl describe pvc -n team", "storage class"),
    ),
    "no_scheduler": (
        state_of(make_pod(0) | {"spec": {}}, make_pod(1) | {"spec": {}}),
        ("has not been processed by a scheduler yet", "is not running"),
    ),
    "image_cannot_be_pulled": (
        state_of(waiting(0, "ImagePullBackOff", NOT_FOUND), running(1)),
        (
            "job-0 cannot start container trainer, image trainer:1: ImagePullBackOff: rpc error",
            "Check the image and the pull secrets",
            "spec.image, else the chart's value trainerImage",
        ),
    ),
    "image_is_pulled": (
        state_of(
            waiting(0, "ContainerCreating"),
            running(1),
            events=(make_event("Pulling", 'Pulling image "trainer:1"', "job-0", seconds_ago=90),),
        ),
        ('job-0 pulls an image for 1m30s: Pulling image "trainer:1"', "take minutes"),
    ),
    "volume_cannot_be_mounted": (
        state_of(
            waiting(0, "ContainerCreating"),
            running(1),
            events=(make_event("FailedMount", "secret not found", "job-0", "Warning"),),
        ),
        ("job-0 cannot start: secret not found", "Check that the volume"),
    ),
    "secret_missing": (
        state_of(waiting(0, "CreateContainerConfigError", 'secret "s" not found'), running(1)),
        ('secret "s" not found', "Create the secret"),
    ),
    "kubelet_is_silent": (
        state_of(make_pod(0), running(1)),
        ("assigned to node node-0, which has reported nothing", "kubectl describe node"),
    ),
    "containers_are_being_created": (
        state_of(waiting(0, "ContainerCreating"), running(1)),
        ("job-0 is creating its containers",),
    ),
    "pods_not_read": (
        replace(state_of(), unread=("pods (forbidden: user bob)",)),
        ("0 of at least 2 nodes", "Not read: pods (forbidden: user bob)."),
    ),
    "pod_is_not_deleted": (
        stuck(),
        ("job-1 should have been deleted 1h ago, but node-1 has not done so", "Node object"),
    ),
    "backing_off": (
        restarted_soon(),
        (
            "waits after a failure: job-0: exit code 1",
            "ValueError: no; starts again at",
            "Z, in 8s.",
            "kubectl fluxtrain logs job -n team",
        ),
    ),
    "starting": (
        state_of(*STARTED, running(0, names.RENDEZVOUS)),
        ("has 2 running pods for 1m30s, but no step is made yet", "load weights or compile"),
    ),
    "starting_without_rendezvous": (
        state_of(*STARTED, waiting(0, "ImagePullBackOff", NOT_FOUND, names.RENDEZVOUS)),
        (
            "they wait for the rendezvous, and job-rendezvous cannot start container",
            "of the rendezvous pod the chart's value image",
        ),
    ),
    "rendezvous_image_cannot_be_pulled_while_trainers_are_created": (
        state_of(
            waiting(0, "ContainerCreating"),
            waiting(1, "ContainerCreating"),
            waiting(0, "ErrImagePull", NOT_FOUND, names.RENDEZVOUS),
        ),
        ("0 of at least 2 nodes are up; job-rendezvous cannot start container", "spec.image"),
    ),
    "rendezvous_refused": (
        state_of(*STARTED, create_failures=(NO_QUOTA,)),
        ("wait for the rendezvous; exceeded quota: small", "kubectl describe quota -n team"),
    ),
    "trainers_do_not_answer": (
        state_of(*RUNNING),
        ("no trainer answers at /progress", "network policies"),
    ),
    "running": (
        state_of(*RUNNING, progress=trains()),
        (
            "(Running) trains on 2 nodes at step 7, training loss 0.5123, 8 samples/s",
            "last step was 5s ago, and 2h10m are left.",
        ),
    ),
    "running_for_epochs": (
        state_of(*RUNNING, progress=trains(steps=30, epoch=2, epochs=5)),
        ("trains on 2 nodes at step 7 of 30, epoch 2 of 5, training loss 0.5123",),
    ),
    "running_with_a_slow_rank": (
        state_of(*RUNNING, progress=replace(trains(), straggler=SLOW)),
        (
            "2h10m are left; rank 9 in job-1 on node-1 computes forward passes "
            "1.4 times as long as the median rank.",
            "clocks and temperatures of the GPUs of node-1",
        ),
    ),
    "running_with_slow_backward_passes": (
        state_of(*RUNNING, progress=replace(trains(), straggler=replace(SLOW, cause="backward"))),
        (
            "rank 9 in job-1 on node-1 computes backward passes 1.4 times as long",
            "clocks and temperatures of the GPUs of node-1",
        ),
    ),
    "running_with_a_slow_optimizer": (
        state_of(*RUNNING, progress=replace(trains(), straggler=replace(SLOW, cause="optimizer"))),
        ("makes steps 1.4 times as long by its optimizer step", "what else runs there"),
    ),
    "running_with_slow_data_on_fewer_nodes": (
        state_of(
            running(0),
            progress=replace(trains(), straggler=replace(SLOW, pod="uid-job-0", cause="data")),
            spec={"nodes": {"min": 1, "max": 2}},
        ),
        (
            "rank 9 in job-0 on node-0 makes steps 1.4 times as long by waiting for data; Degraded",
            "until the missing pods run. Check the storage",
        ),
    ),
    "running_with_an_old_step": (
        last_step(900),
        ("last step was 15m ago", "stacks job -n team", "operator may not be running"),
    ),
    "running_on_fewer_nodes": (
        state_of(
            running(0),
            unscheduled(1, "Unschedulable", NO_GPU),
            progress=trains(),
            spec={"nodes": {"min": 1, "max": 2}},
        ),
        ("trains on 1 node at step 7", "Degraded: 1 of 2 nodes"),
    ),
    "node_lost": (
        state_of(
            *RUNNING, progress=trains(), nodes=NODE_LOST, spec={"nodes": {"min": 1, "max": 2}}
        ),
        ("NodeLost", "node node-1 is lost", "kubectl describe node"),
    ),
    "drained": (
        loses(taken("", "Eviction API: evicting", "EvictionByEvictionAPI")),
        ("job-1 is being deleted: Eviction API: evicting", "Somebody drains the node"),
    ),
    "drained_a_minute_ago": (
        drained(),
        (
            "waits for pods: 1 of at least 2 nodes are up.",
            "EvictionByEvictionAPI 1m ago: job-1 on node-1: Eviction API: evicting.",
            "Somebody drains the node",
            "Causes of restarts so far: EvictionByEvictionAPI (1).",
        ),
    ),
    "drained_while_others_train": (
        loses(
            taken("", "Eviction API: evicting", "EvictionByEvictionAPI"),
            spec={"nodes": {"min": 1, "max": 2}},
        ),
        ("trains on 1 node", "job-1 is being deleted: Eviction API: evicting", "Somebody drains"),
    ),
    "preempted": (
        loses(taken("", PREEMPTED, "PreemptionByScheduler")),
        (f"job-1 is being deleted: {PREEMPTED}", "spec.scheduling.priorityClassName"),
    ),
    "no_execute": (
        loses(taken("", TAINTED, "DeletionByTaintManager")),
        (f"job-1 is being deleted: {TAINTED}", "spec.scheduling.tolerations"),
    ),
    "node_under_pressure": (
        loses(taken("Evicted", PRESSURE, "TerminationByKubelet", 137)),
        (f"nodes are up; job-1: Evicted: {PRESSURE}", "`kubectl describe node`"),
    ),
    "own_limit_exceeded": (
        loses(taken("Evicted", LIMIT, code=137)),
        (f"job-1: exit code 137, evicted for a limit of its own: {LIMIT}", "an emptyDir's size"),
    ),
    "probe_failed": (
        loses(taken(code=137) | {"hasProbe": True}),
        ("job-1: exit code 137, stopped by the kubelet, as after a failed probe", "liveness"),
    ),
    "rejected_by_the_kubelet": (
        loses(taken("UnexpectedAdmissionError", REJECTED)),
        (f"job-1: {REJECTED}", "the device plugin's log"),
    ),
    "node_shuts_down": (
        loses(taken("NodeShutdown", SHUTDOWN)),
        (f"job-1: {SHUTDOWN}", "The operator replaces the pod"),
    ),
    "node_lacks_resources": (
        loses(taken("OutOfcpu", "Node didn't have enough resource: cpu")),
        ("job-1: Node didn't have enough resource: cpu", "The operator replaces the pod"),
    ),
    "no_limits_for_a_quota": (
        state_of(*STARTED, create_failures=(NO_LIMITS,)),
        ("quota: small: must specify limits.cpu for: rendezvous", "spec.resources.rendezvous"),
    ),
    "rendezvous_volume_missing": (
        state_of(
            *STARTED,
            waiting(0, "ContainerCreating", component=names.RENDEZVOUS),
            events=(make_event("FailedMount", NO_SECRET, "job-rendezvous", "Warning"),),
        ),
        (f"and job-rendezvous cannot start: {NO_SECRET}", "Check that the volume"),
    ),
    "rendezvous_does_not_start": (
        state_of(*STARTED, waiting(0, "ContainerCreating", component=names.RENDEZVOUS)),
        (
            "and job-rendezvous is creating its containers. If this lasts,",
            "ContainerCreating: job-rendezvous: has not started for 2h.",
            "`kubectl get events -n team` shows why",
        ),
    ),
    "second_release": (
        without_status(600, claimed("beta/fluxtrain-operator", 20)),
        (
            "beta/fluxtrain-operator claims the namespace, and renewed that 20s ago",
            "`kubectl logs -n beta deployment/fluxtrain-operator`",
        ),
    ),
    "no_release": (
        without_status(600, {}),
        ("no operator claims the namespace", "The operator may not be running, or may not watch"),
    ),
    "role_lost": (
        replace(state_of(*STARTED), claim=claimed("alpha/fluxtrain-operator", 600)),
        (
            "but no step is made yet",
            "alpha/fluxtrain-operator claims the namespace, and renewed that 10m ago.",
            "`kubectl logs -n alpha deployment/fluxtrain-operator`",
        ),
    ),
    "definition_created_anew": (
        refused("PredecessorTerminating", "Service job of an earlier job is being deleted"),
        ("Service job of an earlier job is being deleted", "Nothing needs to be done"),
    ),
    "unknown_phase": (unknown_phase(), ("Ready=False (Teleporting)", "newer plugin")),
}


@pytest.mark.parametrize("state", STATES)
def test_each_state_is_explained(state: str) -> None:
    objects, texts = STATES[state]
    said = explanation(objects, NOW)
    for text in texts:
        assert text in said
    assert said.startswith("team/job")
    assert "\n" not in said
    assert ".." not in said.replace("...", "")


BY_OTHERS = (
    *("drained", "preempted", "no_execute", "node_under_pressure", "own_limit_exceeded"),
    *("probe_failed", "rejected_by_the_kubelet", "node_shuts_down", "node_lacks_resources"),
    *("second_release", "no_release", "role_lost", "definition_created_anew"),
    *("rendezvous_refused", "no_limits_for_a_quota", "rendezvous_volume_missing"),
    "rendezvous_does_not_start",
    *("starting_without_rendezvous", "claim_missing", "claim_unbound", "quota", "webhook"),
    *("name_conflict", "name_conflicts", "no_pod_groups", "volcano", "no_scheduler"),
    *("kueue", "other_gate"),
)
"""States that other people's controllers, quotas, policies and disks bring a job into."""


def test_what_others_do_to_a_job_is_told_with_its_cause_before_the_next_step() -> None:
    for state in BY_OTHERS:
        objects, texts = STATES[state]
        said = explanation(objects, NOW)
        places = [said.find(text) for text in texts]
        assert len(places) > 1, f"{state}: a cause and a next step"
        assert -1 < places[0] < places[-1], f"{state}: {said}"


def test_a_claim_that_is_renewed_is_not_told_of_a_job_that_has_a_status() -> None:
    objects = replace(state_of(*RUNNING, progress=trains()), claim=claimed("a/operator", 100))
    assert "claims" not in explanation(objects, NOW)


def test_a_claim_of_a_job_that_is_over_is_not_told() -> None:
    over = STATES["complete"][0]
    assert "claims" not in explanation(replace(over, claim=claimed("a/operator", 9000)), NOW)


def test_a_problem_of_the_rendezvous_pod_is_said_once() -> None:
    said = explanation(STATES["starting_without_rendezvous"][0], NOW)
    assert said.count(NOT_FOUND) == 1


def test_restarts_and_the_last_error_are_told() -> None:
    restarts = Restarts(gang=2, pod=3, process=0)
    before = Status(phase="Running", attempt=1, restarts=restarts, lastError="OOM in step 9")
    said = explanation(state_of(*RUNNING, before=before, progress=trains()), NOW)
    assert (
        "Restarts so far: 2 of all pods, 3 of single pods. The last error: OOM in step 9." in said
    )


def test_a_problem_of_a_job_that_waits_is_told_beside_what_it_waits_for() -> None:
    nodes = {**NODE_LOST, "node-0": NodeView("node-0")}
    said = explanation(state_of(running(0), running(1), nodes=nodes), NOW)
    assert "waits for pods: 2 of at least 2" not in said
    assert "NodeLost: job-1: node node-1 is lost." in said


def fault(node: str, reason: str, seconds_ago: float) -> Manifest:
    return {"node": node, "reason": reason, "time": stamp(NOW - seconds_ago), "pod": "u"}


@pytest.mark.parametrize(
    ("faults", "said"),
    [
        ([], None),
        ([fault("n1", "NodeLost", 120)], "n1 (NodeLost 2m ago)"),
        (
            [fault("n1", "Killed", 600), fault("n2", "AgentLost", 90), fault("n1", "NodeLost", 60)],
            "n1 (2 faults, the last: NodeLost 1m ago), n2 (AgentLost 1m30s ago)",
        ),
        ([fault("n1", "NodeLost", 17 * 3600)], None),
        ([fault("n1", "NodeLost", -60)], None),
        ([{"node": 1}, "n1"], None),
    ],
)
def test_nodes_with_faults_are_named(faults: list[Any], said: str | None) -> None:
    objects = state_of(*RUNNING, progress=trains())
    objects.job["status"]["nodeFaults"] = faults
    told = explanation(objects, NOW)
    assert (f"New pods avoid nodes with faults: {said}." in told) == (said is not None)
    assert ("New pods avoid" in told) == (said is not None)


@pytest.mark.parametrize(("group", "name"), [(None, "job-3"), (1, "job-1")])
def test_the_workload_of_a_group_that_a_restart_kept_is_named(group: int | None, name: str) -> None:
    objects = state_of(*gated(names.KUEUE_GATE, spec=QUEUED), spec=QUEUED, workload=WORKLOAD)
    objects.job["status"] |= {"attempt": 3, "groupAttempt": group}
    assert f"kubectl describe workload {name} -n team" in explanation(objects, NOW)


def test_nodes_that_a_waiting_pod_excludes_are_named() -> None:
    pod = make_pod(1)
    pod["spec"]["nodeName"] = ""
    pod["metadata"]["annotations"][names.ANNOTATION_DISTRUSTED] = "n1,n2"
    assert "its waiting pods exclude these for two minutes at most: n1, n2." in explanation(
        state_of(running(0), pod), NOW
    )


def test_a_change_that_the_operator_has_not_seen_is_told() -> None:
    objects = state_of(*RUNNING, progress=trains())
    objects.job["metadata"]["generation"] = 2
    assert "has not yet seen the newest change of the spec" in explanation(objects, NOW)


def test_a_pod_that_finalizers_keep_is_not_what_a_job_waits_for() -> None:
    assert "job-1" in explanation(stuck(), NOW)
    assert "job-1" not in explanation(kept(), NOW)


def test_pods_of_an_earlier_attempt_are_not_counted() -> None:
    objects = state_of(*RUNNING, progress=trains())
    objects.job["status"]["attempt"] = 2
    assert "trains on 0 nodes" in explanation(objects, NOW)


def test_a_message_of_several_lines_is_one_paragraph() -> None:
    objects = state_of(waiting(0, "ErrImagePull", "first\nsecond\t third."), running(1))
    assert "ErrImagePull: first second third. Check" in explanation(objects, NOW)


def test_a_status_of_a_newer_operator_is_explained() -> None:
    objects = state_of(*RUNNING, progress=trains())
    objects.job["status"] |= {"goodput": {"ratio": 0.9}, "slots": [{"index": 0}]}
    assert "trains on 2 nodes" in explanation(objects, NOW)
