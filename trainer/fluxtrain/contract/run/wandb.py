"""WandbConfig, ``spec.run.logging.wandb``: a run at Weights & Biases."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from fluxtrain.contract.strict_model import Label, StrictModel

_Project = Annotated[
    str,
    Field(
        min_length=1,
        max_length=128,
        pattern=r"^[^/\\#?%:\x00-\x1f\x7f]+$",
        title="1 to 128 characters without / \\ # ? % :",
    ),
]
_Tag = Annotated[str, Field(min_length=1, max_length=64)]


class WandbConfig(StrictModel):
    """A run at Weights & Biases. The key is read from the variable WANDB_API_KEY alone."""

    project: _Project = "fluxtrain"
    """Project of the run."""
    entity: Label | None = None
    """Team or user of the project; null: the key's default."""
    name: Label | None = None
    """Name of the run; null: Weights & Biases invents one."""
    group: Label | None = None
    """Group of the run; null: none."""
    tags: Annotated[list[_Tag], Field(max_length=20)] = []
    """Tags of the run."""
    mode: Literal["online", "offline", "disabled"] = "online"
    """``online``: send; without a key or a connection as ``offline``: write to ``wandb/`` of the output,
    which ``wandb sync`` sends later; ``disabled``: do nothing."""
