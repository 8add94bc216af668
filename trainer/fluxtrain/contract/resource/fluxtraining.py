"""FluxTraining: the one resource, used by the operator and by ``fluxtrain run``.

``spec.run`` is the trainer's RunConfig; the other fields are for a cluster and have camelCase names.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field

from fluxtrain.contract.model_base import (
    GROUP,
    IMMUTABLE,
    ApiModel,
    Image,
    LabelKey,
    LabelValue,
    Name,
    ResourceName,
    Rule,
    Seconds,
    Subdomain,
)
from fluxtrain.contract.resource.pod_template import (
    NO_LITERAL_CREDENTIAL,
    NO_RENDEZVOUS_KEY,
    RESERVED_NAMES,
    UNIQUE_VARIABLES,
    PodTemplate,
    Resources,
    Storage,
    VariableName,
)
from fluxtrain.contract.resource.status import Status

VERSION, KIND = "v1alpha1", "FluxTraining"
"""The version that the API server stores and that the operator watches."""
VERSIONS = (VERSION, "v1beta1")
"""All that are served; their schemas are identical."""
PLURAL, SINGULAR, SHORT_NAME = "fluxtrainings", "fluxtraining", "ft"
LABEL_JOB = f"{GROUP}/job"
"""Name of the job, on all of its objects. Set by the operator; used by the watches, services, network
policies, dashboards and ``fluxtrain mlperf package``."""


class Metadata(ApiModel):
    """The object's metadata; other fields than these are ignored."""

    model_config = ConfigDict(extra="ignore")

    name: Name
    """Name of the job."""
    namespace: Name | None = None
    """Namespace of the job."""


class Nodes(ApiModel):
    """Number of nodes, with one pod and one torchrun agent each; elastic if min < max."""

    rules: ClassVar = (
        Rule(
            "min",
            "must be at most max",
            lambda nodes: nodes.min <= nodes.max,
            "self.min <= self.max",
            others=("max",),
        ),
    )

    min: Annotated[int, Field(ge=1, le=4096)] = 1
    """Minimum number of nodes; training pauses below it."""
    max: Annotated[int, Field(ge=1, le=4096)] = Field(default_factory=lambda data: data["min"])
    """Maximum number of nodes, by default ``min``; set by ``kubectl scale``."""


class Restart(ApiModel):
    """Which failures restart the job, and when it fails for good."""

    max_restarts: Annotated[int, Field(ge=0, le=1000)] = 10
    """Maximum restarts after errors of the program, of its processes or of all pods; node loss, eviction and
    preemption do not count."""
    no_progress_seconds: Annotated[int, Field(ge=30, le=86_400)] | None = None
    """Restart a job that reports no newer step for this long; if unset, derived from its step times. Other
    phases, such as loading or saving, have limits of their own, or this if it is longer."""
    on_exit_codes: Annotated[list[Annotated[int, Field(ge=1, le=255)]], Field(max_length=32)] = [
        1,
        74,
    ]
    """Exit codes of the trainer that restart the job. A container that is out of memory restarts it too."""
    force_delete_on_lost_node: bool = False
    """Force-delete the pods of a lost node; only safe if the storage fences old writers."""


class Lifecycle(ApiModel):
    """Suspension, dependencies, deadlines and clean-up."""

    suspend: bool = False
    """Save a checkpoint and delete the pods; setting it to false resumes the job."""
    start_after: Annotated[list[Name], Field(max_length=16)] = []
    """FluxTrainings of the same namespace that must complete first. One that was seen complete may be
    removed. If it is created again before this job begins, it must complete again."""
    start_when: Literal["Complete", "Ended"] = "Complete"
    """What the jobs of ``startAfter`` must have become: Complete, or Ended, which a failed job is too, as
    between the runs of a series."""
    active_deadline_seconds: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None
    """Fail the job this long after it became active. As in a Kubernetes Job, that is at the start time, and
    again when the job is resumed; with Kueue, also when it is queued and admitted again."""
    pending_deadline_seconds: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None
    """Fail the job if no node of its first attempt has run, with the rendezvous pod, this long after it
    became active, as for ``activeDeadlineSeconds``; if unset, it waits forever."""
    ttl_seconds_after_finished: Seconds | None = None
    """Delete the job this long after it has completed or failed; later if a job of the namespace that starts
    after it has not seen yet that it is complete, or that it has failed if that job waits for its end."""
    clean_pods: Literal["None", "Running", "All"] = "Running"
    """Which pods are deleted, with their logs, when the job completes or fails."""


