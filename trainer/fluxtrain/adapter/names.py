"""How other tools name the layers of the model: each layer of ours, and parts of its rows."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

from fluxtrain.contract.run.model import ModelConfig
from fluxtrain.model.layers import BLOCKS, TEXT_ENCODER, clip_linear_layers, entries, is_clip

KOHYA, BFL, DIFFUSERS = ("lora_unet_", "diffusion_model.", "transformer.")
"""Prefixes of the layouts' keys."""
PREFIXES = {
    KOHYA: "kohya's sd-scripts",
    "lora_transformer_": "OneTrainer",
    "lycoris_": "LyCORIS, as SimpleTuner uses it",
    "model.diffusion_model.": "ComfyUI's checkpoints",
    BFL: "ComfyUI, ai-toolkit",
    DIFFUSERS: "diffusers, ai-toolkit, SimpleTuner",
    "base_model.model.": "peft",
    "unet.": "diffusers' older scripts",
    "pipe.dit.": "DiffSynth",
    "dit.": "DiffSynth",
    "model.": "a wrapped model",
    "module.": "a wrapped model",
    "_orig_mod.": "a compiled model",
    "_fsdp_wrapped_module.": "a sharded model",
}
"""Prefixes of files in public, which may follow one another, and who writes them."""
_KOHYA_CLIP = "lora_te1_"
"""kohya's prefix of CLIP's layers. Elsewhere it is diffusers', which is ours."""
_CLIP = re.compile(r"^(.*(?:text|clip|te1?[._]).*?)encoder[._]layers[._](\d+[._].+)$")
"""A layer of CLIP after whatever prefix: lora_te1_, te1., clip_l., text_encoder.base_model.model., ..."""
_OTHER_ENCODER = re.compile(
    r"vision|visual|image|(te|encoders?)[._]?[2-9]|clip_?[gh]|t5|embedders[._]1|siglip|llama|qwen|gemma"
)
_TEXT_ENCODER = re.compile(rf"lora_te|{TEXT_ENCODER}|te\d?\.|(clip_[lg]|t5(xxl)?)\.")
_BLOCK = re.compile(
    r"(double_blocks|single_blocks|single_transformer_blocks|transformer_blocks|blocks)([._])(\d+)\2"
)
_OF_OTHERS = re.compile(
    r"control|text|clip|t5|te\d?[._]|encoder|image|adapter|vae|refiner|block|joint"
)
"""Parts of prefixes of what is not the transformer."""
_HIDDEN = 64
_ONE_OF_EACH = ModelConfig(
    hidden_size=_HIDDEN,
    num_heads=1,
    axes_dim=(16, 24, 24),
    depth=1,
    depth_single_blocks=1,
    guidance_embed=True,
)
_NAME = r"(?:\.[\w-]+)??"
_KIND = re.compile(
    r"^(?P<module>.+?)(?:[._]lora(?:_linear_layer)?)?\.(?:"
    rf"(?P<bias>lora_(?:up|B){_NAME}\.bias|diff_b|b_norm)"
    rf"|(?P<down>lora_(?:down|A){_NAME}(?:\.weight)?|down\.weight)"
    rf"|(?P<up>lora_(?:up|B){_NAME}(?:\.weight)?|up\.weight)"
    rf"|(?P<magnitude>dora_scale|lora_magnitude_vector{_NAME}(?:\.weight)?)"
    r"|(?P<alpha>alpha)|(?P<diff>diff|w_norm)|(?P<new>set_weight)|(?P<shape>reshape_weight)"
    r"|(?P<lycoris>(?:lokr_w[12](?:_[ab])?|hada_w[12]_[ab])))$"
)
_NORM = re.compile(
    r"^(?P<module>.+(?:query_norm|key_norm|norm_q|norm_k|norm_added_[qk]))\.(weight|scale)$"
)
"""Values of norms, which control LoRAs have as they are."""
_ALIASES = {
    "double_blocks.0.qkv_lora1": ("double_blocks.0.img_attn.qkv", None, 1),
    "double_blocks.0.qkv_lora2": ("double_blocks.0.txt_attn.qkv", None, 1),
    "double_blocks.0.proj_lora1": ("double_blocks.0.img_attn.proj", None, 1),
    "double_blocks.0.proj_lora2": ("double_blocks.0.txt_attn.proj", None, 1),
    "img_in.proj": ("img_in", None, 1),
    "single_blocks.0.qkv": ("single_blocks.0.linear1", 0, 3),
    "single_blocks.0.linear1_qkv": ("single_blocks.0.linear1", 0, 3),
    "single_blocks.0.proj": ("single_blocks.0.linear2", None, 1),
    "single_transformer_blocks.0.attn.to_qkv": ("single_blocks.0.linear1", 0, 3),
    "transformer_blocks.0.attn.to_qkv": ("double_blocks.0.img_attn.qkv", None, 1),
    "transformer_blocks.0.attn.to_added_qkv": ("double_blocks.0.txt_attn.qkv", None, 1),
    "transformer_blocks.0.attn.to_out": ("double_blocks.0.img_attn.proj", None, 1),
    "transformer_blocks.0.ff.linear1": ("double_blocks.0.img_mlp.0", None, 1),
    "transformer_blocks.0.ff.linear2": ("double_blocks.0.img_mlp.2", None, 1),
    "transformer_blocks.0.ff_context.linear1": ("double_blocks.0.txt_mlp.0", None, 1),
    "transformer_blocks.0.ff_context.linear2": ("double_blocks.0.txt_mlp.2", None, 1),
    "blocks.0.norm1_a.linear": ("double_blocks.0.img_mod.lin", None, 1),
    "blocks.0.norm1_b.linear": ("double_blocks.0.txt_mod.lin", None, 1),
    "blocks.0.attn.a_to_qkv": ("double_blocks.0.img_attn.qkv", None, 1),
    "blocks.0.attn.b_to_qkv": ("double_blocks.0.txt_attn.qkv", None, 1),
    "blocks.0.attn.a_to_out": ("double_blocks.0.img_attn.proj", None, 1),
    "blocks.0.attn.b_to_out": ("double_blocks.0.txt_attn.proj", None, 1),
    "blocks.0.ff_a.0": ("double_blocks.0.img_mlp.0", None, 1),
    "blocks.0.ff_a.2": ("double_blocks.0.img_mlp.2", None, 1),
    "blocks.0.ff_b.0": ("double_blocks.0.txt_mlp.0", None, 1),
    "blocks.0.ff_b.2": ("double_blocks.0.txt_mlp.2", None, 1),
    "single_blocks.0.norm.linear": ("single_blocks.0.modulation.lin", None, 1),
    "single_blocks.0.to_qkv_mlp": ("single_blocks.0.linear1", None, 1),
    "single_blocks.0.proj_out": ("single_blocks.0.linear2", None, 1),
}
"""Names of xlabs, OMI, fused projections, mflux, DiffSynth: the layer, its first part, how many parts."""


