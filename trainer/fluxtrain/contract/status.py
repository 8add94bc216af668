"""The status of a FluxTraining: what is, written by the operator alone."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from fluxtrain.contract.part import Count, Number, Part


class Condition(Part):
    """One observation, in Kubernetes' form."""

    type: Literal["Admitted", "Ready", "Progressing", "Healthy", "Suspended", "Complete", "Failed"]
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


class NodesStatus(Part):
    """Nodes that are there and that should be."""

    ready: Count = 0
    """Training."""
    desired: Count = 0
    """Asked for in this attempt."""


class Restarts(Part):
    """Restarts so far, by the rung of the ladder."""

    process: Count = 0
    """Processes inside living pods."""
    pod: Count = 0
    """Pods replaced."""
    gang: Count = 0
    """Whole job from the last durable checkpoint."""


class ProgressStatus(Part):
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


class CheckpointStatus(Part):
    """The newest complete checkpoint."""

    step: Count
    """Its step."""
    time: Annotated[str, Field(max_length=64)] | None = None
    """When it was complete."""


class Status(Part):
    """What is; written by the operator alone."""

    phase: (
        Literal["Pending", "Starting", "Running", "Suspended", "Restarting", "Complete", "Failed"]
        | None
    ) = None
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
