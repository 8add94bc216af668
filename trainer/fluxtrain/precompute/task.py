"""What one rank of the preprocess task does: its share of the shards, then wait until all are there."""

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
from fluxtrain.precompute.read_ahead import Job, Piece, read_ahead
from fluxtrain.precompute.reporter import PrecomputeReporter
from fluxtrain.precompute.shard import Shard
from fluxtrain.precompute.target import Target, open_targets

_POLL_SECONDS = 0.3


def preprocess(config: RunConfig, paths: RunPaths, world: World) -> None:
    """Encode this rank's shards of all parts, then wait for the other ranks'; rank 0 ends the data sets.

    Raises StoppedError when it was asked to stop, DataError where too many samples are unreadable.
    """
    stop = StopRequest(world)
    stop.listen()
    targets = open_targets(config, paths.data, paths.models)
    with ExitStack() as stack:
        bulletin = stack.enter_context(PrecomputeReporter(config, paths, world, targets))
        missing = [target for target in targets if not target.is_finished]
        stagings = {t.part: stack.enter_context(t.staging(world.rank)) for t in missing}
        for target in missing:
            target.claim(stagings[target.part])
        task = _Task(config, paths, world, stop, bulletin)
        jobs = [Job(target, shard) for target in missing for shard in range(target.num_shards)]
        own = jobs[world.rank :: world.size]
        task.make([job for job in own if not job.target.is_there(job.shard)], stagings)
        bulletin.waiting()
        if world.is_main:
            task.wait_until(lambda: all(t.num_there() == t.num_shards for t in missing))
            task.finish(missing)
        task.wait_until(lambda: all(target.is_finished for target in missing))
        bulletin.complete()


@dataclass(frozen=True)
class _Task:
    """One rank's work and what it needs for it."""

    config: RunConfig
    paths: RunPaths
    world: World
    stop: StopRequest
    bulletin: PrecomputeReporter

    def make(self, jobs: list[Job], stagings: dict[str, Path]) -> None:
        """Make the shards of ``jobs``; one is written while the next is encoded."""
        if not jobs:
            return
        encoders, pieces = self._encoders(), read_ahead(self.config, jobs)
        self.bulletin.begin()
        writing: Future[None] | None = None
        with ThreadPoolExecutor(1, thread_name_prefix="shard") as pool:
            for job in jobs:
                shard = self._encoded(encoders, job, pieces)
                if writing is not None:
                    self._written(writing, stagings)  # so no more than two shards are in memory
                writing = pool.submit(shard.write, stagings[job.target.part])
            if writing is not None:
                self._written(writing, stagings)

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Wait without a collective, so that a rank may take hours longer than another."""
        while not condition():
            self._heed_stop()
            time.sleep(_POLL_SECONDS)
            self.bulletin.look()

    def finish(self, targets: list[Target]) -> None:
        """Write the empty prompt's encodings, then what makes each folder of shards a data set."""
        if not targets:
            return
        txt, vec = self._encoders().empty_text()
        path = self.paths.data / self.config.preprocess.empty_encodings
        write_empty_text(path, txt.cpu(), vec.cpu())
        for target in targets:
            self._list(target)

    def _encoders(self) -> Encoders:
        return load_encoders(self.config, self.paths.models, self.world.device)

    def _encoded(self, encoders: Encoders, job: Job, pieces: Iterator[Piece]) -> Shard:
        shard = Shard(job)
        for _ in job.pieces(self.config.preprocess.batch_size):
            self._heed_stop()
            piece = next(pieces)
            shard.add(piece, encoders.encode(piece.images, piece.captions))
            self.bulletin.alive()
        dropped = self.bulletin.dropped(job.target, shard.dropped)
        self._check_dropped(job.target, dropped, shard.dropped)
        return shard

    def _written(self, writing: Future[None], stagings: dict[str, Path]) -> None:
        """Wait until a shard is written; that its file grows is a sign of life, that it waits is none."""
        size = 0
        while wait([writing], _POLL_SECONDS).not_done:
            before, size = size, sum(folder_size(folder) for folder in stagings.values())
            if size != before:
                self.bulletin.alive()
        writing.result()
        self.bulletin.shard_done()

    def _heed_stop(self) -> None:
        if self.stop.requested:
            raise StoppedError("stopped; the shards so far are kept, the same command goes on")

    def _check_dropped(self, target: Target, count: int, latest: list[str]) -> None:
        """Stop where too many samples are unreadable; a validation set is never thinned."""
        limit, rule = 0.0, "a validation set must be whole"
        if target.part == "train":
            limit = max(1.0, self.config.data.max_bad_fraction * len(target.pictures))
            rule = f"spec.run.data.max_bad_fraction allows {limit:.0f}"
        if count > limit:
            raise DataError(
                f"{count} of {len(target.pictures)} {target.part} samples cannot be read; {rule}; "
                f"the last: {latest[-1] if latest else 'named in the log of another attempt'}"
            )

    def _list(self, target: Target) -> None:
        """Write the listing of ``target``: from here on it is a data set."""
        shards, dropped = list[dict[str, object]](), list[str]()
        for number in range(target.num_shards):
            path = target.shard_path(number)
            notes = json.loads(path.with_suffix(".json").read_text())
            shards.append({"file": path.name, "samples": len(notes["keys"])})
            dropped += notes["dropped"]
        self._check_dropped(target, len(dropped), dropped)
        for stale in target.folder.glob(".staging-*"):
            shutil.rmtree(stale, ignore_errors=True)
        provenance = {"task": "preprocess", "settings": target.settings, "dropped": len(dropped)}
        write_listing(target.folder, shards, provenance)
