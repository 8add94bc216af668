"""A stand-in set of the benchmark's sizes, with tiny encodings in sparse files, starts as closed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.trainer import ranks
from tests.trainer.outputs import mlperf_values
from tests.trainer.small_runs import ENCODED_RUN, as_closed, merge_all

from fluxtrain.contract.launch import MLPERF_FILE, RunPaths
from fluxtrain.contract.run.presets import MLPERF_TRAINING_SET, MLPERF_VALIDATION_SET
from fluxtrain.contract.run.resolve import resolve
from fluxtrain.data.empty_text import write_empty_text
from fluxtrain.errors import EXIT_USAGE
from fluxtrain.mlperf.lines import read_lines
from fluxtrain.mlperf.review import Run, rule_findings

SHARD = 137_472
STEP = 256
SHAPES = {"txt": [4, 16], "vec": [16], "mean": [4, 4, 4], "logvar": [4, 4, 4]}


def write_sparse(folder: Path, num_samples: int) -> None:
    """Write a set of ``num_samples`` zeros in shards: only their headers take space."""
    folder.mkdir(parents=True)
    shards = []
    for number, start in enumerate(range(0, num_samples, SHARD)):
        count, header, end = min(SHARD, num_samples - start), dict[str, Any](), 0
        for name, shape in SHAPES.items():
            size = 4 * count * torch.Size(shape).numel()
            span = [end, end + size]
            header[name] = {"dtype": "F32", "shape": [count, *shape], "data_offsets": span}
            end += size
        text = json.dumps(header).encode()
        with (folder / f"shard_{number:06d}.safetensors").open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            file.truncate(8 + len(text) + end)
        shards.append({"file": f"shard_{number:06d}.safetensors", "samples": count})
    (folder / "dataset.json").write_text(json.dumps({"format": 1, "shards": shards}))


@pytest.mark.parametrize(("missing", "code"), [(0, 0), (1, EXIT_USAGE)])
def test_the_benchmarks_sizes_start_as_closed(tmp_path: Path, missing: int, code: int) -> None:
    write_sparse(tmp_path / "train", MLPERF_TRAINING_SET - missing)
    write_sparse(tmp_path / "validation", MLPERF_VALIDATION_SET)
    write_empty_text(tmp_path / "empty.safetensors", torch.zeros(4, 16), torch.zeros(16))
    changes = {
        "seed": 815,
        "data": {"order": "sequential"},
        "schedule": {"global_batch_size": STEP, "steps": 2},
        "parallel": {"micro_batch_size": STEP},
        "evaluation": {"every_samples": 262_144, "target_loss": 0.586},
    }
    config = resolve(merge_all(ENCODED_RUN, changes))
    config = as_closed(config.model_copy(update={"preset": "mlperf-schnell"}))
    paths = RunPaths(tmp_path / "output", tmp_path, tmp_path)
    assert ranks.finish(ranks.train_alone, config, paths) == [code], ranks.output_of(paths)
    assert mlperf_values(paths.output, "submission_division") == ["closed"]
    if missing:
        text = f"data.train has {MLPERF_TRAINING_SET - 1} samples; allowed: {MLPERF_TRAINING_SET}"
        assert f"{text} (training rules 6.5)" in ranks.output_of(paths)
        return
    assert mlperf_values(paths.output, "train_samples") == [MLPERF_TRAINING_SET]
    assert mlperf_values(paths.output, "eval_samples") == [MLPERF_VALIDATION_SET]
    log = paths.output / MLPERF_FILE
    found = rule_findings(Run("run", log, list(read_lines(log))))
    # nobody flushed caches here, and two steps have no evaluation
    assert {each.rule for each in found} == {"caches-are-flushed", "evaluation-cadence"}
