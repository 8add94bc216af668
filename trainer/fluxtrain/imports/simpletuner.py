"""The options of SimpleTuner's config.json for FLUX.1, by their names without dashes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from fluxtrain.imports import common
from fluxtrain.imports import simpletuner_pictures as pictures
from fluxtrain.imports import simpletuner_values as values
from fluxtrain.imports.common import ema
from fluxtrain.imports.kinds import SIMPLETUNER_KINDS
from fluxtrain.imports.simpletuner_values import LYCORIS
from fluxtrain.imports.table import (
    Option,
    Reading,
    Trainer,
    automatic,
    each,
    field_option,
    fields,
    ignored,
    missing,
    set_outside,
    to,
)

_SUBSETS = "a data set config, kohya's, has a subset for each folder (docs/data.md)"
_S3 = "of S3's client, in the environment (docs/data.md)"
_ALL = ["data.caption_prefix", "data.class_tokens"]


def _both(name: str, row: Option) -> dict[str, Option]:
    """Return ``row`` for the option ``name`` of all backends, and of the one that is read."""
    convert = row.convert and pictures.unless_overridden(row.convert)
    shared = Option(row.disposition, row.fields, row.note, convert, off=row.off)
    return {name: shared, f"backend.{name}": row}


_CAPTIONS: Mapping[str, Option] = {
    **_both("caption_strategy", fields([], pictures.captions, note="textfile, instanceprompt")),
    **_both(
        "instance_prompt",
        fields(_ALL, pictures.instance_prompt, note="with prepend_ or only_instance_prompt"),
    ),
    **_both("prepend_instance_prompt", automatic("is part of instance_prompt")),
    **_both("only_instance_prompt", automatic("is part of instance_prompt")),
    "backend.disable_multiline_split": automatic("the lines of a text file are one caption"),
    "backend.caption_shuffle.enable": fields(
        pictures.SHUFFLED, pictures.shuffle, note="as many captions are encoded beforehand"
    ),
    **each(
        "backend.caption_shuffle.count backend.caption_shuffle.split_on "
        "backend.caption_shuffle.position_start backend.caption_shuffle.include_original "
        "backend.caption_shuffle.seed",
        automatic("is part of caption_shuffle.enable"),
    ),
    "backend.caption_filter_list": missing("change the captions beforehand"),
}
_SIZES: Mapping[str, Option] = {
    **_both(
        "resolution",
        fields(
            pictures.SIZES, pictures.resolution, note="squares with crop and crop_aspect=square"
        ),
    ),
    "backend.resolution_type": automatic("is part of resolution"),
    "backend.crop": fields(["data.variants.crops"], pictures.crop, note=common.NOTE),
    "backend.crop_style": fields([], pictures.crop_style, note="is part of crop"),
    "backend.crop_aspect": fields([], pictures.crop_aspect, note="is part of resolution"),
    "backend.crop_aspect_buckets": missing("data.buckets has all aspect ratios of its sides"),
    "aspect_bucket_alignment": automatic("is part of resolution: data.buckets.step"),
    "aspect_bucket_rounding": automatic("data.buckets has sizes, not rounded ratios"),
    **_both(
        "minimum_image_size",
        missing("data.buckets.upscale: false enlarges no picture; none is left out", 0),
    ),
    **_both("maximum_image_size", missing("pictures are resized before they are cropped", 0)),
    **_both("target_downsample_size", missing("pictures are resized before they are cropped", 0)),
    "backend.max_upscale_threshold": missing("data.buckets.upscale: false enlarges no picture"),
    **each(
        "backend.minimum_aspect_ratio backend.maximum_aspect_ratio",
        missing("data.buckets.min_side and max_side bound the shapes; no picture is left out"),
    ),
}
_SOURCE: Mapping[str, Option] = {
    "data_backend_config": fields([], pictures.backend_file, note="its options are backend.*"),
    "backends": missing(f"only the first without is_regularisation_data was read; {_SUBSETS}"),
    "backends.dataset_type": missing(
        "pictures only; a set to evaluate the loss on is data.validation"
    ),
    "backend.type": fields([], pictures.kind, note="local, aws and huggingface are data.images"),
    "backend.instance_data_dir": fields(
        ["data.images"], pictures.folder, note="a folder below --data, encoded before training"
    ),
    "backend.dataset_name": fields(
        ["data.images"], pictures.data_set, note="fetched to each node; HF_TOKEN is read"
    ),
    **each("backend.revision backend.aws_data_prefix", automatic("is part of data.images")),
    **each(
        "backend.split backend.huggingface.split",
        common.image_option("data.table.split"),
    ),
    **each(
        "backend.image_column backend.huggingface.image_column",
        common.image_option("data.table.image_column"),
    ),
    **each(
        "backend.caption_column backend.huggingface.caption_column",
        common.image_option("data.table.caption_column", pictures.column),
    ),
    "backend.aws_bucket_name": fields(["data.images"], pictures.bucket, note="s3://"),
    "backend.aws_endpoint_url": set_outside(f"AWS_ENDPOINT_URL {_S3}"),
    "backend.aws_region_name": set_outside(f"AWS_DEFAULT_REGION {_S3}"),
    **each(
        "backend.aws_access_key_id backend.aws_secret_access_key backend.aws_session_token",
        set_outside(f"AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY {_S3}", is_secret=True),
    ),
    "backend.repeats": common.image_option(
        "data.repeats", pictures.repeats, "one more: 0 there is 1 here"
    ),
    "backend.is_regularisation_data": missing(
        "no loss against what the model made before; data.prior_loss_weight weighs pictures"
    ),
    "backend.is_regularization_data": automatic("is is_regularisation_data"),
    "conditioning.instance_data_dir": fields(
        ["data.masks", "data.controls"],
        pictures.conditions,
        note="with conditioning_type=mask, or, of Kontext, reference_strict or reference_loose",
    ),
    "conditioning.conditioning_type": automatic("is part of conditioning.instance_data_dir"),
    "backend.conditioning_data": automatic("is part of conditioning.instance_data_dir"),
    "backend.conditioning": missing(
        "beside a picture there are its caption and data.controls alone"
    ),
    "backend.probability": missing("pictures are drawn as often as their repeats say", 1),
    **each(
        "backend.start_epoch backend.start_step backend.end_epoch backend.end_step",
        missing("all pictures are trained from the first step to the last", 0, 1),
    ),
    "backend.max_num_samples": missing("all pictures of data.images are used"),
    **each(
        "backend.timestep_sampling_offset backend.slider_strength",
        missing("all pictures are trained in the same way", 0),
    ),
    **each(
        "backend.id backend.dataset_type backend.disabled backend.disable backend.cache_dir "
        "backend.cache_dir_vae backend.text_embeds backend.image_embeds backend.hash_filenames "
        "backend.vae_cache_clear_each_epoch backend.vae_cache_ondemand backend.vae_cache_disable "
        "backend.preserve_data_backend_cache backend.skip_file_discovery backend.metadata_backend "
        "backend.write_batch_size backend.text_encoder_batch_size backend.ignore_epochs "
        "backend.disable_validation backend.metadata_update_interval",
        automatic("data.images is encoded before the first step"),
    ),
    **each(
        "backend.delete_unwanted_images backend.delete_problematic_images",
        missing("no file of yours is deleted"),
    ),
    **each(
        "backend.parquet.path backend.parquet.filename_column backend.parquet.caption_column "
        "backend.parquet.fallback_caption_column backend.parquet.width_column "
        "backend.parquet.height_column backend.parquet.identifier_includes_extension",
        missing("metadata.parquet in the folder has file_name, and text, caption or prompt"),
    ),
}

PICTURES: Mapping[str, Option] = {**_SOURCE, **_CAPTIONS, **_SIZES}
"""In the order of reports."""


_IN_FILE = "in lines of sampling.prompt_file, with --prompt-file"
_MODEL: Mapping[str, Option] = {
    "model_family": fields([], common.flux, note="must be flux"),
    "model_type": fields(["adapter.kind"], values.model_type, "lora", "full trains all weights"),
    "model_flavour": fields(
        common.KONTEXT, values.flavour, note="the preset is schnell's if it says so"
    ),
    "pretrained_model_name_or_path": field_option(
        "initial_weights",
        Reading.text,
        note="a file or folder below --models; nothing is downloaded",
    ),
    "pretrained_t5_model_name_or_path": field_option("encoders.t5", Reading.text),
    "pretrained_vae_model_name_or_path": field_option("encoders.autoencoder", Reading.text),
    "base_model_precision": fields(
        ["adapter.base_dtype"],
        values.of_adapter(values.small_base),
        "no_change",
        "fp8-quanto and fp8-torchao are fp8; no other kind has a counterpart",
    ),
    "base_model_default_dtype": missing("frozen weights are in precision.compute", "bf16"),
    **each(
        "text_encoder_1_precision text_encoder_2_precision quantize_via quantize_activations",
        automatic("encoders.precision"),
    ),
    "mixed_precision": fields(["precision.compute"], common.compute_dtype, "bf16"),
    "gradient_checkpointing": fields(
        ["parallel.activation_checkpointing"],
        values.recomputation,
        True,
        "1, or 1 / gradient_checkpointing_interval",
    ),
    "gradient_checkpointing_interval": automatic("is part of gradient_checkpointing"),
    "fuse_qkv_projections": missing("adapter.split_qkv: false"),
    "musubi_blocks_to_swap": fields(
        ["parallel.offload_blocks"],
        values.swapped_blocks,
        note="and 2 that have buffers",
    ),
    **each(
        "enable_group_offload group_offload_type ramtorch ramtorch_target_modules "
        "enable_model_cpu_offload ramtorch_text_encoder ramtorch_vae optimizer_offload_gradients",
        missing("parallel.offload_blocks is of whole blocks, and of nothing else", 0),
    ),
    **each("fsdp_enable fsdp_version deepspeed_config", automatic("FSDP2: parallel.dp_replicate")),
    "attention_mechanism": automatic("parallel.attention: auto"),
    "tokenizer_max_length": field_option("data.text_length", Reading.positive),
    "flux_attention_masked_training": missing("no attention mask, as in Black Forest Labs' code"),
}
_ADAPTER: Mapping[str, Option] = {
    "lora_rank": fields(["adapter.rank", "adapter.alpha"], values.of_peft(values.rank), 16),
    "lora_alpha": fields(
        ["adapter.alpha"],
        values.of_peft(to("adapter.alpha", Reading.number)),
        note="the rank if it is not given",
    ),
    "lora_dropout": fields(
        [], values.of_peft(values.dropout), 0.1, "adapter.dropout is of A x, not of x"
    ),
    "lora_init_type": missing("Kaiming-uniform and zeros", "default"),
    "lora_format": fields(["adapter_file.layout"], values.of_peft(values.layout)),
    "flux_lora_target": fields(
        values.TARGET_FIELDS,
        values.of_peft(values.target),
        "all",
        "all, all+ffs, ai-toolkit, context, context+ffs, tiny and nano",
    ),
    "use_dora": fields(["adapter.dora"], values.of_peft(to("adapter.dora", Reading.flag))),
    "init_lora": field_option(
        "adapter.initial", Reading.text, note="a relative path is below --models"
    ),
}
_OPTIMIZER: Mapping[str, Option] = {
    "optimizer": fields(
        [*common.OPTIMIZER_FIELDS, "precision.weights"], values.optimizer, "adamw_bf16"
    ),
    **{
        name: fields([path], values.of_optimizer(path), default)
        for name, path, default in (
            ("learning_rate", "optim.learning_rate", 4e-7),
            ("adam_beta1", "optim.beta1", 0.9),
            ("adam_beta2", "optim.beta2", 0.999),
            ("optimizer_beta1", "optim.beta1", None),
            ("optimizer_beta2", "optim.beta2", None),
            ("adam_weight_decay", "optim.weight_decay", 0.01),
            ("adam_epsilon", "optim.epsilon", 1e-8),
        )
    },
    "optimizer_config": missing("settings of other optimizers"),
    "prodigy_steps": missing("only Prodigy has it"),
    "max_grad_norm": fields(
        ["optim.max_grad_norm"], values.clipping, 2.0, "with grad_clip_method=norm; 0: none"
    ),
    "grad_clip_method": fields(
        [],
        common.one_of("norm", "value", note="is part of max_grad_norm"),
        "value",
        "the norm is clipped here",
    ),
    "lr_scheduler": fields(
        ["schedule.decay", "schedule.min_learning_rate"], values.schedule, "constant_with_warmup"
    ),
    "num_processes": fields([], common.launched, note="TRAINING_NUM_PROCESSES; must be --gpus"),
    "lr_warmup_steps": fields(["schedule.warmup_steps"], values.warmup, 0),
    "lr_end": fields(["schedule.min_learning_rate"], values.lr_end, 4e-7, "with polynomial"),
    **each("lr_scale lr_scale_sqrt", missing("learning_rate is used as it is")),
    "gradient_precision": automatic("float32: precision.reduce"),
    "use_ema": automatic("is part of ema_decay"),
    "ema_decay": fields(["optim.ema_decay"], ema("use_ema"), 0.995, "with use_ema"),
    "ema_update_interval": missing("at every step", 1),
    **each("ema_device ema_cpu_only", automatic("on the GPU, sharded")),
    "ema_validation": missing("images are of the average", "ema_only"),
}
_LENGTH: Mapping[str, Option] = {
    "max_train_steps": fields(["schedule.steps"], values.steps),
    "num_train_epochs": fields(
        ["schedule.epochs", "schedule.steps"],
        values.epochs,
        1,
        "with --epoch-samples, images times repeats: steps",
    ),
    "train_batch_size": common.batch_option(
        common.batch(), 4, "times gradient_accumulation_steps and --gpus"
    ),
    "gradient_accumulation_steps": automatic("is part of schedule.global_batch_size"),
    "seed": field_option("seed", Reading.whole),
    "seed_for_each_device": automatic("draws do not depend on the number of GPUs"),
    "resume_from_checkpoint": set_outside("the same fluxtrain run with the same --output resumes"),
    "ignore_final_epochs": automatic("schedule.epochs or steps end the run"),
}
_FLOW: Mapping[str, Option] = {
    "flow_schedule_shift": fields(
        ["flow.timestep_sampling", "flow.shift", "flow.sigmoid_scale"],
        values.timesteps,
        3.0,
        "0 was the default before November 2024",
    ),
    "flow_sigmoid_scale": fields(
        ["flow.sigmoid_scale"], values.of_timesteps, 1.0, "with flow_schedule_shift"
    ),
    **each(
        "flow_schedule_auto_shift flow_use_uniform_schedule flow_use_beta_schedule flux_fast_schedule",
        fields(["flow.timestep_sampling"], values.of_timesteps),
    ),
    **each("flow_beta_schedule_alpha flow_beta_schedule_beta", missing("no beta distribution")),
    "flux_guidance_mode": fields(
        [],
        common.one_of("constant", "random-range", note="is part of flux_guidance_value"),
        "constant",
        "must be constant",
    ),
    "flux_guidance_value": fields(["flow.guidance"], values.guidance, 1.0),
    **each("flux_guidance_min flux_guidance_max", missing("flow.guidance is one number")),
    "caption_dropout_probability": field_option("flow.prompt_dropout", Reading.number, 0.1),
    "loss_type": missing("the loss is the squared error", "l2"),
    **each(
        "offset_noise noise_offset noise_offset_probability snr_gamma snr_weight "
        "rescale_betas_zero_snr huber_c huber_schedule soft_min_snr_sigma_data "
        "timestep_bias_strategy timestep_bias_begin timestep_bias_end timestep_bias_multiplier "
        "timestep_bias_portion training_scheduler_timestep_spacing",
        ignored("SimpleTuner leaves it out for models of flows"),
    ),
    **each("input_perturbation input_perturbation_steps", missing("inputs are not perturbed", 0)),
    "masked_loss_probability": ignored("masks of conditioning_type=segmentation use it"),
    "disable_segmented_timestep_sampling": automatic("every sample has its own draw"),
}
_FILES: Mapping[str, Option] = {
    "output_dir": set_outside("fluxtrain run FILE --output DIR"),
    "checkpoint_step_interval": fields(
        ["checkpoint.every_steps", "adapter_file.every_steps"], values.interval, 500
    ),
    "checkpoint_epoch_interval": missing("checkpoint.every_steps counts steps"),
    "checkpoints_total_limit": fields(["checkpoint.keep"], common.kept_checkpoints, 5, "0: all"),
    **each(
        "checkpointing_rolling_steps checkpoints_rolling_total_limit",
        automatic("snapshots in memory: checkpoint.memory_every_steps"),
    ),
    "report_to": fields(["logging.tensorboard", "logging.wandb.project"], values.tracker),
    **each("tracker_project_name tracker_run_name", automatic("is part of logging.wandb")),
    **each(
        "push_to_hub push_checkpoints_to_hub hub_model_id publishing_config model_card_note "
        "push_to_hub_background model_card_private",
        missing("nothing is uploaded"),
    ),
    "webhook_config": replace(missing("nothing is uploaded"), is_secret=True),
    "hub_token": set_outside("HF_TOKEN is read by the Hub's client", is_secret=True),
}
_DATA: Mapping[str, Option] = {
    "resolution_type": fields(
        [],
        common.one_of("pixel", "pixel_area", "area", note="is part of resolution"),
        "pixel_area",
        "is part of resolution",
    ),
    **each(
        "vae_batch_size vae_cache_ondemand write_batch_size read_batch_size cache_dir "
        "cache_dir_text cache_dir_vae preserve_data_backend_cache image_processing_batch_size "
        "vae_enable_tiling vae_enable_slicing skip_file_discovery compress_disk_cache keep_vae_loaded "
        "text_encoder_batch_size override_dataset_config vae_cache_scan_behaviour",
        automatic("data.images is encoded before the first step"),
    ),
    "disable_bucket_pruning": automatic("no sample is left out"),
    **each(
        "dataloader_prefetch dataloader_prefetch_qlen max_workers", automatic("data.num_workers")
    ),
    "delete_unwanted_images": missing("no file of yours is deleted"),
    "delete_problematic_images": missing("no file of yours is deleted"),
}
_SAMPLES: Mapping[str, Option] = {
    "validation_step_interval": fields(["sampling.every_steps"], pictures.sample_steps),
    "validation_epoch_interval": fields(
        ["sampling.every_steps"],
        pictures.sample_epochs,
        note="with --epoch-samples, unless validation_step_interval is given",
    ),
    "validation_disable": automatic("then sampling.every_steps is 0"),
    "validation_prompt": fields(["sampling.prompts", "sampling.prompt_file"], pictures.prompt),
    "validation_num_inference_steps": field_option("sampling.num_steps", Reading.positive),
    "validation_guidance": field_option("sampling.guidance", Reading.number),
    "validation_guidance_real": field_option("sampling.cfg_scale", Reading.number),
    "validation_negative_prompt": fields(
        [], pictures.negative, note="with validation_guidance_real above 1"
    ),
    "validation_seed": fields([], common.of_lines("--d", Reading.whole), note=_IN_FILE),
    "validation_randomize": missing("the noise follows from seed"),
    "validation_resolution": fields([], pictures.sample_size, note=_IN_FILE),
    **each(
        "validation_prompt_library user_prompt_library",
        missing("sampling.prompts and sampling.prompt_file have the texts"),
    ),
    "num_validation_images": missing("an image for each prompt: repeat it in sampling.prompts", 1),
    "validation_lycoris_strength": missing("strength 1", 1),
    **each(
        "validation_guidance_rescale validation_disable_unconditional validation_torch_compile "
        "validation_noise_scheduler validation_no_cfg_until_timestep",
        automatic("FLUX.1 is sampled with Euler's method"),
    ),
    "validation_on_startup": fields(["sampling.at_start"], pictures.sample_at_start),
    "disable_benchmark": automatic("sampling.at_start is off by default"),
    **each(
        "eval_steps_interval eval_dataset_id num_eval_images evaluation_type eval_timesteps",
        missing("evaluation.every_samples evaluates the loss on data.validation", "none"),
    ),
    "controlnet": missing("control nets are not trained here"),
    "i_know_what_i_am_doing": automatic("limits are those of docs/config.md"),
    "disable_tf32": automatic("precision.compute"),
}

SIMPLETUNER = Trainer(
    "SimpleTuner",
    {
        **_MODEL,
        **_ADAPTER,
        **LYCORIS,
        **_OPTIMIZER,
        **_LENGTH,
        **_FLOW,
        **_FILES,
        **PICTURES,
        **_DATA,
        **_SAMPLES,
    },
    values.base,
    values.flatten,
    SIMPLETUNER_KINDS,
)
