"""Conversions of options of kohya's sd-scripts that depend on others."""

from __future__ import annotations

from collections.abc import Callable

from fluxtrain.contract.run.config import value_at
from fluxtrain.imports import common
from fluxtrain.imports.common import Optimizers
from fluxtrain.imports.table import Convert, IgnoredError, NoCounterpartError, Reading, Values

SPLIT = "validation_split"
_NAMES = dict.fromkeys(("adamw", "pagedadamw", "pagedadamw32bit"), "adamw")
_NAMES |= dict.fromkeys(("adamw8bit", "pagedadamw8bit"), "adamw_8bit")
_NAMES |= dict.fromkeys(("lion", "lion8bit", "pagedlion8bit"), "lion")
_NAMES |= {"prodigy": "prodigy", "adafactor": "adafactor"}
_NAMES |= {"adamwschedulefree": "schedule_free_adamw"}
_FLAGS = {"use_8bit_adam": "AdamW8bit", "use_lion_optimizer": "Lion"}
"""Older options that choose an optimizer."""
SCHEDULES = {"constant": "constant", "constant_with_warmup": "constant"}
SCHEDULES |= {"cosine": "cosine", "cosine_with_min_lr": "cosine", "linear": "linear"}
SCHEDULES |= {name: name for name in ("cosine_with_restarts", "polynomial")}
_POLYNOMIAL_END = 1e-7
"""Last learning rate of transformers' polynomial schedule."""


def _other_settings(reading: Reading, name: str) -> str:
    """Return why the optimizer ``name`` of ours is not the same beside its optimizer_args; empty: it is."""
    args = "optimizer_args."
    if name == "adafactor":
        settings = ("relative_step", "scale_parameter")
        if any(reading.flag(args + it, True) for it in settings):
            return "only with optimizer_args relative_step=False and scale_parameter=False"
    if name == "prodigy" and not reading.flag(f"{args}decouple", True):
        return "only with optimizer_args decouple=True"
    return ""


OPTIMIZERS = Optimizers("optimizer_type", _NAMES, refuse=_other_settings)
KINDS = ("img_attn", "txt_attn", "img_mlp", "txt_mlp", "img_mod", "txt_mod", "single", "single_mod")


def flatten(reading: Reading) -> dict[str, object]:
    """Return the options with each NAME=VALUE of network_args and optimizer_args as one of its own."""
    options = dict(reading.given)
    for name in ("network_args", "optimizer_args"):
        options.pop(name, None)
        options |= {f"{name}.{key}": value for key, value in reading.pairs(name).items()}
    for name, optimizer in _FLAGS.items():
        if reading.is_on(name) and "optimizer_type" not in options:
            options["optimizer_type"] = optimizer
    return {name: value for name, value in options.items() if value is not None}


def base(reading: Reading) -> Values:
    """Return the preset; without a network module, all weights are trained."""
    model = reading.text("pretrained_model_name_or_path", "")
    return common.preset(model, reading.has("network_module"))


def network_kind(reading: Reading, name: str) -> Values:
    """Return the kind of adapter: networks.lora_flux, or LyCORIS' lokr and loha; others are lost."""
    if reading.text(name) == "networks.lora_flux":
        return reading.noted(name, "adapter.kind is lora", {"adapter.kind": "lora"})
    if _is_lycoris(reading) and (kind := common.lycoris_kind(reading, _ALGORITHM)):
        return {"adapter.kind": kind}
    if reading.text(name) == "networks.lora":
        text = "must be networks.lora_flux: networks.lora is of Stable Diffusion"
        raise reading.wrong(name, text)
    raise NoCounterpartError("adapters here are networks.lora_flux's and those of lycoris.kohya")


