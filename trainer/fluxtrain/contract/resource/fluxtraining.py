"""FluxTraining: the one resource, read by the cluster and by ``fluxtrain run`` alike (design D1).

``spec.run`` is what the trainer needs (RunConfig); everything else is what a cluster needs. Outside
``run`` the fields are camelCase, as everywhere in Kubernetes.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field

from fluxtrain.contract.resource.part import (
    GROUP,
    Image,
    LabelKey,
    LabelValue,
    Name,
    Part,
    ResourceName,
    Seconds,
    Subdomain,
)
from fluxtrain.contract.resource.pod_template import NOT_OURS, PodTemplate, VariableName
from fluxtrain.contract.resource.status import Status
from fluxtrain.contract.resource.storage import Storage
from fluxtrain.contract.section import FIXED, Rule

VERSION, KIND = "v1alpha1", "FluxTraining"
PLURAL, SINGULAR, SHORT_NAME = "fluxtrainings", "fluxtraining", "ft"
LABEL_JOB = f"{GROUP}/job"
"""Name of the job, on every object of it. Written by the operator; read by the pods' watch, services,
policies, dashboards and ``fluxtrain mlperf package``."""


class Metadata(Part):
    """The object's metadata; what Kubernetes knows beside the name is left alone."""

    model_config = ConfigDict(extra="ignore")

    name: Name
    """Name of the job."""
    namespace: Name | None = None
    """Namespace of the job."""


class Nodes(Part):
    """How many nodes train: one pod with one torchrun agent on each; elastic where min < max."""

    rules: ClassVar = (
        Rule(
            "min",
            ("max",),
            "must be at most max",
            lambda nodes: nodes.min <= nodes.max,
            "self.min <= self.max",
        ),
    )

    min: Annotated[int, Field(ge=1, le=4096)] = 1
    """Training starts, and goes on, with at least this many."""
    max: Annotated[int, Field(ge=1, le=4096)] = 1
    """At most this many are used; ``kubectl scale`` sets it."""


class Restart(Part):
    """When a failure is cured by starting again, and when it is final (design D5, D6)."""

    max_restarts: Annotated[int, Field(ge=0, le=1000)] = 10
    """Restarts for the program's own errors; node loss, eviction and preemption do not count."""
    no_progress_seconds: Annotated[int, Field(ge=30, le=86_400)] | None = None
    """Restart a job that tells of no newer step; none: learned from its own step times. Other phases, such as
    loading or saving, have half an hour from their last sign of progress, or this where it is longer."""
    on_exit_codes: Annotated[list[Annotated[int, Field(ge=1, le=255)]], Field(max_length=32)] = [
        1,
        74,
    ]
    """Exit codes of the trainer that are worth a restart."""
    force_delete_on_lost_node: bool = False
    """Whether pods of a lost node are deleted by force; only safe where storage fences old writers."""


class Lifecycle(Part):
    """From creation to clean-up."""

    suspend: bool = False
    """True stops the job after a checkpoint and keeps no pods; false goes on."""
    start_after: Annotated[list[Name], Field(max_length=16)] = []
    """Jobs of the same namespace that must be complete first."""
    active_deadline_seconds: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None
    """Fail the job when it has been active this long."""
    ttl_seconds_after_finished: Seconds | None = None
    """Delete the job this long after its end."""
    clean_pods: Literal["None", "Running", "All"] = "Running"
    """Which pods are deleted when the job ends: their logs go with them."""


class Toleration(Part):
    """A taint that the pods tolerate."""

    rules: ClassVar = (
        Rule(
            "operator",
            (),
            "must be Exists where no key is given",
            lambda taint: taint.key is not None or taint.operator == "Exists",
            "has(self.key) || self.operator == 'Exists'",
        ),
        Rule(
            "value",
            ("operator",),
            "must be left out where operator is Exists",
            lambda taint: taint.operator != "Exists" or not taint.value,
            "self.operator != 'Exists' || self.value == ''",
        ),
        Rule(
            "tolerationSeconds",
            (),
            "must be left out where effect is not NoExecute",
            lambda taint: taint.toleration_seconds is None or taint.effect == "NoExecute",
            "has(self.effect) && self.effect == 'NoExecute'",
        ),
    )

    key: LabelKey | None = None
    """Key of the taint; none matches all."""
    operator: Literal["Exists", "Equal"] = "Equal"
    """How the value is compared."""
    value: LabelValue | None = None
    """Value of the taint."""
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None
    """Effect of the taint; none matches all."""
    toleration_seconds: Seconds | None = None
    """How long NoExecute is tolerated."""


class Scheduling(Part):
    """Where and when the pods run."""

    queue_name: Name | None = None
    """Kueue's local queue."""
    gang: Annotated[Literal["none", "coscheduling", "volcano", "native"], FIXED] = "none"
    """Which scheduler's pod groups admit all pods together."""
    priority_class_name: Subdomain | None = None
    """Priority class of the pods."""
    node_selector: Annotated[dict[LabelKey, LabelValue], Field(max_length=32)] = {}
    """Labels that the nodes must have."""
    tolerations: Annotated[list[Toleration], Field(max_length=32)] = []
    """Taints that are tolerated."""
    topology: LabelKey | None = None
    """Node label, such as a rack's, within which the pods are kept together where possible."""


