"""Compiled blocks and activation checkpointing do not change training, alone, together and sharded.

Compiling for a CPU needs a C++ compiler, and 30 seconds for each kind of block. So most models here have
one kind, and the runs share one compile cache.
"""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

import pytest
import torch
from cluster.free_ports import free_port
from safetensors.torch import load_file
from tests.trainer import ranks
from tests.trainer.outputs import records
from torch import Tensor

from fluxtrain import run_state
from fluxtrain.contract.launch import RunPaths
from fluxtrain.contract.run.config import RunConfig
from fluxtrain.contract.run.resolve import merge, resolve
from fluxtrain.distributed import World
from fluxtrain.model.flux import Flux
from fluxtrain.parallelize import compile_blocks, recompute_activations

pytestmark = pytest.mark.slow

TRAINING = {
    "preset": "micro",
    "model": {"depth": 0, "depth_single_blocks": 2},
    "schedule": {"steps": 3, "warmup_steps": 0},
    "parallel": {"micro_batch_size": 8},
    "evaluation": {"every_samples": 0, "at_end": False},
    "logging": {"every_steps": 1, "metrics_port": 0},
}
Metrics = list[dict[str, float]]
State = dict[str, Tensor]


def train(config: RunConfig, paths: RunPaths, world: World, *, port: int, cache: str) -> None:
    """Train with the compile cache ``cache``, without compile processes."""
    from torch._inductor import config as inductor

    os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
    inductor.compile_threads = 1
    ranks.train_together(config, paths, world, port=port)


def finish(
    output: Path, cache: Path, parallel: dict[str, object], size: int = 1, **changes: object
) -> Metrics:
    """Train three steps; return their logged metrics."""
    paths = RunPaths(output, output, output)
    run = partial(train, port=free_port(), cache=str(cache))
    config = resolve(merge(TRAINING, {"parallel": parallel, **changes}))
    assert ranks.finish(run, config, paths, size) == [0] * size, ranks.output_of(paths)
    return records(output)


def state(output: Path) -> State:
    """Return the tensors of one rank's last checkpoint: weights and both moments."""
    newest = run_state.latest(output / "checkpoints")
    assert newest is not None
    (shard,) = newest.glob("*.safetensors")
    return load_file(shard)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("inductor")


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> tuple[Metrics, State]:
    """Return the metrics and the state of an eager run without recomputation."""
    output = tmp_path_factory.mktemp("plain") / "run"
    return finish(output, cache, {}), state(output)


@pytest.mark.parametrize(
    ("compiled", "recompute", "size"),
    [
        (False, 0.0, 2),
        (False, 0.5, 1),
        (False, 1.0, 2),
        (True, 0.5, 1),  # of two equal blocks, one is recomputed
        (True, 0.5, 2),
    ],
)
def test_compiling_and_recomputing_do_not_change_training(
    plain: tuple[Metrics, State],
    tmp_path: Path,
    cache: Path,
    compiled: bool,
    recompute: float,
    size: int,
) -> None:
    parallel = {"compile": compiled, "activation_checkpointing": recompute}
    rows = finish(tmp_path / "run", cache, parallel, size)
    for key in ("train_loss", "grad_norm"):
        expected = [row[key] for row in plain[0]]
        assert [row[key] for row in rows] == pytest.approx(expected, rel=1e-5), key
    if size == 1:
        tensors = state(tmp_path / "run")
        assert tensors.keys() == plain[1].keys(), "parameters keep their names"
        for name, tensor in tensors.items():  # the first moment is a mean of gradients
            if "exp_avg_sq" not in name:
                torch.testing.assert_close(tensor, plain[1][name], rtol=1e-3, atol=1e-5)


def test_compiled_blocks_of_both_kinds_are_recomputed(tmp_path: Path, cache: Path) -> None:
    both = {"depth": 1, "depth_single_blocks": 1}
    parallel = {"compile": True, "activation_checkpointing": 1.0}
    plain = finish(tmp_path / "plain", cache, {}, model=both)
    compiled = finish(tmp_path / "run", cache, parallel, model=both)
    for key in ("train_loss", "grad_norm"):
        expected = [row[key] for row in plain]
        assert [row[key] for row in compiled] == pytest.approx(expected, rel=1e-5), key


def test_parameters_keep_their_names() -> None:
    model = Flux(resolve({"preset": "micro"}).model)
    names = [name for name, _ in model.named_parameters()]
    recompute_activations(model, 1.0)
    compile_blocks(model)
    assert [name for name, _ in model.named_parameters()] == names
