"""Each rank of a node writes its progress, and what it waits for; local rank 0 and the agent read that."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fluxtrain.contract.process import ENV_GENERATION, ENV_NODE_PROGRESS
from fluxtrain.report import progress
from fluxtrain.report.progress import pending_collectives, publish, read_ranks
from fluxtrain.runtime.progress import Progress

pytestmark = pytest.mark.slow


def environment(folder: Path, rank: int) -> dict[str, str]:
    return {ENV_NODE_PROGRESS: str(folder), "RANK": f"{rank}", "LOCAL_RANK": f"{rank % 8}"}


def wait_for_ranks(folder: Path, count: int) -> list[progress.RankProgress]:
    deadline = time.monotonic() + 10
    while len(ranks := read_ranks(environment(folder, 0))) < count:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return ranks


def test_the_ranks_of_a_node_are_read_with_the_time_since_their_progress(tmp_path: Path) -> None:
    waiting, stepping = Progress(), Progress(now=lambda: time.monotonic() + 100)
    stepping.enter("step")
    stepping.step_done(step=7)
    stepping._now = lambda: time.monotonic() + 190  # 90 s without progress
    publish(waiting, environment(tmp_path, 8))
    publish(stepping, environment(tmp_path, 9))
    first, second = wait_for_ranks(tmp_path, 2)
    assert (first.rank, first.phase, first.pid, first.stack) == (8, "import", os.getpid(), "")
    report = second.report(time.monotonic())
    assert (report["rank"], report["phase"], report["step"]) == (9, "step", 7)
    assert 90 <= report["secondsSinceProgress"] < 92
    assert " (" in report["stack"], "a function and its place"
    assert 150 < second.report(time.monotonic() + 60)["secondsSinceProgress"] < 152, (
        "it grows while the process writes nothing"
    )


def test_processes_that_have_ended_and_incomplete_files_are_left_out(tmp_path: Path) -> None:
    publish(Progress(), environment(tmp_path, 0))
    (rank,) = wait_for_ranks(tmp_path, 1)
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    content = vars(rank) | {"rank": 1, "pid": ended.pid}
    (tmp_path / "rank_0001.json").write_text(json.dumps(content))
    (tmp_path / "rank_0002.json").write_text(json.dumps(content)[:20])
    (tmp_path / "rank_0003.json").write_text(json.dumps({"of": "another version"}))
    assert [found.rank for found in read_ranks(environment(tmp_path, 0))] == [0]


@pytest.mark.parametrize(
    "change",
    [
        {"progressed": "yesterday"},
        {"progressed": float("nan")},
        {"phase": "walking"},
        {"step": -1},
        {"pid": -1},
        {"pid": 0},
        {"pid": True},
        {"rank": None},
        {"stack": 7},
        {"written": None},
    ],
)
def test_files_with_invalid_values_are_left_out(tmp_path: Path, change: dict[str, Any]) -> None:
    valid = progress.RankProgress(0, os.getpid(), "step", 7, 1.0, 2.0)
    path = tmp_path / "rank_0000.json"
    path.write_text(json.dumps(vars(valid)))
    assert len(read_ranks(environment(tmp_path, 0))) == 1
    path.write_text(json.dumps(vars(valid) | change))
    assert read_ranks(environment(tmp_path, 0)) == []


TRAINER = """
import ctypes, itertools, signal, sys, threading
from prometheus_client import CollectorRegistry
from fluxtrain.runtime.progress import Progress
from fluxtrain.report.progress import publish
from fluxtrain.report.endpoint import serve

def hold(signum, frame):
    sum(itertools.repeat(0))  # a loop in C, which never gives up the GIL

