"""Conversions of SimpleTuner's options that depend on others."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress

from fluxtrain.errors import ConfigError
from fluxtrain.imports import common
from fluxtrain.imports.common import SELECTION_FIELDS, selection
from fluxtrain.imports.table import (
    Convert,
    IgnoredError,
    NoCounterpartError,
    Option,
    Reading,
    Values,
    automatic,
    each,
    fields,
    missing,
    only_if,
    to,
)

OPTIMIZERS = dict.fromkeys(("adamw", "adamw_bf16", "optimi-adamw"), "adamw")
OPTIMIZERS |= dict.fromkeys(("ao-adamw8bit", "bnb-adamw8bit", "adamw8bit"), "adamw_8bit")
OPTIMIZERS |= dict.fromkeys(("optimi-lion", "bnb-lion", "bnb-lion8bit"), "lion")
OPTIMIZERS |= dict.fromkeys(("bnb-lion-paged", "bnb-lion8bit-paged"), "lion")
_ALIASES = {
    "checkpointing_steps": "checkpoint_step_interval",
    "validation_steps": "validation_step_interval",
    "flow_matching_sigmoid_scale": "flow_sigmoid_scale",
}
_ALIASES |= {f"flux_{name}": f"flow_{name}" for name in ("schedule_shift", "schedule_auto_shift")}
_ALIASES |= {
    f"flux_use_{name}": f"flow_use_{name}" for name in ("uniform_schedule", "beta_schedule")
}
_ATTENTION: Values = {
    "adapter.ranks.img_mlp": 0,
    "adapter.ranks.txt_mlp": 0,
    "adapter.ranks.img_mod": 0,
    "adapter.ranks.txt_mod": 0,
    "adapter.ranks.single_mod": 0,
}
_MODULATIONS = ("img_mod", "txt_mod", "single_mod")
_TEXT_ATTENTION = ("add_k_proj", "add_q_proj", "add_v_proj", "to_add_out")
_TARGETS: Mapping[str, tuple[str, ...]] = {
    "context": _TEXT_ATTENTION,
    "context+ffs": (*_TEXT_ATTENTION, "ff_context.net.0.proj", "ff_context.net.2"),
    "tiny": ("single_transformer_blocks.7.proj_out", "single_transformer_blocks.20.proj_out"),
    "nano": ("single_transformer_blocks.7.proj_out",),
}
"""Parts of diffusers' names by flux_lora_target."""
TARGET_FIELDS = (*_ATTENTION, *SELECTION_FIELDS)
"""The fields that flux_lora_target sets."""


def flatten(reading: Reading) -> dict[str, object]:
    """Return the options without dashes, by their present names."""
    options: dict[str, object] = {}
    for given, value in reading.given.items():
        name = given.removeprefix("--")
        name = _ALIASES.get(name, name)
        if options.get(name, value) != value:
            raise reading.wrong(given, f"is given twice, as {name} too")
        if value is not None and value != "":
            options[name] = value
    return options


def _is_adapter(reading: Reading) -> bool:
    return reading.word("model_type") == "lora"


def flavour(reading: Reading, name: str) -> Values:
    """Return Kontext's condition, nothing for flavours whose weights are dev's, schnell's or named beside."""
    word = reading.word(name)
    if word == "kontext":
        return common.KONTEXT
    if word in ("dev", "schnell") or reading.has("pretrained_model_name_or_path"):
        return {}
    raise NoCounterpartError(f"the weights of {word} are not fetched: initial_weights names them")


def base(reading: Reading) -> Values:
    """Return the preset; peft's adapters are those of diffusers' layers."""
    if not reading.has("model_family"):
        raise reading.wrong("model_family", "must be given, and flux")
    flavour = reading.text("model_flavour", "")
    path = reading.text("pretrained_model_name_or_path", "")
    if not _is_adapter(reading):
        return common.preset(flavour or path, False)
    files: dict[str, object] = {"adapter.split_qkv": True, "adapter_file.layout": "diffusers"}
    if is_lycoris(reading) and _kind(reading) != "lora":
        files = {"adapter.split_qkv": False, "adapter_file.layout": "kohya"}
    return {**common.preset(flavour or path, True), **files}


def model_type(reading: Reading, name: str) -> Values:
    """Return the kind of adapter, or nothing for full."""
    return {"adapter.kind": "lora"} if reading.choice(name, "lora", "full") == "lora" else {}


def of_adapter(convert: Convert) -> Convert:
    """Return ``convert`` for an option that is used only with model_type=lora."""
    return only_if(_is_adapter, "only model_type=lora uses it", convert)


def of_peft(convert: Convert) -> Convert:
    """Return ``convert`` for an option that LyCORIS' adapters do not use."""

    def only(reading: Reading, name: str) -> Values:
        if not is_lycoris(reading):
            return convert(reading, name)
        with suppress(NoCounterpartError):
            convert(reading, name)
        raise IgnoredError("lora_type=lycoris does not use it; lycoris_config has its own")

    return of_adapter(only)


