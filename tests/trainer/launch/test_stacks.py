"""Whose stacks are printed: on demand, and if all trainers of an agent stall."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.trainer.commands import children
from tests.trainer.rank_processes import proc_with, rank_process

from fluxtrain.contract.process import Phase, RankProcess, read_ranks
from fluxtrain.launch import torchrun
from fluxtrain.launch.stacks import ask_ranks
from fluxtrain.launch.torchrun import TrainerProgress, are_stalled
from fluxtrain.report.progress import RankProgress


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_ranks_are_asked_in_their_order_and_continue(tmp_path: Path) -> None:
    with rank_process(1) as second, rank_process(0) as first:
        processes = list(ask_ranks(proc_with(tmp_path, second, first)))
        assert [(p.rank, p.pid, p.asked) for p in processes] == [
            (0, first, True),
            (1, second, True),
        ]
        assert processes[0].time < processes[1].time
        assert state_of(first) != "Z"
        assert state_of(second) != "Z"


def test_a_process_without_a_handler_is_not_ended(tmp_path: Path) -> None:
    with rank_process(3, handler=False) as pid:
        (process,) = ask_ranks(proc_with(tmp_path, pid))
        assert not process.asked
        time.sleep(0.1)
        assert state_of(pid) != "Z"


def test_processes_that_a_rank_has_started_are_not_asked(tmp_path: Path) -> None:
    with rank_process(0, child=True) as pid:
        (child,) = children(pid)
        processes = list(ask_ranks(proc_with(tmp_path, pid, child)))
        assert [p.pid for p in processes] == [pid]


def test_a_stopped_process_is_reported_as_stopped(tmp_path: Path) -> None:
    with rank_process(0) as pid:
        os.kill(pid, signal.SIGSTOP)
        while state_of(pid) != "T":
            time.sleep(0.01)
        (process,) = ask_ranks(proc_with(tmp_path, pid))
        assert process.state == "T"


def test_other_processes_and_ended_ones_are_not_asked(tmp_path: Path) -> None:
    gone = subprocess.run(
        [sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True
    )
    assert list(ask_ranks(proc_with(tmp_path, os.getpid(), int(gone.stdout)))) == []


def test_the_output_can_be_read_again() -> None:
    ranks = [RankProcess(0, 7, "S", 1.5), RankProcess(12, 9, "T", 2.5, asked=False)]
    assert read_ranks("\n".join(["a warning", *(rank.to_json() for rank in ranks)])) == ranks


def test_other_output_is_skipped() -> None:
    assert read_ranks('[1]\n{"rank": 0}\n{"rank": "x", "pid": 1}\nnull\n' + "[" * 9999) == []


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
