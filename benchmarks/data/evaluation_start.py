"""How long an evaluation takes to start on a validation set of a million samples, page cache warm.

The set is opened once by a run. Start is from the call to the first batch: for the first evaluation, for a
later one, and for a later one whose loading began before, as it does one step ahead in a run.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from time import perf_counter, sleep

import torch
from benchmarks.table import print_table
from safetensors.torch import save_file

from fluxtrain.contract.run.config import RunConfig
from fluxtrain.contract.run.resolve import resolve
from fluxtrain.data.loader import EvaluationData, evaluation_batches
from fluxtrain.data.shards import FORMAT, LISTING
from fluxtrain.data.sources import open_source

SHARD = 1024
STEP_SECONDS = 1.0
"""Length of the step during which loading begins ahead."""
TARGET = 1.0


def config(workers: int) -> RunConfig:
    """Return a run whose samples are as small as they can be: what they hold is not measured."""
    return resolve(
        {
            "preset": "micro",
            "model": {"in_channels": 4, "vec_in_dim": 1, "context_in_dim": 1},
            "data": {
                "source": "encoded",
                "latent_size": 2,
                "image_size": 16,
                "text_length": 1,
                "num_workers": workers,
            },
            "evaluation": {"batch_size": 16},
        }
    )


def write(folder: Path, samples: int) -> None:
    """Write a validation set of ``samples`` samples with stored timesteps to ``folder``."""
    folder.mkdir()
    listing = []
    for number in range(-(-samples // SHARD)):
        count = min(SHARD, samples - number * SHARD)
        name = f"shard_{number:06d}.safetensors"
        tensors = {
            "txt": torch.zeros(count, 1, 1),
            "vec": torch.zeros(count, 1),
            "mean": torch.zeros(count, 1, 2, 2),
            "logvar": torch.zeros(count, 1, 2, 2),
            "timestep": torch.arange(count, dtype=torch.int32) % 8,
        }
        save_file(tensors, folder / name)
        listing.append({"file": name, "samples": count})
    (folder / LISTING).write_text(json.dumps({"format": FORMAT, "shards": listing}))


def first_batch(data: EvaluationData) -> float:
    """Return the seconds from the call to the first batch; the evaluation ends there."""
    begin = perf_counter()
    next(iter(data))
    return perf_counter() - begin


def measure(root: Path, workers: int) -> list[float]:
    """Return the seconds of opening the set, and of the three starts."""
    begin = perf_counter()
    source = open_source(config(workers), root, "validation")
    seconds = [perf_counter() - begin]
    cpu = torch.device("cpu")
    data = EvaluationData(evaluation_batches(config(workers), source, 0, 1), cpu)
    seconds += [first_batch(data), first_batch(data)]
    data.begin()
    sleep(STEP_SECONDS)
    return [*seconds, first_batch(data)]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=1 << 20)
    options, _ = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder) / "validation", options.samples)
        rows = {workers: measure(Path(folder), workers) for workers in (0, 4)}
    head = ["loader processes", "open", "first evaluation", "later", "begun ahead"]
    body = [[str(w), *(f"{1000 * s:.1f} ms" for s in seconds)] for w, seconds in rows.items()]
    print_table(f"start of an evaluation of {options.samples:,} samples", head, body)
    slowest = max(max(seconds[1:]) for seconds in rows.values())
    verdict = "met" if slowest < TARGET else "missed"
    print(f"  target {TARGET} s for every start: {verdict}")


if __name__ == "__main__":
    main()
