"""Print the table of bombs with the measured peaks, as Markdown: python -m tests.trainer.bombs."""

from __future__ import annotations

from tests.trainer.bombs.limited import outcomes
from tests.trainer.bombs.rows import ROWS

if __name__ == "__main__":
    print("| file | on the disk, KiB | peak, MiB | bound, MiB | outcome |\n|---|---|---|---|---|")
    for bomb, outcome in zip(ROWS, outcomes(len(ROWS)), strict=True):
        end = "refused" if outcome.is_error else "read"
        sizes = f"{outcome.input_kib:,} | {outcome.peak_mib:,} | {bomb.bound_mib:,}"
        print(f"| {bomb.name} | {sizes} | {end} |", flush=True)
