"""Requests and limits of the training container."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import pytest
from tests.operator.jobs import make_job

from fluxtrain.contract.resource.resources import amount
from fluxtrain_operator.planner.plan import load
from fluxtrain_operator.resources.requests import resources_of

GPU = {"amd.com/gpu": "8"}


def resources(gpus: int, **given: Any) -> tuple[dict[str, str], dict[str, str]]:
    spec = {"run": {"preset": "micro"}, "gpusPerNode": gpus, "resources": given}
    result = resources_of(load({**make_job(), "spec": spec}, "trainer:1"))
    assert all(result.values())
    return result.get("requests", {}), result.get("limits", {})


@pytest.mark.parametrize(
    ("gpus", "given", "requests", "limits"),
    [
        (0, {}, {}, {}),
        (0, {"requests": {"cpu": "4"}}, {"cpu": "4"}, {}),
        (1, {}, {"cpu": "2", "memory": "8Gi", "amd.com/gpu": "1"}, {"amd.com/gpu": "1"}),
        (8, {}, {"cpu": "16", "memory": "64Gi", **GPU}, GPU),
        (8, {"requests": {"cpu": "96"}}, {"cpu": "96", "memory": "64Gi", **GPU}, GPU),
        (8, {"requests": {"cpu": "0", "memory": "0"}}, GPU, GPU),
        (8, {"requests": {"cpu": "0m", "memory": "0.0Gi"}}, GPU, GPU),
        (
            8,
            {"limits": {"cpu": "12"}},  # below the default request
            {"cpu": "12", "memory": "64Gi", **GPU},
            {"cpu": "12", **GPU},
        ),
        (
            8,
            {"requests": {"memory": "1Ti"}, "limits": {"memory": "2Ti"}},
            {"cpu": "16", "memory": "1Ti", **GPU},
            {"memory": "2Ti", **GPU},
        ),
    ],
)
def test_requests_and_limits(
    gpus: int, given: dict[str, Any], requests: dict[str, str], limits: dict[str, str]
) -> None:
    assert resources(gpus, **given) == (requests, limits)


@pytest.mark.parametrize(
    ("quantity", "value"),
    [
        ("0", "0"),
        ("500m", "0.5"),
        ("1.5", "1.5"),
        ("2k", "2000"),
        ("3Ki", "3072"),
        ("1M", "1000000"),
        ("1.5G", "1500000000"),
        ("1Gi", "1073741824"),
        ("7T", "7000000000000"),
        ("2Ti", "2199023255552"),
        ("1P", "1000000000000000"),
        ("1Pi", "1125899906842624"),
    ],
)
def test_the_amount_of_a_quantity(quantity: str, value: str) -> None:
    assert amount(quantity) == Decimal(value)