def of_lokr(path: str, read: Callable[[Reading, str], object]) -> Convert:
    """Return the conversion of an option of LyCORIS' lokr to the field ``path``."""

    def only(reading: Reading, name: str) -> Values:
        if not _is_lokr(reading):
            raise NoCounterpartError("is of lycoris.kohya with algo=lokr")
        return {path: read(reading, name)}

    return only


def of_lora(path: str, read: Callable[[Reading, str], object]) -> Convert:
    """Return the conversion of an option of networks.lora_flux to the field ``path``, which LyCORIS lacks."""

    def only(reading: Reading, name: str) -> Values:
        value = read(reading, name)
        if _is_lycoris(reading):
            raise NoCounterpartError(f"{path} is of networks.lora_flux, not of LyCORIS")
        return {path: value}

    return only


def dropout_argument(reading: Reading, name: str) -> Values:
    """Return nothing: networks.lora_flux ignores it, and LyCORIS' is of its update."""
    if not _is_lycoris(reading):
        raise IgnoredError("network_dropout is read")
    if reading.number(name):
        raise NoCounterpartError("adapter.module_dropout comes close")
    return {}


def _is_lycoris(reading: Reading) -> bool:
    return reading.word("network_module", "") == "lycoris.kohya"


def _is_lokr(reading: Reading) -> bool:
    return _is_lycoris(reading) and common.lycoris_kind(reading, _ALGORITHM) == "lokr"


def network_rank(reading: Reading, name: str) -> Values:
    """Return the rank; one that is too large makes a lokr of two whole matrices."""
    value = reading.positive(name)
    if _is_whole(reading):
        return reading.noted(name, common.WHOLE, {"adapter.lokr.full_matrix": True})
    return {"adapter.rank": value}


def _is_whole(reading: Reading) -> bool:
    return _is_lokr(reading) and reading.positive("network_dim") > common.LARGEST_RANK


def network_alpha(reading: Reading, name: str) -> Values:
    """Return alpha; 0 stands for the rank."""
    value = reading.number(name)
    if _is_whole(reading):
        raise IgnoredError("no factor is a product of the rank")
    if value == 0:
        reading.notes[name] = "0 stands for the rank"
    return {"adapter.alpha": float(value or reading.positive("network_dim"))}


def of_network(convert: Convert) -> Convert:
    """Return ``convert`` for an option that is used only with a network."""

    def only(reading: Reading, name: str) -> Values:
        if not reading.has("network_module"):
            return reading.noted(name, "without network_module, no adapter is trained")
        return convert(reading, name)

    return only


def small_base(reading: Reading, name: str) -> Values:
    """Return the data type of the frozen weights."""
    return {"adapter.base_dtype": "fp8" if reading.flag(name) else "compute"}


_MOST_SWAPPED = 35
"""sd-scripts refuses more."""


def swapped_blocks(reading: Reading, name: str) -> Values:
    """Return the blocks in host memory: half of the count are double blocks, the others two single ones."""
    count = reading.whole(name)
    if count and not reading.has("network_module"):
        raise NoCounterpartError("parallel.offload_blocks is of weights that are not trained")
    if count > _MOST_SWAPPED:
        raise reading.wrong(name, f"must be at most {_MOST_SWAPPED}")
    double = count // 2
    return common.swapped_blocks(double + 2 * (count - double))


def full_bf16(reading: Reading, name: str) -> Values:
    """Return the data type of the trained weights."""
    if not reading.flag(name):
        return reading.noted(name, "off here too")
    if reading.has("network_module"):
        raise NoCounterpartError("adapters are float32 here")
    if reading.word("mixed_precision") != "bf16":
        raise reading.wrong(name, "needs mixed_precision=bf16")
    return common.bfloat16_weights(OPTIMIZERS.ours(reading))


def schedule(reading: Reading, name: str) -> Values:
    why = f"schedules here are {', '.join(sorted(set(SCHEDULES.values())))}"
    values: dict[str, object] = {"schedule.decay": reading.among(name, SCHEDULES, why)}
    if values["schedule.decay"] == "polynomial":
        values["schedule.min_learning_rate"] = _POLYNOMIAL_END
    return values


