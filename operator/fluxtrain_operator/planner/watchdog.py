"""No progress is a fault: how long a job may go without a sign of it, learned from its own steps."""

from __future__ import annotations

from fluxtrain_operator.job import Job
from fluxtrain_operator.planner.situation import Situation

STARTUP_SECONDS = 1800.0
"""From the last pod's start to the first step: images, weights, compilation, a first evaluation.

Also between two signs of any other phase than training: each tells of batches, pictures and bytes, but
storage may be slow to show what was written.
"""
_PAUSE_SECONDS = 60.0  # a checkpoint, a slow disk, a loader that catches up
_UNHEARD_SECONDS = 300.0  # a start takes some of it
_STEPS = 10.0
_EVALUATION = 0.5  # of the time between two; its number of samples is known to the trainer alone
_LONGEST_SECONDS = 3600.0


def deadline(situation: Situation) -> float | None:
    """Return the Unix time by which a sign of progress is due; None while too few pods run to make one.

    A pod that joins restarts the processes of all, so the wait for the first step begins anew with it.
    """
    if not situation.enough:
        return None
    joined = max(pod.started or 0.0 for pod in situation.running)
    last = max(situation.last_step or 0.0, situation.last_sign or 0.0)
    if situation.trains and last >= joined:
        return last + step_budget(situation)
    fixed = situation.job.spec.restart.no_progress_seconds or 0
    return max(joined, last) + max(STARTUP_SECONDS, fixed)


def hangs(situation: Situation) -> bool:
    """Return whether a sign of progress is overdue, and a trainer answers that there was none.

    A trainer that cannot be asked may well train: a firewall or a service mesh is no fault of the job.
    """
    due = deadline(situation)
    return due is not None and situation.now >= due and situation.observed.witness is not None


def unheard_at(situation: Situation) -> float | None:
    """Return the Unix time from which it is told that no trainer answers; None while one does."""
    if not situation.enough or situation.observed.witness is not None:
        return None
    joined = max(pod.started or 0.0 for pod in situation.running)
    return max(joined, situation.last_step or 0.0) + _UNHEARD_SECONDS


def unheard(situation: Situation) -> bool:
    """Return whether no trainer has answered for a while, though enough pods run."""
    since = unheard_at(situation)
    return since is not None and situation.now >= since


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
