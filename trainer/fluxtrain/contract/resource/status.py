"""The status of a FluxTraining, written by the operator only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, get_args

from pydantic import ConfigDict, Field, ValidationError, WithJsonSchema

from fluxtrain.contract.model_base import ApiCount, ApiModel, model_of
from fluxtrain.contract.process import Cause

PHASES = ("Pending", "Starting", "Running", "Suspended", "Restarting", "Complete", "Failed")
CONDITION_TYPES = (
    "Ready", "Reconciling", "Stalled", "Admitted", "Training", "Progressing", "Healthy", "Suspended",
    "Complete", "Failed",
)  # fmt: skip
"""The first three summarize the others for programs that wait, as kstatus reads them."""
NOT_OBSERVED = -1
"""``observedGeneration`` until the operator has written a status: without it, such programs take a job that
nobody has seen for one that is ready."""

MAX_NODE_FAULTS, MAX_RETRIES, MAX_REPLACED_PODS, MAX_LOG_HEADS = 16, 64, 16, 16
"""Of the lists in a status."""
MAX_COUNTED_PODS = 4096
"""As many as a job can lose at a time."""


def _one_of(*values: str) -> Any:
    """Return the annotation of a field with an enum in the schema; any string is read.

    Another version of the operator may have written other values.
    """
    return WithJsonSchema({"type": "string", "enum": list(values)})


PredecessorName = Annotated[str, Field(max_length=253)]
"""Name of a job of ``startAfter``."""


class StatusModel(ApiModel):
    """A model of the status; unknown fields, which a newer operator may have written, are ignored."""

    model_config = ConfigDict(extra="ignore")


class Condition(StatusModel):
    """A condition, as in metav1.Condition."""

    type: Annotated[str, _one_of(*CONDITION_TYPES)]
    """Type of the condition."""
    status: Literal["True", "False", "Unknown"]
    """True, False or Unknown."""
    reason: Annotated[str, Field(pattern=r"^[A-Za-z][A-Za-z0-9_]*$", max_length=256)]
    """Programmatic identifier of the reason for the last transition."""
    message: Annotated[str, Field(max_length=32_768)] = ""
    """Human-readable details about the transition."""
    last_transition_time: Annotated[str, Field(max_length=64)]
    """Last time the status of the condition changed."""
    observed_generation: ApiCount | None = None
    """metadata.generation that the condition was set for."""


class NodesStatus(StatusModel):
    """Ready and desired nodes."""

    ready: ApiCount = 0
    """Nodes whose training pod is ready."""
    desired: ApiCount = 0
    """Nodes of this attempt."""


class CountedRestarts(StatusModel):
    """How far the restarts that agents tell the rendezvous service are counted."""

    attempt: ApiCount
    """The attempt whose generations are counted."""
    generation: ApiCount = 0
    """The newest generation whose end is counted; those before it are too."""
    process: ApiCount = 0
    """Restarts of processes in all attempts, as far as agents reported them."""


class Restarts(StatusModel):
    """Restarts so far, by what was restarted."""

    process: ApiCount = 0
    """Restarts of the processes inside running pods."""
    pod: ApiCount = 0
    """Pods replaced."""
    gang: ApiCount = 0
    """Restarts of all pods from the last complete checkpoint, after errors of the program."""
    charged: ApiCount = 0
    """Restarts after errors of the program, of its processes, a pod or all pods: at most ``maxRestarts``."""
    free: ApiCount = 0
    """Interruptions by the infrastructure, such as lost nodes and evictions, which are not limited."""
    causes: Annotated[dict[str, ApiCount], Field(max_length=64)] = {}
    """Charged and free restarts by reason."""
    counted_pods: Annotated[
        list[Annotated[str, Field(max_length=16)]], Field(max_length=MAX_COUNTED_PODS)
    ] = []
    """The last characters of the UIDs of pods whose loss is counted, so that each counts once."""
    counted: CountedRestarts | None = None
    """Restarts of processes are counted once, also after the operator or the rendezvous pod was replaced."""


class StragglerStatus(StatusModel):
    """The slowest rank, if it is slower than the median by more than ``run.logging.straggler_factor``."""

    rank: ApiCount
    """Rank of the process."""
    pod: Annotated[str, Field(max_length=253)]
    """Name of its pod."""
    node: Annotated[str, Field(max_length=253)]
    """Node of the pod."""
    cause: Annotated[str, _one_of(*get_args(Cause))]
    """What takes longer than on other ranks. ``compute``: its forward passes; ``backward``: its backward
    passes; ``optimizer``: its optimizer step; ``data``: its wait for data."""
    slowdown: Annotated[float, Field(gt=1)]
    """Its time over the median of all ranks; for ``data`` and ``optimizer``, the time of a step over that
    without what this rank takes longer."""


class NodeFault(StatusModel):
    """A fault that is attributed to a node; new pods of all jobs avoid the node for hours."""

    node: Annotated[str, Field(min_length=1, max_length=253)]
    """Name of the node."""
    reason: Annotated[str, Field(pattern=r"^[A-Za-z][A-Za-z0-9]*$", max_length=64)]
    """What happened, such as NodeLost or HardwareError."""
    time: Annotated[str, Field(max_length=64)]
    """When it happened."""
    pod: Annotated[str, Field(max_length=64)] = ""
    """UID of the pod that it happened to."""


class Retry(StatusModel):
    """Failures of the infrastructure, one after the other, of the pods at one index."""

    index: ApiCount
    """Index of the pods; 0 for all pods of a job in a queue."""
    reason: Annotated[str, Field(pattern=r"^[A-Za-z][A-Za-z0-9]*$", max_length=128)]
    """Reason of the failures."""
    count: ApiCount
    """Number of failures; the delay before the next pod doubles with each."""
    time: Annotated[str, Field(max_length=64)]
    """When the last pod was replaced."""
    pod: Annotated[str, Field(max_length=64)] = ""
    """UID of the last pod that failed."""


class ProgressStatus(StatusModel):
    """Progress of the training, from /progress of rank 0."""

    step: ApiCount = 0
    """Optimizer steps done."""
    steps: ApiCount | None = None
    """Steps of the whole training, which the trainer finds if ``schedule.epochs`` gives them."""
    epoch: ApiCount | None = None
    """Number of the epoch of the last step, from 1."""
    epochs: ApiCount | None = None
    """Number of the epoch of the training's last step."""
    samples: Annotated[int, Field(ge=0, le=2**53)] = 0
    """Training samples used."""
    train_loss: float | None = None
    """Training loss of the last logged step."""
    eval_loss: float | None = None
    """Evaluation loss of the last evaluation."""
    target_samples: Annotated[int, Field(ge=0, le=2**53)] | None = None
    """Training samples at which the job will reach ``evaluation.target_loss``, by its last evaluations."""
    samples_per_second: float | None = None
    """Throughput of the whole job."""
    mfu: float | None = None
    """Model FLOPs utilization: model FLOPs over the GPUs' dense peak."""
    remaining_seconds: float | None = None
    """Estimated time to the last step."""
    train_seconds: float | None = None
    """Time spent on steps over all attempts; steps repeated after a restart count once."""
    first_step_time: Annotated[str, Field(max_length=64)] | None = None
    """When the current processes completed their first step, by the clock of rank 0's node."""
    last_step_time: Annotated[str, Field(max_length=64)] | None = None
    """When the last step completed, by the operator's clock."""
    phase_seconds: Annotated[dict[str, float], Field(max_length=16)] = {}
    """Seconds that rank 0's present process has spent in each phase."""
    straggler: StragglerStatus | None = None
    """The rank that all ranks wait for; null if there is none. Nothing is restarted for it."""


