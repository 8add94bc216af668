"""Which blocks and layers other trainers select by parts of diffusers' names, as fields of ``adapter``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import get_args

from fluxtrain.contract.run.adapter import LayerName
from fluxtrain.contract.run.model import ModelConfig
from fluxtrain.model.adapted_layers import BLOCKS, linear_layers
from fluxtrain.other_trainers.option import Values
from fluxtrain.other_trainers.reading import NoCounterpartError

SELECTION_FIELDS = ("adapter.double_blocks", "adapter.single_blocks", "adapter.layers")
_ROOT = "transformer."


def selection(wanted: Sequence[str], unwanted: Sequence[str] = ()) -> Values:
    """Return the fields that select the layers whose names have a part that is ``wanted`` and none unwanted.

    Without ``wanted`` parts all are wanted. Raises NoCounterpartError for what the fields cannot say.
    """
    chosen: dict[str, dict[int, frozenset[str]]] = {blocks: {} for blocks in BLOCKS}
    for name, (_, parts) in linear_layers(ModelConfig()).items():
        blocks, number, layer = name.split(".", 2)
        hits = [_is_chosen(_ROOT + part, wanted, unwanted) for part, _ in parts]
        if len(set(hits)) > 1:
            text = (
                f"{name} is one layer here, of which they select {sum(hits)} of {len(hits)} parts"
            )
            raise NoCounterpartError(text)
        if hits[0]:
            before = chosen[blocks].get(int(number), frozenset())
            chosen[blocks][int(number)] = before | {layer}
    layers = set[str]()
    for found in chosen.values():
        if len(set(found.values())) > 1:
            raise NoCounterpartError("adapter.layers are the same in all selected blocks")
        layers.update(*found.values())
    if not layers:
        raise NoCounterpartError("no layer of FLUX.1's blocks has such a name")
    names: Sequence[str] = get_args(LayerName)
    return {
        "adapter.double_blocks": _blocks(chosen["double_blocks"], ModelConfig().depth),
        "adapter.single_blocks": _blocks(
            chosen["single_blocks"], ModelConfig().depth_single_blocks
        ),
        "adapter.layers": []
        if layers == set(names)
        else [name for name in names if name in layers],
    }


def _is_chosen(name: str, wanted: Sequence[str], unwanted: Sequence[str]) -> bool:
    is_wanted = not wanted or any(part in name for part in wanted)
    return is_wanted and not any(part in name for part in unwanted)


def _blocks(numbers: Iterable[int], count: int) -> str:
    """Return ``numbers`` as fields have them: all, none, or numbers and ranges."""
    ordered = sorted(numbers)
    if len(ordered) in (0, count):
        return "all" if ordered else "none"
    ranges = list[str]()
    for _, group in groupby(enumerate(ordered), lambda pair: pair[1] - pair[0]):
        run = [number for _, number in group]
        ranges.append(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}")
    return ",".join(ranges)
