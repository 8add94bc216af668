"""Requests and limits of the training container, its shared memory, and its time to stop."""

from __future__ import annotations

from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from tests.operator.jobs import make_job, make_training

from fluxtrain.contract.model_base import validate
from fluxtrain.contract.resource.fluxtraining import Spec
from fluxtrain.contract.resource.pod_template import amount
from fluxtrain.contract.run.config import RunConfig
from fluxtrain.contract.run.model import ModelConfig
from fluxtrain.contract.run.resolve import merge, resolve
from fluxtrain.data.dataset import Batch
from fluxtrain.data.loader import evaluation_batches, training_batches
from fluxtrain.data.order import BatchShares
from fluxtrain.data.sources import open_sources
from fluxtrain.errors import ConfigError
from fluxtrain.model.parameters import count_parameters
from fluxtrain.parallel.node_memory import loader_bytes, sample_bytes
from fluxtrain_operator.base import names
from fluxtrain_operator.base.settings import PodDefaults
from fluxtrain_operator.planner.plan import load
from fluxtrain_operator.resources import Slot, training_pod
from fluxtrain_operator.resources.environment import num_block_parameters
from fluxtrain_operator.resources.pods import pod_templates, rendezvous_pod
from fluxtrain_operator.resources.volumes import resources_of, shared_memory, volumes

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


ENCODED = 256 * 4096 * 4 + 768 * 4 + 4 * 16 * 32 * 32 * 4
"""Bytes of a sample of MLPerf: T5's and CLIP's encodings, and four tensors of its latents' shape."""
IMAGE = 3 * 256 * 256 + 2 * 16 * 32 * 32 * 4 + 8192

OPEN = {"logging": {"mlperf": {"division": "open"}}}


def config_of(preset: str, **changes: Any) -> RunConfig:
    return resolve(merge({"preset": preset}, changes))


def spec_of(**fields: Any) -> Spec:
    return validate(Spec, {"run": {"preset": "micro"}, **fields}, "spec")


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (config_of("mlperf-schnell"), ENCODED),
        (config_of("mlperf-schnell-raw"), IMAGE),
        (config_of("micro"), 4 * 16 * 4 + 16 * 4 + 4 * 4 * 4 * 4 * 4),
    ],
    ids=["encoded", "images", "synthetic"],
)
def test_the_bytes_of_a_sample(config: RunConfig, expected: int) -> None:
    assert sample_bytes(config) == expected


@pytest.mark.parametrize(
    ("config", "num_ranks", "expected"),
    [
        (config_of("micro"), 1, 0),  # the training process loads
        (config_of("mlperf-schnell"), 1, 18 * (32 + 16) * ENCODED),
        (config_of("mlperf-schnell"), 16, 18 * (32 + 16) * ENCODED),
        (config_of("mlperf-schnell"), 64, 18 * (8 + 16) * ENCODED),  # 512 / 64 samples
        (config_of("mlperf-schnell"), 1000, 18 * (1 + 16) * ENCODED),
        (
            config_of("mlperf-schnell", **OPEN, evaluation={"every_samples": 0}),
            1,
            18 * 32 * ENCODED,
        ),
        (config_of("mlperf-schnell", data={"num_workers": 1, "prefetch": 1}), 1, 3 * 48 * ENCODED),
        (config_of("mlperf-schnell-raw", task="preprocess"), 1, 18 * 64 * IMAGE),
        (config_of("mlperf-schnell-raw", task="prepare"), 1, 0),
    ],
)
def test_the_batches_of_a_rank(config: RunConfig, num_ranks: int, expected: int) -> None:
    assert loader_bytes(config, num_ranks) == expected


@pytest.mark.parametrize(
    ("preset", "fields", "size"),
    [
        ("micro", {}, "1Gi"),
        ("micro", {"gpusPerNode": 1}, "1Gi"),
        ("micro", {"gpusPerNode": 8}, "4Gi"),  # collectives only
        ("mlperf-schnell", {}, "4Gi"),
        ("mlperf-schnell", {"gpusPerNode": 8}, "33Gi"),
        ("mlperf-schnell", {"gpusPerNode": 8, "nodes": {"min": 4, "max": 4}}, "24Gi"),
        ("mlperf-schnell", {"gpusPerNode": 8, "nodes": {"min": 8, "max": 8}}, "19Gi"),
    ],
)
def test_the_size_for_a_pod(preset: str, fields: dict[str, Any], size: str) -> None:
    assert shared_memory(config_of(preset), spec_of(**fields)) == size


def bytes_of(batch: Batch) -> int:
    return sum(tensor.nbytes for tensor in batch.tensors().values())


def test_real_batches_are_as_large_as_computed(tmp_path: Path) -> None:
    config = config_of("micro", data={"text_length": 64})
    sources = open_sources(config, tmp_path)
    shares = BatchShares.of(config, 1)
    training = next(training_batches(config, sources, shares, rank=0))
    evaluation = next(iter(evaluation_batches(config, sources.validation, 0, 1)))
    for batch in (training, evaluation):
        assert isinstance(batch, Batch)
        assert bytes_of(batch) == pytest.approx(len(batch) * sample_bytes(config), rel=0.01)


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
