"""Read another trainer's file, and recognise whose it is by its content."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fluxtrain.contract.validation import join_errors
from fluxtrain.errors import UNSET, ConfigError, JoinedConfigError
from fluxtrain.other_trainers.ai_toolkit import AI_TOOLKIT
from fluxtrain.other_trainers.ai_toolkit_values import flat
from fluxtrain.other_trainers.documents import read_document
from fluxtrain.other_trainers.imported import Imported, Trainer, import_options
from fluxtrain.other_trainers.kohya import KOHYA
from fluxtrain.other_trainers.named_files import with_named_files
from fluxtrain.other_trainers.reading import Reading
from fluxtrain.other_trainers.simpletuner import SIMPLETUNER


def read_options(path: Path) -> tuple[Trainer, dict[str, object]]:
    """Return whose options ``path`` holds, and them by name, with dots for nested ones.

    Raises ConfigError for a file that cannot be read, or is of no trainer that is known here.
    """
    document = read_document(path)
    if not isinstance(document, dict):
        raise ConfigError(str(path), document, "must be a mapping of options")
    return _recognise(document, path)


_TORCHTITAN_SECTIONS = {"job", "training", "parallelism", "checkpoint", "metrics"}
_SIMPLETUNER_KEYS = ("model_family", "model_type", "data_backend_config")
_GUI_KEYS = ("LoRA_type", "train_data_dir", "network_dim")
_TRAINERS = "kohya's TOML, ai-toolkit's YAML or SimpleTuner's config.json"


def _recognise(document: Mapping[str, Any], path: Path) -> tuple[Trainer, dict[str, object]]:
    if "apiVersion" in document:
        raise _refused(path, "is a FluxTraining already, or another resource of Kubernetes")
    if "config" in document and "job" in document:
        if not isinstance(document["config"], dict):
            raise ConfigError(f"{path}: config", document["config"], "must be a mapping")
        return AI_TOOLKIT, _named(flat(document))
    names = {str(name).removeprefix("--") for name in document}
    if _is_torchtitan(document):
        raise _refused(path, "is torchtitan's; docs/coming-from.md has what replaces its keys")
    if "datasets" in names:
        text = "is kohya's data set config; import the training's options, then see docs/data.md"
        raise _refused(path, text)
    if names & set(_SIMPLETUNER_KEYS) and path.suffix != ".toml":
        return SIMPLETUNER, with_named_files(_named(document), path)
    if path.suffix == ".toml":
        return KOHYA, _without_sections(document, path)
    if names & set(_GUI_KEYS):
        text = (
            "is of a GUI for kohya's sd-scripts; import the TOML that it writes with --config_file"
        )
        raise _refused(path, text)
    raise _refused(path, f"must be {_TRAINERS}")


def _is_torchtitan(document: Mapping[str, Any]) -> bool:
    """Return whether ``document`` has sections of torchtitan; kohya's may have any name, such as training."""
    sections = {name: set(below) for name, below in document.items() if isinstance(below, dict)}
    if not sections.keys() & _TORCHTITAN_SECTIONS:
        return False
    return not any(below & KOHYA.options.keys() - {"seed"} for below in sections.values())


def _refused(path: Path, text: str) -> ConfigError:
    return ConfigError(str(path), UNSET, text)


def _named(options: Mapping[Any, object]) -> dict[str, object]:
    return {str(name): value for name, value in options.items()}


def _without_sections(document: Mapping[str, Any], path: Path) -> dict[str, object]:
    """Return the options of kohya's TOML, in which sections have no meaning."""
    options: dict[str, object] = {}
    for key, value in document.items():
        for name, below in value.items() if isinstance(value, dict) else [(key, value)]:
            if name in options:
                raise ConfigError(f"{path}: {name}", below, "is given twice")
            options[name] = below
    return options


def import_file(
    path: Path,
    overrides: Mapping[str, Any],
    processes: int = 1,
    epoch_samples: int | None = None,
    prompt_file: str | None = None,
) -> Imported:
    """Return ``spec.run`` for the options in ``path``; errors name the file and the option.

    ``prompt_file`` is the name of a file for prompts that have options of their own, if one can be written.
    """
    trainer, options = read_options(path)
    try:
        reading = Reading(options, {}, processes, epoch_samples, prompt_file)
        return import_options(trainer, reading, overrides)
    except ConfigError as error:
        errors = error.errors if isinstance(error, JoinedConfigError) else [error]
        named = (ConfigError(f"{path}: {e.path}", e.given, e.allowed) for e in errors)
        raise join_errors(named) from None
