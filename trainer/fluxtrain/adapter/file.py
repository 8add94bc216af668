"""Reads and writes LoRA files, in the layouts that other tools read; what is read may come from anywhere.

kohya                   lora_unet_double_blocks_0_img_attn_qkv.lora_down.weight, .lora_up.weight, .alpha
diffusers, ai-toolkit   transformer.transformer_blocks.0.attn.to_q.lora_A.weight, .lora_B.weight
bfl                     diffusion_model.double_blocks.0.img_attn.qkv.lora_A.weight, .lora_B.weight

Layers of CLIP are lora_te1_text_model_… in kohya's layout, text_encoder.text_model.… in the rest, whose
readers know that name.

LyCORIS' other kinds are .lokr_w1 or .lokr_w1_a and .lokr_w1_b, the same of w2 (a Kronecker product),
.hada_w1_a, … (a Hadamard product) or .diff, and .alpha, on whole layers in kohya's layout and bfl's. The rest
names parts of fused layers: ai-toolkit's has those that were read of parts. Biases are .diff_b, new values of
norms .set_weight. Magnitudes (DoRA) are .dora_scale, a column or a row, in kohya's and bfl's, as LyCORIS
writes them, and .lora_magnitude_vector in diffusers', as peft does; ai-toolkit's has no name for them.

Without .alpha it is the rank, and the scale is in lora_B: tools disagree on files in which it is not. A
fused layer's pieces are stacked in kohya's and bfl's layouts; kohya's alpha then belongs to the sum of the
ranks, so that alpha / rank stays that of the training.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import get_args

import torch
from torch import Tensor

from fluxtrain import __version__
from fluxtrain.adapter.names import (
    LayerName,
    bfl_key,
    diffusers_key,
    in_clip,
    is_of_text_encoder,
    is_swapped,
    kohya_key,
    part_names,
    part_rows,
)
from fluxtrain.adapter.reading import (
    AGAIN,
    DIFFUSERS_METADATA,
    Contents,
    Metadata,
    base_of,
    dialect,
    is_beyond,
    is_known,
    of_metadata,
    read_contents,
    require_finite,
)
from fluxtrain.adapter.updates import (
    Adapter,
    AnyUpdate,
    Hadamard,
    Magnitude,
    Matrix,
    Patch,
    Patches,
    Product,
    RowBlock,
    Update,
    Vector,
    is_dora,
    kind_of,
    low_rank,
    lycoris_name,
    num_parameters,
    ranks_and_alphas,
)
from fluxtrain.contract.run.adapter import AdapterLayout
from fluxtrain.errors import DataError
from fluxtrain.model.layers import BLOCKS, TEXT_ENCODER, is_clip
from fluxtrain.runtime.files import atomic_write, writing
from fluxtrain.runtime.progress import first_of
from fluxtrain.runtime.safetensors import (
    ADAPTER_USE,
    ALL_DTYPES,
    Kind,
    identify,
    is_adapter,
    kind_of_file,
    open_safetensors,
    read_header,
    write,
)

Layout = AdapterLayout
LAYOUTS: tuple[Layout, ...] = get_args(AdapterLayout)

_READERS: dict[Layout, str] = {
    "kohya": "ComfyUI, Forge, InvokeAI and diffusers",
    "diffusers": "diffusers, peft, ComfyUI, Forge and InvokeAI",
    "ai-toolkit": "diffusers, ComfyUI, Forge and InvokeAI",
    "bfl": "ComfyUI, Forge and InvokeAI, not diffusers",
}


def readers(adapter: Adapter, layout: Layout) -> str:
    """Return the programs that read ``adapter`` as it was trained in ``layout``."""
    if len(low_rank(adapter)) < len(adapter):
        return "ComfyUI, not diffusers, which has no LyCORIS' products and differences"
    if not is_dora(adapter):
        return _READERS[layout]
    if layout == "diffusers":
        return "diffusers and peft; merge its magnitudes (DoRA) for others"
    return (
        "LyCORIS' tools, not diffusers (--to diffusers is); merge its magnitudes (DoRA) for others"
    )


DORA_LAYOUTS: tuple[Layout, ...] = ("kohya", "diffusers", "bfl")
"""Layouts that have magnitudes."""
PRODUCT_LAYOUTS: tuple[Layout, ...] = ("kohya", "bfl")
"""Layouts that name whole layers, so that they have LyCORIS' other kinds of updates."""

