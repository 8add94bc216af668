"""The own time of a rank: what counts of a step, and what is waiting for others. The clock is set by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import astuple

import pytest
import torch

from fluxtrain.runtime.step_times import StepTimes


class HandClock:
    """A clock that passes only by `passes`."""

    now = 100.0

    def __call__(self) -> float:
        return self.now

    def passes(self, seconds: float) -> None:
        self.now += seconds


def measured(take_step: Callable[[StepTimes, HandClock], None], num_steps: int = 1) -> list[float]:
    """Return the times of compute, data, backward and optimizer after ``num_steps``, all of them measured."""
    clock, times = HandClock(), StepTimes(torch.device("cpu"))
    times._mark = clock
    for _ in range(num_steps):
        times.begin_step(is_measured=True)
        take_step(times, clock)
    return [round(value, 6) for value in astuple(times.take())]


def block_backward(times: StepTimes, clock: HandClock, seconds: float, wait: float) -> None:
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
    def step(times: StepTimes, clock: HandClock) -> None:
        with times.backward():
            clock.passes(1.0)  # the loss
            for _ in range(num_blocks):
                block_backward(times, clock, 2.0, wait)
            clock.passes(wait)  # reductions are awaited

    assert measured(step) == [0, 0, 1.0 + 2.0 * num_blocks, 0]


def test_without_other_ranks_all_of_it_counts() -> None:
    def step(times: StepTimes, clock: HandClock) -> None:
        with times.forward():
            clock.passes(1.0)
        with times.backward():
            clock.passes(2.0)
        with times.optimizer():
            clock.passes(0.5)

    assert measured(step) == [1.0, 0, 2.0, 0.5]


def test_a_block_with_two_outputs_waits_once() -> None:
    """FSDP2 has a hook on each output; the gradient of the second one is computed before its hook."""

    def step(times: StepTimes, clock: HandClock) -> None:
        with times.backward():
            times.gather_begins()
            clock.passes(4.0)
            times.gather_ends()
            clock.passes(0.25)
            block_backward(times, clock, 2.0, 0.0)

    assert measured(step) == [0, 0, 2.25, 0]


def test_micro_batches_add_up_and_waits_for_data_are_of_all_steps() -> None:
    def step(times: StepTimes, clock: HandClock) -> None:
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
    clock, times = HandClock(), StepTimes(torch.device("cpu"))
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
