"""The preprocess task: encodes images and captions into shards, each exactly once, on any number of ranks.

A shard is a fixed range of the input's samples, encoded in batches that start with the range. Its
content depends only on the input and the settings, not on the number of ranks or on restarts. A shard
that exists is finished; there is no other state, and ranks do not wait for each other in collectives.

Axes: b batch, H W image.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import torch
from jaxtyping import UInt8
from torch import Tensor
from torch.utils.data import DataLoader
from torch.utils.data import Dataset as TorchDataset

from fluxtrain.contract.process import RunPaths
from fluxtrain.contract.run.config import RunConfig
from fluxtrain.data.dataset import Encodings
from fluxtrain.data.images import SampleError
from fluxtrain.data.loader import START_METHOD
from fluxtrain.data.shards import FIELDS, write_listing, write_shard
from fluxtrain.data.sources import write_empty_text
from fluxtrain.encode.encoders import Encoders, load_encoders
from fluxtrain.errors import DataError, StoppedError
from fluxtrain.parallel.distributed import StopRequest, World
from fluxtrain.prepare.preprocess_output import EncodedOutput, PrecomputeReporter, open_outputs
from fluxtrain.runtime.files import folder_size

_POLL_SECONDS = 0.3


def preprocess(config: RunConfig, paths: RunPaths, world: World) -> None:
    """Encode this rank's shards, then wait for the other ranks; rank 0 writes the listings.

    Raises StoppedError after a stop request, DataError if too many samples are unreadable.
    """
    stop = StopRequest(world)
    stop.install()
    outputs = open_outputs(config, paths)
    with ExitStack() as stack:
        reporter = stack.enter_context(PrecomputeReporter(config, paths, world, outputs))
        unfinished = [output for output in outputs if not output.is_finished]
        stagings = {o.part: stack.enter_context(o.staging(world.rank)) for o in unfinished}
        for output in unfinished:
            output.write_settings(stagings[output.part])
        task = _Task(config, paths, world, stop, reporter)
        shards = [
            PendingShard(output, n) for output in unfinished for n in range(output.num_shards)
        ]
        own = shards[world.rank :: world.size]
        task.encode([shard for shard in own if not shard.output.exists(shard.number)], stagings)
        reporter.wait_for_others()
        if world.is_main:
            task.wait_until(lambda: all(o.num_existing() == o.num_shards for o in unfinished))
            task.finish(unfinished)
        task.wait_until(lambda: all(output.is_finished for output in unfinished))
        reporter.complete()


@dataclass(frozen=True)
class _Task:
    config: RunConfig
    paths: RunPaths
    world: World
    stop: StopRequest
    reporter: PrecomputeReporter

    def encode(self, shards: list[PendingShard], stagings: dict[str, Path]) -> None:
        """Encode ``shards``; each is written while the next one is encoded."""
        if not shards:
            return
        encoders, batches = self._load_encoders(), read_ahead(self.config, shards)
        self.reporter.start_encoding()
        writing: Future[None] | None = None
        with ThreadPoolExecutor(1, thread_name_prefix="shard") as pool:
            for shard in shards:
                buffer = self._encode_shard(encoders, shard, batches)
                if writing is not None:
                    self._await_write(writing, stagings)  # at most two shards are in memory
                writing = pool.submit(buffer.write, stagings[shard.output.part])
            if writing is not None:
                self._await_write(writing, stagings)

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Poll ``condition``; unlike a collective this has no timeout, and ranks may differ by hours."""
        while not condition():
            self._check_stop()
            time.sleep(_POLL_SECONDS)
            self.reporter.refresh()

    def finish(self, outputs: list[EncodedOutput]) -> None:
        """Write the empty prompt's encodings, then the listing of each output."""
        if not outputs:
            return
        txt, vec = self._load_encoders().empty_text()
        path = self.paths.data / self.config.preprocess.empty_encodings
        write_empty_text(path, txt.cpu(), vec.cpu())
        for output in outputs:
            self._write_listing(output)

    def _load_encoders(self) -> Encoders:
        return load_encoders(self.config, self.paths.models, self.world.device)

    def _encode_shard(
        self, encoders: Encoders, shard: PendingShard, batches: Iterator[InputBatch]
    ) -> ShardBuffer:
        buffer = ShardBuffer(shard)
        for _ in shard.batches(self.config.preprocess.batch_size):
            self._check_stop()
            batch = next(batches)
            buffer.add(batch, encoders.encode(batch.images, batch.captions))
            self.reporter.record_activity()
        num_dropped = self.reporter.log_dropped(shard.output, buffer.dropped)
        self._check_dropped(shard.output, num_dropped, buffer.dropped)
        return buffer

    def _await_write(self, writing: Future[None], stagings: dict[str, Path]) -> None:
        """Wait until a shard is written; only growth of its file counts as activity."""
        size = 0
        while wait([writing], _POLL_SECONDS).not_done:
            before, size = size, sum(folder_size(folder) for folder in stagings.values())
            if size != before:
                self.reporter.record_activity()
        writing.result()
        self.reporter.log_shard()

    def _check_stop(self) -> None:
        if self.stop.requested:
            raise StoppedError("stopped; the finished shards are kept, the same command resumes")

    def _check_dropped(self, output: EncodedOutput, count: int, latest: list[str]) -> None:
        """Raise DataError if ``count`` samples are too many; a validation set must be whole."""
        limit, rule = 0.0, "a validation set must be whole"
        if output.part == "train":
            limit = max(1.0, self.config.data.max_bad_fraction * len(output.dataset))
            rule = f"spec.run.data.max_bad_fraction allows {limit:.0f}"
        if count > limit:
            raise DataError(
                f"{count} of {len(output.dataset)} {output.part} samples cannot be read; {rule}; "
                f"the last: {latest[-1] if latest else 'named in the log of another attempt'}"
            )

    def _write_listing(self, output: EncodedOutput) -> None:
        """Write the listing of ``output``, which makes it a data set."""
        shards, dropped = list[dict[str, object]](), list[str]()
        for number in range(output.num_shards):
            path = output.shard_path(number)
            metadata = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
            shards.append({"file": path.name, "samples": len(metadata["keys"])})
            dropped += metadata["dropped"]
        self._check_dropped(output, len(dropped), dropped)
        for stale in output.folder.glob(".staging-*"):
            shutil.rmtree(stale, ignore_errors=True)
        provenance = {"task": "preprocess", "settings": output.settings, "dropped": len(dropped)}
        write_listing(output.folder, shards, provenance)


