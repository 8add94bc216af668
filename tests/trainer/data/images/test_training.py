"""Training from images equals training from their encodings, on any ranks and through resumes."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
from cluster.free_ports import free_port
from tests.trainer import ranks
from tests.trainer.data.small_runs import batches, encoded_run, image_run, ledger, losses, train
from tests.trainer.tiny_encoders import config

from fluxtrain.contract.process import RunPaths
from fluxtrain.contract.run.resolve import resolve
from fluxtrain.data.dataset import ImageBatch
from fluxtrain.errors import ConfigError
from fluxtrain.prepare.preprocess import preprocess


@pytest.fixture(scope="module")
def expected(prepared: RunPaths, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Return the losses of the run on images."""
    return train(image_run(), prepared, tmp_path_factory.mktemp("images") / "run")


@pytest.mark.slow
def test_losses_equal_those_from_float32_encodings(
    prepared: RunPaths, expected: list[float], tmp_path: Path
) -> None:
    paths = RunPaths(tmp_path / "out", tmp_path, prepared.models)
    for part in ("train", "validation"):
        shutil.copytree(prepared.data / part, tmp_path / part)
    assert ranks.finish(preprocess, config(task="preprocess"), paths) == [0]
    (tmp_path / "shards").symlink_to(tmp_path / "preprocessed")
    from_encodings = train(encoded_run("shards"), paths, tmp_path / "run")
    worst = max(abs(a - b) / b for a, b in zip(expected, from_encodings, strict=True))
    print(f"\nlargest relative difference of {len(expected)} losses: {worst:.1e}")
    assert worst < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("size", [3, 5])
def test_losses_are_the_same_on_ranks_with_unequal_shares(
    prepared: RunPaths, expected: list[float], tmp_path: Path, size: int
) -> None:
    paths = RunPaths(tmp_path / "run", prepared.data, prepared.models)
    run = image_run(parallel={"micro_batch_size": 2}, schedule={"steps": 4})
    together = partial(ranks.train_together, port=free_port())
    assert ranks.finish(together, run, paths, size) == [0] * size, ranks.output_of(paths)
    assert losses(tmp_path / "run") == pytest.approx(expected[:5], rel=1e-4)
    used = ledger(tmp_path / "run")
    first_steps = [index for line in used if line["step"] <= 3 for index in line["indices"]]
    assert len(set(first_steps)) == len(first_steps) == 36  # of the first epoch's 37
    assert min(first_steps) >= 0


@pytest.mark.slow
def test_a_resumed_run_has_the_same_losses(
    prepared: RunPaths, expected: list[float], tmp_path: Path
) -> None:
    train(image_run(schedule={"steps": 5}), prepared, tmp_path / "run")
    shutil.rmtree(tmp_path / "run/checkpoints/step_0000000005")  # as if killed after step 5
    assert train(image_run(data={"num_workers": 2}), prepared, tmp_path / "run") == expected
    used = ledger(tmp_path / "run")
    assert [line["step"] for line in used] == list(range(1, 9))
    first_epoch = [index for line in used for index in line["indices"]][:37]
    assert sorted(first_epoch) == list(range(37))


def test_padding_images_are_black_and_have_weight_0(prepared: RunPaths) -> None:
    last = next(batches(image_run(), prepared.data, rank=4, ranks=5, micro=3))
    assert isinstance(last, ImageBatch)
    assert last.indices.tolist() == [-1, -1, -1]  # of 15 positions 12 have samples
    assert last.weights.tolist() == [0.0, 0.0, 0.0]
    assert (last.captions, last.faults) == (("", "", ""), ())
    assert not last.images.any()


def test_an_unreadable_image_has_weight_0_and_changes_no_other_sample(
    prepared: RunPaths, tmp_path: Path
) -> None:
    shutil.copytree(prepared.data / "train", tmp_path / "train")
    run = image_run(data={"max_bad_fraction": 0.5})
    path = tmp_path / "train/shard_000000.tar"
    content = bytearray(path.read_bytes())
    place = content.index(b"IDAT", content.index(b"000000007.png"))
    content[place : place + 40] = bytes(40)
    path.write_bytes(content)
    good, bad = list(batches(run, prepared.data)), list(batches(run, tmp_path))
    faults = {fault.partition(" key ")[2][:25] for batch in bad for fault in batch.faults}
    assert faults == {"'000000007': its image is"}
    for one, other in zip(good, bad, strict=True):
        hit = other.indices == 7
        assert torch.equal(other.weights, (~hit).float())
        assert torch.equal(one.images[~hit], other.images[~hit])
        assert torch.equal(one.noise, other.noise)


def test_the_preprocess_task_needs_images() -> None:
    with pytest.raises(ConfigError, match=r"data\.source.*must be images if task is preprocess"):
        resolve({"preset": "mlperf-schnell", "task": "preprocess"})
