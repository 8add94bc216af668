"""The process of one rank of a trial: takes a few training steps, and ends with a code that says why.

It is started by the benchmark task with torchrun's variables, and reads its order from stdin as JSON.

With buckets its samples are synthetic, sizes in turn by the shares of the training set if there is one:
every part of a measurement has the same batches, and the largest size is in each.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from fluxtrain.contract.model_base import validate
from fluxtrain.contract.process import RunPaths
from fluxtrain.contract.run.config import RunConfig
from fluxtrain.contract.run.data import Size
from fluxtrain.data.sources import Sources, SyntheticDataset, open_source
from fluxtrain.errors import EXIT_ERROR, EXIT_OK
from fluxtrain.report.progress import publish
from fluxtrain.runtime.devices import bind_near_gpu
from fluxtrain.runtime.files import atomic_write
from fluxtrain.runtime.progress import Progress


def mixed_sources(config: RunConfig, data_root: Path, turns: int) -> Sources | None:
    """Return the data of a trial of ``config``: ``turns`` global batches, again and again; 0: the largest.

    None without buckets: the run's own.
    """
    if config.data.buckets is None:
        return None
    largest = config.data.largest_latent
    sizes = in_turn(_counts(config, data_root), turns) if turns else [largest]
    train = SyntheticDataset(config, len(sizes) * config.schedule.global_batch_size, sizes)
    return Sources(train, None, train.empty_text())


def _counts(config: RunConfig, data_root: Path) -> Mapping[Size, int]:
    """Return the samples of each size in the training set; of a synthetic one the sizes, equally many."""
    if config.data.source == "synthetic":
        return dict.fromkeys(config.data.latent_sizes, 1)
    train = open_source(config, data_root, "train")
    sizes, counts = np.unique(train.latent_sizes, axis=0, return_counts=True)
    return {
        (height, width): count
        for (height, width), count in zip(sizes.tolist(), counts.tolist(), strict=True)
    }


def in_turn(counts: Mapping[Size, int], turns: int) -> Sequence[Size]:
    """Return ``turns`` sizes with the shares of ``counts``, by largest remainders; the largest is in it."""
    largest = max(counts, key=lambda size: size[0] * size[1])
    total = sum(counts.values())
    exact = {size: turns * count / total for size, count in counts.items()}
    whole = {size: int(share) for size, share in exact.items()}
    whole[largest] = max(1, whole[largest])
    by_rest = sorted(exact, key=lambda size: (whole[size] - exact[size], size))
    for size in by_rest[: turns - sum(whole.values())]:
        whole[size] += 1
    return [size for size in sorted(whole) for _ in range(whole[size])]


EXIT_OUT_OF_MEMORY = 12
"""Exit code of a process that had no memory left."""
FACTS_FILE = "facts.json"
"""What rank 0 of a trial writes about its device."""
_SIGNS = (
    *("out of memory", "can't allocate memory", "cannot allocate memory", "std::bad_alloc"),
    "can't start new thread",
)
"""Parts of the messages of torch's allocators, of collectives, and of Python without room for a stack."""


def main() -> int:
    """Take the steps of the order on stdin; return the exit code."""
    order = json.load(sys.stdin)
    if order["memory_bytes"]:
        num_bytes = order["memory_bytes"]
        resource.setrlimit(resource.RLIMIT_DATA, (num_bytes, num_bytes))
    try:
        _take_steps(order)
        return EXIT_OK
    except BaseException as error:
        traceback.print_exc()
        return EXIT_OUT_OF_MEMORY if is_out_of_memory(error) else EXIT_ERROR


def is_out_of_memory(error: BaseException | None) -> bool:
    """Return whether ``error`` or one of its causes says that memory is short."""
    while error is not None:
        if isinstance(error, MemoryError) or any(sign in str(error).lower() for sign in _SIGNS):
            return True
        error = error.__cause__ or error.__context__
    return False


def _take_steps(order: dict[str, object]) -> None:
    progress = Progress()
    publish(progress)
    from fluxtrain.parallel.distributed import end_with_parent, process_group

    end_with_parent()
    bind_near_gpu(int(os.environ.get("LOCAL_RANK", "0")))
    from fluxtrain.benchmark.results import facts
    from fluxtrain.train.loop import take_steps
    from fluxtrain.train.memory import settle_resharding_of

    config = validate(RunConfig, order["config"], "spec.run")
    paths = RunPaths.from_environment(os.environ)
    with process_group(progress) as world:
        config = settle_resharding_of(world, config)
        sources = mixed_sources(config, paths.data, int(str(order["turns"])))
        take_steps(config, paths, world, int(str(order["steps"])), sources)
        if world.is_main:
            with atomic_write(Path(paths.output) / FACTS_FILE) as partial:
                partial.write_text(json.dumps(facts(config, world)), encoding="utf-8")


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # not through destructors, which may wait for other ranks
