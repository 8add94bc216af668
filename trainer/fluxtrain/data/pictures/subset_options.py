"""The settings of one folder of pictures."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

from fluxtrain.contract.run.variants import AS_THEY_ARE, VariantsConfig
from fluxtrain.data.pictures.folder import PictureFile
from fluxtrain.redaction import redacted


@dataclass(frozen=True)
class Subset:
    """One folder of pictures."""

    folder: Path
    repeats: int = 1
    caption_prefix: str = ""
    class_tokens: str = ""
    """Caption of pictures that have none."""
    caption_suffix: str = ""
    label: str = ""
    """Put before the names of its files in reports, if there are several folders."""
    url: str = ""
    """Where the folder is fetched from; "" if it is given as a path."""
    field: str = dataclasses.field(default="spec.run.data.images", compare=False)
    """What names it, for messages."""
    is_reg: bool = False
    """Regularisation images: they are repeated until they are as many as the others."""

    resolution: int | None = None
    """Square root of the number of pixels; None: those of the run."""

    variants: VariantsConfig = AS_THEY_ARE
    """What is made of its pictures and captions."""
    masks: Path | None = None
    """Folder of masks of the loss."""
    masks_url: str = ""
    """Where that folder is fetched from; "" if it is given as a path."""
    masks_field: str = dataclasses.field(default="spec.run.data.masks", compare=False)
    """What names it, for messages."""
    has_alpha_masks: bool = False
    """Whether the pictures' opacity is their mask."""
    weight: float = 1.0
    """Of the loss."""

    @property
    def masks_place(self) -> str:
        """Return where the masks are, for messages."""
        return redacted(self.masks_url) or str(self.masks)

    def caption(self, picture: PictureFile) -> str:
        """Return the prompt that ``picture`` is trained with."""
        own = picture.caption or self.class_tokens.strip()
        words = self.caption_prefix.strip(), own, self.caption_suffix.strip()
        return " ".join(word for word in words if word)
