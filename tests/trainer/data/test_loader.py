"""Batches are a pure function of their number, independent of ranks, workers, resumes and streams."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.trainer.ranks import CPU
from torch import Tensor

from fluxtrain.contract.run.config import RunConfig
from fluxtrain.contract.run.resolve import merge, resolve
from fluxtrain.data.dataset import AnyBatch, Batch
from fluxtrain.data.loader import (
    DeviceBatches,
    EvaluationData,
    evaluation_batches,
    training_batches,
)
from fluxtrain.data.order import BatchShares
from fluxtrain.data.shards import Sample, ShardWriter
from fluxtrain.data.sources import open_source, open_sources, write_empty_text
from fluxtrain.errors import ConfigError, DataError

GLOBAL_BATCH = 24
STEPS = 4
NUM_SAMPLES = 37  # prime: batches straddle the epochs' ends
TENSORS = [field.name for field in fields(Batch) if field.name not in ("faults", "mask")]
"""Those of encoded sets, which have no masks."""


def config(**data: Any) -> RunConfig:
    return RunConfig.model_validate(
        {
            "preset": "micro",
            "model": {
                "in_channels": 16,
                "vec_in_dim": 6,
                "context_in_dim": 5,
                "hidden_size": 16,
                "num_heads": 2,
                "axes_dim": (2, 2, 4),
                "depth": 1,
                "depth_single_blocks": 1,
            },
            "data": {
                "source": "synthetic",
                "latent_size": 4,
                "text_length": 3,
                "num_workers": 0,
                "synthetic": {"train_samples": NUM_SAMPLES, "validation_samples": 13, "classes": 7},
                **data,
            },
            "flow": {"prompt_dropout": 0.3},
            "schedule": {"steps": STEPS, "global_batch_size": GLOBAL_BATCH},
            "evaluation": {"batch_size": 4},
        }
    )


def encoded(folder: Path, num_samples: int = NUM_SAMPLES, **data: Any) -> RunConfig:
    """Write a data set in which all values of sample i are i + 1, and those of the empty prompt -1."""
    for part, count in (("train", num_samples), ("validation", 13)):
        with ShardWriter(folder / part, shard_size=8, dtype=torch.float32) as writer:
            for i in range(count):
                writer.add(sample(i))
    write_empty_text(folder / "empty.safetensors", torch.full((3, 5), -1.0), torch.full((6,), -1.0))
    return config(source="encoded", **data)


def sample(i: int) -> Sample:
    full = [torch.full(shape, float(i + 1)) for shape in ((3, 5), (6,), (4, 4, 4), (4, 4, 4))]
    return Sample(f"key {i}", f"caption {i}", *full, timestep=i % 8)


def batches(
    run: RunConfig, root: Path = Path(), first: int = 0, ranks: int = 1, micro: int = 4
) -> list[list[Batch]]:
    """Return each rank's micro batches."""
    return [list(training(run, root, rank, ranks, micro, first)) for rank in range(ranks)]


def training(
    run: RunConfig, root: Path, rank: int = 0, ranks: int = 1, micro: int = 4, first: int = 0
) -> Iterator[AnyBatch]:
    shares = BatchShares(run.schedule.global_batch_size, micro, ranks)
    return training_batches(run, open_sources(run, root), shares, rank, first)


def by_position(per_rank: list[list[Batch]]) -> dict[str, Tensor]:
    """Return the samples of all ranks in the order of their positions, without padding."""
    padded = with_padding(per_rank)
    real = padded["indices"] >= 0
    return {name: tensor[real] for name, tensor in padded.items()}


def with_padding(per_rank: list[list[Batch]]) -> dict[str, Tensor]:
    """Return the samples of all ranks in the order of their positions, with padding."""
    ordered = [batch for step in zip(*per_rank, strict=True) for batch in step]
    return {name: torch.cat([getattr(batch, name) for batch in ordered]) for name in TENSORS}


def assert_equal(one: dict[str, Tensor], two: dict[str, Tensor]) -> None:
    for name in TENSORS:
        torch.testing.assert_close(one[name], two[name], rtol=0, atol=0, msg=name)


