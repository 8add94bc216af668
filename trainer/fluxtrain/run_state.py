"""Checkpoint folders, one per step: which are complete, the state and the config of their run.

    checkpoints/step_0000001000/
      shard-*.safetensors   model and optimizer, one part per rank (torch.distributed.checkpoint)
      run.json              RunState
      config.json           the resolved RunConfig
      DONE                  written last by rank 0: a folder without it is ignored

How such a folder is written and removed: checkpoint_folder.py.

No pickle is written or read. The loader has no state: its position is the step.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fluxtrain.contract.run.config import RunConfig
from fluxtrain.contract.run.immutable_fields import IMMUTABLE_PATHS, value_at
from fluxtrain.contract.run.resolve import merge, resolve
from fluxtrain.errors import ConfigError, DataError

DONE = "DONE"
"""File that is written last: the checkpoint in its folder is whole."""
_FOLDER = re.compile(r"step_(\d{10})")


@dataclass(frozen=True)
class RunState:
    """The state of a run besides its tensors."""

    step: int
    samples: int
    status: str = "running"  # running | success | aborted
    eval_loss: float | None = None
    train_seconds: float = 0.0

    def is_over(self, config: RunConfig) -> bool:
        """Return whether the run is complete for ``config``: all steps taken, or its target reached."""
        target = config.evaluation.target_loss
        reached = target is not None and self.eval_loss is not None and self.eval_loss <= target
        return self.status != "running" and (reached or self.step >= config.schedule.steps)


def folder_of(folder: Path, step: int) -> Path:
    """Return the folder in ``folder`` of the checkpoint of ``step``."""
    return folder / f"step_{step:010d}"


def complete(folder: Path) -> list[Path]:
    """Return the complete checkpoints in ``folder``, the oldest first."""
    if not folder.is_dir():
        return []
    steps = (path for path in folder.iterdir() if _FOLDER.fullmatch(path.name))
    return sorted(path for path in steps if (path / DONE).exists())


def latest(folder: Path) -> Path | None:
    """Return the newest complete checkpoint in ``folder``, None if there is none."""
    return next(reversed(complete(folder)), None)


def step_of(checkpoint: Path) -> int:
    """Return the step in the name of a folder that `complete` returned."""
    return int(checkpoint.name.partition("_")[2])


def read_state(checkpoint: Path) -> RunState:
    """Return the RunState of ``checkpoint``; raise DataError if it is unreadable.

    Raises OSError if the checkpoint was removed in the meantime: a restart uses a newer one.
    """
    try:
        return RunState(**json.loads((checkpoint / "run.json").read_text()))
    except (OSError, ValueError, TypeError) as error:
        if not (checkpoint / DONE).exists():
            raise
        raise DataError(f"{checkpoint / 'run.json'}: not the state of a run ({error})") from None


def read_config(checkpoint: Path) -> dict[str, Any]:
    """Return the resolved config that ``checkpoint`` was trained with."""
    try:
        values = json.loads((checkpoint / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise DataError(f"{checkpoint / 'config.json'}: not a config ({error})") from None
    if not isinstance(values, dict):
        raise DataError(f"{checkpoint / 'config.json'}: not a config (not an object)")
    return values


def check_same_run(config: RunConfig, checkpoint: Path) -> None:
    """Raise ConfigError if ``config`` and ``checkpoint`` are of different runs.

    A field that the checkpoint's version did not have yet had its default.
    """
    defaults = resolve({"preset": config.preset}).model_dump(mode="json")
    saved, current = merge(defaults, read_config(checkpoint)), config.model_dump(mode="json")
    for path in IMMUTABLE_PATHS:
        before, now = value_at(saved, path), value_at(current, path)
        if before != now:
            raise ConfigError(
                f"spec.run.{path}",
                now,
                f"the checkpoint {checkpoint.name} was trained with {before!r}; "
                "use another --output for another run",
            )
