"""Fields of ``spec.run`` set on the command line: ``--optim.learning_rate=2e-4``."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from fluxtrain.contract.model_base import (
    StrictModel,
    did_you_mean,
    join_errors,
    meant_fields,
    model_of,
    near_miss,
)
from fluxtrain.contract.resource.document import parse_yaml
from fluxtrain.contract.run.config import RunConfig
from fluxtrain.errors import UNSET, ConfigError


def parse_overrides(arguments: list[str]) -> dict[str, Any]:
    """Return the arguments ``--section.field=value`` and ``--section.field value`` as a nested mapping.

    Values are YAML. Raises ConfigError for all options of torchtitan, unknown fields, fields without a value
    and fields that are set twice.
    """
    result: dict[str, Any] = {}
    errors = list(refused_options(arguments))
    given: dict[str, str] = {}
    remaining = list(arguments)
    while remaining:
        argument = remaining.pop(0)
        name, equals, text = argument.partition("=")
        parts = name.removeprefix("--").split(".")
        has_value = equals or (remaining and not remaining[0].startswith("--"))
        if not argument.startswith("--"):
            meant = "; did you mean --output?" if argument == "-o" else ""
            text = f"fields are set as --section.field=value{meant}"
            errors.append(ConfigError("arguments", argument, text))
            continue
        if has_value and not equals:
            text = remaining.pop(0)
        if _option(name)[0] in OPTIONS:
            continue
        if (unknown := _unknown(parts)) is not None:
            errors.append(ConfigError(name, UNSET, f"no such field{unknown}"))
        elif not has_value:
            errors.append(ConfigError(name, UNSET, f"needs a value: {name}=VALUE"))
        elif earlier := [each for each in given if _overlap(each, name)]:
            subject = "" if earlier[0] == name else f"{earlier[0]} "
            problem = f"{subject}was already set to {given[earlier[0]]}; set it once"
            errors.append(ConfigError(name, text, problem))
        elif not errors:
            _set(result, parts, parse_yaml(text, name))
        given[name] = text
    if errors:
        raise join_errors(errors, len(errors))
    return result


_OTHER_NAMES = {
    **dict.fromkeys(("output_dir", "out_dir", "save_dir", "logging_dir"), "--output"),
    **dict.fromkeys(("data_dir", "dataroot", "train_data_dir"), "--data or --data.images"),
    **dict.fromkeys(("model_dir", "modelroot"), "--models"),
    **dict.fromkeys(
        ("gpus", "num_gpus", "ngpu", "num_processes", "nproc_per_node"),
        "--processes of run, or spec.gpusPerNode of the file",
    ),
    "dry_run": "fluxtrain plan FILE",
}
"""Other trainers' names, and what they are here."""


def _unknown(parts: list[str]) -> str | None:
    """Return None if there is the field ``parts``, else what may have been meant."""
    model: type[StrictModel] | None = RunConfig
    for part in parts:
        if model is None:
            return ""
        if part not in model.model_fields:
            near = "" if model is RunConfig else near_miss(part, model.model_fields)
            options = " or ".join(f"--{name}" for name in meant_fields(part, RunConfig))
            options = options or _OTHER_NAMES.get(part.replace("-", "_"), "")
            meant = f"; did you mean {options}?" if options else ""
            return near or meant or did_you_mean(part, model.model_fields)
        model = model_of(model.model_fields[part].annotation)
    return None


def _overlap(one: str, other: str) -> bool:
    return f"{one}.".startswith(f"{other}.") or f"{other}.".startswith(f"{one}.")


def _set(result: dict[str, Any], parts: list[str], value: object) -> None:
    *sections, last = parts
    for section in sections:
        result = result.setdefault(section, {})
    result[last] = value


# Options and variables of torchtitan and of MLPerf's reference on it, and what replaces each of
# them here.
#
# The command line refuses them with the replacement, and docs/coming-from.md is generated from the
# same table.


@dataclass(frozen=True)
class Replacement:
    """What replaces an option or a variable."""

    options: tuple[str, ...] = ()
    """Our options without dashes; the first takes the same value, unless ``note`` says otherwise."""
    note: str = ""
    """What differs, or why there is nothing to set."""
    same: bool = True
    """Whether the first of ``options`` takes the same value."""
    applies_to: str = ".+"
    """Pattern of a variable's values that are refused; others have the same meaning, or another program's."""

    def describe(self, value: str = "") -> str:
        """Return what to use instead of the option with ``value``."""
        first, *others = (f"--{option}" for option in self.options) if self.options else ("",)
        equals = f"={value}" if value and self.same else ""
        options = " and ".join([f"{first}{equals}", *others]) if first else ""
        return ": ".join(part for part in (options, self.note) if part)


