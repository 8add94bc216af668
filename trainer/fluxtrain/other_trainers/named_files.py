"""The files that SimpleTuner's config.json names: backends of data, and LyCORIS' options."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from fluxtrain.errors import ConfigError
from fluxtrain.other_trainers.ai_toolkit_values import flat
from fluxtrain.other_trainers.documents import read_document

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
