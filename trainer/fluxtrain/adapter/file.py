"""Reads and writes LoRA files, in the layouts that other tools read; what is read may come from anywhere.

kohya                   lora_unet_double_blocks_0_img_attn_qkv.lora_down.weight, .lora_up.weight, .alpha
diffusers, ai-toolkit   transformer.transformer_blocks.0.attn.to_q.lora_A.weight, .lora_B.weight
bfl                     diffusion_model.double_blocks.0.img_attn.qkv.lora_A.weight, .lora_B.weight

Layers of CLIP are lora_te1_text_model_… in kohya's layout, text_encoder.text_model.… in the rest, whose
readers know that name. A Kronecker product (LoKr) has .lokr_w1 or .lokr_w1_a and .lokr_w1_b, the same of
w2, and .alpha in kohya's layout and bfl's; the rest names parts of fused layers, to which it cannot be cut.
Magnitudes (DoRA) are .dora_scale, a column, in the same two, as LyCORIS writes them, and
.lora_magnitude_vector in diffusers', as peft does; ai-toolkit's has no name for them.

Without .alpha it is the rank, and the scale is in lora_B: tools disagree on files in which it is not. A
fused layer's pieces are stacked in kohya's and bfl's layouts; kohya's alpha then belongs to the sum of the
ranks, so that alpha / rank stays that of the training.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor

from fluxtrain import __version__
from fluxtrain.adapter.names import (
    BFL,
    DIFFUSERS,
    KOHYA,
    ONETRAINER,
    LayerName,
    bfl_key,
    diffusers_key,
    find,
    find_clip,
    is_of_clip,
    is_of_text_encoder,
    kohya_key,
    part_names,
    part_rows,
)
from fluxtrain.adapter.updates import (
    FACTORS,
    Adapter,
    AnyUpdate,
    Magnitude,
    Product,
    RowBlock,
    Update,
    is_dora,
    low_rank,
    num_parameters,
    product_of,
    ranks_and_alphas,
)
from fluxtrain.contract.run.adapter import AdapterLayout
from fluxtrain.errors import DataError, StorageError
from fluxtrain.model.layers import TEXT_ENCODER, is_clip
from fluxtrain.runtime.files import atomic_write
from fluxtrain.runtime.safetensors import open_safetensors, read_header, read_tensor, write

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


def _scales(name: str, piece: RowBlock) -> Iterator[tuple[str, Tensor]]:
    if piece.magnitude is not None:
        yield f"{name}.dora_scale", piece.magnitude.values[:, None]


def _require_place(layer: str, update: Update, layout: Layout) -> None:
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


def _in_peft(name: str, piece: RowBlock) -> Iterator[tuple[str, Tensor]]:
    yield f"{name}.lora_A.weight", piece.down
    yield f"{name}.lora_B.weight", piece.folded().up


def parts_of(layer: str, update: Update) -> Iterator[tuple[str, RowBlock]]:
    """Yield diffusers' layers that ``update`` changes, each with its piece; a fused piece is cut."""
    names = part_names(layer)
    if len(names) == 1:
        yield names[0], update.whole()
        return
    hidden = update.inputs
    for index, name in enumerate(names):
        place = LayerName(layer, index, len(names))
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
    found: dict[str, list[tuple[LayerName, RowBlock]]] = defaultdict(list)
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


def _piece(module: str, parts: Mapping[str, Tensor], alpha: float | None) -> RowBlock:
    if not {"down", "up"} <= parts.keys():
        raise ValueError(f"{module} has no {'down' if 'up' in parts else 'up'} matrix")
    down, up = parts["down"], parts["up"]
    is_product = down.dim() == up.dim() == 2 and len(down) == up.shape[1]
    if not is_product or not down.numel() or not up.numel():
        shapes = f"{list(down.shape)} and {list(up.shape)}"
        raise ValueError(f"{module} has matrices of shapes {shapes}, which are no low-rank update")
    norms = _magnitude(module, parts["magnitude"], len(up)) if "magnitude" in parts else None
    return RowBlock(0, down, up, 1.0 if alpha is None else alpha / len(down), norms)


