"""The plan against one real step on fake tensors, whose memory and collectives torch's trackers count."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.paths import EXAMPLES
from torch import Tensor

from fluxtrain import optim
from fluxtrain.cli import main
from fluxtrain.contract.run.config import RunConfig
from fluxtrain.contract.run.resolve import merge, resolve
from fluxtrain.errors import EXIT_ERROR, EXIT_OK
from fluxtrain.model.parameters import count_parameters
from fluxtrain.plan import verify as comparison
from fluxtrain.plan.estimate import make_plan
from fluxtrain.plan.measurement import compiled_kernels, fake_world, measure
from fluxtrain.plan.verify import Comparison, Row, render, verify
from fluxtrain.runtime.devices import GPUS

BFLOAT16 = {"precision": {"compute": "bfloat16", "weights": "bfloat16"}}
FEW_BLOCKS = {"depth": 1, "depth_single_blocks": 2}
MORE_BLOCKS = {"depth": 2, "depth_single_blocks": 4}
ACCUMULATING_REPLICAS = {"parallel": {"dp_replicate": "per-node", "micro_batch_size": 2}}
HALF, ALL = ({"activation_checkpointing": fraction} for fraction in (0.5, 1))
FP8_ADAPTER = {"base_dtype": "fp8", "dora": True}
SCHEDULE_FREE = {"optim": {"name": "schedule_free_adamw"}}
TENSORWISE = {"precision": {"fp8": "tensorwise"}}
IN_RANGE = pytest.mark.torch_range
NO_MODULATIONS = {"ranks": {"img_mod": 0, "txt_mod": 0, "single_mod": 0}}
ATTENTION_ONLY = {"ranks": {**NO_MODULATIONS["ranks"], "img_mlp": 0, "txt_mlp": 0}}
SPLIT = {"rank": 64, "split_qkv": True, "ranks": {"single": 8}, "dropout": 0.1, "rank_dropout": 0.1}

# of torch 2.13, where linear layers return views; nothing changes the model's output in place
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")]


def make_config(preset: str, **changes: Any) -> RunConfig:
    base = {
        "preset": preset,
        "parallel": {"compile": False},
        "logging": {"mlperf": {"division": "open"}},
        "model": {} if preset == "micro" else FEW_BLOCKS,
    }
    return resolve(merge(base, changes))


def row_of(found: Comparison, name: str) -> Row:
    (row,) = (row for row in found.rows if row.name == name)
    return row


@pytest.mark.parametrize(
    ("preset", "nodes", "ranks", "changes"),
    [
        ("micro", 1, 1, {}),
        ("openmoji", 1, 1, {"model": MORE_BLOCKS, "precision": {"compute": "bfloat16"}}),
        # gradients accumulate in float32, weights are in both data types
        ("mlperf-schnell", 1, 1, {"parallel": {"micro_batch_size": 8, **HALF}}),
        pytest.param("micro", 2, 4, {}, marks=IN_RANGE),
        ("openmoji", 64, 8, {}),  # fewer rows than ranks: most of what is gathered is padding
        ("openmoji", 2, 8, {"model": MORE_BLOCKS, "parallel": {"dp_replicate": "per-node", **ALL}}),
        ("micro", 1, 8, {"parallel": {"micro_batch_size": 1}}),  # gradients accumulate
        ("openmoji", 2, 2, ACCUMULATING_REPLICAS),
        ("openmoji", 2, 2, {**ACCUMULATING_REPLICAS, "precision": {"reduce": "bfloat16"}}),
        (
            "openmoji",
            1,
            8,
            {
                "precision": {"compute": "bfloat16", "reduce": "bfloat16"},
                "parallel": {"reshard_after_forward": False, **HALF},
            },
        ),
        ("mlperf-schnell", 1, 8, {"parallel": {"attention": "math", **HALF}}),
        pytest.param("mlperf-schnell", 8, 8, {}, marks=IN_RANGE),
        ("mlperf-schnell", 1, 8, TENSORWISE),
        ("mlperf-schnell", 2, 4, {**TENSORWISE, "parallel": {"dp_replicate": "per-node"}}),
        ("dev-finetune", 1, 8, {}),
        ("dev-lora", 1, 1, {}),
        (
            "dev-lora",
            1,
            1,
            {
                "model": {"condition": "kontext"},
                "data": {"images": "target", "controls": "control", "buckets": {}},
            },
        ),
        (
            "dev-finetune",
            1,
            8,
            {"model": {"condition": "fill", "in_channels": 384}, "data": {"images": "pictures"}},
        ),
        ("micro", 1, 2, {"data": {"buckets": {"step": 16, "resolutions": [48, 64]}}}),
        ("dev-lora", 1, 8, {"adapter": SPLIT}),
        ("dev-lora", 1, 8, {"adapter": {"kind": "lokr"}}),
        ("dev-lora", 1, 8, {"adapter": {"kind": "loha"}}),
        pytest.param("dev-lora", 1, 8, {"adapter": FP8_ADAPTER}, marks=IN_RANGE),
        ("dev-lora", 1, 1, {"adapter": {"base_dtype": "fp8"}}),
        ("dev-lora", 1, 1, {"adapter": ATTENTION_ONLY}),
        ("dev-lora", 1, 8, {"adapter": NO_MODULATIONS}),
        ("dev-lora", 1, 1, {"adapter": {"layers": ["txt_attn.qkv", "linear1"]}}),
        ("dev-lora", 1, 1, {"parallel": {"offload_blocks": 2}}),
        ("dev-lora", 1, 8, {"adapter": FP8_ADAPTER, "parallel": {"offload_blocks": 3}}),
        ("openmoji", 1, 8, {"optim": {"name": "prodigy", "learning_rate": 1.0}}),
        pytest.param("openmoji", 1, 8, SCHEDULE_FREE, marks=IN_RANGE),
        ("openmoji", 1, 1, SCHEDULE_FREE),
        ("openmoji", 1, 8, {"optim": {"name": "adafactor", "ema_decay": 0.999}}),
        ("dev-lora", 1, 8, {"optim": {"name": "adafactor"}}),
        ("dev-finetune", 1, 8, {"optim": {"name": "adamw_8bit"}}),
        # weights in bfloat16: of small models the update in float32 is the peak
        ("micro", 1, 1, {**BFLOAT16, "optim": {"name": "prodigy", "learning_rate": 1.0}}),
        pytest.param("micro", 2, 2, {**BFLOAT16, **ACCUMULATING_REPLICAS}, marks=IN_RANGE),
        ("micro", 1, 8, {**BFLOAT16, "optim": {"name": "adafactor", "ema_decay": 0.999}}),
        ("dev-finetune", 1, 8, {**BFLOAT16, "optim": {"name": "adamw_8bit"}}),
    ],
)
def test_a_step_uses_what_is_planned(
    preset: str, nodes: int, ranks: int, changes: dict[str, Any]
) -> None:
    found = verify(make_config(preset, **changes), nodes, ranks)
    assert found.holds, render(found)
    assert row_of(found, "products").difference == 0
    assert row_of(found, "host syncs").measured == 0
    assert row_of(found, "kernels").measured > 300
    names = [row.name for row in found.rows if " in " in row.name]
    assert len(names) == (0 if ranks == 1 else 3 + ("dp_replicate" in str(changes)))
    assert not dist.is_initialized()


def test_weights_stay_gathered_on_gpus_where_they_fit() -> None:
    one_micro_batch = {"global_batch_size": 64}
    config = make_config("mlperf-schnell", schedule=one_micro_batch)
    freed, kept = (verify(config, 1, 8, gpu) for gpu in (None, GPUS["MI300X"]))
    assert freed.holds, render(freed)
    assert kept.holds, render(kept)
    more, less = (row_of(each, "all_gather in dp_shard").measured for each in (freed, kept))
    counts = count_parameters(config.model, 8)
    assert more - less == 2 * (counts.total - counts.rest)


@pytest.mark.slow
def test_encoders_and_images_are_where_they_are_planned() -> None:
    config = make_config("mlperf-schnell-raw")
    found = verify(config, 8, 8, GPUS["MI300X"])
    assert found.holds, render(found)
    names = ("  encoders", "  copied ahead")
    assert [row_of(found, name).difference for name in names] == pytest.approx([0, 0], abs=1e-6)
    assert row_of(found, "host syncs").measured == 0, "encoding does not wait for the device"
    assert row_of(found, "products").planned is None


def test_a_node_sends_the_gradients_of_its_shards_to_others() -> None:
    config = make_config("micro", parallel={"dp_replicate": "per-node"})
    reduced = row_of(verify(config, 4, 2), "all_reduce in dp_replicate").measured
    ring = 2 * reduced * 3 // 4  # of each of the two ranks of a node
    assert make_plan(config, 4, 2).node_communication_bytes_per_step == 2 * ring


@pytest.mark.proof
def test_a_compiled_block_launches_fewer_kernels() -> None:
    kernels = compiled_kernels(make_config("mlperf-schnell"))
    assert 10 < kernels["single-stream"] < 40
    assert kernels["single-stream"] < kernels["double-stream"] < 100
    eager = measure(make_config("mlperf-schnell"), 1, 8).kernels
    assert kernels["double-stream"] + 2 * kernels["single-stream"] < eager / 3


def test_a_plan_that_is_wrong_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    planned = comparison.collectives

    def without_norm(*arguments: Any) -> list[Any]:
        return [each for each in planned(*arguments) if each.operation != "all_reduce"]

    monkeypatch.setattr(comparison, "collectives", without_norm)
    assert main(["plan", str(EXAMPLES / "micro.yaml"), "--verify"]) == EXIT_OK  # one rank
    file = EXAMPLES / "mlperf-schnell.yaml"
    small = [f"--model.{name}={value}" for name, value in FEW_BLOCKS.items()]
    changes = [*small, "--parallel.compile=false", "--logging.mlperf.division=open"]
    assert main(["plan", str(file), "--verify", *changes]) == EXIT_ERROR


def test_a_step_that_reads_a_value_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    bad_step = optim.first_bad_step

    def reading(before: Tensor, norm: Tensor, step: int) -> Tensor:
        norm.item()
        return bad_step(before, norm, step)

    monkeypatch.setattr(optim, "first_bad_step", reading)
    found = verify(make_config("micro"), 1, 1)
    assert not found.holds
    assert row_of(found, "host syncs").measured == 1


@pytest.mark.parametrize(
    ("planned", "measured", "tolerance", "holds"),
    [
        (104, 100, 0.05, True),
        (106, 100, 0.05, False),
        (94, 100, 0.05, False),
        (101, 100, 0, False),
        (1, 0, 0, False),
        (0, 0, 0, True),
        (1000, 1, None, True),
        (None, 1, 0, True),
    ],
)
def test_how_far_a_row_may_differ(
    planned: int | None, measured: int, tolerance: float | None, holds: bool
) -> None:
    row = Row(name="", unit="B", planned=planned, measured=measured, tolerance=tolerance)
    assert row.holds is holds


def test_the_table_tells_what_is_compared(capsys: pytest.CaptureFixture[str]) -> None:
    file = str(EXAMPLES / "micro.yaml")
    assert main(["plan", file, "--verify"]) == EXIT_OK
    text = capsys.readouterr().out
    assert "all of its micro batches (1), each of 16 samples on one of 1 ranks" in text
    assert "Both columns are without compilation.\nThe plan holds" in text
    assert main(["plan", file, "--verify", "--json"]) == EXIT_OK
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert rows[0]["name"] == "peak memory"
    found = Comparison(
        num_ranks=8,
        micro_batch_size=4,
        micro_batches=2,
        accumulation_steps=16,
        compiles=True,
        rows=[Row(name="peak memory", unit="B", planned=2, measured=1, tolerance=0.05)],
    )
    text = render(found)
    for part in ("+100.00% FAILS", "2 of its 16 micro batches", "compiles its blocks", "NOT HOLD"):
        assert part in text


@pytest.mark.torch_range
def test_a_group_is_left_and_no_second_one_joined() -> None:
    with fake_world(2, 3) as world:
        assert (world.size, world.local_size, world.num_nodes) == (6, 3, 2)
        content = torch.ones(2)
        dist.all_reduce(content)
        assert content.tolist() == [1, 1]
        with pytest.raises(RuntimeError, match="in a process group already"), fake_world(1, 2):
            pass
    assert not dist.is_initialized()