def _differs(note: str, *options: str) -> Replacement:
    """Return a replacement by ``options`` whose first one takes other values, as ``note`` says."""
    return Replacement(options, note, same=False)


_BATCH = _differs(
    "the samples of a step on all GPUs together, and the most that one GPU takes at a time",
    "schedule.global_batch_size",
    "parallel.micro_batch_size",
)
_FOLDER = "a folder without a pattern; its layout is detected"

OPTIONS: Mapping[str, Replacement] = {
    "job.config_file": Replacement((), "the first argument is a FluxTraining, as YAML"),
    "job.dump_folder": Replacement(("output",)),
    "model.flavor": _differs("flux-schnell is mlperf-schnell; flux-debug is micro", "preset"),
    "training.batch_size": _BATCH,
    "training.local_batch_size": _BATCH,
    "training.global_batch_size": Replacement(("schedule.global_batch_size",)),
    "training.seed": Replacement(("seed",)),
    "training.steps": Replacement(("schedule.steps",)),
    "training.compile": Replacement(("parallel.compile",)),
    "training.max_norm": Replacement(("optim.max_grad_norm",)),
    "training.mixed_precision_param": Replacement(("precision.compute",)),
    "training.mixed_precision_reduce": Replacement(("precision.reduce",)),
    "training.dataset": _differs(
        "cc12m_preprocessed is encoded, cc12m_disk and cc12m_wds are images",
        "data.source",
        "data.train",
    ),
    "training.dataset_path": _differs(_FOLDER, "data.train"),
    "training.classifer_free_guidance_prob": Replacement(("flow.prompt_dropout",)),
    "training.img_size": Replacement(("data.image_size",)),
    "training.seq_len": _differs("torchtitan's FLUX does not use it", "data.text_length"),
    "encoder.t5_encoder": _differs("not loaded if data.source is encoded", "encoders.t5"),
    "encoder.clip_encoder": _differs("not loaded if data.source is encoded", "encoders.clip"),
    "encoder.autoencoder_path": _differs(
        "loaded only to encode or to sample images", "encoders.autoencoder"
    ),
    "encoder.autoencoder_shift": Replacement(("encoders.latent_shift",)),
    "encoder.autoencoder_scale": Replacement(("encoders.latent_scale",)),
    "encoder.max_t5_encoding_len": Replacement(("data.text_length",)),
    "encoder.context_in_dim": Replacement(("model.context_in_dim",)),
    "encoder.empty_encodings_path": Replacement(("data.empty_encodings",)),
    "eval.dataset": _differs(
        "to evaluate nothing, set --evaluation.every_samples=0", "data.validation"
    ),
    "eval.dataset_path": _differs(_FOLDER, "data.validation"),
    "eval.batch_size": Replacement(("evaluation.batch_size",)),
    "eval.eval_freq": Replacement(("evaluation.every_samples",)),
    "eval.target_eval_loss": Replacement(("evaluation.target_loss",)),
    "eval.classifier_free_guidance_scale": Replacement(("sampling.cfg_scale",)),
    "eval.denoising_steps": Replacement(("sampling.num_steps",)),
    "optimizer.name": _differs("AdamW is adamw", "optim.name"),
    "optimizer.lr": Replacement(("optim.learning_rate",)),
    "optimizer.beta1": Replacement(("optim.beta1",)),
    "optimizer.beta2": Replacement(("optim.beta2",)),
    "optimizer.eps": Replacement(("optim.epsilon",)),
    "optimizer.weight_decay": Replacement(("optim.weight_decay",)),
    "lr_scheduler.warmup_steps": Replacement(("schedule.warmup_steps",)),
    "lr_scheduler.decay_type": _differs("sqrt has no counterpart", "schedule.decay"),
    "lr_scheduler.decay_ratio": Replacement(
        ("schedule.decay_fraction", "schedule.decay=cosine"), "0 is schedule.decay=constant"
    ),
    "lr_scheduler.lr_min": _differs("an absolute learning rate", "schedule.min_learning_rate"),
    "parallelism.data_parallel_replicate_degree": Replacement(
        ("parallel.dp_replicate",), "per-node is a replica on each node, however many there are"
    ),
    "parallelism.data_parallel_shard_degree": _differs(
        "the shard degree follows from it: the number of ranks divided by the replicas",
        "parallel.dp_replicate",
    ),
    "parallelism.fsdp_reshard_after_forward": _differs(
        "true or false", "parallel.reshard_after_forward"
    ),
    "parallelism.fsdp_overlap_comm": Replacement(
        (), "nothing to set: FSDP2 communicates while it computes"
    ),
    "parallelism.fsdp_prefetch_params": Replacement(
        (), "nothing to set: FSDP2 gathers blocks ahead by itself"
    ),
    "activation_checkpoint.mode": _differs(
        "a fraction of the blocks; full is 1, none is 0", "parallel.activation_checkpointing"
    ),
    "checkpoint.enable_checkpoint": _differs(
        "checkpoints are always on; 0 saves only at the end", "checkpoint.every_steps"
    ),
    "checkpoint.interval": Replacement(("checkpoint.every_steps",)),
    "checkpoint.folder": _differs("they lie in its folder checkpoints", "output"),
    "checkpoint.keep_latest_k": Replacement(("checkpoint.keep",)),
    "checkpoint.async_mode": _differs(
        "true or false; disabled is false", "checkpoint.asynchronous"
    ),
    "metrics.log_freq": Replacement(("logging.every_steps",)),
    "metrics.enable_tensorboard": Replacement(("logging.tensorboard",)),
    "metrics.save_tb_folder": _differs(
        "the folder is tensorboard, in that of --output", "logging.tensorboard"
    ),
    "metrics.enable_wandb": _differs("any name", "logging.wandb.project"),
    "preprocessing.output_dataset_path": _differs(
        "with --task=preprocess", "preprocess.train", "preprocess.validation"
    ),
}
"""By their names without dashes."""