def _magnitude(module: str, values: Tensor, outputs: int) -> Magnitude:
    """Return the magnitudes of ``outputs`` rows; ValueError if ``values`` are others."""
    if tuple(values.shape) not in ((outputs,), (outputs, 1)):
        raise ValueError(
            f"{module} has magnitudes (DoRA) of shape {list(values.shape)}; only those of its {outputs} rows "
            "are read, not of columns"
        )
    return Magnitude(values.flatten())


def _mlp_ratio(found: Mapping[str, list[tuple[LayerName, RowBlock]]]) -> float:
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


def _update(layer: str, found: list[tuple[LayerName, RowBlock]], ratio: float) -> Update:
    (place, piece), *others = found
    if place.part is None:
        if others:
            raise ValueError(f"{layer} has several updates of the same rows")
        return Update(len(piece.up), (piece,))
    hidden = piece.down.shape[1]
    mlp = round(ratio * hidden)
    outputs = 3 * hidden + (mlp if place.num_parts == 4 else 0)
    pieces = list[RowBlock]()
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


Metadata = dict[str, str]
_CLIP_PREFIX = f"{TEXT_ENCODER}.text_model."
_LEGACY_OFFSET, _LEGACY_BYTES = 0x100000, 0x10000


def metadata_of(
    adapter: Adapter, layout: Layout, title: str, given: Mapping[str, str], is_dev: bool | None
) -> Metadata:
    """Return the metadata of a file; ``given`` is added, ``is_dev`` None if the model is unknown."""
    blocks = [update for layer, update in adapter.items() if not is_clip(layer)]
    ranks, alphas = zip(*map(ranks_and_alphas, blocks or adapter.values()), strict=True)
    rank, alpha = (Counter(each).most_common(1)[0][0] for each in (ranks, alphas))
    is_product = any(isinstance(update, Product) for update in adapter.values())
    found = {
        "format": "pt",
        "software": json.dumps({"name": "fluxtrain", "version": __version__}),
        "modelspec.sai_model_spec": "1.0.1",
        "modelspec.implementation": "https://github.com/black-forest-labs/flux",
        "modelspec.title": title,
        "ss_base_model_version": "flux1",
        "ss_v2": "False",
        "ss_output_name": title,
        "ss_network_module": "lycoris.kohya" if is_product else "networks.lora_flux",
        "ss_network_dim": str(rank),
        "ss_network_alpha": str(alpha),
        "ss_network_args": json.dumps({"algo": "lokr"} if is_product else {}),
    }
    if is_dev is not None:
        found |= architecture(is_dev)
    if layout == "diffusers":
        configs = {
            f"{model}.{key}": value
            for model in ("transformer", TEXT_ENCODER)
            if (
                layers := {
                    it: adapter[it] for it in adapter if is_clip(it) == (model == TEXT_ENCODER)
                }
            )
            for key, value in _peft_config(layers).items()
        }
        found[DIFFUSERS_METADATA] = json.dumps(configs, sort_keys=True)
    return found | dict(given)


def architecture(is_dev: bool) -> Metadata:
    """Return the entries that name the model."""
    name = "dev" if is_dev else "schnell"
    return {"modelspec.architecture": f"flux-1-{name}/lora", "ss_model_type": "flux"}


def kept(metadata: Mapping[str, str]) -> Metadata:
    """Return what a converted file keeps of ``metadata``: kohya's and ModelSpec's entries."""
    entries = (item for item in metadata.items() if item[0].startswith(("ss_", "modelspec.")))
    return {key: value for key, value in entries if key != "modelspec.hash_sha256"}


def serialised(tensors: dict[str, Tensor], metadata: Mapping[str, str]) -> bytes:
    """Return the contents of a file; same input, same bytes."""
    file = io.BytesIO()
    write(file, dict(sorted(tensors.items())), dict(sorted(metadata.items())))
    return file.getvalue()


def with_hashes(tensors: dict[str, Tensor], metadata: Metadata) -> Metadata:
    """Return ``metadata`` with kohya's hashes: of all tensors, and of 64 KiB, the older kind."""
    kept = {key: value for key, value in metadata.items() if key.startswith("ss_")}
    content = serialised(tensors, kept)
    begin = 8 + int.from_bytes(content[:8], "little")
    legacy = content[_LEGACY_OFFSET : _LEGACY_OFFSET + _LEGACY_BYTES]
    return metadata | {
        "sshs_model_hash": hashlib.sha256(memoryview(content)[begin:]).hexdigest(),
        "sshs_legacy_hash": hashlib.sha256(legacy).hexdigest()[:8],
    }


