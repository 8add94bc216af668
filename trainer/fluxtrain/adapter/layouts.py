"""The layouts of LoRA files: the tensors of an adapter by the names that other tools read.

| layout     | names                                                                          | alpha     |
|------------|--------------------------------------------------------------------------------|-----------|
| kohya      | lora_unet_double_blocks_0_img_attn_qkv.lora_down.weight, .lora_up.weight       | .alpha    |
| diffusers  | transformer.transformer_blocks.0.attn.to_q.lora_A.weight, .lora_B.weight       | the rank  |
| ai-toolkit | the same                                                                       | the rank  |
| bfl        | diffusion_model.double_blocks.0.img_attn.qkv.lora_A.weight, .lora_B.weight     | the rank  |

Layers of the CLIP text encoder are lora_te1_text_model_encoder_layers_0_self_attn_q_proj in kohya's layout,
and text_encoder.text_model.encoder.layers.0.self_attn.q_proj in the others, whose readers know that name.

A Kronecker product (LoKr) has .lokr_w1 or .lokr_w1_a and .lokr_w1_b, the same of w2, and .alpha in the first
and the last of them; the others name parts of fused layers, to which it cannot be cut.

Magnitudes (DoRA) are .dora_scale, a column, in kohya's and bfl's layouts, as LyCORIS writes them, and
.lora_magnitude_vector in diffusers', as peft does; ai-toolkit's has no name for them. They stay in float32.

Where alpha is the rank, the scale is in lora_B: tools disagree on files in which it is not. A fused layer's
pieces are stacked in kohya's and bfl's layouts; kohya's alpha then belongs to the sum of the ranks, so that
alpha / rank stays that of the training.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import get_args

import torch
from torch import Tensor

from fluxtrain.adapter.names import (
    BFL,
    DIFFUSERS,
    KOHYA,
    ONETRAINER,
    Place,
    bfl_key,
    diffusers_key,
    find,
    find_clip,
    is_of_text_encoder,
    kohya_key,
    part_names,
    part_rows,
)
from fluxtrain.adapter.product import FACTORS, Product, product_of
from fluxtrain.adapter.update import Magnitude, Piece, Update
from fluxtrain.adapter.updates import Adapter, AnyUpdate
from fluxtrain.contract.run.adapter import AdapterLayout
from fluxtrain.model.adapted_layers import TEXT_ENCODER, is_clip

Layout = AdapterLayout
LAYOUTS: tuple[Layout, ...] = get_args(AdapterLayout)

DORA_LAYOUTS: tuple[Layout, ...] = ("kohya", "diffusers", "bfl")
"""Layouts that have magnitudes."""
PRODUCT_LAYOUTS: tuple[Layout, ...] = ("kohya", "bfl")
"""Layouts that have Kronecker products."""

_PREFIX = re.compile(
    rf"^(base_model\.model\.)?({KOHYA}|{ONETRAINER}|{re.escape(BFL)}|{re.escape(DIFFUSERS)})?"
)
_KEY = re.compile(
    r"^(?P<module>.+?)\."
    r"(?P<kind>lora_down|lora_up|lora_A|lora_B|alpha|dora_scale|lora_magnitude_vector"
    r"|lokr_w[12](_[ab])?)(\.default)?(\.weight)?$"
)
_KINDS = {"lora_A": "down", "lora_down": "down", "lora_B": "up", "lora_up": "up", "alpha": "alpha"}
_KINDS |= {"dora_scale": "magnitude", "lora_magnitude_vector": "magnitude"}
_KINDS |= {name: name for name in FACTORS}
_EXACT = (".alpha", ".dora_scale", ".lora_magnitude_vector")
"""Endings of tensors that are float32 in any file."""
_MLP_RATIO = 4
DIFFUSERS_METADATA = "lora_adapter_metadata"
"""Key of peft's config in the metadata of files that diffusers writes."""