@settings(max_examples=15, deadline=None)
@given(
    layout=st.sampled_from(
        [(1, 1), (1, 24), (2, 3), (2, 12), (3, 8), (4, 6), (5, 5), (5, 2), (7, 4), (9, 3), (30, 1)]
    )
)
def test_a_position_has_the_same_sample_for_any_number_of_ranks(layout: tuple[int, int]) -> None:
    ranks, micro = layout
    one = by_position(batches(config(), micro=GLOBAL_BATCH))
    assert_equal(one, by_position(batches(config(), ranks=ranks, micro=micro)))
    assert len(one["indices"]) == STEPS * GLOBAL_BATCH


@pytest.mark.parametrize("ranks", [5, 7, 29])
def test_padding_is_finite_has_weight_0_and_is_not_read(tmp_path: Path, ranks: int) -> None:
    run = encoded(tmp_path)
    shares = batches(run, tmp_path, ranks=ranks, micro=2)
    assert len({len(share) for share in shares}) == 1
    assert {len(batch) for share in shares for batch in share} == {2}
    got = with_padding(shares)
    padding = got["indices"] < 0
    assert (~padding).sum() == STEPS * GLOBAL_BATCH
    assert padding.any()
    assert torch.equal(got["weights"], (~padding).float())
    assert all(torch.isfinite(got[name][padding].float()).all() for name in TENSORS)
    assert (got["mean"][padding] == 0).all()
    assert (got["txt"][padding] == -1).all()  # the empty prompt's


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 7])
def test_each_epoch_reads_every_sample_once(tmp_path: Path, ranks: int) -> None:
    run = encoded(tmp_path)
    indices = by_position(batches(run, tmp_path, ranks=ranks, micro=2))["indices"].tolist()
    for epoch in range(STEPS * GLOBAL_BATCH // NUM_SAMPLES):
        assert sorted(indices[epoch * NUM_SAMPLES :][:NUM_SAMPLES]) == list(range(NUM_SAMPLES))


def test_samples_have_their_own_encodings_and_dropped_prompts_the_empty_ones(
    tmp_path: Path,
) -> None:
    got = by_position(batches(encoded(tmp_path), tmp_path))
    expected, dropped = (got["indices"] + 1).float(), got["dropped"]
    for name in ("mean", "logvar"):
        assert torch.equal(got[name], expected[:, None, None, None].expand_as(got[name]))
    assert torch.equal(got["weights"], torch.ones(STEPS * GLOBAL_BATCH))
    assert 0 < dropped.sum() < len(dropped)
    for name in ("txt", "vec"):
        assert (got[name][dropped] == -1).all()
        values = got[name].flatten(1)
        assert torch.equal(values[~dropped], expected[~dropped, None].expand_as(values[~dropped]))


@pytest.mark.parametrize("first", [1, 3])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_resume_continues_as_if_never_stopped(tmp_path: Path, first: int, ranks: int) -> None:
    run = encoded(tmp_path)
    whole = by_position(batches(run, tmp_path, ranks=ranks))
    resumed = by_position(batches(run, tmp_path, first=first, ranks=ranks))
    assert_equal({name: t[first * GLOBAL_BATCH :] for name, t in whole.items()}, resumed)


def test_a_resume_after_the_last_step_has_nothing_to_do() -> None:
    assert batches(config(), first=STEPS) == [[]]


def test_workers_return_the_batches_of_the_main_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    alone, shared = encoded(tmp_path), encoded(tmp_path, num_workers=2, prefetch=2)
    assert_equal(by_position(batches(alone, tmp_path)), by_position(batches(shared, tmp_path)))
    assert not recwarn.list  # as torch has for more workers than CPUs


def test_neighbouring_batches_do_not_share_memory(tmp_path: Path) -> None:
    run = encoded(tmp_path)
    kept = list(islice(training(run, tmp_path), 6))
    copies = [batch.mean.clone() for batch in kept]
    list(islice(training(run, tmp_path), 6))
    for batch, copy in zip(kept, copies, strict=True):
        assert torch.equal(batch.mean, copy)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 7, 15])
def test_evaluation_reads_every_sample_once_in_equally_many_batches(
    tmp_path: Path, ranks: int
) -> None:
    run = encoded(tmp_path)
    source = open_source(run, tmp_path, "validation")
    shares = [list(evaluation_batches(run, source, rank, ranks)) for rank in range(ranks)]
    assert len({len(share) for share in shares}) == 1
    got = with_padding(shares)
    real = got["indices"] >= 0
    assert sorted(got["indices"][real].tolist()) == list(range(13))
    assert torch.equal(got["weights"], real.float())
    assert torch.equal(got["timesteps"][real], (got["indices"][real] % 8) / 8)
    assert not got["dropped"].any()


