"""The variables that MLPerf's reference scripts read, understood where no field or flag says otherwise.

``DATAROOT`` and ``MODELROOT`` are roots of relative paths, ``LOGDIR`` holds the runs' outputs, ``SEED`` is
``spec.run.seed``, and ``HF_CACHE`` stands for ``~/.cache``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fluxtrain.contract.launch import ENV_DATA, ENV_MODELS
from fluxtrain.contract.run.config import LARGEST_SEED
from fluxtrain.errors import ConfigError

ROOTS = {"data": (ENV_DATA, "DATAROOT"), "models": (ENV_MODELS, "MODELROOT")}
_DEFAULT_ROOT, _DEFAULT_OUTPUT = "data", "runs"


@dataclass(frozen=True)
class Chosen:
    """A value and who said so."""

    value: str
    by: str

    def __str__(self) -> str:
        """Return both, for a person."""
        return f"{self.value} ({self.by})"


def root(kind: str, environment: Mapping[str, str]) -> Chosen:
    """Return the root of relative "data" or "models" paths: ours, else the reference's, else ./data."""
    for name in ROOTS[kind]:
        if environment.get(name):
            return Chosen(environment[name], f"${name}")
    return Chosen(_DEFAULT_ROOT, "default")


def output(job: str, environment: Mapping[str, str]) -> Chosen:
    """Return the folder of the run called ``job``: below LOGDIR, else below ./runs."""
    if environment.get("LOGDIR"):
        return Chosen(str(Path(environment["LOGDIR"]) / job), "$LOGDIR")
    return Chosen(str(Path(_DEFAULT_OUTPUT) / job), "default")


def seed(run: Mapping[str, Any], environment: Mapping[str, str]) -> Chosen | None:
    """Return SEED where ``run`` has no seed of its own; ConfigError where it is no seed."""
    text = environment.get("SEED")
    if "seed" in run or not text:
        return None
    if not (text.isascii() and text.isdecimal() and int(text) <= LARGEST_SEED):
        raise ConfigError("$SEED", text, f"must be a whole number from 0 to {LARGEST_SEED}")
    return Chosen(text, "$SEED")


def hugging_face(environment: Mapping[str, str]) -> dict[str, str]:
    """Return what Hugging Face's libraries are to read where HF_CACHE is set and HF_HOME is not."""
    if environment.get("HF_CACHE") and not environment.get("HF_HOME"):
        return {"HF_HOME": str(Path(environment["HF_CACHE"]) / "huggingface")}
    return {}
