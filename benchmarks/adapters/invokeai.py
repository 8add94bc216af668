"""InvokeAI's own readers of LoRA files.

InvokeAI is installed without its dependencies into an environment of its own. Its readers need torch and the
standard library alone; packages around them that import more are replaced by empty ones of the same path.
"""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from benchmarks.empty_package import empty_package
from benchmarks.peers import FOLDER
from torch import Tensor

VERSION = "6.14.2"
_CONVERSIONS = "invokeai.backend.patches.lora_conversions"
_BARE = (
    *("invokeai.backend.util", "invokeai.backend.model_manager"),
    "invokeai.backend.model_manager.load",
    "invokeai.backend.model_manager.load.model_cache",
)
_PREFIXES = {"lora_transformer-": "", "lora_clip-": "text_encoder."}
"""InvokeAI's prefixes of layers, and ours."""
Tensors = dict[str, Tensor]
Readers = Mapping[str, tuple[Callable[..., bool], Callable[..., Any]]]


class Logger:
    """InvokeAI's logger, by its name there."""

    get_logger = staticmethod(logging.getLogger)


def installed() -> Path:
    """Return the folder of InvokeAI's packages; install them if needed."""
    folder = FOLDER / f"invokeai-{VERSION}"
    if not folder.exists():
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target"]
        subprocess.run([*pip, str(folder), f"invokeai=={VERSION}"], check=True)
    return folder


def import_readers(packages: Path) -> Readers:
    """Return InvokeAI's readers by format, in its order: whether tensors have it, and their layers."""
    sys.path.append(str(packages))
    for name in _BARE:
        sys.modules[name] = empty_package(name, packages)
    log = ModuleType("invokeai.backend.util.logging")
    for module in (log, sys.modules["invokeai.backend.util"]):
        vars(module)["InvokeAILogger"] = Logger
    sys.modules[log.__name__] = log
    readers = {}
    for name in ("kohya", "diffusers", "bfl_peft"):
        module = import_module(f"{_CONVERSIONS}.flux_{name}_lora_conversion_utils")
        found = vars(module)
        readers[name] = (
            found[f"is_state_dict_likely_in_flux_{name}_format"],
            found[f"lora_model_from_flux_{name}_state_dict"],
        )
    return readers


def in_invokeai(
    tensors: Tensors, shapes: Mapping[str, tuple[int, int]], readers: Readers
) -> tuple[str, Iterator[tuple[str, Tensor]]]:
    """Return InvokeAI's name of the format of ``tensors``, and the layers that it finds with their updates.

    ``shapes`` are those of our layers. Raises AssertionError if it finds others.
    """
    name = next(name for name, (has, _) in readers.items() if has(tensors))
    read = readers[name][1]
    patch = read(tensors, None) if name == "diffusers" else read(tensors)
    layers = {_layer(key): layer for key, layer in patch.layers.items()}
    assert layers.keys() == shapes.keys(), sorted(layers.keys() ^ shapes.keys())

    def updates() -> Iterator[tuple[str, Tensor]]:
        for layer, shape in shapes.items():
            yield layer, layers[layer].get_parameters({"weight": torch.zeros(shape)}, 1.0)["weight"]

    return name, updates()


def _layer(key: str) -> str:
    prefix = next(each for each in _PREFIXES if key.startswith(each))
    return _PREFIXES[prefix] + key.removeprefix(prefix)
