"""LoRA files of other tools: what is read of them, how they are described, and what is written of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from benchmarks.adapters.other_loaders import in_diffusers
from safetensors.torch import save_file
from tests.trainer.adapter.dialects import DIALECTS, ENTRIES, SHAPES, WEIGHTS
from tests.trainer.adapter.random_adapters import MODEL
from torch import Tensor

from fluxtrain.adapter.file import LAYOUTS, describe_file, read_adapter, write_adapter
from fluxtrain.adapter.merge import MergedWeights
from fluxtrain.errors import DataError
from fluxtrain.parallel.distributed import World
from fluxtrain.runtime.progress import Alive
from fluxtrain.runtime.safetensors import identify

TOLERANCE = 1e-5


class Base:
    """The model's weights in memory."""

    path, model, shapes = Path("base"), MODEL, SHAPES

    def verify(self, world: World, alive: Alive) -> None:
        """Verify nothing."""

    def read(self, names: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
        yield from ((name, WEIGHTS[name]) for name in names)


def merged(path: Path) -> dict[str, Tensor]:
    """Return the tensors that the adapter at ``path`` changes, with its update."""
    weights = MergedWeights(Base(), [(read_adapter(path, skip_unknown=True), 1.0)])
    found = dict(weights.read(list(SHAPES)))
    return {name: each for name, each in found.items() if each is not WEIGHTS[name]}


def written(folder: Path, name: str) -> Path:
    path = folder / "foreign.safetensors"
    save_file({key: each.contiguous() for key, each in DIALECTS[name].file.tensors.items()}, path)
    return path


def require_equal(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.allclose(found[name], tensor, atol=tolerance), name


@pytest.mark.parametrize("name", DIALECTS)
def test_it_is_read_described_and_written_in_the_layouts_that_have_a_place(
    tmp_path: Path, name: str
) -> None:
    dialect, path = DIALECTS[name], written(tmp_path, name)
    require_equal(merged(path), dialect.file.updated, TOLERANCE)
    found = dict(describe_file(path))
    assert dialect.dialect in found["dialect"]
    assert found["holds"].startswith(dialect.holds) or dialect.holds in found["holds"]
    assert identify(dialect.file.tensors).startswith("; it holds adapters, which spec.run.adapter")
    file = read_adapter(path, skip_unknown=True)
    for layout in LAYOUTS:
        target = tmp_path / f"{layout}.safetensors"
        if layout in found["use"]:
            write_adapter(target, file.adapter, layout, torch.float32)
            require_equal(merged(target), dialect.file.updated, 10 * TOLERANCE)
        else:
            with pytest.raises(DataError, match=f"layout {layout} has no (place|name) for"):
                write_adapter(target, file.adapter, layout, torch.float32)


@pytest.mark.parametrize("name", [name for name, each in DIALECTS.items() if each.is_of_diffusers])
def test_diffusers_reads_what_we_read(tmp_path: Path, name: str) -> None:
    theirs = in_diffusers(written(tmp_path, name), MODEL)
    ours: dict[str, Tensor] = {}
    for weight, updated in DIALECTS[name].file.updated.items():
        delta, entry = updated - WEIGHTS[weight], ENTRIES[weight]
        delta = torch.cat(delta.chunk(2)[::-1]) if entry.swapped else delta
        rows = torch.split(delta, [count for _, count in entry.parts])
        parts = zip(entry.parts, rows, strict=True)
        ours |= {part.removesuffix(".weight"): each for (part, _), each in parts if each.any()}
    require_equal(theirs, ours, TOLERANCE)
