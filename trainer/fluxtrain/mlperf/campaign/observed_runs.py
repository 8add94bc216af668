"""The runs of a campaign as they are now: ended, training, waiting or failed, from folders or a cluster."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

from fluxtrain.contract.launch import MLPERF_FILE
from fluxtrain.errors import ConfigError
from fluxtrain.mlperf.campaign.forecast import Evaluation, samples_to_target
from fluxtrain.mlperf.finished_jobs import log_of_pods
from fluxtrain.mlperf.kubectl import items
from fluxtrain.mlperf.review import Run, read_run

State = Literal["converged", "not converged", "training", "waiting", "failed"]


@dataclass(frozen=True)
class ObservedRun:
    """A run of a campaign; ``phase`` is that of its job, empty if only its log is known."""

    name: str
    log: Run | None
    phase: str = ""

    @property
    def state(self) -> State:
        """Return whether the run reached its target, ended without, trains, waits or failed."""
        if self.log is not None and self.log.first("run_stop") is not None:
            return "converged" if self.log.samples is not None else "not converged"
        if self.phase == "Failed":
            return "failed"
        return "training" if self.evaluations or self._has_started else "waiting"

    @property
    def is_over(self) -> bool:
        """Return whether nothing more comes of the run."""
        return self.state in ("converged", "not converged", "failed")

    @cached_property
    def evaluations(self) -> list[Evaluation]:
        """Return the training samples and the loss of each evaluation that has one."""
        lines = [] if self.log is None else self.log.all("eval_accuracy")
        found = [(line.samples, _number(line.value)) for line in lines]
        return [(count, loss) for count, loss in found if count is not None and loss is not None]

    @property
    def forecast(self) -> int | None:
        """Return the samples at which the run reached its target, or will; None if it did not, or unknown."""
        if self.is_over or self.log is None:
            return None if self.log is None else self.log.samples
        target, every = self.log.value("target_accuracy"), self.log.number("evaluation_frequency")
        return samples_to_target(self.evaluations, _number(target), every or 0)

    @property
    def _has_started(self) -> bool:
        return self.log is not None and self.log.first("run_start") is not None


def runs_in(paths: Sequence[Path]) -> list[ObservedRun]:
    """Return the runs whose logs, or output folders, or folders of these, are ``paths``.

    Raises ConfigError for a path without a log.
    """
    found = []
    for path in paths:
        logs = [path] if path.is_file() else _logs(path)
        if not logs:
            raise ConfigError("PATH", str(path), f"has no {MLPERF_FILE}, nor has a folder in it")
        found += [ObservedRun(log.parent.name, read_run(log)) for log in logs]
    return found


def runs_of_jobs(selector: str, namespace: str | None, folder: Path) -> list[ObservedRun]:
    """Return the runs of the FluxTrainings with the labels ``selector``; their logs are kept in ``folder``.

    Raises ConfigError if kubectl fails, or no job has the labels.
    """
    jobs = items("fluxtrainings", selector, namespace)
    if not jobs:
        raise ConfigError("--selector", selector, "no FluxTraining has these labels")
    found = []
    for job in jobs:
        name, phase = str(job["metadata"]["name"]), str(job.get("status", {}).get("phase", ""))
        log = None
        if text := log_of_pods(name, namespace):
            path = folder / f"{name}.log"
            path.write_text(text)
            log = read_run(path)
        found.append(ObservedRun(name, log, phase))
    return found


def _number(value: object) -> float | None:
    """Return ``value`` as a float; None if it is no number, or too large for one."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return None if isinstance(value, int) and abs(value) > sys.float_info.max else float(value)


def _logs(path: Path) -> list[Path]:
    own = path / MLPERF_FILE
    return [own] if own.is_file() else sorted(path.glob(f"*/{MLPERF_FILE}"))