def to_tensors(adapter: Adapter, layout: Layout, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the tensors of ``adapter`` by their names in ``layout``, in ``dtype``.

    Alpha and magnitudes are in float32. Raises ValueError if the layout has no place for an update.
    """
    tensors = {}
    for layer, update in adapter.items():
        for name, tensor in _named(layer, update, layout):
            tensors[name] = tensor.to(torch.float32 if name.endswith(_EXACT) else dtype)
    return tensors


def _named(layer: str, update: AnyUpdate, layout: Layout) -> Iterator[tuple[str, Tensor]]:
    if isinstance(update, Product):
        yield from _of_product(layer, update, layout)
        return
    _require_place(layer, update, layout)
    if layout == "kohya":
        piece, name = update.whole(), kohya_key(layer)
        yield f"{name}.lora_down.weight", piece.down
        yield f"{name}.lora_up.weight", piece.up
        yield f"{name}.alpha", torch.tensor(piece.scale * piece.rank, dtype=torch.float32)
        yield from _scales(name, piece)
    elif layout == "bfl":
        piece = update.whole()
        yield from _in_peft(bfl_key(layer), piece)
        yield from _scales(bfl_key(layer), piece)
    else:
        for name, piece in parts_of(layer, update):
            yield from _in_peft(diffusers_key(name), piece)
            if piece.magnitude is not None:
                yield f"{diffusers_key(name)}.lora_magnitude_vector", piece.magnitude.values


def _scales(name: str, piece: Piece) -> Iterator[tuple[str, Tensor]]:
    if piece.magnitude is not None:
        yield f"{name}.dora_scale", piece.magnitude.values[:, None]


def _require_place(layer: str, update: Update, layout: Layout) -> None:
    """Raise ValueError if ``update`` has magnitudes for which ``layout`` has no place."""
    if not update.is_dora:
        return
    if layout not in DORA_LAYOUTS:
        raise ValueError(
            f"layout {layout} has no name for magnitudes (DoRA): {', '.join(DORA_LAYOUTS)} do"
        )
    if any(piece.magnitude is not None and piece.magnitude.is_change for piece in update.pieces):
        raise ValueError(
            f"{layer} has changes of magnitudes (DoRA), which are of its model's weights; the files in "
            "adapters/ of the run have the magnitudes"
        )


def _of_product(layer: str, update: Product, layout: Layout) -> Iterator[tuple[str, Tensor]]:
    if layout not in PRODUCT_LAYOUTS:
        raise ValueError(
            f"layout {layout} has no place for Kronecker products (LoKr): {', '.join(PRODUCT_LAYOUTS)} do; "
            "fluxtrain adapter resize makes a LoRA of them"
        )
    name = kohya_key(layer) if layout == "kohya" else bfl_key(layer)
    for factor, tensor in update.tensors.items():
        yield f"{name}.{factor}", tensor
    yield f"{name}.alpha", torch.tensor(update.alpha, dtype=torch.float32)


def _in_peft(name: str, piece: Piece) -> Iterator[tuple[str, Tensor]]:
    yield f"{name}.lora_A.weight", piece.down
    yield f"{name}.lora_B.weight", piece.folded().up


def parts_of(layer: str, update: Update) -> Iterator[tuple[str, Piece]]:
    """Yield diffusers' layers that ``update`` changes, each with its piece; a fused piece is cut."""
    names = part_names(layer)
    if len(names) == 1:
        yield names[0], update.whole()
        return
    hidden = update.inputs
    for index, name in enumerate(names):
        place = Place(layer, index, len(names))
        first, end = part_rows(place, hidden, update.outputs - 3 * hidden)
        for piece in update.pieces:
            if piece.first <= first and end <= piece.end:
                yield name, piece.rows(first, end)


class UnknownKeysError(ValueError):
    """A file has tensors that are no LoRA of the blocks' layers."""


def from_tensors(
    tensors: Mapping[str, Tensor], alphas: Mapping[str, float] | None = None
) -> tuple[Adapter, list[str]]:
    """Return the adapter with ``tensors`` of any layout, and the names of tensors of text encoders that are
    no layers of CLIP-L.

    ``alphas`` are those of modules whose file has them in its metadata. Raises UnknownKeysError for names of
    no layer, ValueError for shapes that do not fit.
    """
    alphas = alphas or {}
    modules: dict[str, dict[str, Tensor]] = defaultdict(dict)
    unknown, ignored = [], []
    for name, tensor in tensors.items():
        key = _KEY.match(name)
        is_other = is_of_text_encoder(name) and (key is None or find_clip(key["module"]) is None)
        if is_other:
            ignored.append(name)
        elif key is None:
            unknown.append(name)
        else:
            modules[key["module"]][_KINDS[key["kind"]]] = tensor
    places = {module: find_clip(module) or find(_PREFIX.sub("", module)) for module in modules}
    unknown += [module for module, place in places.items() if place is None]
    if unknown:
        raise UnknownKeysError(", ".join(unknown[:3]))
    found: dict[str, list[tuple[Place, Piece]]] = defaultdict(list)
    adapter = Adapter()
    for module, parts in modules.items():
        place = places[module]
        assert place is not None
        alpha = _alpha(module, parts, alphas.get(_PREFIX.sub("", module)))
        if parts.keys() & set(FACTORS):
            if "magnitude" in parts:
                raise ValueError(f"{module} is a Kronecker product with magnitudes (DoRA)")
            if place.part is not None or place.layer in adapter:
                raise ValueError(f"{module} is a Kronecker product of a part of {place.layer}")
            factors = {name: parts[name] for name in parts if name != "alpha"}
            adapter[place.layer] = product_of(module, factors, alpha)
        else:
            found[place.layer].append((place, _piece(module, parts, alpha)))
    both = next((layer for layer in found if layer in adapter), None)
    if both is not None:
        raise ValueError(f"{both} has several updates of the same rows")
    ratio = _mlp_ratio(found)
    adapter |= {layer: _update(layer, pieces, ratio) for layer, pieces in found.items()}
    return dict(sorted(adapter.items(), key=_order)), ignored


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
        *_, number, part, layer = item[0].split(".")
        return TEXT_ENCODER, int(number), f"{part}.{layer}"
    blocks, number, rest = item[0].split(".", 2)
    return blocks, int(number), rest


def _piece(module: str, parts: Mapping[str, Tensor], alpha: float | None) -> Piece:
    if not {"down", "up"} <= parts.keys():
        raise ValueError(f"{module} has no {'down' if 'up' in parts else 'up'} matrix")
    down, up = parts["down"], parts["up"]
    is_product = down.dim() == up.dim() == 2 and len(down) == up.shape[1]
    if not is_product or not down.numel() or not up.numel():
        shapes = f"{list(down.shape)} and {list(up.shape)}"
        raise ValueError(f"{module} has matrices of shapes {shapes}, which are no low-rank update")
    norms = _magnitude(module, parts["magnitude"], len(up)) if "magnitude" in parts else None
    return Piece(0, down, up, 1.0 if alpha is None else alpha / len(down), norms)


def _magnitude(module: str, values: Tensor, outputs: int) -> Magnitude:
    """Return the magnitudes of ``outputs`` rows; ValueError if ``values`` are others."""
    if tuple(values.shape) not in ((outputs,), (outputs, 1)):
        raise ValueError(
            f"{module} has magnitudes (DoRA) of shape {list(values.shape)}; only those of its {outputs} rows "
            "are read, not of columns"
        )
    return Magnitude(values.flatten())


def _mlp_ratio(found: Mapping[str, list[tuple[Place, Piece]]]) -> float:
    """Return the MLP's width over the model's, from a layer that shows it."""
    for layer, pieces in found.items():
        for place, piece in pieces:
            inputs, outputs = piece.down.shape[1], len(piece.up)
            if layer.endswith("_mlp.0") or (place.part == 3):
                return outputs / inputs
            if layer.endswith("linear1") and place.part is None:
                return outputs / inputs - 3
            if layer.endswith("linear2"):
                return inputs / outputs - 1
    return _MLP_RATIO


def _update(layer: str, found: list[tuple[Place, Piece]], ratio: float) -> Update:
    """Return the update of ``layer`` with the pieces at their rows."""
    (place, piece), *others = found
    if place.part is None:
        if others:
            raise ValueError(f"{layer} has several updates of the same rows")
        return Update(len(piece.up), (piece,))
    hidden = piece.down.shape[1]
    mlp = round(ratio * hidden)
    outputs = 3 * hidden + (mlp if place.num_parts == 4 else 0)
    pieces = list[Piece]()
    for place, piece in sorted(
        found, key=lambda each: -1 if each[0].part is None else each[0].part
    ):
        if place.part is None or (pieces and pieces[-1].first == place.part * hidden):
            raise ValueError(f"{layer} has several updates of the same rows")
        first, end = part_rows(place, hidden, mlp)
        if piece.down.shape[1] != hidden or len(piece.up) != end - first:
            shapes = f"{list(piece.down.shape)} and {list(piece.up.shape)}"
            raise ValueError(f"part {place.part} of {layer} has matrices of shapes {shapes}")
        pieces.append(replace(piece, first=first))
    return Update(outputs, tuple(pieces))
