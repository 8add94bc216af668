"""``stacks``: whose stack is which part of a pod's log, and how positions are summarised."""

from __future__ import annotations

import os
import threading
import time
from datetime import UTC, datetime
from pathlib import Path

from tests.trainer.rank_processes import proc_with, rank_process

from fluxtrain.contract.process import RankProcess
from fluxtrain.launch.stacks import ask_ranks
from fluxtrain_operator.base.names import stamp
from fluxtrain_operator.kubectl.logs import RankStacks, report, stacks_of

LOG = """\
1970-01-01T00:01:39.900000000Z   File "old.py", line 1 in before
1970-01-01T00:01:40.100000000Z Thread 0x00007f0000000001 (most recent call first):
1970-01-01T00:01:40.100000001Z   File "loader.py", line 5 in read
1970-01-01T00:01:40.100000002Z 
1970-01-01T00:01:40.100000003Z Current thread 0x00007f0000000000 (most recent call first):
1970-01-01T00:01:40.100000004Z   File "distributed.py", line 88 in all_reduce
1970-01-01T00:01:40.150000000Z step 7, loss 0.5
1970-01-01T00:01:40.200000005Z   File "train.py", line 3 in <module>
1970-01-01T00:01:40.500000000Z Current thread 0x00007f0000000000 (most recent call first):
1970-01-01T00:01:40.500000001Z   File "distributed.py", line 88 in all_reduce
1970-01-01T00:01:40.500000002Z   File "train.py", line 3 in <module>
"""  # fmt: skip
AT_100, AT_100_3, AT_100_6 = 100.0, 100.3, 100.6


def process(rank: int, asked_at: float, state: str = "S", asked: bool = True) -> RankProcess:
    return RankProcess(rank, 50 + rank, state, asked_at, asked)


def stacks(rank: int, *frames: str, note: str = "") -> RankStacks:
    head = ["Current thread 0x1 (most recent call first):"] if frames else []
    return RankStacks(rank, f"job-{rank}", (*head, *(f"  {frame}" for frame in frames)), note)


def test_lines_belong_to_the_rank_that_was_asked_last() -> None:
    first, second = stacks_of("job-0", [process(0, AT_100), process(1, AT_100_3)], LOG)
    assert first.position == (
        'File "distributed.py", line 88 in all_reduce',
        'File "train.py", line 3 in <module>',
    )
    assert first.position == second.position
    assert not any("old.py" in line or "loss" in line for line in first.lines)
    assert 'File "loader.py", line 5 in read' in "\n".join(first.lines)


def test_a_rank_without_stacks_says_why() -> None:
    silent, importing, stopped = stacks_of(
        "job-0",
        [process(0, AT_100_6), process(1, 101.0, asked=False), process(2, 102.0, state="T")],
        LOG,
    )
    assert "printed no stacks" in silent.note
    assert "imports modules" in importing.note
    assert "is stopped by a signal" in stopped.note
    assert {rank.position for rank in (silent, importing, stopped)} == {()}


def test_the_rarest_position_comes_first() -> None:
    many = [stacks(rank, 'File "a.py", line 1 in all_reduce') for rank in range(16) if rank != 7]
    text = report([*many, stacks(7, 'File "b.py", line 2 in read'), stacks(16, note="has ended")])
    assert text.splitlines()[:3] == [
        'rank 7: File "b.py", line 2 in read',
        "rank 16: unknown: no stacks",
        'ranks 0-6, 8-15: File "a.py", line 1 in all_reduce',
    ]
    assert "== rank 16, pod job-16: has ended" in text
    assert text.index("== rank 6,") < text.index("== rank 7,")


def test_stacks_of_real_processes_are_those_of_each_rank(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    lines: list[str] = []

    def collect() -> None:
        with os.fdopen(reading) as file:
            for line in file:
                lines.append(f"{datetime.now(UTC).isoformat()} {line}")

    log = threading.Thread(target=collect)
    log.start()
    with (
        os.fdopen(writing, "wb") as stderr,
        rank_process(1, name="read", stderr=stderr) as second,
        rank_process(0, name="all_reduce", stderr=stderr) as first,
    ):
        asked = list(ask_ranks(proc_with(tmp_path, second, first)))
        time.sleep(0.2)
    log.join()
    ranks = stacks_of("job-0", asked, "".join(lines))
    assert [
        "waits_in_all_reduce" in ranks[0].position[0],
        "waits_in_read" in ranks[1].position[0],
    ] == [True, True]
    assert stamp(asked[0].time)[:19] <= lines[0][:19]
