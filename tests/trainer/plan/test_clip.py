"""The plan of a run that trains adapters of CLIP, against one step on fake tensors."""

from __future__ import annotations

from typing import Any

import pytest

from fluxtrain.contract.run.resolve import merge, resolve
from fluxtrain.model.parameters import count_trained
from fluxtrain.plan.estimate import make_plan
from fluxtrain.plan.verify import verify

FEW_BLOCKS = {"depth": 1, "depth_single_blocks": 2}
BASE: dict[str, Any] = {
    "preset": "dev-lora",
    "model": FEW_BLOCKS,
    "data": {"images": "pictures"},
    "adapter": {"rank": 8, "clip": {"rank": 8}},
    "parallel": {"compile": False, "micro_batch_size": 2},
    "schedule": {"global_batch_size": 16},
}


@pytest.mark.proof
@pytest.mark.parametrize(
    ("nodes", "changes"),
    [
        ((1, 1), {}),
        ((1, 8), {"parallel": {"reshard_after_forward": True}}),
        ((2, 2), {"parallel": {"dp_replicate": "per-node", "reshard_after_forward": False}}),
    ],
)
def test_the_plan_is_what_a_step_needs(nodes: tuple[int, int], changes: dict[str, Any]) -> None:
    config = resolve(merge(BASE, changes))
    found = verify(config, *nodes)
    assert found.holds, found.rows
    (products,) = (row for row in found.rows if row.name == "products")
    assert products.planned == products.measured


def test_the_adapters_are_counted() -> None:
    config = resolve(BASE)
    without = resolve(merge(BASE, {"adapter": {"clip": None}}))
    plans = [make_plan(each, 1, 1) for each in (config, without)]
    more = plans[0].trainable_parameters - plans[1].trainable_parameters
    assert more == 8 * 165_888
    assert plans[0].checkpoint_bytes - plans[1].checkpoint_bytes == 12 * more
    frozen = 123_060_480  # CLIP-L's text model, in bfloat16
    weights = [plan.memory_bytes_per_gpu.weights for plan in plans]
    assert weights[0] - weights[1] == 2 * frozen + 6 * more
    assert plans[0].flops_per_sample > plans[1].flops_per_sample
    assert count_trained(config.model, config.adapter).groups == 4
