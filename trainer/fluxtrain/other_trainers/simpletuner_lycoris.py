"""SimpleTuner's file for LyCORIS, as ``lycoris.*``: a lokr of some layers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from fluxtrain.other_trainers.option import (
    Convert,
    Option,
    Values,
    automatic,
    each,
    fields,
    missing,
)
from fluxtrain.other_trainers.reading import InertError, NoCounterpartError, Reading

_LARGEST_RANK = 1024
_MODULATIONS = ("img_mod", "txt_mod", "single_mod")
_MLPS = ("img_mlp", "txt_mlp")
_FIELDS = tuple(f"adapter.ranks.{kind}" for kind in (*_MODULATIONS, *_MLPS))
_TARGETS, _FACTORS = "lycoris.apply_preset.target_module", "lycoris.apply_preset.module_algo_map"


def is_lycoris(reading: Reading) -> bool:
    """Return whether adapters are LyCORIS' there."""
    return reading.has("lora_type") and reading.word("lora_type") == "lycoris"


def is_lokr(reading: Reading) -> bool:
    """Return whether adapters are products of two matrices there."""
    name = "lycoris.algo"
    return is_lycoris(reading) and reading.has(name) and reading.word(name) == "lokr"


def lora_type(reading: Reading, name: str) -> Values:
    """Return the kind of adapter."""
    word = reading.word(name)
    if word not in ("standard", "lycoris"):
        raise reading.wrong(name, "must be standard or lycoris")
    if word == "standard":
        reading.notes[name] = "adapter.kind is lora"
        return {}
    if not reading.has("lycoris.algo"):
        raise NoCounterpartError("lycoris_config with its algo was not found beside this file")
    if not is_lokr(reading):
        raise NoCounterpartError("of LyCORIS', adapters here have lokr: adapter.kind")
    reading.notes[name] = "one product for q, k and v, of which each has its own there"
    return {"adapter.kind": "lokr"}


def _of_lokr(convert: Convert) -> Convert:
    def only(reading: Reading, name: str) -> Values:
        values = convert(reading, name)
        if not is_lycoris(reading):
            raise InertError("only lora_type=lycoris uses it")
        if not is_lokr(reading):
            raise NoCounterpartError("is of another algo than lokr")
        return values

    return only


def _is_full(reading: Reading) -> bool:
    return reading.is_on("lycoris.full_matrix")


def _rank(reading: Reading, name: str) -> Values:
    value = reading.positive(name)
    if _is_full(reading):
        raise InertError("full_matrix ignores it")
    if value > _LARGEST_RANK:
        reading.notes[name] = f"above {_LARGEST_RANK}: no factor is a product of the rank"
        return {"adapter.lokr.full_matrix": True}
    return {"adapter.rank": value}


def _alpha(reading: Reading, name: str) -> Values:
    value = reading.number(name)
    dimension = "lycoris.linear_dim"
    rank = reading.positive(dimension) if reading.has(dimension) else None
    if _is_full(reading) or (rank is not None and rank > _LARGEST_RANK):
        raise InertError("no factor is a product of the rank")
    if value == 0 and rank is None:
        raise NoCounterpartError("0 stands for linear_dim, which is not given")
    return {"adapter.alpha": float(value or rank or 0)}


def _targets(reading: Reading, name: str) -> Values:
    given = set(reading.texts(name))
    ranks = {f"adapter.ranks.{kind}": 0 for kind in _MODULATIONS}
    if given == {"Attention", "FeedForward"}:
        return ranks
    if given == {"Attention"}:
        return ranks | {f"adapter.ranks.{kind}": 0 for kind in _MLPS}
    raise NoCounterpartError("adapter.ranks, double_blocks and single_blocks select layers")


def _factors(reading: Reading, name: str) -> Values:
    """Return the factor that all kinds of layers have."""
    given = reading.value(name)
    settings = list(given.values()) if isinstance(given, dict) else []
    if not settings or not all(isinstance(it, dict) for it in settings):
        raise reading.wrong(name, "must be a mapping of layers to mappings of options")
    factors = {it.get("factor") for it in settings if isinstance(it.get("factor"), int)}
    if len(factors) != 1 or any(it.keys() != {"factor"} for it in settings):
        raise NoCounterpartError("all layers have the same adapter.lokr.factor and rank")
    return {"adapter.lokr.factor": factors.pop()}


def _flags() -> Iterator[tuple[str, Option]]:
    for name in ("full_matrix", "decompose_both"):
        path = f"adapter.lokr.{name}"

        def convert(reading: Reading, option: str, path: str = path) -> Values:
            return {path: reading.flag(option)}

        yield f"lycoris.{name}", fields([path], _of_lokr(convert))


LYCORIS: Mapping[str, Option] = {
    "lora_type": fields(
        ["adapter.kind"], lora_type, "standard", "lycoris with algo lokr, by its file, or standard"
    ),
    "lycoris_config": automatic("its options are lycoris.*, if it is found beside this file"),
    "lycoris.algo": automatic("is part of lora_type"),
    "lycoris.multiplier": missing("strength 1", 1),
    "lycoris.linear_dim": fields(["adapter.rank", "adapter.lokr.full_matrix"], _of_lokr(_rank)),
    "lycoris.linear_alpha": fields(["adapter.alpha"], _of_lokr(_alpha)),
    "lycoris.factor": fields(
        ["adapter.lokr.factor"],
        _of_lokr(lambda reading, name: {"adapter.lokr.factor": int(reading.number(name))}),
    ),
    **dict(_flags()),
    "lycoris.module_dropout": fields(
        ["adapter.module_dropout"],
        _of_lokr(lambda reading, name: {"adapter.module_dropout": reading.number(name)}),
    ),
    **each("lycoris.dropout lycoris.rank_dropout", missing("lokr here has module_dropout", 0)),
    "lycoris.bypass_mode": automatic("a product is never multiplied out"),
    "lycoris.use_scalar": missing("a factor is learned nowhere"),
    "lycoris.apply_preset": missing("adapter.ranks, double_blocks and single_blocks select layers"),
    _TARGETS: fields(
        _FIELDS,
        _of_lokr(_targets),
        note="0 for kinds of layers without; of single blocks, linear1 and 2",
    ),
    _FACTORS: fields(["adapter.lokr.factor"], _of_lokr(_factors), note="if all are equal"),
    "init_lokr_norm": missing("products are 0 at first, unless adapter.initial names some"),
}
"""In the order of reports."""
