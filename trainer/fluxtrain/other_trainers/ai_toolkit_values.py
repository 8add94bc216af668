"""Conversions of ai-toolkit's options that depend on others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fluxtrain.other_trainers import common
from fluxtrain.other_trainers.optimizers import Optimizers
from fluxtrain.other_trainers.option import Values
from fluxtrain.other_trainers.reading import InertError, NoCounterpartError, Reading

MORE_PROCESSES, MORE_DATASETS = "process[1]", "datasets[1]"
_NAMES = {"adamw": "adamw", "adamw8": "adamw_8bit", "adamw8bit": "adamw_8bit"}
_NAMES |= {"lion": "lion", "lion8bit": "lion", "adafactor": "adafactor"}
_NAMES |= {"prodigy": "prodigy", "prodigy8bit": "prodigy"}
_SMALLEST_FACTOR = 0.1
"""Learning rate below which ai-toolkit gives Prodigy 1.0."""
_SAMPLINGS = {"sigmoid": "sigmoid", "linear": "uniform", "flux_shift": "flux_shift"}
_BATCH, _STEPS = "train.batch_size", "train.gradient_accumulation_steps"


def _other_settings(reading: Reading, name: str) -> str:
    """Return why the optimizer ``name`` of ours is not the same beside optimizer_params; empty: it is."""
    if name == "adafactor":
        for setting in ("relative_step", "scale_parameter"):
            if reading.is_on(f"train.optimizer_params.{setting}"):
                return f"only without {setting}"
    return ""


OPTIMIZERS = Optimizers("train.optimizer", _NAMES, {"optim.epsilon": 1e-6}, refuse=_other_settings)


def take_apart(reading: Reading) -> dict[str, object]:
    """Return the options of the first process, by names with dots.

    Of several data sets, only the first is taken apart, too.
    """
    options = dict(reading.given)
    processes = options.pop("config.process", None)
    if not isinstance(processes, list) or not all(isinstance(it, dict) for it in processes):
        raise reading.wrong("config.process", "must be a list with one process")
    if len(processes) > 1:
        options[MORE_PROCESSES] = f"{len(processes)} processes"
    for name, value in flat(processes[0] if processes else {}).items():
        options[name] = value
    datasets = options.pop("datasets", None)
    if isinstance(datasets, list) and all(isinstance(it, dict) for it in datasets) and datasets:
        if len(datasets) > 1:
            options[MORE_DATASETS] = f"{len(datasets)} data sets"
        options |= flat(datasets[0], "datasets.")
    elif datasets is not None:
        options["datasets"] = datasets
        reading.given = options
        raise reading.wrong("datasets", "must be a list of mappings")
    return {name: value for name, value in options.items() if value is not None}


def flat(values: Mapping[Any, object], above: str = "") -> dict[str, object]:
    """Return nested mappings as one, by names with dots; empty ones and lists are values."""
    found: dict[str, object] = {}
    for key, value in values.items():
        name = f"{above}{key}"
        found |= flat(value, f"{name}.") if isinstance(value, dict) and value else {name: value}
    return found


def base(reading: Reading) -> Values:
    """Return the preset; ai-toolkit's adapters are those of diffusers' layers."""
    name = "model.name_or_path"
    model = reading.text(name) if reading.has(name) else ""
    is_adapter = any(name.startswith("network.") for name in reading.given)
    files: dict[str, object] = {}
    if is_adapter:
        files = {"adapter.split_qkv": True, "adapter_file.layout": "ai-toolkit"}
    return {**common.preset(model, is_adapter), **files}


def process(reading: Reading, name: str) -> Values:
    """Return nothing for sd_trainer, the only kind of process that trains FLUX.1."""
    if reading.word(name) not in ("sd_trainer", "ui_trainer", "diffusion_trainer"):
        raise reading.wrong(name, "must be sd_trainer, ui_trainer or diffusion_trainer")
    return {}


def flux(reading: Reading, name: str) -> Values:
    """Return nothing for the architecture flux; raise ConfigError for others."""
    if reading.word(name) != "flux":
        raise reading.wrong(name, "must be flux: other models are not trained here")
    return {}


def is_flux(reading: Reading, name: str) -> Values:
    """Return nothing if the model is FLUX.1; raise ConfigError for others."""
    if not reading.flag(name):
        raise reading.wrong(name, "must be true: other models are not trained here")
    return {}


def network(reading: Reading, name: str) -> Values:
    """Return the kind of adapter."""
    if reading.word(name) != "lora":
        raise NoCounterpartError("adapters here are lora's")
    return {"adapter.kind": "lora"}


def rank(reading: Reading, name: str) -> Values:
    """Return the rank; alpha is the same for FLUX.1, whatever linear_alpha is."""
    if name == "network.linear" and reading.has("network.rank"):
        raise InertError("network.rank wins")
    value = reading.positive(name)
    reading.notes[name] = "alpha is the rank there, whatever linear_alpha is"
    return {"adapter.rank": value, "adapter.alpha": float(value)}


def batch(reading: Reading, name: str) -> Values:
    """Return the batch sizes."""
    steps = "train.gradient_accumulation" if reading.has("train.gradient_accumulation") else _STEPS
    return common.batch(_BATCH, steps)(reading, name)


def learning_rate(reading: Reading, name: str) -> Values:
    """Return the learning rate; Prodigy's is 1 there if it is small."""
    found = OPTIMIZERS.setting("optim.learning_rate")(reading, name)
    if OPTIMIZERS.ours(reading) == "prodigy" and reading.number(name) < _SMALLEST_FACTOR:
        reading.notes[name] = "ai-toolkit gives Prodigy 1.0 instead of less than 0.1"
        return {"optim.learning_rate": 1.0}
    return found


