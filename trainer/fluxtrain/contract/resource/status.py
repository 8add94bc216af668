"""The status of a FluxTraining: what is, written by the operator alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, ValidationError, WithJsonSchema

from fluxtrain.contract.describe import section_of
from fluxtrain.contract.resource.part import Count, Number, Part

PHASES = ("Pending", "Starting", "Running", "Suspended", "Restarting", "Complete", "Failed")
KINDS = ("Admitted", "Ready", "Progressing", "Healthy", "Suspended", "Complete", "Failed")


def _one_of(*words: str) -> Any:
    """Return the mark of a field that is one of ``words``; another version may have written others."""
    return WithJsonSchema({"type": "string", "enum": list(words)})


class Report(Part):
    """A group of fields of the status; those of a newer operator are passed over, and kept."""

    model_config = ConfigDict(extra="ignore")


class Condition(Report):
    """One observation, in Kubernetes' form."""

    type: Annotated[str, _one_of(*KINDS)]
    """What it is about."""
    status: Literal["True", "False", "Unknown"]
    """Whether it holds."""
    reason: Annotated[str, Field(pattern=r"^[A-Za-z][A-Za-z0-9_]*$", max_length=256)]
    """Why, for machines."""
    message: Annotated[str, Field(max_length=32_768)] = ""
    """Why, for people."""
    last_transition_time: Annotated[str, Field(max_length=64)]
    """When the status last changed."""
    observed_generation: Count | None = None
    """Generation of the spec that it speaks of."""


class NodesStatus(Report):
    """Nodes that are there and that should be."""

    ready: Count = 0
    """Training."""
    desired: Count = 0
    """Asked for in this attempt."""


class Restarts(Report):
    """Restarts so far, by the rung of the ladder."""

    process: Count = 0
    """Processes inside living pods."""
    pod: Count = 0
    """Pods replaced."""
    gang: Count = 0
    """Whole job from the last durable checkpoint."""


class ProgressStatus(Report):
    """The trainer's own words, from /progress of rank 0."""

    step: Count = 0
    """Optimizer steps done."""
    samples: Annotated[int, Field(ge=0, le=2**53)] = 0
    """Training samples used."""
    train_loss: Number | None = None
    """Loss of the last logged step."""
    eval_loss: Number | None = None
    """Loss of the last evaluation."""
    samples_per_second: Number | None = None
    """Throughput of the whole job."""
    mfu: Number | None = None
    """Model FLOPs over the GPUs' dense peak."""
    remaining_seconds: Number | None = None
    """Estimated time to the last step."""
    train_seconds: Number | None = None
    """Time spent on steps over all lives of the run; those that a restart repeats count once."""
    first_step_time: Annotated[str, Field(max_length=64)] | None = None
    """When the present processes had made their first step."""
    last_step_time: Annotated[str, Field(max_length=64)] | None = None
    """When the last step ended."""


class CheckpointStatus(Report):
    """The newest complete checkpoint."""

    step: Count
    """Its step."""
    time: Annotated[str, Field(max_length=64)] | None = None
    """When it was complete."""


class Status(Report):
    """What is; written by the operator alone."""

    phase: Annotated[str, _one_of(*PHASES)] | None = None
    """One word for people; machines read the conditions."""
    conditions: Annotated[list[Condition], Field(max_length=16)] = []
    """Observations, by type."""
    observed_generation: Count | None = None
    """Generation of the spec that this status answers."""
    nodes: NodesStatus | None = None
    """Nodes that are there."""
    selector: Annotated[str, Field(max_length=1024)] | None = None
    """Label selector of the training pods, for the scale subresource."""
    attempt: Count = 0
    """Lives of the pods, counted from 1."""
    restarts: Restarts | None = None
    """Restarts so far."""
    progress: ProgressStatus | None = None
    """How far the training is."""
    checkpoint: CheckpointStatus | None = None
    """What a restart would go on from."""
    start_time: Annotated[str, Field(max_length=64)] | None = None
    """When a pod was first past all gates; set once."""
    completion_time: Annotated[str, Field(max_length=64)] | None = None
    """When the job was over, well or not."""
    suspended_seconds: Count | None = None
    """Time between start and end in which it was suspended and had no pods."""
    train_seconds_before: Number | None = None
    """Training time that the output already held when this job began to train."""
    goodput: Annotated[float, Field(ge=0, le=1)] | None = None
    """Part of the time from the start to the last step, or to the end, that went into steps that counted;
    suspension left out."""
    exit_code: Annotated[int, Field(ge=0, le=255)] | None = None
    """Exit code that ended the job."""
    last_error: Annotated[str, Field(max_length=4096)] | None = None
    """Last error line of the trainer."""


def read(values: object) -> Status:
    """Return the status in ``values``, as the API server gives it; what is not understood is left out.

    Whoever wrote it may be a newer operator, and no job stops for that. Without its attempt a job takes that
    of its pods, as one without a status does.
    """
    if not isinstance(values, Mapping):
        return Status()
    try:
        return Status.model_validate(values)
    except ValidationError as error:
        wrong = {str(detail["loc"][0]) for detail in error.errors()}
    wrong |= {"phase"} if "attempt" in wrong else set()
    return Status.model_validate({name: values[name] for name in values if name not in wrong})


def keep_unknown(
    before: object, after: dict[str, Any], model: type[Part] = Status
) -> dict[str, Any]:
    """Return ``after`` with those fields of ``before``, at every level, that ``model`` does not know."""
    if not isinstance(before, Mapping):
        return after
    fields = {field.alias or name: field for name, field in model.model_fields.items()}
    kept = {name: value for name, value in before.items() if name not in fields}
    for name, value in after.items():
        below = section_of(fields[name].annotation)
        if below is not None and issubclass(below, Part) and isinstance(value, dict):
            kept[name] = keep_unknown(before.get(name), value, below)
        else:
            kept[name] = value
    return kept
