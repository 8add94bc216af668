"""Folders named as in kohya's DreamBooth layout, such as 10_toy: what to write for their repeats."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fluxtrain.contract.run.data import DataConfig
from fluxtrain.contract.run.download import is_url

_NAME = re.compile(r"(\d+)_(.*)", re.ASCII | re.DOTALL)
_MOST = 50
"""Folders that are written out."""


def repeats_note(config: DataConfig, data_root: Path) -> str:
    """Return what to write for folders whose names have repeats, as kohya reads them, "" if there are none.

    ``repeats`` of ``config`` settles it. A folder with 0 repeats is left out, as there.
    """
    folder = data_root / str(config.images)
    if config.repeats != 1 or is_url(str(config.images)) or not folder.is_dir():
        return ""
    names = sorted(each.name for each in folder.iterdir() if each.is_dir())
    matches = filter(None, map(_NAME.fullmatch, names))
    found = [match for match in matches if int(match[1])]
    if not found:
        return ""
    subsets = [{"image_dir": f"{config.images}/{match[0]}", **_options(match)} for match in found]
    text = f"numbers in names of folders, such as {found[0][0]!r:.60}, are no repeats here"
    return f"{config.images}: {text}; {_advice(str(config.images), subsets)}"


def _options(match: re.Match[str]) -> Mapping[str, Any]:
    return {"num_repeats": int(match[1])} | ({"class_tokens": match[2]} if match[2] else {})


def _advice(images: str, subsets: Sequence[Mapping[str, Any]]) -> str:
    """Return what has these ``subsets``: fields of the run for one, kohya's data set config for several."""
    if len(subsets) == 1:
        return f"set spec.run.data to {_in_yaml(subsets[0])}"
    more = f", and the same for {len(subsets) - _MOST} more" if len(subsets) > _MOST else ""
    content = json.dumps({"datasets": [{"subsets": subsets[:_MOST]}]})
    file = f"{images.rstrip('/')}.json" if Path(images).name else "pictures.json"
    return f"set spec.run.data.images to {json.dumps(file)}, a file with {content}{more}"


def _in_yaml(subset: Mapping[str, Any]) -> str:
    names = {"image_dir": "images", "num_repeats": "repeats"}
    pairs = (f"{names.get(key, key)}: {json.dumps(value)}" for key, value in subset.items())
    return f"{{{', '.join(pairs)}}}"
