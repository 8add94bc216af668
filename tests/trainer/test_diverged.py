"""Gradients that are not finite: nothing is updated, nothing is saved, and the run ends by saying so.

A hook puts the bad number into one gradient on one rank, while the loss of that step stays finite.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.free_ports import free_port
from tests.trainer import ranks
from torch import Tensor
from torch.distributed.tensor import DTensor

from fluxtrain import checkpoint
from fluxtrain import train as training
from fluxtrain.contract.launch import RunPaths
from fluxtrain.contract.run.config import RunConfig
from fluxtrain.contract.run.resolve import resolve
from fluxtrain.distributed import World
from fluxtrain.errors import EXIT_DIVERGED
from fluxtrain.model.flux import Flux
from fluxtrain.parallelize import build_model


def make_config(log: int, save: int, steps: int, evaluate: int = 0) -> RunConfig:
    """Return a run that does each of these after as many steps; 0 never."""
    return resolve(
        {
            "preset": "micro",
            "schedule": {"steps": steps},
            "logging": {"every_steps": log, "metrics_port": 0},
            "checkpoint": {"every_steps": save},
            "evaluation": {"every_samples": 16 * evaluate, "at_end": False},
        }
    )


def spoiled(
    config: RunConfig, paths: RunPaths, world: World, *, port: int, at: int, value: float
) -> None:
    """Train; in the step that is ``at`` of this process one gradient of the last rank holds ``value``."""
    steps = iter(range(1, config.schedule.steps + 1))

    def spoil(parameter: Tensor) -> None:
        gradient = parameter.grad
        assert gradient is not None
        own = gradient.to_local() if isinstance(gradient, DTensor) else gradient
        if next(steps) == at and world.rank == world.size - 1:
            own.view(-1)[0] = value

    def build(config: RunConfig, world: World, *others: Any) -> Flux:
        model = build_model(config, world, *others)
        model.img_in.weight.register_post_accumulate_grad_hook(spoil)
        return model

    vars(training)["build_model"] = build
    ranks.train_together(config, paths, world, port=port)


def rows(output: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


def losses(output: Path) -> dict[int, float]:
    return {row["step"]: row["train_loss"] for row in rows(output) if "train_loss" in row}


INF, NAN = float("inf"), float("nan")
# ranks, the step whose gradient is bad, its value, cadence of logs and saves, last step, what is kept
BAD_STEPS = [
    (1, 1, INF, make_config(log=1, save=1, steps=4), None),
    (2, 1, NAN, make_config(log=10, save=2, steps=4), None),
    (1, 5, NAN, make_config(log=10, save=2, steps=20), 4),
    (2, 5, INF, make_config(log=10, save=2, steps=20), 4),
    (1, 6, INF, make_config(log=2, save=2, steps=6), 4),  # a log, a save and the last step at once
    (2, 6, -INF, make_config(log=3, save=2, steps=6), 4),
    (3, 3, INF, make_config(log=7, save=0, steps=20), None),  # four more steps before it is read
    (1, 3, INF, make_config(log=50, save=0, steps=20, evaluate=4), None),
]


@pytest.mark.parametrize(("size", "bad", "value", "config", "kept"), BAD_STEPS)
def test_a_gradient_that_is_not_finite_ends_the_run_and_keeps_the_last_good_checkpoint(
    tmp_path: Path, size: int, bad: int, value: float, config: RunConfig, kept: int | None
) -> None:
    paths = RunPaths(tmp_path / "run", tmp_path, tmp_path)
    run = partial(spoiled, port=free_port(), at=bad, value=value)
    assert ranks.finish(run, config, paths, size) == [EXIT_DIVERGED] * size, ranks.said(paths)
    for rank in range(size):
        said = ranks.said(paths, rank)
        assert f"the gradient norm is not finite at step {bad}; " in said
        told = f"the checkpoint of step {kept} is kept" if kept else "no checkpoint was saved yet"
        assert told in said
    newest = checkpoint.latest(paths.output / "checkpoints")
    assert (checkpoint.read_state(newest).step if newest else None) == kept
    assert all(row["step"] < bad for row in rows(paths.output)), "no number after it counts"
    assert "run_stop" not in (paths.output / "mlperf.log").read_text()

    whole = RunPaths(tmp_path / "whole", tmp_path, tmp_path)
    for where in (paths, whole):  # the same command again, and a run that was never disturbed
        again = partial(ranks.train_together, port=free_port())
        assert ranks.finish(again, config, where, size) == [0] * size, ranks.said(where)
    assert losses(paths.output) == pytest.approx(losses(whole.output), rel=1e-6)
    assert all(torch.isfinite(torch.tensor(list(losses(paths.output).values()))))
