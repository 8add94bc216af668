"""Read another trainer's file, and recognise whose it is by its content."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fluxtrain.contract.model_base import GROUP, validate
from fluxtrain.contract.resource.document import BARE_RUN, dump_yaml, parse_yaml, read_text
from fluxtrain.contract.resource.fluxtraining import KIND, VERSION, FluxTraining
from fluxtrain.contract.run.config import value_at
from fluxtrain.errors import UNSET, ConfigError, JoinedConfigError, redacted
from fluxtrain.imports.ai_toolkit import AI_TOOLKIT
from fluxtrain.imports.ai_toolkit_values import flat
from fluxtrain.imports.common import with_data_sets
from fluxtrain.imports.kohya import KOHYA
from fluxtrain.imports.more.commands import (
    DIFFUSERS_SCRIPT,
    NO_IMPORT,
    TO_TOML,
    arguments,
    diffusers_command,
    joined,
    launched,
    refused,
    resolved,
    titan_command,
    without_levels,
    words,
)
from fluxtrain.imports.more.diffusers import DIFFUSERS
from fluxtrain.imports.more.onetrainer import ONETRAINER, with_concepts
from fluxtrain.imports.more.torchtitan import MLPERF, TORCHTITAN, is_of_mlperf
from fluxtrain.imports.simpletuner import SIMPLETUNER
from fluxtrain.imports.simpletuner_pictures import with_named_files
from fluxtrain.imports.table import (
    Disposition,
    Imported,
    Line,
    Reading,
    Trainer,
    changed,
    import_options,
    read_document,
)


def read_options(path: Path) -> tuple[Trainer, dict[str, object]]:
    """Return whose options ``path`` holds, and them by name, with dots for nested ones.

    Raises ConfigError for a file that cannot be read, or is of no trainer that is known here.
    """
    if path.name.lower().endswith(".env"):
        return SIMPLETUNER, with_named_files(_variables(read_text(path), path), path)
    if path.suffix.lower() in _COMMANDS:
        text = read_text(path)
        if re.search(rf"(?m)^\s*(export\s+)?({'|'.join(sorted(_OWN_VARIABLES))})=", text):
            return SIMPLETUNER, with_named_files(_variables(text, path), path)
        lines = list(joined(text))
        if any(re.search(_TORCHTITAN, it) for it in lines):
            return _of_torchtitan(titan_command(lines, path))
        if any(re.search(rf"(^|[\s/\\\"']){DIFFUSERS_SCRIPT}", it) for it in lines):
            return DIFFUSERS, diffusers_command(lines, path)
        return KOHYA, _command(lines, path)
    document = read_document(path, (".env", *_COMMANDS))
    names = _names(document)
    if isinstance(document, dict) and names & {"training_method", "output_model_destination"}:
        return ONETRAINER, with_concepts(_named(document), path.parent)
    listed = "\n".join(names)
    for text, *patterns in _FOREIGN:
        if all(re.search(rf"(?m)^(?:{pattern})$", listed) for pattern in patterns):
            raise refused(path, text)
    if not isinstance(document, dict):
        raise ConfigError(str(path), document, "must be a mapping of options")
    return _recognise(document, path)


def _names(document: object, levels: int = 2) -> set[str]:
    """Return the names of options in ``document``, without dashes, and with dots those below them."""
    found = set[str]()
    for item in document if isinstance(document, list) else [document]:
        for key, value in item.items() if isinstance(item, dict) and levels else ():
            name = str(key).removeprefix("--")
            found |= {name, *(f"{name}.{below}" for below in _names(value, levels - 1))}
    return found


_TRAINERS = "kohya's TOML, ai-toolkit's YAML or SimpleTuner's config.json"
_NO_TRAINING = f"not a training's; must be {_TRAINERS}"
_FOREIGN: tuple[tuple[str, ...], ...] = (
    (f"is a {KIND} already, or another object of Kubernetes: fluxtrain run trains a {KIND}", "apiVersion"),
    (BARE_RUN, "preset", "schedule|adapter|optim|data|initial_weights"),
    (f"is OneTrainer's list of concepts, {NO_IMPORT}", "path", "include_subdirectories|text.prompt_source"),
    ("is of a GUI for kohya's sd-scripts; import the JSON that it saves, or the TOML that it trains with",
     r"accelerate_launch\..+|folders\.\w+_dir"),
    (f"is diffusion-pipe's, {NO_IMPORT}",
     r"micro_batch_size_per_gpu|pipeline_stages|model\.(diffusers_path|transformer_dtype)|frame_buckets|"
     r"directory\.(path|control_path)"),
    (f"is musubi-tuner's, for other models or Kontext, {NO_IMPORT}",
     r"dit|dit_high_noise|datasets\.(image|video|control|cache)_directory|datasets\.(image|video)_jsonl_file"),
    (f"is axolotl's, for language models, {NO_IMPORT}",
     "base_model", r"sequence_len|adapter|datasets\.\w+|micro_batch_size"),
    (f"is LLaMA-Factory's, for language models, {NO_IMPORT}",
     "finetuning_type|stage", "model_name_or_path"),
    (f"is x-flux's, {NO_IMPORT}", r"data_config\.\w+"),
    (f"is AutoTrain's, {NO_IMPORT}", "task", "base_model", "backend|project_name"),
    (f"is NeMo AutoModel's, {NO_IMPORT}", r"step_scheduler\.\w+", r"(optim|model|dataset|data)\..+"),
    ("is FluxBenchmark's; docs/benchmark.md has a file that sweeps the same settings",
     r"defaults\.train_args|train_args\..+|cli_args\..+|num_iterations",
     r"(accelerate_config|dynamo_config)\..+|defaults\.launcher|train_batch_size|train_data_path"),
    (f"is InvokeAI's, {NO_IMPORT}", "base_output_dir", "type|model"),
    (f"is a request to a hosted trainer, {NO_IMPORT}",
     r"input_images|images_data_url|autocaption|input\.(input_images|images_data_url|autocaption)"),
    (f"is a Cargo.toml, {_NO_TRAINING}", r"package\.(edition|version)|workspace\.members", ".+"),
    (f"is a pyproject.toml, {_NO_TRAINING}", r"project\.\w+|build-system\.\w+|tool\.\w+"),
    (f"is a package.json, {_NO_TRAINING}", "name|version|private", "scripts|dependencies|devDependencies"),
    (f"is a model's configuration, {_NO_TRAINING}", "_class_name|_diffusers_version|architectures"),
    ("is PEFT's adapter_config.json; fluxtrain adapter info describes the adapter beside it", "peft_type"),
    (f"is a workflow of ComfyUI, {_NO_TRAINING}", r"last_node_id|\w+\.class_type"),
    ("is accelerate's configuration; the training's options stand elsewhere",
     "compute_environment|distributed_type"),
    ("is DeepSpeed's configuration; the training's options stand elsewhere",
     "zero_optimization|train_micro_batch_size_per_gpu"),
    ("is SimpleTuner's list of backends; import the config.json that names it",
     "id", "instance_data_dir|caption_strategy|dataset_type|cache_dir_vae"),
    ("is LyCORIS' part of SimpleTuner's options; import the config.json that names it",
     "algo", r"apply_preset|linear_dim|linear_alpha|factor|multiplier"),
)  # fmt: skip
"""Files that are recognised, but not imported: what to say, and patterns of names, all of which are there."""


_SHARED_KOHYA = (
    "ae clip_skip config_file ddp_timeout deepspeed dynamo_backend enable_bucket flash_attn guidance_scale "
    "highvram huggingface_repo_id huggingface_token initial_epoch initial_step log_config log_with "
    "logging_dir logit_mean logit_std lowvram lr_scheduler_args lr_scheduler_type max_timestep "
    "metadata_author metadata_description metadata_license metadata_tags metadata_title min_timestep "
    "mode_scale output_config output_name random_crop resume save_every_n_epochs save_every_n_steps sdpa "
    "sdxl sigmoid_scale text_encoder_lr torch_compile train_mode v2 vae validation_split wandb_api_key "
    "wandb_run_name warmup_ratio weighting_scheme xformers zero_stage"
)
_SHARED_SIMPLETUNER = (
    "adam_beta1 adam_beta2 adam_epsilon adam_weight_decay backend backends cache_dir conditioning "
    "controlnet deepspeed_config ema_decay hub_model_id hub_token instance_prompt lora_alpha lora_dropout "
    "lora_rank lora_type lr_end lycoris max_workers num_train_epochs num_validation_images optimizer "
    "optimizer_config push_to_hub report_to resume_from_checkpoint snr_gamma use_dora use_ema "
    "validation_prompt"
)
"""Options that other programs have too: they do not say whose a file is."""
_TORCHTITAN_SECTIONS = {"job", "training", "parallelism", "checkpoint", "metrics"}


def _recognise(document: Mapping[str, Any], path: Path) -> tuple[Trainer, dict[str, object]]:
    if "config" in document and "job" in document:
        if not isinstance(document["config"], dict):
            raise ConfigError(f"{path}: config", document["config"], "must be a mapping")
        return AI_TOOLKIT, _named(flat(document))
    names = _names(document)
    if _is_torchtitan(document):
        return _of_torchtitan(without_levels(document))
    if names & _OF_GUI:
        return KOHYA, _of_gui(document, path)
    if any(re.fullmatch(r"\w+_args\.(args|dataset_args)", name) for name in names):
        return KOHYA, _of_easy_training(document, path)
    if "datasets" in names:
        text = "is kohya's data set config; import the training's options, then see docs/data.md"
        raise refused(path, text)
    of_kohya = sorted(_own(KOHYA, SIMPLETUNER, _SHARED_KOHYA) & {n.split(".")[-1] for n in names})
    of_simpletuner = sorted(_own(SIMPLETUNER, KOHYA, _SHARED_SIMPLETUNER) & names)
    if of_kohya and of_simpletuner:
        text = (
            f"has options of kohya's sd-scripts, such as {of_kohya[0]}, and of SimpleTuner, such as "
            f"{of_simpletuner[0]}: leave those of one trainer"
        )
        raise refused(path, text)
    if of_simpletuner:
        return SIMPLETUNER, with_named_files(_named(document), path)
    if of_kohya and path.suffix.lower() not in (".yaml", ".yml"):
        return KOHYA, _without_sections(document, path)
    text = (
        f"must be {_TRAINERS}: it has no option of theirs alone, such as network_module, config.process or "
        "model_family"
    )
    raise refused(path, text)


def _own(trainer: Trainer, other: Trainer, shared: str) -> set[str]:
    """Return the options that say that a file is of ``trainer``."""
    own = {name.partition(".")[0] for name in trainer.options}
    return own - other.options.keys() - set(shared.split())


def _is_torchtitan(document: Mapping[str, Any]) -> bool:
    """Return whether ``document`` has sections of torchtitan; kohya's may have any name, such as training."""
    sections = {name: set(below) for name, below in document.items() if isinstance(below, dict)}
    if not sections.keys() & _TORCHTITAN_SECTIONS:
        return False
    return not any(below & KOHYA.options.keys() - {"seed"} for below in sections.values())


