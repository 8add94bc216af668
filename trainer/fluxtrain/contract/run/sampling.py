"""SamplingConfig: images sampled during training, and by the tasks sample and evaluate."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from fluxtrain.contract.strict_model import IMMUTABLE, Count, Path, StrictModel


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
