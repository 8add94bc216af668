"""Wrong weights, adapters, encoders and prompt files of a run, and the line that answers each."""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from tests.trainer.picture_cache.folders import RUN
from tests.trainer.tiny_model import initialised, save_flux

from fluxtrain.contract.run.resolve import merge, resolve


class BadRun(NamedTuple):
    """A run on ``micro``'s model whose files are made in its root of models, and the line that answers it."""

    name: str
    make: Callable[[Path], object]
    line: str
    run: dict[str, Any]


def tensors(name: str, shapes: Mapping[str, tuple[int, ...]]) -> Callable[[Path], object]:
    """Return a function that writes a safetensors file of zeros."""

    def make(folder: Path) -> None:
        zeros = {key: torch.zeros(shape) for key, shape in shapes.items()}
        save_file(zeros, folder / name)

    return make


def content(name: str, given: bytes) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes(given)


def cut(name: str, shapes: Mapping[str, tuple[int, ...]], left: int) -> Callable[[Path], object]:
    def make(folder: Path) -> None:
        tensors(name, shapes)(folder)
        (folder / name).write_bytes((folder / name).read_bytes()[:left])

    return make


def nothing(folder: Path) -> None:
    """Write no file."""


def folder_of(name: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).mkdir()


SDXL = {
    "model.diffusion_model.input_blocks.0.0.weight": (4, 4),
    "model.diffusion_model.label_emb.0.0.weight": (4, 4),
}
SD15 = {"model.diffusion_model.input_blocks.0.0.weight": (4, 4), "cond_stage_model.w": (4,)}
T5 = {"encoder.block.0.layer.0.SelfAttention.q.weight": (4, 4), "shared.weight": (4, 4)}
CLIP = {"text_model.embeddings.token_embedding.weight": (4, 4)}
AE = {"decoder.conv_in.weight": (4, 4), "encoder.conv_in.weight": (4, 4)}
LORA = {
    "lora_unet_double_blocks_0_img_attn_qkv.lora_down.weight": (4, 32),
    "lora_unet_double_blocks_0_img_attn_qkv.lora_up.weight": (96, 4),
}
SDXL_LORA = {
    "lora_unet_input_blocks_4_1_proj_in.lora_down.weight": (4, 32),
    "lora_unet_input_blocks_4_1_proj_in.lora_up.weight": (32, 4),
}
WEIGHTS: dict[str, Any] = {"initial_weights": "model.safetensors"}
ADAPTER: dict[str, Any] = {
    **WEIGHTS,
    "adapter": {"kind": "lora", "rank": 4, "initial": "lora.safetensors"},
}
IS_NONE = "model.safetensors: neither BFL's nor diffusers' FLUX transformer (it has "


def prompts(text: str | bytes) -> Callable[[Path], object]:
    given = text.encode() if isinstance(text, str) else text
    return content("../data/prompts.txt", given)


PROMPTS: dict[str, Any] = {"sampling": {"every_steps": 1, "prompt_file": "prompts.txt"}}


def model(folder: Path, **changes: Any) -> Path:
    """Write weights of the run's model with ``changes`` as model.safetensors."""
    values = merge(RUN, {"model": changes})
    path = save_flux(initialised(resolve(values).model), folder)
    return path.rename(folder / "model.safetensors")


def other(**changes: Any) -> Callable[[Path], object]:
    return lambda folder: model(folder, **changes)


def beside_model(make: Callable[[Path], object]) -> Callable[[Path], object]:
    def both(folder: Path) -> None:
        model(folder)
        make(folder)

    return both


def adapter(line: str, name: str, make: Callable[[Path], object]) -> BadRun:
    return BadRun(name, beside_model(make), line, ADAPTER)


LAYER = "lora_unet_double_blocks_0_img_attn_qkv"
DOWN, UP = f"{LAYER}.lora_down.weight", f"{LAYER}.lora_up.weight"
NOT_WHOLE = "model.safetensors: not a whole safetensors file ("


def header(text: bytes, length: int) -> Callable[[Path], object]:
    return content("model.safetensors", struct.pack("<Q", length) + text)


