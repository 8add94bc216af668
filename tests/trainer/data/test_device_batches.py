"""Batches on the device: the order of work on two streams of a GPU, which is played by a recorder."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.trainer.ranks import CPU

from fluxtrain.contract.run.resolve import resolve
from fluxtrain.data.dataset import Batch
from fluxtrain.data.loader import (
    DeviceBatches,
    EvaluationData,
    evaluation_batches,
    training_batches,
)
from fluxtrain.data.order import BatchShares
from fluxtrain.data.sources import open_sources

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
