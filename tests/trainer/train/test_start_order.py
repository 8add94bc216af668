"""A start: the passes before training, MLPerf's clock before the first sample, all forks before a step."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.trainer import ranks
from tests.trainer.outputs import mlperf_events
from tests.trainer.small_runs import ENCODED_RUN, IMAGES, merge_all, write_encoded
from tests.trainer.tiny_encoders import write_encoders, write_images
from tests.trainer.tiny_model import CPU, initialised
from torch import Tensor, nn

from fluxtrain.contract.process import RunPaths
from fluxtrain.contract.run.config import RunConfig
from fluxtrain.contract.run.resolve import resolve
from fluxtrain.data.dataset import AnyBatch
from fluxtrain.data.images import TarImages
from fluxtrain.data.loader import (
    evaluation_batch_size,
    evaluation_batches,
    training_batches,
)
from fluxtrain.data.order import BatchShares
from fluxtrain.data.shard_dataset import ShardDataset
from fluxtrain.data.sources import open_sources
from fluxtrain.model.flux import Flux
from fluxtrain.model.loss import FlowLoss
from fluxtrain.parallel.distributed import World, process_group
from fluxtrain.report.observer import Observer
from fluxtrain.train import loop as module
from fluxtrain.train.loop import is_needed, prepare, synthetic_batch, train, warm_up

DELAY = 1.0


def train_with_a_late_rank(config: RunConfig, paths: RunPaths, world: World, *, late: int) -> None:
    """Train; rank ``late`` is ready seconds after the other, and each records when it reads a sample."""
    record_reads(ShardDataset, "read", paths.output / f"reads_{world.rank}.jsonl")
    record_reads(TarImages, "image", paths.output / f"reads_{world.rank}.jsonl")
    open_logs = Observer.open_logs

    def open_logs_late(self: Observer, *arguments: Any) -> None:
        open_logs(self, *arguments)
        time.sleep(DELAY * (world.rank == late))
        (paths.output / f"ready_{world.rank}.json").write_text(json.dumps(time.time()))

    Observer.open_logs = open_logs_late  # type: ignore[method-assign]
    with process_group() as joined:
        train(config, paths, joined)


def record_reads(kind: type, method: str, path: Path) -> None:
    """Let ``method`` append the time to ``path`` before it reads, also in loader processes."""
    read = getattr(kind, method)

    def recorded(*arguments: Any) -> Any:
        with path.open("a") as file:
            file.write(f"{time.time()}\n")
        return read(*arguments)

    setattr(kind, method, recorded)


@pytest.mark.parametrize(
    ("source", "late", "num_workers"),
    [("encoded", 0, 0), ("encoded", 0, 2), ("encoded", 1, 2), ("images", 0, 0), ("images", 0, 2)],
)
def test_no_sample_is_read_before_the_run_starts(
    tmp_path: Path, source: str, late: int, num_workers: int
) -> None:
    changes = {"data": {"num_workers": num_workers}, "evaluation": {"every_samples": 0}}
    config = resolve(merge_all(ENCODED_RUN, IMAGES if source == "images" else {}, changes))
    paths = RunPaths(tmp_path / "output", tmp_path, tmp_path)
    if source == "encoded":
        write_encoded(tmp_path)
    else:
        write_encoders(tmp_path)
        for part in ("train", "validation"):
            write_images(tmp_path / part, 24)
    run = partial(train_with_a_late_rank, late=late)
    assert ranks.finish(run, config, paths, size=2) == [0, 0], ranks.output_of(paths)
    (started,) = [
        event["time_ms"] for event in mlperf_events(paths.output) if event["key"] == "run_start"
    ]
    for rank in range(2):
        ready = json.loads((paths.output / f"ready_{rank}.json").read_text())
        reads = (paths.output / f"reads_{rank}.jsonl").read_text().split()
        assert int(1000 * ready) <= started, f"rank {rank} was not ready when the clock started"
        assert min(map(float, reads)) * 1000 >= started, (
            f"rank {rank} read before the clock started"
        )


def train_recording_forks(config: RunConfig, paths: RunPaths, world: World) -> None:
    """Train; append the number of logged steps to a file at each fork of this process."""
    owner, log = os.getpid(), paths.output / "metrics.jsonl"

    def record() -> None:
        if os.getpid() == owner:
            logged = len(log.read_text().splitlines()) if log.exists() else 0
            with (paths.output / "forks").open("a") as file:
                file.write(f"{logged}\n")

    os.register_at_fork(before=record)
    ranks.train_alone(config, paths, world)


def test_loader_processes_start_before_the_first_step(tmp_path: Path) -> None:
    """A lock of libc that a checkpoint's thread holds at a fork stays locked in the new process."""
    write_encoded(tmp_path)
    changes = {
        "data": {"num_workers": 2},
        "evaluation": {"every_samples": 2 * ENCODED_RUN["schedule"]["global_batch_size"]},
        "checkpoint": {"every_steps": 1},
    }
    paths = RunPaths(tmp_path / "output", tmp_path, tmp_path)
    config = resolve(merge_all(ENCODED_RUN, changes))
    assert ranks.finish(train_recording_forks, config, paths) == [0], ranks.output_of(paths)
    assert (paths.output / "forks").read_text().split() == ["0"] * 4