def _of_torchtitan(options: dict[str, object]) -> tuple[Trainer, dict[str, object]]:
    return MLPERF if is_of_mlperf(options) else TORCHTITAN, options


_OF_GUI = {"LoRA_type", "flux1_checkbox", "max_resolution", "lr_warmup", "model_list"}
_GUI_NAMES = {
    "optimizer": "optimizer_type",
    "max_resolution": "resolution",
    "flux1_clip_l": "clip_l",
    "flux1_t5xxl": "t5xxl",
    "flux1_cache_text_encoder_outputs": "cache_text_encoder_outputs",
}
_GUI_MODULES = {"Flux1": "networks.lora_flux", "Flux1 OFT": "networks.oft_flux"}
_OF_LORA = {"rank_dropout", "module_dropout"}
_OF_LYCORIS = {
    *("factor", "decompose_both", "full_matrix", "dora_wd", "use_scalar", "use_tucker", "use_cp"),
    *("bypass_mode", "train_norm", "rank_dropout_scale"),
}
_GUI_ONLY = re.compile(
    r"(sdxl|sd3|flux1|hunyuan|anima|lumina|dynamo|num)_\w+|\w*_lr_weight|\w*block_\w+|loraplus_\w+|"
    r"LyCORIS_preset|LoRA_type|conv_(dim|alpha)|xformers|epoch|unit|constrain|rescaled|train_on_input|"
    r"noise_offset_type|model_list|save_as_bool|gpu_ids|multi_gpu|main_process_port|lr_warmup(_steps)?|"
    r"t5xxl_lr|max_token_length|train_blocks|split_(mode|qkv)|train_t5xxl|(img|txt|single|in)_\w*dims?"
)
"""Settings of the GUI that are not sd-scripts', or that `_of_gui` reads."""


