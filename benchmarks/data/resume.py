"""The cost of positioning the data at a late step, compared with iterating to it.

Ours computes the order of the step's epoch. The others are measured over few batches and extrapolated, since
they would take hours.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from statistics import median
from time import perf_counter

import torch
from benchmarks.table import print_table, spread
from torch.utils.data import BatchSampler, DataLoader, RandomSampler
from torch.utils.data import Dataset as TorchDataset

from fluxtrain.data.order import BatchShares, Order

NUM_SAMPLES = 1_099_776  # MLPerf's training set
GLOBAL_BATCH = 512
WORLD_SIZE, MICRO_BATCH = 64, 8
LATE_BATCH = 1_000_000
READ_SECONDS = 1 / 1720
"""One sample read and discarded: Arrow + np.load at what benchmarks.data.loader measured on two cores."""


class Numbers(TorchDataset[int]):
    """A data set that costs nothing to read: sample i is i."""

    def __len__(self) -> int:
        """Return the number of samples."""
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> int:
        """Return ``index``."""
        return index


def ours(batch: int) -> float:
    """Return the seconds until a new loader has the indices of ``batch``."""
    begin = perf_counter()
    shares = BatchShares(GLOBAL_BATCH, MICRO_BATCH, WORLD_SIZE)
    order = Order(seed=1, num_samples=NUM_SAMPLES, global_batch_size=GLOBAL_BATCH)
    indices = order.indices(batch, shares.positions(WORLD_SIZE - 1, 0))
    assert len(indices) == MICRO_BATCH
    return perf_counter() - begin


def sampler() -> Iterator[object]:
    """Return a rank's shuffled batches of indices, reading nothing."""
    return iter(BatchSampler(RandomSampler(Numbers()), MICRO_BATCH, drop_last=True))


def loader() -> Iterator[object]:
    """Return the batches of a DataLoader whose samples cost nothing to read."""
    return iter(DataLoader(Numbers(), MICRO_BATCH, shuffle=True))


def per_batch(batches: Iterator[object], count: int) -> float:
    """Return the seconds that each of the next ``count`` batches costs, the start left out."""
    next(batches)
    begin = perf_counter()
    for _ in range(count):
        next(batches)
    return (perf_counter() - begin) / count


def duration(seconds: float) -> str:
    """Return ``seconds`` in a readable unit."""
    for unit, size in (("h", 3600.0), ("min", 60.0), ("s", 1.0)):
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds * 1000:.1f} ms"


def main(arguments: list[str] | None = None) -> None:
    """Print the cost of a late position and of an early one."""
    parser = argparse.ArgumentParser(prog="benchmarks.data.resume", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    late = [ours(LATE_BATCH) for _ in range(options.rounds)]
    early = [ours(0) for _ in range(options.rounds)]
    own = median(late)
    others = {
        "walking the sampler, nothing read": per_batch(sampler(), 50_000),
        "walking a DataLoader, samples free": per_batch(loader(), 10_000),
        "reading and discarding (MLPerf reference)": MICRO_BATCH * READ_SECONDS,
    }
    rows = [
        ["fluxtrain", duration(own), "1"],
        *(
            [
                f"{name}, extrapolated",
                duration(cost * LATE_BATCH),
                f"{cost * LATE_BATCH / own:,.0f}",
            ]
            for name, cost in others.items()
        ),
    ]
    print_table(
        f"position at global batch {LATE_BATCH:,} of {GLOBAL_BATCH} samples, {NUM_SAMPLES:,} in the set,"
        f" one of {WORLD_SIZE} ranks",
        ["", "time", "x ours"],
        rows,
    )
    print(
        f"  ours in ms: {spread(late, 1000, 1)} there, {spread(early, 1000, 1)} at the first batch"
    )


if __name__ == "__main__":
    main()