def of_schedule(decay: str, path: str, read: Callable[[Reading, str], object]) -> Convert:
    """Return the conversion of an option that one schedule uses."""

    def convert(reading: Reading, name: str) -> Values:
        if reading.word("lr_scheduler") != decay:
            raise IgnoredError(f"{reading.text('lr_scheduler')} does not use it, {decay} does")
        return {path: read(reading, name)}

    return convert


def warmup(reading: Reading, name: str) -> Values:
    """Return the steps of the warm-up; warmup_ratio, and a number below 1, is a fraction of all steps."""
    is_ratio = name == "warmup_ratio"
    if is_ratio and not reading.has("train_mode"):
        raise IgnoredError("only LoRA_Easy_Training_Scripts reads it")
    if reading.word("lr_scheduler") == "constant":
        reading.notes[name] = "constant has no warm-up there; constant_with_warmup has"
        return {"schedule.warmup_steps": 0}
    number = reading.number(name)
    if not is_ratio and not 0 < number < 1:
        return {"schedule.warmup_steps": reading.whole(name)}
    total = common.required_steps(_steps(reading), "schedule.warmup_steps")
    return {"schedule.warmup_steps": round(number * total) if is_ratio else int(number * total)}


def least_rate(reading: Reading, name: str) -> Values:
    """Return the final learning rate of cosine_with_min_lr."""
    if reading.word("lr_scheduler") != "cosine_with_min_lr" or not OPTIMIZERS.ours(reading):
        raise IgnoredError("only cosine_with_min_lr uses it")
    return {"schedule.min_learning_rate": reading.number(name) * reading.number("learning_rate")}


def steps(reading: Reading, name: str) -> Values:
    """Return the number of steps, unless max_train_epochs gives it."""
    if reading.has("max_train_epochs"):
        return reading.noted(name, "max_train_epochs wins there")
    return {"schedule.steps": reading.positive(name)}


def steps_of(epochs: int, reading: Reading) -> int | None:
    """Return the optimizer steps of ``epochs`` of pictures that are not held out; None: unknown."""
    return common.steps_of(epochs, reading, held_out=reading.number(SPLIT, 0.0))


def epochs(reading: Reading, name: str) -> Values:
    """Return the epochs, or their steps if the samples of an epoch are known."""
    found = steps_of(reading.positive(name), reading)
    if found is None:
        return {"schedule.epochs": reading.positive(name)}
    return {"schedule.steps": found}


def _steps(reading: Reading) -> int | None:
    if not reading.has("max_train_epochs"):
        return reading.positive("max_train_steps")
    return steps_of(reading.positive("max_train_epochs"), reading)


def every_epochs(path: str) -> Convert:
    """Return the conversion of an interval in epochs to the steps of the field at ``path``."""

    def convert(reading: Reading, name: str) -> Values:
        found = steps_of(reading.positive(name), reading)
        return {path: common.required_steps(found, path)}

    return convert


def timesteps(reading: Reading, name: str) -> Values:
    """Return the sampling of timesteps, with the numbers that it uses."""
    kind = reading.choice(name, "sigma", "uniform", "sigmoid", "shift", "flux_shift")
    if kind == "sigma":
        return _sigma(reading)
    values: dict[str, object] = {"flow.timestep_sampling": kind}
    if kind != "uniform":
        values["flow.sigmoid_scale"] = reading.number("sigmoid_scale")
    if kind == "shift":
        values["flow.shift"] = reading.number("discrete_flow_shift")
    return values


def _sigma(reading: Reading) -> Values:
    """Return the sampling of sigma, which is a weighting scheme's, shifted."""
    if reading.number("discrete_flow_shift") != 1:
        raise NoCounterpartError(
            "its shifted draws have no counterpart; flow.timestep_sampling has sigmoid, shift, flux_shift"
        )
    return draw(reading)


