"""A training on a folder of pictures: without a validation set, resumed, and on several ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.trainer import in_process, ranks
from tests.trainer.picture_cache import folders
from tests.trainer.picture_cache.folders import RUN, config, write_pictures

from fluxtrain.contract.process import RunPaths
from fluxtrain.contract.run.resolve import merge, resolve
from fluxtrain.errors import ConfigError, DataError
from fluxtrain.launch.torchrun import check_before_starting


@pytest.fixture(scope="module")
def roots(tmp_path_factory: pytest.TempPathFactory, models: Path) -> RunPaths:
    """Return roots with seven pictures, one of them cut off, and a cache that all runs share."""
    root = tmp_path_factory.mktemp("roots")
    folder = write_pictures(root / "data/pictures", 7)
    content = (folder / "004.jpg").read_bytes()
    (folder / "004.jpg").write_bytes(content[: len(content) // 2])
    return RunPaths(root / "out", root / "data", models)


def losses(output: Path) -> list[float]:
    lines = (output / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["train_loss"] for line in lines]


def train(roots: RunPaths, output: Path, size: int = 1, **changes: Any) -> list[float]:
    """Train on the shared cache; return the losses."""
    paths = RunPaths(output, roots.data, roots.models)
    shared = config(**merge({"data": {"cache": "../shared", "repeats": 2}}, changes))
    folders.train(shared, paths, size)
    return losses(output)


def test_it_trains_without_a_validation_set_and_skips_what_it_cannot_read(
    roots: RunPaths, tmp_path: Path
) -> None:
    found = train(roots, tmp_path / "one")
    assert len(found) == 3
    said = (tmp_path / "one/rank_0.txt").read_text()
    assert "7 pictures, 14 samples in an epoch · 7 pictures and" in said
    assert said.count("skipped 004.jpg: corrupt or cut off (") == 1
    report = json.loads((tmp_path / "one/pictures.json").read_text())
    assert (report["used"], report["samples"], list(report["skipped"])) == (6, 12, ["004.jpg"])
    used = (tmp_path / "one/ledger/rank_00000.jsonl").read_text().splitlines()
    epoch = [index for line in used for index in json.loads(line)["indices"]]
    assert sorted(epoch) == list(range(12))  # each of six pictures twice

    assert train(roots, tmp_path / "two", size=2) == pytest.approx(found, rel=1e-4)
    train(roots, tmp_path / "resumed", schedule={"steps": 2})
    assert train(roots, tmp_path / "resumed") == found


def refuse(roots: RunPaths, output: Path, message: str, **changes: Any) -> None:
    paths = RunPaths(output, roots.data, roots.models)
    assert in_process.finish(ranks.train_alone, config(**changes), paths) == [2]
    assert message in ranks.output_of(paths)


def test_a_model_that_the_encodings_do_not_fit_is_refused_after_one(
    roots: RunPaths, tmp_path: Path
) -> None:
    text = "spec.run.model.in_channels: got 64; the encoders give 16"
    refuse(roots, tmp_path / "a", text, model={"in_channels": 64})
    text = "spec.run.model.context_in_dim: got 32; the encoders give 16"
    refuse(roots, tmp_path / "b", text, model={"context_in_dim": 32})


def test_a_folder_in_which_nothing_can_be_used_is_refused(tmp_path: Path, roots: RunPaths) -> None:
    folder = roots.data / "broken"
    folder.mkdir()
    for name in ("a.png", "b.jpg"):
        (folder / name).write_bytes(b"no picture")
    text = "none of the 2 pictures can be used; a.png: no picture in a format that is read"
    refuse(roots, tmp_path, text, data={"images": "broken"})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data": {"images": None, "repeats": 3}}, "spec.run.data.repeats: got 3; must be 1 unless images"),
        ({"data": {"images": None, "class_tokens": "a"}}, "data.class_tokens: got 'a'; must be empty unless"),
        ({"data": {"source": "synthetic"}}, "data.images: got 'pictures'; must be null unless source"),
        ({"data": {"image_size": 64, "latent_size": 4}},
         "spec.run.data.latent_size: got 4; must be image_size / 8, or left out; image_size is 64"),
        ({"evaluation": {"at_end": True}}, "spec.run.data.validation: must name a folder, or set"),
        ({"sampling": {"at_end": True}}, "spec.run.sampling.prompts: must hold a prompt"),
        ({"task": "benchmark"}, "spec.run.data.images: got 'pictures'; must be null if task is benchmark"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)  # fmt: skip
def test_a_wrong_combination_of_fields_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(merge(RUN, changes))
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("images", "message"),
    [
        ("nothing", "nothing: missing; it should hold pictures; spec.run.data.images names it"),
        ("pictures/000.png", "000.png: is one picture; name its folder; it should hold pictures"),
        (".", ""),
    ],
)
def test_the_command_looks_at_the_folder_before_it_starts_trainers(
    roots: RunPaths, tmp_path: Path, images: str, message: str
) -> None:
    paths = RunPaths(tmp_path, roots.data, roots.models)
    run = config(data={"images": images})
    if not message:
        check_before_starting(run, paths, [1])
        paths = RunPaths(tmp_path, roots.data, tmp_path)
        message = "ae.safetensors: missing; the encoders need it"
    with pytest.raises(Exception, match=message):
        check_before_starting(run, paths, [1])


def test_the_model_of_a_fine_tuning_is_looked_for_before_pictures_are_encoded(
    roots: RunPaths, tmp_path: Path
) -> None:
    run = config(initial_weights="nowhere", adapter={"rank": 2})
    with pytest.raises(DataError, match="nowhere: missing"):
        check_before_starting(run, RunPaths(tmp_path, roots.data, roots.models), [1])