@dataclass(frozen=True)
class InputBatch:
    """The samples of one forward pass; an unreadable one has a fault and a black image."""

    images: UInt8[Tensor, "b 3 H W"]
    captions: list[str]
    keys: list[str]
    timesteps: list[int | None]
    faults: list[str | None]


@dataclass(frozen=True)
class PendingShard:
    """A shard that is not written yet."""

    output: EncodedOutput
    number: int

    def batches(self, batch_size: int) -> list[range]:
        """Return the samples of each forward pass; the first one starts with the shard."""
        samples = self.output.samples(self.number)
        starts = range(samples.start, samples.stop, batch_size)
        return [range(start, min(start + batch_size, samples.stop)) for start in starts]


def read_ahead(config: RunConfig, shards: list[PendingShard]) -> Iterator[InputBatch]:
    """Yield the batches of ``shards`` in order, read by the loader processes."""
    size = config.preprocess.batch_size
    ranges = [(shard.output, samples) for shard in shards for samples in shard.batches(size)]
    workers = min(config.data.num_workers, len(ranges))
    loader = DataLoader(
        _InputBatches(ranges),
        sampler=range(len(ranges)),
        batch_size=None,  # an item is a whole batch
        num_workers=workers,
        prefetch_factor=config.data.prefetch if workers else None,
        multiprocessing_context=START_METHOD if workers else None,
    )
    return iter(loader)


@dataclass
class _InputBatches(TorchDataset[InputBatch]):
    ranges: list[tuple[EncodedOutput, range]]

    def __getitem__(self, number: int) -> InputBatch:
        output, samples = self.ranges[number]
        dataset = output.dataset
        images = torch.zeros(len(samples), 3, dataset.side, dataset.side, dtype=torch.uint8)
        captions, faults = list[str](), list[str | None]()
        for index, image in zip(samples, images, strict=True):
            try:
                captions.append(dataset.read(index, image))
                faults.append(None)
            except SampleError as error:
                captions.append("")
                faults.append(str(error))
        keys = [dataset.key(index) for index in samples]
        steps = [dataset.timestep(index) for index in samples]
        return InputBatch(images, captions, keys, steps, faults)


@dataclass
class ShardBuffer:
    """The encoded samples of ``shard`` so far; unreadable ones are left out and listed in ``dropped``."""

    shard: PendingShard
    encodings: Encodings | None = None
    keys: list[str] = field(default_factory=list)
    captions: list[str] = field(default_factory=list)
    timesteps: list[int | None] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)

    def add(self, batch: InputBatch, encoded: Encodings) -> None:
        """Append the readable samples of ``batch`` with their encodings."""
        if self.encodings is None:
            count = len(self.shard.output.samples(self.shard.number))
            self.encodings = Encodings(*(_empty(getattr(encoded, name), count) for name in FIELDS))
        kept = [row for row, fault in enumerate(batch.faults) if fault is None]
        begin, end = len(self.keys), len(self.keys) + len(kept)
        for name in FIELDS:
            getattr(self.encodings, name)[begin:end] = getattr(encoded, name)[kept].cpu()
        self.keys += [batch.keys[row] for row in kept]
        self.captions += [batch.captions[row] for row in kept]
        self.timesteps += [batch.timesteps[row] for row in kept]
        self.dropped += [fault for fault in batch.faults if fault is not None]

    def write(self, staging: Path) -> None:
        """Write the shard to ``staging`` and move it to the output folder."""
        assert self.encodings is not None
        tensors = {name: getattr(self.encodings, name)[: len(self.keys)] for name in FIELDS}
        texts = {"keys": self.keys, "captions": self.captions, "dropped": self.dropped}
        staged = staging / self.shard.output.shard_path(self.shard.number).name
        write_shard(staged, tensors, self.timesteps, texts)
        self.shard.output.publish(staged)


def _empty(encoded: Tensor, count: int) -> Tensor:
    return torch.empty(count, *encoded.shape[1:], dtype=encoded.dtype)