class TimeSpent(StatusModel):
    """Seconds since the start time by how they were spent, without suspensions; ``step`` is productive."""

    until: Annotated[str, Field(max_length=64)]
    """Time until which they are counted; the status is written on transitions and about once a minute."""
    step: float = 0.0
    """On steps that were not repeated."""
    pending: float = 0.0
    """Waiting for nodes: fewer pods than ``nodes.min`` ran."""
    start: float = 0.0
    """Starting: joining, importing, loading and compiling."""
    evaluate: float = 0.0
    """Evaluating and sampling images."""
    save: float = 0.0
    """Waiting for checkpoints."""
    redone: float = 0.0
    """On steps after the checkpoint that a restart resumed from."""
    stalled: float = 0.0
    """Without progress, before the job was restarted for it."""
    other: float = 0.0
    """Writing the last files."""


class CheckpointStatus(StatusModel):
    """The newest complete checkpoint."""

    step: ApiCount
    """Step of the checkpoint."""
    time: Annotated[str, Field(max_length=64)] | None = None
    """When it was completed."""


class LogHead(StatusModel):
    """How long the chain of the MLPerf log was when the operator looked, and the hash of its last record."""

    records: ApiCount
    """Records of the chain."""
    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$", max_length=64)]
    """SHA-256 of the last of them, which depends on all before it."""
    time: Annotated[str, Field(max_length=64)]
    """When the operator saw it."""


class InPlaceRestart(StatusModel):
    """The newest restart of all processes inside the living pods."""

    attempt: ApiCount
    """Attempt of the pods."""
    generation: ApiCount
    """The generation of their agents that was ended because it made no progress."""
    step: ApiCount
    """Newest step of that generation."""
    time: Annotated[str, Field(max_length=64)]
    """When the operator ended it."""
    last_step_time: Annotated[str, Field(max_length=64)] | None = None
    """When its last step completed."""


class PodReplacement(StatusModel):
    """The newest replacement of single pods in which the program failed."""

    attempt: ApiCount
    """Attempt of the pods."""
    time: Annotated[str, Field(max_length=64)]
    """When the restart was charged; what fails without a step after that is not charged again."""
    step: ApiCount = 0
    """Newest step before."""
    replacements: ApiCount = 0
    """Pods replaced before; a failure of one that is created later is charged."""
    pods: Annotated[
        list[Annotated[str, Field(max_length=64)]], Field(max_length=MAX_REPLACED_PODS)
    ] = []
    """UIDs of the replaced pods."""


