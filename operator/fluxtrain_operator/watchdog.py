"""No progress is a fault: how long a job may go without a step, learned from its own steps (design D6)."""

from __future__ import annotations

from fluxtrain_operator.job import Job
from fluxtrain_operator.situation import Situation

STARTUP_SECONDS = 1800.0
"""From the last pod's start to the first step: images, weights, compilation, a first evaluation."""
_PAUSE_SECONDS = 60.0  # a checkpoint, a slow disk, a loader that catches up
_STEPS = 10.0
_EVALUATION = 0.5  # of the time between two; its number of samples is known to the trainer alone
_LONGEST_SECONDS = 3600.0


def deadline(situation: Situation) -> float | None:
    """Return the Unix time by which a step is due; None while too few pods run to make one.

    A pod that joins restarts the processes of all, so the wait for the first step begins anew with it.
    """
    if not situation.enough:
        return None
    joined = max(pod.started or 0.0 for pod in situation.running)
    last = situation.last_step or 0.0
    progress = situation.observed.progress
    steps_now = progress is not None and progress.status.last_step_time is not None
    if steps_now and last >= joined:
        return last + step_budget(situation)
    return max(joined, last) + max(
        STARTUP_SECONDS, situation.job.spec.restart.no_progress_seconds or 0
    )


def step_budget(situation: Situation) -> float:
    """Return the seconds that a running job may take for a step and what comes between steps."""
    fixed = situation.job.spec.restart.no_progress_seconds
    if fixed is not None:
        return float(fixed)
    rate = situation.progress.samples_per_second if situation.progress else None
    if not rate or rate <= 0:
        return STARTUP_SECONDS
    return min(_LONGEST_SECONDS, _PAUSE_SECONDS + _samples_between(situation.job) / rate)


def _samples_between(job: Job) -> float:
    """Return what may lie between two steps, in training samples that take as long."""
    config = job.config
    pictures = len(config.sampling.prompts) + config.sampling.num_prompts
    drawn = pictures * config.sampling.num_steps * 2 if config.sampling.every_steps else 0
    return (
        _STEPS * config.schedule.global_batch_size
        + _EVALUATION * config.evaluation.every_samples
        + drawn
    )
