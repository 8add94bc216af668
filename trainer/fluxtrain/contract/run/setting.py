"""The setting of a run: shapes, precision, recomputation and compilation."""

from __future__ import annotations

from dataclasses import dataclass

from fluxtrain.contract.run.config import RunConfig
from fluxtrain.contract.run.data import PIXELS_PER_LATENT, DataConfig
from fluxtrain.contract.run.precision import Fp8, Precision


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
    num_sizes: int = 1
    """Sizes of the images: those of the buckets."""
    largest: str = ""
    """Width and height of the one with the most pixels; empty without buckets: the images are squares."""

    def __str__(self) -> str:
        compiled = {None: "", True: ", compiled", False: ", not compiled"}[self.compile]
        recompute = self.activation_checkpointing
        recomputed = f", {recompute:.0%} recomputed" if recompute else ""
        shapes = f"{self.shape}, {self.text_length} text tokens"
        fp8 = "" if self.fp8 == "none" else f", fp8 {self.fp8}"
        return f"{shapes}, {self.compute}{fp8}{recomputed}{compiled}"

    @property
    def shape(self) -> str:
        """Return the size of the images, for people."""
        if not self.largest:
            return f"{self.image_size} px"
        sizes = "1 size" if self.num_sizes == 1 else f"{self.num_sizes} sizes"
        return f"{sizes} to {self.largest} px"

    @staticmethod
    def of(config: RunConfig) -> Setting:
        num_sizes, largest = sizes_of(config.data)
        return Setting(
            image_size=config.data.image_size,
            text_length=config.data.text_length,
            compute=config.precision.compute,
            fp8=config.precision.fp8,
            activation_checkpointing=config.parallel.activation_checkpointing,
            compile=config.parallel.compile,
            num_sizes=num_sizes,
            largest=largest,
        )


def sizes_of(data: DataConfig) -> tuple[int, str]:
    """Return the number of sizes of the images of ``data``, and the largest; 1 and "" without buckets."""
    if data.buckets is None:
        return 1, ""
    height, width = data.largest_latent
    return len(data.latent_sizes), f"{width * PIXELS_PER_LATENT} x {height * PIXELS_PER_LATENT}"
