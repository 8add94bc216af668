"""Makes updates of the tensors of LoRA files, in whatever dialect and algorithm they are."""

from __future__ import annotations

import json
import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fluxtrain.adapter.names import (
    PREFIXES,
    LayerName,
    find,
    is_of_text_encoder,
    kind_of_key,
    owner,
    part_rows,
    shapes_at,
    without_prefix,
)
from fluxtrain.adapter.updates import (
    DIFFERENCE,
    Adapter,
    AnyUpdate,
    Difference,
    Magnitude,
    Matrix,
    Patch,
    Patches,
    RowBlock,
    Update,
    Vector,
    hadamard_of,
    product_of,
    swapped,
)
from fluxtrain.contract.run.model import ModelConfig
from fluxtrain.errors import DataError
from fluxtrain.model.layers import BLOCKS, HADAMARD_FACTORS, TEXT_ENCODER, is_clip
from fluxtrain.runtime.safetensors import Span, open_safetensors, read_tensor

Metadata = dict[str, str]
DIFFUSERS_METADATA = "lora_adapter_metadata"
"""Key of peft's config in the metadata of files that diffusers writes."""
MAX_BYTES = 1 << 33
"""Of a LoRA: one of rank 512 of all layers has some 5 GB."""
AGAIN = "get the file again, or one of an earlier step"
_MLP_RATIO, _MOST_RATIO = 4, 16
_BLOCK_NUMBER = re.compile(r"(?<=_blocks)\.\d+\.")


@dataclass
class Contents:
    """What the tensors of a file hold."""

    adapter: Adapter = field(default_factory=dict)
    ignored: list[str] = field(default_factory=list)
    """Names of tensors of text encoders that are no layers of CLIP-L."""
    unknown: list[str] = field(default_factory=list)
    """Names of tensors, or of modules, that are none of an adapter of the model."""
    faults: list[str] = field(default_factory=list)
    """What does not fit in the rest."""
    dialects: Counter[str] = field(default_factory=Counter)
    """Prefixes of the modules' names."""
    num_parts: int = 0
    """Modules with diffusers' names of layers."""
    metadata: Metadata = field(default_factory=dict)
    dtype: torch.dtype = torch.float32
    other: str = ""
    """The model of which it is by its shapes and blocks, if that is not FLUX.1."""


_Found = dict[str, list[tuple[LayerName, Matrix | RowBlock, Magnitude | None]]]
_Vectors = dict[str, list[tuple[LayerName, Tensor, bool]]]
"""Of biases and norms; the last says whether the values are new."""


def dialect(contents: Contents) -> str:
    """Return the prefixes of the names of modules, who writes them, and whose names of layers follow."""
    found = []
    for prefix, _ in contents.dialects.most_common():
        own = next((each for each in PREFIXES if prefix.startswith(each)), "")
        found.append(f"{prefix} ({PREFIXES[own]})" if own else prefix or "no prefix")
    names = {True: "diffusers' layers", False: "BFL's layers"}
    return f"{', '.join(found)}; {names[2 * contents.num_parts > contents.dialects.total()]}"


def from_tensors(
    tensors: Mapping[str, Tensor], alphas: Mapping[str, float] | None = None
) -> Contents:
    """Return what ``tensors`` of any dialect hold.

    ``alphas`` are those of modules whose file has them elsewhere, by their names without a prefix.
    """
    contents = Contents()
    found: _Found = defaultdict(list)
    vectors: _Vectors = defaultdict(list)
    for module, parts in _modules(tensors, contents).items():
        place = find(module)
        if place is None:
            contents.unknown.append(module)
            continue
        if not is_clip(place.layer):
            contents.dialects[place.dialect] += 1
        contents.num_parts += place.is_of_diffusers
        try:
            alpha = _alpha(module, parts, (alphas or {}).get(module.removeprefix(place.dialect)))
            for tensor, is_new in _vectors(place, parts):
                kind = "scale" if place.is_norm else "bias"
                vectors[f"{place.layer}.{kind}"].append((place, tensor, is_new))
            if not place.is_norm and not parts.keys() <= {"bias", "shape"}:
                matrix = _matrix(module, place, parts, alpha)
                found[place.layer].append((place, *matrix))
        except ValueError as error:
            contents.faults.append(str(error))
    ratio = _mlp_ratio(found)
    makes: dict[str, Callable[[], AnyUpdate]] = {
        layer: partial(_update, layer, pieces, ratio) for layer, pieces in found.items()
    }
    makes |= {name: partial(_vector, name, parts, ratio) for name, parts in vectors.items()}
    adapter = Adapter()
    for name, make in makes.items():
        try:
            adapter[name] = make()
        except ValueError as error:
            contents.faults.append(str(error))
    contents.adapter = dict(sorted(adapter.items(), key=_order))
    contents.faults += _misshapen(contents.adapter, ratio)
    contents.other = _model_of(contents.adapter, ratio)
    return contents


