"""The options of kohya's sd-scripts for FLUX.1: flux_train_network.py and flux_train.py."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from fluxtrain.contract.run.config import value_at
from fluxtrain.imports import common
from fluxtrain.imports import kohya_values as values
from fluxtrain.imports.common import OPTIMIZER_FIELDS
from fluxtrain.imports.kinds import KOHYA_KINDS
from fluxtrain.imports.kohya_values import resolution
from fluxtrain.imports.table import (
    Convert,
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
    saved,
    set_outside,
    to,
)

_NO_EFFECT = "sd-scripts accepts it, and draws and weighs FLUX.1's noise without it"
_OFFSET = f"{_NO_EFFECT}; flow.noise_offset has an effect"
_SETTINGS = values.OPTIMIZERS
_RATE = _SETTINGS.setting("optim.learning_rate")


_OPTIMIZER: Mapping[str, Option] = {
    "optimizer_type": fields(
        OPTIMIZER_FIELDS, _SETTINGS.convert, "AdamW", "with its package's settings"
    ),
    "use_8bit_adam": automatic("is optimizer_type=AdamW8bit"),
    "use_lion_optimizer": automatic("is optimizer_type=Lion"),
    "learning_rate": fields(["optim.learning_rate"], _RATE, 2e-6),
    "unet_lr": fields(["optim.learning_rate"], _RATE, note="wins over learning_rate"),
    "text_encoder_lr": fields(
        [values.RATE], values.text_encoder_rate, note="over unet_lr or learning_rate"
    ),
    **_SETTINGS.rows("optimizer_args", "weight_decay"),
    "optimizer_args.betas": fields(["optim.beta1", "optim.beta2"], _SETTINGS.betas),
    "optimizer_args.eps": fields(
        ["optim.epsilon"],
        _SETTINGS.setting("optim.epsilon", "adamw", "prodigy", "schedule_free_adamw"),
    ),
    **_SETTINGS.rows(
        "optimizer_args", "d_coef d0 growth_rate use_bias_correction safeguard_warmup"
    ),
    **each(
        "optimizer_args.decouple optimizer_args.relative_step optimizer_args.scale_parameter "
        "optimizer_args.warmup_init",
        automatic(
            "is part of optimizer_type: only those of our optimizers' kind have a counterpart"
        ),
    ),
    "lr_scheduler": fields(
        ["schedule.decay", "schedule.min_learning_rate"], values.schedule, "constant"
    ),
    "lr_warmup_steps": fields(
        ["schedule.warmup_steps"], values.warmup, 0, "below 1: a fraction of the steps"
    ),
    "warmup_ratio": fields(["schedule.warmup_steps"], values.warmup, note="of EasyTraining's TOML"),
    "lr_scheduler_min_lr_ratio": fields(["schedule.min_learning_rate"], values.least_rate),
    "lr_scheduler_num_cycles": fields(
        ["schedule.cycles"],
        values.of_schedule("cosine_with_restarts", "schedule.cycles", Reading.positive),
        1,
        "does nothing with any schedule but cosine_with_restarts",
    ),
    "lr_scheduler_power": fields(
        ["schedule.power"],
        values.of_schedule("polynomial", "schedule.power", Reading.number),
        note="does nothing with any schedule but polynomial",
    ),
    "lr_decay_steps": ignored("only warmup_stable_decay uses it"),
    "lr_scheduler_type": missing("schedules of other packages are not loaded"),
    "lr_scheduler_args": missing("schedules of other packages are not loaded"),
    "max_grad_norm": fields(["optim.max_grad_norm"], common.no_clipping_at_zero, 1.0, "0: none"),
    **each(
        "blockwise_fused_optimizers fused_backward_pass fused_optimizer_groups",
        missing("the update is one for all weights; FSDP2 shards its states"),
    ),
    "blocks_to_swap": fields(
        ["parallel.offload_blocks"],
        values.swapped_blocks,
        note="n/2 double blocks for n, twice the rest of single ones, and 2 that have buffers",
    ),
    **each(
        "single_blocks_to_swap double_blocks_to_swap",
        missing("parallel.offload_blocks is of weights that are not trained", 0),
    ),
    "cpu_offload_checkpointing": missing(
        "activations stay on the GPU; parallel.activation_checkpointing recomputes them"
    ),
    "mem_eff_save": missing("a checkpoint is written from a copy in host memory"),
}
_LENGTH: Mapping[str, Option] = {
    "train_batch_size": common.batch_option(
        common.batch(), 1, "times gradient_accumulation_steps and --gpus"
    ),
    "gradient_accumulation_steps": automatic("is part of schedule.global_batch_size"),
    "max_train_steps": fields(["schedule.steps"], values.steps, 1600),
    "max_train_epochs": fields(
        ["schedule.epochs", "schedule.steps"],
        values.epochs,
        note="with --epoch-samples, images times repeats: steps",
    ),
    "seed": fields(["seed"], values.seed, "random"),
    **each(
        "initial_step initial_epoch skip_until_initial_step", automatic("a run resumes exactly")
    ),
}
_FLOW: Mapping[str, Option] = {
    "timestep_sampling": fields(
        [
            "flow.timestep_sampling",
            "flow.sigmoid_scale",
            "flow.shift",
            "flow.logit_mean",
            "flow.logit_std",
            "flow.mode_scale",
        ],
        values.timesteps,
        "sigma",
        "sigma only with discrete_flow_shift=1",
    ),
    "sigmoid_scale": fields(
        ["flow.sigmoid_scale"],
        values.only_with("timestep_sampling", "sigmoid", "shift", "flux_shift"),
        1.0,
    ),
    "discrete_flow_shift": fields(
        ["flow.shift"],
        values.only_with("timestep_sampling", "shift", "sigma"),
        3.0,
        "only with timestep_sampling=shift and sigma",
    ),
    "weighting_scheme": fields([], values.scheme, "uniform", "is part of timestep_sampling=sigma"),
    **{
        name: fields([f"flow.{name}"], values.only_with("timestep_sampling", "sigma"), default)
        for name, default in (("logit_mean", 0.0), ("logit_std", 1.0), ("mode_scale", 1.29))
    },
    "model_prediction_type": fields([], values.prediction, "sigma_scaled", "always raw"),
    "guidance_scale": field_option("flow.guidance", Reading.number, 3.5),
    "loss_type": missing("the loss is the squared error", "l2"),
    "noise_offset": ignored(_OFFSET),
    **each(
        "noise_offset_random_strength adaptive_noise_scale multires_noise_iterations "
        "multires_noise_discount min_snr_gamma scale_v_pred_loss_like_noise_pred v_pred_like_loss "
        "debiased_estimation_loss zero_terminal_snr ip_noise_gamma_random_strength "
        "min_timestep max_timestep",
        ignored(_NO_EFFECT),
    ),
    **each("huber_c huber_schedule huber_scale", fields([], values.huber, note="of loss_type")),
    "ip_noise_gamma": missing("the model's input is not perturbed", 0),
    "prior_loss_weight": fields(
        ["data.prior_loss_weight"],
        common.setting("data.prior_loss_weight", Reading.number, off=1),
        note="of is_reg in dataset_config",
    ),
    "masked_loss": automatic("data.masks; conditioning_data_dir of dataset_config is read"),
    "alpha_mask": common.if_on({"data.masks": "alpha"}, "the pictures' opacity"),
}

TRAINING: Mapping[str, Option] = {**_OPTIMIZER, **_LENGTH, **_FLOW}
"""In the order of reports."""


Read = Callable[[Reading, str], object]
_STEP, _NO_UPSCALE = "bucket_reso_steps", "bucket_no_upscale"
SETTINGS: Sequence[tuple[str, str, Read, object]] = (
    (_STEP, "data.buckets.step", Reading.positive, 64),
    ("min_bucket_reso", "data.buckets.min_side", Reading.positive, 256),
    ("max_bucket_reso", "data.buckets.max_side", Reading.positive, 1024),
    (_NO_UPSCALE, "data.buckets.upscale", Reading.flag, False),
)
"""Options of kohya's sd-scripts with their fields, types and defaults."""
FIELDS = tuple(path for _, path, _, _ in SETTINGS)
"""The fields that enable_bucket sets."""


