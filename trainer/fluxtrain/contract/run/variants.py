"""VariantsConfig, ``data.variants``: changed copies of pictures and captions, encoded before training."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field

from fluxtrain.contract.strict_model import Fraction, Rule, StrictModel


class VariantsConfig(StrictModel):
    """Copies of each picture and caption that are encoded. Each time that a sample is used, one of its
    pictures and one of its captions are drawn."""

    rules: ClassVar = (
        Rule(
            "captions",
            "must be at least 2 if shuffle_caption or tag_dropout is set",
            lambda it: it.captions > 1 or not (it.shuffle_caption or it.tag_dropout),
            "self.captions > 1 || !self.shuffle_caption",
            others=("shuffle_caption",),
        ),
    )

    flip: bool = False
    """Also mirrored, left to right: twice as many latents."""
    crops: Annotated[int, Field(ge=1, le=64)] = 1
    """Crops of each picture: 1 is its middle; more are at places that are drawn from the seed."""
    captions: Annotated[int, Field(ge=1, le=256)] = 1
    """Captions of each picture that are made from its own by ``shuffle_caption`` and ``tag_dropout``."""
    shuffle_caption: bool = False
    """Shuffle the tags of a caption: its parts between ``separator``."""
    keep_tokens: Annotated[int, Field(ge=0, le=1000)] = 0
    """Tags at the start of a caption that are neither shuffled nor dropped, of which the prefix is part."""
    tag_dropout: Fraction = 0.0
    """Probability that a tag is left out."""
    separator: Annotated[str, Field(min_length=1, max_length=16)] = ","
    """What is between the tags of a caption; ", " comes between them afterwards."""


AS_THEY_ARE = VariantsConfig()
"""Each picture and caption is encoded once, unchanged."""
