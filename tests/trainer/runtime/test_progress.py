"""Phases, progress and own time of a process, by its own clock."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import astuple
from typing import get_args

import pytest
import torch

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
from fluxtrain.runtime.step_times import StepTimes


class Clock:
    """A clock that passes only by `passes`."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now

    def passes(self, seconds: float) -> None:
        self.now += seconds


def test_times_are_measured_by_the_clock_of_the_process() -> None:
    clock = Clock()
    progress = Progress(clock)
    clock.passes(5)
    values = progress.read()
    assert (values["phase"], values["secondsInPhase"], values["secondsSinceProgress"]) == (
        "import",
        5.0,
        5.0,
    )
    progress.enter(LOAD)
    clock.passes(10)
    progress.alive()
    clock.passes(2)
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
    clock.passes(500)
    progress.step_done(step=1)
    assert "stepSeconds" not in progress.read(), "the first step compiles"
    progress.enter(STEP)
    for step in (2, 3, 4):
        clock.passes(2)
        progress.step_done(step=step)
        before = progress.phase
        progress.enter(SAVE)
        clock.passes(100)
        progress.enter(before)
    values = progress.read()
    assert (values["step"], values["stepSeconds"], values["secondsInPhase"]) == (4, 2.0, 0.0)
    assert values["phaseSeconds"] == {"import": 0.0, "compile": 500.0, "step": 6.0, "save": 300.0}
    clock.passes(1000)
    assert progress.read()["stepSeconds"] == 2.0, "a hang makes no step longer"


def test_the_time_since_the_last_step_does_not_follow_the_wall_clock(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock()
    progress = Progress(clock)
    assert "secondsSinceStep" not in progress.read(), "there was no step"
    progress.step_done(step=1)
    assert progress.read()["secondsSinceStep"] == 0.0
    clock.passes(5)
    monkeypatch.setattr("fluxtrain.runtime.progress.time.time", lambda: 1.0)
    progress.enter(EVALUATE)
    clock.passes(2)
    progress.alive()
    assert progress.read()["secondsSinceStep"] == 7.0
    progress.step_done()
    assert progress.read()["secondsSinceStep"] == 0.0


def test_the_same_phase_again_is_progress_in_it() -> None:
    clock = Clock()
    progress = Progress(clock)
    clock.passes(5)
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


def measured(take_step: Callable[[StepTimes, Clock], None], num_steps: int = 1) -> list[float]:
    """Return the times of compute, data, backward and optimizer after ``num_steps``, all of them measured."""
    clock, times = Clock(), StepTimes(torch.device("cpu"))
    times._mark = clock
    for _ in range(num_steps):
        times.begin_step(is_measured=True)
        take_step(times, clock)
    return [round(value, 6) for value in astuple(times.take())]


def block_backward(times: StepTimes, clock: Clock, seconds: float, wait: float) -> None:
    """Compute a block's gradients after a wait for its weights; then its gradients are reduced."""
    times.gather_begins()
    clock.passes(wait)
    times.gather_ends()
    for _ in range(2):  # two inputs
        clock.passes(seconds / 2)
        times.gradient_ends()
    clock.passes(wait)


@pytest.mark.parametrize("wait", [0.0, 5.0])
@pytest.mark.parametrize("num_blocks", [1, 2, 7])
def test_a_backward_pass_counts_without_waits(num_blocks: int, wait: float) -> None:
    def step(times: StepTimes, clock: Clock) -> None:
        with times.backward():
            clock.passes(1.0)  # the loss
            for _ in range(num_blocks):
                block_backward(times, clock, 2.0, wait)
            clock.passes(wait)  # reductions are awaited

    assert measured(step) == [0, 0, 1.0 + 2.0 * num_blocks, 0]


def test_without_other_ranks_all_of_it_counts() -> None:
    def step(times: StepTimes, clock: Clock) -> None:
        with times.forward():
            clock.passes(1.0)
        with times.backward():
            clock.passes(2.0)
        with times.optimizer():
            clock.passes(0.5)

    assert measured(step) == [1.0, 0, 2.0, 0.5]


def test_a_block_with_two_outputs_waits_once() -> None:
    """FSDP2 has a hook on each output; the gradient of the second one is computed before its hook."""

    def step(times: StepTimes, clock: Clock) -> None:
        with times.backward():
            times.gather_begins()
            clock.passes(4.0)
            times.gather_ends()
            clock.passes(0.25)
            block_backward(times, clock, 2.0, 0.0)

    assert measured(step) == [0, 0, 2.25, 0]


def test_micro_batches_add_up_and_waits_for_data_are_of_all_steps() -> None:
    def step(times: StepTimes, clock: Clock) -> None:
        for _ in range(3):
            with times.waiting_for_data():
                clock.passes(0.5)
            with times.forward():
                clock.passes(1.0)
                times.gather_begins()
                clock.passes(9.0)
                times.gather_ends()
            with times.backward():
                block_backward(times, clock, 2.0, 9.0)
        with times.optimizer():
            clock.passes(0.125)

    assert measured(step) == [3.0, 1.5, 6.0, 0.125]


def test_other_steps_are_not_measured_and_an_evaluation_changes_nothing() -> None:
    clock, times = Clock(), StepTimes(torch.device("cpu"))
    times._mark = clock
    for is_measured in (False, True, False):
        times.begin_step(is_measured)
        with times.forward():
            clock.passes(1.0)
        with times.backward():
            block_backward(times, clock, 2.0, 1.0)
        with times.optimizer():
            clock.passes(3.0)
        times.gather_begins()  # an evaluation
        clock.passes(7.0)
        times.gather_ends()
        times.gradient_ends()
    assert astuple(times.take()) == pytest.approx((1.0, 0.0, 2.0, 3.0))
    assert astuple(times.take()) == (0.0, 0.0, 0.0, 0.0)
