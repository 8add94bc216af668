"""The evaluation loss against MLPerf's pseudo-code, of the whole validation set, also as a task."""

from __future__ import annotations

import json
import os
import tarfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from benchmarks.reference_model import random_model
from safetensors.torch import load_file
from tests.trainer import in_process, ranks
from tests.trainer.outputs import losses, mlperf_events, mlperf_values, records
from tests.trainer.small_runs import (
    ENCODED_RUN,
    IMAGES,
    NUM_SAMPLES,
    SHARD_SIZE,
    as_closed,
    merge_all,
    write_encoded,
)
from tests.trainer.tiny_encoders import write_encoders, write_images
from tests.trainer.tiny_model import save_flux
from torch import Tensor

from fluxtrain.adapter.opening import open_model
from fluxtrain.cli import main
from fluxtrain.contract.process import RunPaths
from fluxtrain.contract.run.config import RunConfig
from fluxtrain.contract.run.resolve import resolve
from fluxtrain.data.dataset import Batch
from fluxtrain.data.loader import evaluation_batches
from fluxtrain.data.sources import open_source
from fluxtrain.errors import EXIT_DIVERGED, EXIT_OK, EXIT_USAGE, ConfigError, DataError
from fluxtrain.model import flux
from fluxtrain.model.blocks import Rotation
from fluxtrain.model.flux import Flux
from fluxtrain.model.loss import FlowLoss
from fluxtrain.parallel.distributed import World, process_group
from fluxtrain.runtime.safetensors import read_header
from fluxtrain.sample import task
from fluxtrain.train import evaluation_task
from fluxtrain.train.evaluate import evaluate
from fluxtrain.train.evaluation_task import check_evaluate_task, evaluate_model

WORLD = World(rank=0, local_rank=0, size=1, device=torch.device("cpu"))


def make_config(**evaluation: object) -> RunConfig:
    data = {"synthetic": {"validation_samples": 21}}
    return resolve({"preset": "micro", "data": data, "evaluation": evaluation})


def make_loss(config: RunConfig) -> FlowLoss:
    torch.manual_seed(0)
    model = Flux(config.model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.2)
    return FlowLoss(model, config, torch.float32)


def batches(config: RunConfig) -> list[Batch]:
    return list(evaluation_batches(config, open_source(config, Path(), "validation"), 0, 1))


def test_the_loss_equals_a_plain_loop_over_samples() -> None:
    config = make_config(batch_size=8)
    loss = make_loss(config)
    by_level = dict[int, list[float]]()
    for batch in batches(config):
        for i in range(len(batch)):
            if not batch.weights[i]:
                continue
            clean = (
                batch.mean[i : i + 1]
                + torch.exp(0.5 * batch.logvar[i : i + 1]) * batch.latent_noise[i]
            )
            t, noise = batch.timesteps[i], batch.noise[i : i + 1]
            noisy = (1 - t) * clean + t * noise
            side = config.data.latent_size
            with torch.no_grad():
                predicted = loss.model(
                    flux.pack(noisy),
                    flux.image_ids(side, side),
                    batch.txt[i : i + 1],
                    flux.text_ids(batch.txt.shape[1]),
                    t[None],
                    batch.vec[i : i + 1],
                )
            error = (flux.unpack(predicted, side, side) - (noise - clean)).square().mean().item()
            by_level.setdefault(int(t * 8), []).append(error)
    result = evaluate(loss, batches(config), WORLD)
    assert result.num_samples == sum(map(len, by_level.values())) == 21
    expected = [np.mean(by_level[level]) for level in range(8)]
    assert result.by_timestep == pytest.approx(expected, rel=1e-5)
    assert result.loss == pytest.approx(np.mean(expected), rel=1e-5)


@pytest.mark.parametrize(("samples", "timesteps"), [(1, 1), (3, 3), (8, 8), (9, 8), (16, 8)])
def test_the_loss_is_the_mean_of_the_timesteps_that_the_set_has(
    samples: int, timesteps: int
) -> None:
    config = make_config()
    data = config.data.model_copy(
        update={
            "synthetic": config.data.synthetic.model_copy(update={"validation_samples": samples})
        }
    )
    config = config.model_copy(update={"data": data})
    loss = make_loss(config)
    result = evaluate(loss, batches(config), WORLD)
    with torch.no_grad():
        losses = torch.cat([loss(batch)[batch.weights > 0] for batch in batches(config)])
    assert result.num_samples == len(losses) == samples
    means = [mean for mean in result.by_timestep if mean is not None]
    assert len(means) == timesteps
    assert result.loss == pytest.approx(np.mean(means), rel=1e-12)
    if samples % 8 == 0:  # balanced: MLPerf's mean over the samples
        assert result.loss == pytest.approx(losses.double().mean().item(), rel=1e-6)


