"""Published figures of the same settings, which the table and the plot show beside our own."""

from __future__ import annotations

from dataclasses import dataclass

from fluxtrain.contract.run.config import RunConfig
from fluxtrain.contract.run.model import ModelConfig
from fluxtrain.setting import Setting


@dataclass(frozen=True)
class Published:
    """A figure that others published."""

    source: str
    gpu: str
    image_size: int
    text_length: int
    compute: str
    micro_batch_size: int
    images_per_second_per_gpu: float

    @property
    def shapes(self) -> tuple[int, int, str]:
        """Return the image size, the text length and the data type."""
        return self.image_size, self.text_length, self.compute

    def __str__(self) -> str:
        """Return the figure, for people."""
        rate, batch = self.images_per_second_per_gpu, self.micro_batch_size
        return f"{rate} images/s per GPU at batch {batch} on {self.gpu} ({self.source})"


_DEV = ModelConfig(guidance_embed=True)
_FLUXBENCHMARK = "AMD FluxBenchmark"
FIGURES = (
    Published(f"{_FLUXBENCHMARK}, its README", "MI300X", 512, 512, "bfloat16", 1, 2.03),
    Published(f"{_FLUXBENCHMARK}, its README", "MI300X", 512, 512, "bfloat16", 10, 4.34),
    Published(
        f"{_FLUXBENCHMARK}, ROCm's container v25.2", "MI300X", 512, 512, "bfloat16", 10, 4.51
    ),
)
"""FLUX.1 dev, all weights trained with FSDP on eight GPUs from encodings; nothing recomputed or compiled."""


def published(config: RunConfig, setting: Setting) -> list[Published]:
    """Return the figures of the same model, shapes, precision and recomputation as ``setting``."""
    is_dev = config.model == _DEV and config.adapter is None
    if not is_dev or setting.activation_checkpointing or setting.fp8 != "none" or setting.largest:
        return []
    wanted = setting.image_size, setting.text_length, setting.compute
    return [figure for figure in FIGURES if figure.shapes == wanted]
