"""Training on several sizes: equal for any number of ranks, after a kill, and in accumulated batches."""

from __future__ import annotations

from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from benchmarks import reference_model
from benchmarks.reference_model import random_model
from cluster.free_ports import free_port
from diffusers import FluxPipeline
from PIL import Image
from tests.trainer import ranks
from tests.trainer.numerics.predictions import relative_error, run_reference
from tests.trainer.outputs import ledger, losses, records
from tests.trainer.small_runs import merge_all
from tests.trainer.tiny_encoders import write_encoders
from tests.trainer.tiny_model import initialised
from torch._dynamo.testing import CompileCounterWithBackend

from fluxtrain.contract.process import RunPaths
from fluxtrain.contract.run.config import RunConfig
from fluxtrain.contract.run.resolve import resolve
from fluxtrain.data.shard_dataset import ShardDataset
from fluxtrain.data.shards import Sample, ShardWriter
from fluxtrain.data.sources import write_empty_text
from fluxtrain.errors import ConfigError
from fluxtrain.model.loss import FlowLoss
from fluxtrain.parallel import compile
from fluxtrain.parallel.distributed import World
from fluxtrain.plan.estimate import make_plan
from fluxtrain.plan.table import render
from fluxtrain.sample import grid
from fluxtrain.sample.grid import Column, GridSampler
from fluxtrain.train.sources import shared_sources, with_steps

COUNTS = Counter({(4, 4): 9, (2, 6): 5, (6, 2): 4, (2, 8): 1})
"""Samples of each height and width of latents."""
BATCH = 4
PER_EPOCH = 3 + 2 + 1 + 1
RUN: dict[str, Any] = {
    "preset": "micro",
    "data": {"source": "encoded", "buckets": {"step": 16}},
    "schedule": {"global_batch_size": BATCH, "steps": 3 * PER_EPOCH, "warmup_steps": 0},
    "flow": {"timestep_sampling": "flux_shift"},
    "evaluation": {"every_samples": 40, "batch_size": 3, "at_end": True},
    "checkpoint": {"every_steps": 5, "memory_every_steps": 0},
    "logging": {"every_steps": 1, "metrics_port": 0, "ledger": True},
}
EXACT, SUMS = 0.0, 1e-5


def write(root: Path) -> None:
    """Write a training and a validation set, whose samples of a size are in shards of their own."""
    rng = torch.Generator().manual_seed(0)
    for part in ("train", "validation"):
        with ShardWriter(root / part, shard_size=4, dtype=torch.float32) as writer:
            for size, count in COUNTS.items():
                for index in range(count):
                    latents = [torch.randn(4, *size, generator=rng) for _ in range(2)]
                    texts = torch.randn(4, 16, generator=rng), torch.randn(16, generator=rng)
                    writer.add(
                        Sample(f"{size}-{index}", "a caption", *texts, latents[0], latents[1] - 6)
                    )
    write_empty_text(root / "empty.safetensors", torch.zeros(4, 16), torch.zeros(16))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("data")
    write(root)
    return root