@pytest.mark.parametrize("batch_size", [1, 4, 21, 64])
def test_the_batch_size_does_not_change_the_loss(batch_size: int) -> None:
    config = make_config(batch_size=batch_size)
    reference = evaluate(make_loss(config), batches(make_config(batch_size=16)), WORLD)
    assert evaluate(make_loss(config), batches(config), WORLD).loss == pytest.approx(
        reference.loss, rel=1e-5
    )


def test_ranks_have_equal_numbers_of_batches_and_each_sample_once() -> None:
    config = make_config(batch_size=4)
    source = open_source(config, Path(), "validation")
    per_rank = [list(evaluation_batches(config, source, rank, 3)) for rank in range(3)]
    assert len({len(part) for part in per_rank}) == 1
    indices = [int(i) for part in per_rank for batch in part for i in batch.indices if i >= 0]
    assert sorted(indices) == list(range(21))


def test_padding_has_weight_zero() -> None:
    config = make_config(batch_size=16)
    *_, last = batches(config)
    assert last.weights.sum() == 5
    assert (last.indices < 0).sum() == len(last) - 5


def test_evaluations_of_equal_weights_are_bit_equal() -> None:
    config = make_config()
    loss = make_loss(config)
    assert evaluate(loss, batches(config), WORLD) == evaluate(loss, batches(config), WORLD)


def test_batches_of_one_shape_share_their_ids_and_one_rotation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loss, counted = make_loss(make_config(batch_size=8)), list[int]()
    computed = flux.rotation

    def rotation(ids: Tensor, *args: Any) -> Rotation:
        counted.append(len(ids))
        return computed(ids, *args)

    monkeypatch.setattr(flux, "rotation", rotation)
    first = batches(loss.config)[0]
    shorter = replace(first, txt=first.txt[:, :-1])
    with torch.no_grad():
        losses = [loss(batch) for batch in (first, first, shorter, first)]
    assert torch.equal(losses[0], losses[1])
    assert torch.equal(losses[0], losses[3]), "after a batch of another shape"
    tokens = counted[0]
    assert counted == [tokens, tokens - 1, tokens]


NAN = b"\xff" * 4


def run(
    paths: RunPaths, size: int, *changes: dict[str, Any], closed: bool = False
) -> list[int | None]:
    config = resolve(merge_all(ENCODED_RUN, *changes))
    config = as_closed(config) if closed else config
    return ranks.finish(ranks.train_together, config, paths, size)


def damage(root: Path, indices: list[int], field: str = "mean") -> None:
    for index in indices:
        path = root / "validation" / f"shard_{index // SHARD_SIZE:06d}.safetensors"
        span = read_header(path)[field]
        with path.open("r+b") as file:
            file.seek(span.offset + index % SHARD_SIZE * span.row_bytes)
            file.write(NAN)


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    write_encoded(tmp_path)
    return RunPaths(tmp_path / "output", tmp_path, tmp_path)


def assert_no_result(paths: RunPaths) -> None:
    assert mlperf_values(paths.output, "eval_accuracy") == []
    assert mlperf_values(paths.output, "run_stop") == []
    assert losses(paths.output, "eval_loss") == {}


TWO_TIMESTEPS = [i for i in range(NUM_SAMPLES) if i % 8 in (0, 7)]  # all of t = 0 and t = 7/8
BAD_SAMPLES = [
    ("the first, which is the filler's", [0], "mean", 1),
    ("the last", [NUM_SAMPLES - 1], "logvar", 3),
    ("one text", [7], "txt", 2),
    ("two timesteps", TWO_TIMESTEPS, "vec", 2),
    ("all", list(range(NUM_SAMPLES)), "mean", 3),
]


@pytest.mark.parametrize(
    ("bad", "field", "size"), [row[1:] for row in BAD_SAMPLES], ids=[row[0] for row in BAD_SAMPLES]
)
def test_an_unreadable_validation_sample_fails_a_closed_run(
    paths: RunPaths, bad: list[int], field: str, size: int
) -> None:
    damage(paths.data, bad, field)
    assert run(paths, size, closed=True) == [EXIT_USAGE] * size
    for rank in range(size):  # torchrun reports the message of whichever ends first
        output = ranks.output_of(paths, rank)
        assert f"{len(bad)} of {NUM_SAMPLES} validation samples could not be read" in output
        assert f"record {bad[0] % SHARD_SIZE} (key 'key{bad[0]}'): not finite" in output
        assert "spec.run.logging.mlperf.division" in output
    assert_no_result(paths)


