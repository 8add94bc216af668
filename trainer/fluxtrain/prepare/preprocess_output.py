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
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from secrets import token_hex
from typing import Any

from fluxtrain.contract.process import FINISH, STEP, RunPaths
from fluxtrain.contract.run.config import RunConfig
from fluxtrain.data.images import ImageDataset
from fluxtrain.data.shards import LISTING, shard_name
from fluxtrain.data.sources import PARTS, open_images
from fluxtrain.encode.encoders import check_files
from fluxtrain.encode.files import fingerprint, weights_fingerprint
from fluxtrain.errors import ConfigError, DataError
from fluxtrain.parallel.distributed import World
from fluxtrain.report.console import Console, duration
from fluxtrain.report.endpoint import Endpoint
from fluxtrain.runtime.files import sync
from fluxtrain.runtime.safetensors import read_header

SETTINGS = "preprocess.json"


@dataclass(frozen=True)
class EncodedOutput:
    """The encoded shards of one part of the data."""

    part: str
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
        return (self.folder / LISTING).exists()

    def samples(self, shard: int) -> range:
        begin = shard * self.shard_size
        return range(begin, min(begin + self.shard_size, len(self.dataset)))

    def shard_path(self, shard: int) -> Path:
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
        path, field = self.folder / SETTINGS, f"spec.run.preprocess.{self.part}"
        if not path.exists():
            if any(self.folder.glob("*.safetensors")) or self.is_finished:
                text = "holds another data set; use another folder"
                raise ConfigError(field, str(self.folder), text)
            return
        try:
            before = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            before = None
        if before != self.settings:
            names = sorted(k for k, v in self.settings.items() if (before or {}).get(k) != v)
            text = f"holds encodings made with other settings ({', '.join(names)}); "
            text += "use another folder, or delete it"
            raise ConfigError(field, str(self.folder), text)

    def write_settings(self, staging: Path) -> None:
        """Write preprocess.json; every rank writes the same."""
        partial = staging / SETTINGS
        partial.write_text(json.dumps(self.settings, indent=1), encoding="utf-8")
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


def open_outputs(config: RunConfig, paths: RunPaths) -> list[EncodedOutput]:
    """Return the configured outputs; ConfigError if there are none, or if a folder holds something else.

    Raises DataError if images or encoders are missing.
    """
    names = {part: getattr(config.preprocess, part) for part in PARTS}
    if not any(names.values()):
        raise ConfigError("spec.run.preprocess", None, "train or validation must name a folder")
    check_files(config.encoders, paths.models)
    outputs = [
        _output(config, paths.data, paths.models, part, name)
        for part, name in names.items()
        if name
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
    return EncodedOutput(part, data_root / name, dataset, config.preprocess.shard_size, settings)


_MAX_DROPPED_LOGGED = 20


class PrecomputeReporter:
    """Counts the shards of all ranks in the output folders; a step is a shard here."""

    def __init__(
        self, config: RunConfig, paths: RunPaths, world: World, outputs: list[EncodedOutput]
    ) -> None:
        self._config, self._world, self._outputs = config, world, outputs
        self._endpoint = Endpoint(config, paths, world)
        self._metrics, self._progress = self._endpoint.metrics, self._endpoint.progress
        self._closing = ExitStack()
        self._total = sum(output.num_shards for output in outputs)
        self._num_samples = sum(len(output.dataset) for output in outputs)
        self._done = self._initially_done = self._count()
        self._start = time.monotonic()
        self._dropped: dict[str, int] = {}

    def __enter__(self) -> PrecomputeReporter:
        if self._world.local_rank == 0:
            self._endpoint.start(self._closing)
        if self._world.is_main:
            self._console = Console(self._total, self._done)
            self._closing.callback(self._console.close)
            self._console.print_line(
                f"{self._num_samples:,} samples in {self._total:,} shards on {self._world.size} × "
                f"{self._world.device.type}; {self._done:,} shards exist"
            )
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._closing.close()

    def start_encoding(self) -> None:
        """Start the clock of the throughput and enter the phase step."""
        self._start = time.monotonic()
        self._progress.update(steps=self._total)
        self._endpoint.set_phase(STEP)
        self._endpoint.step_done()

    def wait_for_others(self) -> None:
        """Enter the phase finish: this rank's shards are written."""
        self._endpoint.set_phase(FINISH)

    def record_activity(self) -> None:
        """Refresh the time of the last activity, by which a hang is detected."""
        self._endpoint.step_done()

    def log_dropped(self, output: EncodedOutput, faults: list[str]) -> int:
        """Print the first unreadable samples to stderr; return how many ``output`` has so far."""
        count = self._dropped.get(output.part, 0)
        for fault in faults[: max(0, _MAX_DROPPED_LOGGED - count)]:
            print(f"left out an unreadable sample: {fault}", file=sys.stderr, flush=True)
        self._metrics.bad_samples.inc(len(faults))
        self._dropped[output.part] = count + len(faults)
        return count + len(faults)

    def log_shard(self) -> None:
        self.refresh()
        if self._world.is_main:
            rate, left = self._rate()
            text = f"shard {self._done:>6}/{self._total}  {rate:>8.1f} samples/s  {duration(left)} left"
            self._console.print_line(text)

    def refresh(self) -> None:
        """Count the shards again; more of them, from any rank, are activity."""
        before, self._done = self._done, self._count()
        if self._done == before:
            return
        rate, left = self._rate()
        samples = min(self._done * self._config.preprocess.shard_size, self._num_samples)
        self._metrics.of_step["step"].set(self._done)
        self._metrics.of_step["samples"].set(samples)
        self._metrics.of_step["samples_per_second"].set(rate)
        self._metrics.of_step["remaining_seconds"].set(left)
        self._progress.update(
            step=self._done, samples=samples, samplesPerSecond=rate, remainingSeconds=left
        )
        self.record_activity()
        if self._world.is_main:
            self._console.advance(self._done)

    def complete(self) -> None:
        self._progress.update(status="success", step=self._total)
        if self._world.is_main:
            for output in self._outputs:
                self._console.print_line(f"{output.part}: {output.folder}")

    def _count(self) -> int:
        return sum(output.num_existing() for output in self._outputs)

    def _rate(self) -> tuple[float, float]:
        seconds = time.monotonic() - self._start
        shards = self._done - self._initially_done
        per_second = shards / seconds if seconds > 0 else 0.0
        left = (self._total - self._done) / per_second if per_second else 0.0
        return per_second * self._config.preprocess.shard_size, left
