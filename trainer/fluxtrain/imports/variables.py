"""Environment variables of a container for kohya's sd-scripts on MI300X, as options of sd-scripts.

A published guide, "Training Flux.1 Dev on the MI300X GPU with Huge Batch Sizes", describes them; its script
passes them on beside options that are constant.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fluxtrain.contract.model_base import closest, join_errors
from fluxtrain.contract.run.config import RunConfig, value_at
from fluxtrain.errors import UNSET, ConfigError, in_yaml_words
from fluxtrain.imports import common
from fluxtrain.imports.kohya import KOHYA
from fluxtrain.imports.kohya_values import OPTIMIZERS
from fluxtrain.imports.table import (
    Disposition,
    Imported,
    Line,
    Option,
    Reading,
    Trainer,
    automatic,
    changed,
    field_option,
    fields,
    import_options,
    set_outside,
)


@dataclass(frozen=True)
class Variable:
    """One environment variable."""

    option: str
    """The option of sd-scripts that it sets, or a name of its own."""
    default: str | None = None
    """The script's value if it is not set."""
    row: Option | None = None
    """How it is mapped, if sd-scripts has no such option."""

    @property
    def meaning(self) -> Option:
        """Return how it is mapped."""
        return self.row or replace(KOHYA.options[self.option], default=self.default)


_PREFIX = "PARAMS_"
_OF_SERVICES = ("PARAMS_SERVICE_", "PARAMS_PORT")
VARIABLES: Mapping[str, Variable] = {
    "BASE_MODEL": Variable(
        "base_model", row=fields([], common.flux, note="must be flux, which is preset: dev-lora")
    ),
    "DATASET_NAME": Variable(
        "dataset_name",
        row=set_outside(
            "fluxtrain from-env fetches OWNER/NAME of Kaggle, or a URL; else data.images names the "
            "pictures: hf://datasets/NAME of the Hub, or a folder"
        ),
    ),
    "DATASET_HOST": Variable(
        "dataset_host", row=set_outside("where fluxtrain from-env fetches DATASET_NAME from")
    ),
    "DATASET_PATH": Variable(
        "dataset_path", row=set_outside("the data root of fluxtrain from-env")
    ),
    "DATASET_CONFIG": Variable("dataset_config"),
    "SAMPLE_PROMPTS": Variable("sample_prompts"),
    "OUTPUT_PATH": Variable("output_dir"),
    "OUTPUT_DIR": Variable("output_dir"),
    "OUTPUT_NAME": Variable("output_name"),
    "PARAMS_D_COEF": Variable("optimizer_args.d_coef", "2"),
    "PARAMS_LEARNING_RATE": Variable("learning_rate", "1"),
    "PARAMS_LEARNING_SCHEDULER": Variable("lr_scheduler", "constant"),
    "PARAMS_MAX_EPOCHS": Variable("max_train_epochs", "5"),
    "PARAMS_NETWORK_ALPHA": Variable("network_alpha", "4"),
    "PARAMS_NETWORK_DIM": Variable("network_dim", "32"),
    "PARAMS_NOISE_OFFSET": Variable("noise_offset", "0.1"),
    "PARAMS_NUM_CYCLES": Variable("lr_scheduler_num_cycles"),
    "PARAMS_OPTIMIZER_ARGS": Variable(
        "optimizer_arguments",
        row=automatic(
            "NAME=VALUE with blanks between, each a row optimizer_args.NAME below; the guide's script "
            "does not pass it on"
        ),
    ),
    "PARAMS_OPTIMIZER_TYPE": Variable("optimizer_type", "prodigy"),
    "PARAMS_RESUME_FROM": Variable(
        "resume_from",
        row=field_option(
            "adapter.initial",
            Reading.text,
            note="the guide's script does not pass it on; fluxtrain run with the same --output resumes "
            "a run exactly",
        ),
    ),
    "PARAMS_SAVE_EVERY_N_STEPS": Variable("save_every_n_steps", "100"),
    "PARAMS_SAMPLE_EVERY_N_STEPS": Variable("sample_every_n_steps", "200"),
    "PARAMS_SPLIT_QKV": Variable("network_args.split_qkv", "False"),
    "PARAMS_TIMESTEP_SAMPLING": Variable("timestep_sampling", "sigmoid"),
    "PARAMS_WEIGHT_DECAY": Variable("optimizer_args.weight_decay", "0.1"),
}
DATASET_HOST = "https://www.kaggle.com/api/v1/datasets/download"
"""Where the guide's script gets the archive DATASET_NAME from."""
FOLDERS = {"DATASET_PATH": "/workspace/dataset", "OUTPUT_PATH": "/workspace/output"}
MODELS = "/workspace/flux"
"""The guide's folder of models, with the names of files below."""
CONSTANTS: Mapping[str, object] = {
    "pretrained_model_name_or_path": "flux_dev.safetensors",
    "clip_l": "clip_l.safetensors",
    "t5xxl": "t5xxl_fp16.safetensors",
    "ae": "ae.safetensors",
    "network_module": "networks.lora_flux",
    "mixed_precision": "bf16",
    "save_precision": "bf16",
    "sdpa": True,
    "gradient_checkpointing": True,
    "cache_latents_to_disk": True,
    "cache_text_encoder_outputs_to_disk": True,
    "fp8_base": True,
    "highvram": True,
    "seed": 42,
    "optimizer_args.betas": "0.9,0.999",
    "model_prediction_type": "raw",
    "discrete_flow_shift": 3.1582,
    "guidance_scale": 1.0,
    "loss_type": "l2",
    "persistent_data_loader_workers": True,
}
"""What the guide's script passes to sd-scripts whatever the variables are."""


