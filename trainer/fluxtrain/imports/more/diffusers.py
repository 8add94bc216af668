"""The options of diffusers' train_dreambooth_flux.py and train_dreambooth_lora_flux.py."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from fluxtrain.contract.run.config import value_at
from fluxtrain.imports import common, kohya_values, simpletuner_values
from fluxtrain.imports.kinds import DIFFUSERS_KINDS
from fluxtrain.imports.kohya import KOHYA
from fluxtrain.imports.simpletuner import SIMPLETUNER
from fluxtrain.imports.table import (
    IgnoredError,
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
    set_outside,
)

SCRIPT = "script"
"""The option that has the name of the script."""
_IMAGES = ("instance_data_dir", "dataset_name")
_LAYERS = (
    *("img_attn.qkv", "img_attn.proj", "img_mlp.0", "img_mlp.2"),
    *("txt_attn.qkv", "txt_attn.proj", "txt_mlp.0", "txt_mlp.2", "linear1"),
)
"""The layers with adapters unless lora_layers names others; of linear1, the parts of attention alone."""


def _is_lora(reading: Reading) -> bool:
    return "lora" in reading.text(SCRIPT)


def _base(reading: Reading) -> Values:
    model = reading.text("pretrained_model_name_or_path", "")
    if not _is_lora(reading):
        return {
            **common.preset(model, False),
            "data.text_length": 77,
            "precision.weights": "float32",
        }
    files: dict[str, object] = {"adapter.split_qkv": True, "adapter_file.layout": "diffusers"}
    files |= {"flow.prompt_dropout": 0.0, "data.text_length": 512, "adapter.alpha": 4.0}
    if "lora_layers" not in reading.given:
        files["adapter.layers"] = list(_LAYERS)
    return {**common.preset(model, True), **files}


def _of_lora(option: Option) -> Option:
    """Return ``option`` for the script that trains a LoRA."""
    convert = only_if(_is_lora, "the script has no such option", option.convert)
    return replace(option, convert=convert)


def _alpha(reading: Reading, name: str) -> Values:
    is_stated = name in reading.given or value_at(reading.overrides, "adapter.alpha") is not None
    if not is_stated and reading.positive("rank") != reading.number(name):
        text = (
            "4 in the script since June 2025, which is written; before, the rank: --adapter.alpha"
        )
        raise NoCounterpartError(text)
    return {"adapter.alpha": reading.number(name)}


def _optimizer(reading: Reading) -> str:
    """Return our name of the optimizer; those that the script does not know are AdamW there."""
    if reading.word("optimizer") == "prodigy":
        return "prodigy"
    return "adamw_8bit" if reading.is_on("use_8bit_adam") else "adamw"


def _optimizer_name(reading: Reading, name: str) -> Values:
    if (word := reading.word(name)) not in ("adamw", "prodigy"):
        reading.notes[name] = f"{word} is AdamW there"
    found = _optimizer(reading)
    settings = {
        "optim.prodigy.bias_correction": True,
        "optim.prodigy.safeguard_warmup": True,
    }
    return {"optim.name": found, **(settings if found == "prodigy" else {})}


def _of_prodigy(reading: Reading, name: str) -> Values:
    """Return nothing for what is set already: any word but none is true there."""
    if _optimizer(reading) != "prodigy":
        raise IgnoredError("only prodigy uses it")
    if name == "prodigy_beta3":
        raise NoCounterpartError("the square root of beta2")
    return reading.noted(name, "true, as any value there")


def _rate(reading: Reading, name: str) -> Values:
    factor = 1
    if reading.is_on("scale_lr"):
        sizes = ("train_batch_size", "gradient_accumulation_steps")
        factor = reading.processes
        for size in filter(reading.has, sizes):
            factor *= reading.positive(size)
    return {"optim.learning_rate": reading.number(name) * factor}


def _scheme(reading: Reading, name: str) -> Values:
    """Return the draw of timesteps, and the loss's weight."""
    word = reading.choice(name, "none", "sigma_sqrt", "logit_normal", "mode", "cosmap")
    weight = word if word in ("sigma_sqrt", "cosmap") else "none"
    return {**kohya_values.draw(reading), "flow.loss_weighting": weight}


def _layers(reading: Reading, name: str) -> Values:
    if name not in reading.given:
        text = "linear1 has one adapter here, 3 of its 4 parts there; before October 2024 lora_layers was "
        raise NoCounterpartError(f"{text}attn.to_k,attn.to_q,attn.to_v,attn.to_out.0")
    return common.selection([f".{part.strip()}" for part in reading.text(name).split(",")])