class Toleration(ApiModel):
    """A toleration of the pods."""

    rules: ClassVar = (
        Rule(
            "operator",
            "must be Exists if no key is given",
            lambda taint: taint.key is not None or taint.operator == "Exists",
            "has(self.key) || self.operator == 'Exists'",
        ),
        Rule(
            "value",
            "must be left out if operator is Exists",
            lambda taint: taint.operator != "Exists" or not taint.value,
            "self.operator != 'Exists' || self.value == ''",
            others=("operator",),
        ),
        Rule(
            "tolerationSeconds",
            "must be left out if effect is not NoExecute",
            lambda taint: taint.toleration_seconds is None or taint.effect == "NoExecute",
            "has(self.effect) && self.effect == 'NoExecute'",
        ),
    )

    key: LabelKey | None = None
    """Key of the taint; if unset, all keys match."""
    operator: Literal["Exists", "Equal"] = "Equal"
    """Exists matches any value; Equal compares it."""
    value: LabelValue | None = None
    """Value of the taint."""
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None
    """Effect of the taint; if unset, all effects match."""
    toleration_seconds: Seconds | None = None
    """How long a NoExecute taint is tolerated; if unset, forever."""


class Scheduling(ApiModel):
    """Queue, gang scheduling and placement of the pods."""

    queue_name: Name | None = None
    """Name of a Kueue LocalQueue; with ``gang: Volcano``, of a Volcano queue."""
    gang: Annotated[Literal["None", "Coscheduling", "Volcano", "Native"], IMMUTABLE] = "None"
    """Gang scheduler whose pod group admits all pods together."""
    priority_class_name: Subdomain | None = None
    """Priority class of the pods."""
    node_selector: Annotated[dict[LabelKey, LabelValue], Field(max_length=32)] = {}
    """Labels that a node must have."""
    tolerations: Annotated[list[Toleration], Field(max_length=32)] = []
    """Tolerations of the pods."""
    topology: LabelKey | None = None
    """Node label, such as a rack's, by which the pods are kept together if possible. With it, or with
    ``requiredTopology``, ranks are ordered by the label of their node, then by node, instead of by pod."""
    required_topology: LabelKey | None = None
    """Node label of which all training pods must have the same value; Kueue then ignores ``topology``."""

    @property
    def local_queue(self) -> str | None:
        """Return the name of the Kueue LocalQueue; None if Kueue does not manage the pods."""
        return None if self.gang == "Volcano" else self.queue_name

    @property
    def rank_order_label(self) -> str | None:
        """Return the node label by which ranks are ordered; None if they are ordered by pod."""
        return self.topology or self.required_topology


class EnvironmentVariable(ApiModel):
    """An environment variable of the trainer."""

    rules: ClassVar = (RESERVED_NAMES, NO_LITERAL_CREDENTIAL)

    name: VariableName
    """Name; PET_* and FLUXTRAIN_* are reserved for the operator."""
    value: Annotated[str, Field(max_length=4096)]
    """Value of the variable."""


RdmaDevice = Annotated[
    str,
    Field(
        pattern=r"^[A-Za-z0-9_]+(:[0-9]+)?$",
        max_length=64,
        title="an RDMA device such as mlx5_0 or mlx5_0:1",
    ),
]
Byte = Annotated[int, Field(ge=0, le=255)]


class Network(ApiModel):
    """Network of the ranks."""

    rules: ClassVar = (UNIQUE_VARIABLES,)

    mode: Literal["Pod", "Host"] = "Pod"
    """``Host`` uses the host network, which most RDMA set-ups need."""
    rdma_resource: ResourceName | None = None
    """Extended resource of the RDMA devices; one is requested per GPU."""
    rdma_devices: Annotated[list[RdmaDevice], Field(max_length=64)] = []
    """Names of the RDMA devices that RCCL/NCCL may use (NCCL_IB_HCA), each with an optional port; if empty,
    all."""
    gid_index: Byte | None = None
    """Index of the RoCE v2 address in the GID table of the RDMA devices (NCCL_IB_GID_INDEX)."""
    traffic_class: Byte | None = None
    """Traffic class of the RDMA packets, which selects a lossless queue of RoCE switches (NCCL_IB_TC)."""
    env: Annotated[list[EnvironmentVariable], Field(max_length=64)] = []
    """Environment variables for RCCL/NCCL; they override the defaults and the fields above."""


def _in_prepare_task(field: str, allowed: int, why: str) -> Rule:
    return Rule(
        field,
        f"must be {allowed} if run.task is prepare{why}",
        lambda spec: spec.look_up(field) == allowed or spec.run.get("task") != "prepare",
        f"self.{field} == {allowed} || !has(self.run.task) || self.run.task != 'prepare'",
    )


def _states_closed(run: Mapping[str, Any]) -> bool:
    """Return whether ``run``, which may be invalid, is of MLPerf's closed division by its preset."""
    value: Any = run
    for name in ("logging", "mlperf", "division"):
        value = value.get(name) if isinstance(value, Mapping) else None
    return (
        str(run.get("preset")).startswith("mlperf-")
        and run.get("task", "train") == "train"
        and value in (None, "closed")
    )


