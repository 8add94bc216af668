"""``parallel.micro_batch_size: auto``: the most that fit, the same on all ranks and at later starts."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.paths import MICRO
from tests.trainer import ranks
from tests.trainer.commands import fluxtrain

from fluxtrain.contract.process import CHECKPOINTS_FOLDER, RunPaths
from fluxtrain.contract.run.config import RunConfig, Sharding
from fluxtrain.contract.run.resolve import merge, resolve
from fluxtrain.errors import EXIT_OK, ConfigError, StorageError
from fluxtrain.parallel.distributed import World, process_group
from fluxtrain.parallel.node_memory import loader_bytes
from fluxtrain.plan.estimate import make_plan
from fluxtrain.plan.table import render
from fluxtrain.runtime.devices import GPUS
from fluxtrain.state.run_state import CONFIG_FILE, latest
from fluxtrain.train.micro_batch import (
    FILE,
    Room,
    require_memory_of,
    settle_micro_batch,
    settle_micro_batch_of,
    step_memory,
)

GIB = 1 << 30
AUTO = {"parallel": {"micro_batch_size": "auto"}}
MICRO_AUTO = resolve({"preset": "micro", **AUTO})
# of a LoRA at 1024 x 1024: all kept in bfloat16, all recomputed, and in fp8; 1 where none fits
TABLE = {
    "RX 9070 XT": (1, 1, 1),
    "RX 7900 XTX": (1, 1, 4),
    "W7900": (1, 4, 8),
    "H100": (1, 16, 16),
    "MI300X": (4, 64, 64),
    "MI325X": (4, 64, 64),
    "MI355X": (8, 64, 64),
}


def lora(batch: int = 64, **changes: Any) -> RunConfig:
    base = {"preset": "dev-lora", "data": {"images": "pictures"}, **AUTO}
    return resolve(merge(base, {"schedule": {"global_batch_size": batch}, **changes}))


def found(config: RunConfig, memory: int, num_ranks: int = 1, **options: Any) -> int:
    room = Room.of(memory, num_ranks)
    return settle_micro_batch(config, num_ranks, num_ranks, room, **options).parallel.most_samples


@pytest.mark.parametrize("gpu", TABLE)
def test_the_most_that_divide_a_share_and_fit_are_taken(gpu: str) -> None:
    memory = GPUS[gpu].memory_bytes
    everything = {"parallel": {"activation_checkpointing": 1.0}}
    configs = lora(), lora(**everything), lora(**everything, adapter={"base_dtype": "fp8"})
    assert tuple(found(config, memory) for config in configs) == TABLE[gpu]
    for config in configs:
        size, sharding = found(config, memory), Sharding.of(config, 1, 1)
        fits = Room.of(memory, 1).has(config, sharding, size)
        assert fits or size == 1
        assert 2 * size > 64 or not Room.of(memory, 1).has(config, sharding, 2 * size)


@pytest.mark.parametrize("gpu", TABLE)
def test_a_plan_shows_the_number(gpu: str) -> None:
    config = lora(8)
    plan = make_plan(config, 1, 1, gpu)
    assert plan.micro_batch_size == found(config, GPUS[gpu].memory_bytes)
    assert "auto, found for this GPU" in render(plan)
    number = lora(8, parallel={"micro_batch_size": plan.micro_batch_size})
    expected = make_plan(number, 1, 1, gpu)
    assert plan == expected.model_copy(update={"requested_micro_batch": "auto"})


def test_a_plan_of_cpus_takes_half_of_the_memory() -> None:
    sharding = Sharding.of(MICRO_AUTO, 1, 1)
    of_five = step_memory(MICRO_AUTO, sharding, 5, copies_ahead=False).total
    few, many = (make_plan(MICRO_AUTO, 1, 0, memory_limit=size) for size in (2 * of_five, GIB))
    assert few.micro_batch_size == 4, "which divides the share"
    assert many.micro_batch_size == 16, "the whole share"
    assert "auto, found for half of the memory" in render(few)


@pytest.mark.parametrize(
    ("gpu", "kept", "expected"),
    [("H100", 4, 4), ("H100", 64, 16), ("RX 7900 XTX", 16, 1), ("H100", 0, 16)],
)
def test_a_kept_number_stays_as_long_as_it_fits(gpu: str, kept: int, expected: int) -> None:
    config = lora(parallel={"activation_checkpointing": 1.0})
    assert found(config, GPUS[gpu].memory_bytes, kept=kept) == expected


class _Ranks(World):
    """Two ranks with GPUs, of which the other one may use 20 GiB."""

    def gather_numbers(self, own: list[float]) -> list[list[float]]:
        return [own, [20.0 * GIB]]

    def from_main(self, make: Any) -> Any:
        return make()


def test_all_ranks_take_what_fits_the_smallest_gpu(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    properties = SimpleNamespace(name="AMD Instinct MI300X", total_memory=192 * GIB)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr("fluxtrain.train.micro_batch.compiles", lambda parallel, device: True)
    world = _Ranks(0, 0, 2, torch.device("cuda", 0), local_size=2)
    config = lora(16, parallel={"activation_checkpointing": 1.0}, adapter={"base_dtype": "fp8"})
    settled = settle_micro_batch_of(world, config, tmp_path)
    small = settle_micro_batch(config, 2, 2, Room(20.0 * GIB, is_gpu=True))
    assert settled == small
    assert settled.parallel.most_samples == found(config, int(20 * GIB / 0.9) + 1, 2) < 8
    assert f"kept in {tmp_path / FILE}" in capsys.readouterr().err
    alone = replace(world, size=1, local_size=1)
    assert settle_micro_batch_of(world, config, tmp_path) == settled
    assert capsys.readouterr().err.endswith(f"(of {tmp_path / FILE})\n")
    whole = settle_micro_batch_of(alone, config, tmp_path)  # a rank that has all of the state
    assert whole.parallel.most_samples < settled.parallel.most_samples
    assert f"{tmp_path / FILE} does not fit, now" in capsys.readouterr().err


def tell(config: RunConfig, paths: RunPaths, world: World, *, port: int) -> None:
    """Write the number that this rank has."""
    ranks.set_environment(world, port)
    with process_group() as joined:
        number = settle_micro_batch_of(joined, config, paths.output).parallel.most_samples
        (paths.output / f"told_{joined.rank}").write_text(str(number))


def test_ranks_on_cpus_agree(tmp_path: Path) -> None:
    ranks.finish_all(tell, tmp_path, 2, MICRO_AUTO)
    told = {(tmp_path / f"told_{rank}").read_text() for rank in range(2)}
    assert told == {"8"} == {(tmp_path / FILE).read_text().strip()}


def test_a_run_stores_its_number_and_goes_on_with_it(tmp_path: Path) -> None:
    output = tmp_path / "run"
    options = "--parallel.micro_batch_size=auto", "--evaluation.at_end=false"
    first = fluxtrain("run", str(MICRO), "--output", str(output), *options, "--schedule.steps=2")
    assert first.returncode == EXIT_OK, first.stderr
    assert "micro batch 16 (found, " in first.stderr
    assert _stored(output) == 16
    (output / FILE).write_text("4\n")  # as if found on a smaller machine
    again = fluxtrain("run", str(MICRO), "--output", str(output), *options, "--schedule.steps=4")
    assert again.returncode == EXIT_OK, again.stderr
    assert f"micro batch 4 (of {output / FILE})" in again.stderr
    assert _stored(output) == 4


def _stored(output: Path) -> Any:
    checkpoint = latest(output / CHECKPOINTS_FOLDER)
    assert checkpoint is not None
    return json.loads((checkpoint / CONFIG_FILE).read_text())["parallel"]["micro_batch_size"]


def test_what_does_not_fit_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fluxtrain.train.micro_batch.memory_limit", lambda: 1 << 10)
    said = list[str]()
    monkeypatch.setattr("builtins.print", lambda text, **options: said.append(text))
    assert settle_micro_batch_of(World.alone(), MICRO_AUTO, tmp_path).parallel.most_samples == 1
    assert "IT DOES NOT FIT by this estimate" in said[0]


def test_a_model_that_a_machine_without_gpu_cannot_hold_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    schnell, ranks_of_a_node = resolve({"preset": "mlperf-schnell"}), replace(World.alone(), size=2)
    monkeypatch.setattr("fluxtrain.train.micro_batch.memory_limit", lambda: 24 * GIB)
    for world in (World.alone(), replace(ranks_of_a_node, local_size=2)):
        with pytest.raises(
            ConfigError, match=r"model: .* need 1[35]\d\.\d+ GiB, this machine has 24"
        ):
            require_memory_of(world, schnell)
    require_memory_of(World.alone(), resolve({"preset": "micro"}))


def test_only_what_can_never_fit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """To the byte, the frozen weights of adapters too; and never where there is a GPU."""
    world = World.alone()
    for config in (resolve({"preset": "micro"}), lora(16, adapter={"base_dtype": "fp8"})):
        used = step_memory(config, Sharding.of(config, 1, 1), 1, copies_ahead=False)
        limits = iter([used.weights + used.optimizer, used.weights + used.optimizer - 1])
        monkeypatch.setattr("fluxtrain.train.micro_batch.memory_limit", partial(next, limits))
        require_memory_of(world, config)
        with pytest.raises(ConfigError, match="weights and optimizer alone need"):
            require_memory_of(world, config)
    monkeypatch.setattr("fluxtrain.train.micro_batch.memory_of", lambda device: 1)
    monkeypatch.setattr("fluxtrain.train.micro_batch.memory_limit", lambda: 1)
    require_memory_of(world, config)


def test_a_file_without_a_number_is_refused(tmp_path: Path) -> None:
    (tmp_path / FILE).write_text("many\n")
    with pytest.raises(StorageError, match="not a micro_batch_size; remove it"):
        settle_micro_batch_of(World.alone(), MICRO_AUTO, tmp_path)


def test_other_tasks_need_a_number() -> None:
    with pytest.raises(ConfigError, match=r"parallel\.micro_batch_size: got 'auto'; must be a n"):
        resolve({"preset": "micro", "task": "benchmark", **AUTO})


def test_pods_have_room_for_a_whole_share() -> None:
    """The operator sizes /dev/shm before the number is known."""
    loads = {"data": {"num_workers": 1}, "schedule": {"global_batch_size": 32}}
    run = merge({"preset": "micro"}, loads)
    share = resolve(merge(run, {"parallel": {"micro_batch_size": 16}}))
    assert loader_bytes(resolve(merge(run, AUTO)), 2) == loader_bytes(share, 2)
