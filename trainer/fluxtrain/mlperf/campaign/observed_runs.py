"""The runs of a campaign as they are now: ended, training, waiting or failed, from folders or a cluster."""

from __future__ import annotations

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
from fluxtrain.mlperf.review import Run, is_file, read_run

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
        return [
            (line.samples, line.measured)
            for line in lines
            if line.samples is not None and line.measured is not None
        ]

    @property
    def forecast(self) -> int | None:
        """Return the samples at which the run reached its target, or will; None if it did not, or unknown."""
        if self.is_over or self.log is None:
            return None if self.log is None else self.log.samples
        target, every = self.log.first("target_accuracy"), self.log.number("evaluation_frequency")
        if target is None or target.measured is None:
            return None
        return samples_to_target(self.evaluations, target.measured, every or 0)

    @property
    def _has_started(self) -> bool:
        return self.log is not None and self.log.first("run_start") is not None


def runs_in(paths: Sequence[Path]) -> list[ObservedRun]:
    """Return the runs whose logs, or output folders, or folders of these, are ``paths``.

    Raises ConfigError for a path without a log.
    """
    found = []
    for path in paths:
        logs = [path] if is_file(path) else _logs(path)
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


def _logs(path: Path) -> list[Path]:
    """Return the log in the folder ``path``, or those in its folders; ConfigError if one cannot be read."""
    if is_file(own := path / MLPERF_FILE):
        return [own]
    try:
        folders = sorted(path.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise ConfigError("PATH", str(path), f"cannot be read ({error.strerror})") from None
    return [log for folder in folders if is_file(log := folder / MLPERF_FILE)]