_FIXED_NODES = Rule(
    "nodes.min",
    "must be nodes.max in MLPerf's closed division, that of the presets mlperf-*: the system of a run stays "
    "the same (training rules 2.2); or set run.logging.mlperf.division to open",
    lambda spec: spec.nodes.min == spec.nodes.max or not _states_closed(spec.run),
    "self.nodes.min == self.nodes.max || !self.run.preset.startsWith('mlperf-') || "
    "(has(self.run.task) && self.run.task != 'train') || (has(self.run.logging) && "
    "has(self.run.logging.mlperf) && has(self.run.logging.mlperf.division) && "
    "self.run.logging.mlperf.division != 'closed')",
    others=("nodes.max",),
)
_FOR_NCCL = "only RCCL and NCCL read it"


def _only_with_gpus(field: str, why: str, unset: object = None, or_cel: str = "") -> Rule:
    return Rule(
        field,
        f"must be left out without GPUs: {why}",
        lambda spec: spec.gpus_per_node > 0 or spec.look_up(field) == unset,
        f"self.gpusPerNode > 0{or_cel}",
        others=("gpusPerNode",),
    )


class Spec(ApiModel):
    """Desired state of the job."""

    rules: ClassVar = (
        _only_with_gpus("gpuClaimTemplate", "it claims GPUs"),
        _only_with_gpus("network.rdmaResource", "one device is requested per GPU"),
        _only_with_gpus(
            "network.rdmaDevices", _FOR_NCCL, [], " || self.network.rdmaDevices.size() == 0"
        ),
        _only_with_gpus("network.gidIndex", _FOR_NCCL),
        _only_with_gpus("network.trafficClass", _FOR_NCCL),
        Rule(
            "network.rdmaResource",
            "must differ from the resource of the GPUs",
            lambda spec: spec.network.rdma_resource != spec.gpu_resource,
            "self.network.rdmaResource != self.gpuResource",
            others=("gpuResource",),
        ),
        NO_RENDEZVOUS_KEY,
        _FIXED_NODES,
        _in_prepare_task("nodes.min", 1, ""),
        _in_prepare_task("nodes.max", 1, ""),
        _in_prepare_task("gpusPerNode", 0, ": the task does not use GPUs"),
    )

    image: Image | None = None
    """Trainer image; if unset, the operator's default."""
    nodes: Nodes = Nodes()
    """Number of nodes."""
    gpus_per_node: Annotated[int, Field(ge=0, le=64), IMMUTABLE] = 0
    """GPUs per node, with one rank each; 0 trains on the CPU."""
    gpu_resource: Annotated[ResourceName, IMMUTABLE] = "amd.com/gpu"
    """Extended resource of the GPUs or of their partitions, such as amd.com/cpx_nps4."""
    gpu_claim_template: Annotated[Subdomain | None, IMMUTABLE] = None
    """ResourceClaimTemplate of a pod's GPUs, all gpusPerNode of them; gpuResource is then not requested."""
    run: dict[str, Any]
    """Configuration of the training: a preset and the fields that differ from it."""
    credentials: Annotated[list[Subdomain], Field(max_length=16)] = []
    """Names of Secrets whose keys the training container gets as environment variables, such as HF_TOKEN."""
    storage: Annotated[Storage, IMMUTABLE] = Storage()
    """Volumes for data, models and output."""
    restart: Restart = Restart()
    """Restart policy."""
    lifecycle: Lifecycle = Lifecycle()
    """Suspension, dependencies, deadlines and clean-up."""
    scheduling: Scheduling = Scheduling()
    """Queue, gang scheduling and placement of the pods."""
    network: Network = Network()
    """Network of the ranks."""
    resources: Resources = Resources()
    """CPU and memory of the training container, and the size of its shared memory."""
    managed_by: Annotated[str, Field(min_length=1, max_length=253), IMMUTABLE] = (
        "fluxtrain.dev/operator"
    )
    """Controller that reconciles the job; this operator ignores jobs with another value."""
    pod_template: PodTemplate = PodTemplate()
    """Strategic merge patch for the pods, without directives; applied last, for what no field covers."""

    @property
    def rank_counts(self) -> range:
        """Return every number of ranks that the job may train on."""
        per_node = max(self.gpus_per_node, 1)
        return range(self.nodes.min * per_node, self.nodes.max * per_node + 1, per_node)


class FluxTraining(ApiModel):
    """A training job."""

    rules: ClassVar = (
        Rule(
            "spec.lifecycle.startAfter",
            "must not contain the job itself",
            lambda job: job.metadata.name not in job.spec.lifecycle.start_after,
            "!(self.metadata.name in self.spec.lifecycle.startAfter)",
            others=("metadata.name",),
        ),
    )

    api_version: Literal["fluxtrain.dev/v1alpha1", "fluxtrain.dev/v1beta1"]
    """API version of the object."""
    kind: Literal["FluxTraining"]
    """Kind of the object."""
    metadata: Metadata
    """Name, namespace, labels."""
    spec: Spec
    """Desired state of the job."""
    status: Status | None = None
    """Observed state of the job."""


def cluster_only_fields(job: FluxTraining) -> list[str]:
    """Return the fields that ``job`` sets and that have an effect on a cluster only."""
    names = job.spec.model_fields_set - {"run"}
    return sorted(f"spec.{Spec.model_fields[name].alias}" for name in names)
