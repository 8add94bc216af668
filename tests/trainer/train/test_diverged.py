"""Gradients that are not finite: nothing is updated, nothing is saved, and the run fails.

A hook writes the bad value into one gradient on one rank, while the loss of that step stays finite.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.trainer import in_process, ranks
from tests.trainer.outputs import losses, records
from torch import Tensor
from torch.distributed.tensor import DTensor

from fluxtrain.contract.process import RunPaths
from fluxtrain.contract.run.config import RunConfig
from fluxtrain.contract.run.resolve import resolve
from fluxtrain.errors import EXIT_DIVERGED
from fluxtrain.model.flux import Flux
from fluxtrain.parallel.distributed import World
from fluxtrain.parallel.parallelize import build_model
from fluxtrain.state import run_state
from fluxtrain.state.slots import read_copies
from fluxtrain.train import loop


def make_config(log: int, save: int, steps: int, evaluate: int = 0) -> RunConfig:
    """Return a run that logs, saves and evaluates after as many steps; 0 never."""
    return resolve(
        {
            "preset": "micro",
            "schedule": {"steps": steps},
            "logging": {"every_steps": log, "metrics_port": 0},
            "checkpoint": {"every_steps": save},
            "evaluation": {"every_samples": 16 * evaluate, "at_end": False},
        }
    )


def spoiled(config: RunConfig, paths: RunPaths, world: World, *, at: int, value: float) -> None:
    """Train; in step ``at`` of this process a gradient of the last rank contains ``value``."""
    steps = iter(range(1, config.schedule.steps + 1))

    def spoil(parameter: Tensor) -> None:
        gradient = parameter.grad
        assert gradient is not None
        local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
        if next(steps) == at and world.rank == world.size - 1:
            local.view(-1)[0] = value

    def build(config: RunConfig, world: World, *others: Any) -> Flux:
        model = build_model(config, world, *others)
        model.img_in.weight.register_post_accumulate_grad_hook(spoil)
        return model

    vars(loop)["build_model"] = build
    ranks.train_together(config, paths, world)


INF, NAN = float("inf"), float("nan")
# ranks, step of the bad gradient, its value, config, step of the checkpoint that is kept
BAD_STEPS: list[Any] = [
    (1, 1, INF, make_config(log=1, save=1, steps=4), None),
    (2, 1, NAN, make_config(log=10, save=2, steps=4), None),
    (1, 5, NAN, make_config(log=10, save=2, steps=8), 4),
    pytest.param(2, 5, INF, make_config(log=10, save=2, steps=8), 4, marks=pytest.mark.proof),
    (1, 6, INF, make_config(log=2, save=2, steps=6), 4),  # a log, a save and the last step
    pytest.param(2, 6, -INF, make_config(log=3, save=2, steps=6), 4, marks=pytest.mark.proof),
    pytest.param(
        3, 3, INF, make_config(log=7, save=0, steps=8), None, marks=pytest.mark.proof
    ),  # detected four steps later
    (1, 3, INF, make_config(log=50, save=0, steps=6, evaluate=4), None),
    pytest.param(  # the checkpoint of the step before is still being written
        1, 5, INF, make_config(log=50, save=1, steps=8), 4, marks=pytest.mark.proof
    ),
]


@pytest.mark.parametrize(("size", "bad", "value", "config", "kept"), BAD_STEPS)
def test_a_gradient_that_is_not_finite_ends_the_run_and_keeps_the_last_good_checkpoint(
    tmp_path: Path, size: int, bad: int, value: float, config: RunConfig, kept: int | None
) -> None:
    paths = RunPaths(tmp_path / "run", tmp_path, tmp_path)
    run = partial(spoiled, at=bad, value=value)
    assert ranks.finish(run, config, paths, size) == [EXIT_DIVERGED] * size, ranks.output_of(paths)
    for rank in range(size):
        output = ranks.output_of(paths, rank)
        assert f"the gradient norm is not finite at step {bad}; " in output
        kept_text = (
            f"the checkpoint of step {kept} is kept" if kept else "no checkpoint was saved yet"
        )
        assert kept_text in output
    newest = run_state.latest(paths.output / "checkpoints")
    assert (run_state.read_state(newest).step if newest else None) == kept
    assert all(record["step"] < bad for record in records(paths.output)), (
        "no metrics after it are logged"
    )
    assert "run_stop" not in (paths.output / "mlperf.log").read_text()

    reference = RunPaths(tmp_path / "reference", tmp_path, tmp_path)
    for run_paths in (paths, reference):  # resumed, and a run without a bad gradient
        in_process.train(config, run_paths, size)
    assert losses(paths.output) == pytest.approx(losses(reference.output), rel=1e-6)
    assert all(torch.isfinite(torch.tensor(list(losses(paths.output).values()))))


@pytest.mark.parametrize("bad", [1, 4, 6])
def test_a_bad_step_is_in_no_snapshot_though_it_is_detected_later(tmp_path: Path, bad: int) -> None:
    volume = tmp_path / "memory"
    volume.mkdir()
    paths = RunPaths(tmp_path / "run", tmp_path, tmp_path, snapshots=volume)
    values = make_config(log=50, save=0, steps=6).model_dump(mode="json")
    values["checkpoint"]["memory_every_steps"] = 1
    run = partial(spoiled, at=bad, value=INF)
    assert ranks.finish(run, resolve(values), paths) == [EXIT_DIVERGED], ranks.output_of(paths)
    steps = {copy.step for copy in read_copies(volume, node=0)}
    assert steps <= set(range(bad))
    assert bool(steps) == (bad > 1)