def _modules(tensors: Mapping[str, Tensor], contents: Contents) -> dict[str, dict[str, Tensor]]:
    """Return the tensors of each module by their kinds; the rest is told in ``contents``.

    A module of which a tensor is not known is left out: the others are not its update.
    """
    modules: dict[str, dict[str, Tensor]] = defaultdict(dict)
    unknown = set[tuple[str, int | None]]()
    for name, tensor in tensors.items():
        key = kind_of_key(name)
        layer = owner(name) if key is None else find(key[0])
        if layer is None and is_of_text_encoder(name):
            contents.ignored.append(name)
        elif key is None:
            contents.unknown.append(name)
            unknown |= {(layer.layer, layer.part)} if layer else set()
        else:
            module, kind = key
            if kind in modules[module]:
                contents.faults.append(f"{module} has several updates of the same rows")
            modules[module][kind] = tensor
    for module in list(modules) if unknown else ():
        if (place := find(module)) and (place.layer, place.part) in unknown:
            contents.unknown.append(module)
            del modules[module]
    return modules


def _vectors(place: LayerName, parts: Mapping[str, Tensor]) -> Iterator[tuple[Tensor, bool]]:
    """Yield the values of the bias, or of the norm, and whether they are new ones."""
    kinds = ("diff", "new") if place.is_norm else ("bias",)
    if place.is_norm and not parts.keys() <= {*kinds, "shape"}:
        raise ValueError(f"{place.layer} is a norm, and has {', '.join(sorted(parts))}")
    for kind in kinds:
        if kind in parts:
            if parts[kind].dim() != 1:
                raise ValueError(f"{place.layer} has values of shape {list(parts[kind].shape)}")
            yield parts[kind], kind == "new"


def _vector(name: str, parts: list[tuple[LayerName, Tensor, bool]], ratio: float) -> Vector:
    (place, values, is_new), *others = parts
    if place.part is None:
        if others:
            raise ValueError(f"{name} is given twice")
        return Vector(swapped(values) if place.is_swapped else values, is_new)
    hidden = next((len(each) for one, each, _ in parts if one.part != 3 and one.span == 1), 0)
    hidden = hidden or len(values) // (round(ratio) if place.part == 3 else place.span)
    mlp = round(ratio * hidden)
    if mlp > _MOST_RATIO * hidden:
        raise ValueError(
            f"{name} has {len(values)} values, of an MLP that is {ratio:g} times as wide"
        )
    whole = torch.zeros(3 * hidden + (mlp if place.num_parts == 4 else 0))
    for place, values, _ in parts:
        first, end = part_rows(place, hidden, mlp)
        if len(values) != end - first:
            raise ValueError(f"{name} has {len(values)} values for {end - first} rows")
        whole[first:end] = values.float()
    return Vector(whole)


def _alpha(module: str, parts: Mapping[str, Tensor], given: float | None) -> float | None:
    """Return alpha of ``module``; ``given`` is that in the file's metadata."""
    if "alpha" in parts:
        if parts["alpha"].numel() != 1:
            raise ValueError(f"{module}.alpha is not a number")
        given = float(parts["alpha"].item())
    if given is not None and not math.isfinite(given):
        raise ValueError(f"alpha of {module} is not finite")
    return given