def _of_gui(document: Mapping[str, Any], path: Path) -> dict[str, object]:
    """Return the options of sd-scripts that the GUI makes of what it saves; it drops those that are 0."""
    if not document.get("flux1_checkbox"):
        text = "is of a GUI for kohya's sd-scripts, for another model than FLUX.1"
        raise refused(path, f"{text}: flux1_checkbox is not set")
    given = {name: value for name, value in document.items() if value}

    def number(name: str) -> float:
        try:
            return Reading(given, {}).number(name) if name in given else 0.0
        except ConfigError as error:
            raise ConfigError(f"{path}: {name}", error.given, error.allowed) from None

    kind = str(given.get("LoRA_type", ""))
    own = {n.removeprefix("network_args.") for n in KOHYA.options if n.startswith("network_args.")}
    is_lycoris = kind.startswith("LyCORIS/")
    names = _OF_LYCORIS | _OF_LORA if is_lycoris else own - _OF_LYCORIS
    of_network = {name: value for name, value in given.items() if name in names}
    if is_lycoris:
        algorithm = kind.partition("/")[2].lower()
        of_network["algo"] = "full" if algorithm.startswith("native") else algorithm
        of_network["preset"] = given.get("LyCORIS_preset", "full")
    if given.get("split_mode"):
        of_network["train_blocks"] = "single"
    listed = [f"{name}={value}" for name, value in of_network.items()]
    options: dict[str, object] = {
        _GUI_NAMES.get(name, name): value
        for name, value in given.items()
        if name in _GUI_NAMES or not (name in _OF_LYCORIS | own or _GUI_ONLY.fullmatch(name))
    }
    for name in ("network_args", "optimizer_args", "lr_scheduler_args"):
        value = options.pop(name, "")
        text = " ".join(map(str, value if isinstance(value, list) else [value]))
        words = text.replace('"', "").split()
        words += listed if name == "network_args" and kind else []
        options |= {name: words} if words else {}
    if kind:
        module = "lycoris.kohya" if is_lycoris else _GUI_MODULES.get(kind, kind)
        options |= {"network_module": module}
        unet, text_encoder = number("unet_lr"), number("text_encoder_lr")
        options |= {"network_train_unet_only": True} if unet and not text_encoder else {}
        options |= {"network_train_text_encoder_only": True} if text_encoder and not unet else {}
    percent, steps = min(number("lr_warmup"), 100), min(number("max_train_steps"), 1e9)
    warmup = given.get("lr_warmup_steps") or (round(percent * steps / 100) or percent / 100)
    options |= {"lr_warmup_steps": warmup} if warmup else {}
    options |= {"max_data_loader_n_workers": document.get("max_data_loader_n_workers", 0)}
    options |= arguments(str(options.pop("additional_parameters", "")), path)
    if not steps and "max_train_epochs" not in given and "dataset_config" not in given:
        options["max_train_epochs"] = given.get("epoch", 1)
    return options


