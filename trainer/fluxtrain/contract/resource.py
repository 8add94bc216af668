"""FluxTraining: the one resource, read by the cluster and by ``fluxtrain run`` alike (design D1).

``spec.run`` is what the trainer needs (RunConfig); everything else is what a cluster needs. Outside
``run`` the fields are camelCase, as everywhere in Kubernetes.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field

from fluxtrain.contract.part import (
    LabelKey,
    LabelValue,
    Name,
    Part,
    Quantity,
    ResourceName,
    Seconds,
    Text,
)
from fluxtrain.contract.section import FIXED, Rule
from fluxtrain.contract.status import Status

GROUP, VERSION, KIND = "fluxtrain.dev", "v1alpha1", "FluxTraining"
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


class PersistentVolumeClaim(Part):
    """A claim in the job's namespace."""

    claim_name: Annotated[str, Field(min_length=1, max_length=253)]
    """Name of the claim."""
    read_only: bool = False
    """Whether it is mounted read-only."""


class HostPath(Part):
    """A folder of the node; refused by restricted Pod Security."""

    path: Annotated[
        str, Field(pattern=r"^/", max_length=1024, title="an absolute path, beginning with /")
    ]
    """Absolute path on the node."""


class EmptyDir(Part):
    """A folder that lives and dies with the pod."""

    size_limit: Quantity | None = None
    """Most bytes it may hold."""


_VOLUME_KINDS = ("persistentVolumeClaim", "hostPath", "emptyDir")


class Volume(Part):
    """Exactly one kind of volume."""

    rules: ClassVar = (
        Rule(
            "",
            (),
            f"exactly one of {', '.join(_VOLUME_KINDS)} must be set",
            lambda volume: sum(volume.look_up(kind) is not None for kind in _VOLUME_KINDS) == 1,
            f"{' + '.join(f'(has(self.{kind}) ? 1 : 0)' for kind in _VOLUME_KINDS)} == 1",
        ),
    )

    persistent_volume_claim: PersistentVolumeClaim | None = None
    """A claim."""
    host_path: HostPath | None = None
    """A folder of the node."""
    empty_dir: EmptyDir | None = None
    """A folder that lives and dies with the pod."""


class Storage(Part):
    """Volumes at the fixed paths /data, /models and /output; an empty folder where none is named."""

    data: Volume | None = None
    """Mounted at /data: the root of relative data paths."""
    models: Volume | None = None
    """Mounted at /models: the root of relative model paths."""
    output: Volume | None = None
    """Mounted at /output: checkpoints, logs and pictures; without one a lost pod loses them."""


class Restart(Part):
    """When a failure is cured by starting again, and when it is final (design D5, D6)."""

    max_restarts: Annotated[int, Field(ge=0, le=1000)] = 10
    """Restarts for the program's own errors; node loss, eviction and preemption do not count."""
    no_progress_seconds: Annotated[int, Field(ge=30, le=86_400)] | None = None
    """Kill a job whose last step is older; none: learned from its own step times."""
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

    key: Annotated[str, Field(max_length=317)] | None = None
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
    priority_class_name: Annotated[str, Field(max_length=253)] | None = None
    """Priority class of the pods."""
    node_selector: Annotated[dict[LabelKey, LabelValue], Field(max_length=32)] = {}
    """Labels that the nodes must have."""
    tolerations: Annotated[list[Toleration], Field(max_length=32)] = []
    """Taints that are tolerated."""
    topology: LabelKey | None = None
    """Node label, such as a rack's, within which the pods are kept together where possible."""


class EnvironmentVariable(Part):
    """One variable of the trainer's environment."""

    rules: ClassVar = (
        Rule(
            "name",
            (),
            "must not begin with PET_ or FLUXTRAIN_: the operator sets those",
            lambda variable: not variable.name.startswith(("PET_", "FLUXTRAIN_")),
            "!self.name.startsWith('PET_') && !self.name.startsWith('FLUXTRAIN_')",
        ),
    )

    name: Annotated[
        str,
        Field(
            pattern=r"^[A-Za-z_][A-Za-z0-9_]*$",
            max_length=256,
            title="a variable's name: letters, digits and '_', no digit first",
        ),
    ]
    """Name; PET_* and FLUXTRAIN_* belong to the operator."""
    value: Annotated[str, Field(max_length=4096)]
    """Value."""


class Network(Part):
    """How the ranks talk to each other."""

    mode: Literal["pod", "host"] = "pod"
    """``host`` uses the node's network, as most RDMA set-ups need."""
    rdma_resource: ResourceName | None = None
    """Extended resource of the RDMA devices, one per GPU."""
    env: Annotated[list[EnvironmentVariable], Field(max_length=64)] = []
    """Variables for RCCL/NCCL, added to the defaults and winning over them."""


class Spec(Part):
    """What is wanted."""

    image: Text | None = None
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
    pod_template: dict[str, Any] = {}
    """Strategic overrides of the pods, applied last, for what the fields above do not name."""


class FluxTraining(Part):
    """One training job."""

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
