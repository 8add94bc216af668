"""Read a FluxTraining from a YAML file."""

from __future__ import annotations

from pathlib import Path

import yaml

from fluxtrain.contract.resolve import validate
from fluxtrain.contract.resource import FluxTraining
from fluxtrain.errors import ConfigError


def load(path: Path) -> FluxTraining:
    """Return the job in ``path``."""
    try:
        values = yaml.safe_load(path.read_text())
    except OSError as error:
        raise ConfigError("FILE", str(path), f"cannot be read ({error.strerror})") from None
    return validate(FluxTraining, values, "")


def ignored_fields(job: FluxTraining) -> list[str]:
    """Return the fields that a local run ignores."""
    return []
