"""Requests and limits of the training container."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import pytest
from tests.operator.jobs import make_job

from fluxtrain.contract.resource.pod_template import amount
from fluxtrain.errors import ConfigError
from fluxtrain_operator.base import names
from fluxtrain_operator.base.settings import PodDefaults
from fluxtrain_operator.planner.plan import load
from fluxtrain_operator.resources.pods import pod_templates, rendezvous_pod
from fluxtrain_operator.resources.volumes import resources_of, volumes

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


OURS = {"requests": {"cpu": "50m", "memory": "256Mi"}, "limits": {"memory": "2Gi"}}
QUOTA = {"requests": {"cpu": "100m"}, "limits": {"cpu": "1", "memory": "1Gi"}}
CPU_60M = {"cpu": "60m", "memory": "1Gi"}


@pytest.mark.parametrize(
    ("defaults", "own", "requests", "limits"),
    [
        ({}, {}, OURS["requests"], OURS["limits"]),
        (QUOTA, {}, {"cpu": "100m", "memory": "256Mi"}, QUOTA["limits"]),
        ({}, QUOTA, {"cpu": "100m", "memory": "256Mi"}, QUOTA["limits"]),
        ({}, {"limits": {"memory": "128Mi"}}, {"cpu": "50m", "memory": "128Mi"}, {"memory": "128Mi"}),
        (QUOTA, {"limits": {"cpu": "60m"}}, {"cpu": "60m", "memory": "256Mi"}, CPU_60M),
        ({}, {"requests": {"memory": "4Gi"}}, {"cpu": "50m", "memory": "4Gi"}, {"memory": "4Gi"}),
        ({}, {"requests": {"cpu": "0", "memory": "0"}}, {"cpu": "0", "memory": "0"}, OURS["limits"]),
    ],
)  # fmt: skip
def test_the_rendezvous_pod_has_the_amounts_of_the_job_else_of_the_operator(
    defaults: dict[str, Any], own: dict[str, Any], requests: dict[str, str], limits: dict[str, str]
) -> None:
    spec = {"run": {"preset": "micro"}, "gpusPerNode": 8, "resources": {"rendezvous": own}}
    settings = PodDefaults.model_validate({"rendezvous": {"resources": defaults}})
    job = load({**make_job(), "spec": spec}, "trainer:1", pod_defaults=settings)
    (container,) = rendezvous_pod(job)["spec"]["containers"]
    assert container["resources"] == {"requests": requests, "limits": limits}


def test_a_changed_default_reaches_the_rendezvous_pod_of_a_stored_revision() -> None:
    manifest = {**make_job(), "spec": {"run": {"preset": "micro"}}}
    settings = PodDefaults.model_validate({"rendezvous": {"resources": QUOTA}})
    before, after = load(manifest, "trainer:1"), load(manifest, "trainer:1", pod_defaults=settings)
    pod = rendezvous_pod(after, revision=before.spec_revision)
    assert pod["spec"]["containers"][0]["resources"]["limits"] == QUOTA["limits"]


def test_a_request_of_the_rendezvous_pod_above_its_limit_is_refused_with_the_path() -> None:
    own = {"requests": {"memory": "2Gi"}, "limits": {"memory": "1Gi"}}
    spec = {"run": {"preset": "micro"}, "resources": {"rendezvous": own}}
    with pytest.raises(ConfigError) as caught:
        load({**make_job(), "spec": spec}, "trainer:1")
    assert caught.value.path == "spec.resources.rendezvous.requests.memory"


def test_gpus_of_a_resource_claim_are_no_extended_resource() -> None:
    spec = {"run": {"preset": "micro"}, "gpusPerNode": 8, "gpuClaimTemplate": "eight"}
    rdma = {"network": {"rdmaResource": "rdma/hca"}}
    job = load({**make_job(), "spec": {**spec, **rdma}}, "trainer:1")
    pods = pod_templates(job)
    [container] = pods[names.TRAINER]["spec"]["containers"]
    assert container["resources"]["limits"] == {"rdma/hca": "8"}
    assert container["resources"]["claims"] == [{"name": "gpus"}]
    assert pods[names.TRAINER]["spec"]["resourceClaims"] == [
        {"name": "gpus", "resourceClaimTemplateName": "eight"}
    ]
    assert "resourceClaims" not in pods[names.RENDEZVOUS]["spec"]


FLUX = {"preset": "mlperf-schnell", "logging": {"mlperf": {"division": "open"}}}
OFF = {**FLUX, "checkpoint": {"memory_every_steps": 0}}
OFFLOADED = {
    "preset": "dev-lora",
    "parallel": {"offload_blocks": 57},
    "checkpoint": {"memory_every_steps": 0},
}
LIMITED = {"limits": {"memory": "100Gi"}}


@pytest.mark.parametrize(
    ("run", "gpus", "nodes", "given", "memory", "volume"),
    [
        ({"preset": "micro"}, 0, (1, 1), {}, None, "1Gi"),
        ({"preset": "micro"}, 1, (1, 1), {}, "8Gi", "1Gi"),
        (FLUX, 8, (1, 1), {}, "330Gi", "266Gi"),
        (FLUX, 8, (8, 8), {}, "130Gi", "67Gi"),
        (FLUX, 8, (4, 8), {}, "197Gi", "133Gi"),  # on four nodes
        (FLUX, 8, (4, 8), {"requests": {"memory": "64Gi"}}, "64Gi", "133Gi"),
        (FLUX, 8, (4, 8), LIMITED, "100Gi", "133Gi"),  # the trainers take none
        (OFF, 8, (4, 8), {}, "64Gi", None),
        (OFFLOADED, 2, (1, 1), {}, "60Gi", None),
        ({"preset": "mlperf-schnell-raw", "task": "preprocess"}, 8, (1, 1), {}, "64Gi", None),
    ],
)
def test_the_memory_of_snapshots_is_requested_and_bounds_their_volume(
    run: dict[str, Any],
    gpus: int,
    nodes: tuple[int, int],
    given: dict[str, Any],
    memory: str | None,
    volume: str | None,
) -> None:
    size = {"min": nodes[0], "max": nodes[1]}
    spec = {"run": run, "gpusPerNode": gpus, "nodes": size, "resources": given}
    job = load({**make_job(), "spec": spec}, "trainer:1")
    assert resources_of(job).get("requests", {}).get("memory") == memory
    sizes = [v["emptyDir"]["sizeLimit"] for v in volumes(job) if v["name"] == "snapshots"]
    assert sizes == ([] if volume is None else [volume])


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
