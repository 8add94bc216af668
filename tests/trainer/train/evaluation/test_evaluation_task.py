"""The evaluate task gives the loss that the training logged, of a model, and of a model with adapters."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from benchmarks.reference_model import random_model
from cluster.free_ports import free_port
from safetensors.torch import load_file
from tests.trainer import in_process, ranks
from tests.trainer.small_runs import merge_all
from tests.trainer.tiny_model import save_flux

from fluxtrain.adapter.opening import open_model
from fluxtrain.cli import main
from fluxtrain.contract.process import RunPaths
from fluxtrain.contract.run.config import RunConfig
from fluxtrain.contract.run.resolve import resolve
from fluxtrain.errors import EXIT_OK, EXIT_USAGE, ConfigError, DataError
from fluxtrain.parallel.distributed import World, process_group
from fluxtrain.sample import task
from fluxtrain.train import evaluation_task
from fluxtrain.train.evaluation_task import check_evaluate_task, evaluate_model

RUN: dict[str, Any] = {
    "preset": "micro",
    "initial_weights": "weights.safetensors",
    "schedule": {"steps": 3, "warmup_steps": 0},
    "evaluation": {"every_samples": 32},
    "checkpoint": {"memory_every_steps": 0, "asynchronous": False},
    "adapter_file": {"dtype": "float32"},
    "logging": {"every_steps": 1, "metrics_port": 0},
}
LORA = {"adapter": {"rank": 4, "alpha": 8.0}}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a models root with weights, a run that trained them, ``full``, and one of adapters, ``lora``."""
    folder = tmp_path_factory.mktemp("models")
    save_flux(random_model(resolve({"preset": "micro"}).model), folder)
    for name, change in (("full", {}), ("lora", LORA)):
        paths = RunPaths(folder / name, folder, folder)
        assert in_process.finish(ranks.train_alone, resolve(merge_all(RUN, change)), paths) == [0]
    return folder


def logged(output: Path) -> Any:
    """Return the last evaluation in metrics.jsonl."""
    records = map(json.loads, (output / "metrics.jsonl").read_text().splitlines())
    return [record for record in records if "eval_loss" in record][-1]


def evaluated(root: Path, output: Path, size: int = 1, **values: Any) -> Any:
    """Return evaluation.json of the task on ``size`` ranks."""
    config = resolve({**RUN, "task": "evaluate", **values})
    paths = RunPaths(output, root, root)
    run = evaluate_model if size == 1 else partial(together, port=free_port())
    assert in_process.finish(run, config, paths, size) == [0] * size, ranks.output_of(paths)
    return json.loads((output / "evaluation.json").read_text())


def together(config: RunConfig, paths: RunPaths, world: World, *, port: int) -> None:
    """Evaluate as one of several processes."""
    ranks.set_environment(world, port)
    with process_group() as joined:
        evaluate_model(config, paths, joined)


@pytest.mark.parametrize("name", ["full", "lora"])
def test_the_loss_is_that_of_the_training(root: Path, tmp_path: Path, name: str) -> None:
    found, expected = evaluated(root, tmp_path, initial_weights=name), logged(root / name)
    assert found["eval_loss"] == pytest.approx(expected["eval_loss"], rel=1e-6)
    assert found["eval_loss_by_timestep"] == pytest.approx(
        expected["eval_loss_by_timestep"], rel=1e-6
    )
    assert (found["step"], found["eval_samples"]) == (3, expected["eval_samples"])
    assert "evaluation loss" in (tmp_path / "rank_0.txt").read_text()


