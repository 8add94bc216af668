"""A pod that is asked to stop has the time to save its share of a checkpoint."""

from __future__ import annotations

from typing import Any

import pytest
from tests.operator.jobs import make_training

from fluxtrain.contract.run.model import ModelConfig
from fluxtrain.contract.run.resolve import resolve
from fluxtrain.model.parameters import count_parameters
from fluxtrain_operator.planner.plan import load
from fluxtrain_operator.resources import Slot, training_pod
from fluxtrain_operator.resources.environment import num_block_parameters

FLAGSHIP = {"preset": "mlperf-schnell", "logging": {"mlperf": {"division": "open"}}}
TEMPLATE = {"spec": {"terminationGracePeriodSeconds": 600}}


def pod_seconds(**spec: Any) -> tuple[int, int]:
    """Return the seconds of the pod, and those that its launcher gives the trainers."""
    pod = training_pod(load(make_training(spec), "trainer:1"), Slot(0))
    (trainer,) = pod["spec"]["containers"]
    environment = {variable["name"]: variable.get("value") for variable in trainer["env"]}
    seconds = int(environment["FLUXTRAIN_SHUTDOWN_SECONDS"])
    return pod["spec"]["terminationGracePeriodSeconds"], seconds


@pytest.mark.parametrize(
    ("spec", "pod", "trainers"),
    [
        ({}, 180, 120),
        ({"run": FLAGSHIP, "nodes": {"min": 1, "max": 1}, "gpusPerNode": 8}, 748, 688),
        ({"run": FLAGSHIP, "nodes": {"min": 4, "max": 8}, "gpusPerNode": 8}, 322, 262),
        ({"run": {"preset": "mlperf-schnell-raw", "task": "preprocess"}}, 180, 120),
        ({"podTemplate": TEMPLATE}, 600, 540),
        ({"podTemplate": {"spec": {"terminationGracePeriodSeconds": 30}}}, 30, 15),
        ({"podTemplate": {"spec": {"terminationGracePeriodSeconds": 0}}}, 0, 0),
    ],
)
def test_the_grace_period_follows_from_the_share_of_a_checkpoint(
    spec: dict[str, Any], pod: int, trainers: int
) -> None:
    assert pod_seconds(**spec) == (pod, trainers)


def test_the_blocks_have_nearly_all_parameters() -> None:
    model: ModelConfig = resolve(FLAGSHIP).model
    assert num_block_parameters(model) == pytest.approx(count_parameters(model).total, rel=0.01)
