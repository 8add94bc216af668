"""Weights stay gathered where memory allows it; plan names a sharding with which GPUs wait less."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fluxtrain.contract.run.config import RunConfig, Sharding
from fluxtrain.contract.run.resolve import merge, resolve
from fluxtrain.model.parameters import count_parameters
from fluxtrain.parallel import traffic
from fluxtrain.parallel.distributed import World
from fluxtrain.parallel.traffic import (
    BETWEEN_NODES,
    HOP,
    WITHIN_NODE,
    collectives,
    exposed_seconds,
)
from fluxtrain.plan.estimate import MOST_EXPOSED, Plan, faster_change, make_plan
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


AT_MOST_32 = {"micro_batch_size": 32, "activation_checkpointing": 0}


def plan_at(gpus: int, batch: int, mfu: float = 0.3, **changes: Any) -> Callable[..., Plan]:
    """Return the plan of MLPerf's run on nodes of eight MI300X, and of changes of it."""

    def plan(config: RunConfig | None = None) -> Plan:
        own = config or run_of(batch, **changes)
        return make_plan(own, gpus // 8, 8, "MI300X", mfu)

    return plan


def run_of(batch: int, **changes: Any) -> RunConfig:
    base = {"preset": "mlperf-schnell", "schedule": {"global_batch_size": batch}}
    return resolve(merge(base, {"parallel": AT_MOST_32, **changes}))


def test_a_ring_takes_its_hops_and_its_bytes() -> None:
    config = run_of(2048, parallel={"reshard_after_forward": False})
    sharding = Sharding.of(config, 512, 8)
    gather, reduce = 58 * 511 * HOP, 58 * 511 * HOP
    padded = count_parameters(config.model, 512).total
    for size, calls in ((2, 1), (4, 2)):
        seconds = size * padded * 511 / 512 / WITHIN_NODE
        gather, reduce = (gather + seconds, reduce) if calls == 1 else (gather, reduce + seconds)
    norm = 2 * 511 * HOP
    ends = gather / 58 + reduce / 58 + norm
    assert exposed_seconds(config, sharding, 1, 0.0) == pytest.approx(
        gather + reduce + ends, rel=1e-4
    )
    hidden = exposed_seconds(config, sharding, 1, 1e9)
    assert hidden == pytest.approx(ends, rel=1e-3), "the first and the last"
    assert exposed_seconds(config, sharding, 1, 3 * gather) == pytest.approx(
        max(0.0, reduce - 2 * gather) + ends, rel=1e-4
    )


@pytest.mark.parametrize(("per_node", "rate"), [(8, WITHIN_NODE), (4, 4 * BETWEEN_NODES)])
def test_rings_that_leave_a_node_share_its_nics(per_node: int, rate: float) -> None:
    config = run_of(2048, parallel={"reshard_after_forward": False})
    both = [Sharding(64, per_node, count) for count in (1, 64 // per_node)]
    [(plain, *_), (*_, within)] = (
        [c for c in collectives(config, s, 1) if c.operation == "all_gather"] for s in both
    )
    hops = plain.calls * 63 * HOP
    assert traffic._seconds(plain, both[0]) == pytest.approx(hops + plain.sent(64) / rate)
    hops = within.calls * (per_node - 1) * HOP
    assert traffic._seconds(within, both[1]) == pytest.approx(
        hops + within.sent(per_node) / WITHIN_NODE
    )
    between = collectives(config, both[1], 1)[0]
    hops = between.calls * 2 * (64 // per_node - 1) * HOP
    seconds = hops + between.sent(64 // per_node) / BETWEEN_NODES
    assert traffic._seconds(between, both[1]) == pytest.approx(seconds)


PER_NODE, BFLOAT16 = "--parallel.dp_replicate=per-node", "--precision.reduce=bfloat16"


@pytest.mark.parametrize(
    ("gpus", "batch", "mfu", "before", "options", "after"),
    [
        (64, 2048, 0.5, 0.005, None, None),
        (64, 512, 0.5, 0.03, None, None),  # a replica per node would wait 23 %
        (256, 2048, 0.5, 0.27, f"{PER_NODE} {BFLOAT16}", 0.02),
        (512, 4096, 0.3, 0.13, PER_NODE, 0.05),
        (512, 4096, 0.5, 0.46, f"{PER_NODE} {BFLOAT16}", 0.02),
        (512, 2048, 0.3, 0.55, f"{PER_NODE} {BFLOAT16}", 0.11),
    ],
)
def test_a_sharding_with_less_waiting_is_named_where_gpus_wait(
    gpus: int, batch: int, mfu: float, before: float, options: str | None, after: float | None
) -> None:
    plan = plan_at(gpus, batch, mfu)
    faster = faster_change(run_of(batch), plan)
    assert plan().exposed_fraction == pytest.approx(before, abs=0.006)
    if options is None or after is None:
        assert faster is None
        return
    assert faster is not None
    assert faster[0] == options
    assert faster[1].exposed_fraction == pytest.approx(after, abs=0.006)
    (line,) = (text for text in render(plan(), None, faster).splitlines() if "Faster" in text)
    assert line.startswith(
        f"Faster: {options}: GPUs wait {faster[1].exposed_fraction:.0%} of a step"
    )
    assert ("summed in bfloat16" in line) == (BFLOAT16 in options), "it changes the rounding"


def test_what_does_not_fit_or_is_chosen_already_is_not_named() -> None:
    changes = {
        "data": {"latent_size": 32, "text_length": 256},
        "schedule": {"global_batch_size": 19 * 512},
    }
    config = resolve(merge({"preset": "dev-finetune"}, {**changes, "parallel": AT_MOST_32}))
    per_node = config.model_copy(
        update={"parallel": config.parallel.model_copy(update={"dp_replicate": "per-node"})}
    )
    plan = partial(make_plan, nodes=64, gpus_per_node=8, gpu="H100", mfu=0.8)
    assert (plan(config).fits, plan(per_node).fits) == (True, False)
    assert plan(config).exposed_fraction > MOST_EXPOSED > plan(per_node).exposed_fraction
    assert faster_change(config, plan) is None
    chosen = {"parallel": {**AT_MOST_32, "dp_replicate": "per-node"}}
    chosen |= {"precision": {"reduce": "bfloat16"}}
    assert faster_change(run_of(2048, **chosen), plan_at(512, 2048)) is None


def test_one_node_and_cpus_have_no_waiting() -> None:
    for plan in (make_plan(run_of(512), 1, 8, "MI300X"), make_plan(run_of(512), 2, 0)):
        assert plan.exposed_seconds_per_step is None
        assert plan.exposed_fraction == 0
        assert "exposed communication" not in render(plan)