def test_images_of_prompts_are_sampled_too(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = torch.ones(1, 4, 16), torch.ones(1, 16)
    encoder = SimpleNamespace(encode=lambda texts: text)
    monkeypatch.setattr(task, "load_text_encoder", lambda *_: encoder)
    monkeypatch.setattr(task, "load_decoder", lambda *_: lambda latents: latents[:, :3])
    monkeypatch.setattr(evaluation_task, "check_files", lambda *_: None)
    prompts = {"prompts": ["a red heart"], "num_steps": 2}
    first = evaluated(root, tmp_path / "1", initial_weights="lora", sampling=prompts)
    again = evaluated(root, tmp_path / "2", initial_weights="lora", sampling=prompts)
    assert first["images"] == again["images"] == ["samples/0000.png"]
    assert first["eval_loss"] == again["eval_loss"]
    one, other = (tmp_path / name / "samples/0000.png" for name in "12")
    assert one.read_bytes() == other.read_bytes()
    other_weights = evaluated(root, tmp_path / "3", sampling=prompts)
    assert (tmp_path / "3" / other_weights["images"][0]).read_bytes() != one.read_bytes()


def test_an_adapter_file_is_added_with_its_strength(root: Path, tmp_path: Path) -> None:
    def loss(*strengths: float) -> float:
        file = "lora/adapters/lora.safetensors"
        added = [{"path": file, "strength": strength} for strength in strengths]
        output = tmp_path / str(strengths)
        result = evaluated(root, output, added_adapters=added)
        assert result["adapters"] == [{**each, "skip_unknown": False} for each in added]
        return float(result["eval_loss"])

    whole = logged(root / "lora")["eval_loss"]
    assert loss(1.0) == pytest.approx(whole, rel=1e-6)
    assert loss(0.5, 0.5) == pytest.approx(whole, rel=1e-6)
    assert loss(1.0, -1.0) == pytest.approx(loss(), rel=1e-6)
    assert abs(loss() - whole) > 1e-4 * whole


def test_a_model_that_is_not_the_one_that_the_training_evaluated_is_told(
    root: Path, tmp_path: Path
) -> None:
    assert evaluated(root, tmp_path, initial_weights="lora")["differences"] == []
    checkpoint = tmp_path / "run/checkpoints/step_0000000001"
    checkpoint.mkdir(parents=True)
    (checkpoint / "DONE").touch()
    (checkpoint / "config.json").write_text(json.dumps({"adapter": {"base_dtype": "fp8"}}))
    config = resolve({**RUN, "task": "evaluate", "added_adapters": [{"path": "run"}]})
    (base,) = evaluation_task.differences(config, RunPaths(tmp_path, root, tmp_path))
    assert "the training evaluated rounded base weights" in base


@pytest.mark.slow
def test_two_ranks_find_the_loss_of_one(root: Path, tmp_path: Path) -> None:
    found = evaluated(root, tmp_path, size=2, initial_weights="lora")
    assert found["eval_loss"] == pytest.approx(logged(root / "lora")["eval_loss"], rel=1e-5)


def test_a_run_of_adapters_is_exported_as_a_whole_model(root: Path, tmp_path: Path) -> None:
    by_run, by_file = tmp_path / "run.safetensors", tmp_path / "file.safetensors"
    options = ["--dtype", "float32", "--models", str(root)]
    assert main(["export", str(root / "lora"), "--output", str(by_run), *options]) == EXIT_OK
    adapter = str(root / "lora/adapters/lora.safetensors")
    weights = str(root / "weights.safetensors")
    arguments = [weights, "--adapter", adapter, "--output", str(by_file), *options]
    assert main(["export", *arguments]) == EXIT_OK
    before = load_file(root / "weights.safetensors")
    one, other = load_file(by_run), load_file(by_file)
    name = "double_blocks.0.img_attn.qkv.weight"
    assert not torch.equal(one[name], before[name])
    assert all(torch.allclose(one[name], other[name], atol=1e-7) for name in before)
    opened = dict(open_model(root / "lora", root).read([name]))
    assert torch.equal(opened[name], one[name])


def test_mistakes_are_found_before_anything_is_loaded(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = RunPaths(tmp_path, root, root)
    run = {**RUN, "task": "evaluate"}
    with pytest.raises(ConfigError, match="must name the weights to evaluate"):
        check_evaluate_task(resolve({**run, "initial_weights": None}), paths)
    added = {"added_adapters": [{"path": "none.safetensors"}]}
    with pytest.raises(DataError, match=r"none\.safetensors"):
        check_evaluate_task(resolve({**run, **added}), paths)
    with pytest.raises(ConfigError, match="unless task is sample or evaluate"):
        resolve({**RUN, **added})
    with pytest.raises(DataError, match="validation"):
        check_evaluate_task(resolve({**run, "data": {"source": "encoded"}}), paths)
    missing = ["export", str(root / "lora"), "--output", str(tmp_path / "x.safetensors")]
    assert main([*missing, "--models", str(tmp_path)]) == EXIT_USAGE
    assert "its adapters are for" in capsys.readouterr().err
