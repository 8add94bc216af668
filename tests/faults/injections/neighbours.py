"""Faults that other controllers and people of a cluster cause: drains, taints, quotas, policies, rights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cluster.kubectl import Manifest
from cluster.layout import nodes
from cluster.nodes import containerd, fake_gpus, images
from tests.end_to_end import stage
from tests.end_to_end.stage import GRANT, Operator, condition, grant, make_account, wait_for
from tests.faults import inside_pods
from tests.faults.injections.operators import WATCHED_STEPS, hand_over
from tests.faults.injections.pods import delete, lose_unreplaced
from tests.faults.injections.storage import flagged
from tests.faults.target import IMAGE, Target
from tests.paths import ROOT

SCRATCH = "/scratch"
SCRATCH_MIB = 8
KEPT_IMAGE = "localhost/fluxtrain/trainer:kept"
UNWELL = "unwell-"


def with_trainer(**fields: Any) -> Manifest:
    """Return a spec whose trainer container has ``fields``, and a small volume at /scratch."""
    template: Manifest = stage.job("any")["spec"]["podTemplate"]
    spec = template["spec"]
    limit = f"{SCRATCH_MIB}Mi"
    spec["volumes"].append({"name": "scratch", "emptyDir": {"sizeLimit": limit}})
    (container,) = spec["containers"]
    container["volumeMounts"].append({"name": "scratch", "mountPath": SCRATCH})
    container.update(fields)
    return {"podTemplate": template}


UNWELL_WITH_FILE = {
    "exec": {"command": ["sh", "-c", f"test ! -e {inside_pods.FOLDER}/{UNWELL}$(hostname)"]},
    "periodSeconds": 1,
    "failureThreshold": 2,
    "timeoutSeconds": 10,
}
"""A liveness probe that fails once a file for its pod is in the output."""


@contextmanager
def drained(target: Target) -> Iterator[None]:
    """Drain a node that the rendezvous pod is not on, as before its maintenance."""
    before, node = target.uids(), target.expendable_pod["spec"]["nodeName"]
    own = f"--pod-selector=fluxtrain.dev/job={target.name}"
    try:
        target.kubectl("drain", node, "--delete-emptydir-data", "--force", own, seconds=200)
        target.wait_for_new_pods(before)
        yield
    finally:
        target.kubectl("uncordon", node)


@contextmanager
def tainted(target: Target) -> Iterator[None]:
    """Taint a node so that it evicts pods, until its pod is replaced elsewhere."""
    before, node = target.uids(), target.expendable_pod["spec"]["nodeName"]
    taint = "example.org/maintenance:NoExecute"
    target.kubectl("taint", "node", node, taint)
    try:
        target.wait_for_new_pods(before)
        yield
    finally:
        target.kubectl("taint", "node", node, f"{taint}-")


@contextmanager
def preempted(target: Target) -> Iterator[None]:
    """Let a pod of higher priority take all GPUs of a node."""
    before, node = target.uids(), target.expendable_pod["spec"]["nodeName"]
    priority = {
        "apiVersion": "scheduling.k8s.io/v1",
        "kind": "PriorityClass",
        "metadata": {"name": "urgent"},
        "value": 1000,
    }
    gpus = {fake_gpus.RESOURCE: str(fake_gpus.NUM_GPUS)}
    container = {"name": "main", "image": IMAGE, "command": ["sleep", "600"]}
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "urgent"},
        "spec": {
            "priorityClassName": "urgent",
            "nodeSelector": {"kubernetes.io/hostname": node},
            "containers": [{**container, "resources": {"limits": gpus}}],
        },
    }
    try:
        target.kubectl.apply(priority, pod)
        target.wait_for_new_pods(before)
        yield
    finally:
        target.kubectl("delete", "pod", "urgent", "--grace-period=0", "--force")
        target.kubectl("delete", "priorityclass", "urgent")


@contextmanager
def limit_exceeded(target: Target) -> Iterator[None]:
    """Write more into a volume of a pod than its limit, until the kubelet has evicted the pod."""
    before, pod = target.uids(), target.pod_of_rank(1)["metadata"]["name"]
    program = f"open('{SCRATCH}/large', 'wb').write(bytes({4 * SCRATCH_MIB} << 20))"
    target.kubectl("exec", pod, target.jobs.here, "--", "python3", "-c", program)
    target.wait_for_new_pods(before)
    yield


@contextmanager
def probe_failed(target: Target) -> Iterator[None]:
    """Let the liveness probe of a pod fail until its pod is replaced."""
    before, pod = target.uids(), target.pod_of_rank(1)["metadata"]["name"]
    with flagged(target.flag(f"{UNWELL}{pod}"), ""):
        wait_for(lambda: _has_ended(target, pod, before[pod]), target.debug_text, seconds=120)
    target.wait_for_new_pods(before)
    yield


def _has_ended(target: Target, name: str, uid: str) -> bool:
    pod = target.pods.get(name)
    if pod is None or pod["metadata"]["uid"] != uid:
        return True
    return pod.get("status", {}).get("phase") in ("Failed", "Succeeded")


@contextmanager
def rendezvous_image_missing(target: Target) -> Iterator[None]:
    """Take the image from all nodes and delete the rendezvous pod: the next one cannot pull it."""
    images.tag(IMAGE, KEPT_IMAGE)
    for node in nodes():
        containerd.ctr(node, "images", "rm", IMAGE)
    try:
        delete(target, target.rendezvous["metadata"]["name"], "--now")
        wait_for(lambda: "Image" in _healthy(target), target.debug_text, seconds=60)
        target.wait_for_steps(WATCHED_STEPS)
        yield
    finally:
        images.tag(KEPT_IMAGE, IMAGE)


def _healthy(target: Target) -> str:
    return str(condition(target.status, "Healthy").get("reason", ""))


@contextmanager
def relabelled(target: Target) -> Iterator[None]:
    """Set labels and annotations of all pods as policy engines do, and remove one of ours."""
    before, of_job = target.uids(), f"--selector=fluxtrain.dev/job={target.name}"
    labels = ("app.kubernetes.io/managed-by=policy-engine", "policies.example.org/checked=yes")
    for key in ("label", "annotate"):
        target.kubectl(key, "pods", of_job, "--overwrite", *labels, target.jobs.here)
    target.kubectl("label", "pods", of_job, "app.kubernetes.io/name-", target.jobs.here)
    target.wait_for_steps(WATCHED_STEPS)
    assert target.uids() == before, "a pod was replaced"
    yield


@contextmanager
def second_release(target: Target) -> Iterator[None]:
    """Start a second release with other settings for the same namespace."""
    before, other = target.uids(), f"{target.jobs.namespace}-second"
    stage.make_namespace(target.kubectl, other)
    second = Operator(
        target.kubectl,
        other,
        _folder(target, "second"),
        "second",
        others=(target.jobs.namespace,),
        options=['--network={"egress":"restricted"}'],
    )
    second.start()
    try:
        wait_for(lambda: "which claims it" in second.log(), second.log, seconds=60)
        target.wait_for_steps(WATCHED_STEPS)
        assert target.uids() == before, "a pod was replaced"
        yield
    finally:
        second.stop()
        target.kubectl("delete", "namespace", other, seconds=120)


@contextmanager
def role_lost(target: Target) -> Iterator[None]:
    """Take the operator's rights in its namespace, lose a pod, and give them back."""
    kubectl, namespace, before = target.kubectl, target.jobs.namespace, target.uids()
    folder, ours = _folder(target, "role"), target.jobs.operator
    config = make_account(kubectl, namespace, folder)
    grant(kubectl, namespace, namespace)
    options = ["--watch-nodes=false"]
    limited = Operator(kubectl, namespace, folder, "limited", kubeconfig=config, options=options)
    try:
        hand_over(target, limited)
        kubectl("delete", "rolebinding", GRANT, target.jobs.here)
        lose_unreplaced(target)
        grant(kubectl, namespace, namespace)
        target.wait_for_new_pods(before)
        _require_running(limited)
        yield
    finally:
        hand_over(target, ours)


@contextmanager
def crd_recreated(target: Target) -> Iterator[None]:
    """Delete the definition, and with it all jobs; apply both again when the pods are gone."""
    crd = f"--filename={ROOT / 'manifests' / 'crd.yaml'}"
    target.kubectl("delete", "crd/fluxtrainings.fluxtrain.dev", seconds=200)
    wait_for(lambda: not target.pods, "the pods are gone", seconds=200)
    target.kubectl("apply", "--server-side", crd)
    target.kubectl.wait_for_crds()
    target.apply()
    _require_running(target.jobs.operator)
    yield


def _require_running(operator: Operator) -> None:
    assert operator.process is not None
    assert operator.process.poll() is None, "the operator has ended"


def _folder(target: Target, name: str) -> Path:
    folder = target.output.parent / name
    folder.mkdir(exist_ok=True)
    return folder
