"""The newest complete snapshot, and what a rank of another world reads from its images."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from fluxtrain.state.slots import (
    Copy,
    Lineage,
    Shard,
    SnapshotId,
    local_bytes,
    nearest,
    newest_complete,
    offsets,
    pieces,
    read_copies,
    read_lineage,
    rows_of,
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


SHAPES = [(7, 3), (1,), (16,), (8, 2, 2), (2, 5)]


def whole() -> dict[str, Tensor]:
    values = torch.arange(1000, dtype=torch.float32)
    sizes = [torch.Size(shape).numel() for shape in SHAPES]
    parts = values[: sum(sizes)].split(sizes)
    return {
        f"{n}": part.view(shape) for n, (part, shape) in enumerate(zip(parts, SHAPES, strict=True))
    }


def part_of(tensor: Tensor, shard: Shard) -> Tensor:
    """Return what FSDP2 gives to a rank."""
    chunks = tensor.chunk(shard.count)
    return chunks[shard.index] if shard.index < len(chunks) else tensor[:0]


def image_of(shard: Shard) -> Tensor:
    parts = (part_of(tensor, shard).reshape(-1) for tensor in whole().values())
    return torch.cat(list(parts)).view(torch.uint8)


@pytest.mark.parametrize("after", range(1, 9))
@pytest.mark.parametrize("before", range(1, 9))
def test_any_number_of_shards_is_read_by_any_number_of_ranks(before: int, after: int) -> None:
    tensors = rows_of(whole())
    sources = [Shard(index, before) for index in range(before)]
    assert all(offsets(tensors, source)[-1] == len(image_of(source)) for source in sources)
    for target in (Shard(index, after) for index in range(after)):
        expected = [part_of(tensor, target) for tensor in whole().values()]
        found = [torch.full_like(part, -1.0).reshape(-1).view(torch.uint8) for part in expected]
        for source in sources:
            for piece in pieces(tensors, source, target):
                content = image_of(source)[piece.offset : piece.offset + piece.size]
                found[piece.tensor][piece.start : piece.start + piece.size] = content
        for have, want in zip(found, expected, strict=True):
            assert torch.equal(have.view(torch.float32).view(want.shape), want)


def test_a_rank_of_the_same_world_reads_only_its_own_image() -> None:
    tensors = rows_of(whole())
    assert pieces(tensors, Shard(1, 3), Shard(2, 3)) == []
    own = pieces(tensors, Shard(1, 3), Shard(1, 3))
    assert sum(piece.size for piece in own) == offsets(tensors, Shard(1, 3))[-1]


@pytest.mark.parametrize("count", [0, 1])
def test_a_part_of_one_element_may_have_any_stride(count: int) -> None:
    strided = torch.arange(64.0)[5::32][:count]
    assert strided.stride() == (32,)
    (content,) = local_bytes({"a": strided}, Shard(0, 1))
    assert torch.equal(content.view(torch.float32), strided)
    content.fill_(0)
    assert not strided.any(), "written in place"


def test_a_part_that_is_divided_in_another_way_is_refused() -> None:
    with pytest.raises(AssertionError):
        local_bytes(whole(), Shard(0, 2))
