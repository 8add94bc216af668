"""The length of a training in passes over its samples."""

from __future__ import annotations

import math
from pathlib import Path
from shutil import rmtree

import pytest
from tests.trainer import in_process, ranks
from tests.trainer.outputs import losses
from tests.trainer.small_runs import ENCODED_RUN, NUM_SAMPLES, merge_all, write_encoded

from fluxtrain.contract.process import RunPaths
from fluxtrain.contract.run.resolve import resolve
from fluxtrain.errors import EXIT_USAGE
from fluxtrain.launch.torchrun import finished_state
from fluxtrain.plan.estimate import make_plan
from fluxtrain.plan.table import render
from fluxtrain.state.run_state import changed_decay, folder_of

BATCH = 12


KEPT = {"checkpoint": {"every_steps": 4, "keep": 5}}


def finish(output: Path, epochs: int) -> None:
    config = resolve(merge_all(ENCODED_RUN, KEPT, {"schedule": {"epochs": epochs}}))
    paths = RunPaths(output, output, output)
    assert in_process.finish(ranks.train_alone, config, paths) == [0], ranks.output_of(paths)
    assert finished_state(config, output) is None  # the ranks decide


def test_epochs_give_the_number_of_steps_also_when_more_are_asked_for(tmp_path: Path) -> None:
    write_encoded(tmp_path)
    for epochs in (3, 3, 5):  # the second run finds nothing to do, the third goes on
        finish(tmp_path, epochs)
        assert max(losses(tmp_path)) == math.ceil(epochs * NUM_SAMPLES / BATCH)
    assert list(losses(tmp_path)) == list(range(1, 10))
    told = ranks.output_of(RunPaths(tmp_path, tmp_path, tmp_path))
    assert "5 epochs of 21 samples are 9 steps" in told


@pytest.mark.parametrize(
    ("schedule", "line"),
    [
        ({"epochs": 1}, "spec.run.schedule.epochs: got 1; are 2 steps, but 4 are taken already"),
        ({"steps": 3}, "spec.run.schedule.steps: got 3; are 3 steps, but 4 are taken already"),
        ({"steps": 4}, "spec.run.schedule.steps: got 4; are 4 steps, but 4 are taken already"),
    ],
    ids=("epochs", "fewer steps", "as many steps"),
)
def test_a_run_that_was_stopped_cannot_get_less_than_it_has_done(
    tmp_path: Path, schedule: dict[str, int], line: str
) -> None:
    write_encoded(tmp_path)
    finish(tmp_path, 3)
    rmtree(folder_of(tmp_path / "checkpoints", 6))  # as if it had been stopped after step 4
    config = resolve(merge_all(ENCODED_RUN, KEPT, {"schedule": schedule}))
    paths = RunPaths(tmp_path, tmp_path, tmp_path)
    assert in_process.finish(ranks.train_alone, config, paths) == [EXIT_USAGE]
    told = [it for it in ranks.output_of(paths).splitlines() if "taken already" in it]
    assert told == [f"{line}; set more, or use another --output for a shorter run"]
    assert max(losses(tmp_path)) == 6, "nothing was trained"
    finish(tmp_path, 3)


def test_a_complete_run_stays_complete_if_less_is_asked_for(tmp_path: Path) -> None:
    write_encoded(tmp_path)
    for epochs in (3, 1):
        finish(tmp_path, epochs)
        assert max(losses(tmp_path)) == 6


@pytest.mark.parametrize(("decay", "told"), [("cosine", True), ("constant", False)])
def test_a_longer_run_is_told_that_its_learning_rate_decayed_to_another_end(
    tmp_path: Path, decay: str, told: bool
) -> None:
    write_encoded(tmp_path)
    schedule = {"steps": 2, "decay": decay}
    config = resolve(merge_all(ENCODED_RUN, {"schedule": schedule}))
    paths = RunPaths(tmp_path, tmp_path, tmp_path)
    assert in_process.finish(ranks.train_alone, config, paths) == [0], ranks.output_of(paths)
    assert changed_decay(config, tmp_path / "checkpoints") == ""
    longer = resolve(merge_all(ENCODED_RUN, {"schedule": {**schedule, "steps": 4}}))
    note = changed_decay(longer, tmp_path / "checkpoints")
    assert note.startswith("spec.run.schedule.steps was 2 and is 4: learning rates decayed") == told
    assert bool(note) == told


def test_a_plan_of_epochs_has_no_time() -> None:
    plan = make_plan(resolve({"preset": "dev-lora", "schedule": {"epochs": 3}}), 1, 8)
    assert (plan.steps, plan.seconds) == (None, None)
    assert "as many steps as the data give: fluxtrain data check -f tells" in render(plan)
