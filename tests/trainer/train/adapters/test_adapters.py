"""Training of adapters: on one and two ranks, in float32 and bfloat16, resumed, and what is saved."""

from __future__ import annotations

import shutil
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.reference_model import random_model
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tests.trainer import in_process, ranks
from tests.trainer.outputs import losses
from tests.trainer.small_runs import merge_all
from tests.trainer.tiny_model import save_flux

from fluxtrain import optim
from fluxtrain.adapter.file import read_adapter
from fluxtrain.adapter.training_files import read_checkpoint
from fluxtrain.cli import main
from fluxtrain.contract.process import RunPaths
from fluxtrain.contract.run.config import RunConfig
from fluxtrain.contract.run.resolve import resolve
from fluxtrain.errors import EXIT_OK, ConfigError, DataError
from fluxtrain.launch.torchrun import check_before_starting
from fluxtrain.model.layers import adapted_layers, count_adapter_parameters
from fluxtrain.parallel.distributed import World
from fluxtrain.parallel.node_memory import image_bytes
from fluxtrain.parallel.parallelize import build_model
from fluxtrain.runtime.files import encode, sums_of
from fluxtrain.runtime.safetensors import read_header
from fluxtrain.state import checkpoint
from fluxtrain.state.run_state import read_checksums
from fluxtrain.weights.reader import open_weights

STEPS = 6
RUN: dict[str, Any] = {
    "preset": "micro",
    "initial_weights": "weights.safetensors",
    "adapter": {
        **{"rank": 4, "alpha": 8.0, "ranks": {"single_mod": 2}, "split_qkv": True},
        **{"dropout": 0.1, "rank_dropout": 0.1, "module_dropout": 0.1},
    },
    "schedule": {"steps": STEPS, "warmup_steps": 0},
    "parallel": {"micro_batch_size": 4},  # gradients accumulate on one rank
    "evaluation": {"every_samples": 32},
    "adapter_file": {"every_steps": 3, "name": "style", "dtype": "float32"},
    "checkpoint": {"every_steps": 2, "memory_every_steps": 0, "asynchronous": False},
    "logging": {"every_steps": 1, "metrics_port": 0},
}
HALF = {"precision": {"compute": "bfloat16"}}
WIDE: dict[str, Any] = {"model": {"mlp_ratio": 8.0}}
RECOMPUTED = {"parallel": {"activation_checkpointing": 1.0}}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a models root with the weights of a random model, and of one with wide matrices."""
    folder = tmp_path_factory.mktemp("models")
    (folder / "wide").mkdir()
    for changes, path in (({}, folder), (WIDE, folder / "wide")):
        save_flux(random_model(resolve({"preset": "micro", **changes}).model), path)
    return folder


def finish(paths: RunPaths, size: int, *changes: dict[str, Any], crash: int = 0) -> RunConfig:
    """Train on ``size`` ranks, which crash after step ``crash``."""
    config = resolve(merge_all(RUN, *changes))
    in_process.train(config, paths, size, crash)
    return config


def files_of(output: Path) -> dict[str, bytes]:
    """Return the contents of the adapter's files."""
    return {path.name: path.read_bytes() for path in (output / "adapters").iterdir()}


def saved(output: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of the last checkpoint of one rank."""
    (file,) = output.glob(f"checkpoints/*{STEPS}/*.safetensors")
    return load_file(file)


@pytest.fixture(scope="module")
def reference(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the output of a run on one rank in float32."""
    output = tmp_path_factory.mktemp("reference")
    finish(RunPaths(output, output, models), 1)
    return output


@pytest.mark.torch_range
def test_a_checkpoint_has_the_adapters_only(reference: Path) -> None:
    config = resolve(RUN)
    assert config.adapter is not None
    tensors = saved(reference)
    names = [
        f"{layer.name}.{kind}"
        for layer in adapted_layers(config.model, config.adapter)
        for kind in layer.shapes
    ]
    kinds = ("model", "optimizer.exp_avg", "optimizer.exp_avg_sq")
    assert set(tensors) == {f"{kind}.{name}" for kind in kinds for name in names}
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float32}
    assert all(tensors[f"model.{name}"].count_nonzero() for name in names)
    count = count_adapter_parameters(config.model, config.adapter)
    assert sum(tensor.nbytes for tensor in tensors.values()) == 12 * count
    assert image_bytes(config, 1) == 12 * count


