"""PNGs with the settings of their image in text fields."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

from PIL import Image
from PIL.PngImagePlugin import PngInfo

from fluxtrain import __version__
from fluxtrain.contract.run.config import RunConfig
from fluxtrain.contract.run.immutable_fields import IMMUTABLE_PATHS, value_at
from fluxtrain.errors import StorageError
from fluxtrain.files import atomic_write_by_several
from fluxtrain.sample.prompt_file import Prompt


def text_fields(config: RunConfig, prompt: Prompt) -> dict[str, str]:
    """Return the text fields of the image of ``prompt``."""
    fields = {
        "prompt": prompt.text,
        "negative_prompt": prompt.negative,
        "seed": str(prompt.seed),
        "index": str(prompt.index),
        "steps": str(prompt.num_steps),
        "time_shift": config.sampling.time_shift,
        "cfg_scale": str(prompt.cfg_scale),
        "guidance": "" if prompt.guidance is None else str(prompt.guidance),
        "weights": str(config.initial_weights or ""),
        "adapters": ", ".join(f"{each.path}:{each.strength:g}" for each in config.added_adapters),
        "Software": f"fluxtrain {__version__}",
    }
    return {name: text for name, text in fields.items() if text}


def model_digest(config: RunConfig, step: int) -> str:
    """Return a SHA-256 that names the weights after ``step``: of it and all fields that they depend on."""
    values = config.model_dump(mode="json")
    fields = {path: value_at(values, path) for path in sorted(IMMUTABLE_PATHS)}
    text = json.dumps([fields, step], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def save_png(path: Path, image: Image.Image, fields: Mapping[str, str]) -> None:
    """Write ``image`` with ``fields`` to ``path``, whole or not at all; StorageError if that fails."""
    info = PngInfo()
    for key, text in fields.items():
        info.add_itxt(key, text)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write_by_several(path) as partial:
            image.save(partial, format="png", pnginfo=info)
    except OSError as error:
        raise StorageError(f"{path}: cannot be written ({error.strerror})") from None
