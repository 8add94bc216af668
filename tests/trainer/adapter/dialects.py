"""Small LoRA files as other tools write them, and the updates that their authors' formulas give."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple
from zlib import crc32

import torch
from tests.trainer.adapter.random_adapters import MODEL
from torch import Tensor

from fluxtrain.model.layers import entries

Tensors = dict[str, Tensor]
Shape = tuple[int, ...]
RANK = 4
ENTRIES = {entry.name: entry for entry in entries(MODEL)}
SHAPES = {name: entry.shape for name, entry in ENTRIES.items()}
LAYERS = [name.removesuffix(".weight") for name, shape in SHAPES.items() if len(shape) == 2]
BLOCKS = [layer for layer in LAYERS if "_blocks." in layer]
OTHERS = [layer for layer in LAYERS if layer not in BLOCKS]
WEIGHTS = {
    name: torch.randn(shape, generator=torch.Generator().manual_seed(index))
    for index, (name, shape) in enumerate(SHAPES.items())
}
"""Of the model, by BFL's names."""


class Part(NamedTuple):
    """A layer as diffusers names it, with its rows of BFL's."""

    name: str
    rows: int


class File(NamedTuple):
    """A file, and the model's tensors with its updates."""

    tensors: Tensors
    updated: Tensors


def part_of(layer: str) -> list[Part]:
    parts = ENTRIES[f"{layer}.weight"].parts
    return [Part(name.removesuffix(".weight"), rows) for name, rows in parts]


def rand(*shape: int) -> Tensor:
    return 0.1 * torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


Matrix = Callable[[str, Shape], tuple[Tensors, Tensor]]
"""Makes the tensors of a module and their update."""


def pair(down: str = "lora_A.weight", up: str = "lora_B.weight", alpha: object = None) -> Matrix:
    def make(name: str, shape: Shape) -> tuple[Tensors, Tensor]:
        one, two = rand(RANK, shape[1]), rand(shape[0], RANK)
        two *= 1 + crc32(name.encode()) % 9  # parts of a layer have equal shapes
        tensors = {f"{name}.{down}": one, f"{name}.{up}": two}
        if alpha is None:
            return tensors, two @ one
        value = torch.tensor(alpha)
        return tensors | {f"{name}.alpha": value}, two @ one * (float(value) / RANK)

    return make


KOHYA = pair("lora_down.weight", "lora_up.weight", 2.0)


