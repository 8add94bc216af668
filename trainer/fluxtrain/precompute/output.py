"""The output folder of the preprocess task for one part of the data.

folder/
  preprocess.json          the settings, written first; a folder with other settings is refused
  shard_000000.safetensors each appears whole, in any order
  dataset.json             written last
"""

from __future__ import annotations

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
from fluxtrain.data.images.dataset import ImageDataset, open_images
from fluxtrain.data.shard_writer import shard_name
from fluxtrain.data.shards import LISTING
from fluxtrain.data.sources import PARTS
from fluxtrain.encode.encoders import check_files
from fluxtrain.encode.fingerprint import fingerprint, weights_fingerprint
from fluxtrain.errors import ConfigError, DataError
from fluxtrain.files import sync
from fluxtrain.safetensors_file import read_header

SETTINGS = "preprocess.json"


@dataclass(frozen=True)
class EncodedOutput:
    """The encoded shards of one part of the data."""

    part: str
    field_path: str  # of the config, for errors
    folder: Path
    dataset: ImageDataset = field(repr=False)
    shard_size: int
    settings: dict[str, Any] = field(repr=False)

    @property
    def num_shards(self) -> int:
        """Return the number of shards; the last one may be shorter."""
        return -(-len(self.dataset) // self.shard_size)

    @property
    def is_finished(self) -> bool:
        """Return whether the whole data set is written."""
        return (self.folder / LISTING).exists()

    def samples(self, shard: int) -> range:
        """Return the indices of the input samples in ``shard``."""
        begin = shard * self.shard_size
        return range(begin, min(begin + self.shard_size, len(self.dataset)))

    def shard_path(self, shard: int) -> Path:
        """Return the file of ``shard``."""
        return self.folder / shard_name(shard)

    def exists(self, shard: int) -> bool:
        """Return whether ``shard`` is written completely."""
        path = self.shard_path(shard)
        if not path.exists():
            return False
        try:
            read_header(path)  # after a power loss the name may exist without the content
        except DataError:
            return False
        return path.with_suffix(".json").exists()

    def num_existing(self) -> int:
        """Return the number of existing shards, by their names only."""
        names = set(os.listdir(self.folder)) if self.folder.is_dir() else set[str]()
        return sum(shard_name(shard) in names for shard in range(self.num_shards))

    def check(self) -> None:
        """Raise ConfigError if the folder holds another data set or was written with other settings."""
        path = self.folder / SETTINGS
        if not path.exists():
            if any(self.folder.glob("*.safetensors")) or self.is_finished:
                raise ConfigError(
                    self.field_path, str(self.folder), "holds another data set; use another folder"
                )
            return
        try:
            before = json.loads(path.read_text())
        except (OSError, ValueError):
            before = None
        if before != self.settings:
            names = sorted(k for k, v in self.settings.items() if (before or {}).get(k) != v)
            raise ConfigError(
                self.field_path,
                str(self.folder),
                f"holds encodings made with other settings ({', '.join(names)}); "
                "use another folder, or delete it",
            )

    def write_settings(self, staging: Path) -> None:
        """Write preprocess.json; every rank writes the same."""
        partial = staging / SETTINGS
        partial.write_text(json.dumps(self.settings, indent=1))
        partial.replace(self.folder / SETTINGS)

    @contextmanager
    def staging(self, rank: int) -> Iterator[Path]:
        """Yield a temporary folder of this rank; those of killed processes are removed."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for stale in self.folder.glob(f".staging-{rank}-*"):
            shutil.rmtree(stale, ignore_errors=True)
        own = self.folder / f".staging-{rank}-{token_hex(4)}"
        own.mkdir()
        try:
            yield own
        finally:
            shutil.rmtree(own, ignore_errors=True)

    def publish(self, staged: Path) -> None:
        """Move a shard from the staging folder to the output folder, its JSON first."""
        for path in (staged.with_suffix(".json"), staged):
            sync(path)  # a power loss cannot leave its name without its content
            path.replace(self.folder / path.name)


def open_outputs(config: RunConfig, data_root: Path, models_root: Path) -> list[EncodedOutput]:
    """Return the configured outputs; ConfigError if there are none, or if a folder holds something else.

    Raises DataError if images or encoders are missing.
    """
    names = {part: getattr(config.preprocess, part) for part in PARTS}
    if not any(names.values()):
        raise ConfigError("spec.run.preprocess", None, "train or validation must name a folder")
    check_files(config.encoders, models_root)
    outputs = [
        _output(config, data_root, models_root, part, name) for part, name in names.items() if name
    ]
    for output in outputs:
        output.check()
    return outputs


def _output(
    config: RunConfig, data_root: Path, models_root: Path, part: str, name: str
) -> EncodedOutput:
    source = data_root / getattr(config.data, part)
    settings: dict[str, Any] = {
        "source": fingerprint(source, [*source.glob("*.tar"), *source.glob("*.arrow")], sampled=0),
        "weights": weights_fingerprint(config.encoders, models_root),
        "encoders": config.encoders.model_dump(
            mode="json", include={"text", "autoencoder_kind", "precision"}
        ),
        "image_size": config.data.image_size,
        "text_length": config.data.text_length,
        "shard_size": config.preprocess.shard_size,
        "batch_size": config.preprocess.batch_size,
    }
    dataset = open_images(config, data_root, part)
    field_path = f"spec.run.preprocess.{part}"
    size = config.preprocess.shard_size
    return EncodedOutput(part, field_path, data_root / name, dataset, size, settings)
