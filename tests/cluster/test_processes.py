"""Background programs are stopped by process, not by a reused process id."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster import processes
from cluster.errors import ClusterError, MachineError
from cluster.host import left_behind
from cluster.layout import CACHE, PROCESSES

NAME = "test.sleep"


@pytest.fixture
def sleeper() -> Iterator[int]:
    yield processes.start(NAME, ["/usr/bin/sleep", "600"])
    processes.stop([NAME])


def test_a_started_program_is_running_until_it_is_stopped(sleeper: int) -> None:
    assert processes.pid_of(NAME) == sleeper
    processes.stop([NAME])
    assert processes.pid_of(NAME) is None
    assert NAME not in processes.names()


def test_a_program_is_not_started_twice(sleeper: int) -> None:
    with pytest.raises(ClusterError, match="runs already"):
        processes.start(NAME, ["/usr/bin/sleep", "600"])


def test_another_program_with_the_same_pid_is_not_stopped(sleeper: int) -> None:
    other = PROCESSES / "test.other.json"
    other.write_text(json.dumps({"pid": sleeper, "started": "1", "argv": []}))
    assert not processes.is_running("test.other")
    processes.stop(["test.other"])
    assert processes.is_running(NAME)


def test_a_program_that_exited_before_it_was_recorded_is_not_running() -> None:
    gone = processes.start("test.gone", ["/bin/true"])
    os.waitpid(gone, 0)
    record = PROCESSES / "test.gone.json"
    record.write_text(json.dumps({"pid": gone, "started": None, "argv": []}))
    assert not processes.is_running("test.gone")
    processes.stop(["test.gone"])


def test_the_error_contains_the_log_of_an_exited_program() -> None:
    name = "test.exits"
    pid = processes.start(name, ["/bin/sh", "-c", "echo a log line; exit 3"])
    os.waitpid(pid, 0)
    with pytest.raises(ClusterError, match="a log line"):
        processes.require_running(name)
    processes.stop([name])
    processes.log(name).unlink()


@pytest.mark.parametrize("program", [f"{CACHE}/programs/etcd", "/usr/bin/containerd"])
@pytest.mark.parametrize("folder", ["clone", "a clone, with=all"])
def test_a_running_cluster_is_found_by_its_clone_and_not_stopped(
    tmp_path: Path, program: str, folder: str
) -> None:
    record = tmp_path / folder / ".cluster" / "host_state.json"
    record.parent.mkdir(parents=True)
    record.write_text("{}")
    command = [program, "-c", "input()", "--verbose=1", f"--data-dir={record.parent}/etcd"]
    process = subprocess.Popen(command, executable=sys.executable, stdin=subprocess.PIPE)
    try:
        assert left_behind._programs()[process.pid] == tmp_path / folder
        with pytest.raises(MachineError, match="make cluster-down there first"):
            left_behind.clear()
        assert process.poll() is None
    finally:
        process.kill()
        process.communicate()


def test_a_program_that_only_names_a_file_of_a_cluster_is_none_of_it(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "input()", f"{tmp_path}/.cluster/logs/etcd.log"]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as process:
        assert process.pid not in left_behind._programs()
        process.kill()
