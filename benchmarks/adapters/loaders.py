"""Our adapter files in the loaders of other tools: what each finds, and how far its update is from ours.

diffusers' ``load_lora_weights``, peft's own loader, InvokeAI's readers, and ComfyUI's key map and arithmetic
as its source states them; each kind of adapter in each layout, at FLUX.1's widths, in float32.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import diffusers
import torch
from benchmarks.adapters.invokeai import VERSION, Readers, import_readers, in_invokeai, installed
from benchmarks.adapters.other_loaders import clip_model, fused, in_comfy, in_diffusers, in_peft
from benchmarks.table import print_table
from safetensors.torch import load_file
from torch import Tensor

from fluxtrain.adapter.file import LAYOUTS, PRODUCT_LAYOUTS, Layout, write_adapter
from fluxtrain.adapter.training_files import trained_adapter
from fluxtrain.adapter.updates import Adapter
from fluxtrain.contract.run.adapter import AdapterConfig, AdapterRanks, ClipAdapterConfig
from fluxtrain.contract.run.model import ModelConfig
from fluxtrain.model.layers import adapted_layers

TOLERANCE = 1e-6
CLIP = "img_attn.proj and CLIP-L, ranks 4 and 3, alpha 6"
MODEL = ModelConfig(depth=1, depth_single_blocks=1)  # readers know FLUX.1's widths
RANKS = AdapterRanks(img_attn=3, txt_mlp=2, single=5, img_mod=1)
CONFIGS = {
    "rank 4, alpha 4": AdapterConfig(rank=4, alpha=4.0),
    "rank 4, alpha 6": AdapterConfig(rank=4, alpha=6.0),
    "ranks 1 to 5, alpha 6": AdapterConfig(rank=4, alpha=6.0, ranks=RANKS),
    "the same, split_qkv": AdapterConfig(rank=4, alpha=6.0, ranks=RANKS, split_qkv=True),
    "linear2 only, rank 7, alpha 1": AdapterConfig(rank=7, alpha=1.0, layers=["linear2"]),
    CLIP: AdapterConfig(
        rank=4, alpha=6.0, layers=["img_attn.proj"], clip=ClipAdapterConfig(rank=3, alpha=6.0)
    ),
    "lokr, rank 4, alpha 6": AdapterConfig(kind="lokr", rank=4, alpha=6.0),
}
LOADABLE: dict[str, tuple[Layout, ...]] = {
    "diffusers": ("kohya", "diffusers", "ai-toolkit"),
    "peft": ("diffusers",),
    "InvokeAI": LAYOUTS,
    "ComfyUI's key map": LAYOUTS,
}
"""The layouts that a tool reads."""
PARTS = ("diffusers", "ai-toolkit")
"""Layouts that InvokeAI recognises by the queries of the first block of each kind."""
Updates = Iterable[tuple[str, Tensor]]


class File(NamedTuple):
    """A file of ``adapter`` in ``layout``."""

    path: Path
    adapter: Adapter
    layout: Layout

    @property
    def shapes(self) -> dict[str, tuple[int, int]]:
        """Return the shapes of the layers."""
        return {layer: (each.outputs, each.inputs) for layer, each in self.adapter.items()}


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


def loaders(readers: Readers) -> dict[str, Callable[[File], Updates]]:
    """Return the tools, as functions that read a file into updates by the names of our layers."""
    return {
        "diffusers": lambda file: fused(
            in_diffusers(file.path, MODEL, clip_model(MODEL.vec_in_dim)), MODEL
        ).items(),
        "peft": lambda file: fused(in_peft(file.path, MODEL), MODEL).items(),
        "InvokeAI": lambda file: in_invokeai(load_file(file.path), file.shapes, readers)[1],
        "ComfyUI's key map": lambda file: in_comfy(file.path, MODEL, file.shapes).items(),
    }


def files(folder: Path) -> Iterator[tuple[str, File]]:
    """Yield each kind of adapter in each layout that has a place for it."""
    for kind, config in CONFIGS.items():
        adapter = random_adapter(config)
        for layout in PRODUCT_LAYOUTS if config.kind == "lokr" else LAYOUTS:
            path = folder / "style.safetensors"
            write_adapter(path, adapter, layout, torch.float32, is_dev=True)
            yield kind, File(path, adapter, layout)


def compare(file: File, updates: Updates) -> tuple[int, float]:
    """Return the number of layers that were found, and the largest difference from our update."""
    differences = {
        layer: (file.adapter[layer].delta() - update).abs().max().item()
        for layer, update in updates
    }
    return len(differences), max(differences.values())


def is_read(tool: str, kind: str, layout: Layout) -> bool:
    """Return whether ``tool`` reads adapters of ``kind`` in ``layout``."""
    if tool == "diffusers" and kind.startswith("lokr"):
        return False
    if tool == "InvokeAI" and (
        (kind.startswith("linear2") and layout in PARTS) or (kind == CLIP and layout != "kohya")
    ):
        return False
    if tool == "peft" and kind == CLIP:
        return False
    return layout in LOADABLE[tool]


def cell(file: File, load: Callable[[File], Updates]) -> str:
    """Return what the table says of a file in a tool."""
    count, difference = compare(file, load(file))
    total = len(file.adapter)
    assert count == total, (file.layout, count, total)
    assert difference < TOLERANCE, (file.layout, difference)
    return f"{count} of {total}, {difference:.1e}"


def main() -> int:
    """Print the table; an update that is missing or differs by more than 1e-6 ends it."""
    diffusers.utils.logging.set_verbosity_error()
    tools, rows = loaders(import_readers(installed())), []
    with tempfile.TemporaryDirectory() as folder:
        for kind, file in files(Path(folder)):
            cells = [
                cell(file, load) if is_read(tool, kind, file.layout) else "not read"
                for tool, load in tools.items()
            ]
            rows.append((kind, file.layout, str(len(load_file(file.path))), *cells))
            print(" · ".join(rows[-1]), file=sys.stderr, flush=True)  # a row may take a minute
    title = f"layers found, and largest difference of an update (InvokeAI {VERSION})"
    print_table(title, ("adapter", "layout", "keys", *tools), rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