def _of_easy_training(document: Mapping[str, Any], path: Path) -> dict[str, object]:
    """Return the options of sd-scripts that LoRA_Easy_Training_Scripts makes; it drops those that are 0.

    Several subsets, and those that are regularisation or have masks, stay in the file, a data set config.
    """
    sections = {name: value for name, value in document.items() if isinstance(value, dict)}
    parts = [it.get(kind, {}) for kind in ("args", "dataset_args") for it in sections.values()]
    subsets = document.get("subsets", [])
    program = "is of LoRA_Easy_Training_Scripts"
    if not isinstance(subsets, list) or not all(isinstance(it, dict) for it in (*parts, *subsets)):
        raise refused(path, f"{program}; args, dataset_args and subsets must be tables")
    if not sections.get("flux_args", {}).get("args"):
        raise refused(path, f"{program}, for another model than FLUX.1: it has no flux_args")
    options: dict[str, object] = {"train_mode": "lora"}
    for part in (*parts, sections.get("train_mode", {})):
        used = {n: v for n, v in part.items() if v and str(v).lower() != "false"}
        options |= {"train_batch_size" if n == "batch_size" else n: v for n, v in used.items()}
    module = "networks.lora_flux" if "guidance_scale" in options else "networks.lora"
    module = "networks.lora_fa" if options.pop("fa", False) else module
    for name in ("network_args", "optimizer_args", "lr_scheduler_args"):
        given = options.pop(name, {})
        if not isinstance(given, dict):
            raise ConfigError(f"{path}: {name}", given, "must be a table")
        texts = {k: ",".join(map(str, v)) if isinstance(v, list) else v for k, v in given.items()}
        words = [f"{k}={v}" for k, v in texts.items() if (k, v) != ("preset", "")]
        options |= {name: words} if words else {}
        if name == "network_args" and given.keys() & {"algo", "unit"}:
            module = "lycoris.kohya" if "algo" in given else "networks.dylora"
    options = {"network_module": module, **options}
    if output := options.get("output_name"):
        replaced = str(output).replace("${replace}", str(options.get("easy_name", "")))
        options["output_name"] = replaced
    if len(subsets) > 1 or any(
        it.get("is_reg") or it.get("conditioning_data_dir") for it in subsets
    ):
        return {**options, "dataset_config": path.name}
    names = {"image_dir": "train_data_dir", "num_repeats": "dataset_repeats"}
    own = {names.get(n, n): v for it in subsets for n, v in it.items() if v and n != "name"}
    return options | own