VARIABLES: Mapping[str, Replacement] = {
    "NGPU": Replacement(("processes",), "the default is all GPUs that torch sees"),
    **dict.fromkeys(
        ("CONFIG_FILE", "CONFIG"),
        Replacement(
            (), "the first argument is a FluxTraining, as YAML, not torchtitan's TOML",
            applies_to=r".*\.toml",
        ),
    ),
    "ENABLE_CHECKPOINTING": Replacement(
        ("checkpoint.every_steps",), "checkpoints are always on; 0 saves only at the end",
        same=False, applies_to="(?!(?i:true|1)$).+",
    ),
    "ENABLE_TB": Replacement(
        ("logging.tensorboard",), "true or false", same=False, applies_to="(?i:true|1)"
    ),
}  # fmt: skip
"""Environment variables of the reference's scripts that would change the run."""

READ_VARIABLES: Mapping[str, str] = {
    "DATAROOT": "root of relative data paths, unless --data is given",
    "MODELROOT": "root of relative model paths, unless --models is given",
    "LOGDIR": "folder of the runs' outputs, unless --output is given",
    "SEED": "spec.run.seed, unless the file or an option sets it; the presets mlperf-* draw one",
    "HF_CACHE": "parent of the cache of Hugging Face's libraries, unless HF_HOME is set",
}
"""Environment variables of the reference's scripts with their meaning here, which is the same."""


def refused_options(arguments: Sequence[str]) -> Iterator[ConfigError]:
    """Yield an error for each of torchtitan's options in ``arguments``, with its replacement."""
    for argument, following in zip_longest(arguments, arguments[1:], fillvalue="--"):
        given, equals, value = argument.partition("=")
        name, negated = _option(given)
        if name in OPTIONS:
            if not equals:
                value = "" if following.startswith("--") else following
                value = value or ("false" if negated else "true")
            text = f"an option of torchtitan; here {OPTIONS[name].describe(value)}"
            yield ConfigError(given, UNSET, text)


def _option(given: str) -> tuple[str, bool]:
    """Return the name of a given option without dashes, and whether it is the negation of a flag."""
    name = given.removeprefix("--").replace("-", "_") if given.startswith("--") else ""
    positive = name.replace(".no_", ".", 1)
    return positive, positive != name


def refuse_variables(environment: Mapping[str, str], processes: int | None) -> None:
    """Raise ConfigError if a variable of the reference's scripts asks for what it cannot change here.

    NGPU is read by nothing, but harmless if the number of ``processes`` is given.
    """
    for name, replacement in VARIABLES.items():
        value = environment.get(name, "")
        if name == "NGPU" and processes is not None:
            continue
        if re.fullmatch(replacement.applies_to, value):
            text = f"is not read; here {replacement.describe(value)}; unset it to continue"
            raise ConfigError(f"${name}", value, text)
