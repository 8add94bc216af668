"""Worker processes: order, bounds, and what happens when one of them or their parent dies."""

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
from fluxtrain.prepare.worker_pool import map_in_order


def squared(number: int) -> int:
    time.sleep(0.02 if number % 3 == 0 else 0)
    return number * number


def noted(number: int, folder: Path) -> int:
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
def test_results_come_in_the_order_of_their_tasks(num_workers: int) -> None:
    assert list(map_in_order(squared, range(20), num_workers)) == [i * i for i in range(20)]
    assert list(map_in_order(squared, [], num_workers)) == []


def test_few_tasks_are_begun_before_they_are_asked_for(tmp_path: Path) -> None:
    taken = 0

    def tasks() -> Iterator[int]:
        nonlocal taken
        while True:
            taken += 1
            yield taken

    with closing(map_in_order(partial(noted, folder=tmp_path), tasks(), 2)) as results:
        assert [next(results) for _ in range(5)] == [1, 2, 3, 4, 5]
        assert taken < 12
    assert len(list(tmp_path.iterdir())) < 12


def test_an_error_comes_as_it_was_raised() -> None:
    results = map_in_order(failing, range(9), 2)
    assert [next(results) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(DataError, match="the third is bad"):
        next(results)


def test_a_worker_that_dies_is_told_with_its_task() -> None:
    with pytest.raises(FluxtrainError, match="ended with SIGKILL at 2; out of memory"):
        list(map_in_order(dying, range(9), 1))


def test_closing_ends_the_workers_whatever_they_do() -> None:
    others = set(multiprocessing.active_children())
    results = map_in_order(sleeping, [100, 0, 100], 2)
    with closing(results):
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            next(results)
    assert set(multiprocessing.active_children()) <= others


PARENT = """
import time
from fluxtrain.prepare.worker_pool import map_in_order
if __name__ == "__main__":
    list(map_in_order(time.sleep, [1000, 1000], 2))
"""


def test_workers_do_not_outlive_a_parent_that_is_killed(tmp_path: Path) -> None:
    program = tmp_path / "parent.py"
    program.write_text(PARENT)
    parent = subprocess.Popen([sys.executable, str(program)], stdout=subprocess.PIPE)
    time.sleep(1)
    parent.kill()
    parent.communicate(timeout=60)  # ends when the last process has let go of the pipe