_KOHYAS = r"flux_train(_network)?\.py"
_TORCHTITAN = r"torchtitan|--job\.config_file|run_(train|preprocessing)\.sh"
_ASSIGNED = rf"\s*(export\s+|set\s+|\$)?[\w.:]+\s*=\s*[\"']?[^\s\"']*{_KOHYAS}[\"']?\s*($|#)"
_COMMANDS = (".sh", ".bash", ".bat", ".cmd", ".ps1", ".txt")
_SCRIPTS = (
    (r"flux_train_control_net\.py", "kohya's sd-scripts for a ControlNet"),
    (r"(sdxl|sd3|lumina|hunyuan_image|anima)_\w{,60}train\w{,60}\.py|fine_tune\.py|train_(db|network)\.py",
     "kohya's sd-scripts for another model than FLUX.1"),
    (r"\w{,60}train_textual_inversion\w{,60}\.py|textual_inversion\w{,60}\.py", "textual inversion"),
    (r"\w{,60}kontext\w{,60}\.py",
     "Kontext, which edits pictures; for pairs, fluxtrain init PAIRS --base=kontext writes a file"),
    (r"\w{1,60}_train_network\.py|\w{1,60}_train\.py", "musubi-tuner, for other models"),
    (r"--(model_id_with_origin_paths|pretrained_dit_path|lora_base_model)",
     f"DiffSynth-Studio, {NO_IMPORT}"),
    (r"launcher\.py", "FluxBenchmark; docs/benchmark.md has a file that sweeps the same settings"),
    (r"train_control(net)?(_lora)?_flux\w{,60}\.py|train_flux\w{,60}controlnet\w{,60}\.py", "a ControlNet"),
    (r"train_\w{,60}ip_?a\w{,60}\.py", "an IP-Adapter"),
    (r"train_(dreambooth|text_to_image|lcm|dpo)\w{,60}\.py", f"diffusers' examples, {NO_IMPORT}"),
    (r"train_flux\w{,60}\.py", f"x-flux, {NO_IMPORT}"),
    (r"run\.py", "ai-toolkit; import the YAML that the command names"),
    (r"train\.py|simpletuner", "a trainer that reads a file; import that file"),
)  # fmt: skip
"""Scripts in commands, by patterns of their names: what they are of."""
_OF_DIFFUSERS = {
    *("rank", "report_to", "instance_data_dir", "instance_prompt", "validation_prompt"),
    *("checkpointing_steps", "dataloader_num_workers", "lora_layers", "dataset_name"),
}
"""Options of diffusers' examples, whose copies may have the name of kohya's script."""


