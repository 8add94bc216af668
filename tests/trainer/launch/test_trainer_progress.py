"""An agent reports the steps of its trainers, and makes them print their stacks if all of them stall."""

from __future__ import annotations

import pytest

from fluxtrain.contract.process import Phase
from fluxtrain.launch import torchrun
from fluxtrain.launch.torchrun import TrainerProgress, are_stalled
from fluxtrain.report.progress import RankProgress

NOW = 10_000.0


def rank(number: int, silent: float, phase: Phase = "step", step: int = 7) -> RankProgress:
    """Return a rank whose steps take a second: it may be silent for 70 seconds."""
    progressed = NOW - silent
    return RankProgress(number, 100 + number, phase, step, progressed - 9, progressed, 1.0)


@pytest.mark.parametrize(
    ("ranks", "fraction", "stalled"),
    [
        ([], 0.5, False),
        ([rank(0, 34)], 0.5, False),
        ([rank(0, 35)], 0.5, True),
        ([rank(0, 7)], 0.1, True),
        ([rank(0, 35), rank(1, 34)], 0.5, False),
        ([rank(0, 35), rank(1, 35, "save")], 0.5, False),
        ([rank(0, 35), rank(1, 1800, "save")], 0.5, True),
        ([rank(0, -1)], 0.5, False),
    ],
)
def test_a_node_stalls_if_all_its_ranks_do(
    ranks: list[RankProgress], fraction: float, stalled: bool
) -> None:
    assert are_stalled(ranks, NOW, fraction) == stalled


def test_stacks_are_printed_once_for_each_stall(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks, printed, steps = [rank(0, 40)], list[int](), list[list[int]]()
    monkeypatch.setattr(torchrun, "read_ranks", lambda: ranks)
    monkeypatch.setattr(torchrun, "print_stacks", lambda of: printed.append(len(of)))
    monkeypatch.setattr(torchrun.time, "monotonic", lambda: NOW)
    progress = TrainerProgress(lambda of: steps.append([rank.step for rank in of]))
    progress.poll()
    progress.poll()
    progress.print_if_stalled()
    assert (printed, steps) == ([1], [[7], [7]])
    ranks[:] = [rank(0, 1, step=8)]
    progress.poll()
    ranks[:] = [rank(0, 8, step=8)]
    progress.poll()
    assert printed == [1], "too early, unless it is stopped"
    progress.print_if_stalled()
    assert (printed, steps) == ([1, 1], [[7], [7], [8], [8]])
