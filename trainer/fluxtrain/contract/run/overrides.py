"""Fields of ``spec.run`` set on the command line: ``--optim.learning_rate=2e-4``."""

from __future__ import annotations

from typing import Any

from fluxtrain.contract.describe import model_of
from fluxtrain.contract.resource.document import parse_yaml
from fluxtrain.contract.run.config import RunConfig
from fluxtrain.contract.run.torchtitan_options import refused_options
from fluxtrain.contract.strict_model import StrictModel
from fluxtrain.contract.validation import did_you_mean, join_errors
from fluxtrain.errors import UNSET, ConfigError


def parse_overrides(arguments: list[str]) -> dict[str, Any]:
    """Return the arguments ``--section.field=value`` and ``--section.field value`` as a nested mapping.

    Values are YAML. Raises ConfigError for options of torchtitan, an unknown field and a field without a
    value.
    """
    if refused := list(refused_options(arguments)):
        raise join_errors(refused)
    result: dict[str, Any] = {}
    remaining = list(arguments)
    while remaining:
        argument = remaining.pop(0)
        if not argument.startswith("--"):
            raise ConfigError("arguments", argument, "fields are set as --section.field=value")
        name, equals, text = argument.partition("=")
        parts = name.removeprefix("--").split(".")
        _require_field(name, parts)
        if not equals and (not remaining or remaining[0].startswith("--")):
            raise ConfigError(name, UNSET, f"needs a value: {name}=VALUE")
        text = text if equals else remaining.pop(0)
        _set(result, parts, parse_yaml(text, name))
    return result


def _require_field(name: str, parts: list[str]) -> None:
    model: type[StrictModel] | None = RunConfig
    for part in parts:
        if model is None:
            raise ConfigError(name, UNSET, "no such field")
        if part not in model.model_fields:
            raise ConfigError(name, UNSET, f"no such field{did_you_mean(part, model.model_fields)}")
        model = model_of(model.model_fields[part].annotation)


def _set(result: dict[str, Any], parts: list[str], value: object) -> None:
    *sections, last = parts
    for section in sections:
        below = result.setdefault(section, {})
        if not isinstance(below, dict):
            text = f"--{section} was already set as a whole"
            raise ConfigError(f"--{'.'.join(parts)}", value, text)
        result = below
    result[last] = value