def _command(lines: Sequence[str], path: Path) -> dict[str, object]:
    """Return the options of a command of kohya's sd-scripts for FLUX.1.

    Raises ConfigError for other commands, and for variables, whose values a shell knows.
    """
    scripts = [it for it in lines if re.search(rf"(^|[\s/\\\"']){_KOHYAS}", it)]
    commands = [it for it in scripts if not re.match(_ASSIGNED, it)]
    if scripts and not commands:
        raise refused(path, f"has the script's name in a variable: {TO_TOML}")
    if not commands:
        for pattern, owner in _SCRIPTS:
            if any(re.search(rf"(^|[\s/\\\"'])({pattern})($|[\s\"'=])", it) for it in lines):
                raise refused(path, f"is a command of {owner}")
        ran = re.search(
            r"(?m)\b(?:python3?|launch|torchrun)\b[^\n]*?([\w.-]+\.py)\b", "\n".join(lines)
        )
        text = f"runs {ran[1]}, which is not known here" if ran else "has no command that trains"
        raise refused(path, f"{text}; must be {_TRAINERS}, or kohya's command")
    if len(commands) > 1:
        raise refused(path, f"has {len(commands)} commands; leave one")
    launch, *_, rest = re.split(rf"(?:{_KOHYAS})", commands[0])
    options = arguments(rest, path) | launched(launch)
    if others := sorted(options.keys() & _OF_DIFFUSERS):
        text = (
            f"is a command of another program of that name, with --{others[0]}; must be {_TRAINERS}"
        )
        raise refused(path, f"{text}, or kohya's command")
    if "config_file" in options and "output_config" not in options:
        raise ConfigError(
            f"{path}: config_file", options["config_file"], "has the options; import it"
        )
    return options


_VARIABLES = {
    "RESUME_CHECKPOINT": "resume_from_checkpoint",
    "DATALOADER_CONFIG": "data_backend_config",
    "TRAINING_SEED": "seed",
    "MINIMUM_RESOLUTION": "minimum_image_size",
    "PUSH_CHECKPOINTS": "push_checkpoints_to_hub",
    "MAX_NUM_STEPS": "max_train_steps",
    "TRAINING_NUM_PROCESSES": "num_processes",
    "NUM_EPOCHS": "num_train_epochs",
    "CHECKPOINTING_LIMIT": "checkpoints_total_limit",
    "HUB_MODEL_NAME": "hub_model_id",
    "MODEL_NAME": "pretrained_model_name_or_path",
    "USE_GRADIENT_CHECKPOINTING": "gradient_checkpointing",
    "LR_SCHEDULE": "lr_scheduler",
}
"""Those of other names."""
_OWN_VARIABLES = {"MODEL_FAMILY", "MODEL_TYPE", "DATALOADER_CONFIG", "TRAINER_EXTRA_ARGS"}
_FAMILIES = (
    *("FLUX", "SD3", "STABLE_DIFFUSION_3", "PIXART_SIGMA", "KOLORS", "STABLE_DIFFUSION_LEGACY"),
)
"""Variables that choose a model in versions of August 2024, which shift no timesteps by default."""
_OF_SHELL = re.compile(
    r"(TRAINING_DYNAMO|ACCELERATE|SIMPLETUNER|HF|CUDA|NCCL)_\w+|TRAINING_NUM_MACHINES|ENV"
)


