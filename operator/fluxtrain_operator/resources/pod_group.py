"""Pod groups: the scheduler starts at least ``nodes.min`` pods together or none of them."""

from __future__ import annotations

from fluxtrain.contract.resource.api_model import GROUP
from fluxtrain.contract.resource.fluxtraining import KIND
from fluxtrain_operator import names
from fluxtrain_operator.job import Job, Manifest
from fluxtrain_operator.resources.metadata import metadata, stamped

APIS = {
    "coscheduling": "scheduling.x-k8s.io/v1alpha1",
    "volcano": "scheduling.volcano.sh/v1beta1",
    "native": "scheduling.k8s.io/v1alpha2",
}
"""API version behind each value of ``scheduling.gang`` but ``none``."""
_TEMPLATE = "trainer"


def pod_groups(job: Job, gang: str) -> list[Manifest]:
    """Return the objects of ``gang`` in the order in which they must be created."""
    if gang == "none":
        return []
    if gang == "native":
        return [_workload(job), _native_group(job)]
    spec: Manifest = {"minMember": job.spec.nodes.min}
    priority = job.spec.scheduling.priority_class_name
    if gang == "volcano" and priority is not None:
        spec["priorityClassName"] = priority
    return [_object(job, gang, "PodGroup", names.pod_group(job.name), spec)]


def join(pod: Manifest, job: Job, gang: str) -> None:
    """Make ``pod`` a member of the job's group."""
    group = names.pod_group(job.name)
    if gang == "coscheduling":
        pod["metadata"]["labels"][names.COSCHEDULING_GROUP] = group
    elif gang == "volcano":
        pod["metadata"]["annotations"][names.VOLCANO_GROUP] = group
        pod["spec"]["schedulerName"] = "volcano"
    elif gang == "native":
        name = names.native_group(job.name, job.spec.nodes.min)
        pod["spec"]["schedulingGroup"] = {"podGroupName": name}


def _workload(job: Job) -> Manifest:
    template = {"name": _TEMPLATE, "schedulingPolicy": _policy(job)}
    reference = {"apiGroup": GROUP, "kind": KIND, "name": job.name}
    spec = {"controllerRef": reference, "podGroupTemplates": [template]}
    return _object(job, "native", "Workload", _native_name(job), spec)


def _native_group(job: Job) -> Manifest:
    workload = {"workloadName": _native_name(job), "podGroupTemplateName": _TEMPLATE}
    spec = {"podGroupTemplateRef": {"workload": workload}, "schedulingPolicy": _policy(job)}
    return _object(job, "native", "PodGroup", _native_name(job), spec)


def _policy(job: Job) -> Manifest:
    return {"gang": {"minCount": job.spec.nodes.min}}


def _native_name(job: Job) -> str:
    return names.native_group(job.name, job.spec.nodes.min)


def _object(job: Job, gang: str, kind: str, name: str, spec: Manifest) -> Manifest:
    return stamped(
        {"apiVersion": APIS[gang], "kind": kind, "metadata": metadata(job, name), "spec": spec}
    )
