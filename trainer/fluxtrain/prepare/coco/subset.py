"""Which captions of COCO-2014 make MLPerf's validation set, and the timestep of each: the reference's rule.

Newlines are deleted and ends trimmed; all annotations are shuffled as pandas' ``sample(frac=1,
random_state=2023)`` shuffles; the first caption of each image stays; the first 29,696 of these, sorted by
annotation id, get the timesteps 0 … 7 in turn. The shuffle is NumPy's frozen legacy generator's, so pandas
is not needed.
"""

from __future__ import annotations

import csv
import io
import json
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from fluxtrain.errors import ConfigError, DataError

NUM_SAMPLES = 29_696
NUM_TIMESTEPS = 8
SEED = 2023
_MAX_BYTES = 1 << 30
_FLAG = "--captions"


@dataclass(frozen=True)
class Annotation:
    """One caption of one image."""

    image_id: int
    id: int
    caption: str


@dataclass(frozen=True)
class Row(Annotation):
    """A sample of the validation set; its velocity is evaluated at t = ``timestep`` / 8."""

    timestep: int


def read_annotations(path: Path) -> list[Annotation]:
    """Return the annotations in the file ``captions_val2014.json``, in its order.

    Raises ConfigError where it is missing, DataError where it is malformed.
    """
    try:
        with path.open("rb") as file:
            content = json.loads(_bounded(path, file.read(_MAX_BYTES + 1)))
        return [_annotation(found) for found in content["annotations"]]
    except OSError as error:
        raise ConfigError(_FLAG, str(path), str(error.strerror)) from None
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise DataError(f"{path}: not COCO's captions: {error}") from None


def subset(
    annotations: list[Annotation], num_samples: int = NUM_SAMPLES, seed: int = SEED
) -> list[Row]:
    """Return the samples, by annotation id; DataError where there are fewer images than samples.

    Raises ConfigError where the timesteps would not be equally frequent.
    """
    if num_samples % NUM_TIMESTEPS:
        raise ConfigError("--samples", num_samples, f"allowed: a multiple of {NUM_TIMESTEPS}")
    if len({one.id for one in annotations}) < len(annotations):
        raise DataError("two annotations have the same id")
    first = dict[int, Annotation]()
    for index in np.random.RandomState(seed).permutation(len(annotations)).tolist():
        first.setdefault(annotations[index].image_id, annotations[index])
    if len(first) < num_samples:
        raise DataError(f"captions of {len(first):,} images are here, {num_samples:,} are needed")
    chosen = sorted(list(first.values())[:num_samples], key=lambda one: one.id)
    return [
        Row(one.image_id, one.id, one.caption, number % NUM_TIMESTEPS)
        for number, one in enumerate(chosen)
    ]


def tsv(rows: list[Row]) -> str:
    """Return the table of ``rows`` as the reference writes it, tabs between columns."""
    text = io.StringIO()
    writer = csv.writer(text, delimiter="\t", lineterminator="\n")
    writer.writerow(field.name for field in fields(Row))
    writer.writerows(astuple(row) for row in rows)
    return text.getvalue()


def _bounded(path: Path, content: bytes) -> bytes:
    if len(content) > _MAX_BYTES:
        raise DataError(f"{path}: more than {_MAX_BYTES} bytes")
    return content


def _annotation(found: dict[str, Any]) -> Annotation:
    image_id, number, caption = found["image_id"], found["id"], found["caption"]
    if type(image_id) is not int or type(number) is not int or not isinstance(caption, str):
        raise ValueError("an image_id, an id or a caption is of the wrong type")
    if not 0 <= image_id < 10**12:
        raise ValueError(f"the image_id {image_id} has more than 12 digits")
    return Annotation(image_id, number, caption.replace("\n", "").strip())