def test_only_adapters_are_trained_and_only_they_have_optimizer_state(models: Path) -> None:
    config = resolve(merge_all(RUN, HALF))
    weights = open_weights(models / "weights.safetensors")
    model = build_model(config, World.alone(), weights.read(list(weights.shapes)))
    frozen = [each for each in model.parameters() if not each.requires_grad]
    assert {each.dtype for each in frozen} == {torch.bfloat16}
    assert len(frozen) == len(weights.shapes)
    optimizer = optim.make_optimizer(model, config.optim, torch.bfloat16)
    state = checkpoint.training_state(model, optimizer)
    assert (
        len(optimizer.weights)
        == len(state) / 3
        == 2 * len(adapted_layers(config.model, config.adapter))
    )


def test_the_loss_falls(reference: Path) -> None:
    curve = losses(reference, "eval_loss")
    assert curve[STEPS] < 0.98 * curve[2]


@pytest.mark.torch_range
@pytest.mark.slow
@pytest.mark.parametrize(("size", "change"), [(3, RECOMPUTED)])
def test_several_ranks_train_the_adapters_of_one(
    reference: Path, models: Path, tmp_path: Path, size: int, change: dict[str, Any]
) -> None:
    finish(RunPaths(tmp_path, tmp_path, models), size, change)
    for key in ("train_loss", "eval_loss"):
        assert losses(tmp_path, key) == pytest.approx(losses(reference, key), rel=1e-4)
    one, several = (
        load_file(output / "adapters/style.safetensors") for output in (reference, tmp_path)
    )
    assert one.keys() == several.keys()
    for name, tensor in one.items():
        assert torch.allclose(several[name], tensor, rtol=1e-3, atol=1e-5), name


@pytest.mark.slow
def test_ranks_in_bfloat16_follow_one(models: Path, tmp_path: Path) -> None:
    outputs = tmp_path / "one", tmp_path / "two"
    for size, output in enumerate(outputs, 1):
        finish(RunPaths(output, output, models), size, HALF)
    one, two = map(losses, outputs)
    assert one == pytest.approx(two, rel=0.01)


@pytest.mark.torch_range
@pytest.mark.slow
@pytest.mark.parametrize("in_memory", [False, True])
def test_a_run_that_crashed_ends_with_the_same_adapters(
    reference: Path, models: Path, tmp_path: Path, in_memory: bool
) -> None:
    volume = tmp_path / "memory"
    volume.mkdir()
    paths = RunPaths(tmp_path / "run", tmp_path, models, snapshots=volume)
    memory = {"checkpoint": {"every_steps": 0, "memory_every_steps": 1}} if in_memory else {}
    finish(paths, 1, memory, crash=5)
    finish(paths, 1, memory)
    assert ("from memory" in ranks.output_of(paths)) == in_memory
    resumed, expected = saved(paths.output), saved(reference)
    assert all(torch.equal(resumed[name], value) for name, value in expected.items())
    assert files_of(paths.output) == files_of(reference)


def test_a_run_begins_with_the_adapters_of_another(
    reference: Path, models: Path, tmp_path: Path
) -> None:
    (models / "before.safetensors").write_bytes(
        (reference / "adapters/style.safetensors").read_bytes()
    )
    adapter = {**RUN["adapter"], "initial": "before.safetensors", "alpha": 2.0}
    more = {"evaluation": {"at_start": True}, "schedule": {"steps": 2}, "adapter": adapter}
    finish(RunPaths(tmp_path, tmp_path, models), 1, more)
    before, after = losses(reference, "eval_loss")[STEPS], losses(tmp_path, "eval_loss")[0]
    assert after == pytest.approx(before, rel=1e-5)