def _captions(reading: Reading, name: str) -> Values:
    if reading.has("caption_column"):
        return reading.noted(name, "caption_column has the captions")
    reading.notes[name] = "for pictures without a caption; leave no text files beside them"
    if reading.value(name) == "":
        return {}
    return common.of_images("data.class_tokens", folders=_IMAGES)(reading, name)


def _data_set(reading: Reading, name: str) -> Values:
    text = reading.text(name)
    is_local = text.startswith(("/", ".", "~"))
    return {"data.images": text if is_local else f"hf://datasets/{text}"}


def _dropout(reading: Reading, name: str) -> Values:
    if reading.number(name):
        raise NoCounterpartError("adapter.dropout is of A x, not of x")
    return {}


def _crop(reading: Reading, name: str) -> Values:
    if reading.flag(name):
        return {}
    return common.of_images("data.variants.crops", lambda *_: common.CROPS, _IMAGES)(reading, name)


def _flip(reading: Reading, name: str) -> Values:
    if not reading.flag(name):
        return {}
    return common.of_images("data.variants.flip", lambda *_: True, _IMAGES)(reading, name)


def _clip(reading: Reading, name: str) -> Values:
    if reading.flag(name):
        text = "adapter.clip is of all of CLIP's layers" if _is_lora(reading) else "CLIP is frozen"
        raise NoCounterpartError(f"{text}; there those of attention are trained")
    return {}


def _epochs_of_samples(reading: Reading, name: str) -> Values:
    if not reading.has("validation_prompt"):
        raise IgnoredError("only with validation_prompt")
    found = common.steps_of(reading.positive(name), reading)
    return {"sampling.every_steps": common.required_steps(found, "sampling.every_steps")}


def _prompt(reading: Reading, name: str) -> Values:
    return {"sampling.prompts": [reading.text(name)], "sampling.at_end": True}


def _tracker(reading: Reading, name: str) -> Values:
    values = simpletuner_values.tracker(reading, name)
    project = "logging.wandb.project"
    return {**values, project: "dreambooth-flux-dev-lora"} if project in values else values


def _interval(reading: Reading, name: str) -> Values:
    every = reading.positive(name)
    files = {"adapter_file.every_steps": every} if _is_lora(reading) else {}
    return {"checkpoint.every_steps": every, **files}


def _float32(reading: Reading, name: str) -> Values:
    return {"adapter_file.dtype": "float32"} if reading.flag(name) else {}


def _images(path: str, read: Callable[[Reading, str], object], default: object = None) -> Option:
    return replace(common.image_option(path, read, folders=_IMAGES), default=default)


