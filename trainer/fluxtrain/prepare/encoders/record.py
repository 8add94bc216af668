"""``encoders.json`` below the models root: size and SHA-256 of each file of the encoders, for comparison."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from fluxtrain.errors import DataError
from fluxtrain.files import atomic_write

RECORD = "encoders.json"
Sums = dict[str, dict[str, Any]]


def sums_of(folder: Path) -> Sums:
    """Return size and SHA-256 of each file directly in ``folder``."""
    sums: Sums = {}
    for path in sorted(path for path in folder.iterdir() if path.is_file()):
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        sums[path.name] = {"size": path.stat().st_size, "sha256": digest}
    return sums


def compare_or_record(models: Path, name: str, sums: Sums) -> bool:
    """Return whether the encoder ``name`` was recorded before; record its ``sums`` if it was not.

    Raises DataError naming the first file that differs from the record.
    """
    path = models / RECORD
    recorded = _read(path)
    if name not in recorded:
        with atomic_write(path) as partial:
            partial.write_text(json.dumps({**recorded, name: sums}, indent=2) + "\n")
        return False
    before = recorded[name]
    for file in sorted({*before, *sums}):
        if before.get(file) != sums.get(file):
            how = (
                "is missing" if file not in sums else "is new" if file not in before else "differs"
            )
            text = f"{file} {how}, by {path}, which has what was prepared first"
            raise DataError(f"{name}: {text}; remove its entry {name} to accept this one")
    return True


def _read(path: Path) -> dict[str, Sums]:
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be read ({error})") from None
    if not isinstance(content, dict):
        raise DataError(f"{path}: is not a JSON object")
    return content
