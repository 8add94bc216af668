"""docs/lora.md's table of memory beside kohya's published figures: each row is what ``plan`` says."""

from __future__ import annotations

import re

import pytest
import yaml
from tests.paths import ROOT

from fluxtrain.contract.run.resolve import merge, resolve
from fluxtrain.plan.estimate import make_plan

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
