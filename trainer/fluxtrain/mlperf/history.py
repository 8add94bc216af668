"""The lines of an earlier log that a resumed run keeps: everything up to its checkpoint, and nothing torn."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

from fluxtrain.contract.run.config import RunConfig
from fluxtrain.mlperf.lines import LogLine, read_lines


@dataclass
class LogState:
    """Which intervals of a log are open."""

    begun: bool = False
    run_started: bool = False
    finished: bool = False
    eval_samples_stated: bool = False
    block_open: bool = False
    eval_without_stop: int | None = None  # samples of an evaluation whose loss is known

    def note(self, key: str, samples: int | None = None) -> None:
        """Take one more event into account."""
        if key in ("block_start", "block_stop"):
            self.block_open = key == "block_start"
        elif key in ("eval_accuracy", "eval_stop"):
            self.eval_without_stop = samples if key == "eval_accuracy" else None
        self.begun |= key == "init_start"
        self.eval_samples_stated |= key == "eval_samples"
        self.run_started |= key == "run_start"
        self.finished |= key == "run_stop"


def kept_lines(path: Path, samples: int, config: RunConfig) -> list[LogLine]:
    """Return the lines of the log at ``path`` that stay true for a run that resumes at ``samples``.

    None at all where the run has no checkpoint and its clock never started: it begins anew.
    """
    whole = [line for line in read_lines(path) if not line.fault] if path.exists() else []
    lines = list(takewhile(lambda line: (line.samples or 0) <= samples, whole))
    if samples == 0 and not any(line.key == "run_start" for line in lines):
        return []
    if _goes_on(lines, samples, config):
        lines = [line for line in lines if line.key != "run_stop"]
    return _without_open_evaluation(lines)


def rewrite(path: Path, lines: Iterable[LogLine]) -> None:
    """Replace the file by ``lines``, atomically, where it holds anything else."""
    content = "".join(f"{line.text}\n" for line in lines).encode("latin-1")
    if path.exists() and path.read_bytes() == content:
        return
    partial = path.with_name(f"{path.name}.partial")
    with partial.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def _goes_on(lines: list[LogLine], samples: int, config: RunConfig) -> bool:
    """Return whether a run that had ended was given more steps: then its ``run_stop`` is taken back."""
    target = config.evaluation.target_loss
    losses = [line.value for line in lines if line.key == "eval_accuracy"]
    if target is not None and losses and isinstance(losses[-1], float) and losses[-1] <= target:
        return False
    return samples < config.schedule.steps * config.schedule.global_batch_size


def _without_open_evaluation(lines: list[LogLine]) -> list[LogLine]:
    """Drop an ``eval_start`` whose loss was never written; it can only be the last one."""
    starts = [i for i, line in enumerate(lines) if line.key == "eval_start"]
    if starts and not any(line.key == "eval_accuracy" for line in lines[starts[-1] :]):
        del lines[starts[-1]]
    return lines
