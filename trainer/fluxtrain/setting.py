"""The setting of a run: shapes, precision, recomputation and compilation."""

from __future__ import annotations

from dataclasses import dataclass

from fluxtrain.contract.run.config import RunConfig
from fluxtrain.contract.run.encoders import Precision
from fluxtrain.contract.run.precision import Fp8


@dataclass(frozen=True)
class Setting:
    """What a run computes, without its batch."""

    image_size: int
    """Side of the images in pixels."""
    text_length: int
    """Text tokens."""
    compute: Precision
    fp8: Fp8
    """How the blocks' linear layers use it."""
    activation_checkpointing: float
    """Fraction of the blocks that recompute their activations."""
    compile: bool | None
    """Whether blocks are compiled; None: where that is possible."""

    def __str__(self) -> str:
        """Return the setting, for people."""
        compiled = {None: "", True: ", compiled", False: ", not compiled"}[self.compile]
        recompute = self.activation_checkpointing
        recomputed = f", {recompute:.0%} recomputed" if recompute else ""
        shapes = f"{self.image_size} px, {self.text_length} text tokens"
        fp8 = "" if self.fp8 == "none" else f", fp8 {self.fp8}"
        return f"{shapes}, {self.compute}{fp8}{recomputed}{compiled}"

    @staticmethod
    def of(config: RunConfig) -> Setting:
        """Return the setting of ``config``."""
        return Setting(
            image_size=config.data.image_size,
            text_length=config.data.text_length,
            compute=config.precision.compute,
            fp8=config.precision.fp8,
            activation_checkpointing=config.parallel.activation_checkpointing,
            compile=config.parallel.compile,
        )
