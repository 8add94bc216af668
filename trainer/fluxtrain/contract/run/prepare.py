"""``spec.run.prepare``: the input of the prepare task."""

from __future__ import annotations

import re
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from fluxtrain.contract.strict_model import IMMUTABLE, Count, Path, Rule, StrictModel

_SECRET_IN_URL = r"(?i)^[a-z+.-]+://[^/?#]*@|[?&][^=&]*(sig|token|key|credential|password)[^=&]*="
"""A user name, or a query with a signature or a token."""
_NO_SECRET_IN_URL = Rule(
    "input",
    "must have no user name, password, token or signature: whoever may view the job can read it",
    lambda prepare: re.search(_SECRET_IN_URL, prepare.input) is None,
    f"!self.input.matches('{_SECRET_IN_URL}')",
)


class PrepareConfig(StrictModel):
    """The prepare task: converts MLPerf's raw data to the images and captions that ``data`` names."""

    rules: ClassVar = (
        _NO_SECRET_IN_URL,
        Rule(
            "samples",
            "must be 1 or more if dataset is coco",
            lambda prepare: prepare.samples != 0 or prepare.dataset != "coco",
            "self.samples != 0 || self.dataset != 'coco'",
            others=("dataset",),
        ),
        Rule(
            "problematic",
            "must be left out if dataset is coco",
            lambda prepare: prepare.problematic is None or prepare.dataset != "coco",
            "self.dataset != 'coco'",
            others=("dataset",),
        ),
    )

    dataset: Annotated[Literal["cc12m", "coco"], IMMUTABLE] = "cc12m"
    """``cc12m``: cleaned, to ``data.train``; ``coco``: a subset with timesteps, to ``data.validation``."""
    input: Path = "raw"
    """cc12m: a folder of raw tars, the URL of a manifest, or hf://datasets/ORG/NAME[@REVISION]; coco: the
    folder with ``val2014`` and ``annotations``. A relative folder is below the data root."""
    samples: Annotated[Count | None, IMMUTABLE] = None
    """Number of samples; null: MLPerf's 1,099,776 of cc12m, 29,696 of coco; 0: all usable ones of cc12m."""
    problematic: Annotated[Path | None, IMMUTABLE] = None
    """cc12m: file with indices to leave out, one per line, below the data root."""
    workers: Annotated[int, Field(ge=1, le=1024)] | None = None
    """Worker processes; null: one per available core. The result does not depend on it."""