def schedule(reading: Reading, name: str) -> Values:
    """Return the learning rate's schedule."""
    known = {"constant": "constant", "constant_with_warmup": "constant", "linear": "linear"}
    known |= {"cosine": "cosine"}
    why = "ai-toolkit's constant, constant_with_warmup, cosine and linear have counterparts"
    return {"schedule.decay": reading.among(name, known, why)}


def warmup(reading: Reading, name: str) -> Values:
    """Return the steps of the warm-up, which constant_with_warmup has."""
    if reading.word("train.lr_scheduler") != "constant_with_warmup":
        raise InertError("only constant_with_warmup uses it")
    return {"schedule.warmup_steps": reading.whole(name)}


def timesteps(reading: Reading, name: str) -> Values:
    """Return the sampling of timesteps."""
    why = "flow.timestep_sampling has sigmoid, uniform (linear there), shift and flux_shift"
    return {"flow.timestep_sampling": reading.among(name, _SAMPLINGS, why)}


def sample_steps(reading: Reading, name: str) -> Values:
    """Return the interval of images, unless they are switched off."""
    _require_prompts(reading)
    return {"sampling.every_steps": reading.whole(name)}


def sample_at_start(reading: Reading, name: str) -> Values:
    """Return whether there are images before the first step, unless they are switched off."""
    _require_prompts(reading)
    return {"sampling.at_start": reading.flag(name)}


def _require_prompts(reading: Reading) -> None:
    if reading.is_on("train.disable_sampling"):
        raise InertError("train.disable_sampling is on")
    if not reading.has("sample.prompts") or not reading.texts("sample.prompts"):
        raise NoCounterpartError("images need sample.prompts")


def wandb(reading: Reading, name: str) -> Values:
    """Return the project of Weights & Biases."""
    if not reading.flag(name):
        reading.notes[name] = "metrics.jsonl has the same"
        return {}
    project = "logging.project_name"
    values: dict[str, object] = {"logging.wandb.project": "ai-toolkit"}
    if reading.has(project):
        values["logging.wandb.project"] = reading.text(project)
    if reading.has("logging.run_name"):
        values["logging.wandb.name"] = reading.text("logging.run_name")
    return values


def train_unet(reading: Reading, name: str) -> Values:
    """Return nothing if the transformer is trained."""
    if not reading.flag(name):
        raise reading.wrong(name, "must be true: the transformer is what is trained here")
    return {}
