"""Metadata of LoRA files: kohya's keys and hashes, ModelSpec's, and peft's config for diffusers."""

from __future__ import annotations

import hashlib
import io
import json
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fluxtrain import __version__
from fluxtrain.adapter.layouts import DIFFUSERS_METADATA, Layout, parts_of
from fluxtrain.adapter.product import Product
from fluxtrain.adapter.updates import Adapter, is_dora, low_rank, ranks_and_alphas
from fluxtrain.model.adapted_layers import TEXT_ENCODER, is_clip
from fluxtrain.safetensors_writer import write

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
        found[DIFFUSERS_METADATA] = json.dumps(_peft_configs(adapter), sort_keys=True)
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


def _peft_configs(adapter: Adapter) -> dict[str, object]:
    """Return the settings of peft's LoraConfig, of each model, as diffusers writes them."""
    clip = {layer: update for layer, update in adapter.items() if is_clip(layer)}
    blocks = {layer: update for layer, update in adapter.items() if layer not in clip}
    found = {"transformer": blocks, TEXT_ENCODER: clip}
    return {
        f"{model}.{key}": value
        for model, layers in found.items()
        if layers
        for key, value in _peft_config(layers).items()
    }


def _peft_config(adapter: Adapter) -> dict[str, object]:
    """Return the settings of one model; alpha is the rank everywhere.

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


def dtype_of(tensors: Mapping[str, Tensor]) -> torch.dtype:
    """Return the type of most values in ``tensors``; those of scales and magnitudes are few."""
    counts = Counter[torch.dtype]()
    for tensor in tensors.values():
        counts[tensor.dtype] += tensor.numel()
    return counts.most_common(1)[0][0]
