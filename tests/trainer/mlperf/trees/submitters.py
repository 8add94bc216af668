"""Repositories of the results of five submitters, in the form of published ones."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random

from tests.trainer.mlperf.good_run import CONVERGED, Event, complete

from fluxtrain.mlperf.log_lines import TOKEN
from fluxtrain.mlperf.review.package import FIELDS

SUBMITTERS = ("Alder", "Birch", "Cedar", "Damson", "Elder")
NODES = 18
HOUR_MS = 3_600_000


def log(organisation: str, system: str, seed: int, evaluations: int, stats: int = 0) -> list[Event]:
    """Return an honest run: a start and a curve of its own; with ``stats`` more lines in each block."""
    names = {"submission_org": organisation, "submission_platform": system, "seed": seed}
    events = complete(512, evaluations, **names)
    noise = Random(seed)
    for event in events:
        event["time_ms"] += seed % 1000 * 5 * HOUR_MS
        if event["key"] == "eval_accuracy" and event["value"] > 0.586:
            event["value"] += noise.random() / 500
    return [more for event in events for more in (event, *_stats(event, stats))]


def _stats(event: Event, count: int) -> Iterator[Event]:
    if event["key"] != "block_start":
        return
    for number in range(count):
        value = {"train_loss": 0.8, "throughput": 4519.7, "lr": 2e-4, "step": number}
        yield event | {"key": "tracked_stats", "value": value}


def write_result(
    organisation: Path,
    system: str,
    first_seed: int = 1000,
    evaluations: Sequence[int] = CONVERGED,
    stats: int = 0,
    code: str | None = "{system}_pytorch",
) -> Path:
    """Write a result with its description; ``code`` is the folder of its code. Return that of the logs."""
    folder = organisation / "results" / system / "flux1"
    folder.mkdir(parents=True)
    for number, count in enumerate(evaluations):
        events = log(organisation.name, system, first_seed + 37 * number, count, stats)
        text = "".join(f"{TOKEN}{json.dumps(event)}\n" for event in events)
        (folder / f"result_{number}.txt").write_text(text)
    description = dict.fromkeys(FIELDS, "") | {
        "submitter": organisation.name,
        "division": "closed",
        "status": "Available on-premise",
        "number_of_nodes": str(NODES),
        "accelerators_per_node": "4",
    }
    (organisation / "systems").mkdir(exist_ok=True)
    (organisation / f"systems/{system}.json").write_text(json.dumps(description))
    if code is not None:
        name = code.format(system=system)
        write_code(organisation / "benchmarks/flux1/implementations" / name)
    return folder


def write_code(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "README.md").write_text("code")


def write_tree(
    root: Path, results: Sequence[int] = (4, 3, 3, 3, 3), runs: int = 10, stats: int = 0
) -> list[Path]:
    """Write the results of all submitters, those of the first two in a folder of their division."""
    folders = []
    for number, (name, count) in enumerate(zip(SUBMITTERS, results, strict=True)):
        organisation = root / ("closed" if number < 2 else "") / name
        for system in range(count):
            seed = 1000 * (1 + 10 * number + system)
            names = (organisation, f"box.n{4**system}")
            folders.append(write_result(*names, seed, CONVERGED[:runs], stats))
    return folders


def write_other(organisation: Path, system: str, benchmark: str) -> None:
    """Write a result of another benchmark."""
    folder = organisation / "results" / system / benchmark
    folder.mkdir(parents=True)
    (folder / "result_0.txt").write_text("of another benchmark\n")