RUNS: list[BadRun] = [
    BadRun("weights that are missing", nothing, "model.safetensors: missing", WEIGHTS),
    BadRun("SDXL's weights", tensors("model.safetensors", SDXL), "it holds a U-Net of Stable Diff", WEIGHTS),
    BadRun("SD 1.5's weights", tensors("model.safetensors", SD15), "it holds a U-Net of Stable", WEIGHTS),
    BadRun("T5 as weights", tensors("model.safetensors", T5), "it holds a text encoder, which spec", WEIGHTS),
    BadRun("CLIP as weights", tensors("model.safetensors", CLIP), "it holds a text encoder, which", WEIGHTS),
    BadRun("an autoencoder", tensors("model.safetensors", AE), "it holds an autoencoder, which", WEIGHTS),
    BadRun("a LoRA as weights", tensors("model.safetensors", LORA),
           "it holds adapters, which spec.run.adapter.initial and added_adapters take", WEIGHTS),
    BadRun("any tensors", tensors("model.safetensors", {"a": (4, 4)}), IS_NONE + "a ...)", WEIGHTS),
    BadRun("a part of the model", tensors("model.safetensors", {"img_in.weight": (8, 8)}),
           "not the weights of a FLUX transformer (it lacks vector_in.in_layer.weight)", WEIGHTS),
    BadRun("dev's weights for schnell", other(guidance_embed=True),
           "these are FLUX.1 [dev]'s: set model.guidance_embed to true, as preset: dev-lora does", WEIGHTS),
    BadRun("schnell's weights for dev", other(),
           "these are FLUX.1 [schnell]'s: set model.guidance_embed to false, as preset: schnell-lora does",
           WEIGHTS | {"model": {"guidance_embed": True}}),
    BadRun("a deeper model", other(depth=3), "is not a tensor of this model", WEIGHTS),
    BadRun("a wider text encoder", other(context_in_dim=96),
           "txt_in.weight has shape [32, 96] but the model has [32, ", WEIGHTS),
    BadRun("a pickle", content("model.safetensors", b"PK\3\4" + bytes(100)),
           NOT_WHOLE + "it is a pickle, which is not read: get the .safetensors file)", WEIGHTS),
    BadRun("an empty file", content("model.safetensors", b""), NOT_WHOLE + "it has 0 bytes)", WEIGHTS),
    BadRun("weights that are cut off", cut("model.safetensors", {"img_in.weight": (64, 64)}, 4000),
           NOT_WHOLE + "tensor 'img_in.weight' ends at byte 16472 of 4000: cut off, get it again)", WEIGHTS),
    BadRun("a header without end", header(b"{", 1 << 60), NOT_WHOLE + "its header claims 11529", WEIGHTS),
    BadRun("a header that is no JSON", header(b"[}", 2), NOT_WHOLE + "Expecting value", WEIGHTS),
    BadRun("an empty folder of weights", folder_of("model.safetensors"),
           "model.safetensors: no *.safetensors file and no complete checkpoint is here", WEIGHTS),
    adapter("lora.safetensors: missing", "an adapter that is missing", nothing),
    adapter("not a LoRA of FLUX's blocks; it has lora_unet_input_blocks_4_1_proj_in", "an adapter of SDXL",
            tensors("lora.safetensors", SDXL_LORA)),
    adapter("not a LoRA of FLUX's blocks; it has img_in.weight", "a model as adapter",
            tensors("lora.safetensors", {"img_in.weight": (8, 8)})),
    adapter("lora.safetensors: not a whole safetensors file (tensor", "an adapter that is cut off",
            cut("lora.safetensors", LORA, 300)),
    adapter("qkv has shape (9216, 3072), should have (96, 32)", "an adapter of other shapes",
           
            tensors("lora.safetensors", {DOWN: (4, 3072), UP: (9216, 4)})),
    adapter("not a valid LoRA (lora_unet_double_blocks_0_img_attn_qkv has no up", "half of an adapter",
            tensors("lora.safetensors", {DOWN: (4, 32)})),
    adapter("it adapts double_blocks.7.img_attn.qkv, to which", "an adapter with a block that is not there",
            tensors("lora.safetensors", {
        DOWN.replace("_0_", "_7_"): (4, 32), UP.replace("_0_", "_7_"): (96, 4)})),
    BadRun("encoders that are missing", nothing, "ae.safetensors: missing; the encoders need it", {}),
    BadRun("a prompt file that is missing", nothing,
           "sampling.prompt_file: /ROOT/data/prompts.txt: cannot be read (No such file", PROMPTS),
    BadRun("an empty prompt file", prompts("# nothing\n"), "prompts.txt: it has no prompt", PROMPTS),
    BadRun("a prompt file with an unknown flag", prompts("a cat --zoom 3\n"),
           "prompts.txt, line 1: --zoom is unknown; use --w, --h, --d, --s, --l, --g, --n", PROMPTS),
    BadRun("a prompt file with a text as width", prompts("a cat --w wide\n"),
           "prompts.txt, line 1: --w wide: must be a whole number from 16 to 8192", PROMPTS),
    BadRun("a prompt file in Latin 1", prompts("Käse\n".encode("latin-1")),
           "prompts.txt: cannot be read (it is not UTF-8)", PROMPTS),
]  # fmt: skip
