"""Environment variables of MLPerf's reference scripts, used unless a field or option overrides them.

``DATAROOT`` and ``MODELROOT`` are roots of relative paths, ``LOGDIR`` is the parent of the runs' output,
``SEED`` is ``spec.run.seed``, and ``HF_CACHE`` replaces ``~/.cache``.
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
class Setting:
    """A value and its source."""

    value: str
    source: str

    def __str__(self) -> str:
        """Return both, for display."""
        return f"{self.value} ({self.source})"


def root(kind: str, environment: Mapping[str, str]) -> Setting:
    """Return the root of relative "data" or "models" paths: our variable, the reference's, or ./data."""
    for name in ROOTS[kind]:
        if environment.get(name):
            return Setting(environment[name], f"${name}")
    return Setting(_DEFAULT_ROOT, "default")


def output(job: str, environment: Mapping[str, str]) -> Setting:
    """Return the output folder of the run ``job``, below LOGDIR or ./runs."""
    if environment.get("LOGDIR"):
        return Setting(str(Path(environment["LOGDIR"]) / job), "$LOGDIR")
    return Setting(str(Path(_DEFAULT_OUTPUT) / job), "default")


def seed(run: Mapping[str, Any], environment: Mapping[str, str]) -> Setting | None:
    """Return SEED unless ``run`` has a seed; raise ConfigError if it is invalid."""
    text = environment.get("SEED")
    if "seed" in run or not text:
        return None
    if not (text.isascii() and text.isdecimal() and int(text) <= LARGEST_SEED):
        raise ConfigError("$SEED", text, f"must be a whole number from 0 to {LARGEST_SEED}")
    return Setting(text, "$SEED")


def hugging_face(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables for Hugging Face's libraries: HF_HOME, if HF_CACHE is set and HF_HOME is not."""
    if environment.get("HF_CACHE") and not environment.get("HF_HOME"):
        return {"HF_HOME": str(Path(environment["HF_CACHE"]) / "huggingface")}
    return {}