@pytest.mark.parametrize("num_workers", [0, 2])
def test_the_next_evaluation_reads_the_same_with_the_same_workers(
    tmp_path: Path, num_workers: int
) -> None:
    run = encoded(tmp_path, num_workers=num_workers)
    source = open_source(run, tmp_path, "validation")
    evaluation = evaluation_batches(run, source, 0, 2)
    first = with_padding([list(evaluation)])
    workers = {process.pid for process in multiprocessing.active_children()}
    assert len(workers) == num_workers
    assert_equal(with_padding([list(evaluation)]), first)
    assert {process.pid for process in multiprocessing.active_children()} == workers


@pytest.fixture(params=["fork", "forkserver"])
def _default_start_method(request: pytest.FixtureRequest) -> Iterator[None]:
    """Start processes in the way of Python 3.13, and in that of 3.14."""
    before = multiprocessing.get_start_method()
    multiprocessing.set_start_method(request.param, force=True)
    yield
    multiprocessing.set_start_method(before, force=True)


@pytest.mark.torch_range
@pytest.mark.usefixtures("_default_start_method")
def test_a_worker_ends_with_its_trainer_and_at_no_other_signal(tmp_path: Path) -> None:
    """Slurm sends SIGTERM to every process; torch's workers would end, and the trainer with them."""
    run = encoded(tmp_path, num_workers=2)
    evaluation = evaluation_batches(run, open_source(run, tmp_path, "validation"), 0, 2)
    first = with_padding([list(evaluation)])
    workers = multiprocessing.active_children()
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    assert {str(worker.pid) for worker in workers} <= set(children)  # no other process to end
    pids = " ".join(str(worker.pid) for worker in workers)
    subprocess.run(["sh", "-c", f"kill -TERM {pids}"], check=True)
    assert_equal(with_padding([list(evaluation)]), first)
    for worker in workers:
        worker.terminate()
        worker.join(20)
        assert worker.exitcode == 0


@pytest.mark.parametrize(
    ("part", "field", "value"),
    [
        ("model", "context_in_dim", 7),
        ("model", "vec_in_dim", 8),
        ("model", "in_channels", 32),
        ("data", "text_length", 4),
        ("data", "latent_size", 8),
    ],
)
def test_shapes_that_do_not_fit_name_the_field(
    tmp_path: Path, part: str, field: str, value: int
) -> None:
    document = merge(encoded(tmp_path).model_dump(), {part: {field: value}})
    with pytest.raises(ConfigError, match=str(tmp_path / "train")) as caught:
        open_source(RunConfig.model_validate(document), tmp_path, "train")
    assert caught.value.path == f"spec.run.{part}.{field}"
    assert caught.value.given == value


def test_empty_encodings_of_another_shape_name_their_field(tmp_path: Path) -> None:
    run = encoded(tmp_path)
    write_empty_text(tmp_path / "empty.safetensors", torch.zeros(3, 6), torch.zeros(6))
    with pytest.raises(ConfigError, match="differ") as caught:
        training(run, tmp_path)
    assert caught.value.path == "spec.run.data.empty_encodings"


def test_missing_empty_encodings_are_named(tmp_path: Path) -> None:
    run = encoded(tmp_path)
    (tmp_path / "empty.safetensors").unlink()
    with pytest.raises(DataError, match=r"empty\.safetensors: missing"):
        training(run, tmp_path)


def test_draws_differ_between_positions() -> None:
    got = by_position(batches(config()))
    times = got["timesteps"].numpy()
    assert len(np.unique(times)) == len(times)


GPU = torch.device("cuda", 0)
CONFIG = resolve({"preset": "micro", "schedule": {"steps": 3}, "evaluation": {"batch_size": 24}})


class Gpu:
    """Records what is done in which stream."""

    def __init__(self) -> None:
        self.log, self.present = list[str](), "compute"

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "Stream", lambda device: Stream(self, "copy"))
        monkeypatch.setattr(torch.cuda, "stream", self._enter)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream(self, self.present))

    @contextmanager
    def _enter(self, stream: Stream) -> Iterator[None]:
        before, self.present = self.present, stream.name
        yield
        self.present = before

    def take(self) -> list[str]:
        log, self.log = self.log, []
        return log


