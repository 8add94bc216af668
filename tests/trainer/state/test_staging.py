"""Copies for a checkpoint: one buffer of the exact size, and the weights change only once they are whole."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.trainer import in_process, ranks

from fluxtrain import optim
from fluxtrain.contract.process import RunPaths
from fluxtrain.contract.run.resolve import resolve
from fluxtrain.state import staging
from fluxtrain.state.staging import CopyQueue, Staging, State


class SlowDevice(CopyQueue):
    """A device that copies when it comes to it: only then is the copy whole."""

    def __init__(self) -> None:
        self.log = list[str]()
        self.stall = 0.0

    @contextmanager
    def copying(self) -> Iterator[None]:
        self.log.append("copy")
        yield
        self.log.append("queued")

    def wait(self) -> None:
        self.log.append("wait")

    def before_change(self) -> None:
        self.log.append("change")
        self.stall += 0.25

    def take_stall(self) -> float:
        stall, self.stall = self.stall, 0.0
        return stall


def make_state() -> State:
    generator = torch.Generator().manual_seed(1)
    shapes = {"weights": (7, 3), "vector": (5,), "number": (), "empty": (0, 4)}
    state = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    return state | {"half": torch.randn(3, generator=generator).bfloat16()}


def test_copies_are_those_of_the_time_of_the_copy() -> None:
    state = make_state()
    before = {name: tensor.clone() for name, tensor in state.items()}
    staging = Staging(state)
    staging.copy(lambda: None)
    for tensor in state.values():
        tensor.fill_(9)
    staging.wait()
    assert all(torch.equal(staging.copies[name], before[name]) for name in state)
    assert {name: c.dtype for name, c in staging.copies.items()} == {
        name: t.dtype for name, t in state.items()
    }


class OnGpu(torch.Tensor):
    """A tensor that says it is on the fourth GPU."""

    is_cuda = True
    device = torch.device("cuda", 3)


def test_memory_is_pinned_in_a_thread_that_uses_the_ranks_own_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    current, pinned = threading.local(), list[torch.device | None]()

    def pin(memory: torch.Tensor) -> bool:
        pinned.append(getattr(current, "device", None))
        return False

    monkeypatch.setattr(torch.cuda, "set_device", lambda gpu: setattr(current, "device", gpu))
    monkeypatch.setattr(staging, "pin", pin)
    staging_ = Staging({"a": torch.zeros(3).as_subclass(OnGpu)}, SlowDevice())
    staging_._reserving.join()
    assert pinned == [torch.device("cuda", 3)]


def test_the_buffer_has_the_size_of_the_state_and_is_used_again() -> None:
    state = {"a": torch.randn(1 << 20), "b": torch.randn((1 << 19) + 3)}
    staging = Staging(state)
    addresses = list[list[int]]()
    for _ in range(2):
        staging.copy(lambda: None)
        addresses.append([copy.data_ptr() for copy in staging.copies.values()])
    assert addresses[0] == addresses[1]
    (buffer,) = {copy.untyped_storage().data_ptr() for copy in staging.copies.values()}
    size = staging.copies["a"].untyped_storage().nbytes()
    assert buffer
    assert 0 <= size - sum(tensor.nbytes for tensor in state.values()) < 64 * len(state)


def test_each_tensor_is_a_sign_of_progress() -> None:
    calls = list[int]()
    note: Callable[[], None] = lambda: calls.append(1)  # noqa: E731
    state = make_state()
    Staging(state).copy(note)
    assert len(calls) == len(state)


def test_a_device_is_told_to_finish_the_copies_before_a_change() -> None:
    device = SlowDevice()
    staging = Staging(make_state(), device)
    staging.copy(lambda: None)
    staging.before_change()
    staging.wait()
    assert device.log == ["copy", "queued", "change", "wait"]
    assert (staging.take_stall(), staging.take_stall()) == (0.25, 0.0)


def test_training_changes_the_weights_only_after_the_copy_of_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device, update = SlowDevice(), optim.update

    def logged_update(*arguments: Any) -> None:
        device.log.append("update")
        update(*arguments)

    monkeypatch.setattr(staging, "CopyQueue", lambda: device)
    monkeypatch.setattr(optim, "update", logged_update)
    config = resolve(
        {
            "preset": "micro",
            "schedule": {"steps": 3},
            "checkpoint": {"every_steps": 1, "memory_every_steps": 0},
            "evaluation": {"every_samples": 0, "at_end": False},
            "logging": {"metrics_port": 0},
        }
    )
    paths = RunPaths(tmp_path, tmp_path, tmp_path)
    assert in_process.finish(ranks.train_alone, config, paths) == [0], ranks.output_of(paths)
    order = [entry for entry in device.log if entry in ("queued", "change", "update")]
    assert order == [*["change", "update", "queued"] * 3]
