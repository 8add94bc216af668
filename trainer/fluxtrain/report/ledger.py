"""The ledger: one file per rank with the samples that it used in each step."""

from __future__ import annotations

from pathlib import Path

from fluxtrain.contract.launch import LEDGER_FOLDER
from fluxtrain.distributed import World
from fluxtrain.fence import Fence
from fluxtrain.report.records import Records, drop_after


class Ledger:
    """The file of this rank."""

    def __init__(self, output: Path, step: int, world: World, fence: Fence) -> None:
        """Continue the ledger in ``output`` after ``step``; every rank must call this.

        Raises FencedError if there is a newer start, whose files would be replaced.
        """
        fence.check()
        folder = output / LEDGER_FOLDER
        folder.mkdir(exist_ok=True)
        if world.is_main:  # including files of ranks that this run no longer has
            for path in folder.glob("rank_*.jsonl"):
                drop_after(path, step)
        world.barrier()
        fence.check()
        self._records = Records(folder / f"rank_{world.rank:05d}.jsonl", step)

    def write(self, step: int, indices: list[int]) -> None:
        """Append the ``indices`` of the samples that were used in ``step``."""
        self._records.write({"step": step, "indices": indices})

    def close(self) -> None:
        """Close the file."""
        self._records.close()
