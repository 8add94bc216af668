"""Read another trainer's file, and recognise whose it is by its content."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from fluxtrain.contract.model_base import GROUP, join_errors, validate
from fluxtrain.contract.resource.document import dump_yaml, parse_yaml
from fluxtrain.contract.resource.fluxtraining import KIND, VERSION, FluxTraining
from fluxtrain.errors import UNSET, ConfigError, JoinedConfigError, redacted
from fluxtrain.imports.ai_toolkit import AI_TOOLKIT
from fluxtrain.imports.ai_toolkit_values import flat
from fluxtrain.imports.kohya import KOHYA
from fluxtrain.imports.simpletuner import SIMPLETUNER
from fluxtrain.imports.table import (
    Fate,
    Imported,
    Line,
    Reading,
    Trainer,
    import_options,
    read_document,
)


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


# The files that SimpleTuner's config.json names: backends of data, and LyCORIS' options.


Options = Mapping[str, object]
BACKENDS, LYCORIS = "data_backend_config", "lycoris_config"
_CACHES = ("text_embeds", "image_embeds", "conditioning_image_embeds", "distillation_cache")
"""Kinds of backends without pictures."""
_OF_ONE = ("id", "resolution", "cache_dir_vae", "minimum_image_size", "maximum_image_size")
"""What backends of the same pictures in several resolutions differ in."""
_REGULARISATION = ("is_regularisation_data", "is_regularization_data")


def with_named_files(options: Options, path: Path) -> dict[str, object]:
    """Return ``options`` of the file ``path``, and those of the files that it names, if they are found.

    Of the backends, the first one of pictures has the options ``backend.*``; ``lycoris.*`` are LyCORIS'.
    Raises ConfigError for a file that is found, but cannot be read.
    """
    found = dict(options)
    readers: Mapping[str, Callable[[object, Path], dict[str, object]]] = {
        BACKENDS: _backends,
        LYCORIS: _lycoris,
    }
    for name, read in readers.items():
        file = _find(options.get(name, options.get(f"--{name}")), path.parent)
        if file is not None:
            found |= read(read_document(file), file)
    return found


def _find(name: object, folder: Path) -> Path | None:
    """Return the file ``name`` in ``folder``, below the one above it, or there by its last part."""
    if not isinstance(name, str) or Path(name).suffix != ".json":
        return None
    places = (folder / name, folder.parent / name, folder / Path(name).name)
    try:
        return next((place for place in places if place.is_file()), None)
    except OSError:
        return None


def _lycoris(document: object, path: Path) -> dict[str, object]:
    if not isinstance(document, dict):
        raise ConfigError(str(path), document, "must be a mapping of options")
    options = {str(name): value for name, value in document.items()}
    preset = options.pop("apply_preset", None)
    named = {f"lycoris.{name}": value for name, value in options.items()}
    if isinstance(preset, dict):
        return named | {f"lycoris.apply_preset.{name}": value for name, value in preset.items()}
    return named | {"lycoris.apply_preset": preset}


def _backends(document: object, path: Path) -> dict[str, object]:
    if not isinstance(document, list) or not all(isinstance(it, dict) for it in document):
        raise ConfigError(str(path), document, "must be a list of mappings, one for each backend")
    used = [it for it in document if not (it.get("disabled") or it.get("disable"))]
    pictures = [it for it in used if _kind(it) == "image"]
    kinds = {_kind(it) for it in used} - {"image", "conditioning", *_CACHES}
    found: dict[str, object] = {"backends.dataset_type": sorted(kinds) or None}
    if not pictures:
        return {**found, "backends": f"{len(document)} without pictures that are trained"}
    chosen = next((it for it in pictures if not _is_regularisation(it)), pictures[0])
    found |= flat(chosen, "backend.")
    same = [it for it in pictures if _without_size(it) == _without_size(chosen)]
    if all(it.get("resolution") is not None for it in same) and len(same) > 1:
        found["backend.resolution"] = [it["resolution"] for it in same]
    else:
        same = [chosen]
    if len(pictures) > len(same):
        found["backends"] = f"{len(pictures)} of pictures"
    if any(map(_is_regularisation, pictures)):
        found["backend.is_regularisation_data"] = True
    return found | _conditioning(chosen, used)


def _kind(backend: Options) -> str:
    return str(backend.get("dataset_type", "image"))


def _is_regularisation(backend: Options) -> bool:
    return any(backend.get(name) for name in _REGULARISATION)


def _without_size(backend: Options) -> dict[str, object]:
    return {name: value for name, value in backend.items() if name not in _OF_ONE}


def _conditioning(chosen: Options, backends: list[dict[str, object]]) -> dict[str, object]:
    """Return the kind and the folder of the backend that conditions ``chosen``."""
    given = chosen.get("conditioning_data")
    names = given if isinstance(given, list) else [given]
    for backend in backends:
        is_meant = backend.get("id") in names or backend.get("source_dataset_id") == chosen.get(
            "id"
        )
        if _kind(backend) == "conditioning" and is_meant:
            options = ("conditioning_type", "instance_data_dir")
            return {f"conditioning.{name}": backend.get(name) for name in options}
    return {}


# The file that an import writes, and its report: every option with what became of it.


_LISTED = (Fate.MISSING, Fate.UNKNOWN, Fate.INERT, Fate.ELSEWHERE)
"""What the file itself names, in comments; reports have everything."""
_LONGEST = 60
_SECTIONS = ("preset", "task", "seed", "initial_weights")


def file_text(imported: Imported, name: str, source: str, gpus: int) -> str:
    """Return the FluxTraining ``name`` on ``gpus`` GPUs of a node, as YAML; ``source`` is named in it.

    Raises ConfigError if ``name`` cannot be the name of a job.
    """
    first = [key for key in _SECTIONS if key in imported.run]
    run = {key: imported.run[key] for key in [*first, *imported.run]}
    document: dict[str, Any] = {
        "apiVersion": f"{GROUP}/{VERSION}",
        "kind": KIND,
        "metadata": {"name": name},
        "spec": {"nodes": {"min": 1, "max": 1}, "gpusPerNode": gpus, "run": run},
    }
    validate(FluxTraining, document, "")
    body = dump_yaml(document)
    text = "".join(f"# {line}\n".replace("# \n", "#\n") for line in _header(imported, source))
    assert parse_yaml(text + body, "file") == document, "the file is what was resolved"
    return text + body


def report(imported: Imported) -> Iterator[str]:
    """Yield the lines that say what became of every option, by its fate."""
    for fate, lines in imported.lines.items():
        if lines:
            yield f"{fate.value}:"
            yield from (f"  {_describe(line)}" for line in lines)


def _header(imported: Imported, source: str) -> Iterator[str]:
    yield f"By fluxtrain import-config from {_plain(source)}: options of {imported.trainer}."
    for fate in _LISTED:
        if lines := imported.lines[fate]:
            yield f"{fate.value}:"
            yield from (f"  {_describe(line)}" for line in lines)


def _describe(line: Line) -> str:
    value = "" if line.value is None else f"={_brief(line.value)}"
    given = f"{_plain(line.option)}{value}{'' if line.is_given else ' (not given)'}"
    fields = ", ".join(f"{path}={_brief(value)}" for path, value in line.values.items())
    text = "; ".join(part for part in (fields, line.note) if part)
    return f"{given}: {text}" if text else given


def _brief(value: object) -> str:
    """Return ``value`` on one line, without credentials, cut if it is long."""
    value = redacted(value) if isinstance(value, str) else value
    if isinstance(value, str) and re.fullmatch(r"[\w./@:+,-]{1,60}", value, re.ASCII):
        return value
    text = redacted(json.dumps(value, default=str, ensure_ascii=True))
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."


def _plain(name: str) -> str:
    return name if re.fullmatch(r"[\w.$\[\] /-]{1,200}", name, re.ASCII) else _brief(name)