class Status(StatusModel):
    """Observed state of the job, written by the operator."""

    phase: Annotated[str, _one_of(*PHASES)] | None = None
    """Summary of the conditions, for display; programs should use the conditions."""
    conditions: Annotated[list[Condition], Field(max_length=20)] = []
    """Conditions of the job, one per type."""
    observed_generation: Annotated[int, Field(ge=NOT_OBSERVED, le=2**31 - 1)] | None = None
    """metadata.generation that this status was computed from; -1 if no status has been written."""
    nodes: NodesStatus | None = None
    """Ready and desired nodes."""
    selector: Annotated[str, Field(max_length=1024)] | None = None
    """Label selector of the training pods, for the scale subresource."""
    attempt: ApiCount = 0
    """Number of times that the pods were created, counted from 1."""
    group_attempt: ApiCount | None = None
    """The attempt that names the pods' group in Kueue, if it is an earlier one: a restart kept the group."""
    revision: Annotated[str, Field(max_length=63)] | None = None
    """Config map with image, config and environment of the pods; unchanged until the spec changes."""
    previous_revision: Annotated[str, Field(max_length=63)] | None = None
    """The revision before; older ones are deleted."""
    restarts: Restarts | None = None
    """Restarts so far."""
    in_place_restart: InPlaceRestart | None = None
    """The newest restart of all processes inside the living pods of this attempt."""
    pod_replacement: PodReplacement | None = None
    """The newest replacement of pods of this attempt in which the program failed."""
    node_faults: Annotated[list[NodeFault], Field(max_length=MAX_NODE_FAULTS)] = []
    """Newest faults of nodes that this job has met, oldest first."""
    retries: Annotated[list[Retry], Field(max_length=MAX_RETRIES)] = []
    """Pods that the infrastructure lets fail shortly after their start, and how often in a row."""
    exclusion_lifted: Annotated[str, Field(max_length=64)] | None = None
    """When pods could not be scheduled on other nodes than those with faults; they may for an hour."""
    progress: ProgressStatus | None = None
    """Progress of the training."""
    eta: Annotated[str, Field(max_length=16)] | None = None
    """Estimated time to the last step, such as 2h10m; only while the job trains."""
    checkpoint: CheckpointStatus | None = None
    """The checkpoint that a restart resumes from."""
    log_heads: Annotated[list[LogHead], Field(max_length=MAX_LOG_HEADS)] = []
    """Heads of the chain of the MLPerf log, as the trainer reported them while it ran, the oldest first;
    `fluxtrain mlperf verify --status` compares the log with them."""
    start_time: Annotated[str, Field(max_length=64)] | None = None
    """When a pod was first admitted and past all scheduling gates; set once."""
    active_since: Annotated[str, Field(max_length=64)] | None = None
    """From when deadlines count: the start time, or when the job was last resumed, or admitted by a queue."""
    completion_time: Annotated[str, Field(max_length=64)] | None = None
    """When the job completed or failed."""
    suspended_seconds: ApiCount | None = None
    """Time between start and end during which the job was suspended and had no pods."""
    train_seconds_before: float | None = None
    """Training time already recorded in the output when this job began to train."""
    time_spent: TimeSpent | None = None
    """How the time since the start was spent, and by what it was lost."""
    goodput: Annotated[float, Field(ge=0, le=1)] | None = None
    """Fraction of the time spent on steps that were not repeated; suspended time is excluded."""
    exit_code: Annotated[int, Field(ge=0, le=255)] | None = None
    """Exit code that ended the job."""
    completed_predecessors: Annotated[list[PredecessorName], Field(max_length=16)] = []
    """Jobs of ``startAfter`` that were seen complete before this one began; they may be removed since."""
    last_error: Annotated[str, Field(max_length=4096)] | None = None
    """Last error line of the trainer."""


def read_status(values: object) -> Status:
    """Return the status in ``values`` from the API server, without the fields that do not validate.

    A newer operator may have written them. Without an attempt there is no phase either: the attempt is then
    taken from the pods, as for a job without a status.
    """
    if not isinstance(values, Mapping):
        return Status()
    try:
        return Status.model_validate(values)
    except ValidationError as error:
        invalid = {str(detail["loc"][0]) for detail in error.errors()}
    invalid |= {"phase"} if "attempt" in invalid else set()
    return Status.model_validate({name: values[name] for name in values if name not in invalid})


def preserve_unknown_fields(
    before: object, after: dict[str, Any], model: type[ApiModel] = Status
) -> dict[str, Any]:
    """Return ``after`` with the fields of ``before``, at every level, that ``model`` does not define."""
    if not isinstance(before, Mapping):
        return after
    fields = {field.alias or name: field for name, field in model.model_fields.items()}
    merged = {name: value for name, value in before.items() if name not in fields}
    for name, value in after.items():
        below = model_of(fields[name].annotation)
        if below is not None and issubclass(below, ApiModel) and isinstance(value, dict):
            merged[name] = preserve_unknown_fields(before.get(name), value, below)
        else:
            merged[name] = value
    return merged
