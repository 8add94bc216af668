"""``seed: random``: drawn once per output folder, the same on all ranks and after a resume."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.paths import MICRO
from tests.trainer import ranks
from tests.trainer.commands import fluxtrain
from tests.trainer.outputs import mlperf_events

from fluxtrain.contract.process import CHECKPOINTS_FOLDER, RunPaths
from fluxtrain.contract.run.config import LARGEST_SEED, RunConfig
from fluxtrain.contract.run.resolve import resolve
from fluxtrain.errors import EXIT_OK, ConfigError, StorageError
from fluxtrain.parallel.distributed import World, process_group
from fluxtrain.state import run_state
from fluxtrain.state.random_seed import settled_seed, with_seed

RANDOM = resolve({"preset": "micro", "seed": "random"})


def tell(config: RunConfig, paths: RunPaths, world: World) -> None:
    """Write the seed that this rank has."""
    with process_group() as joined:
        seed = with_seed(config, paths.output, joined).drawn_seed
        (paths.output / f"told_{joined.rank}").write_text(str(seed))


def write_checkpoint(output: Path, config: RunConfig) -> Path:
    folder = run_state.folder_of(output / CHECKPOINTS_FOLDER, 25)
    folder.mkdir(parents=True)
    (folder / run_state.CONFIG_FILE).write_text(config.model_dump_json())
    (folder / run_state.DONE).touch()
    return folder


def test_each_output_has_its_own_seed_and_keeps_it(tmp_path: Path) -> None:
    first = [settled_seed(tmp_path / str(number)) for number in range(8)]
    again = [settled_seed(tmp_path / str(number)) for number in range(8)]
    assert first == again
    assert len(set(first)) == 8
    assert all(0 <= seed <= LARGEST_SEED for seed in first)
    assert len({seed >> 49 for seed in first}) > 1, "the whole range is used"


def test_all_ranks_have_the_same(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path, tmp_path, tmp_path)
    for _ in range(2):  # the second time, as after a restart
        assert ranks.finish(tell, RANDOM, paths, 2) == [0, 0]
        told = {(tmp_path / f"told_{rank}").read_text() for rank in range(2)}
        assert told == {(tmp_path / "seed").read_text().strip()}


def test_a_number_is_kept_as_it_is(tmp_path: Path) -> None:
    config = resolve({"preset": "micro", "seed": 7})
    assert with_seed(config, tmp_path, World.alone()).drawn_seed == 7
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_began_with_a_number_goes_on_with_it(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path, resolve({"preset": "micro", "seed": 7}))
    run_state.check_same_run(RANDOM, checkpoint)
    assert settled_seed(tmp_path) == 7


def test_another_number_than_the_drawn_one_is_refused(tmp_path: Path) -> None:
    drawn = with_seed(RANDOM, tmp_path, World.alone())
    checkpoint = write_checkpoint(tmp_path, drawn)
    with pytest.raises(ConfigError, match=f"trained with {drawn.seed}"):
        run_state.check_same_run(resolve({"preset": "micro", "seed": 7}), checkpoint)


@pytest.mark.parametrize("text", ["", "x", "-1", "1.5", str(LARGEST_SEED + 1), "1" * 5000])
def test_a_file_that_holds_no_seed_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "seed").write_text(text)
    with pytest.raises(StorageError, match="not a seed; remove it"):
        settled_seed(tmp_path)


def test_a_resumed_run_has_the_seed_of_its_output(tmp_path: Path) -> None:
    for steps in (2, 4):
        arguments = ("--seed=random", f"--schedule.steps={steps}", f"--output={tmp_path}")
        ended = fluxtrain("run", str(MICRO), *arguments)
        assert ended.returncode == EXIT_OK, ended.stderr
    drawn = int((tmp_path / "seed").read_text())
    assert [e["value"] for e in mlperf_events(tmp_path) if e["key"] == "seed"] == [drawn]
    for folder in run_state.complete(tmp_path / CHECKPOINTS_FOLDER):
        assert run_state.read_config(folder)["seed"] == drawn
    assert json.loads((tmp_path / "config.json").read_text())["seed"] == "random"
