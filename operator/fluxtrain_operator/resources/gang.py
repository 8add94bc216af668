"""Gang scheduling: the scheduler starts at least ``nodes.min`` training pods together, or none of them."""

from __future__ import annotations

from collections.abc import Container

from fluxtrain.contract.resource.api_model import GROUP
from fluxtrain.contract.resource.fluxtraining import KIND
from fluxtrain_operator import names
from fluxtrain_operator.job import Job, Manifest
from fluxtrain_operator.resources.metadata import supporting_object

_TEMPLATE = "trainer"


class Gang:
    """No gang scheduling: the scheduler starts pods one by one."""

    api_version = ""
    """API version that the cluster must serve."""
    kinds: tuple[str, ...] = ()
    """Kinds of the supporting objects."""
    renames = False
    """Whether the names of the objects depend on the number of nodes, so that a change replaces them."""
    admission = ("Admitted", "")
    """Reason and message of the condition Admitted."""

    def objects(self, job: Job) -> list[Manifest]:
        """Return the supporting objects, in the order in which they must be created."""
        return []

    def configure_pod(self, pod: Manifest, job: Job) -> None:
        """Make the training ``pod`` a member of the job's pod group."""


class NotServed(Gang):
    """The cluster does not serve the API of the job's kind of gang scheduling."""

    admission = ("NoPodGroups", "the cluster has no API for scheduling.gang")


class Coscheduling(Gang):
    """The coscheduling plugin of kubernetes-sigs/scheduler-plugins."""

    api_version = "scheduling.x-k8s.io/v1alpha1"
    kinds: tuple[str, ...] = ("PodGroup",)

    def objects(self, job: Job) -> list[Manifest]:
        """Return the pod group."""
        return [self._object(job, "PodGroup", names.pod_group(job.name), self._spec(job))]

    def configure_pod(self, pod: Manifest, job: Job) -> None:
        """Label ``pod`` with its group."""
        pod["metadata"]["labels"][names.COSCHEDULING_GROUP] = names.pod_group(job.name)

    def _spec(self, job: Job) -> Manifest:
        return {"minMember": job.spec.nodes.min}

    def _object(self, job: Job, kind: str, name: str, spec: Manifest) -> Manifest:
        return supporting_object(job, self.api_version, kind, name, spec=spec)


class Volcano(Coscheduling):
    """Volcano's scheduler."""

    api_version = "scheduling.volcano.sh/v1beta1"

    def configure_pod(self, pod: Manifest, job: Job) -> None:
        """Annotate ``pod`` with its group, and have Volcano schedule it."""
        pod["metadata"]["annotations"][names.VOLCANO_GROUP] = names.pod_group(job.name)
        pod["spec"].setdefault("schedulerName", "volcano")

    def _spec(self, job: Job) -> Manifest:
        priority = job.spec.scheduling.priority_class_name
        spec = super()._spec(job)
        return spec if priority is None else {**spec, "priorityClassName": priority}


class Native(Coscheduling):
    """Kubernetes' own gang scheduling: a workload, and a pod group of its template."""

    api_version = "scheduling.k8s.io/v1alpha2"
    kinds = ("Workload", "PodGroup")
    renames = True

    def objects(self, job: Job) -> list[Manifest]:
        """Return the workload and the pod group."""
        name = _native_name(job)
        policy = {"gang": {"minCount": job.spec.nodes.min}}
        workload = {
            "controllerRef": {"apiGroup": GROUP, "kind": KIND, "name": job.name},
            "podGroupTemplates": [{"name": _TEMPLATE, "schedulingPolicy": policy}],
        }
        template = {"workload": {"workloadName": name, "podGroupTemplateName": _TEMPLATE}}
        group = {"podGroupTemplateRef": template, "schedulingPolicy": policy}
        return [
            self._object(job, "Workload", name, workload),
            self._object(job, "PodGroup", name, group),
        ]

    def configure_pod(self, pod: Manifest, job: Job) -> None:
        """Name the group in the spec of ``pod``."""
        pod["spec"]["schedulingGroup"] = {"podGroupName": _native_name(job)}


_GANGS: dict[str, Gang] = {
    "none": Gang(),
    "coscheduling": Coscheduling(),
    "volcano": Volcano(),
    "native": Native(),
}
_NOT_SERVED = NotServed()


def gang_of(job: Job, missing_apis: Container[str] = ()) -> Gang:
    """Return the gang scheduling of ``job``: none if its API is one of ``missing_apis``."""
    gang = _GANGS[job.spec.scheduling.gang]
    return _NOT_SERVED if gang.api_version in missing_apis else gang


def _native_name(job: Job) -> str:
    return names.native_group(job.name, job.spec.nodes.min)