def _variables(text: str, path: Path) -> dict[str, object]:
    """Return the options of SimpleTuner's variables in ``text``; those of the shell are left out.

    Variables that the file sets are replaced in later ones; `import_file` refuses options with others.
    """
    variables: dict[str, str] = {}
    for word in words(re.sub(r"\\\r?\n", "", text), path):
        if found := re.fullmatch(r"(\w+)(\+?)=(.*)", word, re.DOTALL):
            name, plus, value = found.groups()
            known = {name: "", **variables}
            start = f"{known[name]} " if plus else ""
            variables[name] = resolved(f"{start}{value}", known, path).strip()
    if any(name.startswith("PARAMS_") for name in variables):
        step = "set its variables, then fluxtrain import-config --from-env"
        raise refused(path, f"is of a container for kohya's sd-scripts: {step}")
    if not variables.keys() & _OWN_VARIABLES:
        raise refused(
            path, f"must be SimpleTuner's: it has none of {', '.join(sorted(_OWN_VARIABLES))}"
        )
    options = arguments(variables.pop("TRAINER_EXTRA_ARGS", ""), path)
    for name, value in variables.items():
        if name in _FAMILIES:
            older = {"model_family": name.lower(), "flux_schedule_shift": "0", **options}
            options = older if value.lower() == "true" else options
        elif not _OF_SHELL.fullmatch(name):
            options[_VARIABLES.get(name, name.lower())] = value
    return options


def _named(options: Mapping[Any, object]) -> dict[str, object]:
    return {str(name): value for name, value in options.items()}


def _without_sections(document: Mapping[str, Any], path: Path) -> dict[str, object]:
    """Return the options of kohya's TOML, in which sections have no meaning."""
    options: dict[str, object] = {}
    for key, value in document.items():
        for name, below in value.items() if isinstance(value, dict) else [(key, value)]:
            if name in options and options[name] != below:
                raise ConfigError(f"{path}: {name}", below, "is given twice")
            options[name] = below
    return options


def import_file(
    path: Path,
    overrides: Mapping[str, Any],
    processes: int = 1,
    epoch_samples: int | None = None,
    prompt_file: str | None = None,
) -> Imported:
    """Return ``spec.run`` for the options in ``path``; errors name the file and the option.

    ``prompt_file`` is the name of a file for prompts that have options of their own, if one can be written.
    """
    trainer, options = read_options(path)
    try:
        options = with_data_sets(options, path.parent) if trainer is KOHYA else options
        reading = Reading(options, {}, processes, epoch_samples, prompt_file)
        imported = import_options(trainer, reading, overrides)
        if trainer is SIMPLETUNER and path.suffix.lower() in (".env", *_COMMANDS):
            _refuse_variables(imported.lines[Disposition.WRITTEN])
    except ConfigError as error:
        raise changed(
            error, lambda each: ConfigError(f"{path}: {each.path}", each.given, each.allowed)
        ) from None
    if trainer is KOHYA and path.suffix.lower() not in _COMMANDS:
        _require_flux(reading, path)
    return imported


_OF_FLUX = (
    *("ae", "clip_l", "t5xxl", "t5xxl_max_token_length", "apply_t5_attn_mask", "guidance_scale"),
    *("timestep_sampling", "discrete_flow_shift", "model_prediction_type", "model_type"),
)
"""Options of sd-scripts that only FLUX.1 has, of the models that `KOHYA_KINDS` does not name."""


