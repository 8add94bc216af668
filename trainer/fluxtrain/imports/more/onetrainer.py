"""The options of OneTrainer's JSON for FLUX.1, with dots for nested ones."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path, PurePosixPath, PureWindowsPath

from fluxtrain.imports import common
from fluxtrain.imports.kinds import ONETRAINER_KINDS
from fluxtrain.imports.table import (
    NoCounterpartError,
    Option,
    Reading,
    Trainer,
    Values,
    automatic,
    each,
    field_option,
    fields,
    ignored,
    missing,
    only_if,
    read_document,
    set_outside,
)

_BATCH = "batch_size"
_SCHEDULER, _TIMESTEPS = "learning_rate_scheduler", "timestep_distribution"
_IMAGES = ("concepts.path",)
_MORE = "concepts.more"
_NAMES = {"adamw": "adamw", "adamw_8bit": "adamw_8bit", "lion": "lion", "lion_8bit": "lion"}
_NAMES |= {"prodigy": "prodigy", "adafactor": "adafactor"}
_NAMES |= {"schedule_free_adamw": "schedule_free_adamw"}
OPTIMIZERS = common.Optimizers("optimizer.optimizer", _NAMES)
_LAYOUTS = {"diffusers_lora": "diffusers", "kohya_lora": "kohya", "original_lora": "bfl"}
_LAYOUTS |= {"comfy_lora": "bfl", "legacy_lora": "kohya", "safetensors": "kohya"}
_TYPES = {"bfloat_16": "bfloat16", "float_16": "float16", "float_32": "float32"}


def flatten(reading: Reading) -> dict[str, object]:
    """Return the options in sections with dots in their names, and those of the first concept that trains."""
    options: dict[str, object] = {}
    for name, value in reading.given.items():
        section = "transformer" if name == "prior" else name
        if isinstance(value, dict) and section not in _WHOLE:
            options |= {f"{section}.{key}": below for key, below in value.items()}
        elif name == "concepts" and isinstance(value, list):
            tables = [it for it in value if isinstance(it, dict) and it.get("enabled", True)]
            tables = [it for it in tables if not it.get("validation_concept")]
            used = [it for it in tables if it.get("type") != "VALIDATION"]
            options |= {_MORE: len(used)} if len(used) > 1 else {}
            for key, below in used[0].items() if used else ():
                parts = (
                    below.items() if isinstance(below, dict) and key in ("image", "text") else ()
                )
                options |= {f"concepts.{key}.{k}": v for k, v in parts} or {
                    f"concepts.{key}": below
                }
        elif isinstance(value, str) and name == "optimizer":
            options["optimizer.optimizer"] = value
        else:
            options[name] = value
    options = {_RENAMED.get(n, n): it for n, it in options.items() if it not in (None, "")}
    unused = sorted(name for name, value in options.items() if _is_unused(name, value))
    left = {name: value for name, value in options.items() if name not in unused}
    return {**left, "unused": unused} if unused else left


_RENAMED = {
    "lora_layers": "layer_filter",
    "lora_layers_regex": "layer_filter_regex",
    "lora_layer_preset": "layer_filter_preset",
    "concepts.repeats": "concepts.balancing",
}
"""Names of older versions."""
_UNUSED = re.compile(
    r"(unet|decoder\w*|effnet_encoder|text_encoder_[34]|align_prop|embedding|sample_image)[._]\w+|"
    r"(.+\.)?__version|\w+\.(train_embedding|stop_training_after)|"
    r"text_encoder\w*\.learning_rate|(additional|bundle_additional|preserve)_embedding\w*|"
    r"lora_decompose_norm_epsilon|vb_loss_strength|loss_weight_strength|un?masked_\w+|rolling_backup_count|save_filename_prefix|validate_after\w*|"
    r"concepts\.(include_subdirectories|text_variations|concept_stats|"
    r"image\.(random_\w+|resolution_override)|text\.(prompt_path|tag_delimiter|keep_tags_count|"
    r"tag_dropout_(mode|prob|special)\w*|caps_randomize_(mode|prob|lower)\w*))"
)


def _is_unused(name: str, value: object) -> bool:
    """Return whether ``value`` asks for nothing; of an option with a row, the row says it."""
    if name in _OPTIONS and name not in _ONLY_PRODIGYS:
        return False
    if name.endswith(".include"):
        return value is True
    return _UNUSED.fullmatch(name) is not None or value in (False, "NONE", "NEVER", "STANDARD", [])


def with_concepts(options: dict[str, object], folder: Path) -> dict[str, object]:
    """Return ``options`` with the concepts of the file that they name, if they have none and it is found."""
    name = options.get("concept_file_name", _CONCEPTS)
    file = common.near(name, folder, ".json") if options.get("concepts") is None else None
    return {**options, "concepts": read_document(file)} if file else options


_CONCEPTS = "training_concepts/concepts.json"
_ONLY_PRODIGYS = ("optimizer.use_bias_correction", "optimizer.safeguard_warmup")
_WHOLE = ("cloud", "secrets", "optimizer_defaults", "embedding", "quantization")


def _is_lora(reading: Reading) -> bool:
    return reading.word("training_method") == "lora"


def _base(reading: Reading) -> Values:
    own: dict[str, object] = {
        "seed": "random",
        "flow.prompt_dropout": 0.0,
        "checkpoint.keep": 10_000,
    }
    if not _is_lora(reading):
        return {**common.preset("", False), **own}
    return {**common.preset("", True), **own, "adapter.split_qkv": True}


def _of_lora(option: Option) -> Option:
    convert = only_if(_is_lora, "only training_method=LORA uses it", option.convert)
    return replace(option, convert=convert)


def _flux(reading: Reading, name: str) -> Values:
    if reading.word(name) != "flux_dev_1":
        raise reading.wrong(name, "must be FLUX_DEV_1")
    return {}


def _rate(reading: Reading, name: str) -> Values:
    own = "transformer.learning_rate"
    if reading.word("learning_rate_scaler", "none") != "none":
        raise NoCounterpartError("optim.learning_rate is used as it is")
    return {"optim.learning_rate": reading.number(own if reading.has(own) else name)}


def _schedule(reading: Reading, name: str) -> Values:
    known = {"constant": "constant", "linear": "linear", "cosine": "cosine"}
    known |= {"cosine_with_hard_restarts": "cosine_with_restarts"}
    values: dict[str, object] = {"schedule.decay": reading.among(name, known, "has no counterpart")}
    if values["schedule.decay"] != "constant":
        least = reading.number("learning_rate_min_factor")
        values["schedule.min_learning_rate"] = least * reading.number("learning_rate")
    if values["schedule.decay"] == "cosine_with_restarts":
        values["schedule.cycles"] = reading.positive("learning_rate_cycles")
    return values


def _warmup(reading: Reading, name: str) -> Values:
    """Return the optimizer's steps: batches there, or up to 1 a part of all steps."""
    number = reading.number(name)
    if number > 1:
        return {"schedule.warmup_steps": int(number / reading.positive(common.ACCUMULATION))}
    total = common.steps_of(reading.positive("epochs"), reading, _BATCH)
    if number <= 0:
        return {"schedule.warmup_steps": 0}
    return {
        "schedule.warmup_steps": int(number * common.required_steps(total, "schedule.warmup_steps"))
    }


