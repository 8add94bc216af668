"""``seed: random``: the seed of a run, drawn once from the system's randomness and kept in its output.

    OUTPUT/seed    the number, in decimal

The output is what defines a run: the same output continues it, on a laptop, under Slurm and in pods, and
another one begins a new run. So the seed is kept there, and not derived from a job's uid: a job that is
deleted and applied again with the same output continues with the same numbers, and no other place would
serve a run without Kubernetes. Rank 0 draws or reads it, and tells all others.
"""

from __future__ import annotations

import secrets
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from fluxtrain.contract.process import CHECKPOINTS_FOLDER
from fluxtrain.contract.run.config import LARGEST_SEED, RANDOM_SEED, RunConfig
from fluxtrain.errors import DataError, StorageError
from fluxtrain.runtime.files import atomic_write_by_several, write_to_disk
from fluxtrain.state.run_state import latest, read_config

if TYPE_CHECKING:
    from fluxtrain.parallel.distributed import World


SEED_FILE = "seed"


def with_seed(config: RunConfig, output: Path, world: World) -> RunConfig:
    """Return ``config`` with a number as its seed, the same on all ranks; every rank must call this.

    Raises StorageError on all ranks if ``output`` cannot be read or written.
    """
    if config.seed != RANDOM_SEED or config.task == "benchmark":  # which goes on with equal configs
        return with_any_seed(config)
    return config.model_copy(update={"seed": world.from_main(lambda: settled_seed(output))})


def with_any_seed(config: RunConfig) -> RunConfig:
    """Return ``config`` with a number as its seed, for checks and benchmarks."""
    return config if config.seed != RANDOM_SEED else config.model_copy(update={"seed": 0})


def settled_seed(output: Path) -> int:
    """Return the seed of the run in ``output``; a new run's is drawn and kept there.

    A run that was started with a number as its seed has it in its checkpoints. Raises StorageError.
    """
    path = output / SEED_FILE
    remedy = "remove it to take the newest checkpoint's seed, or to draw one without a checkpoint"
    seed, source = kept_number(path, LARGEST_SEED, remedy), f"of {path}"
    if seed is None:
        seed, source = _of_checkpoint(output), "of the newest checkpoint"
    if seed is None:
        seed, source = secrets.randbelow(LARGEST_SEED + 1), f"drawn; kept in {path}"
        keep_number(path, seed)
    print(f"fluxtrain: seed {seed} ({source})", file=sys.stderr, flush=True)
    return seed


def kept_number(path: Path, most: int, remedy: str) -> int | None:
    """Return the number in ``path``, None without the file.

    Raises StorageError, with the ``remedy``, if it is none, or above ``most``.
    """
    try:
        text = path.read_text(errors="replace", encoding="utf-8").strip()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise _inaccessible(path, error) from None
    is_short = len(text) <= len(str(most))  # int() refuses thousands of digits
    if not (is_short and text.isascii() and text.isdecimal() and int(text) <= most):
        raise StorageError(f"{path}: not a {path.name}; {remedy}")
    return int(text)


def keep_number(path: Path, number: int) -> None:
    """Write ``number`` to ``path``, whose folder is made; raise StorageError if that fails."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write_by_several(path) as partial:
            write_to_disk(partial, f"{number}\n")
    except OSError as error:
        raise _inaccessible(path, error) from None


def _inaccessible(path: Path, error: OSError) -> StorageError:
    return StorageError(f"{path}: cannot be read or written ({error.strerror})")


def _of_checkpoint(output: Path) -> int | None:
    newest = latest(output / CHECKPOINTS_FOLDER)
    if newest is not None:
        with suppress(DataError):  # damaged: the run's recovery names it
            seed = read_config(newest).get("seed")
            return seed if isinstance(seed, int) else None
    return None