def _require_flux(reading: Reading, path: Path) -> None:
    """Raise ConfigError unless an option says that FLUX.1 is trained: sd-scripts has a script a model."""
    model = "pretrained_model_name_or_path"
    names = " ".join(str(reading.given.get(it, "")) for it in ("network_module", model))
    is_stated = value_at(reading.overrides, "initial_weights") is not None
    if not (is_stated or "flux" in names.lower() or any(reading.given.get(it) for it in _OF_FLUX)):
        text = f"does not say that it is for FLUX.1, by {model}, ae, t5xxl or network_module: "
        raise refused(path, f"{text}--initial_weights=... says what is trained")


def _refuse_variables(lines: Sequence[Line]) -> None:
    """Raise ConfigError if a value that a field takes over has a variable, or a command, of the shell."""
    for line in lines:
        if isinstance(line.value, str) and re.search(r"\$[A-Za-z_{(]|`", line.value):
            text = "must not have variables that are set elsewhere, nor commands: write what they stand for"
            raise ConfigError(line.option, line.value, text)


_LISTED = (Disposition.MISSING, Disposition.UNKNOWN, Disposition.IGNORED, Disposition.OUTSIDE)
"""What the file itself names, in comments; reports have everything."""
_LONGEST = 60
_SECTIONS = ("preset", "task", "seed", "initial_weights")


def file_text(imported: Imported, name: str, source: str, gpus: int) -> str:
    """Return the FluxTraining ``name`` on ``gpus`` GPUs of a node, as YAML; ``source`` is named in it.

    Raises ConfigError if ``name`` cannot be the name of a job.
    """
    first = [key for key in _SECTIONS if key in imported.run]
    run = {key: imported.run[key] for key in [*first, *imported.run]}
    document: dict[str, Any] = {
        "apiVersion": f"{GROUP}/{VERSION}",
        "kind": KIND,
        "metadata": {"name": name},
        "spec": {"nodes": {"min": 1, "max": 1}, "gpusPerNode": gpus, "run": run},
    }
    validate(FluxTraining, document, "")
    body = dump_yaml(document)
    text = "".join(f"# {line}\n".replace("# \n", "#\n") for line in _header(imported, source))
    assert parse_yaml(text + body, "file") == document, "the file is what was resolved"
    return text + body


def report(imported: Imported, of: Iterable[Disposition] = Disposition) -> Iterator[str]:
    """Yield the lines that say what became of every option, by its disposition ``of`` these."""
    for disposition in of:
        if lines := imported.lines[disposition]:
            yield f"{disposition.value}:"
            yield from (f"  {_describe(line)}" for line in lines)


def refuse_lost(imported: Imported, source: str) -> None:
    """Raise ConfigError with the options of ``source`` that have no counterpart, or are unknown."""
    lost = [
        ConfigError(
            f"{source}: {line.option}",
            UNSET if line.value is None else line.value,
            f"{disposition.value} (--strict): {line.note}",
        )
        for disposition in (Disposition.MISSING, Disposition.UNKNOWN)
        for line in imported.lines[disposition]
        if line.is_given
    ]
    if lost:
        raise JoinedConfigError(lost, len(lost))


def _header(imported: Imported, source: str) -> Iterator[str]:
    yield f"By fluxtrain import-config from {_plain(source)}: options of {imported.trainer}."
    yield from report(imported, _LISTED)


def _describe(line: Line) -> str:
    value = "" if line.value is None else f"={_brief(line.value)}"
    given = f"{_plain(line.option)}{value}{'' if line.is_given else ' (not given)'}"
    fields = ", ".join(f"{path}={_brief(value)}" for path, value in line.values.items())
    text = "; ".join(part for part in (fields, line.note) if part)
    return f"{given}: {text}" if text else given


def _brief(value: object) -> str:
    """Return ``value`` on one line, without credentials, cut if it is long."""
    value = redacted(value) if isinstance(value, str) else value
    if isinstance(value, str) and re.fullmatch(r"[\w./@:+,-]{1,60}", value, re.ASCII):
        return value
    text = redacted(json.dumps(value, default=str, ensure_ascii=True))
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."


def _plain(name: str) -> str:
    return name if re.fullmatch(r"[\w.$\[\] /-]{1,200}", name, re.ASCII) else _brief(name)
