"""A sink: takes what is logged, in order of the training samples."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from fluxtrain.report.records import Record


class Sink(Protocol):
    """Takes records of metrics.jsonl and sample images; it is used by one thread."""

    @property
    def last(self) -> int:
        """Return the training samples up to which it has everything; -1: it has nothing."""

    def write(self, record: Record) -> None:
        """Take a record."""

    def show(self, samples: int, image: Path) -> None:
        """Take the sample images after ``samples`` training samples."""

    def close(self) -> None:
        """Keep and send everything."""