def draw(reading: Reading) -> Values:
    """Return the draw of timesteps of diffusers' weighting_scheme.

    It is an index into those that fall from 1 to 0: the mean of logit_normal changes its sign.
    """
    scheme = reading.word("weighting_scheme")
    if scheme in ("uniform", "none", "sigma_sqrt", "cosmap"):
        return {"flow.timestep_sampling": "uniform"}
    if scheme == "logit_normal":
        return {
            "flow.timestep_sampling": "logit_normal",
            "flow.logit_mean": -reading.number("logit_mean"),
            "flow.logit_std": reading.number("logit_std"),
        }
    return {"flow.timestep_sampling": "mode", "flow.mode_scale": reading.number("mode_scale")}


def only_with(used: str, *values: str) -> Convert:
    """Return the conversion of a number that the option ``used`` writes, with one of ``values``."""

    def convert(reading: Reading, name: str) -> Values:
        reading.number(name)
        if reading.word(used) in values:
            return reading.noted(name, f"written with {used}")
        raise IgnoredError(f"{used}={reading.text(used)} does not use it")

    return convert


def blocks(reading: Reading, name: str) -> Values:
    """Return the blocks of train_blocks: all, single or double."""
    word = reading.choice(name, "all", "single", "double")
    return {
        "adapter.double_blocks": "none" if word == "single" else "all",
        "adapter.single_blocks": "none" if word == "double" else "all",
    }


def resolution(reading: Reading, name: str) -> Values:
    """Return the size of images; kohya's is a number, or width and height."""
    value = reading.value(name)
    parts = value.split(",") if isinstance(value, str) else value
    sides = parts if isinstance(parts, list) else [parts]
    if len(sides) > 2 or not sides:
        raise reading.wrong(name, "must be a number of pixels, or width and height")
    if len(sides) == 2 and str(sides[0]).strip() != str(sides[1]).strip():
        text = "data.image_size is the side of squares, and of buckets the root of their area"
        raise NoCounterpartError(text)
    return common.square(reading, name, sides[0])


def tracker(reading: Reading, name: str) -> Values:
    word = reading.choice(name, "tensorboard", "wandb", "all")
    return common.sinks(reading, word, "log_tracker_name", "wandb_run_name", "network_train")


def seed(reading: Reading, name: str) -> Values:
    """Return the seed; kohya draws one if none is given."""
    return {"seed": "random" if reading.value(name) == "random" else reading.whole(name)}


def scheme(reading: Reading, name: str) -> Values:
    """Return nothing: the scheme is used by timestep_sampling=sigma, and by its loss with sigma_scaled."""
    known = ("sigma_sqrt", "logit_normal", "mode", "cosmap", "none", "uniform")
    if reading.word(name) not in known:
        raise reading.wrong(name, f"must be one of {', '.join(known)}")
    if reading.word("timestep_sampling") != "sigma":
        raise IgnoredError("only timestep_sampling=sigma uses it")
    return reading.noted(name, "written with timestep_sampling")


def huber(reading: Reading, name: str) -> Values:
    """Return nothing: two losses use it, which have no counterpart."""
    word = reading.word("loss_type", "l2")
    if word in ("huber", "smooth_l1"):
        raise NoCounterpartError(f"is of loss_type={word}; the loss is the squared error")
    raise IgnoredError("only loss_type=huber and smooth_l1 use it")


def prediction(reading: Reading, name: str) -> Values:
    """Return nothing for raw, the velocity that is learned here."""
    if reading.choice(name, "raw", "additive", "sigma_scaled") == "raw":
        return reading.noted(name, "the loss is that of the velocity")
    raise NoCounterpartError("the loss is that of the velocity, which is raw there")


