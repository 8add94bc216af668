"""The preprocess task on one rank: encodes its share of the shards, then waits for the other ranks."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from fluxtrain.contract.launch import RunPaths
from fluxtrain.contract.run.config import RunConfig
from fluxtrain.data.empty_text import write_empty_text
from fluxtrain.data.shard_writer import write_listing
from fluxtrain.distributed import StopRequest, World
from fluxtrain.encode.encoders import Encoders, load_encoders
from fluxtrain.errors import DataError, StoppedError
from fluxtrain.files import folder_size
from fluxtrain.precompute.output import EncodedOutput, open_outputs
from fluxtrain.precompute.read_ahead import InputBatch, PendingShard, read_ahead
from fluxtrain.precompute.reporter import PrecomputeReporter
from fluxtrain.precompute.shard import ShardBuffer

_POLL_SECONDS = 0.3


def preprocess(config: RunConfig, paths: RunPaths, world: World) -> None:
    """Encode this rank's shards, then wait for the other ranks; rank 0 writes the listings.

    Raises StoppedError after a stop request, DataError if too many samples are unreadable.
    """
    stop = StopRequest(world)
    stop.install()
    outputs = open_outputs(config, paths.data, paths.models)
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
            metadata = json.loads(path.with_suffix(".json").read_text())
            shards.append({"file": path.name, "samples": len(metadata["keys"])})
            dropped += metadata["dropped"]
        self._check_dropped(output, len(dropped), dropped)
        for stale in output.folder.glob(".staging-*"):
            shutil.rmtree(stale, ignore_errors=True)
        provenance = {"task": "preprocess", "settings": output.settings, "dropped": len(dropped)}
        write_listing(output.folder, shards, provenance)
