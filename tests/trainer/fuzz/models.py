"""Readers of adapters, base models, encoders, and files of other trainers and tools."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tests.trainer import tiny_encoders
from tests.trainer.bombs import texts
from tests.trainer.fuzz.target import Target, texts_of
from tests.trainer.imports import ai_toolkit_files
from tests.trainer.imports.kohya import kohya_files
from tests.trainer.imports.simpletuner import simpletuner_files
from tests.trainer.tiny_model import save_flux, tiny_model
from torch import Tensor

from fluxtrain.adapter.file import (
    DIFFUSERS_METADATA,
    DORA_LAYOUTS,
    LAYOUTS,
    PRODUCT_LAYOUTS,
    read_adapter,
    write_adapter,
)
from fluxtrain.adapter.reading import from_tensors
from fluxtrain.encode.text import load_clip_file, load_t5_file
from fluxtrain.errors import FluxtrainError
from fluxtrain.imports.files import import_file
from fluxtrain.model.flux import Flux
from fluxtrain.model.layers import HADAMARD_FACTORS
from fluxtrain.weights.reader import open_weights

_SINGLE = "transformer.single_transformer_blocks.0"
_LOKR = "lora_unet_double_blocks_0_img_attn_proj"


def targets() -> dict[str, Target]:
    """Return the targets by name."""
    return {
        "lora-layouts": Target("a.safetensors", _adapter, _adapters),
        "weights": Target("a.safetensors", _weights, _base_models),
        "t5-file": Target("a.safetensors", _t5, lambda: [_encoder(tiny_encoders.write_t5)]),
        "clip-file": Target("a.safetensors", _clip, lambda: [_encoder(tiny_encoders.write_clip)]),
        "tokenizer": Target("tokenizer.json", texts.tokenizer, _tokenizers),
        "import-kohya": Target("a.toml", _imported, texts_of(kohya_files.LORA)),
        "import-ai-toolkit": Target("a.yaml", _imported, texts_of(ai_toolkit_files.DEV)),
        "import-simpletuner": Target("a.json", _imported, texts_of(simpletuner_files.LORA)),
        "benchmark": Target("benchmark.json", texts.measured, texts_of(_BENCHMARK)),
        "system": Target(
            "a.yaml", texts.system, texts_of("submitter: a\nsystem_name: b\nc: [1]\n")
        ),
    }


_BENCHMARK = json.dumps(
    {
        "run": {"model": {"depth": 1}},
        "trials": [
            {
                "trial": {
                    "setting": {"sharding": {"mode": "fsdp"}},
                    **{"micro_batch_size": 1, "num_ranks": 1, "global_batch_size": 1},
                },
                "measurement": {
                    "images_per_second_per_gpu": 1.5,
                    "device": "cpu",
                    "compiled": False,
                },
            }
        ],
    }
)


def _adapters() -> list[bytes]:
    """Return a file of each layout, with magnitudes, LyCORIS' kinds, and alphas beside them."""
    pair = {
        f"{_SINGLE}.attn.to_q.lora_A.weight": torch.ones(1, 8),
        f"{_SINGLE}.attn.to_q.lora_B.weight": torch.ones(8, 1),
    }
    dora = {**pair, f"{_SINGLE}.attn.to_q.lora_magnitude_vector": torch.ones(8)}
    product = {f"{_LOKR}.lokr_w1": torch.ones(2, 2), f"{_LOKR}.alpha": torch.tensor(1.0)}
    product |= {f"{_LOKR}.lokr_w2_a": torch.ones(4, 1), f"{_LOKR}.lokr_w2_b": torch.ones(1, 4)}
    other = {f"{_LOKR}.{name}": torch.ones(4, 4) for name in HADAMARD_FACTORS}
    other |= {f"{_LOKR}.diff_b": torch.ones(4), f"{_LOKR}.dora_scale": torch.ones(1, 4)}
    other |= {"lora_unet_img_in.diff": torch.ones(4, 4)}
    found = [_file(pair, {DIFFUSERS_METADATA: '{"lora_alpha": 2, "alpha_pattern": {"a.to_q": 1}}'})]
    for tensors, layouts in (
        (pair, LAYOUTS),
        (dora, DORA_LAYOUTS),
        (product, PRODUCT_LAYOUTS),
        (other, PRODUCT_LAYOUTS),
    ):
        adapter = from_tensors(tensors).adapter
        for layout in layouts:
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / "a.safetensors"
                try:
                    write_adapter(path, adapter, layout, torch.float32)
                except FluxtrainError:  # a layout that cuts fused layers, for one of their parts
                    continue
                found.append(path.read_bytes())
    return found


def _file(tensors: dict[str, Tensor], metadata: dict[str, str]) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        save_file(tensors, Path(folder) / "a", metadata)
        return (Path(folder) / "a").read_bytes()


def _base_models() -> list[bytes]:
    """Return BFL's and diffusers' files of a tiny model."""
    small = tiny_model(
        in_channels=4, vec_in_dim=4, context_in_dim=4, hidden_size=16, axes_dim=(2, 2, 4)
    )
    axes = {"axes_dims_rope": "[2, 2, 4]"}
    names = {
        **dict.fromkeys(("x_embedder.weight", "context_embedder.weight"), torch.ones(16, 4)),
        "time_text_embed.text_embedder.linear_1.weight": torch.ones(16, 4),
        "single_transformer_blocks.0.attn.norm_q.weight": torch.ones(8),
        "single_transformer_blocks.0.proj_mlp.weight": torch.ones(64, 16),
        **{f"single_transformer_blocks.0.attn.to_{n}.weight": torch.ones(16, 16) for n in "qkv"},
    }
    copies = {name: tensor.clone() for name, tensor in names.items()}
    with tempfile.TemporaryDirectory() as folder:
        own = save_flux(Flux(small), Path(folder)).read_bytes()
    return [own, _file(copies, axes)]


def _adapter(path: Path) -> object:
    file = read_adapter(path)
    return {layer: (update.outputs, update.inputs) for layer, update in file.adapter.items()}


def _weights(path: Path) -> object:
    weights = open_weights(path)
    return sum(1 for _ in weights.read([name for name in weights.shapes if name.endswith("scale")]))


def _encoder(write: Callable[[Path], Any]) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder))
        return _file(load_file(Path(folder) / "model.safetensors"), {})


@cache
def _tokenizer(write: Callable[[Path], Any]) -> Any:
    from fluxtrain.encode.text import load_tokenizer

    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder))
        return load_tokenizer(Path(folder))


def _tokenizers() -> list[bytes]:
    found = []
    for write in (tiny_encoders.write_t5, tiny_encoders.write_clip):
        with tempfile.TemporaryDirectory() as folder:
            write(Path(folder))
            found.append((Path(folder) / "tokenizer.json").read_bytes())
    return found


def _t5(path: Path) -> object:
    return load_t5_file(path, _tokenizer(tiny_encoders.write_t5), torch.float32)


def _clip(path: Path) -> object:
    return load_clip_file(path, _tokenizer(tiny_encoders.write_clip), torch.float32)


def _imported(path: Path) -> object:
    return import_file(path, {})
