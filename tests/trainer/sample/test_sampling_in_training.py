"""Images during a training: the same prompts and seeds each time, and failures that end nothing."""

from __future__ import annotations

import time
import urllib.request
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from cluster.free_ports import free_port
from PIL import Image
from tests.trainer import in_process, ranks
from tests.trainer.small_runs import IMAGES, merge_all
from tests.trainer.tiny_encoders import BASE, SIDE, write_encoders, write_images

from fluxtrain.contract.process import RunPaths
from fluxtrain.contract.run.config import RunConfig
from fluxtrain.contract.run.resolve import resolve
from fluxtrain.parallel.distributed import World
from fluxtrain.sample.grid import GridContents, GridSampler

PROMPTS = """
# what a person looks at
a red circle --d 3
a blue line --w 64 --h 32 --s 2 --l 3 --n a green dot
"""
RUN: dict[str, Any] = merge_all(
    BASE,
    IMAGES,
    {
        "schedule": {"steps": 4, "global_batch_size": 4, "warmup_steps": 0},
        "evaluation": {"every_samples": 0},
        "checkpoint": {"every_steps": 0, "memory_every_steps": 0},
        "sampling": {
            "prompt_file": "prompts.txt",
            "every_steps": 2,
            "num_steps": 3,
            "num_prompts": 1,
            "cfg_scale": 1.0,
        },
    },
)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with data, prompts and encoders."""
    folder = tmp_path_factory.mktemp("root")
    write_images(folder / "train", 8)
    write_images(folder / "validation", 4, timesteps=True)
    write_encoders(folder)
    (folder / "prompts.txt").write_text(PROMPTS)
    return folder


def finish(
    root: Path, output: Path, *changes: dict[str, Any], code: int = 0, says: str = ""
) -> str:
    """Train on one rank, which must end with ``code``, and say ``says``; return what it printed."""
    paths = RunPaths(output, root, root)
    codes = in_process.finish(ranks.train_alone, resolve(merge_all(RUN, *changes)), paths)
    printed = ranks.output_of(paths)
    assert codes == [code], printed
    assert says in printed
    return printed


def pixels_of(path: Path) -> Any:
    with Image.open(path) as image:
        return np.asarray(image, dtype=np.int64)


def fields_of(path: Path) -> dict[str, str]:
    with Image.open(path) as image:
        return {key: str(value) for key, value in image.info.items()}


def test_each_image_has_its_file_with_its_settings(root: Path, tmp_path: Path) -> None:
    finish(root, tmp_path)
    samples = tmp_path / "samples"
    names = {path.name for path in samples.iterdir()}
    folders = {"step_0000002", "step_0000004"}
    assert names == {"originals", *folders, *(f"{name}.png" for name in folders)}
    for name in folders:
        assert [path.name for path in sorted((samples / name).iterdir())] == [
            *("00.png", "01.png", "02.png")
        ]
    first, last = (fields_of(samples / name / "01.png") for name in sorted(folders))
    expected = {
        "prompt": "a blue line",
        "negative_prompt": "a green dot",
        "seed": "1234",
        "index": "1",
        "steps": "2",
        "cfg_scale": "3.0",
        "step": "4",
    }
    assert expected.items() <= last.items()
    assert first.pop("model") != last.pop("model")
    assert first == last | {"step": "2"}
    with Image.open(samples / "step_0000002" / "01.png") as image:
        assert image.size == (64, 32)
    with Image.open(samples / "step_0000002" / "02.png") as image:
        assert image.size == (SIDE, SIDE)
    page = (tmp_path / "gallery.html").read_text()
    assert page.count("<img ") == 3 * 2 + 1, "three prompts at two steps, and an original"
    assert all(text in page for text in ("a blue line", "without: a green dot", "success"))
    before, after = (samples / name / "00.png" for name in sorted(folders))
    assert Image.open(before).tobytes() != Image.open(after).tobytes()


def test_equal_runs_make_equal_images_whatever_else_is_sampled(root: Path, tmp_path: Path) -> None:
    (root / "one.txt").write_text("a red circle --d 3\n")
    one = {"prompt_file": "one.txt", "num_prompts": 0, "every_steps": 4, "at_start": True}
    finish(root, tmp_path / "one", {"sampling": one})
    finish(root, tmp_path / "all")
    name = "samples/step_0000004/00.png"
    alone, beside = (pixels_of(tmp_path / run / name) for run in ("one", "all"))
    assert np.abs(alone - beside).max() <= 1, "of 255: another batch, another order of sums"
    start = fields_of(tmp_path / "one/samples/step_0000000/00.png")
    assert start["step"] == "0"
    assert not (tmp_path / "all/samples/step_0000000").exists()


def test_prompts_are_read_anew_each_time_and_kept_if_they_are_wrong(
    root: Path, tmp_path: Path
) -> None:
    file, load = root / "changing.txt", GridSampler._load_contents
    file.write_text("first --d 3")
    texts = iter(["second --d 3\nthird", "wrong --ss euler", "fourth"])

    def change(sampler: GridSampler) -> GridContents:
        contents = load(sampler)
        file.write_text(next(texts))
        return contents

    sampling = {"prompt_file": "changing.txt", "every_steps": 1}
    changes = {"sampling": sampling, "schedule": {"steps": 3}}
    with mock.patch.object(GridSampler, "_load_contents", change):
        finish(root, tmp_path, changes, says="the prompts of before are sampled")
    prompts = [
        [fields_of(path)["prompt"] for path in sorted(folder.glob("*.png"))]
        for folder in sorted((tmp_path / "samples").glob("step_*/"))
    ]
    assert [each[:-1] for each in prompts] == [["first"], ["second", "third"], ["second", "third"]]


def test_images_that_cannot_be_written_end_no_training(root: Path, tmp_path: Path) -> None:
    (tmp_path / "samples").write_text("not a folder")
    log = finish(root, tmp_path)
    for step in (2, 4):
        assert f"no sample images at step {step}: rank 0: " in log
    assert "sample images at step 2: " not in log.replace("no sample images", "")
    assert list(tmp_path.glob("checkpoints/step_*4/DONE"))


def page_at(address: str) -> str:
    with urllib.request.urlopen(address) as answer:
        text: str = answer.read().decode()
        return text


def test_the_page_of_a_run_is_at_its_port(root: Path, tmp_path: Path) -> None:
    pages, write = list[str](), GridSampler.write
    awaited = iter([("2 of 4", 1), ("<img ", 4)])

    def look(sampler: GridSampler, *arguments: Any) -> bool:
        address = f"http://127.0.0.1:{sampler.world.progress.read()['port']}/"
        # a thread takes the records and images, and the page is made at most once in two seconds
        (text, times), deadline = next(awaited), time.monotonic() + 120
        while (page := page_at(address)).count(text) < times and time.monotonic() < deadline:
            time.sleep(0.2)
        pages.append(page)
        return write(sampler, *arguments)

    with mock.patch.object(GridSampler, "write", look):
        finish(root, tmp_path, {"logging": {"metrics_port": None, "every_steps": 1}})
    first, second = pages
    assert "<dd>sample</dd>" in first
    assert "2 of 4" in first
    assert "step 2" in second, "the images of the first time"
    assert second.count("<img ") == 4


NO_AUTOENCODER = {
    "data": {"source": "synthetic"},
    "encoders": {"autoencoder": "none.safetensors"},
}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sampling": {"prompt_file": "none.txt"}}, "none.txt: cannot be read (No such file"),
        (
            {"sampling": {"prompt_file": None, "num_prompts": 0}},
            "must be at least 1 without prompts",
        ),
        (NO_AUTOENCODER, "none.safetensors: missing; the encoders need it"),
    ],
)
def test_what_is_needed_later_is_checked_before_the_first_step(
    root: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    finish(root, tmp_path, changes, code=2, says=message)
    assert not (tmp_path / "metrics.jsonl").exists()


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3])
def test_ranks_share_the_images(root: Path, tmp_path: Path, size: int) -> None:
    lines = [f"{index} --d {index} --s {2 + index % 2}" for index in range(5)]
    (root / "five.txt").write_text("\n".join([*lines, "wide --w 64 --h 32 --l 3"]))
    first = {"prompt_file": "five.txt", "every_steps": 4, "at_start": True}
    config, runs = resolve(merge_all(RUN, {"sampling": first})), []
    for ranks_of_run in (1, size):
        paths = RunPaths(tmp_path / f"{ranks_of_run}", root, root)
        run = partial(ranks.train_together, port=free_port())
        codes = ranks.finish(run, config, paths, ranks_of_run)
        assert codes == [0] * ranks_of_run, ranks.output_of(paths)
        folder = paths.output / "samples" / "step_0000000"
        runs.append([pixels_of(path) for path in sorted(folder.iterdir())])
    alone, together = runs
    assert len(alone) == len(together) == 7
    for index, (one, other) in enumerate(zip(alone, together, strict=True)):
        assert np.abs(one - other).max() <= 1, f"image {index}: of 255, another batch"


def train_without_images_on_rank_1(
    config: RunConfig, paths: RunPaths, world: World, *, port: int
) -> None:
    """Train as one of two ranks, of which the second cannot encode the prompts at step 2."""
    load = GridSampler._load_contents

    def fail(sampler: GridSampler) -> GridContents:
        if sampler.world.rank == 1 and not hasattr(sampler, "failed"):
            sampler.failed = True  # type: ignore[attr-defined]
            raise MemoryError("no memory for T5")
        return load(sampler)

    GridSampler._load_contents = fail  # type: ignore[method-assign]
    ranks.train_together(config, paths, world, port=port)


@pytest.mark.slow
def test_one_rank_that_cannot_sample_ends_no_training(root: Path, tmp_path: Path) -> None:
    paths = RunPaths(tmp_path, root, root)
    run = partial(train_without_images_on_rank_1, port=free_port())
    assert ranks.finish(run, resolve(RUN), paths, 2) == [0, 0]
    text = (
        "no sample images at step 2: rank 1: MemoryError: no memory for T5; the training continues"
    )
    assert text in ranks.output_of(paths, 1)
    assert not (tmp_path / "samples" / "step_0000002").exists()
    assert (tmp_path / "samples" / "step_0000004" / "00.png").exists()