_EXACT = (".alpha", ".dora_scale", ".lora_magnitude_vector")
"""Endings of tensors that are float32 in any file."""


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
    if isinstance(update, Vector):
        if layout not in PRODUCT_LAYOUTS:
            raise ValueError(_no_place(layout, f"{layer}, a vector"))
        module, _, tensor = layer.rpartition(".")
        kind = "set_weight" if update.is_new else {"scale": "diff"}.get(tensor, "diff_b")
        yield f"{_whole_key(module, layout)}.{kind}", update.values
        return
    if not isinstance(update, Update):
        whole = (
            update if isinstance(update, Patches) else Patches(update.outputs, (Patch(0, update),))
        )
        for patch in whole.patches:
            yield from _of_patch(layer, whole, patch, layout)
        return
    _require_place(layer, update, layout)
    if layout in PRODUCT_LAYOUTS:
        yield from _of_piece(_whole_key(layer, layout), update.whole(), layout)
        return
    for name, piece in parts_of(layer, update):
        yield from _in_peft(diffusers_key(name), piece)
        if piece.magnitude is not None:
            yield f"{diffusers_key(name)}.lora_magnitude_vector", piece.magnitude.values


def _whole_key(layer: str, layout: Layout) -> str:
    return kohya_key(layer) if layout == "kohya" else bfl_key(layer)


def _of_piece(name: str, piece: RowBlock, layout: Layout) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a low-rank update of all rows of a layer."""
    if layout == "kohya":
        yield f"{name}.lora_down.weight", piece.down
        yield f"{name}.lora_up.weight", piece.up
        yield f"{name}.alpha", torch.tensor(piece.scale * piece.rank, dtype=torch.float32)
    else:
        yield from _in_peft(name, piece)
    if piece.magnitude is not None:
        yield from _scales(name, piece.magnitude)


def _scales(name: str, magnitude: Magnitude) -> Iterator[tuple[str, Tensor]]:
    values = magnitude.values
    yield f"{name}.dora_scale", values[None] if magnitude.is_of_columns else values[:, None]


def _require_place(layer: str, update: Update, layout: Layout) -> None:
    if not update.is_dora:
        return
    if layout not in DORA_LAYOUTS:
        raise ValueError(
            f"layout {layout} has no name for magnitudes (DoRA): {', '.join(DORA_LAYOUTS)} do; name one"
        )
    if any(piece.magnitude is not None and piece.magnitude.is_change for piece in update.pieces):
        raise ValueError(
            f"{layer} has changes of magnitudes (DoRA), which are of its model's weights; the files in "
            "adapters/ of the run have the magnitudes"
        )


def _of_patch(
    layer: str, whole: Patches, patch: Patch, layout: Layout
) -> Iterator[tuple[str, Tensor]]:
    matrix, rows = patch.matrix, (patch.first, patch.end)
    if layout in PRODUCT_LAYOUTS:
        has_place = rows == (0, whole.outputs) and not patch.is_swapped
        names = [_whole_key(layer, layout)] if has_place else []
    else:
        parts = _rows(layer, whole) if layout == "ai-toolkit" and patch.magnitude is None else ()
        names = [diffusers_key(name) for name, *own in parts if tuple(own) == rows]
    if not names or (layout == "ai-toolkit" and patch.is_swapped != is_swapped(layer)):
        raise ValueError(_no_place(layout, f"{layer}, {kind_of(whole)}"))
    (name,) = names
    if isinstance(matrix, Update):
        yield from _of_piece(name, matrix.whole(), layout)
    else:
        yield from ((f"{name}.{factor}", tensor) for factor, tensor in matrix.tensors.items())
        if matrix.alpha is not None:
            yield f"{name}.alpha", torch.tensor(matrix.alpha, dtype=torch.float32)
    if patch.magnitude is not None:
        yield from _scales(name, patch.magnitude)


def _no_place(layout: Layout, what: str) -> str:
    return (
        f"layout {layout} has no place for {what}: {', '.join(PRODUCT_LAYOUTS)} have one for whole layers, "
        "ai-toolkit for parts; fluxtrain adapter resize makes a LoRA of matrices"
    )


def _in_peft(name: str, piece: RowBlock) -> Iterator[tuple[str, Tensor]]:
    yield f"{name}.lora_A.weight", piece.down
    yield f"{name}.lora_B.weight", piece.folded().up


def _rows(layer: str, update: Update | Patches) -> Iterator[tuple[str, int, int]]:
    """Yield diffusers' parts of ``layer``, each with its first row and the row after its last one."""
    names, hidden = part_names(layer), update.inputs
    if len(names) == 1:
        yield names[0], 0, update.outputs
        return
    for index, name in enumerate(names):
        place = LayerName(layer, index, len(names))
        yield name, *part_rows(place, hidden, update.outputs - 3 * hidden)