def _order(item: tuple[str, object]) -> tuple[str, int, str]:
    if is_clip(item[0]):
        number, _, layer = item[0].partition(".layers.")[2].partition(".")
        return TEXT_ENCODER, int(number), layer
    if not item[0].startswith(BLOCKS):
        return item[0], -1, ""
    blocks, number, rest = item[0].split(".", 2)
    return blocks, int(number), rest


def _matrix(
    module: str, place: LayerName, parts: Mapping[str, Tensor], alpha: float | None
) -> tuple[Matrix | RowBlock, Magnitude | None]:
    """Return the matrix of ``module``, and its magnitudes unless they are the rows' of a low-rank one."""
    lokr = {name: each for name, each in parts.items() if name.startswith("lokr_")}
    hada = {name: each for name, each in parts.items() if name in HADAMARD_FACTORS}
    if (bool(lokr), bool(hada), DIFFERENCE in parts, "up" in parts or "down" in parts).count(
        True
    ) > 1:
        raise ValueError(f"{module} has several updates of the same rows")
    matrix: Matrix | RowBlock
    if lokr:
        matrix = product_of(module, lokr, alpha)
    elif hada:
        matrix = hadamard_of(module, hada, alpha)
    elif DIFFERENCE in parts:
        if parts[DIFFERENCE].dim() != 2 or not parts[DIFFERENCE].numel():
            raise ValueError(f"{module}.{DIFFERENCE} is no matrix")
        matrix = Difference({DIFFERENCE: parts[DIFFERENCE]})
    else:
        matrix = _piece(module, parts, alpha)
    norms = _magnitude(module, parts["magnitude"], matrix) if "magnitude" in parts else None
    if isinstance(matrix, RowBlock):
        if norms is None or not norms.is_of_columns:
            matrix, norms = replace(matrix, magnitude=norms), None
        return matrix.swapped() if place.is_swapped else matrix, norms
    if norms is not None and not norms.is_of_columns and place.is_swapped:
        norms = replace(norms, values=swapped(norms.values))
    return matrix, norms


def _piece(module: str, parts: Mapping[str, Tensor], alpha: float | None) -> RowBlock:
    if not {"down", "up"} <= parts.keys():
        raise ValueError(f"{module} has no {'down' if 'up' in parts else 'up'} matrix")
    down, up = (_flat(parts[kind]) for kind in ("down", "up"))
    is_product = down.dim() == up.dim() == 2 and len(down) == up.shape[1]
    if not is_product or not down.numel() or not up.numel():
        shapes = f"{list(down.shape)} and {list(up.shape)}"
        raise ValueError(f"{module} has matrices of shapes {shapes}, which are no low-rank update")
    return RowBlock(0, down, up, 1.0 if alpha is None else alpha / len(down))


def _flat(tensor: Tensor) -> Tensor:
    """Return ``tensor`` as a matrix if it is that of a convolution of one pixel."""
    is_pixel = tensor.dim() == 4 and tensor.shape[2:] == (1, 1)
    return tensor.flatten(1) if is_pixel else tensor


def _magnitude(module: str, values: Tensor, matrix: Matrix | RowBlock) -> Magnitude:
    """Return the magnitudes of the rows or columns of ``matrix``; ValueError if ``values`` are others."""
    outputs, inputs = _shape(matrix)
    shape = tuple(values.shape)
    if shape not in ((outputs,), (outputs, 1), (1, inputs)):
        raise ValueError(
            f"{module} has magnitudes (DoRA) of shape {list(values.shape)}, neither of its {outputs} rows "
            f"nor of its {inputs} columns"
        )
    is_of_columns = shape == (1, inputs) and shape != (outputs, 1)
    return Magnitude(values.flatten(), is_of_columns=is_of_columns)


def _shape(matrix: Matrix | RowBlock) -> tuple[int, int]:
    if isinstance(matrix, RowBlock):
        return len(matrix.up), matrix.down.shape[1]
    return matrix.outputs, matrix.inputs