def _trainer() -> Trainer:
    stated = {v.option: v.default for v in VARIABLES.values() if v.default}
    defaults: dict[str, object] = {**CONSTANTS, **stated}
    own = {v.option: v.row for v in VARIABLES.values() if v.row}
    rows = {**KOHYA.options, **own}
    for name, value in defaults.items():
        rows[name] = replace(rows[name], default=value)
    return Trainer("the guide's variables for sd-scripts", rows, KOHYA.base, kinds=KOHYA.kinds)


GUIDE = _trainer()


def import_variables(
    environment: Mapping[str, str],
    overrides: Mapping[str, Any],
    processes: int = 1,
    epoch_samples: int | None = None,
) -> Imported:
    """Return ``spec.run`` for the variables of ``environment``, and for the script's defaults of the others.

    Raises ConfigError with the variables whose values are wrong.
    """
    _require_known(environment)
    names = {v.option: name for name, v in VARIABLES.items()}
    names |= {v.option: name for name, v in VARIABLES.items() if environment.get(name)}
    given: dict[str, object] = {
        v.option: environment[n] for n, v in VARIABLES.items() if environment.get(n)
    }
    try:
        given = common.with_data_sets(given, Path()) | _arguments(given) | _cycles(given)
        reading = Reading(given, {}, processes, epoch_samples)
        found = import_options(GUIDE, reading, overrides)
    except ConfigError as error:
        raise changed(
            error, lambda each: ConfigError(_shown(each.path, names), each.given, each.allowed)
        ) from None
    lines = {
        disposition: [replace(line, option=_shown(line.option, names)) for line in lines]
        for disposition, lines in found.lines.items()
    }
    return replace(found, lines=lines)


def require_any(environment: Mapping[str, str]) -> None:
    """Raise ConfigError if no variable of the guide is set: its script's defaults alone have no images."""
    if not any(environment.get(name) for name in VARIABLES):
        text = (
            "none of the guide's variables is set; set those that differ from its script, "
            "such as PARAMS_LEARNING_RATE, PARAMS_NETWORK_DIM and DATASET_CONFIG"
        )
        raise ConfigError("--from-env", UNSET, text)


