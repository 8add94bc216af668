"""TensorBoard: event files by torch's own writer, on the axis of training samples."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image

from fluxtrain.report.records import Record
from fluxtrain.report.sinks.scalars import IMAGES, scalars


class TensorBoardSink:
    """Writes event files; readers hide what an earlier start wrote beyond the state that was resumed."""

    def __init__(self, folder: Path, samples: int) -> None:
        """Continue the events in ``folder`` after ``samples`` training samples."""
        from torch.utils.tensorboard import SummaryWriter  # torch imports tensorboard itself

        has_events = any(folder.glob("events.out.tfevents.*"))
        self.last = samples if has_events else -1
        self._writer = SummaryWriter(folder, purge_step=samples + 1 if has_events else None)

    def write(self, record: Record) -> None:
        """Add the numbers of ``record``."""
        for name, value in scalars(record).items():
            self._writer.add_scalar(name, value, record["samples"])
        self._writer.flush()

    def show(self, samples: int, image: Path) -> None:
        """Add the sample images in the file ``image``."""
        with Image.open(image) as opened:
            pixels = np.asarray(opened.convert("RGB"))
        self._writer.add_image(IMAGES, pixels, samples, dataformats="HWC")
        self._writer.flush()

    def close(self) -> None:
        """Close the file."""
        self._writer.close()