FIELDS = ["adapter.clip.rank", "adapter.clip.alpha"]
RATE = "adapter.clip.rate"
ALL_UP, UP = "adapter.rates.up", "adapter.clip.up"
LORA_PLUS, LORA_PLUS_UNET, LORA_PLUS_CLIP = (
    f"network_args.loraplus_{part}lr_ratio" for part in ("", "unet_", "text_encoder_")
)
_ONLY = "network_train_unet_only"
_ALGORITHM, _PRESET = "network_args.algo", "network_args.preset"
_IMAGES = ("train_data_dir", "dataset_config")


def unet_only(reading: Reading, name: str) -> Values:
    """Return the rank and alpha of CLIP's adapters, those of the transformer's, unless there are none."""
    if not _trains_clip(reading):
        return reading.noted(name, "adapters are the transformer's only")
    why = "sd-scripts trains adapters of CLIP-L too, unless this is true; here "
    if reading.word("network_module") != "networks.lora_flux":
        kind = _network(reading)
        raise NoCounterpartError(f"{why}those are networks.lora_flux's, not {kind}")
    if not _has_images(reading):
        raise NoCounterpartError(f"{why}adapter.clip does, with the captions of data.images")
    alpha = network_alpha(reading, "network_alpha")["adapter.alpha"]
    rank = reading.positive("network_dim")
    reading.notes[name] = "sd-scripts trains adapters of CLIP-L too, unless this is true"
    return {**dict(zip(FIELDS, (rank, alpha), strict=True)), **_rate(reading)}


def text_encoder_rate(reading: Reading, name: str) -> Values:
    """Return the factor of the learning rate of CLIP's adapters: over that of the transformer's."""
    is_trained = reading.has("network_module") and not reading.is_on(_ONLY)
    if is_trained and not _trains_clip(reading):
        return reading.noted(name, "0 trains no text encoder")
    return _required_rate(reading)


def up_of_all(reading: Reading, name: str) -> Values:
    """Return the factor of all matrices B, and that of CLIP's if the transformer's have another one."""
    own = _transformer_up(reading, name)
    is_other = reading.has(LORA_PLUS_UNET) and _has_clip(reading)
    return {**own, UP: reading.number(name)} if is_other else own


def up_of_transformer(reading: Reading, name: str) -> Values:
    """Return the factor of the transformer's matrices B; 1 for CLIP's, unless others set it."""
    own = _transformer_up(reading, name)
    is_alone = not reading.has(LORA_PLUS) and _has_clip(reading)
    return {**own, UP: 1.0} if is_alone else own


def up_of_clip(reading: Reading, name: str) -> Values:
    """Return the factor of CLIP's matrices B."""
    value = reading.number(name)
    _required_rate(reading)
    _require_rates(reading)
    return {UP: value}


def _transformer_up(reading: Reading, name: str) -> Values:
    values = of_lora(ALL_UP, Reading.number)(reading, name)
    _require_rates(reading)
    return values


def _require_rates(reading: Reading) -> None:
    if OPTIMIZERS.ours(reading) == "prodigy":
        raise NoCounterpartError("Prodigy finds one step size for all adapters")


def _has_clip(reading: Reading) -> bool:
    """Return whether `unet_only` writes adapters of CLIP."""
    try:
        _required_rate(reading)
    except NoCounterpartError:
        return False
    return True


def _required_rate(reading: Reading) -> Values:
    """Return the factor of the learning rate of CLIP's adapters, unless it is 1.

    Raises IgnoredError if CLIP has none there, NoCounterpartError if it cannot have them here.
    """
    if not _trains_clip(reading):
        raise IgnoredError("adapters are the transformer's only")
    if reading.word("network_module") != "networks.lora_flux" or not _has_images(reading):
        raise NoCounterpartError("CLIP-L has no adapters here")
    return _rate(reading)


