"""The worker pool: order, bounded read-ahead, and the death of a worker or of the parent process."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest

from fluxtrain.errors import DataError, FluxtrainError
from fluxtrain.prepare.work import map_in_order


def squared(number: int) -> int:
    time.sleep(0.02 if number % 3 == 0 else 0)
    return number * number


def touching(number: int, folder: Path) -> int:
    (folder / str(number)).touch()
    return number


def failing(number: int) -> int:
    if number == 3:
        raise DataError("the third is bad")
    return number


def dying(number: int) -> int:
    if number == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return number


def sleeping(seconds: float) -> None:
    time.sleep(seconds)


@pytest.mark.parametrize("num_workers", [1, 2, 5])
def test_results_are_in_the_order_of_the_tasks(num_workers: int) -> None:
    assert list(map_in_order(squared, range(20), num_workers)) == [i * i for i in range(20)]
    assert list(map_in_order(squared, [], num_workers)) == []


def test_the_read_ahead_is_bounded(tmp_path: Path) -> None:
    num_taken = 0

    def tasks() -> Iterator[int]:
        nonlocal num_taken
        while True:
            num_taken += 1
            yield num_taken

    with closing(map_in_order(partial(touching, folder=tmp_path), tasks(), 2)) as results:
        assert [next(results) for _ in range(5)] == [1, 2, 3, 4, 5]
        assert num_taken < 12
    assert len(list(tmp_path.iterdir())) < 12


def test_no_more_workers_are_started_than_there_are_tasks() -> None:
    before = set(multiprocessing.active_children())
    with closing(map_in_order(sleeping, [0, 0.1], 10_000)) as results:
        next(results)
        assert len(set(multiprocessing.active_children()) - before) <= 2
        assert len(list(results)) == 1
    assert list(map_in_order(sleeping, [], 3)) == []


def test_an_error_is_raised_as_the_worker_raised_it() -> None:
    results = map_in_order(failing, range(9), 2)
    assert [next(results) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(DataError, match="the third is bad"):
        next(results)


@pytest.mark.parametrize("num_workers", [1, 3])
def test_the_error_for_a_dead_worker_names_its_task(num_workers: int) -> None:
    with pytest.raises(FluxtrainError, match="ended with SIGKILL at 2; out of memory"):
        list(map_in_order(dying, range(9), num_workers))


def test_closing_kills_busy_workers() -> None:
    before = set(multiprocessing.active_children())
    results = map_in_order(sleeping, [100, 0, 100], 2)
    with closing(results):
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            next(results)
    assert set(multiprocessing.active_children()) <= before


PARENT = """
import time
from fluxtrain.prepare.work import map_in_order
if __name__ == "__main__":
    list(map_in_order(time.sleep, [1000, 1000], 2))
"""


def test_workers_do_not_outlive_a_parent_that_is_killed(tmp_path: Path) -> None:
    program = tmp_path / "parent.py"
    program.write_text(PARENT)
    parent = subprocess.Popen([sys.executable, str(program)], stdout=subprocess.PIPE)
    time.sleep(1)
    parent.kill()
    parent.communicate(timeout=60)  # returns when the last process has closed the pipe


MASKED = """
import signal
from functools import partial
from fluxtrain.prepare.work import map_in_order
if __name__ == "__main__":
    (blocked,) = map_in_order(partial(signal.pthread_sigmask, signal.SIG_BLOCK), [()], 1)
    print(signal.SIGINT in blocked, signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, ()))
"""


def test_ctrl_c_reaches_no_worker_however_early(tmp_path: Path) -> None:
    """It would print a traceback before the worker's first line."""
    program = tmp_path / "parent.py"
    program.write_text(MASKED)
    done = subprocess.run(
        [sys.executable, str(program)], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["True", "False"]
