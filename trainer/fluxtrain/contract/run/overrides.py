"""Fields of ``spec.run`` set on the command line: ``--optim.learning_rate=2e-4``."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from fluxtrain.contract.resource.document import parse
from fluxtrain.contract.run.config import RunConfig
from fluxtrain.contract.validation import did_you_mean
from fluxtrain.errors import UNSET, ConfigError


def parse_overrides(words: list[str]) -> dict[str, Any]:
    """Return ``--section.field=value`` and ``--section.field value`` words as a nested mapping.

    Values are YAML. Raises ConfigError for a word that is no field and a field without a value.
    """
    result: dict[str, Any] = {}
    waiting = list(words)
    while waiting:
        word = waiting.pop(0)
        if not word.startswith("--"):
            raise ConfigError("arguments", word, "fields are set as --section.field=value")
        name, equals, text = word.partition("=")
        parts = name.removeprefix("--").split(".")
        _check_field(name, parts)
        if not equals:
            if not waiting or waiting[0].startswith("--"):
                raise ConfigError(name, UNSET, f"needs a value: {name}=VALUE")
            text = waiting.pop(0)
        _put(result, parts, parse(text, name))
    return result


def _check_field(name: str, parts: list[str]) -> None:
    model: Any = RunConfig
    for part in parts:
        if not (isinstance(model, type) and issubclass(model, BaseModel)):
            raise ConfigError(name, UNSET, "no such field")
        if part not in model.model_fields:
            raise ConfigError(name, UNSET, f"no such field{did_you_mean(part, model.model_fields)}")
        model = model.model_fields[part].annotation


def _put(result: dict[str, Any], parts: list[str], value: object) -> None:
    *sections, last = parts
    for section in sections:
        below = result.setdefault(section, {})
        if not isinstance(below, dict):
            raise ConfigError(
                f"--{'.'.join(parts)}", value, f"--{section} was already set as a whole"
            )
        result = below
    result[last] = value