class Stream:
    def __init__(self, gpu: Gpu, name: str) -> None:
        self.gpu, self.name = gpu, name

    def record_event(self) -> str:
        return f"event after {self.gpu.log[-1]}"

    def wait_event(self, event: str) -> None:
        self.gpu.log.append(f"{self.name} waits for {event}")


class Loaded:
    """A batch whose tensors record where they are copied and used."""

    def __init__(self, gpu: Gpu, name: str) -> None:
        self.gpu, self.name = gpu, name

    def to(self, device: torch.device) -> Loaded:
        assert device == GPU
        self.gpu.log.append(f"{self.gpu.present}: copy {self.name}")
        return self

    def device_tensors(self) -> dict[str, Loaded]:
        return {"txt": self}

    def record_stream(self, stream: Stream) -> None:
        self.gpu.log.append(f"{self.name} is used in {stream.name}")


def loader(gpu: Gpu, *names: str) -> Iterator[Any]:
    for name in names:
        gpu.log.append(f"load {name}")
        yield Loaded(gpu, name)


def used(name: str) -> list[str]:
    return [f"compute waits for event after copy: copy {name}", f"{name} is used in compute"]


def copied(name: str) -> list[str]:
    return [f"load {name}", f"copy: copy {name}"]


def test_the_next_batch_is_copied_while_the_present_one_is_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpu = Gpu()
    gpu.install(monkeypatch)
    batches = DeviceBatches(loader(gpu, "a", "b", "c"), GPU)
    assert next(batches).name == "a"  # type: ignore[union-attr]
    assert gpu.take() == copied("a") + used("a")
    batches.stage()
    batches.stage()
    assert gpu.take() == copied("b"), "one is copied ahead, and waits in no stream"
    next(batches)
    assert gpu.take() == used("b")
    next(batches)
    assert gpu.take() == copied("c") + used("c"), "without staging it is copied when it is needed"
    batches.stage()
    assert list(batches) == []


def test_the_first_batch_of_an_evaluation_is_copied_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Gpu()
    gpu.install(monkeypatch)

    class Repeated:
        def __iter__(self) -> Iterator[Any]:
            return loader(gpu, "a", "b")

    data = EvaluationData(Repeated(), GPU)
    for _ in range(2):
        data.begin()
        data.begin()
        assert gpu.take() == copied("a")
        assert [batch.name for batch in data] == ["a", "b"]  # type: ignore[union-attr]
        assert gpu.take() == used("a") + copied("b") + used("b")
    assert len(list(data)) == 2, "an evaluation that was not begun ahead"


def equal(one: Batch, two: Batch) -> bool:
    pairs = zip(one.tensors().items(), two.tensors().items(), strict=True)
    return all(a == b and torch.equal(x, y) for (a, x), (b, y) in pairs)


def test_on_a_cpu_batches_pass_unchanged_and_nothing_is_read_ahead() -> None:
    sources, shares = open_sources(CONFIG, Path()), BatchShares.of(CONFIG, 1)
    plain = list(training_batches(CONFIG, sources, shares, 0))
    read = list[int]()

    def counted() -> Iterator[Any]:
        for number, batch in enumerate(training_batches(CONFIG, sources, shares, 0)):
            read.append(number)
            yield batch

    batches = DeviceBatches(counted(), CPU)
    batches.stage()
    assert read == []
    for expected in plain:
        assert equal(next(batches), expected)
        batches.stage()
    assert len(read) == len(plain) == 3
    assert list(batches) == []


def test_every_evaluation_has_all_batches() -> None:
    source = open_sources(CONFIG, Path()).validation
    data = EvaluationData(evaluation_batches(CONFIG, source, 0, 1), CPU)
    data.begin()
    for _ in range(2):
        assert [len(batch) for batch in data] == [24, 24, 24]


def test_what_only_the_host_reads_stays_there() -> None:
    sources, shares = open_sources(CONFIG, Path()), BatchShares.of(CONFIG, 1)
    batch = next(training_batches(CONFIG, sources, shares, 0))
    moved = batch.to(torch.device("meta"))
    on_host = {name for name, tensor in moved.tensors().items() if tensor.device == CPU}
    assert on_host == {"indices", "dropped"}
    assert moved.device_tensors().keys() == moved.tensors().keys() - on_host