OTHERS = {
    "ema": {
        "optim": {"ema_decay": 0.6, "learning_rate": 1e-3},
        "adapter": {"kind": "lokr", "split_qkv": False, "dropout": 0.0, "rank_dropout": 0.0},
    },
    "loha, two ranks": {
        "adapter": {"kind": "loha", "split_qkv": False, "dropout": 0.0, "rank_dropout": 0.0},
    },
    "dora and 8 bits, adafactor, three ranks": {
        "optim": {"name": "adafactor"},
        "adapter": {
            "dora": True,
            "base_dtype": "fp8",
            "rank": 1,
            "dropout": 0.0,
            "rank_dropout": 0.0,
            "module_dropout": 0.0,
        },
    },
    "adamw-8bit": {
        **WIDE,
        "initial_weights": "wide/weights.safetensors",
        "optim": {"name": "adamw_8bit"},
    },
    "prodigy": {"optim": {"name": "prodigy", "learning_rate": 1.0, "prodigy": {"d0": 1e-3}}},
    "schedule-free": {"optim": {"name": "schedule_free_adamw"}},
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["ema", *(pytest.param(name, marks=pytest.mark.proof) for name in sorted({*OTHERS} - {"ema"}))],
)
def test_optimizers_with_a_state_of_their_own_continue_exactly_and_on_more_ranks(
    models: Path, tmp_path: Path, name: str
) -> None:
    whole, resumed, several = (tmp_path / each for each in ("whole", "resumed", "several"))
    volume = tmp_path / "memory"
    volume.mkdir()
    memory = {"checkpoint": {"every_steps": 0, "memory_every_steps": 1}}
    finish(RunPaths(whole, whole, models), 1, OTHERS[name])
    for crash in (3, 0):
        paths = RunPaths(resumed, resumed, models, snapshots=volume)
        finish(paths, 1, OTHERS[name], memory, crash=crash)
    assert "from memory" in ranks.output_of(paths)
    expected = saved(whole)
    assert all(torch.equal(saved(resumed)[key], value) for key, value in expected.items())
    assert files_of(resumed) == files_of(whole)
    for crash, size in ((3, 1), (0, 3 if "three" in name else 2)):
        finish(RunPaths(several, several, models), size, OTHERS[name], crash=crash)
    for key in ("train_loss", "eval_loss"):
        assert losses(several, key) == pytest.approx(losses(whole, key), rel=1e-4)
    assert losses(whole, "eval_loss")[STEPS] < losses(whole, "eval_loss")[2]


@pytest.mark.parametrize(
    ("optim", "weights", "kind"),
    [
        ({"name": "adamw_8bit"}, "float32", "model"),
        ({"ema_decay": 0.6}, "float32", "optimizer.ema"),
        ({"ema_decay": 0.6}, "bfloat16", "optimizer.ema"),
    ],
    ids=["8 bits", "average", "average of bfloat16"],
)
def test_checkpoints_are_converted_and_exported(
    models: Path, tmp_path: Path, optim: dict[str, Any], weights: str, kind: str
) -> None:
    adapters, model = tmp_path / "adapters", tmp_path / "model"
    whole = {"optim": optim, "adapter": None, "precision": {"weights": weights, "compute": weights}}
    finish(RunPaths(adapters, adapters, models), 1, {"optim": optim})
    finish(RunPaths(model, model, models), 1, whole)
    converted, exported = tmp_path / "converted.safetensors", tmp_path / "exported.safetensors"
    arguments = ["convert", str(adapters), "--dtype", "float32", "--output", str(converted)]
    assert main(["adapter", *arguments]) == EXIT_OK
    assert converted.read_bytes() == (adapters / "adapters" / "style.safetensors").read_bytes()
    arguments = ["export", str(model), "--dtype", "float32", "--output", str(exported)]
    assert main(arguments) == EXIT_OK
    found, stored = load_file(exported), saved(model)
    assert found
    assert all(torch.equal(value, stored[f"{kind}.{name}"]) for name, value in found.items())