def _mlp_ratio(found: _Found) -> float:
    """Return the MLP's width over the model's, from a layer that shows it."""
    for layer, pieces in found.items():
        for place, matrix, _ in pieces:
            outputs, inputs = _shape(matrix)
            if layer.endswith("_mlp.0") or (place.part == 3):
                return outputs / inputs
            if layer.endswith("linear1") and place.part is None:
                return outputs / inputs - 3
            if layer.endswith("linear2"):
                return inputs / outputs - 1
    return _MLP_RATIO


def _update(
    layer: str, found: list[tuple[LayerName, Matrix | RowBlock, Magnitude | None]], ratio: float
) -> AnyUpdate:
    hidden = _shape(found[0][1])[1]
    mlp = round(ratio * hidden)
    place, matrix, _ = found[0]
    outputs = 3 * hidden + (mlp if place.num_parts == 4 else 0)
    if place.part is None:
        outputs = _shape(matrix)[0]
    patches, end = list[Patch](), 0
    for place, matrix, norms in sorted(found, key=lambda each: each[0].part or 0):
        rows, last = (0, outputs) if place.part is None else part_rows(place, hidden, mlp)
        if rows < end:
            raise ValueError(f"{layer} has several updates of the same rows")
        if _shape(matrix) != (last - rows, hidden):
            raise ValueError(
                f"part {place.part} of {layer} has a matrix of shape {list(_shape(matrix))}"
            )
        end = last
        own = Update(len(matrix.up), (matrix,)) if isinstance(matrix, RowBlock) else matrix
        is_swapped_here = place.is_swapped and own is matrix
        patches.append(Patch(rows, own, norms, is_swapped_here))
    if all(isinstance(each.matrix, Update) and each.magnitude is None for each in patches):
        pieces = ((each.first, each.matrix.pieces[0]) for each in patches)  # type: ignore[union-attr]
        return Update(outputs, tuple(replace(piece, first=first) for first, piece in pieces))
    first, *others = patches
    is_plain = first.magnitude is None and not first.is_swapped and place.part is None
    return first.matrix if is_plain and not others else Patches(outputs, tuple(patches))


def _width(adapter: Adapter, of: tuple[str, ...] = BLOCKS) -> int:
    """Return the width that most of the layers ``of`` show; 0 without one."""
    layers = (each for name, each in adapter.items() if name.startswith(of))
    widths = Counter(min(shape_of(each)) for each in layers if not isinstance(each, Vector))
    return widths.most_common(1)[0][0] if widths else 0


def _misshapen(adapter: Adapter, ratio: float) -> Iterator[str]:
    """Yield the layers whose shapes are not those at the width of most of them, or whose values overflow."""
    blocks, clip = _width(adapter), _width(adapter, (TEXT_ENCODER,))
    for name, update in adapter.items():
        width, has = clip if is_clip(name) else blocks, shape_of(update)
        tensor = _BLOCK_NUMBER.sub(".0.", tensor_name(name, update), 1)
        pieces = update.pieces if isinstance(update, Update) else ()
        sizes = (
            each.scale * each.up.float().abs().max() * each.down.abs().max() for each in pieces
        )
        if not all(map(torch.isfinite, sizes)):
            yield f"{name} is beyond float32"
        if width == 0 or tensor.endswith(".scale"):  # norms are as long as a head is wide
            continue
        own, twice = (shapes_at(times * width, ratio)[tensor] for times in (1, 2))
        if any(a != b != c for a, b, c in zip(has, own, twice, strict=True)):
            yield f"{name} is {list(has)}; at the width {width} of most layers it is {list(own)}"


def tensor_name(layer: str, update: AnyUpdate) -> str:
    """Return the name of the tensor that ``update`` of ``layer`` changes."""
    return layer if isinstance(update, Vector) else f"{layer}.weight"


def shape_of(update: AnyUpdate) -> tuple[int, ...]:
    """Return the shape of the tensor that ``update`` changes."""
    return (update.outputs,) if update.inputs is None else (update.outputs, update.inputs)