def _epochs(reading: Reading, name: str) -> Values:
    epochs = reading.positive(name)
    found = common.steps_of(epochs, reading, _BATCH)
    return {"schedule.epochs": epochs} if found is None else {"schedule.steps": found}


def _timesteps(reading: Reading, name: str) -> Values:
    """Return the distribution of t, which is drawn before it is shifted."""
    kind, shift = reading.word(name), reading.number("timestep_shift")
    bias, weight = reading.number("noising_bias"), reading.number("noising_weight")
    is_dynamic = reading.is_on("dynamic_timestep_shifting")
    if kind == "logit_normal" and not is_dynamic and shift == 1:
        draws = {"flow.logit_mean": bias, "flow.logit_std": weight + 1}
        return {"flow.timestep_sampling": kind, **draws}
    if kind == "logit_normal" and bias == 0:
        values: Values = {"flow.sigmoid_scale": weight + 1}
        if is_dynamic:
            return {"flow.timestep_sampling": "flux_shift", **values}
        return {"flow.timestep_sampling": "shift", "flow.shift": shift, **values}
    if is_dynamic or shift != 1:
        raise NoCounterpartError("only LOGIT_NORMAL is shifted here, with noising_bias=0")
    if kind == "heavy_tail":
        return {"flow.timestep_sampling": "mode", "flow.mode_scale": weight}
    known = {"uniform": "uniform", "cos_map": "cosmap"}
    return {"flow.timestep_sampling": reading.among(name, known, "has no counterpart")}


