"""Whether training in fp8 reaches the evaluation loss of bfloat16: pairs of runs that draw the same numbers.

    python -m benchmarks.training.fp8 [FILE.yaml ...] [--seeds 3] [--set schedule.steps=300]

Noise, order and initial weights depend on the seed only, so the runs of a seed differ by their arithmetic.
The difference is compared with the spread of bfloat16 over the seeds. A GPU computes fp8, a CPU emulates it.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import stdev

from benchmarks.peers import ROOT
from benchmarks.table import print_table

ARMS = ("none", "tensorwise", "rowwise")
EXAMPLES = (ROOT / "examples/micro.yaml", ROOT / "examples/openmoji.yaml")


def evaluation_loss(file: Path, seed: int, fp8: str, options: Sequence[str], folder: Path) -> float:
    """Train ``file`` once; return its last evaluation loss."""
    output = folder / f"{file.stem}-{seed}-{fp8}"
    command = [sys.executable, "-W", "ignore", "-m", "fluxtrain.cli", "run", str(file)]
    changes = {"seed": seed, "precision.fp8": fp8, "precision.compute": "bfloat16"}
    quiet = {"logging.metrics_port": 0, "sampling.at_end": False, "sampling.every_steps": 0}
    for name, value in {**changes, **quiet}.items():
        command.append(f"--{name}={json.dumps(value) if isinstance(value, bool) else value}")
    command += [*(f"--{option}" for option in options), f"--output={output}"]
    subprocess.run(command, check=True, cwd=ROOT, capture_output=True)
    records = map(json.loads, (output / "metrics.jsonl").read_text().splitlines())
    *_, last = (record["eval_loss"] for record in records if "eval_loss" in record)
    return float(last)


def compare(file: Path, seeds: Sequence[int], options: Sequence[str], folder: Path) -> bool:
    """Print the losses; return whether fp8 is closer to bfloat16 than the seeds are to each other."""
    losses = dict[str, list[float]]()
    for arm in ARMS:
        losses[arm] = [evaluation_loss(file, seed, arm, options, folder) for seed in seeds]
        print(f"{file.stem} {arm}: {losses[arm]}", flush=True)
    plain = losses["none"]
    spread, rows, is_within = stdev(plain), list[list[str]](), True
    for arm in ARMS:
        pairs = [own - other for own, other in zip(losses[arm], plain, strict=True)]
        largest = max(map(abs, pairs))
        is_within &= largest < spread
        cells = [f"{loss:.5f}" for loss in losses[arm]]
        rows.append([arm.replace("none", "bfloat16"), *cells, f"{largest:.5f}"])
    head = ["linear layers", *(f"seed {seed}" for seed in seeds), "largest difference"]
    print_table(f"{file.stem}: evaluation loss; spread of bfloat16 {spread:.5f}", head, rows)
    return is_within


def main(arguments: list[str] | None = None) -> int:
    """Return the exit code: 1 if a difference is larger than the spread of the seeds."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("files", nargs="*", type=Path, default=list(EXAMPLES))
    parser.add_argument("--seeds", type=int, default=3, metavar="N", help="two or more")
    parser.add_argument(
        "--set", action="append", default=[], metavar="FIELD=VALUE", help="of all runs"
    )
    options = parser.parse_args(arguments)
    if options.seeds < 2:
        parser.error("--seeds must be 2 or more")
    seeds = range(1, options.seeds + 1)
    with tempfile.TemporaryDirectory(prefix="fp8-") as folder:
        results = [compare(file, seeds, options.set, Path(folder)) for file in options.files]
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
