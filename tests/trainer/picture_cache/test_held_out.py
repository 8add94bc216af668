"""Pictures that are held out: never trained, evaluated at all timesteps, the same for any start and rank."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from cluster.free_ports import free_port
from tests.trainer.outputs import mlperf_values
from tests.trainer.picture_cache.folders import cache, config, write_pictures
from tests.trainer.ranks import finish, output_of, train_alone, train_together

from fluxtrain.cli import main
from fluxtrain.contract.process import RunPaths
from fluxtrain.contract.run.config import RunConfig
from fluxtrain.data.pictures.dataset import FILE
from fluxtrain.data.pictures.subset import held_out
from fluxtrain.errors import ConfigError
from fluxtrain.parallel.distributed import World

pytestmark = pytest.mark.slow

COUNT = 9
HASHES = [f"{number:064x}" for number in range(40)]


@pytest.fixture
def paths(tmp_path: Path, models: Path) -> RunPaths:
    write_pictures(tmp_path / "data/pictures", COUNT)
    return RunPaths(tmp_path / "output", tmp_path / "data", models)


def split(part: float, **data: object) -> RunConfig:
    evaluation = {"every_samples": 4, "at_start": True, "at_end": True, "batch_size": 5}
    return config(data={"validation_split": part, **data}, evaluation=evaluation)


@pytest.mark.parametrize(
    ("part", "count", "expected"),
    [(0, 9, 0), (0.1, 9, 1), (0.01, 9, 1), (0.5, 9, 4), (0.5, 2, 1), (0.1, 40, 4), (0.5, 3, 2)],
)
def test_the_part_is_held_out_and_at_least_one(part: float, count: int, expected: int) -> None:
    chosen = held_out(HASHES[:count], part, 7)
    assert len(chosen) == expected
    assert held_out(reversed(HASHES[:count]), part, 7) == chosen
    assert chosen <= set(HASHES[:count])


def test_another_seed_holds_out_others_and_equal_pictures_stay_together() -> None:
    assert held_out(HASHES, 0.5, 1) != held_out(HASHES, 0.5, 2)
    assert held_out([*HASHES, *HASHES], 0.5, 1) == held_out(HASHES, 0.5, 1)


@pytest.mark.parametrize("count", [0, 1])
def test_without_a_picture_to_train_it_is_refused(count: int) -> None:
    with pytest.raises(ConfigError, match="needs two different pictures"):
        held_out(HASHES[:count] * 2, 0.1, 7)


def test_each_held_out_picture_is_a_sample_at_each_timestep(paths: RunPaths) -> None:
    run = split(0.3, repeats=4, variants={"flip": True})
    opened = cache(run, paths, World.alone()).open(run, paths.output)
    assert opened.validation is not None
    names = {entry.name for entry in opened.train.entries}
    evaluated = [entry.name for entry in opened.validation.entries]
    assert len(evaluated) == 3
    assert not names & set(evaluated)
    assert len(names) == COUNT - 3
    assert len(opened.validation) == 3 * 8
    report = json.loads((paths.output / "pictures.json").read_text())
    assert (report["used"], report["held_out"]) == (COUNT - 3, evaluated)
    indices = np.arange(24)
    assert opened.validation.timesteps(indices).tolist() == list(range(8)) * 3
    assert [opened.validation.key(int(i)) for i in indices] == [
        n for n in evaluated for _ in range(8)
    ]


def test_a_continued_run_keeps_those_that_it_held_out(paths: RunPaths) -> None:
    run = split(0.3)
    first = cache(run, paths, World.alone()).open(run, paths.output)
    write_pictures(paths.data / "pictures", 2 * COUNT)
    again = cache(run, paths, World.alone(), is_new=False)
    opened = again.open(run, paths.output)
    assert first.validation is not None
    assert opened.validation is not None
    assert opened.validation.entries == first.validation.entries
    assert opened.train.entries == first.train.entries


def test_a_run_evaluates_them_and_its_losses_do_not_depend_on_the_batch(paths: RunPaths) -> None:
    losses = []
    for size in (5, 24):
        run = split(0.3)
        run = run.model_copy(
            update={"evaluation": run.evaluation.model_copy(update={"batch_size": size})}
        )
        output = RunPaths(paths.output / str(size), paths.data, paths.models)
        train_alone(run, output, World.alone())
        losses.append(mlperf_values(output.output, "eval_accuracy"))
        assert mlperf_values(output.output, "eval_samples") == [24]
    assert len(losses[0]) >= 3
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


@pytest.mark.parametrize("sizes", [[], [16, 32]], ids=["squares", "two resolutions"])
def test_any_number_of_ranks_gives_the_same_evaluation(paths: RunPaths, sizes: list[int]) -> None:
    buckets = {"resolutions": sizes, "step": 16, "max_side": 64} if sizes else None
    found = []
    for size in (1, 2, 3):
        run = split(0.3, buckets=buckets, cache="cache")
        output = RunPaths(paths.output / str(size), paths.data, paths.models)
        together = partial(train_together, port=free_port())
        assert finish(together, run, output, size) == [0] * size, output_of(output)
        found.append(mlperf_values(output.output, "eval_accuracy"))
        assert mlperf_values(output.output, "eval_samples") == [24 * max(1, len(sizes))]
    assert found[0] == pytest.approx(found[1], rel=1e-5)
    assert found[0] == pytest.approx(found[2], rel=1e-5)


def test_regularisation_images_are_not_held_out(paths: RunPaths) -> None:
    write_pictures(paths.data / "reg", 2)
    for path in (paths.data / "reg").iterdir():
        path.rename(path.with_name(f"r{path.name}"))
    subsets = [{"image_dir": "pictures"}, {"image_dir": "reg", "is_reg": True}]
    (paths.data / "set.json").write_text(json.dumps({"datasets": [{"subsets": subsets}]}))
    run = split(0.5, images="set.json")
    cache(run, paths, World.alone()).open(run, paths.output)
    stored = json.loads((paths.output / FILE).read_text())
    assert {each["name"].partition("/")[0] for each in stored["validation"]} == {"pictures"}


def test_a_regularisation_image_that_equals_a_held_out_picture_is_not_trained(
    paths: RunPaths,
) -> None:
    write_pictures(paths.data / "reg", COUNT)  # the same bytes
    subsets = [{"image_dir": "pictures"}, {"image_dir": "reg", "is_reg": True}]
    (paths.data / "set.json").write_text(json.dumps({"datasets": [{"subsets": subsets}]}))
    opened = cache(split(0.3, images="set.json"), paths, World.alone()).open(
        split(0.3, images="set.json"), paths.output
    )
    assert opened.validation is not None
    held = {Path(entry.name).name for entry in opened.validation.entries}
    trained = [entry.name for entry in opened.train.entries]
    assert len(held) == 3
    assert not held & {Path(name).name for name in trained}
    assert len(trained) == 2 * (COUNT - 3)


def test_data_check_tells_how_many_are_held_out(
    paths: RunPaths, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--data.validation_split=0.3", "--evaluation.at_end=true", "--image-size=32"]
    sheet = f"--contact-sheet={paths.data / 'sheet.png'}"
    assert main(["data", "check", "pictures", "--data", str(paths.data), sheet, *options]) == 0
    printed = capsys.readouterr().out
    assert "held out for the evaluation: 3 pictures, at eight timesteps each" in printed
    assert "an epoch: 60 samples" in printed  # of ten repeats, as init writes them


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"data": {"validation": "v"}}, "spec.run.data.validation: got 'v'; must be none if"),
        (
            {"evaluation": {"every_samples": 0}},
            "spec.run.data.validation_split: got 0.1; needs an eval",
        ),
    ],
)
def test_what_does_not_go_with_it_is_refused(
    changes: dict[str, dict[str, object]], says: str
) -> None:
    data = {"validation_split": 0.1, **changes.get("data", {})}
    with pytest.raises(ConfigError, match=says):
        config(**{**changes, "data": data})
