"""Where the encoded shards of one part go, which of them are there, and with what settings they are made.

folder/
  preprocess.json          the settings, written first; other ones are refused
  shard_000000.safetensors each appears whole, in any order
  dataset.json             written last
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from secrets import token_hex
from typing import Any

from fluxtrain.contract.run.config import RunConfig
from fluxtrain.data.images.dataset import ImageSet, open_images
from fluxtrain.data.shard_writer import shard_name
from fluxtrain.data.shards import LISTING
from fluxtrain.data.sources import PARTS
from fluxtrain.encode.encoders import check_files
from fluxtrain.errors import ConfigError, DataError
from fluxtrain.safetensors_file import read_header

STAMP = "preprocess.json"
_SAMPLED_BYTES = 1 << 20  # of each weights file: its header, which names and places every tensor


@dataclass(frozen=True)
class Target:
    """The encoded shards of one part of the data; ``path`` is its field."""

    part: str
    path: str
    folder: Path
    pictures: ImageSet = field(repr=False)
    shard_size: int
    settings: dict[str, Any] = field(repr=False)

    @property
    def num_shards(self) -> int:
        """Return how many shards the part has; the last one may be shorter."""
        return -(-len(self.pictures) // self.shard_size)

    @property
    def is_finished(self) -> bool:
        """Return whether the whole data set is there."""
        return (self.folder / LISTING).exists()

    def samples(self, shard: int) -> range:
        """Return the input's samples that make up ``shard``."""
        begin = shard * self.shard_size
        return range(begin, min(begin + self.shard_size, len(self.pictures)))

    def shard_path(self, shard: int) -> Path:
        """Return the file of ``shard``."""
        return self.folder / shard_name(shard)

    def is_there(self, shard: int) -> bool:
        """Return whether ``shard`` is there, whole."""
        path = self.shard_path(shard)
        if not path.exists():
            return False
        try:
            read_header(
                path
            )  # a machine that lost power may have kept the name and not the content
        except DataError:
            return False
        return path.with_suffix(".json").exists()

    def num_there(self) -> int:
        """Return how many shards are there, by their names alone."""
        names = set(os.listdir(self.folder)) if self.folder.is_dir() else set[str]()
        return sum(shard_name(shard) in names for shard in range(self.num_shards))

    def check(self) -> None:
        """Raise ConfigError where the folder holds something that other settings made."""
        stamp = self.folder / STAMP
        if not stamp.exists():
            if any(self.folder.glob("*.safetensors")) or self.is_finished:
                raise ConfigError(
                    self.path, str(self.folder), "holds another data set; use another folder"
                )
            return
        try:
            before = json.loads(stamp.read_text())
        except (OSError, ValueError):
            before = None
        if before != self.settings:
            names = sorted(k for k, v in self.settings.items() if (before or {}).get(k) != v)
            raise ConfigError(
                self.path,
                str(self.folder),
                f"holds encodings that were made with other settings ({', '.join(names)}); "
                "use another folder, or delete it",
            )

    def claim(self, staging: Path) -> None:
        """Write the settings down; every rank writes the same."""
        partial = staging / STAMP
        partial.write_text(json.dumps(self.settings, indent=1))
        partial.replace(self.folder / STAMP)

    @contextmanager
    def staging(self, rank: int) -> Iterator[Path]:
        """Yield a folder of this process's own to write in; what a killed one left is removed."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for stale in self.folder.glob(f".staging-{rank}-*"):
            shutil.rmtree(stale, ignore_errors=True)
        own = self.folder / f".staging-{rank}-{token_hex(4)}"
        own.mkdir()
        try:
            yield own
        finally:
            shutil.rmtree(own, ignore_errors=True)

    def put(self, staged: Path) -> None:
        """Move a shard and its notes from the staging folder to their place, the notes first."""
        for path in (staged.with_suffix(".json"), staged):
            _settle(path)
            path.replace(self.folder / path.name)


def open_targets(config: RunConfig, data_root: Path, models_root: Path) -> list[Target]:
    """Return what is to be made; ConfigError where that is nothing, or the folder is another's.

    Raises DataError where pictures or encoders are missing.
    """
    wanted = {part: getattr(config.preprocess, part) for part in PARTS}
    if not any(wanted.values()):
        raise ConfigError("spec.run.preprocess", None, "train or validation must name a folder")
    check_files(config.encoders, models_root)
    targets = [
        _target(config, data_root, models_root, part, name) for part, name in wanted.items() if name
    ]
    for target in targets:
        target.check()
    return targets


def _target(config: RunConfig, data_root: Path, models_root: Path, part: str, name: str) -> Target:
    source = data_root / getattr(config.data, part)
    settings: dict[str, Any] = {
        "source": _fingerprint(source, [*source.glob("*.tar"), *source.glob("*.arrow")], sampled=0),
        "weights": _weights(config, models_root),
        "encoders": config.encoders.model_dump(
            mode="json", include={"text", "autoencoder_kind", "precision"}
        ),
        "image_size": config.data.image_size,
        "text_length": config.data.text_length,
        "shard_size": config.preprocess.shard_size,
        "batch_size": config.preprocess.batch_size,
    }
    pictures = open_images(config, data_root, part)
    path = f"spec.run.preprocess.{part}"
    return Target(part, path, data_root / name, pictures, config.preprocess.shard_size, settings)


def _weights(config: RunConfig, models_root: Path) -> str:
    encoders, found = config.encoders, [models_root / config.encoders.autoencoder]
    if encoders.text == "t5-clip":
        for place in {
            models_root / name for pair in encoders.text_encoder_paths() for name in pair if name
        }:
            found += [
                path
                for path in (place, *place.glob("*"))
                if path.suffix in (".safetensors", ".json", ".model", ".txt")
            ]
    return _fingerprint(models_root, [path for path in found if path.is_file()], _SAMPLED_BYTES)


def _fingerprint(root: Path, files: list[Path], sampled: int) -> str:
    """Return a hash of the names and sizes of ``files`` and of the first ``sampled`` bytes of each."""
    digest = hashlib.sha256()
    for path in sorted(files):
        name = path.relative_to(root) if path.is_relative_to(root) else path
        digest.update(f"{name} {path.stat().st_size}\n".encode())
        if sampled:
            with path.open("rb") as file:
                digest.update(file.read(sampled))
    return digest.hexdigest()


def _settle(path: Path) -> None:
    """Wait until ``path`` is on the disk: its name must not outlive a power loss without its content."""
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)