def _network(reading: Reading) -> str:
    """Return what the adapters are there, for messages; LyCORIS has an algo, and DoRA with dora_wd."""
    name = reading.text("network_module")
    if reading.has(_ALGORITHM):
        name += f"'s {reading.word(_ALGORITHM)}"
    return f"{name} with DoRA" if reading.is_on("network_args.dora_wd") else name


def _trains_clip(reading: Reading) -> bool:
    return (
        reading.has("network_module")
        and not reading.is_on(_ONLY)
        and not reading.text(_PRESET, "").startswith("unet-")
        and (not reading.has("text_encoder_lr") or _text_rate(reading) > 0)
    )


def _has_images(reading: Reading) -> bool:
    if any(reading.has(option) for option in _IMAGES):
        return True
    given: object = value_at(reading.overrides, "data.images")
    return given is not None


def _rate(reading: Reading) -> Values:
    """Return the factor of the learning rate, unless it is 1."""
    own = reading.number("unet_lr" if reading.has("unet_lr") else "learning_rate")
    rate = float(f"{_text_rate(reading) / own:.12g}") if own > 0 else 1.0
    if rate == 1:
        return {}
    _require_rates(reading)
    return {RATE: rate}


def _text_rate(reading: Reading) -> float:
    """Return the learning rate of text encoders, of a list that of the first: CLIP-L; T5's is the second."""
    name = "text_encoder_lr"
    if not reading.has(name):
        return reading.number("learning_rate")
    value = reading.value(name)
    each = value if isinstance(value, list) else [value]
    rates = [Reading({name: rate}, {}).number(name) for rate in each]
    if len(rates) not in (1, 2) or min(rates) < 0:
        raise reading.wrong(name, "must be 0 or more, of CLIP-L, or of CLIP-L and T5")
    return rates[0]


STEPS = "validate_every_n_steps"
EVERY = "evaluation.every_samples"


def split(reading: Reading, name: str) -> Values:
    """Return the part of the pictures that is held out."""
    part = reading.number(name)
    if not part:
        reading.notes[name] = "none is held out here either"
    return {"data.validation_split": part, "evaluation.at_end": part > 0}


def every_steps(reading: Reading, name: str) -> Values:
    """Return the samples between two evaluations for a number of steps."""
    return {EVERY: _samples(reading, _number(reading, name))}


def validation_every_epochs(reading: Reading, name: str) -> Values:
    """Return the samples between two evaluations for a number of epochs, unless steps are given too."""
    epochs = _number(reading, name)
    if reading.number(STEPS, 0):
        raise NoCounterpartError(f"evaluations have one interval: {STEPS}, and one at the end")
    steps = common.required_steps(steps_of(epochs, reading), EVERY)
    return {EVERY: _samples(reading, steps)}


def most_batches(reading: Reading, name: str) -> Values:
    """Raise NoCounterpartError: an evaluation is of all pictures that are held out."""
    _number(reading, name)
    raise NoCounterpartError(
        "an evaluation has all pictures that are held out; a smaller validation_split has fewer"
    )


def validation_seed(reading: Reading, name: str) -> Values:
    """Return nothing if it is the seed of the run, which chooses the pictures here."""
    _require_split(reading)
    if reading.has("seed") and reading.value("seed") == reading.value(name):
        return reading.noted(name, "is the seed of the run")
    raise NoCounterpartError("the seed of the run chooses the pictures, and their noise")


def _require_split(reading: Reading) -> None:
    if not reading.number(SPLIT, 0):
        raise IgnoredError(f"only {SPLIT} uses it")


def _number(reading: Reading, name: str) -> int:
    """Return the value of ``name``, which is used beside a split; tools write 0 for none."""
    _require_split(reading)
    number = reading.whole(name)
    if not number:
        raise IgnoredError("0 asks for none")
    return number


def _samples(reading: Reading, steps: int) -> object:
    found = common.batch()(reading, common.BATCH)["schedule.global_batch_size"]
    assert isinstance(found, int), "a conversion of whole numbers"
    return steps * found