def _require_known(environment: Mapping[str, str], only_near_misses: bool = False) -> None:
    """Raise ConfigError for the variables PARAMS_* that the guide does not have, which would have no effect.

    Kubernetes sets those of a Service that is called params.
    """
    errors = list[ConfigError]()
    for name, value in environment.items():
        if name in VARIABLES or not name.startswith(_PREFIX) or name.startswith(_OF_SERVICES):
            continue
        known = {each.removeprefix(_PREFIX): each for each in VARIABLES}
        near = closest(name.removeprefix(_PREFIX), known)
        hint = "" if near is None else f"; did you mean {known[near]}?"
        if hint or not only_near_misses:
            errors.append(
                ConfigError(f"${name}", value, f"no variable of the guide{hint}; unset it")
            )
    if errors:
        raise join_errors(errors)


def _arguments(given: Mapping[str, object]) -> dict[str, str]:
    """Return the settings in PARAMS_OPTIMIZER_ARGS that no variable of their own states."""
    name = "optimizer_arguments"
    listed: Mapping[str, object] = {name: str(given[name]).split()} if name in given else {}
    pairs = Reading(listed, {}).pairs(name)
    found = {f"optimizer_args.{key}": value for key, value in pairs.items()}
    return {option: value for option, value in found.items() if option not in given}


def _cycles(given: Mapping[str, object]) -> dict[str, str]:
    """Return the cycles that the guide's script sets if none are given: a third of the epochs."""
    option, epochs = "lr_scheduler_num_cycles", str(given.get("max_train_epochs", "5"))
    restarts = given.get("lr_scheduler") == "cosine_with_restarts"
    if option in given or not restarts or not epochs.isdecimal():
        return {}
    return {option: str(max(int(epochs) // 3, 1))}


def _shown(option: str, names: Mapping[str, str]) -> str:
    return f"${names[option]}" if option in names else option


def refuse_different(environment: Mapping[str, str], config: RunConfig) -> None:
    """Raise ConfigError if a variable PARAMS_* asks for another value than ``config`` has.

    What such a variable depends on is as in ``config`` if its own variable is not set. Variables without an
    effect in sd-scripts are ignored.
    """
    given = {n: value for n, value in environment.items() if n in VARIABLES and value}
    compared = {f"${name}" for name in given if name.startswith(_PREFIX)}
    if not compared:
        _require_known(environment, only_near_misses=True)
        return
    _require_known(environment)
    found = import_variables(_with_those_of(config, given), {})
    different = [
        ConfigError(line.option, line.value, f"is not read; {text}; unset it to continue")
        for disposition in (Disposition.WRITTEN, Disposition.MISSING)
        for line in found.lines[disposition]
        if line.option in compared
        for text in _differences(line, found.run, config)
    ]
    if different:
        raise join_errors(different)


def _with_those_of(config: RunConfig, given: Mapping[str, str]) -> dict[str, str]:
    """Return ``given`` with the variables that others depend on: of ``config`` where none is given."""
    optim = config.optim
    found = {
        "PARAMS_LEARNING_SCHEDULER": config.schedule.decay,
        "PARAMS_WEIGHT_DECAY": str(optim.weight_decay),
    }
    for name, ours in OPTIMIZERS.known.items():
        if ours == optim.name:
            found.setdefault("PARAMS_OPTIMIZER_TYPE", name)
    if optim.name == "adafactor" and "PARAMS_OPTIMIZER_TYPE" not in given:
        found["PARAMS_OPTIMIZER_ARGS"] = "relative_step=False scale_parameter=False"
    if config.adapter is not None:
        found["PARAMS_NETWORK_DIM"] = str(config.adapter.rank)
    return {**found, **given, "SAMPLE_PROMPTS": _ANY_PROMPTS}


_ANY_PROMPTS = "prompts.txt"
"""Intervals of images need prompts there, and none here."""


def _differences(line: Line, run: Mapping[str, Any], config: RunConfig) -> Iterator[str]:
    """Yield what to use instead of a variable, unless ``config`` has what it set in ``run``."""
    if not line.values:
        yield line.note
    values = config.model_dump()
    for path in line.values:
        value, present = value_at(run, path), value_at(values, path)
        if present != value:
            yield f"here --{path}={_shown_value(value)}, which is {_shown_value(present)}"
            return


def _shown_value(value: object) -> str:
    return value if isinstance(value, str) else in_yaml_words(value)