@pytest.mark.parametrize(("kind", "is_read"), [("optimizer.ema", True), ("model", False)])
def test_what_is_read_of_a_checkpoint_is_verified(
    models: Path, tmp_path: Path, kind: str, is_read: bool
) -> None:
    change = {"optim": {"ema_decay": 0.6}, "adapter": None}
    finish(RunPaths(tmp_path, tmp_path, models), 1, change)
    (file,) = tmp_path.glob(f"checkpoints/*{STEPS}/*.safetensors")
    content = bytearray(file.read_bytes())
    with_small_blocks(file.parent)
    content[read_header(file)[f"{kind}.single_blocks.0.linear1.weight"].offset + 512] ^= 1
    file.write_bytes(content)
    with pytest.raises(DataError, match="wrong checksum") if is_read else nullcontext():
        open_weights(tmp_path).verify(World.alone(), lambda: None)


def with_small_blocks(checkpoint: Path) -> None:
    names = read_checksums(checkpoint)
    sums = {name: sums_of((checkpoint / name).read_bytes(), 256) for name in names}
    (checkpoint / "DONE").write_text(encode(sums))


def test_the_files_hold_what_was_trained(reference: Path) -> None:
    files = sorted(path.name for path in (reference / "adapters").iterdir())
    assert files == ["style-000003.safetensors", "style.safetensors"]
    file = read_adapter(reference / "adapters" / "style.safetensors")
    trained, config = read_checkpoint(reference)
    assert config == resolve(RUN)
    assert file.adapter.keys() == trained.keys()
    for layer, update in trained.items():
        assert torch.allclose(update.delta(), file.adapter[layer].delta(), rtol=1e-6, atol=1e-9)
    converted = reference / "converted.safetensors"
    arguments = ["convert", str(reference), "--dtype", "float32", "--output", str(converted)]
    assert main(["adapter", *arguments]) == EXIT_OK
    assert converted.read_bytes() == (reference / "adapters" / "style.safetensors").read_bytes()
    expected = {
        "ss_network_dim": "4",
        "ss_network_alpha": "8.0",
        "ss_steps": "6",
        "ss_sd_model_name": "weights.safetensors",
        "modelspec.architecture": "flux-1-schnell/lora",
    }
    assert expected.items() <= file.metadata.items()


def test_other_adapters_do_not_continue_a_run(reference: Path, models: Path) -> None:
    paths = RunPaths(reference, reference, models)
    config = resolve(merge_all(RUN, {"adapter": {"rank": 8}}))
    assert in_process.finish(ranks.train_alone, config, paths) == [2]
    assert "spec.run.adapter.rank: got 8; the checkpoint" in ranks.output_of(paths)


def test_other_weights_of_the_same_name_do_not_continue_a_run(models: Path, tmp_path: Path) -> None:
    root, output = tmp_path / "models", tmp_path / "output"
    shutil.copytree(models, root)
    file, paths = root / "weights.safetensors", RunPaths(output, output, root)
    finish(paths, 1)
    state = load_file(file)
    longer = resolve(merge_all(RUN, {"schedule": {"steps": STEPS + 1}}))
    with safe_open(file, framework="pt") as opened:
        metadata = opened.metadata()
    save_file(dict(reversed(state.items())), file, metadata=metadata)  # the same, written anew
    assert in_process.finish(ranks.train_alone, longer, paths) == [0], ranks.output_of(paths)
    state["txt_in.weight"] = state["txt_in.weight"] + 0.01
    save_file(state, file, metadata=metadata)
    last = resolve(merge_all(RUN, {"schedule": {"steps": STEPS + 2}}))
    assert in_process.finish(ranks.train_alone, last, paths) == [2]
    says = (
        "spec.run.initial_weights: got 'weights.safetensors'; has other weights than when the run"
    )
    assert says in ranks.output_of(paths)
    with pytest.raises(ConfigError, match="has other weights than when the run began"):
        check_before_starting(last, paths, [1])
    (output / "base.json").unlink()  # as of an earlier version
    assert in_process.finish(ranks.train_alone, last, paths) == [0], ranks.output_of(paths)


def test_a_checkpoint_of_adapters_is_not_taken_for_a_models(reference: Path) -> None:
    with pytest.raises(DataError, match=r"has adapters only, for 'weights\.safetensors'"):
        open_weights(reference)
