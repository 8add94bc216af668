"""Each rank of a node writes its progress; local rank 0 and the agent read that of all."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

from fluxtrain.contract.launch import ENV_GENERATION, ENV_NODE_PROGRESS
from fluxtrain.progress import Progress
from fluxtrain.report import node_progress
from fluxtrain.report.node_progress import publish, read_ranks


def environment(folder: Path, rank: int) -> dict[str, str]:
    return {ENV_NODE_PROGRESS: str(folder), "RANK": f"{rank}", "LOCAL_RANK": f"{rank % 8}"}


def wait_for_ranks(folder: Path, count: int) -> list[node_progress.RankProgress]:
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


def test_the_generation_is_reported_if_there_is_one(tmp_path: Path) -> None:
    publish(Progress(), environment(tmp_path, 0))
    publish(Progress(), environment(tmp_path, 1) | {ENV_GENERATION: "3"})
    alone, member = (rank.report(time.monotonic()) for rank in wait_for_ranks(tmp_path, 2))
    assert "generation" not in alone
    assert member["generation"] == 3


def test_nothing_is_written_or_read_without_a_folder() -> None:
    publish(Progress(), {})
    assert read_ranks({}) == []
