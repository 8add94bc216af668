"""The lines of an earlier log that a resumed run keeps: complete lines up to its checkpoint."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

from fluxtrain.contract.run.config import RunConfig
from fluxtrain.files import atomic_write_by_several, sync
from fluxtrain.mlperf.facts import DATA_KEY, DIVISION_KEY, RANKS_KEY
from fluxtrain.mlperf.lines import LogLine, read_lines


@dataclass
class LogState:
    """The open intervals of a log."""

    begun: bool = False
    run_started: bool = False
    finished: bool = False
    train_samples_stated: bool = False
    eval_samples_stated: bool = False
    digests: object = None
    """Those of the data sets' indices that the log states."""
    block_open: bool = False
    left_closed: bool = False
    """Whether rules of the closed division were broken."""
    ranks: dict[str, Any] | None = None
    """The ranks and nodes of the last start, None if no line has them."""
    eval_without_stop: int | None = None
    """Samples at an evaluation that has its loss but no eval_stop."""

    def update(self, key: str, samples: int | None = None, value: object = None) -> None:
        """Update the state with the next event."""
        self.left_closed |= key == DIVISION_KEY
        if key in (RANKS_KEY, "run_resumed") and isinstance(value, dict):
            self.ranks = value
        if key in ("block_start", "block_stop"):
            self.block_open = key == "block_start"
        elif key in ("eval_accuracy", "eval_stop"):
            self.eval_without_stop = samples if key == "eval_accuracy" else None
        self.begun |= key == "init_start"
        if key == DATA_KEY:
            self.digests = value
        self.train_samples_stated |= key == "train_samples"
        self.eval_samples_stated |= key == "eval_samples"
        self.run_started |= key == "run_start"
        self.finished |= key == "run_stop"


def lines_until(path: Path, samples: int, config: RunConfig) -> list[LogLine]:
    """Return the lines of the log at ``path`` that a run resuming at ``samples`` keeps.

    No lines if the run has no checkpoint and never logged run_start: it starts over.
    """
    valid = [line for line in read_lines(path) if not line.fault] if path.exists() else []
    lines = list(takewhile(lambda line: (line.samples or 0) <= samples, valid))
    if samples == 0 and not any(line.key == "run_start" for line in lines):
        return []
    if _has_more_steps(lines, samples, config):
        lines = [line for line in lines if line.key != "run_stop"]
    return _without_open_evaluation(lines)


def rewrite(path: Path, lines: Iterable[LogLine]) -> None:
    """Replace the file by ``lines`` atomically: ranks that were left behind write to the file before."""
    content = "".join(f"{line.text}\n" for line in lines).encode("latin-1")
    with atomic_write_by_several(path) as partial:
        partial.write_bytes(content)
        sync(partial)


def _has_more_steps(lines: list[LogLine], samples: int, config: RunConfig) -> bool:
    """Return whether a run that had ended was given more steps, so that its ``run_stop`` is removed."""
    target = config.evaluation.target_loss
    losses = [line.value for line in lines if line.key == "eval_accuracy"]
    if target is not None and losses and isinstance(losses[-1], float) and losses[-1] <= target:
        return False
    return samples < config.schedule.steps * config.schedule.global_batch_size


def _without_open_evaluation(lines: list[LogLine]) -> list[LogLine]:
    """Remove an ``eval_start`` without a loss; only the last one can be."""
    starts = [i for i, line in enumerate(lines) if line.key == "eval_start"]
    if starts and not any(line.key == "eval_accuracy" for line in lines[starts[-1] :]):
        del lines[starts[-1]]
    return lines
