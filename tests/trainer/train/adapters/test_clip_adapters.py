"""Training of CLIP's adapters: on one, two and three ranks, killed and resumed, and as peft trains them."""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from benchmarks.reference_model import random_model
from peft import LoraConfig, get_peft_model
from PIL import Image
from safetensors.torch import load_file, save_file
from tests.trainer import in_process, ranks
from tests.trainer.picture_cache.folders import RUN, cache, write_pictures
from tests.trainer.small_runs import merge_all
from tests.trainer.tiny_encoders import write_clip, write_encoders
from tests.trainer.tiny_model import save_flux
from torch import Tensor, nn

from fluxtrain import optim
from fluxtrain.adapter.file import read_adapter
from fluxtrain.adapter.merge import clip_adapters, updated
from fluxtrain.adapter.opening import initial_parameters, open_model
from fluxtrain.cli import main
from fluxtrain.contract.process import RunPaths
from fluxtrain.contract.run.config import RunConfig
from fluxtrain.contract.run.resolve import resolve
from fluxtrain.data.dataset import Encodings
from fluxtrain.data.pictures.dataset import PictureDataset
from fluxtrain.data.shards import Sample, ShardWriter
from fluxtrain.encode.clip import caption_ids, clip_weights
from fluxtrain.encode.text import PooledClip, load_clip, load_text_encoder
from fluxtrain.errors import EXIT_OK, ConfigError, DataError
from fluxtrain.launch.torchrun import check_before_starting
from fluxtrain.model.clip import ClipText
from fluxtrain.model.layers import is_clip, rate_of
from fluxtrain.parallel.distributed import World
from fluxtrain.parallel.node_memory import image_bytes
from fluxtrain.parallel.parallelize import build_model
from fluxtrain.sample.task import sample_prompts
from fluxtrain.train.evaluation_task import evaluate_model
from fluxtrain.train.sources import shared_sources
from fluxtrain.weights.reader import open_weights

STEPS = 4
CLIP_RUN: dict[str, Any] = {
    "initial_weights": "weights.safetensors",
    "data": {
        **{"cache": "../shared", "validation_split": 0.2, "caption_prefix": "tag,"},
        "variants": {"captions": 2, "shuffle_caption": True},
    },
    "adapter": {
        **{"rank": 4, "alpha": 8.0, "dropout": 0.1, "rates": {"up": 2.0}},
        "clip": {"rank": 2, "alpha": 4.0, "rate": 0.5},
    },
    "flow": {"prompt_dropout": 0.3},
    "optim": {"ema_decay": 0.9},
    "schedule": {"steps": STEPS, "global_batch_size": 6},
    "parallel": {"micro_batch_size": 3},  # gradients accumulate on one rank
    "evaluation": {"at_end": True, "batch_size": 4},
    "adapter_file": {"every_steps": 0, "dtype": "float32"},
    "checkpoint": {"every_steps": 2, "memory_every_steps": 0, "asynchronous": False},
}
SAMPLED: dict[str, Any] = {
    "sampling": {"prompts": ["red"], "num_prompts": 1, "at_end": True, "num_steps": 2}
}
CAPTIONS = ["", "a red circle", "blue, a green square " * 20]


@pytest.fixture(scope="module")
def roots(tmp_path_factory: pytest.TempPathFactory) -> RunPaths:
    """Return roots with nine pictures, a model, and encoders of which CLIP has CLIP-L's layers."""
    root = tmp_path_factory.mktemp("roots")
    write_pictures(root / "data/pictures", 9)
    (root / "models").mkdir()
    models = write_encoders(root / "models")
    write_clip(models / "clip", num_hidden_layers=12, intermediate_size=64)
    save_flux(random_model(resolve(RUN).model), models)
    return RunPaths(root / "out", root / "data", models)


def config(*changes: dict[str, Any]) -> RunConfig:
    return resolve(merge_all(RUN, CLIP_RUN, *changes))