def rank(reading: Reading, name: str) -> Values:
    """Return the rank, and alpha, which is the rank unless it is given."""
    value = reading.positive(name)
    return {"adapter.rank": value, "adapter.alpha": float(value)}


def target(reading: Reading, name: str) -> Values:
    """Return the layers that have adapters."""
    word = reading.word(name)
    if word == "ai-toolkit":
        return {f"adapter.ranks.{kind}": None for kind in _MODULATIONS}
    if word == "all+ffs":
        return {f"adapter.ranks.{kind}": 0 for kind in _MODULATIONS}
    if word == "all":
        reading.notes[name] = "single blocks' linear1 and linear2 have adapters as a whole"
        return _ATTENTION
    if word in _TARGETS:
        return selection(_TARGETS[word])
    raise NoCounterpartError("adapter.layers, double_blocks and single_blocks select layers")


def layout(reading: Reading, name: str) -> Values:
    known = {"diffusers": "diffusers", "comfyui": "bfl"}
    why = "layouts are kohya, diffusers, ai-toolkit and bfl"
    return {"adapter_file.layout": reading.among(name, known, why)}


def is_known(reading: Reading) -> bool:
    """Return whether the optimizer has a counterpart."""
    return reading.word("optimizer") in OPTIMIZERS


def optimizer(reading: Reading, name: str) -> Values:
    why = "here adamw, with the preset's learning rate"
    found, word = reading.among(name, OPTIMIZERS, why), reading.word(name)
    if found == "lion":
        reading.notes[name] = "its weights and states are float32 here"
        return {"optim.name": found, **common.DEFAULTS[found]}
    is_bfloat16 = word == "adamw_bf16" and reading.word("mixed_precision") == "bf16"
    if is_bfloat16 and not _is_adapter(reading):
        reading.notes[name] = "weights are rounded stochastically; its states are float32 here"
        return {"optim.name": found, **common.bfloat16_weights(None)}
    if word != "adamw":
        reading.notes[name] = "its weights and states are float32 here"
    return {"optim.name": found}


def of_optimizer(path: str) -> Convert:
    """Return the conversion of a number that is meant for the optimizer in use."""

    def convert(reading: Reading, name: str) -> Values:
        if not is_known(reading):
            raise NoCounterpartError(f"is meant for {reading.text('optimizer')}")
        if name.startswith("adam_") and OPTIMIZERS[reading.word("optimizer")] == "lion":
            raise IgnoredError("only Adam's optimizers use it")
        return {path: reading.number(name)}

    return convert


def clipping(reading: Reading, name: str) -> Values:
    """Return the clipping by the norm; that of single values has no counterpart."""
    if reading.word("grad_clip_method") != "norm":
        raise NoCounterpartError("clips single values there; here the norm: grad_clip_method=norm")
    return common.no_clipping_at_zero(reading, name)


def schedule(reading: Reading, name: str) -> Values:
    """Return the learning rate's schedule; constant has a warm-up there only by its name."""
    known = {"constant": "constant", "constant_with_warmup": "constant", "linear": "linear"}
    known |= {"polynomial": "polynomial"}
    why = "constant, constant_with_warmup, linear and polynomial have counterparts"
    if reading.word(name) == "cosine":
        why = "SimpleTuner's cosine falls to lr_end and starts anew after each lr_warmup_steps"
    values: dict[str, object] = {"schedule.decay": reading.among(name, known, why)}
    if values["schedule.decay"] == "polynomial":
        values["schedule.min_learning_rate"] = reading.number("lr_end")
    return values


def warmup(reading: Reading, name: str) -> Values:
    """Return the steps of the warm-up."""
    if reading.word("lr_scheduler") == "constant":
        reading.notes[name] = "constant has no warm-up there; constant_with_warmup has"
        return {"schedule.warmup_steps": 0}
    return {"schedule.warmup_steps": reading.whole(name)}


def lr_end(reading: Reading, name: str) -> Values:
    """Return nothing: polynomial writes it."""
    reading.number(name)
    if reading.word("lr_scheduler") != "polynomial":
        raise IgnoredError("only polynomial uses it")
    return reading.noted(name, "written with lr_scheduler")


def steps(reading: Reading, name: str) -> Values:
    """Return the number of steps; 0 stands for num_train_epochs."""
    if reading.whole(name) == 0:
        return reading.noted(name, "0 stands for num_train_epochs")
    return {"schedule.steps": reading.whole(name)}