class LayerName(NamedTuple):
    """A layer of ours, and which of diffusers' parts of it; None: all rows."""

    layer: str
    part: int | None
    num_parts: int
    span: int = 1
    """Number of parts from ``part`` on."""
    is_swapped: bool = False
    """Whether diffusers has the halves of its rows the other way round."""
    is_of_diffusers: bool = False
    """Whether the name is diffusers' one of the layer."""
    dialect: str = ""
    """Prefix of the name."""

    @property
    def is_norm(self) -> bool:
        """Return whether it has a scale, and no matrix."""
        return self.layer.endswith("_norm")


def kind_of_key(name: str) -> tuple[str, str] | None:
    """Return the module of tensor ``name`` of an adapter, and what of it the tensor is; None if unknown."""
    key = _KIND.match(name)
    if key is None:
        norm = _NORM.match(name)
        return None if norm is None else (norm["module"], "new")
    kind = key.lastgroup or ""
    return key["module"], key["lycoris"] if kind == "lycoris" else kind


def part_names(layer: str) -> tuple[str, ...]:
    """Return diffusers' names of the parts of ``layer``, in the order of its rows."""
    if is_clip(layer):
        return (layer,)
    if not layer.startswith(BLOCKS):
        return _parts()[layer][0]
    block, number, rest = layer.split(".", 2)
    parts, _ = _parts()[f"{block}.0.{rest}"]
    return tuple(re.sub(r"\.0\.", f".{number}.", part, count=1) for part in parts)


def is_swapped(layer: str) -> bool:
    """Return whether diffusers has the halves of the rows of ``layer`` the other way round."""
    return layer in _parts() and _parts()[layer][1]


def diffusers_key(part: str) -> str:
    """Return the key of diffusers' layer ``part`` in its files."""
    return part if is_clip(part) else DIFFUSERS + part


def kohya_key(layer: str) -> str:
    """Return kohya's name of ``layer``."""
    prefix = _KOHYA_CLIP if is_clip(layer) else KOHYA
    return prefix + layer.removeprefix(f"{TEXT_ENCODER}.").replace(".", "_")


def bfl_key(layer: str) -> str:
    """Return the name of ``layer`` in BFL's layout; CLIP's is that which readers of that layout know."""
    return layer if is_clip(layer) else BFL + layer


def is_of_text_encoder(module: str) -> bool:
    """Return whether the tensor or module ``module`` belongs to a text encoder."""
    return _TEXT_ENCODER.match(module) is not None