_OPTIONS: Mapping[str, Option] = {
    SCRIPT: automatic("is part of the preset"),
    "pretrained_model_name_or_path": SIMPLETUNER.options["pretrained_model_name_or_path"],
    "instance_data_dir": field_option("data.images", Reading.text, note="a folder below --data"),
    "dataset_name": fields(["data.images"], _data_set, note="fetched; HF_TOKEN is read"),
    "image_column": _images("data.table.image_column", Reading.text),
    "caption_column": _images("data.table.caption_column", Reading.text),
    "instance_prompt": fields(["data.class_tokens"], _captions),
    "repeats": _images("data.repeats", Reading.positive),
    "max_sequence_length": field_option("data.text_length", Reading.positive),
    "resolution": fields(["data.image_size"], lambda it, name: common.square(it, name, it.value(name)), 512),
    "center_crop": fields(["data.variants.crops"], _crop, False, common.NOTE),
    "random_flip": fields(["data.variants.flip"], _flip, note=common.NOTE),
    "rank": _of_lora(field_option("adapter.rank", Reading.positive, 4)),
    "lora_alpha": _of_lora(fields(["adapter.alpha"], _alpha, 4, "the rank in scripts before June 2025")),
    "lora_dropout": _of_lora(fields([], _dropout, note="0: none")),
    "lora_layers": _of_lora(fields(
        common.SELECTION_FIELDS, _layers, "attn,ff", "by default all of linear1, whose MLP has none there")),
    "train_text_encoder": fields([], _clip, note="CLIP is not trained"),
    "optimizer": fields(
        ["optim.name", "optim.prodigy.bias_correction", "optim.prodigy.safeguard_warmup"],
        _optimizer_name, "AdamW", "with use_8bit_adam: adamw_8bit"),
    "use_8bit_adam": automatic("is part of optimizer"),
    "learning_rate": fields(["optim.learning_rate"], _rate, 1e-4, "with scale_lr times the batch"),
    "scale_lr": automatic("is part of learning_rate"),
    "adam_beta1": field_option("optim.beta1", Reading.number, 0.9),
    "adam_beta2": field_option("optim.beta2", Reading.number, 0.999),
    "adam_weight_decay": field_option("optim.weight_decay", Reading.number, 1e-4),
    "adam_epsilon": field_option("optim.epsilon", Reading.number, 1e-8),
    **each("prodigy_beta3 prodigy_decouple prodigy_use_bias_correction prodigy_safeguard_warmup",
           fields([], _of_prodigy, note="with optimizer=prodigy")),
    **each("text_encoder_lr adam_weight_decay_text_encoder", ignored("is part of train_text_encoder")),
    "lr_scheduler": KOHYA.options["lr_scheduler"],
    "lr_warmup_steps": replace(KOHYA.options["lr_warmup_steps"], default=500, note="0 with constant"),
    "lr_num_cycles": KOHYA.options["lr_scheduler_num_cycles"],
    "lr_power": KOHYA.options["lr_scheduler_power"],
    "max_grad_norm": field_option("optim.max_grad_norm", Reading.number, 1.0),
    "num_processes": SIMPLETUNER.options["num_processes"],
    "train_batch_size": SIMPLETUNER.options["train_batch_size"],
    "gradient_accumulation_steps": automatic("is part of schedule.global_batch_size"),
    "max_train_steps": field_option("schedule.steps", Reading.positive),
    "num_train_epochs": SIMPLETUNER.options["num_train_epochs"],
    "seed": KOHYA.options["seed"],
    "weighting_scheme": fields(
        ["flow.timestep_sampling", "flow.loss_weighting", "flow.logit_mean", "flow.logit_std",
         "flow.mode_scale"], _scheme, "none", "logit_mean with the other sign"),
    **{name: replace(automatic("is part of weighting_scheme"), default=default)
       for name, default in (("logit_mean", 0.0), ("logit_std", 1.0), ("mode_scale", 1.29))},
    "guidance_scale": KOHYA.options["guidance_scale"],
    "mixed_precision": fields(["precision.compute"], common.compute_dtype),
    "gradient_checkpointing": fields(
        ["parallel.activation_checkpointing"], common.recomputation, False),
    "upcast_before_saving": fields(["adapter_file.dtype"], _float32, note="else bfloat16"),
    "checkpointing_steps": fields(["checkpoint.every_steps", "adapter_file.every_steps"], _interval, 500),
    "checkpoints_total_limit": replace(SIMPLETUNER.options["checkpoints_total_limit"], default=0),
    "validation_prompt": fields(["sampling.prompts", "sampling.at_end"], _prompt),
    "validation_epochs": fields(
        ["sampling.every_steps"], _epochs_of_samples, 50, "with validation_prompt and --epoch-samples"),
    "num_validation_images": SIMPLETUNER.options["num_validation_images"],
    "dataloader_num_workers": field_option("data.num_workers", Reading.whole),
    "report_to": replace(SIMPLETUNER.options["report_to"], convert=_tracker),
    "output_dir": SIMPLETUNER.options["output_dir"],
    "resume_from_checkpoint": SIMPLETUNER.options["resume_from_checkpoint"],
    "hub_token": SIMPLETUNER.options["hub_token"],
    **each("push_to_hub hub_model_id", set_outside("fluxtrain push")),
    **each("revision variant dataset_config_name", missing("the Hub's first revision and configuration")),
    **each("class_data_dir class_prompt num_class_images prior_loss_weight prior_generation_precision "
           "sample_batch_size", ignored("only with_prior_preservation uses it")),
    "with_prior_preservation": missing("is_reg of a subset: a data set config, kohya's (docs/data.md)"),
    **each("cache_dir cache_latents logging_dir allow_tf32 local_rank enable_npu_flash_attention "
           "image_interpolation_mode offload", automatic("decides the speed alone, or a folder")),
}  # fmt: skip

DIFFUSERS = Trainer("diffusers' examples", _OPTIONS, _base, kinds=DIFFUSERS_KINDS)
