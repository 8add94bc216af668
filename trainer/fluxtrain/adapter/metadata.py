"""Metadata of LoRA files: kohya's keys and hashes, ModelSpec's, and peft's config for diffusers."""

from __future__ import annotations

import hashlib
import io
import json
from collections import Counter
from collections.abc import Mapping

import torch
from torch import Tensor

from fluxtrain import __version__
from fluxtrain.adapter.layouts import DIFFUSERS_METADATA, Layout, parts_of
from fluxtrain.adapter.product import Product
from fluxtrain.adapter.updates import Adapter, is_dora, low_rank, ranks_and_alphas
from fluxtrain.safetensors_writer import write

Metadata = dict[str, str]
_LEGACY_OFFSET, _LEGACY_BYTES = 0x100000, 0x10000


def metadata_of(
    adapter: Adapter, layout: Layout, title: str, given: Mapping[str, str], is_dev: bool | None
) -> Metadata:
    """Return the metadata of a file; ``given`` is added, ``is_dev`` None if the model is unknown."""
    ranks, alphas = zip(*map(ranks_and_alphas, adapter.values()), strict=True)
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
        found[DIFFUSERS_METADATA] = json.dumps(_peft_config(adapter), sort_keys=True)
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
    """Return the settings of peft's LoraConfig as diffusers writes them; alpha is the rank everywhere."""
    ranks = {
        name: piece.rank
        for layer, update in low_rank(adapter).items()
        for name, piece in parts_of(layer, update)
    }
    rank = Counter(ranks.values()).most_common(1)[0][0]
    others = {f"^{name}": value for name, value in ranks.items() if value != rank}
    config: dict[str, object] = {
        "r": rank,
        "lora_alpha": rank,
        "rank_pattern": others,
        "alpha_pattern": others,
        "target_modules": sorted(ranks),
    }
    if is_dora(adapter):
        config["use_dora"] = True
    return {f"transformer.{key}": value for key, value in config.items()}


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
    config = {key.removeprefix("transformer."): value for key, value in values.items()}
    alpha, pattern = config.get("lora_alpha"), config.get("alpha_pattern") or {}
    if alpha is None:
        return {}
    modules = (
        name.removeprefix("transformer.") for name in tensors if name.endswith(".lora_A.weight")
    )
    names = [name.removesuffix(".lora_A.weight") for name in modules]
    return {name: float(_pattern_value(pattern, name, alpha)) for name in names}


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
