"""Why a pod does not run, and what to do about each reason of a pod or of a job's condition."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from string import Template
from typing import Any

from fluxtrain_operator.base.names import duration, seconds

_PATIENCE_SECONDS = 90.0
"""A pod that is deleted may take this long beyond its grace period; later, its node is in question."""
_CREATING = ("ContainerCreating", "PodInitializing")
_PULLING, _PULLED = "Pulling", "Pulled"
_UNENDED = ("Pending", "Running")
_UNBOUND = (
    r"unbound immediate persistentvolumeclaim|persistentvolumeclaim .*bound to non-?existent"
    r"|available persistent volumes to bind"
)
_EXACT_REASONS = {
    "Unschedulable": {
        "ClaimUnbound": re.compile(_UNBOUND, re.IGNORECASE),
        "ClaimNotFound": re.compile(
            r'persistentvolumeclaim "[^"]*" (not found|is being deleted)', re.IGNORECASE
        ),
    },
    "QuotaExceeded": {"AmountNotSet": re.compile("must specify ")},
}
"""What the scheduler says of pods whose claims keep them from all nodes, a quota of one without amounts."""


@dataclass(frozen=True)
class PodProblem:
    """Why one pod does not run."""

    pod: str
    reason: str
    """For machines, in CamelCase."""
    message: str
    """For people; begins with what the pod does."""

    @property
    def is_passing(self) -> bool:
        """Return whether the pod is about to run, as far as is known."""
        return self.reason in (*_CREATING, _PULLING)


def problem_of(
    pod: Mapping[str, Any], events: Sequence[Mapping[str, Any]], now: float
) -> PodProblem | None:
    """Return why ``pod`` does not run; None if it does, or has ended. ``events`` are oldest first."""
    name, status = pod["metadata"]["name"], pod.get("status") or {}
    if _is_kept(pod):
        return None
    if deletion := _deletion(pod, now):
        return PodProblem(name, "Terminating", deletion)
    disruption = _condition(status, "DisruptionTarget", "True")
    if disruption is not None and "deletionTimestamp" in pod["metadata"]:
        text = _joined("is being deleted", disruption.get("message"))
        return PodProblem(name, str(disruption.get("reason")), text)
    if status.get("phase") not in (None, *_UNENDED):
        return None
    if (scheduled := _condition(status, "PodScheduled", "False")) is not None:
        return _scheduling(name, pod, scheduled)
    about = [event for event in events if _regards(event, name, pod["metadata"].get("uid"))]
    waiting = next(_waiting(status), None)
    if waiting is None:
        return None if status.get("containerStatuses") else _unstarted(name, pod, about)
    return _container_problem(name, waiting, about, now)


def reason_of(reason: str, message: str) -> str:
    """Return ``reason``, or a more exact one that its ``message`` has."""
    known = _EXACT_REASONS.get(reason, {})
    return next((name for name, text in known.items() if text.search(message)), reason)


def _condition(status: Mapping[str, Any], kind: str, value: str) -> Mapping[str, Any] | None:
    """Return the condition of the type ``kind`` if it has this value."""
    found = (c for c in status.get("conditions") or () if c.get("type") == kind)
    return next((c for c in found if c.get("status") == value), None)


def _scheduling(name: str, pod: Mapping[str, Any], condition: Mapping[str, Any]) -> PodProblem:
    """Return the problem of a pod that has no node; one of claims names all of them that the pod mounts."""
    message = str(condition.get("message") or "")
    reason = reason_of(str(condition.get("reason") or "Unschedulable"), message)
    text = "waits at a scheduling gate" if reason == "SchedulingGated" else "cannot be scheduled"
    text = _joined(text, message)
    if reason == "ClaimUnbound":
        text = f"{text} (it mounts {', '.join(_claims(name, pod)) or 'no claim'})"
    return PodProblem(name, reason, text)


def _claims(name: str, pod: Mapping[str, Any]) -> Iterator[str]:
    for volume in (pod.get("spec") or {}).get("volumes") or ():
        if claim := volume.get("persistentVolumeClaim"):
            yield str(claim.get("claimName"))
        elif "ephemeral" in volume:
            yield f"{name}-{volume.get('name')}"


def _deletion(pod: Mapping[str, Any], now: float) -> str:
    """Return since when a pod that is deleted should be gone; empty if it is in time."""
    deadline = seconds(pod["metadata"].get("deletionTimestamp"))
    if deadline is None or now < deadline + _PATIENCE_SECONDS:
        return ""
    node = (pod.get("spec") or {}).get("nodeName") or "no node"
    return f"should have been deleted {duration(now - deadline)} ago, but {node} has not done so"


def _is_kept(pod: Mapping[str, Any]) -> bool:
    """Return whether a deleted pod runs no longer, and finalizers keep its object: others take its place."""
    metadata, status = pod["metadata"], pod.get("status") or {}
    runs = (pod.get("spec") or {}).get("nodeName") and status.get("phase") in (None, *_UNENDED)
    return "deletionTimestamp" in metadata and bool(metadata.get("finalizers")) and not runs


def _waiting(status: Mapping[str, Any]) -> Iterator[tuple[Mapping[str, Any], Mapping[str, Any]]]:
    """Yield each container that waits, with its reason and message; init containers first."""
    for key in ("initContainerStatuses", "containerStatuses"):
        for container in status.get(key) or ():
            state = (container.get("state") or {}).get("waiting")
            if state is not None:
                yield container, state


def _container_problem(
    pod: str,
    waiting: tuple[Mapping[str, Any], Mapping[str, Any]],
    events: list[Mapping[str, Any]],
    now: float,
) -> PodProblem:
    container, state = waiting
    reason, message = state.get("reason") or "Waiting", state.get("message")
    if reason in _CREATING:
        return _creation(pod, reason, events, now)
    text = (
        f"cannot start container {container.get('name')}, image {container.get('image')}: {reason}"
    )
    return PodProblem(pod, reason, _joined(text, message))


def _creation(pod: str, reason: str, events: list[Mapping[str, Any]], now: float) -> PodProblem:
    """Return what a kubelet that creates the containers is doing, from the newest event."""
    if warning := _warning(pod, events):
        return warning
    pulls = [event for event in events if event.get("reason") in (_PULLING, _PULLED)]
    if pulls and pulls[-1].get("reason") == _PULLING:
        since = seconds(pulls[-1].get("lastTimestamp") or pulls[-1].get("eventTime"))
        time = "" if since is None else f" for {duration(now - since)}"
        return PodProblem(pod, _PULLING, _joined(f"pulls an image{time}", pulls[-1].get("message")))
    return PodProblem(pod, reason, "is creating its containers")


def _unstarted(
    pod: str, manifest: Mapping[str, Any], events: list[Mapping[str, Any]]
) -> PodProblem:
    """Return the problem of a pod of which no kubelet has reported anything."""
    if warning := _warning(pod, events):
        return warning
    if node := (manifest.get("spec") or {}).get("nodeName"):
        text = f"has been assigned to node {node}, which has reported nothing about it"
        return PodProblem(pod, "NoReport", text)
    return PodProblem(pod, "NotScheduled", "has not been processed by a scheduler yet")


def _warning(pod: str, events: list[Mapping[str, Any]]) -> PodProblem | None:
    """Return the problem that the newest of ``events`` warns of."""
    last = events[-1] if events else {}
    if last.get("type") != "Warning":
        return None
    return PodProblem(pod, str(last.get("reason")), _joined("cannot start", last.get("message")))


def _regards(event: Mapping[str, Any], pod: str, uid: object) -> bool:
    regarding = event.get("involvedObject") or {}
    same = (regarding.get("kind"), regarding.get("name")) == ("Pod", pod)
    return same and regarding.get("uid") in (uid, None, "")


def _joined(text: str, message: object) -> str:
    return f"{text}: {message}".rstrip(".") if message else text


_REMEDIES = {  # reasons whose message says it already are left out
    # the API server refuses objects
    "PredecessorTerminating": (
        "Nothing needs to be done; `kubectl get pods -n $namespace` shows which pods are being deleted."
    ),
    "PredecessorKept": (
        "Whoever set the finalizers must remove them: `kubectl patch KIND NAME -n $namespace --type=merge "
        """-p '{"metadata":{"finalizers":null}}'`."""
    ),
    "QuotaExceeded": (
        "Raise the quota, free resources or lower spec.resources: `kubectl describe quota -n $namespace`."
    ),
    "AmountNotSet": (
        "The quota counts an amount that the pod does not set: add it to spec.resources, of the rendezvous "
        "pod to spec.resources.rendezvous (the chart's value podDefaults.rendezvous.resources)."
    ),
    "PodSecurity": (
        "Change what the message names, usually in spec.podTemplate, spec.storage or spec.network."
    ),
    # the job itself
    "InvalidSpec": "Correct the field; a job that has failed must be deleted and created again.",
    "NotPermitted": (
        "Leave the field out, and create the job again; the administrator sets the chart's value jobs."
    ),
    "WaitingForJobs": "It starts when those jobs are complete.",
    "CyclicDependency": "Take one of these jobs out of the spec.lifecycle.startAfter of the one before it.",
    "SchedulingGated": "Whoever set the gate must remove it; the operator never does.",
    "DeadlineExceeded": "Raise spec.lifecycle.activeDeadlineSeconds, and create the job again.",
    "PendingDeadlineExceeded": (
        "Remove what the message or `kubectl get events -n $namespace` names, or raise "
        "spec.lifecycle.pendingDeadlineSeconds, and create the job again."
    ),
    "RestartsExhausted": (
        "Fix the error, and create the job again; it resumes from its newest checkpoint. "
        "spec.restart.maxRestarts is the limit."
    ),
    "NoPodGroups": (
        "Install the scheduler's custom resource definitions, or permit the operator to use them (the "
        "chart's value gangs): it looks again within a minute. Otherwise create the job again without "
        "spec.scheduling.gang."
    ),
    "PodGroupPending": (
        "`kubectl describe podgroups.scheduling.volcano.sh -n $namespace -l fluxtrain.dev/job=$job` shows "
        "more; check that Volcano runs, and that its queue exists, is open and has room."
    ),
    # the program
    "InvalidJob": "A restart does not help: correct what the message names, and create the job again.",
    "Diverged": "Lower the learning rate or lengthen the warm-up, and create the job again.",
    "StorageError": "Make the output writable: is the volume full or read-only?",
    "OOMKilled": (
        "Raise the container's memory limit, or lower the micro batch size or the number of loader workers."
    ),
    "InitContainerFailed": (
        "Correct spec.podTemplate.spec.initContainers; with terminationMessagePolicy: FallbackToLogsOnError "
        "the message has the last line of the log. If it is fetch-models, correct spec.storage.models.fetch "
        "or spec.credentials, or put what the message names into the models volume."
    ),
    "StartError": (
        "If other pods run, check the node's devices and container runtime: `kubectl describe node`; "
        "otherwise check that spec.image contains fluxtrain."
    ),
    "ProgramError": "`kubectl fluxtrain logs $job -n $namespace` shows the log.",
    "NoProgress": (
        "The operator restarts it; `kubectl fluxtrain stacks $job -n $namespace` shows where ranks wait."
    ),
    "NoAnswer": (
        "No restart is counted for this. Check that network policies, a firewall or a service mesh let the "
        "operator reach the port of /progress."
    ),
    # nodes
    "NodeLost": "The operator replaces its pod; check the node: `kubectl describe node`.",
    "GroupWaits": (
        "Kueue frees the place once the node is back or removed (`kubectl delete node`); "
        "otherwise the job is queued again."
    ),
    "NodeNotReady": "The job trains on; check the node: `kubectl describe node`.",
    "DisruptionLimited": "A part of all pods is replaced per minute; the rest follow.",
    "NodesUnknown": "Check the control plane and its network: it receives no heartbeats from most nodes.",
    "UnfitNode": (
        "The operator replaces the pod; the message says whether the device or the link to other nodes is "
        "slow. If the node is as it should be, raise spec.run.preflight.factor."
    ),
    "UnhealthyGPU": "The operator replaces the pod; drain or repair the node.",
    "UnhealthyNode": "The operator replaces the pod; drain or repair the node.",
    "UnhealthyNodes": "Check who marks the nodes: most of the cluster's nodes are.",
    "UnhealthyGPUs": "Check the GPU exporter, which reports most GPU nodes as unhealthy.",
    "KeptByFinalizers": (
        "Whoever set the finalizers must remove them: `kubectl patch pod NAME -n $namespace --type=merge "
        """-p '{"metadata":{"finalizers":null}}'`."""
    ),
    "Degraded": "The job trains on fewer nodes until the missing pods run.",
    # pods
    "Evicted": (
        "Raise the limit that the message names (an emptyDir's sizeLimit, or ephemeral-storage of a "
        "container in spec.podTemplate), or write less to local disks."
    ),
    "ProbeFailed": (
        "Correct the liveness or startup probe in spec.podTemplate, or raise its failureThreshold: "
        "`kubectl get events -n $namespace --field-selector reason=Unhealthy`."
    ),
    "EvictionByEvictionAPI": "Somebody drains the node, or evicts the pod; the operator replaces it.",
    "PreemptionByScheduler": (
        "The scheduler gave the place to a pod of higher priority; spec.scheduling.priorityClassName raises "
        "that of this job."
    ),
    "DeletionByTaintManager": (
        "The node has a NoExecute taint; spec.scheduling.tolerations tolerates it, if the pod may stay."
    ),
    "DeletionByPodGC": "The pod's node is gone or out of service; the operator replaces the pod.",
    "TerminationByKubelet": (
        "The kubelet ended the pod for its node, which is under pressure, shuts down or needs a critical "
        "pod: `kubectl describe node`."
    ),
    "NodePressure": "The node is short of disk, memory or processes: `kubectl describe node`.",
    "NodeShutdown": "The node shuts down. The operator replaces the pod, elsewhere or once it is back.",
    "OutOfResources": (
        "Another pod was faster. The operator replaces the pod; `kubectl describe node` shows what is free."
    ),
    "Killed": "Somebody on the node killed it. The operator replaces the pod: `kubectl describe node`.",
    "UnexpectedAdmissionError": (
        "The operator tries again, at most every five minutes; `kubectl describe node` and the device "
        "plugin's log show why the kubelet rejects the pod."
    ),
    "Unschedulable": (
        "Free or add nodes that meet this, or ask for less: spec.nodes.min, spec.gpusPerNode, spec.resources."
    ),
    "ClaimNotFound": (
        "Create the PersistentVolumeClaim that the message names in $namespace, or correct its name in "
        "spec.storage or spec.podTemplate: `kubectl get pvc -n $namespace`."
    ),
    "ClaimUnbound": (
        "`kubectl describe pvc -n $namespace` shows why the claim is not bound: its storage class must exist "
        "and provision volumes, or a PersistentVolume must match it."
    ),
    "NotScheduled": "If this lasts, the scheduler that the pod names is not running.",
    "NoReport": "If this lasts, check the node: `kubectl describe node`.",
    "ErrImagePull": (
        "Check the image and the pull secrets (spec.podTemplate.spec.imagePullSecrets). It is spec.image, "
        "else the chart's value trainerImage; of the rendezvous pod the chart's value image, if that is set."
    ),
    "ImagePullBackOff": (
        "Check the image and the pull secrets (spec.podTemplate.spec.imagePullSecrets). It is spec.image, "
        "else the chart's value trainerImage; of the rendezvous pod the chart's value image, if that is set."
    ),
    "InvalidImageName": (
        "Correct spec.image, else the chart's value trainerImage; of the rendezvous pod its value image."
    ),
    "ContainerCreating": (
        "If this lasts, `kubectl get events -n $namespace` shows why: a slow pull, or a volume, Secret or "
        "network that is missing."
    ),
    "Pulling": "Large images take minutes on a node that has not used them.",
    "CreateContainerConfigError": (
        "Create the secret or config map that the message names, or correct spec.credentials or "
        "spec.podTemplate."
    ),
    "FailedMount": "Check that the volume, its claim or secret exists and can be mounted on that node.",
    "FailedAttachVolume": "Check that the volume can be attached there: is it in use on another node?",
    "CrashLoopBackOff": "`kubectl logs -n $namespace $pod --previous` shows why it ended.",
    "Terminating": "Check the node; if it is gone for good, delete its Node object.",
}
_REFUSED = "Follow the message of the API server or webhook; the operator tries again every minute."


def remedy(reason: str, job: str, namespace: str, pod: str = "") -> str:
    """Return what to do about ``reason``; empty if that is not known."""
    default = _REFUSED if reason.endswith("Refused") else ""
    text = _REMEDIES.get("OutOfResources" if reason.startswith("OutOf") else reason, default)
    return Template(text).substitute(job=job, namespace=namespace, pod=pod)
