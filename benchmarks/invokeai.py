"""LoRA files in InvokeAI's own readers: every layer is found, and its update is ours.

InvokeAI is installed without its dependencies into an environment of its own. Its readers need torch and the
standard library alone; packages around them that import more are replaced by empty ones of the same path.
"""

from __future__ import annotations

import logging
import subprocess
import sys
import tempfile
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from benchmarks.empty_package import empty_package
from benchmarks.peers import FOLDER
from benchmarks.table import print_table
from safetensors.torch import load_file
from torch import Tensor

from fluxtrain.adapter.file import write_adapter
from fluxtrain.adapter.layouts import LAYOUTS, PRODUCT_LAYOUTS
from fluxtrain.adapter.trained import trained_adapter
from fluxtrain.adapter.updates import Adapter
from fluxtrain.contract.run.adapter import AdapterConfig, AdapterRanks
from fluxtrain.contract.run.model import ModelConfig
from fluxtrain.model.adapted_layers import adapted_layers

VERSION = "6.14.2"
TOLERANCE = 1e-6
MODEL = ModelConfig(depth=1, depth_single_blocks=1)  # its readers know FLUX.1's widths
RANKS = AdapterRanks(img_attn=3, txt_mlp=2, single=5, img_mod=1)
FUSED = AdapterConfig(rank=4, alpha=6.0, ranks=RANKS)
CONFIGS = {
    "one adapter for a fused layer": FUSED,
    "split_qkv": FUSED.model_copy(update={"split_qkv": True}),
    "lokr": AdapterConfig(kind="lokr", rank=4, alpha=6.0),
}
_CONVERSIONS = "invokeai.backend.patches.lora_conversions"
_BARE = (
    *("invokeai.backend.util", "invokeai.backend.model_manager"),
    "invokeai.backend.model_manager.load",
    "invokeai.backend.model_manager.load.model_cache",
)
_PREFIX = "lora_transformer-"
Tensors = dict[str, Tensor]


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


def import_readers(packages: Path) -> dict[str, tuple[Callable[..., bool], Callable[..., Any]]]:
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


def random_adapter(config: AdapterConfig) -> Adapter:
    """Return an adapter with random values."""
    torch.manual_seed(0)
    layers = adapted_layers(MODEL, config)
    tensors = {
        f"{layer.name}.{name}": 0.1 * torch.randn(shape)
        for layer in layers
        for name, shape in layer.shapes.items()
    }
    return trained_adapter(layers, tensors)


def compare(adapter: Adapter, tensors: Tensors, readers: dict[str, Any]) -> tuple[str, int, float]:
    """Return InvokeAI's name of the format, the layers that it finds, and the largest difference."""
    name = next(name for name, (has, _) in readers.items() if has(tensors))
    read = readers[name][1]
    patch = read(tensors, None) if name == "diffusers" else read(tensors)
    layers = {key.removeprefix(_PREFIX): layer for key, layer in patch.layers.items()}
    assert layers.keys() == adapter.keys(), sorted(layers.keys() ^ adapter.keys())
    differences = []
    for layer, update in adapter.items():
        weight = {"weight": torch.zeros(update.outputs, update.inputs)}
        found = layers[layer].get_parameters(weight, 1.0)["weight"]
        differences.append((found - update.delta()).abs().max().item())
    return name, len(layers), max(differences)


def main() -> int:
    """Write each kind of adapter in each layout, and print what InvokeAI makes of it."""
    readers, rows = import_readers(installed()), []
    with tempfile.TemporaryDirectory() as folder:
        for kind, config in CONFIGS.items():
            adapter = random_adapter(config)
            for layout in PRODUCT_LAYOUTS if config.kind == "lokr" else LAYOUTS:
                path = Path(folder) / "style.safetensors"
                write_adapter(path, adapter, layout, torch.float32, is_dev=True)
                name, count, difference = compare(adapter, load_file(path), readers)
                rows.append((kind, layout, name, f"{count} of {len(adapter)}", f"{difference:.1e}"))
                assert difference < TOLERANCE, rows[-1]
    head = ("adapter", "layout", "read as", "layers", "largest difference")
    print_table(f"InvokeAI {VERSION}: its updates and ours", head, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
