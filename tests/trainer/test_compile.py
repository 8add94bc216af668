"""Compiling blocks and recomputing their activations: alone, together and sharded, training stays the same.

Compiling for a CPU needs a C++ compiler. The runs share one cache of what was compiled.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from fluxtrain import checkpoint
from fluxtrain.contract.config import RunConfig
from fluxtrain.contract.resolve import resolve
from fluxtrain.model.flux import Flux
from fluxtrain.parallelize import blocks, compile_blocks, recompute_activations

MICRO = Path(__file__).parents[2] / "examples" / "micro.yaml"
FLAGS = [
    *("--schedule.steps=3", "--schedule.warmup_steps=0", "--parallel.micro_batch_size=8"),
    *("--evaluation.every_samples=0", "--evaluation.at_end=false"),
    *("--logging.metrics_port=0", "--logging.every_steps=1"),
]
Rows = list[dict[str, float]]


def finish(output: Path, cache: Path, *flags: str, processes: int = 1) -> Rows:
    """Train three steps; return what was logged of them."""
    command = [sys.executable, "-m", "fluxtrain.cli", "run", str(MICRO), *FLAGS, *flags]
    done = subprocess.run(
        [*command, "--output", str(output), "--processes", str(processes)],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "TORCHINDUCTOR_CACHE_DIR": str(cache)},
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


def state(output: Path) -> dict[str, Tensor]:
    """Return the tensors of the last checkpoint that one rank wrote: weights and both moments."""
    newest = checkpoint.latest(output / "checkpoints")
    assert newest is not None
    (shard,) = newest.glob("*.safetensors")
    return load_file(shard)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("inductor")


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> tuple[Rows, dict[str, Tensor]]:
    """Return the steps and the state of a run that does neither."""
    output = tmp_path_factory.mktemp("plain") / "run"
    return finish(output, cache), state(output)


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("recompute", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("compiled", ["false", "true"])
def test_compiling_and_recomputing_train_alike(
    plain: tuple[Rows, dict[str, Tensor]],
    tmp_path: Path,
    cache: Path,
    compiled: str,
    recompute: float,
    processes: int,
) -> None:
    flags = [
        f"--parallel.compile={compiled}",
        f"--parallel.activation_checkpointing={recompute}",
    ]
    rows = finish(tmp_path / "run", cache, *flags, processes=processes)
    for key in ("train_loss", "grad_norm"):
        expected = [row[key] for row in plain[0]]
        assert [row[key] for row in rows] == pytest.approx(expected, rel=1e-5), key
    if processes == 1:
        found = state(tmp_path / "run")
        assert found.keys() == plain[1].keys(), "names stay those of the plain model"
        for name in found:  # the first moment is the mean of the gradients
            if "exp_avg_sq" not in name:
                torch.testing.assert_close(found[name], plain[1][name], rtol=1e-3, atol=1e-5)


def test_parameters_keep_their_names() -> None:
    config: RunConfig = resolve({"preset": "micro"})
    model = Flux(config.model)
    names = [name for name, _ in model.named_parameters()]
    recompute_activations(model, 1.0)
    compile_blocks(model)
    assert [name for name, _ in model.named_parameters()] == names
    assert len(blocks(model)) == 2
