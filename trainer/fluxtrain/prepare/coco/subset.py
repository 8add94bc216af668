"""Selects MLPerf's validation captions and their timesteps from COCO-2014, as the reference does.

Newlines are removed and ends stripped; the annotations are shuffled like pandas' ``sample(frac=1,
random_state=2023)``; the first caption of each image is kept; the first 29,696 of these, sorted by
annotation id, get the timesteps 0 … 7 in turn. NumPy's frozen legacy generator gives the same shuffle, so
pandas is not needed.
"""

from __future__ import annotations

import csv
import io
import json
from dataclasses import asdict, astuple, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from fluxtrain.draws import NUM_TIMESTEPS
from fluxtrain.errors import ConfigError, DataError

NUM_SAMPLES = 29_696
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
    """A validation sample; its velocity is evaluated at t = ``timestep`` / 8."""

    timestep: int


def read_annotations(path: Path) -> list[Annotation]:
    """Return the annotations in the file ``captions_val2014.json``, in its order.

    Raises ConfigError if it is missing, DataError if it is malformed.
    """
    try:
        with path.open("rb") as file:
            text = file.read(_MAX_BYTES + 1)
        if len(text) > _MAX_BYTES:
            raise DataError(f"{path}: more than {_MAX_BYTES} bytes")
        content = json.loads(text)
        return [_parse_annotation(entry) for entry in content["annotations"]]
    except OSError as error:
        raise ConfigError(_FLAG, str(path), str(error.strerror)) from None
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise DataError(f"{path}: not COCO's captions: {error}") from None


def subset(annotations: list[Annotation], num_samples: int = NUM_SAMPLES) -> list[Row]:
    """Return the samples, sorted by annotation id; DataError if there are fewer images than samples.

    Raises ConfigError if the timesteps would not be equally frequent.
    """
    if num_samples % NUM_TIMESTEPS:
        raise ConfigError("--samples", num_samples, f"allowed: a multiple of {NUM_TIMESTEPS}")
    if len({annotation.id for annotation in annotations}) < len(annotations):
        raise DataError("two annotations have the same id")
    first = dict[int, Annotation]()
    for index in np.random.RandomState(SEED).permutation(len(annotations)).tolist():
        first.setdefault(annotations[index].image_id, annotations[index])
    if len(first) < num_samples:
        raise DataError(f"captions of {len(first):,} images, {num_samples:,} are needed")
    selected = sorted(list(first.values())[:num_samples], key=lambda annotation: annotation.id)
    return [
        Row(**asdict(annotation), timestep=index % NUM_TIMESTEPS)
        for index, annotation in enumerate(selected)
    ]


def tsv(rows: list[Row]) -> str:
    """Return the table of ``rows`` as tab-separated text, byte for byte as the reference writes it."""
    text = io.StringIO()
    writer = csv.writer(text, delimiter="\t", lineterminator="\n")
    writer.writerow(field.name for field in fields(Row))
    writer.writerows(astuple(row) for row in rows)
    return text.getvalue()


def _parse_annotation(entry: dict[str, Any]) -> Annotation:
    image_id, id_, caption = entry["image_id"], entry["id"], entry["caption"]
    if type(image_id) is not int or type(id_) is not int or not isinstance(caption, str):
        raise ValueError("an image_id, an id or a caption is of the wrong type")
    if not 0 <= image_id < 10**12:
        raise ValueError(f"the image_id {image_id} has more than 12 digits")
    return Annotation(image_id, id_, caption.replace("\n", "").strip())
