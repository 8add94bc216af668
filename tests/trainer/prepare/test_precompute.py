"""The preprocess task: exact encodings, equal files for any ranks and interruptions, and its errors."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import time
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.contract.bad_specs import GOOD, changed
from tests.trainer import in_process, ranks
from tests.trainer.commands import fluxtrain
from tests.trainer.tiny_encoders import (
    BASE,
    SIDE,
    TOKENS,
    caption,
    config,
    png,
    small_image,
    write_encoders,
    write_images,
)
from transformers import AutoTokenizer, CLIPTextModel, T5EncoderModel

from fluxtrain.cli import main
from fluxtrain.contract.process import RunPaths
from fluxtrain.contract.run.config import RunConfig
from fluxtrain.contract.run.resolve import merge
from fluxtrain.data.dataset import Encodings
from fluxtrain.data.formats.convert import open_encoded
from fluxtrain.data.formats.tar_writer import TarWriter
from fluxtrain.data.sources import read_empty_text
from fluxtrain.encode.codec import load_autoencoder
from fluxtrain.errors import ConfigError
from fluxtrain.prepare.preprocess import preprocess
from fluxtrain.prepare.preprocess_output import open_outputs

RUN = config(task="preprocess")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_encoders(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("data")
    write_images(root / "train", 53)
    write_images(root / "validation", 11, timesteps=True, first=100)
    return root


def copy_data(tmp_path: Path, images: Path, models: Path) -> RunPaths:
    root = tmp_path / "data"
    root.mkdir(parents=True)
    for part in ("train", "validation"):
        shutil.copytree(images / part, root / part)
    return RunPaths(tmp_path / "out", root, models)


@pytest.fixture
def paths(tmp_path: Path, images: Path, models: Path) -> RunPaths:
    return copy_data(tmp_path, images, models)


def finish(run: RunConfig, paths: RunPaths, size: int = 1) -> list[int | None]:
    return in_process.finish(preprocess, run, paths, size)


@pytest.fixture(scope="module")
def expected_files(
    tmp_path_factory: pytest.TempPathFactory, images: Path, models: Path
) -> dict[str, bytes]:
    """Return every file that one rank writes."""
    paths = copy_data(tmp_path_factory.mktemp("expected_files"), images, models)
    assert finish(RUN, paths) == [0]
    return ranks.contents(paths.data / "preprocessed")


@pytest.fixture(scope="module")
def expected(models: Path) -> dict[int, dict[str, torch.Tensor]]:
    """Return the encodings of three samples, computed by transformers and the autoencoder directly."""
    tokenizers = [AutoTokenizer.from_pretrained(models / name) for name in ("t5", "clip")]
    t5 = T5EncoderModel.from_pretrained(models / "t5")
    clip = CLIPTextModel.from_pretrained(models / "clip")
    autoencoder = load_autoencoder(models / "autoencoder/ae.safetensors")

    @torch.no_grad()
    def encode(index: int) -> dict[str, torch.Tensor]:
        t5_ids, clip_ids = (
            tokenizer(
                caption(index),
                padding="max_length",
                truncation=True,
                return_tensors="pt",
                max_length=length,
            ).input_ids
            for tokenizer, length in zip(tokenizers, (TOKENS, 77), strict=True)
        )
        pixels = torch.from_numpy(np.array(small_image(index))).permute(2, 0, 1)[None] / 127.5 - 1
        mean, logvar = autoencoder.encode(pixels)
        txt, vec = t5(t5_ids).last_hidden_state, clip(clip_ids).pooler_output
        return {"txt": txt[0], "vec": vec[0], "mean": mean[0], "logvar": logvar[0]}

    return {index: encode(index) for index in (0, 20, 52)}  # 20 is in the second tar


def read(dataset: Any, index: int) -> dict[str, torch.Tensor]:
    encodings = Encodings.empty(1, dataset.shape)
    assert dataset.read(np.array([index]), encodings, np.array([False])) == [None]
    return {name: getattr(encodings, name)[0] for name in ("txt", "vec", "mean", "logvar")}


@pytest.mark.parametrize(
    ("precision", "tolerance"), [("float32", 1e-4), ("bfloat16", 6e-2)], ids=str
)
def test_encodings_equal_those_of_the_encoders(
    paths: RunPaths,
    expected: dict[int, dict[str, torch.Tensor]],
    precision: str,
    tolerance: float,
) -> None:
    run = config(task="preprocess", encoders={"precision": precision})
    assert finish(run, paths) == [0]
    train = open_encoded(paths.data / "preprocessed/train", verify=True)
    assert (len(train), train.stored_timesteps) == (53, None)
    for index, reference in expected.items():
        assert train.key(index) == f"{index:09d}"
        assert train.caption(index) == caption(index)
        for name, values in read(train, index).items():
            assert values.dtype == getattr(torch, precision)
            torch.testing.assert_close(
                values.float(), reference[name], rtol=tolerance, atol=tolerance
            )


def test_a_validation_set_keeps_its_timesteps_and_image_ids(
    expected_files: dict[str, bytes],
) -> None:
    metadata = json.loads(expected_files["validation/shard_000000.json"])
    assert metadata["keys"] == ["100", "101", "102", "103"]
    assert b'"timestep"' in expected_files["validation/shard_000000.safetensors"][:1000]
    assert b'"timestep"' not in expected_files["train/shard_000000.safetensors"][:1000]


def test_the_empty_prompt_is_written_as_a_file_or_as_mlcommons_folder(paths: RunPaths) -> None:
    for name in ("empty.safetensors", "empty_encodings"):
        parts = {"train": None, "validation": f"val-{name}", "empty_encodings": name}
        assert finish(config(task="preprocess", preprocess=parts), paths) == [0]
    one, other = (read_empty_text(paths.data / n) for n in ("empty.safetensors", "empty_encodings"))
    assert torch.equal(one[0], other[0])
    assert torch.equal(one[1], other[1])
    assert np.load(paths.data / "empty_encodings/t5_empty.npy").shape == (1, TOKENS, 16)


@pytest.mark.parametrize("size", [2, 3, 7])
def test_any_number_of_ranks_writes_the_same_files(
    paths: RunPaths, expected_files: dict[str, bytes], size: int
) -> None:
    # 53 and 11 samples are divisible by neither
    run = config(task="preprocess", data={"num_workers": size % 2})
    assert finish(run, paths, size) == [0] * size
    assert ranks.contents(paths.data / "preprocessed") == expected_files


def num_shards(paths: RunPaths) -> int:
    return len(list(paths.data.glob("preprocessed/*/*.safetensors")))


def kill_at_a_random_moment(
    started: list[ForkServerProcess], paths: RunPaths, chance: random.Random
) -> int:
    """Kill ``started`` ranks while they load, encode, write or end; return how many were alive."""
    target, delay = num_shards(paths) + chance.choice([0, 1, 2, 3, 20]), chance.uniform(0, 0.1)
    while num_shards(paths) < target and any(process.is_alive() for process in started):
        time.sleep(0.002)
    time.sleep(delay)
    alive = [process for process in started if process.is_alive()]
    for process in alive:
        process.kill()
    for process in started:
        process.join()
    return len(alive)


@pytest.mark.slow
def test_killed_at_random_moments_it_writes_the_same_files(
    tmp_path: Path, images: Path, models: Path, expected_files: dict[str, bytes]
) -> None:
    chance = random.Random(0)
    kills, rounds, resumed = 0, 0, 0
    while kills < 10:
        paths = copy_data(tmp_path / str(rounds), images, models)
        while not (paths.data / "preprocessed/validation/dataset.json").exists():
            resumed += num_shards(paths) > 0
            started = ranks.start(preprocess, RUN, paths, chance.choice([1, 2, 3]))
            kills += kill_at_a_random_moment(started, paths, chance)
        assert finish(RUN, paths) == [0]
        assert ranks.contents(paths.data / "preprocessed") == expected_files
        rounds += 1
    print(f"\n{kills} processes killed in {rounds} rounds, {resumed} starts had shards")
    assert resumed


def test_a_stopped_task_leaves_whole_shards_and_is_resumed(
    paths: RunPaths, expected_files: dict[str, bytes]
) -> None:
    (process,) = ranks.start(preprocess, RUN, paths)
    while not list(paths.data.glob("preprocessed/train/*.safetensors")):
        time.sleep(0.01)
    os.kill(process.pid or 0, signal.SIGTERM)
    process.join(60)
    assert process.exitcode == 75
    left = ranks.contents(paths.data / "preprocessed")
    assert all(expected_files[name] == content for name, content in left.items())
    assert finish(RUN, paths) == [0]
    assert ranks.contents(paths.data / "preprocessed") == expected_files


def test_a_finished_data_set_is_not_written_again(paths: RunPaths) -> None:
    assert finish(RUN, paths) == [0]
    shard = paths.data / "preprocessed/train/shard_000000.safetensors"
    before = shard.stat().st_mtime_ns
    assert finish(RUN, paths, 2) == [0, 0]
    assert shard.stat().st_mtime_ns == before


def test_a_shard_without_content_is_written_again(
    paths: RunPaths, expected_files: dict[str, bytes]
) -> None:
    assert finish(RUN, paths) == [0]
    (paths.data / "preprocessed/train/dataset.json").unlink()
    shard = paths.data / "preprocessed/train/shard_000002.safetensors"
    shard.write_bytes(bytes(shard.stat().st_size))
    assert finish(RUN, paths) == [0]
    assert ranks.contents(paths.data / "preprocessed") == expected_files


@pytest.fixture
def command(tmp_path: Path, paths: RunPaths) -> list[str]:
    """Return the arguments of ``fluxtrain`` that run the task on two ranks."""
    job = tmp_path / "job.yaml"
    job.write_text(json.dumps(changed(GOOD, "spec.run", {**BASE, "task": "preprocess"})))
    roots = {"--data": paths.data, "--models": paths.models, "--output": paths.output}
    options = [str(each) for option in roots.items() for each in option]
    return ["run", str(job), *options, "--processes", "2"]


@pytest.mark.slow
def test_the_command_runs_the_task_under_torchrun(
    paths: RunPaths, command: list[str], expected_files: dict[str, bytes]
) -> None:
    done = fluxtrain(*command)
    assert done.returncode == 0, done.stderr
    assert "64 samples in 17 shards on 2 × cpu; 0 shards exist" in done.stderr
    assert ranks.contents(paths.data / "preprocessed") == expected_files


def test_the_command_starts_nothing_for_a_finished_data_set_or_without_encoders(
    paths: RunPaths, models: Path, command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert finish(RUN, paths) == [0]
    assert main(command) == 0
    assert capsys.readouterr().out == "preprocess: everything is there already\n"
    config_file = models / "clip" / "config.json"
    config_file.rename(models / "clip" / "hidden.json")
    try:
        assert main(command) == 2
    finally:
        (models / "clip" / "hidden.json").rename(config_file)
    assert "clip/config.json: missing; the encoders need it" in capsys.readouterr().err


def write_some_broken(folder: Path, count: int, broken: set[int]) -> None:
    with TarWriter(folder) as writer:
        for index in range(count):
            content = png(small_image(index))
            content = content[: len(content) // 2] if index in broken else content
            writer.add(f"{index:09d}", content, "png", caption(index))


def test_unreadable_samples_are_left_out_and_logged(tmp_path: Path, models: Path) -> None:
    paths = RunPaths(tmp_path, tmp_path, models)
    write_some_broken(tmp_path / "train", 10, broken={1, 5})
    run = config(task="preprocess", data={"max_bad_fraction": 0.2}, preprocess={"validation": None})
    assert finish(run, paths, 2) == [0, 0]
    dataset = open_encoded(tmp_path / "preprocessed/train", verify=True)
    assert [dataset.caption(i) for i in range(len(dataset))] == [
        caption(i) for i in range(10) if i not in (1, 5)
    ]
    listing = json.loads((tmp_path / "preprocessed/train/dataset.json").read_text())
    assert listing["provenance"]["dropped"] == 2
    for rank, key in enumerate(("000000001", "000000005")):
        assert (
            f"left out an unreadable sample: {tmp_path}/train/shard_000000.tar key '{key}'"
            in ranks.output_of(paths, rank)
        )


@pytest.mark.parametrize(
    ("part", "broken", "message"),
    [
        ("train", {1, 3, 5}, "spec.run.data.max_bad_fraction allows 1; the last: "),
        ("validation", {9}, "a validation set must be whole; the last: "),
    ],
    ids=["train", "validation"],
)
def test_too_many_unreadable_samples_end_the_task(
    tmp_path: Path, models: Path, part: str, broken: set[int], message: str
) -> None:
    write_some_broken(tmp_path / part, 10, broken)
    other = "validation" if part == "train" else "train"
    paths = RunPaths(tmp_path, tmp_path, models)
    assert finish(config(task="preprocess", preprocess={other: None}), paths) == [2]
    assert f"of 10 {part} samples cannot be read; {message}" in ranks.output_of(paths)
    assert not (tmp_path / "preprocessed" / part / "dataset.json").exists()


def test_large_images_are_resized_and_small_ones_left_out(tmp_path: Path, models: Path) -> None:
    with TarWriter(tmp_path / "train") as writer:
        writer.add("wide", png(small_image(0, 40).resize((80, 40))), "png", "wide")
        writer.add("small", png(small_image(1, SIDE - 1)), "png", "small")
    run = config(task="preprocess", preprocess={"validation": None})
    assert finish(run, RunPaths(tmp_path, tmp_path, models)) == [0]
    metadata = json.loads((tmp_path / "preprocessed/train/shard_000000.json").read_text())
    assert metadata["keys"] == ["wide"]
    assert "31 x 31 pixels, 32 are needed on each side" in metadata["dropped"][0]


@pytest.mark.parametrize(
    ("changes", "field", "message"),
    [
        ({"preprocess": {"shard_size": 5}}, "train", "other settings (shard_size)"),
        ({"encoders": {"precision": "bfloat16"}}, "train", "other settings (encoders)"),
        ({"preprocess": {"validation": "train"}}, "validation", "another data set"),
    ],
    ids=["shard_size", "precision", "foreign"],
)
def test_a_folder_with_another_data_set_is_refused(
    paths: RunPaths, models: Path, changes: dict[str, Any], field: str, message: str
) -> None:
    (paths.data / "train" / "dataset.json").write_text("{}")
    (paths.data / "preprocessed").mkdir()
    small = {"preprocess": {"train": "made"}}
    (output, _) = open_outputs(config(task="preprocess", **small), paths)
    with output.staging(0) as staging:
        output.write_settings(staging)
    with pytest.raises(ConfigError) as caught:
        open_outputs(config(task="preprocess", **merge(small, changes)), paths)
    assert caught.value.path == f"spec.run.preprocess.{field}"
    assert message in str(caught.value)


def test_a_changed_input_is_refused(tmp_path: Path, paths: RunPaths, models: Path) -> None:
    output = open_outputs(RUN, paths)[0]
    with output.staging(0) as staging:
        output.write_settings(staging)
    write_images(tmp_path / "more", 3)
    (tmp_path / "more/shard_000000.tar").rename(paths.data / "train/shard_000009.tar")
    with pytest.raises(ConfigError, match=r"other settings \(source\)"):
        open_outputs(RUN, paths)


def test_a_task_without_outputs_is_refused(tmp_path: Path) -> None:
    run = config(task="preprocess", preprocess={"train": None, "validation": None})
    with pytest.raises(ConfigError, match="must name a folder"):
        open_outputs(run, RunPaths(tmp_path, tmp_path, tmp_path))
