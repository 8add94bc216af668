"""The samples that a run on pictures began with, kept in its output: they stay the same for all its starts.

Which samples a global batch has depends on their number. A picture that is added, or repaired, while a run is
stopped would change all batches that follow; so a run that goes on reads this file, not the folder.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fluxtrain.data.pictures.subset import TrainingPicture
from fluxtrain.errors import DataError
from fluxtrain.files import atomic_write

FILE = "training_set.json"
"""Its name in the run's output."""
_FORMAT = 1


@dataclass(frozen=True)
class TrainingSample:
    """One picture at one size, as it is trained."""

    name: str
    captions: tuple[str, ...]
    repeats: int
    latents: tuple[str, ...]
    """IDs in the cache."""
    width: int
    height: int
    caption: str
    """That of the picture, of which ``captions`` are variants."""
    masks: tuple[str, ...] = ()
    """IDs in the cache, one for each of ``latents``; none if all of the picture counts."""
    weight: float = 1.0
    """Of its loss."""


@dataclass(frozen=True)
class TrainingSet:
    """The samples of a run in their order, and the pictures that could not be used."""

    samples: tuple[TrainingSample, ...]
    skipped: tuple[str, ...]
    validation: tuple[TrainingSample, ...] = ()
    """Those that are held out for the evaluation."""

    @property
    def every(self) -> tuple[TrainingSample, ...]:
        """Return the samples of the training and of the evaluation."""
        return (*self.samples, *self.validation)

    def write(self, output: Path) -> None:
        """Write the file in the run's ``output``."""
        values = {"format": _FORMAT, **asdict(self)}
        with atomic_write(output / FILE) as partial:
            partial.write_text(json.dumps(values, ensure_ascii=False), encoding="utf-8")

    def changes(self, pictures: Sequence[TrainingPicture]) -> str:
        """Return how ``pictures`` differ from those that the run began with, "" if they do not."""
        names = {picture.label for picture in pictures}
        own = {sample.name: (sample.caption, sample.repeats) for sample in self.every}
        known = [picture for picture in pictures if picture.label in own]
        captions = sum(own[picture.label][0] != picture.caption for picture in known)
        counts = {
            "added": len(names - own.keys() - set(self.skipped)),
            "removed": len(own.keys() - names),
            "with another caption": captions,
            "with other repeats": sum(own[each.label][1] != each.repeats for each in known),
        }
        return ", ".join(f"{count} {kind}" for kind, count in counts.items() if count)


def read_training_set(output: Path) -> TrainingSet | None:
    """Return the set that is stored in the run's ``output``, None if there is none.

    Raises DataError if it is malformed.
    """
    path = output / FILE
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        if values.pop("format") != _FORMAT:
            raise DataError(f"{path}: is of another version")
        samples = tuple(_sample(**each) for each in values["samples"])
        validation = tuple(_sample(**each) for each in values.get("validation", ()))
        return TrainingSet(samples, tuple(values["skipped"]), validation)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        text = f"{path}: cannot be read ({error}); without it the order of the samples is unknown"
        raise DataError(text) from None


def _sample(**values: Any) -> TrainingSample:
    lists: dict[str, Any] = {
        name: tuple(values.pop(name)) for name in ("captions", "latents", "masks")
    }
    return TrainingSample(**lists, **values)