def epochs(reading: Reading, name: str) -> Values:
    """Return the epochs, or their steps if the samples of one are known; max_train_steps wins."""
    if reading.whole("max_train_steps", 0) > 0:
        raise IgnoredError("max_train_steps wins")
    number = reading.number(name)
    if number <= 0:
        raise reading.wrong(name, "must be above 0, or max_train_steps must be")
    found = common.steps_of(number, reading)
    if found is None and number.is_integer():
        return {"schedule.epochs": int(number)}
    return {"schedule.steps": common.required_steps(found, "schedule.steps")}


def timesteps(reading: Reading, name: str) -> Values:
    """Return the sampling of timesteps that the options flow_* describe."""
    scale = reading.number("flow_sigmoid_scale")
    shift = reading.number(name)
    if reading.is_on("flow_use_beta_schedule") or reading.is_on("flux_fast_schedule"):
        raise NoCounterpartError("flow.timestep_sampling has uniform, sigmoid, shift, flux_shift")
    is_shifted = reading.is_on("flow_schedule_auto_shift")
    if is_shifted and shift > 0 and name in reading.given:
        raise reading.wrong(name, "must be 0 with flow_schedule_auto_shift, as in SimpleTuner")
    if reading.is_on("flow_use_uniform_schedule"):
        if is_shifted or shift not in (0, 1):
            text = "a uniform draw is not shifted here: flow_schedule_shift=0, and no auto_shift"
            raise NoCounterpartError(text)
        return {"flow.timestep_sampling": "uniform"}
    if is_shifted:
        return {"flow.timestep_sampling": "flux_shift", "flow.sigmoid_scale": scale}
    if shift in (0, 1):
        return {"flow.timestep_sampling": "sigmoid", "flow.sigmoid_scale": scale}
    return {
        "flow.timestep_sampling": "shift",
        "flow.sigmoid_scale": scale,
        "flow.shift": shift,
    }


def of_timesteps(reading: Reading, name: str) -> Values:
    """Return nothing: flow_schedule_shift writes it."""
    return reading.noted(name, "written with flow_schedule_shift")


def guidance(reading: Reading, name: str) -> Values:
    """Return the guidance of the training, which is one number here."""
    if reading.word("flux_guidance_mode") != "constant":
        raise NoCounterpartError("flow.guidance is one number")
    return {"flow.guidance": reading.number(name)}


def recomputation(reading: Reading, name: str) -> Values:
    """Return the fraction of blocks that recompute, one of gradient_checkpointing_interval."""
    if not reading.flag(name):
        return {"parallel.activation_checkpointing": 0.0}
    every = reading.positive("gradient_checkpointing_interval", 1)
    return {"parallel.activation_checkpointing": 1 / every}


def tracker(reading: Reading, name: str) -> Values:
    word = reading.word(name)
    if word == "none":
        return reading.noted(name, "metrics.jsonl has the same")
    if word not in ("tensorboard", "wandb", "all"):
        raise NoCounterpartError("logging has tensorboard and wandb")
    options = ("tracker_project_name", "tracker_run_name")
    return common.sinks(reading, word, *options, "simpletuner")


def interval(reading: Reading, name: str) -> Values:
    """Return the steps between checkpoints, and between an adapter's files."""
    every = reading.whole(name)
    files = {"adapter_file.every_steps": every} if _is_adapter(reading) else {}
    return {"checkpoint.every_steps": every, **files}


def swapped_blocks(reading: Reading, name: str) -> Values:
    """Return the blocks in host memory."""
    count = reading.whole(name)
    if count and not _is_adapter(reading):
        raise NoCounterpartError("parallel.offload_blocks is of weights that are not trained")
    return common.swapped_blocks(count)


def small_base(reading: Reading, name: str) -> Values:
    """Return the data type of the frozen weights."""
    value = reading.text(name)
    if value in ("no_change", "bf16"):
        return {}
    if value not in ("fp8-quanto", "fp8-torchao"):
        raise NoCounterpartError(
            "frozen weights are in precision.compute, or adapter.base_dtype: fp8"
        )
    return {"adapter.base_dtype": "fp8"}


def dropout(reading: Reading, name: str) -> Values:
    """Return nothing for 0; peft drops inputs of A, and not its outputs as kohya and this trainer."""
    if reading.number(name) != 0:
        raise NoCounterpartError(
            "the dropout is of A x here, not of x; adapter.dropout comes close"
        )
    return {}


_MLPS = ("img_mlp", "txt_mlp")
_FIELDS = tuple(f"adapter.ranks.{kind}" for kind in (*_MODULATIONS, *_MLPS))
_LYCORIS_TARGETS, _FACTORS = (
    "lycoris.apply_preset.target_module",
    "lycoris.apply_preset.module_algo_map",
)


def is_lycoris(reading: Reading) -> bool:
    """Return whether adapters are LyCORIS' there."""
    return reading.word("lora_type", "standard") == "lycoris"