def parts_of(layer: str, update: Update) -> Iterator[tuple[str, RowBlock]]:
    """Yield diffusers' layers that ``update`` changes, each with its piece; a fused piece is cut."""
    if len(part_names(layer)) == 1:
        piece = update.whole()
        yield part_names(layer)[0], piece.swapped() if is_swapped(layer) else piece
        return
    for name, first, end in _rows(layer, update):
        for piece in update.pieces:
            if piece.first <= first and end <= piece.end:
                yield name, piece.rows(first, end)


_CLIP_PREFIX = f"{TEXT_ENCODER}.text_model."
_LEGACY_OFFSET, _LEGACY_BYTES = 0x100000, 0x10000


def metadata_of(
    adapter: Adapter, layout: Layout, title: str, given: Mapping[str, str], is_dev: bool | None
) -> Metadata:
    """Return the metadata of a file; ``given`` is added, ``is_dev`` None if the model is unknown."""
    blocks = [update for layer, update in adapter.items() if not is_clip(layer)]
    ranks, alphas = zip(*map(ranks_and_alphas, blocks or adapter.values()), strict=True)
    rank, alpha = (Counter(each).most_common(1)[0][0] for each in (ranks, alphas))
    others = (update for update in adapter.values() if not isinstance(update, Update | Vector))
    algorithm = next(map(lycoris_name, others), None)
    found = {
        "format": "pt",
        "software": json.dumps({"name": "fluxtrain", "version": __version__}),
        "modelspec.sai_model_spec": "1.0.1",
        "modelspec.implementation": "https://github.com/black-forest-labs/flux",
        "modelspec.title": title,
        "ss_base_model_version": "flux1",
        "ss_v2": "False",
        "ss_output_name": title,
        "ss_network_module": "lycoris.kohya" if algorithm else "networks.lora_flux",
        "ss_network_dim": str(rank),
        "ss_network_alpha": str(alpha),
        "ss_network_args": json.dumps({"algo": algorithm} if algorithm else {}),
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


DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@dataclass(frozen=True)
class AdapterFile:
    """The contents of a LoRA file."""

    path: Path
    adapter: Adapter
    metadata: Metadata = field(default_factory=dict)
    dtype: torch.dtype = torch.float32
    contents: Contents = field(default_factory=Contents)
    skips_unknown: bool = False
    """Whether what is not known, or does not fit a model, is left out."""

    @staticmethod
    def of(path: Path, contents: Contents) -> AdapterFile:
        return AdapterFile(path, contents.adapter, contents.metadata, contents.dtype, contents)

    @property
    def skipped(self) -> str:
        """Return a sentence on the keys that are not known, "" without them."""
        unknown = self.contents.unknown
        text = f"{len(unknown)} unknown keys are left out: {first_of(unknown)}"
        return f"{self.path}: {text}" if unknown else ""

    @property
    def left_out(self) -> str:
        """Return how many tensors of text encoders are not read, and what they are of; "" for none."""
        ignored = self.contents.ignored
        unknown = sum(bool(in_clip(name)) for name in ignored)
        counts = {
            "of other text encoders": len(ignored) - unknown,
            "of text encoder 1, of layers that CLIP-L does not have": unknown,
        }
        return " and ".join(f"{count} tensors {of}" for of, count in counts.items() if count)


def read_adapter(path: Path, skip_unknown: bool = False) -> AdapterFile:
    """Return the contents of ``path``, in any dialect; DataError if it is no LoRA of FLUX's transformer.

    Raises DataError for tensors that are not known too, unless ``skip_unknown`` is set.
    """
    spans = read_header(path, ALL_DTYPES)
    is_of_others = not any(map(is_known, spans)) and not all(map(is_of_text_encoder, spans))
    if is_of_others or (spans and not is_adapter(spans)) or _is_other(kind_of_file(spans)):
        raise DataError(f"{path}: {_no_lora(spans)}")
    file = AdapterFile.of(path, read_contents(path, spans))
    unknown, faults, other = file.contents.unknown, file.contents.faults, file.contents.other
    if other:
        raise DataError(f"{path}: {_no_lora(spans, other)}")
    if faults:
        raise DataError(f"{path}: not a valid LoRA ({first_of(faults)}); {AGAIN}")
    if unknown and not (skip_unknown and file.adapter):
        keys = "key is" if len(unknown) == 1 else "keys are"
        text = f"{len(unknown)} {keys} unknown: {first_of(unknown)}"
        advice = f"{SKIP} leaves them out and takes the rest"
        raise DataError(
            f"{path}: {text}; {advice if file.adapter else f'no layer is left, {_ADVICE}'}"
        )
    if not file.adapter:
        raise DataError(f"{path}: it has no LoRA of the transformer or of CLIP-L; {_ADVICE}")
    return replace(file, skips_unknown=skip_unknown)


SKIP, _ADVICE = "--skip-unknown", "name a LoRA of FLUX.1"
_UNKNOWN = "adapters of an unknown model or tool"


def _no_lora(names: Collection[str], other: str = "") -> str:
    holds = f"; it holds a LoRA of {other}" if other else identify(names)
    holds = f"; it holds {_UNKNOWN}" if holds.endswith(ADAPTER_USE) else holds
    return f"not a LoRA of FLUX's blocks; it has {first_of(sorted(names))}{holds}; {_ADVICE}"


def _is_other(kind: Kind | None) -> bool:
    """Return whether ``kind`` is a LoRA of another model."""
    return kind is not None and kind.text.startswith("a LoRA of ")


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
    require_finite(path, tensors)
    own = metadata_of(adapter, layout, path.stem, metadata or {}, is_dev)
    content = serialised(tensors, with_hashes(tensors, own))
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(path) as partial:
            partial.write_bytes(content)
    return len(content)


def describe_file(path: Path) -> Iterator[tuple[str, str]]:
    """Yield names and values of what the safetensors file ``path`` holds, whatever it is.

    Raises DataError if it is no whole safetensors file.
    """
    with open_safetensors(path, "a LoRA") as file:
        metadata = dict(file.metadata() or {})
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
        shapes = {name: each.get_shape() for name, each in slices.items()}
        types = Counter(each.get_dtype() for each in slices.values())
    kind, reason = kind_of_file(shapes), ""
    num_known = sum(map(is_known, shapes))
    if is_adapter(shapes) and num_known and not _is_other(kind):
        try:
            own = AdapterFile.of(path, read_contents(path, read_header(path, ALL_DTYPES)))
        except DataError as error:
            reason = str(error).removeprefix(f"{path}: ")
        else:
            reason, other = first_of(own.contents.faults), own.contents.other
            if own.adapter and not other:
                yield from describe(own)
                return
            kind, reason = (Kind(f"a LoRA of {other}"), "") if other else (kind, reason)
    if kind is not None and kind.use == ADAPTER_USE:
        of = _UNKNOWN
        if all(map(is_of_text_encoder, shapes)):
            of = "a LoRA of text encoders alone"
        kind = Kind("a damaged LoRA of FLUX.1" if reason and num_known else of)
    yield "holds", kind.text if kind else "nothing that is known" if shapes else "no tensors"
    yield "tensors", f"{len(shapes)}, {first_of(sorted(shapes))}"
    if num_known:
        yield "known", f"{num_known} of them are named as FLUX.1's"
    yield "data type", _counted(Counter(types), "tensors")
    yield "parameters", f"{sum(map(math.prod, shapes.values())):,}"
    if reason:
        yield "damaged", reason
    yield from of_metadata(metadata)
    yield "use", kind.use.removesuffix(" takes") if kind and not reason else "none here"


def describe(file: AdapterFile) -> Iterator[tuple[str, str]]:
    """Yield names and values: dialect, layers, ranks, the largest update, metadata, and what can be done."""
    adapter, contents = file.adapter, file.contents
    updates = low_rank(adapter).values()
    whole = [each for each in adapter.values() if isinstance(each, Patches)]
    parts = [*adapter.values(), *(patch.matrix for each in whole for patch in each.patches)]
    matrices = [each for each in parts if isinstance(each, Matrix)]
    pieces = [piece for each in parts if isinstance(each, Update) for piece in each.pieces]
    blocks = Counter(layer.partition(".")[0] for layer in adapter)
    if contents.dialects:
        yield "dialect", dialect(contents)
    yield "holds", _counted(Counter(map(kind_of, adapter.values())), "layers")
    yield "layers", ", ".join(f"{count} of {name}" for name, count in sorted(blocks.items()))
    products = sum(isinstance(each, Product) for each in matrices)
    if products:
        yield "products", f"{products} layers have a Kronecker product (LoKr)"
    decomposed = sum(is_dora({layer: each}) for layer, each in adapter.items())
    if decomposed:
        has_columns = any(
            p.magnitude and p.magnitude.is_of_columns for each in whole for p in each.patches
        )
        yield (
            "magnitudes",
            f"{decomposed} layers have norms of their {'columns' if has_columns else 'rows'} (DoRA)",
        )
    split = sum(len(update.pieces) > 1 for update in updates)
    split += sum(len(each.patches) > 1 for each in whole)
    if split:
        yield "split", f"{split} layers have an adapter for each of their parts"
    both: list[RowBlock | Matrix] = [*pieces, *matrices]
    if both:
        yield "rank", _counted(Counter(str(each.rank or "full") for each in both))
        yield "alpha / rank", _counted(Counter(f"{each.scale:g}" for each in both))
    yield "data type", str(file.dtype).removeprefix("torch.")
    yield "parameters", f"{num_parameters(adapter.values()):,}"
    norms = {layer: update.norm() for layer, update in adapter.items()}
    layer = max(norms, key=norms.__getitem__)
    yield "largest norm", f"{norms[layer]:.4g} of {layer}" if norms[layer] else "0: no effect"
    if file.left_out:
        yield "left out", file.left_out
    absent = [layer for layer in adapter if is_beyond(layer)]
    told = {"unknown": contents.unknown, "damaged": contents.faults, "no such block": absent}
    for name, items in told.items():
        if items:
            yield name, f"{len(items)}: {first_of(items)}"
    if not all(map(is_clip, adapter)):
        yield "base model", base_of(adapter)
    own = {"software": "fluxtrain"} if file.path.is_dir() else {}
    yield from of_metadata(own | dict(file.metadata))
    yield "use", _uses(file)


def _uses(file: AdapterFile) -> str:
    """Return the commands that take the layers of ``file``, and the layouts that have a place for them."""
    if file.contents.faults:
        return "none: it is damaged"
    layouts = []
    for layout in LAYOUTS:
        try:
            all(True for item in file.adapter.items() for _ in _named(*item, layout))
        except ValueError:
            continue
        layouts.append(layout)
    known = [f"convert to {', '.join(layouts)}"] if layouts else []
    known += ["sample"] if all(map(is_clip, file.adapter)) else ["merge", "sample"]
    known += ["resize"] * (not is_dora(file.adapter))
    known += _begins(file.adapter) if layouts else []
    return ", ".join(known) + (f", with {SKIP}" if file.contents.unknown else "")


def _begins(adapter: Adapter) -> Iterator[str]:
    """Yield the field that begins a training with ``adapter``, if one can."""
    matrices = {name: it for name, it in adapter.items() if it.inputs}
    blocks = {name: it for name, it in matrices.items() if name.startswith(BLOCKS)}
    clip = {name: it for name, it in matrices.items() if is_clip(name)}
    kinds = {(type(it), is_dora({name: it})) for name, it in (blocks or clip).items()}
    if len(kinds) == 1 and kinds <= (_KINDS if blocks else {(Update, False)}):
        is_all = len(blocks | clip) == len(adapter)
        yield "adapter.initial" if is_all else "adapter.initial with skip_unknown"


_KINDS = {(Update, False), (Update, True), (Product, False), (Hadamard, False)}
"""Updates that a training can begin with, and whether they have magnitudes."""


def _counted(counts: Counter[str], of: str = "matrices") -> str:
    if len(counts) == 1:
        return next(iter(counts))
    return ", ".join(f"{value} ({count} {of})" for value, count in counts.most_common())
