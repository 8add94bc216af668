"""Loads a text encoder from a single file: all its weights, without transformers' config.

| file                 | tensors                                          | ignored                       |
|----------------------|--------------------------------------------------|-------------------------------|
| t5xxl_fp16, _bf16 .. | shared. or encoder.embed_tokens., encoder.block. | the second copy of shared.    |
| clip_l               | text_model., or the same without it              | position_ids, text_projection |

The config follows from the shapes; the rest is as in FLUX's encoders: T5 1.1's gated GELU, CLIP's quick
GELU and 64 channels per head. Weights are cast to the run's dtype as they are
read; those in fp8 may have scales (`fluxtrain.scaled_fp8`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from fluxtrain.errors import DataError
from fluxtrain.safetensors_file import open_safetensors, read_shapes
from fluxtrain.scaled_fp8 import FP8, is_beside, require_scales, scales_of, unscaled

_Shapes = dict[str, list[int]]

_SHARED, _COPY = "shared.weight", "encoder.embed_tokens.weight"
_PREFIX = "text_model."
_UNUSED = (f"{_PREFIX}embeddings.position_ids", "embeddings.position_ids", "text_projection.weight")
_HEAD_DIM = 64
_T5, _CLIP = "T5 encoder", "CLIP text encoder"
_MAX_FAULTS_SHOWN = 3


def check_file(path: Path, kind: str) -> None:
    """Raise DataError if ``path`` is not of a text encoder of ``kind``, t5 or clip, by its header."""
    shapes = _shapes(path)
    with safe_open(path, framework="pt") as file:
        _require_scales(path, file)
    if kind == "t5":
        _make_config(path, _T5, lambda: _t5_sizes(shapes, _shared_of(shapes)))
    else:
        _make_config(path, _CLIP, lambda: _clip_sizes(shapes, _prefix_of(shapes)))


def load_t5_file(path: Path, tokenizer: Any, dtype: torch.dtype) -> Any:
    """Return transformers' T5EncoderModel with the weights of ``path``, in ``dtype``.

    Raises DataError if it is missing, damaged or another model's, or if ``tokenizer`` is another model's.
    """
    from transformers import T5Config, T5EncoderModel

    shapes = _shapes(path)
    shared = _shared_of(shapes)
    config = _make_config(path, _T5, lambda: T5Config(**_t5_sizes(shapes, shared)))
    _check_tokenizer(path, tokenizer, config.vocab_size)
    names = {
        _SHARED if name == shared else name: name
        for name in shapes
        if name != _COPY or name == shared
    }
    if _COPY in shapes and shared == _SHARED:
        _require_one_embedding(path)
    return _load(path, T5EncoderModel, config, names, shapes, dtype)


def load_clip_file(path: Path, tokenizer: Any, dtype: torch.dtype) -> Any:
    """Return transformers' CLIPTextModel with the weights of ``path``, in ``dtype``.

    The pooled vector is the state at the first end token of ``tokenizer``. Raises DataError if the
    file is missing, damaged or another model's, or if ``tokenizer`` is another model's.
    """
    from transformers import CLIPTextConfig, CLIPTextModel

    shapes = _shapes(path)
    prefix = _prefix_of(shapes)
    config = _make_config(
        path,
        _CLIP,
        lambda: CLIPTextConfig(
            **_clip_sizes(shapes, prefix),
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,  # the published config has 2, which is not CLIP's
            pad_token_id=tokenizer.pad_token_id,
        ),
    )
    _check_tokenizer(path, tokenizer, config.vocab_size)
    names = {name if prefix else f"{_PREFIX}{name}": name for name in shapes if name not in _UNUSED}
    return _load(path, CLIPTextModel, config, names, shapes, dtype)


def _shapes(path: Path) -> _Shapes:
    """Return the shape of every tensor of ``path``; DataError if it is not a complete safetensors file."""
    with open_safetensors(path, "a text encoder") as file:
        return {name: shape for name, shape in read_shapes(file).items() if not is_beside(name)}


def _make_config(path: Path, kind: str, make: Callable[[], Any]) -> Any:
    """Return ``make()``; DataError if the shapes are not those of a ``kind``."""
    try:
        return make()
    except KeyError as error:
        raise DataError(f"{path}: not a {kind}; tensor {error.args[0]} is missing") from None
    except (ValueError, IndexError, ArithmeticError) as error:
        raise DataError(f"{path}: not a {kind} ({error})") from None


def _shared_of(shapes: _Shapes) -> str:
    return _SHARED if _SHARED in shapes else _COPY


def _prefix_of(shapes: _Shapes) -> str:
    return _PREFIX if any(name.startswith(_PREFIX) for name in shapes) else ""


def _t5_sizes(shapes: _Shapes, shared: str) -> dict[str, Any]:
    first = "encoder.block.0.layer"
    vocabulary, width = shapes[shared]
    buckets, heads = shapes[f"{first}.0.SelfAttention.relative_attention_bias.weight"]
    return {
        "vocab_size": vocabulary,
        "d_model": width,
        "d_kv": shapes[f"{first}.0.SelfAttention.q.weight"][0] // heads,
        "d_ff": shapes[f"{first}.1.DenseReluDense.wi_0.weight"][0],
        "num_layers": _count(shapes, "encoder.block."),
        "num_heads": heads,
        "relative_attention_num_buckets": buckets,
        "feed_forward_proj": "gated-gelu",
    }


def _clip_sizes(shapes: _Shapes, prefix: str) -> dict[str, Any]:
    vocabulary, width = shapes[f"{prefix}embeddings.token_embedding.weight"]
    if width % _HEAD_DIM:
        raise ValueError(f"it is {width} wide, which {_HEAD_DIM} channels per head do not divide")
    return {
        "vocab_size": vocabulary,
        "hidden_size": width,
        "intermediate_size": shapes[f"{prefix}encoder.layers.0.mlp.fc1.weight"][0],
        "num_hidden_layers": _count(shapes, f"{prefix}encoder.layers."),
        "num_attention_heads": width // _HEAD_DIM,
        "max_position_embeddings": shapes[f"{prefix}embeddings.position_embedding.weight"][0],
        "hidden_act": "quick_gelu",
    }


def _count(shapes: Iterable[str], blocks: str) -> int:
    return len({name[len(blocks) :].split(".")[0] for name in shapes if name.startswith(blocks)})


def _check_tokenizer(path: Path, tokenizer: Any, vocabulary: int) -> None:
    """Raise DataError if the tokenizer has tokens without an embedding, or no end token."""
    if len(tokenizer) > vocabulary:
        raise DataError(
            f"{tokenizer.name_or_path}: has {len(tokenizer)} tokens, {path} only {vocabulary}: "
            "this is another model's tokenizer"
        )
    if tokenizer.eos_token_id is None:
        raise DataError(f"{tokenizer.name_or_path}: has no end token, which {path} needs")


def _require_one_embedding(path: Path) -> None:
    """Raise DataError if the two copies of T5's embedding differ: either may be the trained one."""
    with safe_open(path, framework="pt") as file:
        if not torch.equal(file.get_tensor(_SHARED), file.get_tensor(_COPY)):
            raise DataError(f"{path}: {_SHARED} and {_COPY} differ")


