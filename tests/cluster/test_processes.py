"""Background programs are ended by the process that they are, not by the number that it had."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator

import pytest
from cluster import processes
from cluster.errors import ClusterError
from cluster.places import PROCESSES

NAME = "test.sleep"


@pytest.fixture
def sleeper() -> Iterator[int]:
    yield processes.start(NAME, ["/usr/bin/sleep", "600"])
    processes.stop([NAME])


def test_a_started_program_is_alive_until_it_is_stopped(sleeper: int) -> None:
    assert processes.pid_of(NAME) == sleeper
    processes.stop([NAME])
    assert processes.pid_of(NAME) is None
    assert NAME not in processes.names()


def test_a_program_is_not_started_twice(sleeper: int) -> None:
    with pytest.raises(ClusterError, match="runs already"):
        processes.start(NAME, ["/usr/bin/sleep", "600"])


def test_another_program_with_the_same_number_is_left_alone(sleeper: int) -> None:
    other = PROCESSES / "test.other.json"
    other.write_text(json.dumps({"pid": sleeper, "started": "1", "argv": []}))
    assert not processes.alive("test.other")
    processes.stop(["test.other"])
    assert processes.alive(NAME)


def test_a_program_that_died_before_its_start_was_noted_is_dead() -> None:
    gone = processes.start("test.gone", ["/bin/true"])
    os.waitpid(gone, 0)
    record = PROCESSES / "test.gone.json"
    record.write_text(json.dumps({"pid": gone, "started": None, "argv": []}))
    assert not processes.alive("test.gone")
    processes.stop(["test.gone"])


def test_the_log_of_a_dead_program_is_in_the_error() -> None:
    name = "test.dies"
    pid = processes.start(name, ["/bin/sh", "-c", "echo its last words; exit 3"])
    os.waitpid(pid, 0)
    with pytest.raises(ClusterError, match="its last words"):
        processes.require_alive(name)
    processes.stop([name])
    processes.log(name).unlink()
