"""ModelConfig: the shape of the transformer, a section of RunConfig."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field

from fluxtrain.contract.section import Positive, Rule, Section, Width

AxisWidth = Annotated[int, Field(ge=2, le=4096, multiple_of=2)]


def _head_width(model: ModelConfig) -> int:
    return model.hidden_size // model.num_heads


class ModelConfig(Section):
    """The FLUX.1 transformer, in BFL's names (schnell's shape unless changed)."""

    rules: ClassVar = (
        Rule(
            "hidden_size",
            ("num_heads",),
            "must be a multiple of num_heads",
            lambda model: model.hidden_size % model.num_heads == 0,
            "self.hidden_size % self.num_heads == 0",
        ),
        Rule(
            "axes_dim",
            ("hidden_size", "num_heads"),
            "must add up to the width of one head, hidden_size / num_heads",
            lambda model: sum(model.axes_dim) == _head_width(model),
            "self.axes_dim.sum() == self.hidden_size / self.num_heads",
        ),
    )

    in_channels: Annotated[int, Field(ge=4, le=4096, multiple_of=4)] = 64
    """Packed latent channels: latent channels times 2 x 2."""
    vec_in_dim: Width = 768
    """Width of the pooled text vector (CLIP)."""
    context_in_dim: Width = 4096
    """Width of the text tokens (T5)."""
    hidden_size: Width = 3072
    """Width of the residual stream; a multiple of ``num_heads``."""
    num_heads: Annotated[int, Field(ge=1, le=1024)] = 24
    """Attention heads."""
    mlp_ratio: Annotated[float, Field(gt=0, le=64)] = 4.0
    """Width of the MLP over ``hidden_size``."""
    depth: Annotated[int, Field(ge=0, le=1024)] = 19
    """Double-stream blocks."""
    depth_single_blocks: Annotated[int, Field(ge=0, le=1024)] = 38
    """Single-stream blocks."""
    axes_dim: Annotated[tuple[AxisWidth, AxisWidth, AxisWidth], Field(strict=False)] = (16, 56, 56)
    """RoPE channels of the three position axes; together as wide as one attention head."""
    theta: Positive = 10_000
    """Base of the RoPE frequencies."""
    guidance_embed: bool = False
    """Whether the model takes the distilled guidance as an input (FLUX.1 dev does)."""