def _kind(reading: Reading) -> str | None:
    return common.lycoris_kind(reading, "lycoris.algo")


def lora_type(reading: Reading, name: str) -> Values:
    if reading.choice(name, "standard", "lycoris") == "standard":
        return reading.noted(name, "adapter.kind is lora")
    if not reading.has("lycoris.algo"):
        text = "its file, whose algo says what is trained, was not found beside this one"
        raise ConfigError("lycoris_config", reading.value("lycoris_config"), text)
    kind = _kind(reading)
    if kind is None:
        raise NoCounterpartError("adapter.kind has LyCORIS' lora, lokr and loha")
    if kind != "lora":
        reading.notes[name] = "one product for q, k and v, of which each has its own there"
    return {"adapter.kind": kind}


def _of_lycoris(convert: Convert, only_lokr: bool = False) -> Convert:
    def only(reading: Reading, name: str) -> Values:
        values = convert(reading, name)
        if not is_lycoris(reading):
            raise IgnoredError("only lora_type=lycoris uses it")
        if only_lokr and _kind(reading) != "lokr":
            raise NoCounterpartError("is of another algo than lokr")
        return values

    return only


def _of_lokr(convert: Convert) -> Convert:
    return _of_lycoris(convert, only_lokr=True)


def _is_full(reading: Reading) -> bool:
    return _kind(reading) == "lokr" and reading.is_on("lycoris.full_matrix")


def _rank(reading: Reading, name: str) -> Values:
    value = reading.positive(name)
    if _is_full(reading):
        raise IgnoredError("full_matrix ignores it")
    if _is_whole(reading, value):
        return reading.noted(name, common.WHOLE, {"adapter.lokr.full_matrix": True})
    return {"adapter.rank": value}


def _is_whole(reading: Reading, rank: int | None) -> bool:
    return _kind(reading) == "lokr" and rank is not None and rank > common.LARGEST_RANK


def _alpha(reading: Reading, name: str) -> Values:
    value = reading.number(name)
    dimension = "lycoris.linear_dim"
    rank = reading.positive(dimension) if reading.has(dimension) else None
    if _is_full(reading) or _is_whole(reading, rank):
        raise IgnoredError("no factor is a product of the rank")
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
    given = reading.value(name)
    settings = list(given.values()) if isinstance(given, dict) else []
    if not settings or not all(isinstance(it, dict) for it in settings):
        raise reading.wrong(name, "must be a mapping of layers to mappings of options")
    factors = {it.get("factor") for it in settings if isinstance(it.get("factor"), int)}
    if len(factors) != 1 or any(it.keys() != {"factor"} for it in settings):
        raise NoCounterpartError("all layers have the same adapter.lokr.factor and rank")
    return {"adapter.lokr.factor": factors.pop()}


LYCORIS: Mapping[str, Option] = {
    "lora_type": fields(
        ["adapter.kind"],
        lora_type,
        "standard",
        "lycoris with algo lora, lokr or loha, by its file, or standard",
    ),
    "lycoris_config": automatic("its options are lycoris.*, if it is found beside this file"),
    "lycoris.algo": automatic("is part of lora_type"),
    "lycoris.multiplier": missing("strength 1", 1),
    "lycoris.linear_dim": fields(["adapter.rank", "adapter.lokr.full_matrix"], _of_lycoris(_rank)),
    "lycoris.linear_alpha": fields(["adapter.alpha"], _of_lycoris(_alpha)),
    "lycoris.factor": fields(
        ["adapter.lokr.factor"],
        _of_lokr(to("adapter.lokr.factor", lambda *at: int(Reading.number(*at)))),
    ),
    **{
        f"lycoris.{name}": fields(
            [f"adapter.lokr.{name}"], _of_lokr(to(f"adapter.lokr.{name}", Reading.flag))
        )
        for name in ("full_matrix", "decompose_both")
    },
    "lycoris.module_dropout": fields(
        ["adapter.module_dropout"],
        _of_lycoris(to("adapter.module_dropout", Reading.number)),
    ),
    **each(
        "lycoris.dropout lycoris.rank_dropout",
        missing("LyCORIS' adapters have module_dropout here", 0),
    ),
    "lycoris.bypass_mode": automatic("the update is the same"),
    "lycoris.use_scalar": missing("a factor is learned nowhere"),
    "lycoris.apply_preset": missing("adapter.ranks, double_blocks and single_blocks select layers"),
    _LYCORIS_TARGETS: fields(
        _FIELDS,
        _of_lycoris(_targets),
        note="0 for kinds of layers without; of single blocks, linear1 and 2",
    ),
    _FACTORS: fields(["adapter.lokr.factor"], _of_lokr(_factors), note="if all are equal"),
    "init_lokr_norm": missing("products are 0 at first, unless adapter.initial names some"),
}
"""In the order of reports."""