CONFIG = resolve(
    {
        "preset": "micro",
        "data": {"synthetic": {"validation_samples": 21}},
        "parallel": {"micro_batch_size": 6},
        "evaluation": {"batch_size": 5},
    }
)


def shapes(batch: AnyBatch) -> dict[str, tuple[torch.Size, torch.dtype]]:
    return {name: (tensor.shape, tensor.dtype) for name, tensor in batch.tensors().items()}


def test_the_shapes_are_those_of_every_batch() -> None:
    sources = open_sources(CONFIG, Path())
    shares = BatchShares.of(CONFIG, 2)
    size = evaluation_batch_size(CONFIG, 21, 2)
    kinds: list[tuple[Iterable[AnyBatch], int]] = [
        (training_batches(CONFIG, sources, shares, 1), shares.micro_batch_size),
        (evaluation_batches(CONFIG, sources.validation, 1, 2), size),
    ]
    for batches, expected in kinds:
        found = [shapes(batch) for batch, _ in zip(batches, range(5), strict=False)]
        assert found == [shapes(synthetic_batch(CONFIG, expected, CPU))] * len(found)


def test_a_warm_up_leaves_nothing_behind() -> None:
    model = initialised(CONFIG.model)
    passes = list[tuple[bool, bool, int]]()

    def record(
        module: nn.Module, inputs: object, options: dict[str, Tensor], output: Tensor
    ) -> None:
        passes.append((module.training, output.requires_grad, len(options["img"])))

    model.register_forward_hook(record, with_kwargs=True)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    random = torch.get_rng_state()
    signs = list[None]()
    warm_up(FlowLoss(model, CONFIG, torch.float32), 4, 5, CPU, lambda: signs.append(None))
    assert passes == [(True, True, 4), (False, False, 5)]
    assert len(signs) == 3
    assert model.training
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(torch.get_rng_state(), random)
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)


def test_without_an_evaluation_only_a_training_batch_is_passed() -> None:
    model = initialised(CONFIG.model)
    sizes = list[int]()
    model.register_forward_pre_hook(
        lambda module, inputs, options: sizes.append(len(options["img"])), with_kwargs=True
    )
    warm_up(FlowLoss(model, CONFIG, torch.float32), 3, None, CPU)
    assert sizes == [3]


def test_a_model_that_cannot_be_compiled_on_gpus_is_passed_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A GPU without Triton is played by an unknown device: meta."""
    device = torch.device("meta")
    monkeypatch.setattr(module, "compiles", lambda parallel, device: False)
    monkeypatch.setattr(module, "missing_compiler", lambda device: "Triton is missing")
    config = resolve({"preset": "micro", "parallel": {"compile": None}})
    with device:
        flow_loss = FlowLoss(Flux(config.model), config, torch.float32)
    prepare(flow_loss, (2, None), World(0, 0, 1, device), tmp_path)
    assert "blocks are not compiled: Triton is missing" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("compute", "lacks"), [*product(("bfloat16", "float32"), (False, True))])
def test_a_run_says_that_its_cpu_has_no_bfloat16(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    compute: str,
    lacks: bool,
) -> None:
    monkeypatch.setattr(module, "lacks_bfloat16", lambda device: lacks)
    config = resolve({"preset": "micro", "precision": {"compute": compute}})
    paths = RunPaths(tmp_path, tmp_path, tmp_path)
    module.initial_model(config, paths, World(0, 0, 1, CPU), True, None, lambda: None)
    is_slow = compute == "bfloat16" and lacks
    assert ("precision.compute: float32 is much faster" in capsys.readouterr().err) == is_slow


@pytest.mark.parametrize(("node", "has_file"), [(0, False), (0, True), (1, False)])
def test_the_first_node_keeps_what_it_has_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, node: int, has_file: bool
) -> None:
    calls = list[str]()

    class Cache:
        @staticmethod
        def of(*arguments: object) -> Cache:
            return Cache()

        def load(self) -> bool:
            calls.append("load")
            return has_file

        def save(self) -> None:
            calls.append("save")

    monkeypatch.setattr(module, "CompileCache", Cache)
    monkeypatch.setattr(module, "compiles", lambda parallel, device: True)
    flow_loss = FlowLoss(initialised(CONFIG.model), CONFIG, torch.float32)
    prepare(flow_loss, (2, None), World(node, 0, 2, CPU, num_nodes=2), tmp_path)
    assert calls == ["load"] + ["save"] * (node == 0 and not has_file)


def test_an_eager_model_on_a_cpu_waits_for_nothing() -> None:
    assert not is_needed(CONFIG, World.alone())
    assert is_needed(CONFIG, World(0, 0, 1, torch.device("cuda", 0)))