@pytest.fixture(scope="module")
def reference(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("reference")
    assert run(data, output) == [0]
    return output


def run(data: Path, output: Path, *changes: dict[str, Any], size: int = 1) -> list[int | None]:
    config = resolve(merge_all(RUN, *changes))
    paths = RunPaths(output, data, data)
    return ranks.finish(partial(ranks.train_together, port=free_port()), config, paths, size)


def crash(config: RunConfig, paths: RunPaths, world: World, *, step: int) -> None:
    ranks.crash_after(step)
    ranks.train_alone(config, paths, world)


def assert_equal(output: Path, reference: Path, tolerance: float) -> None:
    for key in ("train_loss", "eval_loss", "grad_norm"):
        expected, found = losses(reference, key), losses(output, key)
        assert list(found) == list(expected)
        assert list(found.values()) == pytest.approx(list(expected.values()), rel=tolerance, abs=0)
    assert ledger(output) == ledger(reference)


def test_shards_of_several_sizes_are_read_by_size(data: Path) -> None:
    dataset = ShardDataset(data / "train")
    assert Counter(map(tuple, dataset.latent_sizes.tolist())) == COUNTS
    assert len(dataset.files) == 3 + 2 + 1 + 1


def test_each_epoch_has_every_sample_and_the_samples_are_counted(reference: Path) -> None:
    steps = ledger(reference)
    for epoch in range(3):
        first = epoch * PER_EPOCH + 1
        used = [index for step in range(first, first + PER_EPOCH) for index in steps[step]]
        assert sorted(used) == list(range(sum(COUNTS.values())))
    counted = {record["step"]: record["samples"] for record in records(reference)}
    assert counted == dict(
        zip(steps, np.cumsum([len(each) for each in steps.values()]), strict=True)
    )


def test_an_evaluation_has_every_sample_of_each_size(reference: Path) -> None:
    counts = [record["eval_samples"] for record in records(reference) if "eval_loss" in record]
    assert set(counts) == {sum(COUNTS.values())}


@pytest.mark.parametrize("size", [2, 3])
def test_losses_do_not_depend_on_the_number_of_ranks(
    data: Path, reference: Path, tmp_path: Path, size: int
) -> None:
    assert run(data, tmp_path, size=size) == [0] * size
    assert_equal(tmp_path, reference, SUMS)


def test_losses_do_not_depend_on_micro_batches(data: Path, reference: Path, tmp_path: Path) -> None:
    assert run(data, tmp_path, {"parallel": {"micro_batch_size": 1}}) == [0]
    assert_equal(tmp_path, reference, SUMS)


def test_a_killed_run_continues_with_equal_losses(
    data: Path, reference: Path, tmp_path: Path
) -> None:
    config, paths = resolve(RUN), RunPaths(tmp_path, data, data)
    assert ranks.finish(partial(crash, step=9), config, paths) == [ranks.CRASHED]
    assert run(data, tmp_path) == [0]
    assert_equal(tmp_path, reference, EXACT)


def test_a_killed_run_continues_on_other_ranks(data: Path, reference: Path, tmp_path: Path) -> None:
    config, paths = resolve(RUN), RunPaths(tmp_path, data, data)
    assert ranks.finish(partial(crash, step=12), config, paths) == [ranks.CRASHED]
    assert run(data, tmp_path, size=2) == [0, 0]
    assert_equal(tmp_path, reference, SUMS)


def test_epochs_of_buckets_have_all_their_short_batches(data: Path) -> None:
    config = resolve(merge_all(RUN, {"schedule": {"epochs": 3}}))
    sources = shared_sources(config, RunPaths(data, data, data), World.alone())
    changed = with_steps(config, sources, World.alone())
    assert changed.schedule.steps == 3 * PER_EPOCH


@pytest.mark.parametrize(
    ("buckets", "message"),
    [
        (None, "latents of 2 x 6; set data.buckets for other sizes than squares"),
        ({"step": 32}, "latents of 2 x 6, 48 x 16 pixels, which are no bucket"),
        ({"step": 16, "max_side": 48}, "latents of 2 x 8, 64 x 16 pixels"),
        ({"step": 16, "resolutions": [48]}, "latents of 2 x 6, 48 x 16 pixels"),
    ],
)
def test_sizes_that_are_no_bucket_are_refused(data: Path, buckets: Any, message: str) -> None:
    config = resolve(merge_all(RUN, {"data": {"buckets": None}}, {"data": {"buckets": buckets}}))
    with pytest.raises(ConfigError, match=message):
        shared_sources(config, RunPaths(data, data, data), World.alone())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"data": {"source": "images"}},
            r"data.source: got 'images'; must be encoded or synthetic .* data.images, which encodes",
        ),
        (
            {
                "task": "benchmark",
                "benchmark": {"image_sizes": [32, 16]},
                "data": {"buckets": {"step": 32}},
            },
            r"benchmark.image_sizes\[1\]: got 16; .*below step",
        ),
        (
            {
                "task": "benchmark",
                "benchmark": {"image_sizes": [32]},
                "data": {"buckets": {"resolutions": [32]}},
            },
            r"benchmark.image_sizes: got \[32\]; must be empty if data.buckets has resolutions",
        ),
        ({"data": {"buckets": {"step": 64}}}, r"data.image_size: got 32; .*below step"),
        ({"data": {"buckets": {"min_side": 48}}}, r"data.image_size: got 32; .*min_side"),
        ({"data": {"buckets": {"max_side": 16}}}, r"data.image_size: got 32; .*max_side"),
    ],
)
def test_runs_without_a_use_for_buckets_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve(merge_all(RUN, changes))


