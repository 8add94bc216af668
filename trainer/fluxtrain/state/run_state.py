"""Checkpoint folders, one per step: which are complete, the state and the config of their run.

    checkpoints/step_0000001000/
      shard-*.safetensors   model and optimizer, one part per rank (torch.distributed.checkpoint)
      run.json              RunState
      config.json           the resolved RunConfig
      DONE                  the checksums of these files, written last: a folder without it is ignored

How such a folder is written and removed: folder.py.

No pickle is written or read. The loader has no state: its position is the step.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from fluxtrain.contract.run.config import IMMUTABLE_PATHS, RANDOM_SEED, RunConfig, value_at
from fluxtrain.contract.run.optim import ScheduleConfig
from fluxtrain.contract.run.resolve import merge, resolve
from fluxtrain.errors import ConfigError, DataError, FencedError, in_yaml_words
from fluxtrain.runtime import files
from fluxtrain.runtime.files import FileSums

DONE = "DONE"
"""File that is written last: the checkpoint in its folder is whole."""
STATE_FILE, CONFIG_FILE = "run.json", "config.json"
STATUSES = ("running", "success", "aborted")
_FOLDER = re.compile(r"step_(\d{10})")


@dataclass(frozen=True)
class RunState:
    """The state of a run besides its tensors."""

    step: int
    samples: int
    status: str = "running"  # one of STATUSES
    eval_loss: float | None = None
    train_seconds: float = 0.0

    def is_over(self, config: RunConfig) -> bool:
        """Return whether the run is complete for ``config``: all steps taken, or its target reached."""
        target = config.evaluation.target_loss
        reached = target is not None and self.eval_loss is not None and self.eval_loss <= target
        return self.status != "running" and (reached or self.step >= config.schedule.steps)

    def continued(self, config: RunConfig) -> RunState:
        """Return this state; running if ``config`` asks for more.

        Raises ConfigError if it asks for no more, but the run was stopped before its end.
        """
        if self.is_over(config):
            return self
        if self.step >= config.schedule.steps:
            raise _too_short(config.schedule, self.step)
        return replace(self, status="running")


def _too_short(schedule: ScheduleConfig, taken: int) -> ConfigError:
    name, given = "steps", schedule.steps
    if schedule.epochs is not None:
        name, given = "epochs", schedule.epochs
    text = f"are {schedule.steps} steps, but {taken} are taken already"
    advice = "set more, or use another --output for a shorter run"
    return ConfigError(f"spec.run.schedule.{name}", given, f"{text}; {advice}")


def folder_of(folder: Path, step: int) -> Path:
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


def read_checksums(checkpoint: Path) -> dict[str, FileSums]:
    """Return the checksums of the files of ``checkpoint``; none if DONE is empty.

    Raises DataError if they are unreadable, OSError if there is no DONE.
    """
    text = (checkpoint / DONE).read_text(errors="replace", encoding="utf-8")
    try:
        return files.decode(text) if text else {}
    except ValueError as error:
        raise DataError(f"{checkpoint / DONE}: {error}") from None


def read_state(checkpoint: Path) -> RunState:
    """Return the RunState of ``checkpoint``; raise DataError if it is unreadable or of another step.

    Raises OSError if the checkpoint was removed in the meantime: a restart uses a newer one.
    """
    path = checkpoint / STATE_FILE
    state = _run_state(_read_object(checkpoint, path), path)
    name = _FOLDER.fullmatch(checkpoint.name)
    if name and int(name[1]) != state.step:
        raise DataError(f"{path}: step {state.step} is not the step of its folder")
    return state


def read_config(checkpoint: Path) -> dict[str, Any]:
    """Return the resolved config of ``checkpoint``; raise DataError if it is unreadable."""
    return _read_object(checkpoint, checkpoint / CONFIG_FILE)


def kind_of_result(config: Mapping[str, Any]) -> str:
    """Return how the names begin of those tensors of a checkpoint that are the result of its run.

    These are the averages of the trained weights, if ``config``, the run's, asks for them, else the weights.
    """
    return "model" if (config.get("optim") or {}).get("ema_decay") is None else "optimizer.ema"


def _read_object(checkpoint: Path, path: Path) -> dict[str, Any]:
    """Return the object in ``path`` of ``checkpoint``, whose checksum must be right if there is one."""
    try:
        content = path.read_bytes()
        sums = read_checksums(checkpoint).get(path.name) if (checkpoint / DONE).exists() else None
        if sums is not None and not sums.matches(content):
            raise ValueError("wrong size or checksum")
        values = json.loads(content)
    except (OSError, ValueError, RecursionError) as error:
        if (
            isinstance(error, OSError)
            and not (checkpoint / DONE).exists()
            and path.name == STATE_FILE
        ):
            raise
        raise DataError(f"{path}: cannot be read ({error})") from error
    if not isinstance(values, dict):
        raise DataError(f"{path}: not an object")
    return values


def _run_state(values: dict[str, Any], path: Path) -> RunState:
    """Return the RunState with ``values``; fields of later versions are ignored."""
    names = {field.name for field in fields(RunState)}
    try:
        state = RunState(**{name: value for name, value in values.items() if name in names})
    except TypeError as error:
        raise DataError(f"{path}: not the state of a run ({error})") from None
    numbers = (state.train_seconds, state.eval_loss or 0.0)
    if (
        any(type(count) is not int or count < 0 for count in (state.step, state.samples))
        or state.status not in STATUSES
        or any(type(number) not in (int, float) or math.isnan(number) for number in numbers)
    ):
        raise DataError(f"{path}: not the state of a run ({str(values)[:200]})")
    return state


def check_same_run(config: RunConfig, checkpoint: Path) -> None:
    """Raise ConfigError if ``config`` and ``checkpoint`` are of different runs.

    A field that the checkpoint's version did not have yet had its default.
    """
    defaults = resolve({"preset": config.preset}).model_dump(mode="json")
    saved, current = merge(defaults, read_config(checkpoint)), config.model_dump(mode="json")
    for path in IMMUTABLE_PATHS:
        before, now = value_at(saved, path), value_at(current, path)
        if before != now and (path, now) != ("seed", RANDOM_SEED):  # the trainer takes the run's
            raise ConfigError(
                f"spec.run.{path}",
                now,
                f"the checkpoint {checkpoint.name} was trained with {in_yaml_words(before)}; "
                "use another --output for another run",
            )


def check_continued_run(config: RunConfig, folder: Path) -> None:
    """Raise ConfigError if ``config`` and the newest checkpoint in ``folder`` are of different runs.

    Checkpoints whose config is unreadable are skipped.
    """
    for checkpoint in reversed(complete(folder)):
        with suppress(DataError):
            return check_same_run(config, checkpoint)


def changed_decay(config: RunConfig, folder: Path) -> str:
    """Return a sentence if the learning rates of steps in ``folder`` decayed to another end, else ""."""
    newest, schedule = latest(folder), config.schedule
    if newest is None or schedule.decay == "constant":
        return ""
    with suppress(DataError):
        saved = read_config(newest).get("schedule") or {}
        name = "steps" if schedule.epochs is None else "epochs"
        before, now = saved.get(name), getattr(schedule, name)
        if before != now:
            return (
                f"spec.run.schedule.{name} was {in_yaml_words(before)} and is {now}: learning rates decayed "
                f"to another end, and continue as if it were {now}; a run with {now} from its start gives "
                "another result"
            )
    return ""


# The fence of a run: only the newest start of all its ranks may write to the output.
#
# Each start has a number and a file, ``checkpoints/.start_NUMBER``. The next start creates its own
# and removes the older ones. So ranks that were left behind, as their node was cut off or they were
# frozen, find it gone.


_NAME = ".start_{:06d}"
_PATTERN = re.compile(r"\.start_(\d+)")


@dataclass(frozen=True)
class Fence:
    """The number of a start, and the folder of checkpoints that its file is in."""

    folder: Path
    start: int

    @property
    def path(self) -> Path:
        """Return the file that exists until the next start."""
        return self.folder / _NAME.format(self.start)

    def check(self) -> None:
        """Raise FencedError if there is a newer start."""
        try:
            os.close(os.open(self.path, os.O_RDONLY))  # NFS asks the server when a file is opened
        except FileNotFoundError:
            raise _fenced(self) from None


def claim(folder: Path, after: int = 0) -> Fence:
    """Return the fence of a new start in ``folder``, with a number above ``after``; all others are fenced.

    Raises FencedError if another start began meanwhile, StorageError if ``folder`` cannot be written.
    """
    with files.writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        fence = Fence(folder, max([after, *_starts(folder)]) + 1)
        while not _created(fence.path):  # this node does not see a start that another has created
            fence = Fence(folder, fence.start + 1)
        for start in _starts(folder):
            if start > fence.start:
                fence.path.unlink(missing_ok=True)
                raise _fenced(fence)
            if start < fence.start:
                Fence(folder, start).path.unlink(missing_ok=True)
        return fence


def _starts(folder: Path) -> list[int]:
    """Return the numbers of the starts in ``folder``, the newest first."""
    names = (_PATTERN.fullmatch(path.name) for path in folder.iterdir())
    return sorted((int(name[1]) for name in names if name), reverse=True)


def _created(path: Path) -> bool:
    with suppress(FileExistsError):
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644))
        return True
    return False


def _fenced(fence: Fence) -> FencedError:
    text = f"a newer start of this run writes here, and start {fence.start} ends"
    return FencedError(f"{fence.folder.parent}: {text}")
