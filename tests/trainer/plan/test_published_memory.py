"""docs/lora.md's tables of memory by GPU, and beside kohya's figures: each row is what ``plan`` says."""

from __future__ import annotations

import re

import pytest
import yaml
from tests.paths import ROOT

from fluxtrain.contract.run.resolve import merge, resolve
from fluxtrain.plan.estimate import make_plan
from fluxtrain.plan.first_file import Machine, fitting
from fluxtrain.runtime.devices import GPUS, find_gpu

PUBLISHED = {4: 27, 8: 39, 16: 63, 32: 112, 48: 162, 56: 186, 60: 196}
"""Peak memory in GB by batch size, of a public guide to kohya's sd-scripts on one MI300X."""
TEXT = (ROOT / "docs" / "lora.md").read_text()
SECTION = TEXT[TEXT.index("## Memory") :]
ROWS = re.findall(r"^\| (\d+) \| (\d+) GB \| ([\d.]+) GB \|", SECTION, re.MULTILINE)


def test_the_table_has_every_published_row() -> None:
    assert {int(batch): int(gigabytes) for batch, gigabytes, _ in ROWS} == PUBLISHED


@pytest.mark.parametrize(("batch", "published", "ours"), ROWS)
def test_a_row_is_what_plan_says(batch: str, published: str, ours: str) -> None:
    block = re.search(r"```yaml\n(.*?)```", SECTION, re.DOTALL)
    assert block is not None
    run = yaml.safe_load(block[1])["run"]
    sizes = {
        "parallel": {"micro_batch_size": int(batch)},
        "schedule": {"global_batch_size": int(batch)},
    }
    plan = make_plan(resolve(merge(run, sizes)), 1, 1, "MI300X")
    assert (plan.image_width, plan.image_height) == (1024, 1024)
    assert plan.memory_bytes_per_gpu.total / 1e9 == pytest.approx(float(ours), abs=0.1)
    assert float(ours) < int(published)


BY_GPU = re.findall(
    r"^\| (\d+) GiB, ([^|]+) \| (\w+) \| (\w+) \| (\d+) \| (\d+) \| ([\d.]+) GiB \|$",
    TEXT,
    re.MULTILINE,
)
_RECOMPUTED = {"all": 1.0, "half": 0.5, "none": 0.0}


def test_the_table_of_gpus_has_the_usual_sizes() -> None:
    assert [int(gibibytes) for gibibytes, *_ in BY_GPU] == [16, 24, 48, 80, 192]


@pytest.mark.parametrize("row", BY_GPU, ids=lambda row: row[1])
def test_a_row_of_a_gpu_is_what_init_writes_and_plan_says(row: tuple[str, ...]) -> None:
    gibibytes, gpu, dtype, recomputed, offloaded, micro_batch, ours = row
    run = {
        "preset": "dev-lora",
        "data": {"images": "pictures", "buckets": {}},
        "schedule": {"global_batch_size": 4},
        "parallel": {"micro_batch_size": "auto"},
    }
    config = resolve(merge(run, fitting(run, Machine(find_gpu(gpu), 1, 1))))
    assert config.adapter is not None
    assert config.adapter.base_dtype == {"bfloat16": "compute", "fp8": "fp8"}[dtype]
    assert config.parallel.activation_checkpointing == _RECOMPUTED[recomputed]
    assert config.parallel.offload_blocks == int(offloaded)
    plan = make_plan(config, 1, 1, gpu)
    assert plan.micro_batch_size == int(micro_batch)
    assert plan.memory_bytes_per_gpu.total / 2**30 == pytest.approx(float(ours), abs=0.1)
    assert GPUS[gpu].memory_bytes == pytest.approx(int(gibibytes) * 2**30, rel=0.07)


@pytest.mark.parametrize("gpu", ["RX 7900 XTX", "W7900", "H100", "MI300X"])
def test_the_first_file_of_the_page_fits(gpu: str) -> None:
    block = re.search(r"```yaml\n(.*?)```", TEXT, re.DOTALL)
    assert block is not None
    run = yaml.safe_load(block[1])["spec"]["run"]
    assert make_plan(resolve(run), 1, 1, gpu).fits
