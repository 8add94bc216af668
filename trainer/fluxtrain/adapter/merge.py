"""Weights with adapters merged into them, read on demand as any other weights."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fluxtrain.adapter.file import SKIP, AdapterFile
from fluxtrain.adapter.reading import shape_of, tensor_name
from fluxtrain.adapter.updates import Adapter, truncated
from fluxtrain.encode.clip import with_prefix
from fluxtrain.encode.text import T5Clip, TextEncoder, TextModel
from fluxtrain.errors import DataError
from fluxtrain.model.layers import TEXT_ENCODER, is_clip, linear_layers
from fluxtrain.parallel.distributed import World
from fluxtrain.runtime.progress import Alive, counted, first_of
from fluxtrain.weights.reader import Weights, require_complete


class MergedWeights:
    """The tensors of ``base`` plus the updates of adapters, in float32 where an update is added.

    Updates of CLIP are left out.
    Several are added in turn: magnitudes (DoRA) are of the weights with the updates before.
    """

    def __init__(self, base: Weights, adapters: Sequence[tuple[AdapterFile, float]]) -> None:
        """Add each adapter's updates times its strength; DataError if one is of another model."""
        self.path, self.model, self.shapes = base.path, base.model, base.shapes
        self.base, self.adapters = base, adapters
        self.skipped = [text for file, _ in adapters if (text := file.skipped)]
        for file, _ in adapters:
            misfits = []
            for layer, update in file.adapter.items():
                shape, own = self.shapes.get(tensor_name(layer, update)), shape_of(update)
                if is_clip(layer) or shape == own:
                    continue
                has = f"is {list(shape)}" if shape else "does not exist"
                misfits.append(f"{layer} is {list(own)}; in {base.path} it {has}")
            count = sum(not is_clip(layer) for layer in file.adapter)
            if misfits and not (file.skips_unknown and len(misfits) < count):
                text = f"; {SKIP} leaves such layers out if others fit"
                raise DataError(f"{file.path}: {first_of(misfits, 1)}{text}")
            if misfits:
                self.skipped.append(
                    f"{file.path}: {counted(len(misfits), 'layer')} left out: {first_of(misfits)}"
                )

    def verify(self, world: World, alive: Alive) -> None:
        self.base.verify(world, alive)

    def read(self, names: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors ``names`` in this order."""
        for name, tensor in self.base.read(names):
            layer = name.removesuffix(".weight")
            updates = [
                (update, strength)
                for file, strength in self.adapters
                for key in {layer, name}
                if (update := file.adapter.get(key)) is not None
                and tensor_name(key, update) == name
                and shape_of(update) == self.shapes[name]
            ]
            if updates:
                total = tensor.float()
                for update, strength in updates:
                    total = torch.add(total, update.change(total), alpha=strength)
                tensor = total
            yield name, tensor


Added = Sequence[tuple[AdapterFile, float]]
"""Adapters that are added, each with its strength."""


def clip_adapters(weights: Weights | None) -> list[tuple[AdapterFile, float]]:
    """Return the adapters that are merged into ``weights`` and have updates of CLIP too, in order."""
    if not isinstance(weights, MergedWeights):
        return []
    own = [pair for pair in weights.adapters if any(map(is_clip, pair[0].adapter))]
    return [*clip_adapters(weights.base), *own]


def skipped(weights: Weights | None) -> list[str]:
    """Return a sentence on each adapter of ``weights`` of which something is left out as unknown."""
    if not isinstance(weights, MergedWeights):
        return []
    return [*skipped(weights.base), *weights.skipped]


def tell_skipped(weights: Weights, world: World) -> None:
    """Print what `skipped` returns, on rank 0."""
    for text in skipped(weights) if world.is_main else ():
        print(f"fluxtrain: {text}", file=sys.stderr, flush=True)


def left_out(weights: Weights) -> str:
    """Return a sentence on the updates of CLIP, which no weights of the transformer hold; "" without them.

    Raises DataError if an adapter has no others.
    """
    files = clip_adapters(weights)
    for file, _ in files:
        if all(map(is_clip, file.adapter)):
            text = "it adapts CLIP-L alone, and these are the transformer's weights"
            raise DataError(f"{file.path}: {text}; sample and added_adapters take it")
    count = sum(sum(map(is_clip, file.adapter)) for file, _ in files)
    if not count:
        return ""
    names = ", ".join(str(file.path) for file, _ in files)
    return f"{names}: {count} layers of CLIP-L are left out: these are the transformer's weights"


def with_updates(text: TextEncoder, added: Added) -> TextEncoder:
    """Return ``text`` with the updates of CLIP in ``added``; DataError if they do not fit."""
    if not added:
        return text
    if not isinstance(text, T5Clip):
        path = added[0][0].path
        raise DataError(
            f"{path}: it adapts CLIP-L, and spec.run.encoders.text is minilm; t5-clip has it"
        )
    return replace(text, clip=updated(text.clip, added))


@torch.no_grad()
def updated(clip: TextModel, added: Added) -> TextModel:
    """Return a copy of ``clip`` with the updates of ``added``, in turn; they are added in float32."""
    encoder = deepcopy(clip.encoder)
    parameters = {with_prefix(name): each for name, each in encoder.named_parameters()}
    for file, strength in added:
        for layer, update in file.adapter.items():
            if not is_clip(layer):
                continue
            name = tensor_name(layer, update).removeprefix(f"{TEXT_ENCODER}.")
            weight, own = parameters.get(name), shape_of(update)
            if weight is None or tuple(weight.shape) != own:
                has = "does not exist" if weight is None else f"is {list(weight.shape)}"
                raise DataError(f"{file.path}: {layer} is {list(own)}; in CLIP it {has}")
            total = weight.float().cpu()
            weight.copy_(torch.add(total, update.change(total), alpha=strength))
    return replace(clip, encoder=encoder)


@dataclass(frozen=True)
class Extracted:
    """An adapter, and how much of the difference it holds."""

    adapter: Adapter
    kept: float
    """Fraction of the squared differences of the blocks' linear layers."""
    left_out: int
    """Other tensors that differ: biases, norms, embeddings, the last layer."""


def extract(
    base: Weights, tuned: Weights, rank: int, report: Callable[[], object] = lambda: None
) -> Extracted:
    """Return the adapter of ``rank`` that makes ``tuned`` of ``base``, as far as that rank can.

    What differs only as ``tuned`` was rounded to its data type is left unchanged. Of tensors that the adapter
    cannot hold, those that differ only as ``base`` was rounded are not counted either.
    ``report`` is called after each tensor. Raises DataError if the models have other shapes, or are equal.
    """
    require_complete(base, tuned.model)
    require_complete(tuned, base.model)
    layers = {f"{layer}.weight" for layer in linear_layers(base.model)}
    names = list(base.shapes)
    adapter, squares, rest, left_out = Adapter(), 0.0, 0.0, 0
    for (name, before), (_, after) in zip(base.read(names), tuned.read(names), strict=True):
        report()
        if torch.equal(before.to(after.dtype), after):
            continue
        if name not in layers:
            left_out += not torch.equal(after.to(before.dtype), before)
            continue
        difference = after.float() - before.float()
        update = truncated(difference, rank)
        adapter[name.removesuffix(".weight")] = update
        squares += difference.square().sum().item()
        rest += (difference - update.delta()).square().sum().item()
    if not adapter:
        raise DataError(f"{tuned.path}: the blocks' linear layers are those of {base.path}")
    return Extracted(adapter, 1 - rest / squares, left_out)