def _resolution(reading: Reading, name: str) -> Values:
    sizes = [it.strip() for it in reading.text(name).split(",")]
    if not all(it.isdecimal() and len(it) < 6 for it in sizes):
        raise NoCounterpartError("sizes here are the roots of a number of pixels: data.buckets")
    if reading.is_on("aspect_ratio_bucketing"):
        return {
            "data.image_size": max(map(int, sizes)) // 16 * 16,
            "data.buckets.resolutions": [int(it) for it in sizes],
            "data.buckets.step": 64,
        }
    if len(sizes) > 1:
        raise NoCounterpartError("several sizes need data.buckets")
    return common.square(reading, name, sizes[0])


def _layers(reading: Reading, name: str) -> Values:
    if reading.is_on("layer_filter_regex"):
        raise NoCounterpartError("adapter.layers, double_blocks and single_blocks select layers")
    return common.selection([it.strip() for it in reading.text(name).split(",") if it.strip()])


def _preset(reading: Reading, name: str) -> Values:
    if reading.has("layer_filter"):
        return reading.noted(name, "layer_filter has its layers")
    if reading.word(name) == "full":
        raise NoCounterpartError(
            "the blocks' layers alone have adapters; there those around them too"
        )
    raise NoCounterpartError("layer_filter names no layers beside it")


def _small_base(reading: Reading, name: str) -> Values:
    word = reading.word(name)
    word = reading.word("weight_dtype") if word == "none" else word
    if not _is_lora(reading) and word == "bfloat_16":
        return common.bfloat16_weights(OPTIMIZERS.ours(reading))
    if not _is_lora(reading) and word != "float_32":
        raise NoCounterpartError("precision.weights is float32 or bfloat16")
    if word in _TYPES:
        return reading.noted(name, "frozen weights are in precision.compute")
    if word != "float_8":
        raise NoCounterpartError(
            "frozen weights are in precision.compute, or adapter.base_dtype: fp8"
        )
    return {"adapter.base_dtype": "fp8"}


def _compute(reading: Reading, name: str) -> Values:
    known = {"bfloat_16": "bfloat16", "float_32": "float32"}
    why = "float16 would need a loss scale; here bfloat16"
    return {"precision.compute": reading.among(name, known, why)}


def _layout(reading: Reading, name: str) -> Values:
    if reading.word(name) in ("safetensors", "legacy_lora"):
        reading.notes[name] = "there with names of its own"
    return {"adapter_file.layout": reading.among(name, _LAYOUTS, "fluxtrain adapter convert")}


def _file_name(reading: Reading, name: str) -> Values:
    stem = PurePosixPath(PureWindowsPath(reading.text(name)).as_posix()).stem
    return common.file_name(Reading({name: stem}, {}), name)


def _recomputed(reading: Reading, name: str) -> Values:
    old = "gradient_checkpointing"
    is_on = str(reading.value(old if old in reading.given else name)).lower() not in (
        "off",
        "false",
    )
    return {"parallel.activation_checkpointing": float(is_on)}


def _ema(reading: Reading, name: str) -> Values:
    if reading.word(name) == "off":
        return {}
    steps = reading.positive("ema_update_step_interval")
    reading.notes[name] = f"the decay of a step, of which {steps} make one of ema_decay"
    return {"optim.ema_decay": float(f"{reading.number('ema_decay') ** (1 / steps):.12g}")}