def _load(
    path: Path,
    model: Any,
    config: Any,
    names: dict[str, str],
    shapes: _Shapes,
    dtype: torch.dtype,
) -> Any:
    """Return ``model`` with the tensors of ``names``, which maps transformers' names to the file's."""
    actual = {name: shapes[name_in_file] for name, name_in_file in names.items()}
    _require_equal(path, actual, _expected_shapes(model, config))
    encoder, report = model.from_pretrained(
        None,
        config=config,
        state_dict=_read(path, names, dtype),
        dtype=dtype,
        output_loading_info=True,
    )
    assert not report["missing_keys"], report
    return encoder


def _expected_shapes(model: Any, config: Any) -> _Shapes:
    """Return the shapes of the tensors that ``model`` needs, CLIP's with their prefix."""
    with torch.device("meta"):
        state: dict[str, Tensor] = model(config).state_dict()
    prefix = _PREFIX if "shared.weight" not in state else ""
    return {
        f"{prefix}{name.removeprefix(_PREFIX)}": list(tensor.shape)
        for name, tensor in state.items()
        if name != _COPY
    }


def _require_equal(path: Path, actual: _Shapes, expected: _Shapes) -> None:
    """Raise DataError naming the first tensors that are missing, unknown or of another shape."""
    faults = [f"{name} is missing" for name in expected if name not in actual]
    faults += [
        f"{name!r:.80} is not a tensor of this encoder" for name in actual.keys() - expected.keys()
    ]
    faults += [
        f"{name} has shape {actual[name]}, expected {shape}"
        for name, shape in expected.items()
        if actual.get(name, shape) != shape
    ]
    if faults:
        more = len(faults) - _MAX_FAULTS_SHOWN
        rest = f", and {more} more" if more > 0 else ""
        raise DataError(f"{path}: {'; '.join(faults[:_MAX_FAULTS_SHOWN])}{rest}")


def _require_scales(path: Path, file: Any) -> None:
    slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
    in_fp8 = {name: each.get_shape() for name, each in slices.items() if each.get_dtype() in FP8}
    try:
        require_scales(in_fp8, slices)
    except ValueError as error:
        raise DataError(f"{path}: {error}") from None


def _read(path: Path, names: dict[str, str], dtype: torch.dtype) -> dict[str, Tensor]:
    with safe_open(path, framework="pt") as file:
        scales = scales_of(file.keys())
        _require_scales(path, file)

        def read(name: str) -> Tensor:
            scale = file.get_tensor(scales[name]) if name in scales else None
            try:
                return unscaled(file.get_tensor(name), scale).to(dtype)
            except ValueError as error:
                raise DataError(f"{path}: {name} {error}") from None

        return {name: read(name_in_file) for name, name_in_file in names.items()}