def lokr(alpha: float, is_low: bool) -> Matrix:
    def make(name: str, shape: Shape) -> tuple[Tensors, Tensor]:
        one, big = rand(4, 4), (shape[0] // 4, shape[1] // 4)
        tensors = {f"{name}.lokr_w1": one, f"{name}.alpha": torch.tensor(alpha)}
        if not is_low:  # LyCORIS then has no scale
            two = rand(*big)
            return tensors | {f"{name}.lokr_w2": two}, torch.kron(one, two)
        low, high = rand(big[0], 2), rand(2, big[1])
        tensors |= {f"{name}.lokr_w2_a": low, f"{name}.lokr_w2_b": high}
        return tensors, torch.kron(one, low @ high) * alpha / 2

    return make


def loha(name: str, shape: Shape) -> tuple[Tensors, Tensor]:
    factors = (rand(shape[0], 3), rand(3, shape[1]), rand(shape[0], 3).flip(0), rand(3, shape[1]))
    names = ("hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b")
    tensors = {f"{name}.{key}": each for key, each in zip(names, factors, strict=True)}
    one, two, three, four = factors
    delta = (one @ two) * (three @ four) * (6.0 / 3)
    return tensors | {f"{name}.alpha": torch.tensor(6.0)}, delta


def whole(name: str, shape: Shape) -> tuple[Tensors, Tensor]:
    delta = rand(*shape)
    return {f"{name}.diff": delta}, delta


def as_type(make: Matrix, dtype: torch.dtype) -> Matrix:
    """Return ``make`` with rounded tensors, and with the update of the rounded ones."""

    def rounded(name: str, shape: Shape) -> tuple[Tensors, Tensor]:
        tensors = {key: each.to(dtype) for key, each in make(name, shape)[0].items()}
        down, up = (tensors[f"{name}.{key}.weight"].float() for key in ("lora_A", "lora_B"))
        return tensors, up @ down

    return rounded


def of_whole_layers(
    start: str, make: Matrix, layers: list[str] | None = None, dot: str = "."
) -> File:
    """Return a file with BFL's names, ``dot`` between their parts."""
    tensors, updated = Tensors(), Tensors()
    for layer in layers or BLOCKS:
        name = f"{layer}.weight"
        own, delta = make(start + layer.replace(".", dot), SHAPES[name])
        tensors |= own
        updated[name] = WEIGHTS[name] + delta
    return File(tensors, updated)


def of_parts(start: str, make: Matrix, layers: list[str] | None = None, dot: str = ".") -> File:
    """Return a file with diffusers' names, ``dot`` between their parts."""
    tensors, updated = Tensors(), Tensors()
    for layer in layers or BLOCKS:
        name, deltas = f"{layer}.weight", []
        for part in part_of(layer):
            own, delta = make(start + part.name.replace(".", dot), (part.rows, SHAPES[name][1]))
            tensors |= own
            deltas.append(delta)
        delta = torch.cat(deltas)
        if ENTRIES[name].swapped:  # diffusers has scale before shift
            delta = torch.cat(delta.chunk(2)[::-1])
        updated[name] = WEIGHTS[name] + delta
    return File(tensors, updated)


def dora(start: str, make: Matrix, axis: int, dot: str = ".") -> File:
    """Return a file with norms of rows (``axis`` 1) or columns (0) of the updated weight, as LyCORIS."""
    file = of_whole_layers(start, make, dot=dot)
    tensors, updated = dict(file.tensors), Tensors()
    for name, weight in file.updated.items():
        layer = start + name.removesuffix(".weight").replace(".", dot)
        scale = 1 + rand(*((len(weight), 1) if axis else (1, weight.shape[1]))).abs()
        tensors[f"{layer}.dora_scale"] = scale
        updated[name] = weight * scale / weight.norm(dim=axis, keepdim=True)
    return File(tensors, updated)


def xlabs() -> File:
    """XLabs' trainer has adapters of attention alone; those of single blocks leave the MLP's rows out."""
    names = {
        "double_blocks.0.img_attn.qkv": "double_blocks.0.processor.qkv_lora1",
        "double_blocks.0.img_attn.proj": "double_blocks.0.processor.proj_lora1",
        "double_blocks.0.txt_attn.qkv": "double_blocks.0.processor.qkv_lora2",
        "double_blocks.0.txt_attn.proj": "double_blocks.0.processor.proj_lora2",
        "single_blocks.0.linear1": "single_blocks.0.processor.qkv_lora",
        "single_blocks.0.linear2": "single_blocks.0.processor.proj_lora",
    }
    tensors, updated = Tensors(), Tensors()
    for layer, module in names.items():
        outputs, inputs = SHAPES[f"{layer}.weight"]
        rows = 3 * inputs if layer.endswith("linear1") else outputs
        own, delta = pair("down.weight", "up.weight")(module, (rows, inputs))
        tensors |= own
        updated[f"{layer}.weight"] = WEIGHTS[f"{layer}.weight"].clone()
        updated[f"{layer}.weight"][:rows] += delta
    return File(tensors, updated)


def control() -> File:
    """BFL's control LoRAs have biases of all layers, and the scales of the norms anew."""
    layers = [layer for layer in LAYERS if layer != "img_in"]
    file = of_whole_layers("", pair(), layers)
    tensors, updated = dict(file.tensors), dict(file.updated)
    for layer in layers:
        own = rand(SHAPES[f"{layer}.bias"][0])
        tensors[f"{layer}.lora_B.bias"] = own
        updated[f"{layer}.bias"] = WEIGHTS[f"{layer}.bias"] + own
    for name in (name for name in SHAPES if name.endswith(".scale")):
        tensors[name] = updated[name] = rand(*SHAPES[name])
    return File(tensors, updated)


def extracted() -> File:
    """ComfyUI's extraction has differences of what is no matrix."""
    file = of_whole_layers("diffusion_model.", pair("lora_down.weight", "lora_up.weight"), LAYERS)
    tensors, updated = dict(file.tensors), dict(file.updated)
    for name in (name for name in SHAPES if len(SHAPES[name]) == 1):
        layer, own = name.rpartition(".")[0], rand(*SHAPES[name])
        tensors[f"diffusion_model.{layer}.{'diff_b' if name.endswith('.bias') else 'diff'}"] = own
        updated[name] = WEIGHTS[name] + own
    return File(tensors, updated)


def with_more(file: File, *names: str) -> File:
    return File(file.tensors | {name: rand(1, 8) for name in names}, file.updated)


def renamed(file: File, names: dict[str, str]) -> File:
    """Return ``file`` with other names of its layers: each key of ``names`` is replaced by its value."""
    tensors = file.tensors
    for name, other in names.items():
        assert any(name in key for key in tensors), name
        tensors = {key.replace(name, other): tensor for key, tensor in tensors.items()}
    return File(tensors, file.updated)


def omi() -> File:
    """OneTrainer's backups, and its files in OMI's names, number the parts of BFL's layers."""
    split = [layer for layer in LAYERS if len(part_of(layer)) > 1]
    rest = [layer for layer in LAYERS if layer not in split]
    numbers = {
        f"transformer.{part.name}.": f"transformer.{layer}.{index}."
        for layer in split
        for index, part in enumerate(part_of(layer))
    }
    parts = renamed(of_parts("transformer.", KOHYA, split), numbers)
    others = renamed(of_whole_layers("transformer.", KOHYA, rest), {"img_in.": "img_in.proj."})
    return File(parts.tensors | others.tensors, parts.updated | others.updated)


MFLUX = {".net.0.proj": ".linear1", ".net.2": ".linear2", ".to_out.0": ".to_out"}
DIFFSYNTH = {
    "img_attn.qkv": "attn.a_to_qkv",
    "txt_attn.qkv": "attn.b_to_qkv",
    "img_attn.proj": "attn.a_to_out",
    "txt_attn.proj": "attn.b_to_out",
    "img_mlp": "ff_a",
    "txt_mlp": "ff_b",
    "img_mod.lin": "norm1_a.linear",
    "txt_mod.lin": "norm1_b.linear",
    "modulation.lin": "norm.linear",
    "linear1": "to_qkv_mlp",
    "linear2": "proj_out",
    "double_blocks": "blocks",
}
"""Its own model's names, by BFL's."""


class Dialect(NamedTuple):
    """A file, what its description says, and whether diffusers reads it at any width."""

    file: File
    dialect: str
    holds: str = "LoRA"
    is_of_diffusers: bool = False


EMBEDDINGS = ("bundle_emb.tok.clip_l", "bundle_emb.tok.t5")
OLD = pair("lora.down.weight", "lora.up.weight")
OLDER = pair("lora_linear_layer.down.weight", "lora_linear_layer.up.weight")
LYCORIS = "Kronecker products (LoKr)"
DIALECTS = {
    "kohya, int64 alpha": Dialect(
        of_whole_layers("lora_unet_", pair("lora_down.weight", "lora_up.weight", 2), dot="_"),
        "lora_unet_ (kohya's sd-scripts); BFL's layers"),
    "kohya, all layers": Dialect(
        of_whole_layers("lora_unet_", KOHYA, LAYERS, "_"), "lora_unet_ (kohya's"),
    "kohya, diffusers' layers": Dialect(
        of_parts("lora_unet_", KOHYA, LAYERS, "_"), "; diffusers' layers"),
    "OneTrainer with embeddings": Dialect(
        with_more(of_parts("lora_transformer_", KOHYA, LAYERS, "_"), *EMBEDDINGS),
        "lora_transformer_ (OneTrainer); diffusers' layers"),
    "OneTrainer, OMI": Dialect(omi(), "transformer. (diffusers, "),
    "diffusers": Dialect(
        of_parts("transformer.", pair(), LAYERS), "transformer. (diffusers, ", is_of_diffusers=True),
    "diffusers, named adapter": Dialect(
        of_parts("transformer.", pair("lora_A.default_0.weight", "lora_B.default_0.weight")), "transformer."),
    "diffusers, alpha": Dialect(
        of_parts("transformer.", pair(alpha=2.0)), "transformer.", is_of_diffusers=True),
    "diffusers, bfloat16": Dialect(
        of_parts("transformer.", as_type(pair(), torch.bfloat16)), "transformer.", is_of_diffusers=True),
    "diffusers, float16": Dialect(
        of_parts("transformer.", as_type(pair(), torch.float16)), "transformer.", is_of_diffusers=True),
    "fp8 e4m3": Dialect(of_parts("transformer.", as_type(pair(), torch.float8_e4m3fn)), "transformer."),
    "fp8 e5m2": Dialect(of_parts("transformer.", as_type(pair(), torch.float8_e5m2)), "transformer."),
    "float64": Dialect(of_parts("transformer.", as_type(pair(), torch.float64)), "transformer."),
    "diffusers of 2023": Dialect(of_parts("unet.", OLD), "unet. (diffusers' older scripts)"),
    "diffusers of 2022": Dialect(of_parts("transformer.", OLDER), "transformer."),
    "peft": Dialect(of_parts("base_model.model.", pair(), LAYERS), "base_model.model. (peft)"),
    "peft in diffusers": Dialect(
        of_parts("transformer.base_model.model.", pair()), "transformer.base_model.model. (diffusers"),
    "peft, compiled": Dialect(of_parts("base_model.model._orig_mod.", pair()), "base_model.model._orig_mod."),
    "fal": Dialect(of_whole_layers("base_model.model.", pair(), LAYERS), "base_model.model. (peft); BFL's"),
    "a tool to come": Dialect(
        of_whole_layers("pipeline.denoiser.", pair()), "pipeline.denoiser.; BFL's layers"),
    "a tool to come, underscores": Dialect(
        of_parts("lora_dit_", KOHYA, dot="_"), "lora_dit_; diffusers' layers"),
    "DiffSynth": Dialect(
        of_parts("", pair("lora_A.default.weight", "lora_B.default.weight")), "no prefix; diffusers' layers"),
    "DiffSynth's own names": Dialect(
        renamed(of_whole_layers("", pair("lora_A.default.weight", "lora_B.default.weight")), DIFFSYNTH),
        "no prefix; BFL's layers"),
    "mflux": Dialect(
        renamed(of_parts("transformer.", pair("lora_A", "lora_B")), MFLUX), "transformer. (diffusers, "),
    "ComfyUI": Dialect(of_whole_layers("diffusion_model.", pair(), LAYERS), "diffusion_model. (ComfyUI"),
    "ComfyUI's checkpoint": Dialect(
        of_whole_layers("model.diffusion_model.", KOHYA), "model.diffusion_model. (ComfyUI's checkpoints)"),
    "ComfyUI, extracted": Dialect(extracted(), "diffusion_model.", "values of biases and norms ("),
    "XLabs": Dialect(xlabs(), "no prefix; BFL's layers", is_of_diffusers=True),
    "BFL's control": Dialect(control(), "no prefix; BFL's layers", "values of biases and norms ("),
    "SimpleTuner, LoKr": Dialect(
        of_parts("lycoris_", lokr(1e4, False), dot="_"), "lycoris_ (LyCORIS, as SimpleTuner", LYCORIS),
    "ai-toolkit, LoKr": Dialect(of_parts("transformer.", lokr(3.0, True), BLOCKS), "transformer.", LYCORIS),
    "LyCORIS, LoKr": Dialect(of_whole_layers("lora_unet_", lokr(3.0, True), dot="_"), "lora_unet_", LYCORIS),
    "LyCORIS, LoKr, last layer": Dialect(
        of_parts("lycoris_", lokr(3.0, True), ["final_layer.adaLN_modulation.1"], "_"), "lycoris_", LYCORIS),
    "LyCORIS, LoHa": Dialect(
        of_whole_layers("lora_unet_", loha, LAYERS, "_"), "lora_unet_", "Hadamard products (LoHa)"),
    "SimpleTuner, LoHa": Dialect(of_parts("lycoris_", loha, dot="_"), "lycoris_", "Hadamard products (LoHa)"),
    "LyCORIS, full": Dialect(
        of_whole_layers("lora_unet_", whole, LAYERS, "_"), "lora_unet_", "whole differences"),
    "SimpleTuner, full": Dialect(of_parts("lycoris_", whole, LAYERS, "_"), "lycoris_", "whole differences"),
    "DoRA, rows": Dialect(dora("lora_unet_", KOHYA, 1, "_"), "lora_unet_", "LoRA with magnitudes (DoRA)"),
    "DoRA, columns": Dialect(dora("lora_unet_", KOHYA, 0, "_"), "lora_unet_", "LoRA with magnitudes (DoRA)"),
    "DoRA of LoKr": Dialect(
        dora("diffusion_model.", lokr(3.0, True), 0), "diffusion_model.", f"{LYCORIS} with magnitudes"),
    "DoRA of LoHa": Dialect(dora("lora_unet_", loha, 1, "_"), "lora_unet_", "Hadamard products (LoHa) with"),
}  # fmt: skip