def _peft_config(adapter: Adapter) -> dict[str, object]:
    """Return the settings of peft's LoraConfig for one model, as diffusers writes them: alpha is the rank.

    CLIP's layers are named without ``text_model``, which some versions of transformers do not have.
    """
    ranks = {
        name.removeprefix(_CLIP_PREFIX): piece.rank
        for layer, update in low_rank(adapter).items()
        for name, piece in parts_of(layer, update)
    }
    rank = Counter(ranks.values()).most_common(1)[0][0]
    start = "" if any(map(is_clip, adapter)) else "^"
    others = {f"{start}{name}": value for name, value in ranks.items() if value != rank}
    config: dict[str, object] = {
        "r": rank,
        "lora_alpha": rank,
        "rank_pattern": others,
        "alpha_pattern": others,
        "target_modules": sorted(ranks),
    }
    if is_dora(adapter):
        config["use_dora"] = True
    return config


def alphas_in(metadata: Mapping[str, str], tensors: Mapping[str, Tensor]) -> dict[str, float]:
    """Return alpha of each of diffusers' modules, if the file's ``metadata`` has peft's config.

    Raises ValueError if it is malformed.
    """
    text = metadata.get(DIFFUSERS_METADATA)
    if text is None:
        return {}
    values = json.loads(text)
    if not isinstance(values, dict):
        raise ValueError(f"{DIFFUSERS_METADATA} is not a mapping")
    found = dict[str, float]()
    for model in ("transformer", TEXT_ENCODER):
        found |= _alphas_of(model, values, tensors)
    return found