def test_an_evaluation_before_the_first_step_fails_a_closed_run(paths: RunPaths) -> None:
    damage(paths.data, [3])
    at_start = {"evaluation": {"at_start": True}}
    assert run(paths, 2, at_start, closed=True) == [EXIT_USAGE] * 2
    assert "(key 'key3')" in ranks.output_of(paths)
    assert mlperf_values(paths.output, "block_start") == [], "no step was taken"


@pytest.mark.parametrize(("size", "bad"), [(1, TWO_TIMESTEPS), (3, TWO_TIMESTEPS), (1, [])])
def test_an_open_run_continues_and_logs_how_many_samples_it_used(
    paths: RunPaths, size: int, bad: list[int]
) -> None:
    damage(paths.data, bad)
    rest = NUM_SAMPLES - len(bad)
    assert run(paths, size, {"data": {"max_bad_fraction": 0.5}}) == [0] * size
    evaluations = [record for record in records(paths.output) if "eval_loss" in record]
    assert [record["eval_samples"] for record in evaluations] == [rest, rest]
    assert (evaluations[0]["eval_loss_by_timestep"][0] is None) == bool(bad)
    assert mlperf_values(paths.output, "eval_samples") == [rest]
    logged = [event for event in mlperf_events(paths.output) if event["key"] == "eval_accuracy"]
    assert [event["metadata"]["eval_samples"] for event in logged] == [rest, rest]
    output = ranks.output_of(paths)
    skipped = f", {len(bad)} could not be read\n" if bad else "\n"
    assert output.count(f"on {rest} samples{skipped}") == 2
    named = [line for line in output.splitlines() if "skipped an unreadable validation" in line]
    assert len(named) == len(bad), "each is named once, not at every evaluation"
    assert all(any(f"'key{index}'" in line for line in named) for index in bad)


@pytest.mark.parametrize(
    ("bad", "fraction", "code"),
    [([4], 0.0001, 0), ([4, 5], 0.0001, EXIT_USAGE), (list(range(NUM_SAMPLES)), 1.0, EXIT_USAGE)],
    ids=["one is allowed", "two are too many", "none is left"],
)
def test_an_open_run_may_skip_only_so_many_samples(
    paths: RunPaths, bad: list[int], fraction: float, code: int
) -> None:
    damage(paths.data, bad)
    assert run(paths, 2, {"data": {"max_bad_fraction": fraction}}) == [code] * 2
    if code:
        assert_no_result(paths)
        assert "spec.run.data.max_bad_fraction" in ranks.output_of(paths)


@pytest.mark.parametrize("closed", [True, False])
def test_a_loss_that_is_not_finite_on_readable_samples_is_divergence(
    paths: RunPaths, closed: bool
) -> None:
    write_encoded(paths.data, validation_value=1e30)  # finite, but its square is not
    assert run(paths, 2, {"evaluation": {"target_loss": 1e6}}, closed=closed) == [EXIT_DIVERGED] * 2
    assert "the evaluation loss is nan at step 1" in ranks.output_of(paths)
    assert_no_result(paths)


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2])
def test_unreadable_images_are_treated_alike(tmp_path: Path, size: int) -> None:
    for part in ("train", "validation"):
        write_images(tmp_path / part, NUM_SAMPLES, timesteps=part == "validation")
    damage_images(tmp_path / "validation", ["000000000", "000000020"])
    paths = RunPaths(tmp_path / "output", tmp_path, write_encoders(tmp_path))
    assert run(paths, size, IMAGES, closed=True) == [EXIT_USAGE] * size
    assert f"2 of {NUM_SAMPLES} validation samples could not be read" in ranks.output_of(paths)
    assert "key '000000020': its image is unreadable" in ranks.output_of(paths)
    assert_no_result(paths)
    again = RunPaths(tmp_path / "again", tmp_path, tmp_path)
    assert run(again, size, IMAGES, {"data": {"max_bad_fraction": 0.2}}) == [0] * size
    assert mlperf_values(again.output, "eval_samples") == [NUM_SAMPLES - 2]


def damage_images(folder: Path, keys: list[str]) -> None:
    """Write random bytes over the second half of the images called ``keys``."""
    for path in folder.glob("*.tar"):
        with tarfile.open(path) as tar:
            members = [m for m in tar if m.name.removesuffix(".png") in keys and "png" in m.name]
        with path.open("r+b") as file:
            for member in members:
                file.seek(member.offset_data + 60)
                file.write(os.urandom(member.size - 80))


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
    run = evaluate_model if size == 1 else together
    assert in_process.finish(run, config, paths, size) == [0] * size, ranks.output_of(paths)
    return json.loads((output / "evaluation.json").read_text())


def together(config: RunConfig, paths: RunPaths, world: World) -> None:
    """Evaluate as one of several processes."""
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
