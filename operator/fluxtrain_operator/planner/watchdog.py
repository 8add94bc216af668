"""The watchdog: a job without progress for too long has stalled; the timeout follows from its own steps."""

from __future__ import annotations

from fluxtrain_operator.job import Job
from fluxtrain_operator.planner.situation import Situation

STARTUP_SECONDS = 1800.0
"""From the last pod's start to the first step: images, weights, compilation, a first evaluation.

Also between two reports of progress in any other phase than training: they come with batches, samples and
bytes, and storage may take long to acknowledge a write.
"""
_PAUSE_SECONDS = 60.0  # for a checkpoint, a slow disk, or a data loader that is behind
_NO_ANSWER_SECONDS = 300.0  # longer than a start takes
_STEPS = 10.0
_EVALUATION = 0.5  # of the time between two evaluations; only the trainer knows their samples
_MAX_SECONDS = 3600.0


def progress_deadline(situation: Situation) -> float | None:
    """Return the Unix time by which progress is due; None if fewer than ``nodes.min`` pods run.

    A pod that joins restarts all processes, so the startup time begins again.
    """
    if not situation.has_min_nodes:
        return None
    joined = max(pod.started or 0.0 for pod in situation.running)
    last = max(situation.last_step_time or 0.0, situation.alive_time or 0.0)
    if situation.is_training and last >= joined:
        return last + step_timeout(situation)
    fixed = situation.job.spec.restart.no_progress_seconds or 0
    return max(joined, last) + max(STARTUP_SECONDS, fixed)


def has_stalled(situation: Situation) -> bool:
    """Return whether progress is overdue and a trainer answers at /progress.

    If no trainer answers, a firewall or a service mesh may be the cause, and the job may well train.
    """
    deadline = progress_deadline(situation)
    answers = situation.observed.any_progress is not None
    return deadline is not None and situation.now >= deadline and answers


def no_answer_time(situation: Situation) -> float | None:
    """Return the Unix time from which a missing answer is reported; None if a trainer answers."""
    if not situation.has_min_nodes or situation.observed.any_progress is not None:
        return None
    joined = max(pod.started or 0.0 for pod in situation.running)
    return max(joined, situation.last_step_time or 0.0) + _NO_ANSWER_SECONDS


def has_no_answer(situation: Situation) -> bool:
    """Return whether no trainer has answered for a while, though enough pods run."""
    since = no_answer_time(situation)
    return since is not None and situation.now >= since


def step_timeout(situation: Situation) -> float:
    """Return the seconds that a step, and what happens between two steps, may take."""
    fixed = situation.job.spec.restart.no_progress_seconds
    if fixed is not None:
        return float(fixed)
    rate = situation.progress.samples_per_second if situation.progress else None
    if not rate or rate <= 0:
        return STARTUP_SECONDS
    return min(_MAX_SECONDS, _PAUSE_SECONDS + _samples_between(situation.job) / rate)


def _samples_between(job: Job) -> float:
    """Return the work between two steps, as the number of training samples that take as long."""
    config = job.config
    num_images = len(config.sampling.prompts) + config.sampling.num_prompts
    generated = num_images * config.sampling.num_steps * 2 if config.sampling.every_steps else 0
    return (
        _STEPS * config.schedule.global_batch_size
        + _EVALUATION * config.evaluation.every_samples
        + generated
    )