def kohya(reading: Reading, name: str) -> Values:
    """Return kohya's buckets, whose rule is that of ``data.buckets``, but for settings that are given."""
    if not reading.flag(name):
        return reading.noted(name, "images are squares of data.image_size")
    others = [row for row in SETTINGS if row[0] not in reading.given]
    values = {path: read(reading, option) for option, path, read, _ in others}
    return {**values, "data.buckets.upscale": not reading.flag(_NO_UPSCALE)}


def of_kohya(path: str, read: Read) -> Convert:
    """Return the conversion of a setting of enable_bucket, which writes it unless it is given."""

    def convert(reading: Reading, name: str) -> Values:
        value = read(reading, name)
        if not reading.is_on("enable_bucket"):
            raise IgnoredError("only enable_bucket uses it")
        if name == _NO_UPSCALE or name not in reading.given:
            return reading.noted(name, "written with enable_bucket")
        if name == _STEP:
            _check_step(reading, name)
        return {path: value}

    return convert


def _check_step(reading: Reading, name: str) -> None:
    """Raise ConfigError for a step that does not fit the resolution, or sides that are not given."""
    if value_at(reading.overrides, "data.buckets") is not None:
        return
    step = reading.positive(name)
    is_square = reading.has("resolution") and value_at(reading.overrides, "data.image_size") is None
    with suppress(NoCounterpartError):
        side = resolution(reading, "resolution")["data.image_size"] if is_square else step
        if step > int(str(side)):
            raise reading.wrong(name, f"must be at most resolution, {side}")
    for option, _, _, default in SETTINGS[1:3]:
        if option not in reading.given and int(str(default)) % step:
            raise reading.wrong(name, f"must divide {option}, which is {default} if not given")


