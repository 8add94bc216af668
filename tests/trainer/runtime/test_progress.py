"""Phases and progress of a process, by its own clock."""

from __future__ import annotations

from typing import get_args

import pytest

from fluxtrain.contract.process import (
    COMPILE,
    EVALUATE,
    LOAD,
    PHASE_SECONDS,
    SAVE,
    STEP,
    Phase,
    phase_of,
    stall_seconds,
)
from fluxtrain.runtime.progress import Progress


class Clock:
    """A clock that is set by hand."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_times_are_measured_by_the_clock_of_the_process() -> None:
    clock = Clock()
    progress = Progress(clock)
    clock.now += 5
    values = progress.read()
    assert (values["phase"], values["secondsInPhase"], values["secondsSinceProgress"]) == (
        "import",
        5.0,
        5.0,
    )
    progress.enter(LOAD)
    clock.now += 10
    progress.alive()
    clock.now += 2
    values = progress.read()
    assert (values["phase"], values["secondsInPhase"], values["secondsSinceProgress"]) == (
        "load",
        12.0,
        2.0,
    )
    assert values["phaseSeconds"] == {"import": 5.0, "load": 12.0}
    assert "stepSeconds" not in values


def test_the_mean_time_of_a_step_leaves_out_other_phases() -> None:
    clock = Clock()
    progress = Progress(clock)
    progress.enter(COMPILE)
    clock.now += 500
    progress.step_done(step=1)
    assert "stepSeconds" not in progress.read(), "the first step compiles"
    progress.enter(STEP)
    for step in (2, 3, 4):
        clock.now += 2
        progress.step_done(step=step)
        before = progress.phase
        progress.enter(SAVE)
        clock.now += 100
        progress.enter(before)
    values = progress.read()
    assert (values["step"], values["stepSeconds"], values["secondsInPhase"]) == (4, 2.0, 0.0)
    assert values["phaseSeconds"] == {"import": 0.0, "compile": 500.0, "step": 6.0, "save": 300.0}
    clock.now += 1000
    assert progress.read()["stepSeconds"] == 2.0, "a hang makes no step longer"


def test_the_time_since_the_last_step_does_not_follow_the_wall_clock(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock()
    progress = Progress(clock)
    assert "secondsSinceStep" not in progress.read(), "there was no step"
    progress.step_done(step=1)
    assert progress.read()["secondsSinceStep"] == 0.0
    clock.now += 5
    monkeypatch.setattr("fluxtrain.runtime.progress.time.time", lambda: 1.0)
    progress.enter(EVALUATE)
    clock.now += 2
    progress.alive()
    assert progress.read()["secondsSinceStep"] == 7.0
    progress.step_done()
    assert progress.read()["secondsSinceStep"] == 0.0


def test_the_same_phase_again_is_progress_in_it() -> None:
    clock = Clock()
    progress = Progress(clock)
    clock.now += 5
    progress.enter("import")
    values = progress.read()
    assert (values["secondsInPhase"], values["secondsSinceProgress"]) == (5.0, 0.0)


@pytest.mark.parametrize(
    ("name", "phase"),
    [
        *((phase, phase) for phase in get_args(Phase)),
        ("running", None),
        ("walking", None),
        ("", None),
        (None, None),
        (7, None),
        ([], None),
    ],
)
def test_a_phase_is_known_by_its_name_only(name: object, phase: Phase | None) -> None:
    assert phase_of(name) == phase


def test_every_phase_has_a_limit_and_that_of_steps_is_learned() -> None:
    assert set(PHASE_SECONDS) == set(get_args(Phase))
    for phase in get_args(Phase):
        learned = (phase == STEP) * (70 - PHASE_SECONDS[STEP])
        assert stall_seconds(phase, 1.0) == PHASE_SECONDS[phase] + learned
        assert stall_seconds(phase, None) == PHASE_SECONDS[phase]
    assert stall_seconds(STEP, 1e9) == 3600