def _every(field: str, unit: str) -> Callable[[Reading, str], Values]:
    """Return the conversion of an interval in steps to ``field``; ``unit`` has its unit."""

    def convert(reading: Reading, name: str) -> Values:
        word = reading.word(unit)
        if word == "never":
            return reading.noted(name, "never")
        if word != "step":
            raise NoCounterpartError(f"{field} counts steps; this is in units of {word}")
        return {field: max(reading.positive(name) // reading.positive(common.ACCUMULATION), 1)}

    return convert


def _image(path: str, read: Callable[[Reading, str], object]) -> Option:
    return common.image_option(path, read, common.NOTE, _IMAGES)


def _concept_file(reading: Reading, name: str) -> Values:
    if not reading.has("concepts.path"):
        raise NoCounterpartError("was not found; data.images=FOLDER names the pictures")
    return reading.noted(name, "its concepts are read")


def _repeats(reading: Reading, name: str) -> object:
    number = reading.number(name)
    if reading.word("concepts.balancing_strategy", "repeats") != "repeats":
        raise NoCounterpartError("data.repeats counts repeats of all pictures, not samples")
    if number < 1 or not number.is_integer():
        raise NoCounterpartError("data.repeats is a whole number")
    return int(number)


def _source(reading: Reading, name: str) -> Values:
    if reading.word(name) != "sample":
        raise NoCounterpartError("text files beside the pictures have the captions")
    return {}


_OPTIONS: Mapping[str, Option] = {
    "training_method": fields([], common.one_of("lora", "fine_tune"), "fine_tune", "is part of the preset"),
    "model_type": fields([], _flux, "STABLE_DIFFUSION_15", "must be FLUX_DEV_1"),
    "base_model_name": field_option("initial_weights", Reading.text, note="below --models"),
    "peft_type": _of_lora(field_option("adapter.kind", lambda it, name: it.among(
        name, {"lora": "lora", "loha": "loha"}, "LoKr's own options have no counterpart"), "LORA")),
    "lora_rank": _of_lora(field_option("adapter.rank", Reading.positive, 16)),
    "lora_alpha": _of_lora(field_option("adapter.alpha", Reading.number, 1.0)),
    "lora_model_name": _of_lora(field_option("adapter.initial", Reading.text)),
    "lora_decompose": missing("adapter.dora has the norms of the output"),
    "dropout_probability": _of_lora(field_option("adapter.dropout", Reading.number, 0.0)),
    "layer_filter": _of_lora(fields(common.SELECTION_FIELDS, _layers)),
    "layer_filter_preset": _of_lora(fields([], _preset, "full", "the blocks' layers alone")),
    "transformer.weight_dtype": fields(
        ["adapter.base_dtype", "precision.weights"], _small_base, "NONE", "FLOAT_8 is fp8"),
    "transformer.guidance_scale": field_option("flow.guidance", Reading.number, 1.0),
    "transformer.train": fields([], common.must_be(True, "the transformer is trained"), note="must be true"),
    "transformer.offload_fraction": missing("parallel.offload_blocks is of whole blocks", 0),
    **each("text_encoder.train text_encoder_2.train",
           replace(missing("T5 is frozen; adapter.clip trains CLIP, beside data.images"), default=True)),
    "learning_rate": fields(["optim.learning_rate"], _rate, 3e-6, "transformer.learning_rate wins"),
    "optimizer.optimizer": fields(common.OPTIMIZER_FIELDS, OPTIMIZERS.convert, "ADAMW"),
    **OPTIMIZERS.rows("optimizer", "beta1 beta2 weight_decay eps d0 d_coef use_bias_correction "
                      "safeguard_warmup"),
    **each("optimizer.fused optimizer.foreach optimizer.fused_back_pass optimizer.stochastic_rounding "
           "optimizer.decouple", automatic("the update is the same")),
    "learning_rate_scheduler": fields(
        ["schedule.decay", "schedule.min_learning_rate", "schedule.cycles"], _schedule, "CONSTANT"),
    "learning_rate_warmup_steps": fields(["schedule.warmup_steps"], _warmup, 200, "batches there"),
    "epochs": fields(["schedule.epochs", "schedule.steps"], _epochs, 100, "with --epoch-samples: steps"),
    _BATCH: common.batch_option(common.batch(_BATCH), 1, "times accumulation and --gpus"),
    **{f"optimizer.{name}": missing("Adafactor has its usual settings", usual)
       for name, usual in (("clip_threshold", 1.0), ("decay_rate", -0.8), ("eps2", 0.001))},
    "clip_grad_norm": field_option("optim.max_grad_norm", Reading.number, 1.0),
    "ema": fields(["optim.ema_decay"], _ema, note="OFF: none"),
    "timestep_distribution": fields(
        ["flow.timestep_sampling", "flow.logit_mean", "flow.logit_std", "flow.sigmoid_scale", "flow.shift",
         "flow.mode_scale"], _timesteps, "UNIFORM", "LOGIT_NORMAL, UNIFORM, HEAVY_TAIL and COS_MAP"),
    "dynamic_timestep_shifting": automatic("is part of timestep_distribution"),
    "min_noising_strength": missing("t is drawn from 0 to 1", 0),
    "max_noising_strength": missing("t is drawn from 0 to 1", 1),
    "offset_noise_weight": field_option("flow.noise_offset", Reading.number, 0.0),
    **each("mae_strength log_cosh_strength huber_strength perturbation_noise_weight",
           missing("the loss is the squared error", 0)),
    "mse_strength": missing("the loss is the squared error", 1),
    "loss_weight_fn": missing("flow.loss_weighting has others", "CONSTANT"),
    "masked_training": missing("data.masks is a folder of masks"),
    "train_dtype": fields(["precision.compute"], _compute, "FLOAT_16"),
    "output_dtype": _of_lora(field_option(
        "adapter_file.dtype",
        lambda it, name: it.among(name, _TYPES, "files are bfloat16, float16, float32"), "FLOAT_32")),
    "output_model_format": _of_lora(fields(["adapter_file.layout"], _layout, "SAFETENSORS")),
    "output_model_destination": _of_lora(fields(["adapter_file.name"], _file_name)),
    **each("gradient_checkpointing transformer.gradient_checkpointing",
           fields(["parallel.activation_checkpointing"], _recomputed, True)),
    "resolution": fields(
        ["data.image_size", "data.buckets.resolutions", "data.buckets.step"], _resolution, "512",
        "a picture is a sample in each of several"),
    "concepts.path": field_option("data.images", Reading.text, note="a folder below --data"),
    _MORE: missing("only the first was read; a data set config, kohya's, has several (docs/data.md)"),
    "concepts.balancing": _image("data.repeats", _repeats),
    "concepts.balancing_strategy": automatic("is part of concepts.balancing"),
    "concepts.text.prompt_source": fields([], _source, note="text files beside the pictures"),
    "concepts.image.enable_random_flip": _image("data.variants.flip", Reading.flag),
    "concepts.text.enable_tag_shuffling": missing("data.variants.shuffle_caption"),
    "concepts.loss_weight": missing("all pictures count the same", 1),
    "concept_file_name": fields([], _concept_file, _CONCEPTS, "read if it is found"),
    "backup_after": fields(
        ["checkpoint.every_steps"], _every("checkpoint.every_steps", "backup_after_unit"), 30),
    "save_every": fields(
        ["adapter_file.every_steps"], _every("adapter_file.every_steps", "save_every_unit"), 0),
    "sample_definition_file_name": missing("sampling.prompts", "training_samples/samples.json"),
    **each("sample_after sample_after_unit samples",
           missing("sampling.every_steps and sampling.prompts", [])),
    "tensorboard": field_option("logging.tensorboard", Reading.flag),
    "validation": missing("data.validation_split holds pictures out"),
    **each("workspace_dir cache_dir debug_dir continue_last_backup",
           set_outside("fluxtrain run --output DIR")),
    **each("secrets cloud", replace(set_outside("in the environment"), is_secret=True)),
    **each("vae.weight_dtype text_encoder.weight_dtype text_encoder_2.weight_dtype vae.train",
           automatic("encoders.precision")),
    **each("latent_caching clear_cache_before_training dataloader_threads compile train_device temp_device "
           "attention_mechanism fallback_train_dtype enable_autocast_cache lora_weight_dtype only_cache "
           "__version tensorboard_expose tensorboard_port async_offloading enable_async_offloading "
           "quantization optimizer_defaults concepts.name concepts.seed concepts.enabled "
           "concepts.image_variations learning_rate_scaler transformer.learning_rate",
           automatic("decides the speed, or is part of another")),
    **{name: replace(automatic(f"is part of {of}"), default=default) for name, of, default in (
        ("weight_dtype", "transformer.weight_dtype", "FLOAT_32"), ("learning_rate_cycles", _SCHEDULER, 1),
        ("learning_rate_min_factor", _SCHEDULER, 0.0), ("aspect_ratio_bucketing", "resolution", True),
        (common.ACCUMULATION, "schedule.global_batch_size", 1), ("timestep_shift", _TIMESTEPS, 1.0),
        ("noising_weight", _TIMESTEPS, 0.0), ("noising_bias", _TIMESTEPS, 0.0), ("ema_decay", "ema", 0.999),
        ("ema_update_step_interval", "ema", 5), ("backup_after_unit", "backup_after", "MINUTE"),
        ("save_every_unit", "save_every", "NEVER"))},
    "embedding": ignored("only training_method=EMBEDDING uses it"),
    "unused": ignored("is of other models' parts, is off, or is of what is off"),
}  # fmt: skip

ONETRAINER = Trainer("OneTrainer", _OPTIONS, _base, flatten, ONETRAINER_KINDS)
