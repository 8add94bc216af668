"""Weights stay gathered after the forward pass where the memory of all GPUs allows it."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fluxtrain.contract.run.config import RunConfig, Sharding
from fluxtrain.contract.run.resolve import merge, resolve
from fluxtrain.parallel.distributed import World
from fluxtrain.plan.estimate import make_plan
from fluxtrain.plan.table import render
from fluxtrain.runtime.devices import GPUS, memory_of
from fluxtrain.train.memory import ROOM, memory, settle_resharding, settle_resharding_of

CUDA = torch.device("cuda", 0)


def make_config(**changes: Any) -> RunConfig:
    base = {"preset": "mlperf-schnell", "logging": {"mlperf": {"division": "open"}}}
    return resolve(merge(base, changes))


def settled(config: RunConfig, num_bytes: int | None, num_ranks: int = 8) -> bool | None:
    return settle_resharding(config, num_ranks, 8, num_bytes).parallel.reshard_after_forward


def test_they_are_freed_only_if_a_step_needs_most_of_the_memory() -> None:
    config = make_config()
    kept = make_config(parallel={"reshard_after_forward": False})
    needed = memory(kept, Sharding.of(config, 8, 8), 32, accumulates=True).total
    assert settled(config, int(needed / ROOM) + 2) is False
    assert settled(config, int(needed / ROOM) - 2) is True


@pytest.mark.parametrize(
    ("changes", "num_bytes", "reshards"),
    [
        ({}, 10**15, False),
        ({}, None, True),
        ({"parallel": {"reshard_after_forward": True}}, 10**15, True),
        ({"parallel": {"reshard_after_forward": False}}, 1, False),
        ({"data": {"source": "images"}}, 10**15, True),  # the encoders' memory is not in a plan
    ],
)
def test_the_config_decides_where_it_says_something(
    changes: dict[str, Any], num_bytes: int | None, reshards: bool
) -> None:
    assert settled(make_config(**changes), num_bytes) is reshards


class _Ranks(World):
    """Two ranks with GPUs; the other one's has 80 GB."""

    def gather_numbers(self, own: list[float]) -> list[list[float]]:
        return [own, [80e9]]


def test_all_ranks_take_the_smallest_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    found = SimpleNamespace(name="AMD Instinct MI300X", total_memory=206_141_652_992)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: found)
    assert memory_of(CUDA) == GPUS["MI300X"].memory_bytes, "what the plan assumes"
    config = make_config(parallel={"micro_batch_size": 16})
    both = _Ranks(0, 0, 8, CUDA, local_size=8)
    alone = settle_resharding(config, 8, 8, memory_of(CUDA))
    assert alone.parallel.reshard_after_forward is False
    assert settle_resharding_of(both, config) == settle_resharding(config, 8, 8, 80 * 10**9)
    assert settle_resharding_of(both, config).parallel.reshards
    assert settle_resharding_of(replace(both, device=torch.device("cpu")), config) is config


def test_a_plan_says_what_a_run_does() -> None:
    kept, freed = (
        make_plan(make_config(parallel={"reshard_after_forward": value}), 8, 8, "MI300X")
        for value in (False, True)
    )
    plan = make_plan(make_config(), 8, 8, "MI300X")
    assert kept.largest_micro_batch is not None
    assert freed.largest_micro_batch is not None
    assert plan.largest_micro_batch == freed.largest_micro_batch > kept.largest_micro_batch
    assert plan == kept.model_copy(update={"largest_micro_batch": plan.largest_micro_batch})
    assert (plan.reshards_after_forward, freed.reshards_after_forward) == (False, True)
    assert plan.node_communication_bytes_per_step == pytest.approx(70e9, rel=0.01)
    assert freed.node_communication_bytes_per_step == pytest.approx(94e9, rel=0.01)
    assert "all weights, and gradients in reduction" in render(plan)
    assert "weights of the current and the next, and gradients" in render(freed)
    assert make_plan(make_config(), 1, 0).reshards_after_forward
