"""Checkpoints: incomplete ones are ignored, the newest kept, damaged ones refused; nothing is pickled."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.trainer.tiny_model import initialised

from fluxtrain.contract.run.config import RunConfig
from fluxtrain.contract.run.resolve import resolve
from fluxtrain.errors import ConfigError, DataError, StorageError
from fluxtrain.optim import make_optimizer
from fluxtrain.state import checkpoint, run_state
from fluxtrain.state.checkpoint import Checkpoints
from fluxtrain.state.folder import CheckpointFolder
from fluxtrain.state.run_state import RunState, claim
from fluxtrain.state.staging import State


@pytest.fixture(scope="module", autouse=True)
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Join a process group of one."""
    store = tmp_path_factory.mktemp("store") / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def make_config(**checkpoints: object) -> RunConfig:
    return resolve({"preset": "micro", "checkpoint": {"keep": 2, **checkpoints}})


def make_state(config: RunConfig, seed: int = 0) -> State:
    model = initialised(config.model, seed)
    return checkpoint.training_state(model, make_optimizer(model, config.optim))


def start(folder: Path, config: RunConfig | None = None, **options: Any) -> Checkpoints:
    config = config or make_config()
    own = CheckpointFolder(claim(folder))
    return Checkpoints(own, make_state(config), config, is_main=True, **options)


def save(folder: Path, *steps: int, config: RunConfig | None = None) -> Checkpoints:
    checkpoints = start(folder, config)
    for step in steps:
        checkpoints.save(RunState(step=step, samples=step * 16))
    checkpoints.finish()
    return checkpoints


def test_the_newest_checkpoints_are_kept(tmp_path: Path) -> None:
    save(tmp_path, 1, 2, 3)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        ".start_000001",
        "step_0000000002",
        "step_0000000003",
    ]
    assert run_state.latest(tmp_path) == tmp_path / "step_0000000003"


@pytest.mark.torch_range
def test_a_saved_checkpoint_is_loaded(tmp_path: Path) -> None:
    saved = save(tmp_path, 7)
    other = make_state(make_config(), seed=1)
    run = checkpoint.load(tmp_path / "step_0000000007", other)
    assert run == RunState(step=7, samples=112)
    assert all(torch.equal(other[name], tensor) for name, tensor in saved.state.items())


def test_training_may_change_the_tensors_while_they_are_written(tmp_path: Path) -> None:
    config = make_config()
    checkpoints = start(tmp_path, config)
    before = {name: tensor.clone() for name, tensor in checkpoints.state.items()}
    checkpoints.save(RunState(step=1, samples=16))
    for tensor in checkpoints.state.values():
        tensor.fill_(7.0)
    checkpoints.finish()
    other = make_state(config, seed=1)
    checkpoint.load(tmp_path / "step_0000000001", other)
    assert all(torch.equal(other[name], tensor) for name, tensor in before.items())


def test_a_folder_without_done_is_ignored(tmp_path: Path) -> None:
    save(tmp_path, 1, 2)
    (tmp_path / "step_0000000002" / "DONE").unlink()
    assert run_state.latest(tmp_path) == tmp_path / "step_0000000001"
    save(tmp_path, 2)  # overwrites the incomplete one
    assert run_state.latest(tmp_path) == tmp_path / "step_0000000002"


def test_a_checkpoint_is_reported_when_it_is_complete(tmp_path: Path) -> None:
    config, reported = make_config(), list[tuple[int, Path | None]]()

    def saved(step: int) -> None:
        reported.append((step, run_state.latest(tmp_path)))

    checkpoints = start(tmp_path, config, on_saved=saved)
    checkpoints.save(RunState(step=1, samples=16))
    checkpoints.finish()
    (tmp_path / "step_0000000002").touch()  # makes the next save fail
    checkpoints.save(RunState(step=2, samples=32))
    with pytest.raises(StorageError):
        checkpoints.finish()
    assert reported == [(1, tmp_path / "step_0000000001")]


