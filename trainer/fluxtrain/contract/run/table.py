"""TableConfig, ``spec.run.data.table``: the pictures in Parquet files."""

from __future__ import annotations

from fluxtrain.contract.strict_model import Label, StrictModel


class TableConfig(StrictModel):
    """Which Parquet files of ``images``, and which of their columns, hold pictures and captions."""

    split: Label | None = None
    """Part of the names of the files that are read; null: ``train``, or all files if none has a split."""
    image_column: Label | None = None
    """Column of the pictures, as bytes or as Hugging Face's images; null: the first one of that kind."""
    caption_column: Label | None = None
    """Column of the captions; null: ``text``, ``caption`` or ``prompt``, if there is one."""
