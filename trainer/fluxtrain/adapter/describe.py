"""What a LoRA file holds, for people."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from fluxtrain.adapter.file import AdapterFile
from fluxtrain.adapter.product import Product
from fluxtrain.adapter.update import Piece
from fluxtrain.adapter.updates import low_rank, num_parameters

_SHOWN = (
    "modelspec.title",
    "modelspec.architecture",
    "ss_base_model_version",
    "ss_sd_model_name",
    "ss_steps",
    "ss_learning_rate",
    "ss_optimizer",
)


def describe(file: AdapterFile) -> Iterator[tuple[str, str]]:
    """Yield names and values: layers, ranks, scales, parameters, the largest update, metadata."""
    updates = low_rank(file.adapter).values()
    pieces = [piece for update in updates for piece in update.pieces]
    products = [each for each in file.adapter.values() if isinstance(each, Product)]
    blocks = Counter(layer.partition(".")[0] for layer in file.adapter)
    yield "layers", ", ".join(f"{count} of {name}" for name, count in sorted(blocks.items()))
    if products:
        yield "products", f"{len(products)} layers have a Kronecker product (LoKr)"
    decomposed = sum(update.is_dora for update in updates)
    if decomposed:
        yield "magnitudes", f"{decomposed} layers have norms of their rows (DoRA)"
    split = sum(len(update.pieces) > 1 for update in updates)
    if split:
        yield "split", f"{split} layers have an adapter for each of their parts"
    matrices: list[Piece | Product] = [*pieces, *products]
    yield "rank", _counted(Counter(str(each.rank or "full") for each in matrices))
    yield "alpha / rank", _counted(Counter(f"{each.scale:g}" for each in matrices))
    yield "data type", str(file.dtype).removeprefix("torch.")
    yield "parameters", f"{num_parameters(file.adapter.values()):,}"
    norms = {layer: update.norm() for layer, update in file.adapter.items()}
    layer = max(norms, key=norms.__getitem__)
    yield "largest norm", f"{norms[layer]:.4g} of {layer}"
    if file.left_out:
        yield "left out", file.left_out
    for key in _SHOWN:
        if key in file.metadata:
            yield key.rpartition(".")[2].removeprefix("ss_"), file.metadata[key]


def _counted(counts: Counter[str]) -> str:
    if len(counts) == 1:
        return next(iter(counts))
    return ", ".join(f"{value} ({count} matrices)" for value, count in counts.most_common())