def test_other_folders_are_left_alone(tmp_path: Path) -> None:
    for name in ("step_12", "step_000000000x", "notes"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "DONE").touch()
    save(tmp_path, 1, 2, 3)
    assert {"step_12", "step_000000000x", "notes"} <= {path.name for path in tmp_path.iterdir()}
    assert run_state.latest(tmp_path / "nowhere") is None


@pytest.mark.torch_range
def test_nothing_is_pickled(tmp_path: Path) -> None:
    save(tmp_path, 1)
    names = {path.suffix for path in (tmp_path / "step_0000000001").iterdir()}
    assert names == {".safetensors", ".json", ""}


@pytest.mark.parametrize("damage", ["cut", "empty", "missing", "state"])
def test_a_damaged_checkpoint_is_refused_with_its_name(tmp_path: Path, damage: str) -> None:
    save(tmp_path, 1)
    folder = tmp_path / "step_0000000001"
    (shard,) = folder.glob("*.safetensors")
    if damage == "cut":
        shard.write_bytes(shard.read_bytes()[:5000])
    elif damage == "empty":
        shard.write_bytes(b"")
    elif damage == "missing":
        shard.unlink()
    else:
        (folder / "run.json").write_text('{"step": 1}')
    with pytest.raises(DataError, match="step_0000000001"):
        checkpoint.load(folder, make_state(make_config()))


def test_an_unwritable_folder_is_a_storage_error(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("a file where a folder should be")
    with pytest.raises(StorageError, match="cannot be written"):
        save(tmp_path / "checkpoints", 1)


@pytest.mark.parametrize(
    ("change", "path"),
    [
        ({"optim": {"learning_rate": 0.5}}, "spec.run.optim.learning_rate"),
        ({"seed": 2}, "spec.run.seed"),
        ({"model": {"depth": 2}}, "spec.run.model.depth"),
        ({"schedule": {"global_batch_size": 32}}, "spec.run.schedule.global_batch_size"),
        ({"flow": {"prompt_dropout": 0.5}}, "spec.run.flow.prompt_dropout"),
        ({"precision": {"compute": "bfloat16"}}, "spec.run.precision.compute"),
        ({"data": {"synthetic": {"classes": 3}}}, "spec.run.data.synthetic.classes"),
    ],
)
def test_a_change_of_the_trajectory_is_refused_with_the_field(
    tmp_path: Path, change: dict[str, object], path: str
) -> None:
    save(tmp_path, 1)
    with pytest.raises(ConfigError) as refused:
        run_state.check_same_run(
            resolve({"preset": "micro", **change}), tmp_path / "step_0000000001"
        )
    assert refused.value.path == path
    assert "step_0000000001" in str(refused.value)


@pytest.mark.parametrize(
    "change",
    [
        {"schedule": {"steps": 500}},
        {"parallel": {"micro_batch_size": 2}},
        {"logging": {"every_steps": 3}},
        {"data": {"num_workers": 3}},
        {"evaluation": {"every_samples": 99}},
    ],
)
def test_a_change_that_keeps_the_trajectory_is_accepted(
    tmp_path: Path, change: dict[str, object]
) -> None:
    save(tmp_path, 1)
    run_state.check_same_run(resolve({"preset": "micro", **change}), tmp_path / "step_0000000001")


def test_a_checkpoint_of_a_version_without_a_field_had_its_default(tmp_path: Path) -> None:
    save(tmp_path, 1)
    path = tmp_path / "step_0000000001" / "config.json"
    saved = json.loads(path.read_text())
    del saved["optim"]["name"], saved["flow"]
    path.write_text(json.dumps(saved))
    (path.parent / "DONE").write_text("")
    run_state.check_same_run(resolve({"preset": "micro"}), path.parent)
    with pytest.raises(ConfigError) as refused:
        run_state.check_same_run(
            resolve({"preset": "micro", "flow": {"prompt_dropout": 0.5}}), path.parent
        )
    assert refused.value.path == "spec.run.flow.prompt_dropout"


def test_the_resolved_config_is_saved(tmp_path: Path) -> None:
    config = make_config()
    save(tmp_path, 1, config=config)
    stored = json.loads((tmp_path / "step_0000000001" / "config.json").read_text())
    assert stored == config.model_dump(mode="json")