def finish(
    roots: RunPaths, output: Path, size: int, *changes: dict[str, Any], crash: int = 0
) -> list[dict[str, Any]]:
    """Train on ``size`` ranks, which crash after step ``crash``; return the logged metrics."""
    paths = RunPaths(output, roots.data, roots.models)
    in_process.train(config(*changes), paths, size, crash)
    lines = (output / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def numbers(metrics: list[dict[str, Any]]) -> list[float]:
    names = ("train_loss", "grad_norm", "eval_loss")
    return [line[name] for line in metrics for name in names if line.get(name) is not None]


def file_of(output: Path) -> Path:
    return output / "adapters/lora.safetensors"


def distance(output: Path, other: Path) -> float:
    """Return the L2 norm of the difference of both files' tensors, over that of the second."""
    own, theirs = (load_file(file_of(each)) for each in (output, other))
    assert own.keys() == theirs.keys()
    pairs = [(tensor, theirs[name]) for name, tensor in own.items()]
    squares = sum((one - two).square().sum().item() for one, two in pairs)
    return float((squares / sum(two.square().sum().item() for _, two in pairs)) ** 0.5)


@pytest.fixture(scope="module")
def reference(roots: RunPaths, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the output of a run on one rank."""
    output = tmp_path_factory.mktemp("reference")
    finish(roots, output, 1, SAMPLED)
    return output


def test_adapters_of_clip_are_trained_saved_and_written(reference: Path) -> None:
    tensors = load_file(file_of(reference))
    names = {name for name in tensors if name.startswith("lora_te1_")}
    assert len(names) == 3 * 72
    ups = [tensors[name] for name in names if name.endswith("lora_up.weight")]
    assert all(up.shape[1] == 2 and up.count_nonzero() for up in ups)
    key = "lora_te1_text_model_encoder_layers_11_mlp_fc2"
    assert tensors[f"{key}.lora_down.weight"].shape == (2, 64)
    assert tensors[f"{key}.alpha"] == 4.0
    metadata = read_adapter(file_of(reference)).metadata
    assert metadata["ss_text_encoder_lr"] == str(0.5 * config().optim.learning_rate)
    (saved,) = reference.glob(f"checkpoints/*{STEPS}/*.safetensors")
    bytes_of = sum(each.nbytes for each in load_file(saved).values())
    assert bytes_of == image_bytes(config(), 1)
    assert len(list((reference / "samples").rglob("0*.png"))) >= 2


@pytest.mark.parametrize("size", [2, 3])
def test_several_ranks_train_the_same(
    roots: RunPaths, reference: Path, tmp_path: Path, size: int
) -> None:
    lines = (reference / "metrics.jsonl").read_text().splitlines()
    expected = numbers([json.loads(line) for line in lines])
    sampled = SAMPLED if size == 2 else {}
    found = numbers(finish(roots, tmp_path, size, sampled))
    assert found == pytest.approx(expected, rel=1e-4)
    assert distance(tmp_path, reference) < 1e-3


@pytest.mark.proof
def test_a_killed_run_ends_with_the_same_file_also_on_other_ranks(
    roots: RunPaths, reference: Path, tmp_path: Path
) -> None:
    finish(roots, tmp_path / "one", 1, crash=3)
    (saved,) = (tmp_path / "one").glob("checkpoints/*2/*.safetensors")
    trained = sum(each.nbytes for each in load_file(saved).values()) // 16  # with three averages
    assert f"{trained:,} of " in (tmp_path / "one/rank_0.txt").read_text()
    finish(roots, tmp_path / "one", 1)
    assert file_of(tmp_path / "one").read_bytes() == file_of(reference).read_bytes()
    finish(roots, tmp_path / "two", 2, crash=3)
    finish(roots, tmp_path / "two", 1)
    assert distance(tmp_path / "two", reference) < 1e-3


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.03)])
def test_the_vector_of_a_step_is_the_encoded_one(
    roots: RunPaths, dtype: torch.dtype, tolerance: float
) -> None:
    run, host = config(), torch.device("cpu")
    weights = clip_weights(run, roots.models, dtype)
    assert weights is not None
    clip = ClipText(weights.shape).to(dtype)
    clip.load_state_dict(dict(weights.tensors))
    encoder = load_text_encoder(run.encoders, 8, roots.models, host, torch.float32)
    vec = encoder.encode(CAPTIONS)[1]
    ids = caption_ids(run.encoders, roots.models, CAPTIONS)
    found = clip(torch.stack([torch.from_numpy(ids[caption]) for caption in CAPTIONS]))
    torch.testing.assert_close(found.float(), vec, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize(("up", "expected"), [(None, 2.0), (1.0, 1.0), (16.0, 16.0)])
def test_matrices_b_of_clip_have_a_ratio_of_their_own(
    roots: RunPaths, up: float | None, expected: float
) -> None:
    run = config({"adapter": {"clip": {"up": up}}, "optim": {"weight_decay": 0.0}})
    weights = open_weights(roots.models / "weights.safetensors")
    clip = clip_weights(run, roots.models, torch.float32)
    model = build_model(run, World.alone(), weights.read(list(weights.shapes)), clip=clip)
    rates = partial(rate_of, adapter=run.adapter)
    optimizer = optim.make_optimizer(model, run.optim, factor_of=rates)
    trained = {name: each for name, each in model.named_parameters() if each.requires_grad}
    before = {name: each.detach().clone() for name, each in trained.items()}
    for parameter in trained.values():
        parameter.grad = torch.ones_like(parameter)
    optim.set_learning_rate(optimizer, 1e-3)
    optim.update(optimizer, optimizer.gradient_norm(), 1e12, torch.tensor(optim.NEVER))
    changes = {name: (before[name] - each.detach()) / 1e-3 for name, each in trained.items()}
    assert sum(map(is_clip, changes)) == 2 * 72
    for name, change in changes.items():  # AdamW's first step is the learning rate
        factor = 0.5 if is_clip(name) else 1.0
        if name.endswith("lora_B"):
            factor *= expected if is_clip(name) else 2.0
        torch.testing.assert_close(change, torch.full_like(change, factor), rtol=1e-3, atol=0)


class _Pooled(nn.Module):
    """CLIP of transformers, whose output is the pooled vector."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        pooled: Tensor = self.model(input_ids=ids).pooler_output
        return pooled


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")
def test_peft_trains_the_same_on_transformers_clip(roots: RunPaths) -> None:
    run = config({"adapter": {"dropout": 0.0, "layers": ["linear2"]}})
    weights = open_weights(roots.models / "weights.safetensors")
    clip = clip_weights(run, roots.models, torch.float32)
    model = build_model(run, World.alone(), weights.read(list(weights.shapes)), clip=clip)
    ours = model.text_encoder
    assert ours is not None
    targets = ["q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2"]
    settings = LoraConfig(r=2, lora_alpha=4, target_modules=targets)
    loaded = load_clip(run.encoders, roots.models, torch.float32).encoder
    theirs = _Pooled(get_peft_model(loaded, settings))
    pairs = _paired(ours, theirs)
    assert len(pairs) == 2 * 72
    ids = caption_ids(run.encoders, roots.models, CAPTIONS)
    batch = torch.stack([torch.from_numpy(ids[caption]) for caption in CAPTIONS])
    target = torch.randn(len(CAPTIONS), 16, generator=torch.Generator().manual_seed(0))
    losses = [
        _curve(each, batch, target, parameters)
        for each, parameters in zip((ours, theirs), zip(*pairs, strict=True), strict=True)
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert losses[0][-1] < losses[0][0]
    for own, other in pairs:
        assert own.grad is not None
        torch.testing.assert_close(own.grad, other.grad, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(ours(batch), theirs(batch), atol=1e-5, rtol=1e-5)


def _paired(ours: nn.Module, theirs: nn.Module) -> list[tuple[nn.Parameter, nn.Parameter]]:
    """Return the adapters' matrices of both, which are made equal."""
    other = {
        name.split("layers.")[1].replace(".default.weight", ""): each
        for name, each in theirs.named_parameters()
        if "lora_" in name
    }
    pairs = []
    for name, own in ours.named_parameters():
        if "lora_" in name:
            peer = other[name.split("layers.")[1]]
            with torch.no_grad():
                peer.copy_(own)
            pairs.append((own, peer))
    return pairs


def _curve(
    model: nn.Module, ids: Tensor, target: Tensor, parameters: tuple[nn.Parameter, ...]
) -> list[float]:
    """Return the losses of eight steps, of which the gradients of one more are left."""
    optimizer = torch.optim.SGD(parameters, lr=0.05)
    losses = []
    for _ in range(8):
        optimizer.zero_grad()
        loss = (model(ids) - target).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_the_run_goes_on_and_samples_with_the_same_clip(roots: RunPaths, reference: Path) -> None:
    models = roots.models
    (models / "style.safetensors").write_bytes(file_of(reference).read_bytes())
    run = config({"adapter": {"initial": "style.safetensors", "clip": {"rank": 3}}})
    weights = open_weights(models / "weights.safetensors")
    begun = build_model(
        run,
        World.alone(),
        weights.read(list(weights.shapes)),
        adapters=initial_parameters(run, models),
        clip=clip_weights(run, models, torch.float32),
    ).eval()
    ids = caption_ids(run.encoders, models, CAPTIONS)
    batch = torch.stack([torch.from_numpy(ids[caption]) for caption in CAPTIONS])
    assert begun.text_encoder is not None
    trained = begun.text_encoder(batch)

    files = [(read_adapter(models / "style.safetensors"), 1.0)]
    clip = load_clip(run.encoders, models, torch.float32)
    merged = PooledClip(updated(clip, files)).encode(CAPTIONS)
    torch.testing.assert_close(trained, merged, atol=1e-5, rtol=1e-5)
    assert (merged - PooledClip(clip).encode(CAPTIONS)).abs().max() > 1e-3
    off = PooledClip(updated(clip, [(files[0][0], 0.0)])).encode(CAPTIONS)
    assert torch.equal(off, PooledClip(clip).encode(CAPTIONS))
    of_run = clip_adapters(open_model(reference, models))
    assert len(of_run) == 1  # a checkpoint has the weights, its file their average
    assert sum(map(is_clip, of_run[0][0].adapter)) == 72


def test_a_run_without_clip_leaves_its_part_of_a_file_out_and_says_so(
    roots: RunPaths, reference: Path
) -> None:
    (roots.models / "style.safetensors").write_bytes(file_of(reference).read_bytes())
    run = config({"adapter": {"initial": "style.safetensors", "clip": None}})
    told = list[str]()
    assert not any(map(is_clip, initial_parameters(run, roots.models, told.append)))
    assert "72 layers of CLIP-L are left out" in told[0]


def test_another_encoder_than_clip_l_is_refused(roots: RunPaths, tmp_path: Path) -> None:
    write_clip(tmp_path / "clip")
    with pytest.raises(
        DataError, match="num_hidden_layers is 2, of one with CLIP-L's layers it is 12"
    ):
        clip_weights(config(), tmp_path, torch.float32)
    with pytest.raises(ConfigError, match=r"vec_in_dim: got 32; .*clip gives 16"):
        clip_weights(config({"model": {"vec_in_dim": 32}}), roots.models, torch.float32)


def test_a_run_goes_on_with_the_same_clip_only(roots: RunPaths, tmp_path: Path) -> None:
    models, output = tmp_path / "models", tmp_path / "output"
    shutil.copytree(roots.models, models)
    own = RunPaths(output, roots.data, models)
    finish(own, output, 1)
    longer = {"schedule": {"steps": STEPS + 1}}
    file = models / "clip/model.safetensors"
    state = load_file(file)
    last = max(name for name in state if name.endswith("fc2.weight"))
    save_file({**state, last: state[last] + 0.1}, file, {"format": "pt"})
    with pytest.raises(
        ConfigError, match=r"encoders\.clip: got 'clip'; has other weights than when"
    ):
        check_before_starting(config(longer), own, [1])
    (models / "run").symlink_to(output)
    for task, changes in (("evaluate", {}), ("sample", {"sampling": {"prompts": ["red"]}})):
        write_set(tmp_path, PooledClip(load_clip(config().encoders, models, torch.float32)))
        run = evaluation("run", [], {"task": task}, changes)
        with pytest.raises(
            ConfigError, match=r"encoders\.clip: got 'clip'; has other weights than"
        ):
            check_before_starting(run, RunPaths(tmp_path / task, tmp_path, models), [1])
    run = config(longer)
    assert in_process.finish(ranks.train_alone, run, own) == [2]
    assert "encoders.clip: got 'clip'; has other weights" in ranks.output_of(own)
    save_file(state, models / "moved.safetensors", {"format": "pt"})
    (models / "moved.safetensors").rename(file)
    finish(own, output, 1, longer)


def sampled(roots: RunPaths, output: Path, *added: tuple[str, float]) -> Any:
    """Return the pixels of the image that the sample task makes with adapters."""
    changes = {
        "task": "sample",
        "data": {"images": None},
        "added_adapters": [{"path": path, "strength": strength} for path, strength in added],
        "sampling": {"prompts": ["red"], "num_steps": 2, "at_end": False},
    }
    run = resolve(merge_all(RUN, {"initial_weights": "weights.safetensors"}, changes))
    paths = RunPaths(output, roots.data, roots.models)
    assert in_process.finish(sample_prompts, run, paths) == [0], ranks.output_of(paths)
    return pixels(output / "samples/0000.png")


def pixels(path: Path) -> Any:
    with Image.open(path) as image:
        return np.array(image).astype(int)


def test_the_sample_task_makes_the_image_of_the_training(
    roots: RunPaths, reference: Path, tmp_path: Path
) -> None:
    whole, blocks = file_of(reference), load_file(file_of(reference))
    (roots.models / "whole.safetensors").write_bytes(whole.read_bytes())
    blocks = {name: each for name, each in blocks.items() if not name.startswith("lora_te1_")}
    save_file(blocks, roots.models / "blocks.safetensors")
    expected = pixels(reference / f"samples/step_{STEPS:07d}/00.png")
    found = sampled(roots, tmp_path / "whole", ("whole.safetensors", 1.0))
    assert abs(found - expected).max() <= 1
    half = [("whole.safetensors", 0.5)] * 2
    assert abs(sampled(roots, tmp_path / "halves", *half) - expected).max() <= 1
    assert (
        abs(sampled(roots, tmp_path / "blocks", ("blocks.safetensors", 1.0)) - expected).max() > 1
    )
    plain = sampled(roots, tmp_path / "plain")
    assert (sampled(roots, tmp_path / "off", ("whole.safetensors", 0.0)) == plain).all()


def test_the_evaluate_task_computes_the_vectors_of_the_captions(
    roots: RunPaths, reference: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    models, style = roots.models, file_of(reference)
    (models / "style.safetensors").write_bytes(style.read_bytes())
    merged = ["--output", str(models / "merged.safetensors"), "--dtype", "float32"]
    weights = str(models / "weights.safetensors")
    assert main(["adapter", "merge", weights, str(style), *merged]) == EXIT_OK
    assert "72 layers of CLIP-L are left out" in capsys.readouterr().out
    clip = load_clip(config().encoders, models, torch.float32)
    adapted = updated(clip, [(read_adapter(style), 1.0)])
    for name, encoder in (("plain", clip), ("adapted", adapted)):
        write_set(tmp_path / name, PooledClip(encoder))
    added = [{"path": "style.safetensors", "strength": 1.0}]
    with_captions = evaluated(roots, tmp_path / "plain", "weights.safetensors", added)
    assert with_captions == pytest.approx(
        evaluated(roots, tmp_path / "adapted", "merged.safetensors", []), rel=1e-5
    )
    without = evaluated(roots, tmp_path / "plain", "merged.safetensors", [])
    assert abs(without - with_captions) > 1e-5 * without


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_the_evaluate_task_gives_the_held_out_loss_of_the_training(
    roots: RunPaths, tmp_path: Path, precision: str
) -> None:
    """Its vectors are computed as those of a step, whatever the data type of the other encodings."""
    encoders = {"encoders": {"precision": precision}}
    metrics = finish(roots, tmp_path / "run", 1, encoders)
    (expected,) = (line["eval_loss"] for line in metrics if line.get("eval_loss") is not None)
    write_held_out(roots, tmp_path / "set", encoders)
    name = f"{precision}.safetensors"
    (roots.models / name).write_bytes(file_of(tmp_path / "run").read_bytes())
    base = "weights.safetensors"
    found = evaluated(roots, tmp_path / "set", base, [{"path": name}], encoders)
    assert found == pytest.approx(expected, rel=1e-6)

    (roots.models / precision).symlink_to(tmp_path / "run")
    found = evaluated(roots, tmp_path / "set", precision, [], encoders)
    assert found == pytest.approx(expected, rel=1e-6)


def write_held_out(roots: RunPaths, folder: Path, changes: dict[str, Any]) -> None:
    """Write the encodings of the pictures that the run holds out as a validation set."""
    folder.mkdir()
    run, alone, paths = config(changes), World.alone(), RunPaths(folder, roots.data, roots.models)
    dataset = shared_sources(run, paths, alone, cache(run, paths, alone)).validation
    assert isinstance(dataset, PictureDataset)
    dtype, shape = dataset.shape.dtype, dataset.shape
    with ShardWriter(folder / "validation", shard_size=4, dtype=dtype) as writer:
        for index in range(len(dataset)):
            height, width = dataset.latent_sizes[index].tolist()
            one = Encodings.empty(1, shape.at((height, width)))
            assert dataset.read(np.array([index]), one, np.array([False])) == [None]
            tensors = (one.txt[0], one.vec[0], one.mean[0], one.logvar[0])
            writer.add(Sample(dataset.key(index), dataset.caption(index), *tensors))


def write_set(folder: Path, clip: PooledClip) -> None:
    """Write an encoded validation set whose pooled vectors are those of ``clip``."""
    generator = torch.Generator().manual_seed(0)
    with ShardWriter(folder / "validation", shard_size=4, dtype=torch.float32) as writer:
        for index in range(8):
            caption = f"a picture {index} of red"
            txt, mean = (torch.randn(shape, generator=generator) for shape in ((8, 16), (4, 4, 4)))
            vec = clip.encode([caption])[0]
            writer.add(Sample(f"{index}", caption, txt, vec, mean, torch.full((4, 4, 4), -9.0)))


def evaluation(weights: str, added: list[dict[str, object]], *changes: dict[str, Any]) -> RunConfig:
    evaluates = {
        "task": "evaluate",
        "data": {"images": None, "validation": "validation"},
        "initial_weights": weights,
        "added_adapters": added,
    }
    return resolve(merge_all(RUN, evaluates, *changes))


def evaluated(
    roots: RunPaths,
    data: Path,
    weights: str,
    added: list[dict[str, object]],
    *changes: dict[str, Any],
) -> float:
    """Return the loss of the evaluate task on the set in ``data``."""
    run = evaluation(weights, added, *changes)
    paths = RunPaths(data / "output", data, roots.models)
    assert in_process.finish(evaluate_model, run, paths) == [0], ranks.output_of(paths)
    found = json.loads((data / "output/evaluation.json").read_text())
    return float(found["eval_loss"])


def test_a_set_without_captions_is_refused_with_adapters_of_clip(
    roots: RunPaths, reference: Path, tmp_path: Path
) -> None:
    (roots.models / "style.safetensors").write_bytes(file_of(reference).read_bytes())
    with ShardWriter(tmp_path / "validation", shard_size=4, dtype=torch.float32) as writer:
        zeros = torch.zeros(8, 16), torch.zeros(16), torch.zeros(4, 4, 4), torch.zeros(4, 4, 4)
        writer.add(Sample("0", "", *zeros))
    added = [{"path": "style.safetensors"}]
    run = evaluation("weights.safetensors", added)
    paths = RunPaths(tmp_path / "output", tmp_path, roots.models)
    with pytest.raises(DataError, match="have no captions"):
        check_before_starting(run, paths, [1])
    with pytest.raises(DataError, match=r"adapts CLIP-L, and spec\.run\.encoders\.text is minilm"):
        check_before_starting(
            evaluation("weights.safetensors", added, {"encoders": {"text": "minilm"}}), paths, [1]
        )
    assert in_process.finish(evaluate_model, run, paths) != [0]
    assert "have no captions" in ranks.output_of(paths)


def test_each_sample_has_the_ids_of_its_caption(roots: RunPaths, tmp_path: Path) -> None:
    paths = RunPaths(tmp_path, roots.data, roots.models)
    run, alone = config(), World.alone()
    sources = shared_sources(run, paths, alone, cache(run, paths, alone))
    dataset = sources.train
    assert isinstance(dataset, PictureDataset)
    drawn = np.linspace(0, 0.99, len(dataset))
    indices = dataset.with_variants(np.arange(len(dataset)), drawn)
    captions = [dataset.caption(index) for index in indices.tolist()]
    assert len(set(captions)) > 4
    expected = caption_ids(run.encoders, roots.models, ["", *captions])
    is_replaced = np.zeros(len(indices) + 1, dtype=bool)  # the last one is padding
    is_replaced[[1, -1]] = True
    found = dataset.token_ids(indices, is_replaced)
    assert found is not None
    captions[1] = ""
    for row, caption in zip(found.numpy(), [*captions, ""], strict=True):
        assert (row == expected[caption]).all()
    plain = config({"adapter": {"clip": None}})
    without = shared_sources(plain, paths, alone, cache(plain, paths, alone)).train
    assert isinstance(without, PictureDataset)
    assert without.token_ids(indices, is_replaced) is None