def prompt_file(reading: Reading, name: str) -> Values:
    """Return the file of prompts; sd-scripts' TOML and JSON have no counterpart."""
    path = reading.text(name)
    if not path.endswith(".txt"):
        raise NoCounterpartError("sampling.prompt_file is a text file, one prompt a line")
    return {"sampling.prompt_file": path}


def with_prompts(convert: Convert) -> Convert:
    """Return ``convert`` for the interval of images, which need a file of prompts."""

    def only(reading: Reading, name: str) -> Values:
        values = convert(reading, name)
        if not reading.has("sample_prompts") or not prompt_file(reading, "sample_prompts"):
            raise NoCounterpartError("images need sample_prompts")
        return values

    return only


_PATH = "a relative path is below --models"
_TOKENIZER = "the tokenizer is that folder of FLUX.1's repository, below --models"
_NO_OTHER = common.must_be(False, "it is of Stable Diffusion, and FLUX.1 is trained here")
_FOLDER = ("train_data_dir",)
_MODEL: Mapping[str, Option] = {
    "pretrained_model_name_or_path": field_option("initial_weights", Reading.text, note=_PATH),
    "model_type": automatic("must be flux"),
    "model_train_type": automatic("of Akegarasu's lora-scripts: flux-lora or flux-finetune"),
    "clip_l": fields(
        ["encoders.clip", "encoders.clip_tokenizer"],
        common.encoder("encoders.clip", "tokenizer"),
        note=_TOKENIZER,
    ),
    "t5xxl": fields(
        ["encoders.t5", "encoders.t5_tokenizer"],
        common.encoder("encoders.t5", "tokenizer_2"),
        note=_TOKENIZER,
    ),
    "ae": field_option("encoders.autoencoder", Reading.text, note=_PATH),
    "vae": ignored("FLUX.1's autoencoder is ae"),
    "no_half_vae": automatic("encoders.precision"),
    **each(
        "fp8_base fp8_base_unet",
        fields(
            ["adapter.base_dtype"],
            values.of_network(values.small_base),
            note="a power of two for each row is kept with the values",
        ),
    ),
    "mixed_precision": fields(["precision.compute"], common.compute_dtype, "no"),
    "full_bf16": fields(
        ["precision.weights"],
        values.full_bf16,
        note="rounded stochastically; states of the optimizer are float32 or of 8 bits",
    ),
    "full_fp16": missing("precision.weights is float32 or bfloat16"),
    "gradient_checkpointing": fields(
        ["parallel.activation_checkpointing"], common.recomputation, False
    ),
    "t5xxl_max_token_length": field_option("data.text_length", Reading.positive),
    "apply_t5_attn_mask": missing("no attention mask, as in Black Forest Labs' code"),
    **each("v2 v_parameterization sdxl", fields([], _NO_OTHER, note="other models")),
    **each(
        "clip_skip max_token_length network_args.conv_dim network_args.conv_alpha",
        ignored("is not for FLUX.1"),
    ),
}
_NETWORK: Mapping[str, Option] = {
    "network_module": fields(["adapter.kind"], values.network_kind),
    "network_dim": fields(
        ["adapter.rank", "adapter.lokr.full_matrix"], values.of_network(values.network_rank), 4
    ),
    "network_alpha": fields(
        ["adapter.alpha"], values.of_network(values.network_alpha), 1.0, "0 is the rank"
    ),
    "network_dropout": fields(
        ["adapter.dropout"],
        values.of_network(values.of_lora("adapter.dropout", Reading.number)),
    ),
    "network_weights": field_option("adapter.initial", Reading.text, note=_PATH),
    "dim_from_weights": missing("fluxtrain adapter info prints the rank of network_weights"),
    "base_weights": missing("fluxtrain adapter merge adds adapters to weights beforehand"),
    "base_weights_multiplier": missing("fluxtrain adapter merge has --strength"),
    "network_train_unet_only": fields(
        values.FIELDS,
        values.unet_only,
        False,
        "without it, CLIP-L has adapters too, with the captions of data.images",
    ),
    "network_train_text_encoder_only": missing("adapters of the transformer are always trained"),
    "scale_weight_norms": missing("norms of adapters are not bounded here", 0),
    "network_args.train_blocks": fields(
        ["adapter.double_blocks", "adapter.single_blocks"], values.blocks
    ),
    "network_args.train_double_block_indices": field_option("adapter.double_blocks", Reading.text),
    "network_args.train_single_block_indices": field_option("adapter.single_blocks", Reading.text),
    **{
        f"network_args.{kind}_dim": field_option(f"adapter.ranks.{kind}", Reading.whole)
        for kind in values.KINDS
    },
    "network_args.split_qkv": fields(
        ["adapter.split_qkv"],
        values.of_lora("adapter.split_qkv", Reading.flag),
        note="sd-scripts since September 2025 fails with it",
    ),
    "network_args.algo": automatic("is part of network_module"),
    "network_args.preset": fields(["adapter.layers"], common.lycoris_preset),
    "network_args.factor": fields(
        ["adapter.lokr.factor"],
        values.of_lokr("adapter.lokr.factor", lambda reading, name: int(reading.number(name))),
    ),
    **{
        f"network_args.{name}": fields(
            [f"adapter.lokr.{name}"], values.of_lokr(f"adapter.lokr.{name}", Reading.flag)
        )
        for name in ("full_matrix", "decompose_both")
    },
    "network_args.dora_wd": missing(
        "DoRA of LyCORIS' algorithms; adapter.dora is of networks.lora_flux"
    ),
    "network_args.verbose": automatic("fluxtrain plan prints the layers' sizes"),
    "network_args.in_dims": missing("only the blocks' linear layers have adapters"),
    "network_args.train_t5xxl": missing("T5 is not trained here"),
    "network_args.rank_dropout": fields(
        ["adapter.rank_dropout"], values.of_lora("adapter.rank_dropout", Reading.number)
    ),
    "network_args.module_dropout": field_option("adapter.module_dropout", Reading.number),
    "network_args.dropout": fields([], values.dropout_argument, note="of LyCORIS alone"),
    values.LORA_PLUS: fields([values.ALL_UP, values.UP], values.up_of_all),
    values.LORA_PLUS_UNET: fields(
        [values.ALL_UP, values.UP],
        values.up_of_transformer,
        note=f"wins over {values.LORA_PLUS}",
    ),
    values.LORA_PLUS_CLIP: fields(
        [values.UP], values.up_of_clip, note=f"wins over {values.LORA_PLUS}"
    ),
    "network_args.network_reg_lrs": missing("adapter.rates has factors for kinds of layers"),
    "network_args.network_reg_dims": missing("adapter.ranks has ranks for kinds of layers"),
    **each("network_args.ggpo_beta network_args.ggpo_sigma", missing("no perturbed gradients")),
}
_FILES: Mapping[str, Option] = {
    "output_dir": set_outside("fluxtrain run FILE --output DIR"),
    "output_name": fields(["adapter_file.name"], common.file_name),
    "save_precision": fields(["adapter_file.dtype"], common.file_dtype, "float"),
    "save_model_as": missing("files are safetensors", "safetensors"),
    "save_every_n_steps": saved("network_module", to("", Reading.whole), 0),
    "save_every_n_epochs": saved(
        "network_module",
        values.every_epochs("adapter_file.every_steps"),
        note="with --epoch-samples",
    ),
    **each(
        "save_last_n_steps save_last_n_epochs save_n_epoch_ratio",
        missing("files of adapters are all kept"),
    ),
    **each(
        "save_last_n_steps_state save_last_n_epochs_state",
        missing("checkpoint.keep is a number of checkpoints"),
    ),
    **each("save_state save_state_on_train_end", automatic("checkpoints are always saved")),
    "resume": set_outside("the same fluxtrain run with the same --output resumes"),
    **each(
        "training_comment metadata_title metadata_author metadata_description metadata_license "
        "metadata_tags no_metadata",
        missing("the metadata of files have no text of yours"),
    ),
    **each(
        "save_state_to_huggingface resume_from_huggingface huggingface_repo_id "
        "huggingface_repo_type huggingface_path_in_repo huggingface_repo_visibility "
        "async_upload save_to_hub",
        missing("nothing is uploaded"),
    ),
    "huggingface_token": set_outside("HF_TOKEN is read by the Hub's client", is_secret=True),
    "log_with": fields(
        ["logging.tensorboard", "logging.wandb.project", "logging.wandb.name"], values.tracker
    ),
    **each("log_tracker_name wandb_run_name", automatic("is part of logging.wandb")),
    "wandb_api_key": set_outside("WANDB_API_KEY in the environment", is_secret=True),
    **each(
        "logging_dir log_prefix log_tracker_config log_config console_log_level console_log_file "
        "console_log_simple",
        automatic("logs are in the run's --output"),
    ),
}
_EASY_TRAINING = each(
    "train_mode easy_name save_toml save_toml_location tag_occurrence tag_file_location",
    automatic("is of the window of LoRA_Easy_Training_Scripts"),
)
_DATA: Mapping[str, Option] = {
    "train_data_dir": field_option(
        "data.images",
        Reading.text,
        note="a folder below --data; numbers of repeats in names of folders are not read",
    ),
    "dataset_config": field_option(
        "data.images",
        Reading.text,
        note="below --data; its batch_size, resolution and buckets are read if it is beside this file, else "
        "fluxtrain run names the fields that must be as in it",
    ),
    "caption_extension": automatic("text files beside the images: docs/data.md"),
    "in_json": missing("metadata.jsonl in the folder has captions (docs/data.md)"),
    "reg_data_dir": missing("is_reg of a subset in dataset_config; data.prior_loss_weight"),
    "dataset_class": missing("readers of other packages are not loaded"),
    "dataset_repeats": common.image_option("data.repeats", Reading.positive, folders=_FOLDER),
    "resolution": fields(["data.image_size"], values.resolution),
    "enable_bucket": fields(FIELDS, kohya, note="false: squares"),
    **{
        name: fields([path], of_kohya(path, read), default, "with enable_bucket")
        for name, path, read, default in SETTINGS
    },
    "caption_dropout_rate": field_option("flow.prompt_dropout", Reading.number, 0.0),
    **each(
        "caption_dropout_every_n_epochs token_warmup_step token_warmup_min",
        missing("captions are encoded beforehand, for all epochs", 0, 1),
    ),
    "caption_suffix": missing("of a subset in dataset_config"),
    "keep_tokens_separator": missing("data.variants.keep_tokens is a number of tags"),
    "secondary_separator": missing("tags have one separator: data.variants.separator"),
    **each("enable_wildcard weighted_captions", missing("captions have no syntax of their own")),
    "caption_prefix": common.image_option("data.caption_prefix", folders=_FOLDER),
    "shuffle_caption": common.SHUFFLED,
    "caption_tag_dropout_rate": common.DROPPED,
    "keep_tokens": fields(
        ["data.variants.keep_tokens"],
        common.setting("data.variants.keep_tokens", Reading.whole),
        note="0: none",
    ),
    "caption_separator": fields(
        ["data.variants.separator"],
        common.setting("data.variants.separator", Reading.text),
        note="for shuffle_caption and caption_tag_dropout_rate",
    ),
    "flip_aug": common.FLIPPED,
    "random_crop": common.CROPPED,
    **each("color_aug face_crop_aug_range", missing("colours are not changed, nor faces found")),
    "cache_info": automatic("indices are kept in the folders of samples"),
    **each(
        "cache_latents cache_latents_to_disk cache_text_encoder_outputs skip_cache_check "
        "cache_text_encoder_outputs_to_disk vae_batch_size text_encoder_batch_size",
        automatic("data.images is encoded before the first step"),
    ),
    "max_data_loader_n_workers": field_option("data.num_workers", Reading.whole, 8),
    "persistent_data_loader_workers": automatic("data loader processes live on"),
    "validation_split": fields(
        ["data.validation_split", "evaluation.at_end"],
        values.split,
        note="the loss of these pictures is also computed after the last step",
    ),
    "validate_every_n_steps": fields(
        [values.EVERY], values.every_steps, note="times the global batch"
    ),
    "validate_every_n_epochs": fields(
        [values.EVERY],
        values.validation_every_epochs,
        1,
        "with --epoch-samples, unless validate_every_n_steps is given",
    ),
    "validation_seed": fields(
        [], values.validation_seed, note="the seed of the run chooses the pictures"
    ),
    "max_validation_steps": fields(
        [], values.most_batches, note="an evaluation has all pictures that are held out"
    ),
}
_SAMPLES: Mapping[str, Option] = {
    "sample_every_n_steps": fields(
        ["sampling.every_steps"],
        with_prompts(to("sampling.every_steps", Reading.whole)),
        note="beside sample_prompts",
    ),
    "sample_every_n_epochs": fields(
        ["sampling.every_steps"],
        with_prompts(values.every_epochs("sampling.every_steps")),
        note="beside sample_prompts, with --epoch-samples",
    ),
    "sample_prompts": fields(
        ["sampling.prompt_file"], prompt_file, note="a text file below --data"
    ),
    "sample_at_first": fields(
        ["sampling.at_start"],
        with_prompts(to("sampling.at_start", Reading.flag)),
        note="beside sample_prompts",
    ),
    "sample_sampler": ignored("FLUX.1 is sampled with Euler's method"),
}
_MACHINE: Mapping[str, Option] = {
    **each(
        "sdpa xformers mem_eff_attn flash_attn split_attn", automatic("parallel.attention: auto")
    ),
    "torch_compile": field_option("parallel.compile", Reading.flag),
    "num_processes": fields([], common.launched, note="a command's; must be --gpus"),
    "split_mode": automatic("saves memory, as parallel.offload_blocks does"),
    "dynamo_backend": automatic("torch's inductor"),
    **each(
        "highvram lowvram lowram disable_mmap_load_safetensors config_file output_config "
        "ddp_timeout ddp_gradient_as_bucket_view ddp_static_graph",
        automatic("memory and processes are managed here"),
    ),
    **each(
        "deepspeed zero_stage offload_optimizer_device offload_param_device "
        "zero3_init_flag zero3_save_16bit_model fp16_master_weights_and_gradients",
        missing("FSDP2 shards over GPUs: parallel.dp_replicate"),
    ),
}

KOHYA = Trainer(
    "kohya's sd-scripts",
    {**_MODEL, **_NETWORK, **TRAINING, **_FILES, **_DATA, **_SAMPLES, **_MACHINE, **_EASY_TRAINING},
    values.base,
    values.flatten,
    KOHYA_KINDS,
)