def _alphas_of(
    model: str, values: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> dict[str, float]:
    """Return alpha of the modules of ``model``; those of CLIP with its name before theirs."""
    prefix, suffix = f"{model}.", ".lora_A.weight"
    alpha = values.get(f"{prefix}lora_alpha")
    pattern = values.get(f"{prefix}alpha_pattern") or {}
    if model == "transformer":  # as peft's own file, without a model
        alpha = values.get("lora_alpha", alpha)
        pattern = values.get("alpha_pattern") or pattern
    if alpha is None:
        return {}
    of_model = (name for name in tensors if name.endswith(suffix))
    names = [
        name.removesuffix(suffix) for name in of_model if is_clip(name) == (model != "transformer")
    ]
    return {
        each if is_clip(each) else each.removeprefix(prefix): float(
            _pattern_value(pattern, each.removeprefix(prefix), alpha)
        )
        for each in names
    }


def _pattern_value(pattern: Mapping[str, float], name: str, default: float) -> float:
    """Return the value of the pattern that ``name`` ends with, or equals after a ``^``."""
    for key, value in pattern.items():
        plain = key.removeprefix("^")
        if name == plain or (plain == key and name.endswith(f".{plain}")):
            return value
    return default


DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
MAX_BYTES = 1 << 33
"""Of a LoRA: one of rank 512 of all layers has some 5 GB."""


@dataclass(frozen=True)
class AdapterFile:
    """The contents of a LoRA file."""

    path: Path
    adapter: Adapter
    metadata: Metadata = field(default_factory=dict)
    dtype: torch.dtype = torch.float32
    ignored: tuple[str, ...] = ()
    """Tensors of text encoders, but of no layer of CLIP-L: they are not read."""

    @property
    def left_out(self) -> str:
        """Return how many tensors are ``ignored``, and what they are of; "" if there are none."""
        unknown = sum(map(is_of_clip, self.ignored))
        counts = {
            "of other text encoders": len(self.ignored) - unknown,
            "of text encoder 1, of layers that CLIP-L does not have": unknown,
        }
        return " and ".join(f"{count} tensors {of}" for of, count in counts.items() if count)


def read_adapter(path: Path) -> AdapterFile:
    """Return the contents of ``path``, in any layout; DataError if it is no LoRA of FLUX's blocks."""
    spans = read_header(path)
    total = sum(span.num_bytes for span in spans.values())
    if total > MAX_BYTES:
        raise DataError(f"{path}: {total} bytes, at most {MAX_BYTES} are read of a LoRA")
    with open_safetensors(path, "a LoRA") as file:
        metadata = dict(file.metadata() or {})
    tensors = {name: read_tensor(path, span, max_bytes=None) for name, span in spans.items()}
    try:
        adapter, ignored = from_tensors(tensors, alphas_in(metadata, tensors))
    except UnknownKeysError as error:
        raise DataError(f"{path}: not a LoRA of FLUX's blocks; it has {error}") from None
    except (ValueError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
        raise DataError(f"{path}: not a valid LoRA ({error})") from None
    if not adapter:
        raise DataError(f"{path}: it has no LoRA of the transformer or of CLIP-L")
    _require_finite(path, tensors)
    counts = Counter[torch.dtype]()
    for tensor in tensors.values():
        counts[tensor.dtype] += tensor.numel()
    return AdapterFile(path, adapter, metadata, counts.most_common(1)[0][0], tuple(ignored))


def write_adapter(
    path: Path,
    adapter: Adapter,
    layout: Layout,
    dtype: torch.dtype,
    metadata: Mapping[str, str] | None = None,
    is_dev: bool | None = None,
) -> int:
    """Write ``adapter`` to ``path``, whole or not at all, and return its bytes; same input, same bytes.

    ``metadata`` is added to the file's own. Raises DataError if a value is not finite or too large for
    ``dtype``, StorageError if it cannot be written.
    """
    try:
        tensors = to_tensors(adapter, layout, dtype)
    except ValueError as error:
        raise DataError(f"{path}: {error}") from None
    _require_finite(path, tensors)
    own = metadata_of(adapter, layout, path.stem, metadata or {}, is_dev)
    content = serialised(tensors, with_hashes(tensors, own))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(path) as partial:
            partial.write_bytes(content)
    except OSError as error:
        raise StorageError(f"{path}: cannot be written ({error.strerror})") from None
    return len(content)


def _require_finite(path: Path, tensors: Mapping[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        if not torch.isfinite(tensor).all():
            raise DataError(
                f"{path}: {name} is not finite in {str(tensor.dtype).removeprefix('torch.')}"
            )


_SHOWN = (
    "modelspec.title",
    "modelspec.architecture",
    "ss_base_model_version",
    "ss_sd_model_name",
    "ss_steps",
    "ss_learning_rate",
    "ss_optimizer",
)


def describe(file: AdapterFile) -> Iterator[tuple[str, str]]:
    """Yield names and values: layers, ranks, scales, parameters, the largest update, metadata."""
    updates = low_rank(file.adapter).values()
    pieces = [piece for update in updates for piece in update.pieces]
    products = [each for each in file.adapter.values() if isinstance(each, Product)]
    blocks = Counter(layer.partition(".")[0] for layer in file.adapter)
    yield "layers", ", ".join(f"{count} of {name}" for name, count in sorted(blocks.items()))
    if products:
        yield "products", f"{len(products)} layers have a Kronecker product (LoKr)"
    decomposed = sum(update.is_dora for update in updates)
    if decomposed:
        yield "magnitudes", f"{decomposed} layers have norms of their rows (DoRA)"
    split = sum(len(update.pieces) > 1 for update in updates)
    if split:
        yield "split", f"{split} layers have an adapter for each of their parts"
    matrices: list[RowBlock | Product] = [*pieces, *products]
    yield "rank", _counted(Counter(str(each.rank or "full") for each in matrices))
    yield "alpha / rank", _counted(Counter(f"{each.scale:g}" for each in matrices))
    yield "data type", str(file.dtype).removeprefix("torch.")
    yield "parameters", f"{num_parameters(file.adapter.values()):,}"
    norms = {layer: update.norm() for layer, update in file.adapter.items()}
    layer = max(norms, key=norms.__getitem__)
    yield "largest norm", f"{norms[layer]:.4g} of {layer}"
    if file.left_out:
        yield "left out", file.left_out
    for key in _SHOWN:
        if key in file.metadata:
            yield key.rpartition(".")[2].removeprefix("ss_"), file.metadata[key]


def _counted(counts: Counter[str]) -> str:
    if len(counts) == 1:
        return next(iter(counts))
    return ", ".join(f"{value} ({count} matrices)" for value, count in counts.most_common())