def test_a_grid_has_images_of_all_sizes(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_encoders(tmp_path)
    (data / "prompts.txt").write_text("a red circle --w 64 --h 32")
    sampling = {"prompt_file": "prompts.txt", "num_prompts": 19, "num_steps": 2}
    config = resolve(merge_all(RUN, {"sampling": sampling, "encoders": {"precision": "float32"}}))
    sources = shared_sources(config, RunPaths(data, data, data), World.alone())
    sampler = GridSampler(config, RunPaths(tmp_path, data, tmp_path), World.alone(), sources)
    flow_loss = FlowLoss(initialised(config.model), config, torch.float32)
    grids = list[list[Column]]()
    save_grid = grid.save_grid
    monkeypatch.setattr(grid, "save_grid", lambda path, columns, *texts: grids.append(columns))
    sampler.write(flow_loss, tmp_path / "grid.png", 1)
    ((prompt, (chosen,)), *columns) = grids[0]
    assert (prompt, chosen.size) == ("a red circle", (64, 32))
    found = [[image.size for image in images] for _, images in columns]
    assert found == [[(8 * w, 8 * h)] * 2 for h, w in COUNTS.elements()]
    save_grid(tmp_path / "grid.png", grids[0], "title")
    with Image.open(tmp_path / "grid.png") as whole:
        assert whole.width == 6 * (2 * 64 + 6) + 6


def test_predictions_of_every_size_equal_diffusers() -> None:
    config = resolve(RUN)
    model = random_model(config.model)
    other, flow_loss = (
        reference_model.reference(model, config.model),
        FlowLoss(model, config, torch.float32),
    )
    for size in config.data.latent_sizes:
        noisy, txt = torch.randn(2, 4, *size), torch.randn(2, 4, 16)
        vec, times = torch.randn(2, 16), torch.rand(2)
        expected = run_reference(
            other,
            {
                "img": FluxPipeline._pack_latents(noisy, 2, 4, *size),
                "img_ids": FluxPipeline._prepare_latent_image_ids(
                    2, size[0] // 2, size[1] // 2, torch.device("cpu"), torch.float32
                ),
                "txt": txt,
                "txt_ids": torch.zeros(4, 3),
                "timesteps": times,
                "y": vec,
            },
        )
        pixels = 8 * size[0], 8 * size[1]
        expected = FluxPipeline._unpack_latents(expected, *pixels, vae_scale_factor=8)
        found = flow_loss.predict(noisy, txt, vec, times, 1.0)
        assert relative_error(found, expected) <= 1e-5, size


def test_the_plan_is_that_of_the_largest_size() -> None:
    fields = {"preset": "dev-lora", "initial_weights": "w"}
    square, buckets = (
        make_plan(resolve(merge_all(fields, {"data": {"buckets": each}})), 1, 1)
        for each in (None, {"step": 128, "max_side": 1280})
    )
    assert (buckets.image_width, buckets.image_height, buckets.num_image_sizes) == (1024, 1024, 9)
    assert buckets.memory_bytes_per_gpu == square.memory_bytes_per_gpu
    assert buckets.flops_per_sample == square.flops_per_sample
    assert "1024 × 1024 pixels: the largest of 9 sizes" in " ".join(render(buckets).split())
    both = resolve(merge_all(fields, {"data": {"buckets": {"resolutions": [512, 1280]}}}))
    larger = make_plan(both, 1, 1)
    assert (larger.image_width, larger.image_height) == (1280, 1280)
    assert larger.memory_bytes_per_gpu.activations > square.memory_bytes_per_gpu.activations


@pytest.mark.proof
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_one_compiled_graph_serves_all_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.compiler.reset()
    counter = CompileCounterWithBackend("aot_eager_decomp_partition")
    monkeypatch.setattr(compile, "BACKEND", counter)
    config = resolve(RUN)
    model, compiled = random_model(config.model), random_model(config.model)
    compiled.load_state_dict(model.state_dict())
    compile.compile_blocks(compiled, has_sizes=True)
    graphs = list[int]()
    for size in config.data.latent_sizes * 2:
        inputs = torch.randn(5, 4, *size), torch.randn(5, 4, 16), torch.randn(5, 16), torch.rand(5)
        found, expected = (
            FlowLoss(each, config, torch.float32).predict(*inputs, 1.0)
            for each in (compiled, model)
        )
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
        graphs.append(counter.frame_count)
    torch.compiler.reset()
    assert graphs == graphs[:1] * len(graphs)


def test_synthetic_classes_have_one_size_after_the_other(tmp_path: Path) -> None:
    changes = {"data": {"source": "synthetic", "synthetic": {"train_samples": 30, "classes": 7}}}
    config = resolve(merge_all(RUN, changes, {"evaluation": {"every_samples": 0, "at_end": False}}))
    source = shared_sources(config, RunPaths(tmp_path, tmp_path, tmp_path), World.alone()).train
    sizes = list(map(tuple, source.latent_sizes.tolist()))  # type: ignore[union-attr]
    assert sizes[:7] == [(2, 6), (2, 8), (4, 4), (6, 2), (8, 2), (2, 6), (2, 8)]
    assert sizes[7:14] == sizes[:7]
    paths = RunPaths(tmp_path, tmp_path, tmp_path)
    assert ranks.finish(ranks.train_alone, config, paths) == [0], ranks.output_of(paths)
    steps = ledger(tmp_path)
    assert all(len({sizes[index] for index in used}) == 1 for used in steps.values())
    assert len(losses(tmp_path)) == len(steps) == 3 * PER_EPOCH
