"""The place of each row in an image, and what a rank of another world reads from it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fluxtrain.state.slots import Shard, local_bytes, offsets, pieces, rows_of

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
