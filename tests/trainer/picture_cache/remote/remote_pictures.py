"""Pictures of a folder at URLs: as files, as shards and as Parquet files; and runs on them."""

from __future__ import annotations

import io
import os
import tarfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from tests.trainer import ranks
from tests.trainer.picture_cache.folders import config

from fluxtrain.contract.process import RunPaths
from fluxtrain.contract.run.config import RunConfig
from fluxtrain.contract.run.resolve import merge

COUNT = 9
BUCKET, HUB = "s3://bucket/pictures", "hf://datasets/owner/pictures"


def shard(folder: Path, names: list[str]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name in names:
            for suffix in (Path(name).suffix, ".txt"):
                path = (folder / name).with_suffix(suffix)
                tar.add(path, path.name)
    return buffer.getvalue()


def run_of(paths: RunPaths, url: str, **data: Any) -> RunConfig:
    """Return a run on the pictures at ``url``, with an evaluation if some are held out."""
    folder = str(paths.output.parent / "node")
    changes: dict[str, Any] = {
        "data": {
            "images": url,
            "download": {"folder": folder, "connections": 2},
            "max_skipped": 0.2,
        },
        "evaluation": {"at_end": "validation_split" in data},
    }
    return config(**merge(changes, {"data": data}))


def asking(variables: dict[str, str], run: ranks.Run, *arguments: Any) -> None:
    """Call ``run`` with ``variables``: the fork server has those of the first test."""
    os.environ |= variables
    run(*arguments)


def encodings(output: Path) -> dict[str, bytes]:
    files = [
        file for part in ("latents", "texts") for file in (output / "cache" / part).glob("[!.]*")
    ]
    return {f"{file.parent.name}/{file.name}": file.read_bytes() for file in files}


def table(folder: Path, names: list[str]) -> bytes:
    rows = [
        {"image": {"bytes": (folder / name).read_bytes(), "path": name}, "text": text}
        for name in names
        for text in [(folder / name).with_suffix(".txt").read_text()]
    ]
    buffer = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), buffer, row_group_size=2)
    return buffer.getvalue()