signal.signal(signal.SIGUSR1, hold)
progress = Progress()
progress.enter("step")
progress.step_done(step=7)
publish(progress)
serve(CollectorRegistry(), progress, "127.0.0.1", None)
print("ready", flush=True)
threading.Event().wait()
"""


@pytest.mark.parametrize(
    ("signum", "state"),
    [(signal.SIGSTOP, "T (stopped)"), (signal.SIGUSR1, "R (running)")],
    ids=["stopped", "holds the GIL"],
)
def test_a_frozen_process_is_reported_with_the_time_since_its_progress(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, signum: signal.Signals, state: str
) -> None:
    monkeypatch.setattr(progress, "_FROZEN_SECONDS", 4.0)
    variables = {**os.environ, **environment(tmp_path, 0)}
    command = [sys.executable, "-c", TRAINER]
    with subprocess.Popen(command, env=variables, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
            wait_for(lambda: [rank.frozen for rank in read_ranks(variables)] == [False])
            began = time.monotonic()
            process.send_signal(signum)
            wait_for(lambda: [rank.frozen for rank in read_ranks(variables)] == [True])
            assert time.monotonic() - began > 2
            (rank,) = read_ranks(variables)
            report = rank.report(time.monotonic())
            assert (report["phase"], report["step"], report["frozen"]) == ("step", 7, True)
            assert report["secondsSinceProgress"] >= time.monotonic() - began
            assert report["stack"].startswith("the process does not respond, its state is ")
            assert state in report["stack"]
        finally:
            process.kill()


def test_a_file_that_grows_old_on_a_full_disk_shows_no_frozen_process(tmp_path: Path) -> None:
    for number, age in enumerate((1.0, 60.0)):
        now = time.monotonic()
        rank = progress.RankProgress(number, os.getpid(), "step", 7, 0.0, 0.0, written=now - age)
        (tmp_path / f"rank_{number:04d}.json").write_text(json.dumps(vars(rank)))
    variables = environment(tmp_path, 0)
    assert [(rank.rank, rank.frozen) for rank in read_ranks(variables)] == [(0, False), (1, True)]
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))  # no file can be written
    try:
        assert [(rank.rank, rank.frozen) for rank in read_ranks(variables)] == [(0, False)]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def wait_for(done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_the_generation_is_reported_if_there_is_one(tmp_path: Path) -> None:
    publish(Progress(), environment(tmp_path, 0))
    publish(Progress(), environment(tmp_path, 1) | {ENV_GENERATION: "3"})
    alone, member = (rank.report(time.monotonic()) for rank in wait_for_ranks(tmp_path, 2))
    assert "generation" not in alone
    assert member["generation"] == 3


def test_nothing_is_written_or_read_without_a_folder() -> None:
    publish(Progress(), {})
    assert read_ranks({}) == []


def entry(number: int, retired: bool) -> dict[str, object]:
    group = ["0", "default_pg"]
    name = {"profiling_name": "nccl:all_reduce", "collective_seq_id": number}
    return {**name, "process_group": group, "retired": retired}


def set_torch(monkeypatch: pytest.MonkeyPatch, torch: object) -> None:
    monkeypatch.setitem(sys.modules, "torch._C._distributed_c10d", torch)


def dumping(*entries: object) -> object:
    return lambda **_: json.dumps({"entries": entries}).encode()


def test_only_collectives_that_have_not_ended_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    dump = dumping(entry(6, True), entry(7, False), entry(8, False), "odd")
    set_torch(monkeypatch, SimpleNamespace(_dump_nccl_trace_json=dump))
    expected = "nccl:all_reduce 7 of default_pg, nccl:all_reduce 8 of default_pg"
    assert pending_collectives() == expected


@pytest.mark.parametrize(
    "torch",
    [
        None,
        SimpleNamespace(),
        SimpleNamespace(_dump_fr_trace_json=lambda **_: b'{"pg_config": {}}'),
    ],
    ids=["not imported", "without a recorder", "no process group"],
)
def test_nothing_pending_is_empty(monkeypatch: pytest.MonkeyPatch, torch: object) -> None:
    set_torch(monkeypatch, torch)
    assert pending_collectives() == ""