def in_clip(module: str) -> str:
    """Return the number and name of the layer of CLIP of ``module``, with underscores; "" without one."""
    name = _CLIP.match(module)
    return name[2].replace(".", "_") if name and not _OTHER_ENCODER.search(name[1]) else ""


def find(module: str) -> LayerName | None:
    """Return the place of ``module``, of any dialect, in the model or in CLIP; None if it is none of ours."""
    clip, bare = _clip_layers().get(in_clip(module)), module
    place = LayerName(clip, None, 1) if clip else None
    while place is None:
        place = _find_bare(bare.replace(".processor.", "."))
        if place is None:
            prefix = next((each for each in PREFIXES if bare.startswith(each)), _other_prefix(bare))
            if not prefix:
                return None
            bare = bare.removeprefix(prefix)
    return place._replace(dialect=module.removesuffix(bare))


def _other_prefix(module: str) -> str:
    """Return what is before the name of a block in ``module``, if it is not that of another model."""
    block = _BLOCK.search(module)
    start = module[: block.start()] if block else ""
    ends = block is not None and start.endswith((".", block[2]))
    return start if ends and not _OF_OTHERS.search(start) else ""


def owner(name: str) -> LayerName | None:
    """Return the place of the layer that has tensor ``name``, of whatever kind; None without one."""
    ends = [end.start() for end in re.finditer(r"[._]lora(?=[._])|\.", name)]
    return next(filter(None, (find(name[:end]) for end in reversed(ends))), None)


def without_prefix(module: str) -> str:
    """Return ``module`` without the prefixes of its dialect."""
    place = find(module)
    return module if place is None else module.removeprefix(place.dialect)


def _find_bare(module: str) -> LayerName | None:
    block = _BLOCK.match(module)
    if block is None:
        return _places().get(module)
    start, separator, number = block.groups()
    place = _places().get(f"{start}{separator}0{separator}{module[block.end() :]}")
    if place is None:
        return None
    kind, _, rest = place.layer.partition(".0.")
    return place._replace(layer=f"{kind}.{int(number)}.{rest}")


def part_rows(place: LayerName, hidden: int, mlp: int) -> tuple[int, int]:
    """Return the first row of ``place`` in its layer and the row after its last one.

    ``hidden`` is the model's width, ``mlp`` that of the MLP. Only fused layers have parts: q, k, v, and in
    single blocks the MLP.
    """
    assert place.part is not None
    last = place.part + place.span - 1
    return place.part * hidden, last * hidden + (mlp if last == 3 else hidden)


@cache
def shapes_at(width: int, mlp_ratio: float) -> dict[str, tuple[int, ...]]:
    """Return the shapes of CLIP's layers, and of all tensors with one block of each kind, at ``width``."""
    ratio = mlp_ratio + 0.5 / width  # its width is rounded down
    model = _ONE_OF_EACH.model_copy(update={"hidden_size": width, "mlp_ratio": ratio})
    shapes = {entry.name: entry.shape for entry in entries(model)}
    clip = clip_linear_layers(width).items()
    shapes |= {f"{name}.weight": shape for name, shape in clip}
    return shapes | {f"{name}.bias": shape[:1] for name, shape in clip}


@cache
def _parts() -> dict[str, tuple[tuple[str, ...], bool]]:
    """Return diffusers' names of the parts of each layer and norm, and whether its halves are swapped."""
    found = {}
    for entry in entries(_ONE_OF_EACH):
        name, _, kind = entry.name.rpartition(".")
        if kind != "bias":
            found[name] = (
                tuple(part.removesuffix(".weight") for part, _ in entry.parts),
                entry.swapped,
            )
    return found


@cache
def _clip_layers() -> dict[str, str]:
    """Return the layers of CLIP by their numbers and names, with underscores."""
    return {name.partition(".layers.")[2].replace(".", "_"): name for name in clip_linear_layers(1)}


@cache
def _places() -> dict[str, LayerName]:
    spellings: list[Callable[[str], str]] = [str, lambda name: name.replace(".", "_")]
    places = {}
    for layer, (parts, swapped) in _parts().items():
        count = len(parts)
        for spell in spellings:
            for index, part in enumerate(parts):
                own = index if count > 1 else None
                places[spell(part)] = LayerName(layer, own, count, 1, swapped, True)
                if count > 1:
                    places[spell(f"{layer}.{index}")] = LayerName(layer, own, count)
            places[spell(layer)] = LayerName(layer, None, count)
    for name, (layer, first, span) in _ALIASES.items():
        for spell in spellings:
            places[spell(name)] = LayerName(layer, first, len(_parts()[layer][0]), span)
    return places