class EnvironmentVariable(Part):
    """One variable of the trainer's environment."""

    rules: ClassVar = (NOT_OURS,)

    name: VariableName
    """Name; PET_* and FLUXTRAIN_* belong to the operator."""
    value: Annotated[str, Field(max_length=4096)]
    """Value."""


class Network(Part):
    """How the ranks talk to each other."""

    rules: ClassVar = (
        Rule(
            "env",
            (),
            "must not name a variable twice",
            lambda network: len({variable.name for variable in network.env}) == len(network.env),
            "self.env.all(one, self.env.exists_one(other, other.name == one.name))",
        ),
    )

    mode: Literal["pod", "host"] = "pod"
    """``host`` uses the node's network, as most RDMA set-ups need."""
    rdma_resource: ResourceName | None = None
    """Extended resource of the RDMA devices, one per GPU."""
    env: Annotated[list[EnvironmentVariable], Field(max_length=64)] = []
    """Variables for RCCL/NCCL, added to the defaults and winning over them."""


class Spec(Part):
    """What is wanted."""

    rules: ClassVar = (
        Rule(
            "network.rdmaResource",
            ("gpusPerNode",),
            "must be left out where there are no GPUs: each brings one device",
            lambda spec: spec.network.rdma_resource is None or spec.gpus_per_node > 0,
            "self.gpusPerNode > 0",
        ),
        Rule(
            "network.rdmaResource",
            ("gpuResource",),
            "must be another resource than the GPUs'",
            lambda spec: spec.network.rdma_resource != spec.gpu_resource,
            "self.network.rdmaResource != self.gpuResource",
        ),
        Rule(
            "nodes.max",
            (),
            "must be 1 where run.task is prepare",
            lambda spec: spec.nodes.max == 1 or spec.run.get("task") != "prepare",
            "self.nodes.max == 1 || !has(self.run.task) || self.run.task != 'prepare'",
        ),
        Rule(
            "gpusPerNode",
            (),
            "must be 0 where run.task is prepare: it decodes pictures, and would hold GPUs idle",
            lambda spec: spec.gpus_per_node == 0 or spec.run.get("task") != "prepare",
            "self.gpusPerNode == 0 || !has(self.run.task) || self.run.task != 'prepare'",
        ),
    )

    image: Image | None = None
    """Trainer image; none: the operator's default."""
    nodes: Nodes = Nodes()
    """Size of the job."""
    gpus_per_node: Annotated[int, Field(ge=0, le=64), FIXED] = 0
    """GPUs of each node, one rank each; 0 trains on the CPU."""
    gpu_resource: Annotated[ResourceName, FIXED] = "amd.com/gpu"
    """Extended resource of the GPUs, partitions such as amd.com/cpx_nps4 included."""
    run: dict[str, Any]
    """The training itself: a preset and what is changed in it."""
    storage: Annotated[Storage, FIXED] = Storage()
    """Volumes."""
    restart: Restart = Restart()
    """Recovery."""
    lifecycle: Lifecycle = Lifecycle()
    """From creation to clean-up."""
    scheduling: Scheduling = Scheduling()
    """Where and when."""
    network: Network = Network()
    """Between the ranks."""
    managed_by: Annotated[str, Field(min_length=1, max_length=253), FIXED] = (
        "fluxtrain.dev/operator"
    )
    """Who reconciles this job; another value makes our operator leave it alone."""
    pod_template: PodTemplate = PodTemplate()
    """Strategic overrides of the pods, applied last, for what the fields above do not name."""

    @property
    def rank_counts(self) -> range:
        """Return every number of ranks that the job may train with."""
        per_node = max(self.gpus_per_node, 1)
        return range(self.nodes.min * per_node, self.nodes.max * per_node + 1, per_node)


class FluxTraining(Part):
    """One training job."""

    rules: ClassVar = (
        Rule(
            "spec.lifecycle.startAfter",
            ("metadata.name",),
            "must not name the job itself",
            lambda job: job.metadata.name not in job.spec.lifecycle.start_after,
            "!(self.metadata.name in self.spec.lifecycle.startAfter)",
        ),
    )

    api_version: Literal["fluxtrain.dev/v1alpha1"]
    """API version."""
    kind: Literal["FluxTraining"]
    """Kind."""
    metadata: Metadata
    """Name, namespace, labels."""
    spec: Spec
    """What is wanted."""
    status: Status | None = None
    """What is."""


def local_meaning(job: FluxTraining) -> list[str]:
    """Return the fields of ``job`` that only a cluster reads and that the file sets."""
    given = job.spec.model_fields_set - {"run"}
    return sorted(f"spec.{Spec.model_fields[name].alias}" for name in given)
