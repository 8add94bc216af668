"""The newest complete snapshot, from records on all nodes; those of ranks left behind do not count."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from fluxtrain.state.slots import (
    Copy,
    Lineage,
    SnapshotId,
    decode,
    encode,
    nearest,
    newest_complete,
    read_copies,
    read_lineage,
    write_lineage,
)

RUN = {"step": 0, "samples": 0}


def copy(start: int, step: int, shard: int, num_shards: int = 2, node: int = 0) -> Copy:
    return Copy(start, step, shard, num_shards, size=8, checksum=1, run=RUN, node=node)


NEWEST = [
    ("nothing", [], None),
    ("one of two shards", [copy(1, 10, 0)], None),
    ("both", [copy(1, 10, 0), copy(1, 10, 1)], (1, 10)),
    ("twice the same", [copy(1, 10, 0), copy(1, 10, 0, node=1)], None),
    ("on two nodes", [copy(1, 10, 0), copy(1, 10, 1, node=1)], (1, 10)),
    ("of different steps", [copy(1, 10, 0), copy(1, 20, 1)], None),
    ("of different starts", [copy(1, 10, 0), copy(2, 10, 1)], None),
    ("of different worlds", [copy(1, 10, 0, 2), copy(1, 10, 1, 3)], None),
    ("the newer is not complete", [copy(1, 10, 0, 1), copy(1, 20, 0)], (1, 10)),
    ("the newer is", [copy(1, 10, 0, 1), copy(1, 20, 0), copy(1, 20, 1)], (1, 20)),
    ("a single rank", [copy(1, 10, 0, 1)], (1, 10)),
]


@pytest.mark.parametrize(
    ("copies", "newest"), [row[1:] for row in NEWEST], ids=[r[0] for r in NEWEST]
)
def test_a_snapshot_counts_if_every_shard_has_a_copy(
    copies: list[Copy], newest: tuple[int, int] | None
) -> None:
    assert newest_complete(copies, Lineage(start=1)) == newest


ACCEPTED = [
    ("no start yet", Lineage(), (1, 10), False),
    ("of the newest start", Lineage(3), (3, 10), True),
    ("of an earlier start", Lineage(3), (2, 99), False),
    ("of a start that was left behind", Lineage(3, 1, 50), (2, 60), False),
    ("loaded by the newest start", Lineage(3, 2, 50), (2, 50), True),
    ("later than the one that was loaded", Lineage(3, 2, 50), (2, 60), False),
    ("of a start that is not known yet", Lineage(3), (4, 10), False),
]


@pytest.mark.parametrize(
    ("lineage", "snapshot", "accepted"), [row[1:] for row in ACCEPTED], ids=[r[0] for r in ACCEPTED]
)
def test_only_snapshots_that_continue_the_run_are_accepted(
    lineage: Lineage, snapshot: tuple[int, int], accepted: bool
) -> None:
    assert lineage.accepts(SnapshotId(*snapshot)) == accepted


def test_a_snapshot_of_the_newest_start_wins_over_a_later_step_that_was_loaded() -> None:
    copies = [copy(2, 50, 0, 1), copy(3, 40, 0, 1)]
    assert newest_complete(copies, Lineage(3, 2, 50)) == (3, 40)


def test_a_node_reads_its_own_copy_if_it_has_one() -> None:
    copies = [copy(1, 1, 0, node=1), copy(1, 1, 0, node=2)]
    assert [nearest(copies, node).node for node in range(4)] == [1, 1, 2, 2]
    assert nearest(copies[:1], 3).node == 1


def test_copies_are_the_same_after_their_way_to_another_rank() -> None:
    copies = [copy(1, 10, 0), replace(copy(1, 10, 1), name="start_000001/rank_00001_0", node=3)]
    assert decode(encode(copies)) == copies


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"start": 1}', "1" * 5000])
def test_damaged_records_are_ignored(tmp_path: Path, text: str) -> None:
    folder = tmp_path / "start_000001"
    folder.mkdir()
    (folder / "rank_00000_0.json").write_text(text)
    assert read_copies(tmp_path, node=0) == []


def test_the_lineage_is_kept_beside_the_checkpoints(tmp_path: Path) -> None:
    assert read_lineage(tmp_path) == Lineage()
    for lineage in (Lineage(1), Lineage(2, 1, 10)):
        write_lineage(tmp_path, lineage)
        assert read_lineage(tmp_path) == lineage


@pytest.mark.parametrize("text", ["", "[]", '{"start": "x"}', '{"begin": 1}', "null"])
def test_a_damaged_lineage_accepts_nothing(tmp_path: Path, text: str) -> None:
    (tmp_path / ".snapshots.json").write_text(text)
    assert read_lineage(tmp_path) == Lineage()