def _model_of(adapter: Adapter, ratio: float) -> str:
    """Return of what model ``adapter`` is, with layers of FLUX.1's names; "" if it may be FLUX.1."""
    width = _width(adapter)
    if width == _WIDTH and ratio in _FLUX2_RATIOS:
        return "FLUX.2 klein 4B"
    if width == _WIDTH and any(map(is_beyond, adapter)):
        has_singles = any(name.startswith("single_blocks") for name in adapter)
        return "HunyuanVideo" if has_singles else "Qwen-Image"
    return _WIDTHS.get(width, "")


def is_beyond(layer: str) -> bool:
    """Return whether ``layer`` is of a block whose number FLUX.1 does not have."""
    kind, number, *_ = f"{layer}.".split(".")
    return number.isdecimal() and int(number) >= ModelConfig().depths[kind]


def read_contents(path: Path, spans: Mapping[str, Span]) -> Contents:
    """Return all that ``path`` has, also what is not known or does not fit; DataError if it is damaged."""
    total = sum(span.num_bytes for span in spans.values())
    if total > MAX_BYTES:
        raise DataError(f"{path}: {total} bytes, at most {MAX_BYTES} are read of a LoRA")
    with open_safetensors(path, "a LoRA") as file:
        metadata = dict(file.metadata() or {})
    counts = Counter[torch.dtype]()
    tensors = dict[str, Tensor]()
    for name, span in spans.items():
        is_number = span.dtype.is_floating_point or math.prod(span.shape) == 1  # alpha may be whole
        if not is_number and kind_of_key(name):
            kind = str(span.dtype).removeprefix("torch.")
            text = f"{name} is {kind}, of a quantised file; the file that it was made of is read"
            raise DataError(f"{path}: {text}")
        counts[span.dtype] += math.prod(span.shape)
        tensor = read_tensor(path, span, max_bytes=None)
        tensors[name] = tensor.to(_COMPUTABLE.get(tensor.dtype, tensor.dtype))
    keys = filter(None, map(kind_of_key, tensors))
    modules = {without_prefix(module) for module, _ in keys}
    try:
        contents = from_tensors(tensors, alphas_in(metadata, modules, _config_beside(path)))
    except (ValueError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
        raise DataError(f"{path}: not a valid LoRA ({error})") from None
    require_finite(path, tensors, f"; {AGAIN}")
    contents.metadata = metadata
    if metadata.get("ss_base_model_version") == "flux1":
        contents.other = ""
    contents.dtype = counts.most_common(1)[0][0] if counts else torch.float32
    return contents


_COMPUTABLE = {
    torch.float8_e4m3fn: torch.bfloat16,
    torch.float8_e5m2: torch.bfloat16,
    torch.float64: torch.float32,
}
"""Types with which nothing is computed, and those that have their values."""
PEFT_FILE, _CONFIG, _MAX_CONFIG_BYTES = "adapter_model.safetensors", "adapter_config.json", 1 << 20


def _config_beside(path: Path) -> str | None:
    """Return the text of peft's config if ``path`` is a file of peft with one."""
    config = path.with_name(_CONFIG)
    if path.name != PEFT_FILE or not config.is_file():
        return None
    if config.stat().st_size > _MAX_CONFIG_BYTES:
        raise DataError(f"{config}: more than {_MAX_CONFIG_BYTES} bytes")
    return config.read_text(encoding="utf-8", errors="replace")


def alphas_in(
    metadata: Mapping[str, str], modules: Collection[str], beside: str | None = None
) -> dict[str, float]:
    """Return alpha of each of ``modules``, without prefixes, if ``metadata`` or ``beside`` has peft's config.

    ``beside`` is the text of peft's own file of it. Raises ValueError if it is malformed.
    """
    text = metadata.get(DIFFUSERS_METADATA, beside)
    if text is None:
        return {}
    values = json.loads(text)
    if not isinstance(values, dict):
        raise ValueError(f"{DIFFUSERS_METADATA} is not a mapping")
    found = dict[str, float]()
    for model in ("transformer", TEXT_ENCODER):
        of_model = [name for name in modules if is_clip(name) == (model != "transformer")]
        found |= _alphas_of(model, values, of_model)
    return found


def _alphas_of(
    model: str, values: Mapping[str, Any], modules: Iterable[str]
) -> Iterator[tuple[str, float]]:
    """Yield ``modules``, those of ``model``, with their alpha."""

    def value(*keys: str) -> Any:
        """Return that of the model; else, of the transformer, that of peft's own file, without a model."""
        names = [f"{model}.{key}" for key in keys]
        names += list(keys) if model == "transformer" else []
        return next((values[name] for name in names if values.get(name) is not None), None)

    alpha, rank = value("lora_alpha", "alpha"), value("r")
    alphas, ranks = value("alpha_pattern") or {}, value("rank_pattern") or {}
    for module in modules if alpha is not None else ():
        name = module.removeprefix(f"{model}.")
        own = float(_pattern_value(alphas, name, alpha))
        if value("use_rslora") and rank:
            own *= math.sqrt(_pattern_value(ranks, name, rank))
        yield module, own


def _pattern_value(pattern: Mapping[str, float], name: str, default: float) -> float:
    """Return the value of the pattern that ``name`` ends with, or equals after a ``^``."""
    for key, value in pattern.items():
        plain = key.removeprefix("^")
        if name == plain or (plain == key and name.endswith(f".{plain}")):
            return value
    return default


def is_known(name: str) -> bool:
    """Return whether tensor ``name`` is one of an adapter of the model or of CLIP."""
    key = kind_of_key(name)
    return key is not None and find(key[0]) is not None


def require_finite(path: Path, tensors: Mapping[str, Tensor], advice: str = "") -> None:
    """Raise DataError naming the first of ``tensors`` that has a value that is not finite."""
    for name, tensor in tensors.items():
        if not torch.isfinite(tensor).all():
            raise DataError(
                f"{path}: {name} is not finite in {str(tensor.dtype).removeprefix('torch.')}{advice}"
            )


def base_of(adapter: Adapter) -> str:
    """Return what the shapes in ``adapter`` say of its model."""
    width = _width(adapter) or None
    channels = adapter["img_in"].inputs if "img_in" in adapter else None
    kinds = {64: "", 128: ", with a control image (Depth, Canny)", 384: ", with a mask (Fill)"}
    family = (
        f"FLUX.1's width of {_WIDTH}" if width == _WIDTH else f"width {width}, FLUX.1's is {_WIDTH}"
    )
    return f"{family}{kinds.get(channels or 64, f', {channels} channels')}"


_WIDTH, _FLUX2_RATIOS = 3072, (3, 6)
_WIDTHS = {
    1536: "Stable Diffusion 3 or 3.5 Medium",
    2432: "Stable Diffusion 3.5 Large",
    4096: "FLUX.2 klein 9B",
    6144: "FLUX.2",
}
"""Of models whose layers have the same names."""


_SHOWN = (
    "modelspec.title",
    "modelspec.implementation",
    "modelspec.architecture",
    "ss_base_model_version",
    "ss_sd_model_name",
    "ss_steps",
    "ss_learning_rate",
    "ss_optimizer",
)


def of_metadata(metadata: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield what ``metadata`` say of the training, and the tool that wrote them."""
    for key in _SHOWN:
        if key in metadata:
            yield key.rpartition(".")[2].removeprefix("ss_"), metadata[key][:200]
    tools = (
        tool for start, tool in _TOOLS.items() if any(key.startswith(start) for key in metadata)
    )
    if writer := metadata.get("software") or next(tools, ""):
        yield "written by", writer[:200]


_TOOLS = {
    "ot_": "OneTrainer",
    DIFFUSERS_METADATA: "diffusers or SimpleTuner, with peft",
    "training_info": "ai-toolkit",
    "ss_": "kohya's sd-scripts or a tool with its metadata",
    "workflow": "ComfyUI",
    "prompt": "ComfyUI",
    "modelspec.": "a tool with ModelSpec's metadata",
}
"""Starts of keys in metadata, and the tools that write them."""
