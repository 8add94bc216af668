"""ModelConfig: the dimensions of the transformer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field

from fluxtrain.contract.model_base import Positive, Rule, StrictModel, Width

TIMESTEP_DIM = 256
"""Width of the sinusoidal embeddings of timestep and guidance."""
AxisWidth = Annotated[int, Field(ge=2, le=4096, multiple_of=2)]
NUM_AXES = 3
"""Position axes of a token: 0, its row and its column."""
DEPTHS = {"double_blocks": "depth", "single_blocks": "depth_single_blocks"}
"""The kinds of blocks in the order of the passes, and the fields with their numbers."""


@dataclass(frozen=True)
class Condition:
    """A picture that a published model of the family takes beside a prompt."""

    name: str
    """Of the model, as its publisher writes it."""
    folder: str
    """Where pairs have the pictures, or masks, of ``data.controls``."""
    adds_tokens: bool = False
    """Whether its latents are further image tokens; else they are further channels of each token."""
    hole_channels: int = 0
    """Channels of a mask below its latents, before packing: the 8 x 8 pixels of each latent."""

    @property
    def has_hole(self) -> bool:
        """Return whether it is the image itself with a hole, which is drawn without ``data.controls``."""
        return self.hole_channels > 0

    @property
    def pipeline(self) -> str:
        """Return the name of diffusers' pipeline."""
        return f"Flux{self.name if self.adds_tokens or self.has_hole else 'Control'}Pipeline"

    @property
    def repository(self) -> str:
        """Return the name of the model at its publisher's."""
        return f"FLUX.1-{self.name}-dev"

    @property
    def weights(self) -> str:
        """Return the file of the published transformer."""
        return f"flux1-{self.name.lower()}-dev.safetensors"

    def token_channels(self, of_image: int) -> int:
        """Return the channels of a token of the model whose latents have ``of_image`` in a token."""
        return of_image if self.adds_tokens else 2 * of_image + 4 * self.hole_channels


CONDITIONS = {
    "kontext": Condition("Kontext", "control", adds_tokens=True),
    "fill": Condition("Fill", "mask", hole_channels=64),
    "depth": Condition("Depth", "control"),
    "canny": Condition("Canny", "control"),
}
"""By ``model.condition``; what else differs between the models of the family follows from their fields."""


def _channel_rule(name: str, condition: Condition) -> Rule:
    mask = 4 * condition.hole_channels
    such = f"{f', and {mask} of a mask' if mask else ''}, such as {condition.token_channels(64)}"
    return Rule(
        "in_channels",
        f"must be twice the latent channels x 2 x 2{such}, if condition is {name}",
        lambda model: (
            model.condition != name or (model.in_channels > mask and model.in_channels % 8 == 0)
        ),
        f"self.condition != '{name}' || (self.in_channels > {mask} && self.in_channels % 8 == 0)",
        others=("condition",),
    )


class ModelConfig(StrictModel):
    """The FLUX.1 transformer, with BFL's names; the defaults are those of schnell."""

    rules: ClassVar = (
        Rule(
            "hidden_size",
            "must be a multiple of num_heads",
            lambda model: model.hidden_size % model.num_heads == 0,
            "self.hidden_size % self.num_heads == 0",
            others=("num_heads",),
        ),
        Rule(
            "axes_dim",
            "must sum to the head dimension, hidden_size / num_heads",
            lambda model: sum(model.axes_dim) == model.hidden_size // model.num_heads,
            "self.axes_dim.sum() == self.hidden_size / self.num_heads",
            others=("hidden_size", "num_heads"),
        ),
        *(_channel_rule(*each) for each in CONDITIONS.items() if not each[1].adds_tokens),
    )

    condition: Literal["none", "kontext", "fill", "depth", "canny"] = "none"
    """Picture that the model takes beside a prompt. ``kontext``: one to edit, whose latents are further image
    tokens at 1 of the first position axis; ``fill``: one with a hole, whose latents and mask are further
    channels of each image token; ``depth``, ``canny``: a map of distances or edges, whose latents are."""
    in_channels: Annotated[int, Field(ge=4, le=4096, multiple_of=4)] = 64
    """Channels of an image token: latent channels x 2 x 2, and those of its condition: 384 or 128."""
    vec_in_dim: Width = 768
    """Dimension of the pooled text vector (CLIP)."""
    context_in_dim: Width = 4096
    """Dimension of a text token (T5)."""
    hidden_size: Width = 3072
    """Hidden dimension; a multiple of ``num_heads``."""
    num_heads: Annotated[int, Field(ge=1, le=1024)] = 24
    """Number of attention heads."""
    mlp_ratio: Annotated[float, Field(gt=0, le=64)] = 4.0
    """Ratio of the MLP's hidden dimension to ``hidden_size``."""
    depth: Annotated[int, Field(ge=0, le=1024)] = 19
    """Number of double-stream blocks."""
    depth_single_blocks: Annotated[int, Field(ge=0, le=1024)] = 38
    """Number of single-stream blocks."""
    axes_dim: Annotated[tuple[AxisWidth, AxisWidth, AxisWidth], Field(strict=False)] = (16, 56, 56)
    """RoPE dimensions of the three position axes; their sum is the head dimension."""
    theta: Positive = 10_000
    """Base of the RoPE frequencies."""
    qk_norm_eps: Annotated[float, Field(gt=0, le=1e-2)] = 1e-6
    """Epsilon of the norms of queries and keys: 1e-6 in BFL's and diffusers' models, float32's smallest
    relative difference (1.1920929e-07) in MLPerf's reference."""
    guidance_embed: bool = False
    """Use the distilled guidance as an input, as FLUX.1 dev does."""

    @property
    def takes(self) -> Condition | None:
        """Return what the model takes beside a prompt."""
        return CONDITIONS.get(self.condition)

    @property
    def out_channels(self) -> int:
        """Return the channels of a token of the prediction: latent channels x 2 x 2."""
        if self.takes is None or self.takes.adds_tokens:
            return self.in_channels
        return (self.in_channels - 4 * self.takes.hole_channels) // 2

    @property
    def condition_channels(self) -> int:
        """Return the channels of the condition's latents, before packing."""
        return self.out_channels // 4 + self.takes.hole_channels if self.takes else 0

    def image_tokens(self, height: int, width: int) -> int:
        """Return the image tokens of latents of ``height`` x ``width``, those of a reference among them."""
        return height * width // 4 * (2 if self.takes and self.takes.adds_tokens else 1)

    @property
    def depths(self) -> Mapping[str, int]:
        """Return the number of blocks of each kind, in the order of the passes."""
        return {kind: getattr(self, field) for kind, field in DEPTHS.items()}

    @property
    def num_blocks(self) -> int:
        return sum(self.depths.values())

    @property
    def one_of_each(self) -> Self:
        """Return the model with one block of each kind."""
        return self.model_copy(update=dict.fromkeys(DEPTHS.values(), 1))
