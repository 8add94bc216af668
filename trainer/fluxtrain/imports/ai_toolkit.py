"""The options of ai-toolkit's YAML for FLUX.1, by their names below ``config.process[0]``."""

from __future__ import annotations

from collections.abc import Mapping

from fluxtrain.imports import ai_toolkit_values as values
from fluxtrain.imports import common
from fluxtrain.imports.ai_toolkit_values import MORE_DATASETS
from fluxtrain.imports.common import OPTIMIZER_FIELDS, SELECTION_FIELDS, ema
from fluxtrain.imports.kinds import AI_TOOLKIT_KINDS
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
    saved,
    set_outside,
    to,
)

_SUBSETS = "a data set config, kohya's, has a subset for each folder (docs/data.md)"
_PROMPTS = ("sampling.prompts", "sampling.prompt_file")
_IN_FILE = "in lines of sampling.prompt_file, with --prompt-file"
_LINES = "lines of sampling.prompt_file have"
_FOLDER = "a folder below --data; encoded before the first step"


DATA: Mapping[str, Option] = {
    MORE_DATASETS: missing(f"only the first without is_reg was read; {_SUBSETS}"),
    "datasets.folder_path": fields(["data.images"], values.folder, note=_FOLDER),
    "datasets.dataset_path": fields(
        ["data.images"], values.folder, note=f"{_FOLDER}; of metadata.jsonl, its folder"
    ),
    "datasets.caption_ext": fields([], values.caption_files, note="txt and caption are read"),
    "datasets.default_caption": common.image_option("data.class_tokens"),
    "datasets.trigger_word": common.image_option(
        "data.caption_prefix", note="wins over trigger_word"
    ),
    "datasets.random_triggers": missing("captions have one prefix: data.caption_prefix"),
    "datasets.caption_dropout_rate": field_option("flow.prompt_dropout", Reading.number, 0.0),
    "datasets.shuffle_tokens": common.SHUFFLED,
    "datasets.token_dropout_rate": common.DROPPED,
    "datasets.keep_tokens": fields(
        ["data.variants.keep_tokens"],
        common.setting("data.variants.keep_tokens", Reading.whole),
        note="not shuffled either here; 0: none",
    ),
    "datasets.resolution": fields(
        [
            "data.image_size",
            "data.buckets.step",
            "data.buckets.upscale",
            "data.buckets.resolutions",
        ],
        values.sizes,
        512,
        "without buckets the largest of several",
    ),
    **each(
        "datasets.cache_latents datasets.cache_latents_to_disk datasets.cache_text_embeddings",
        automatic("data.images is encoded before the first step"),
    ),
    **each("datasets.buckets datasets.square_crop", automatic("is part of datasets.resolution")),
    "datasets.bucket_tolerance": missing("data.buckets.step is 64", 64),
    "datasets.flip_x": common.FLIPPED,
    "datasets.flip_y": missing("data.variants.flip mirrors left to right only"),
    "datasets.random_crop": common.CROPPED,
    **each(
        "datasets.random_scale datasets.scale datasets.augments datasets.augmentations "
        "datasets.shuffle_augmentations datasets.standardize_images",
        missing("colours and scales are not changed: add changed copies to the folder", 1),
    ),
    "datasets.mask_path": fields(
        ["data.masks"], values.masks, note=f"a folder below --data; {values.MEAN}"
    ),
    "datasets.alpha_mask": common.if_on(
        {"data.masks": "alpha"}, f"the pictures' opacity; {values.MEAN}"
    ),
    "datasets.mask_min_value": fields([], values.least_weight, note="0: black counts nothing"),
    "datasets.invert_mask": missing("white counts here: invert the masks of data.masks"),
    "datasets.num_repeats": common.image_option("data.repeats", Reading.positive),
    "datasets.is_reg": missing(f"is_reg of a subset: {_SUBSETS}"),
    **each(
        "datasets.network_weight datasets.loss_multiplier",
        missing("all pictures count the same; data.prior_loss_weight is of those with is_reg", 1),
    ),
    "datasets.num_workers": field_option("data.num_workers", Reading.whole),
    "datasets.prefetch_factor": field_option("data.prefetch", Reading.positive),
    "datasets.control_path": fields(
        ["data.controls"], values.controls, note="a folder below --data"
    ),
    **each(
        "datasets.control_path_1 datasets.control_path_2 datasets.control_path_3 "
        "datasets.inpaint_path datasets.unconditional_path datasets.clip_image_path "
        "datasets.controls datasets.type datasets.num_frames",
        missing("beside a picture there are its caption and data.controls alone", "image", 1),
    ),
    **each(
        "datasets.shrink_video_to_frames datasets.fps datasets.do_i2v",
        ignored("is of films, not of pictures"),
    ),
}
SAMPLES: Mapping[str, Option] = {
    "sample.sample_every": fields(["sampling.every_steps"], values.sample_steps, 100),
    "sample.prompts": fields(_PROMPTS, values.prompts),
    "sample.samples": fields(_PROMPTS, values.prompts, note="their prompts"),
    **{
        f"sample.samples.{name}": fields([], common.of_lines(option), note=_IN_FILE)
        for name, option in (
            ("width", "--w"),
            ("height", "--h"),
            ("seed", "--d"),
            ("sample_steps", "--s"),
        )
    },
    "sample.samples.guidance_scale": missing(f"{_LINES} --g"),
    **each(
        "sample.neg sample.samples.neg",
        ignored("FLUX.1 is sampled without a negative prompt there"),
    ),
    "sample.samples.ctrl_img": fields([], values.control_of_samples, note=_IN_FILE),
    **each(
        "sample.samples.network_multiplier sample.samples.ctrl_idx sample.samples.num_frames "
        "sample.samples.fps",
        missing(f"{_LINES} sizes, seeds, steps and guidance only"),
    ),
    "sample.sample_steps": field_option("sampling.num_steps", Reading.positive, 20),
    "sample.guidance_scale": field_option("sampling.guidance", Reading.number, 7.0),
    "sample.sampler": automatic("FLUX.1 is sampled with Euler's method"),
    "sample.width": fields([], values.side("--w"), note=_IN_FILE),
    "sample.height": fields([], values.side("--h"), note=_IN_FILE),
    "sample.seed": fields([], common.of_lines("--d"), note=_IN_FILE),
    "sample.walk_seed": fields([], values.walk_seed, note=_IN_FILE),
    "sample.sample_start_step": missing("from sampling.every_steps on", 0),
    **each("sample.network_multiplier sample.format", missing("strength 1, PNG", 1, "png")),
    **each("sample.num_frames sample.fps", ignored("is of films, not of pictures")),
}


_JOB: Mapping[str, Option] = {
    "job": automatic("the task is train"),
    "config.name": fields(["adapter_file.name"], common.file_name),
    "type": fields(
        [],
        common.one_of("sd_trainer", "ui_trainer", "diffusion_trainer"),
        note="must be a process that trains",
    ),
    values.MORE_PROCESSES: missing("a file has one training; import the others by themselves"),
    "training_folder": set_outside("fluxtrain run FILE --output DIR"),
    "device": automatic("all GPUs that torch sees; --processes for fewer"),
    "trigger_word": common.image_option(
        "data.caption_prefix",
        note="stands before every caption, also before those that have it; for [trigger] in prompts",
    ),
    "performance_log_every": automatic("metrics.jsonl has the speed of every logged step"),
    **each("meta.name meta.version meta.trigger_word", missing("metadata has no text of yours")),
    "sqlite_db_path": automatic("metrics.jsonl"),
}
_MODEL: Mapping[str, Option] = {
    "model.arch": fields(common.KONTEXT, values.arch, note="must be flux or flux_kontext"),
    "model.name_or_path": field_option(
        "initial_weights",
        Reading.text,
        note="a file or folder below --models; nothing is downloaded",
    ),
    "model.is_flux": fields(
        [], common.must_be(True, "other models are not trained here"), note="must be true"
    ),
    "model.quantize": fields(
        ["adapter.base_dtype"], values.small_base, note="qtype qfloat8 or float8, or none, is fp8"
    ),
    "model.qtype": automatic("is part of model.quantize"),
    "model.quantize_te": missing("encoders.precision is bfloat16 or float32"),
    "model.qtype_te": automatic("is part of model.quantize_te"),
    "model.low_vram": automatic("weights are read tensor by tensor"),
    "model.layer_offloading": fields(
        ["parallel.offload_blocks"],
        values.offloaded,
        note="layer_offloading_transformer_percent of the blocks",
    ),
    "model.layer_offloading_transformer_percent": automatic("is part of model.layer_offloading"),
    "model.layer_offloading_text_encoder_percent": automatic(
        "pictures are encoded before the training"
    ),
    "model.split_model_over_gpus": missing("FSDP2 shards over GPUs: parallel.dp_replicate"),
    **each(
        "model.lora_path model.assistant_lora_path model.inference_lora_path",
        missing("fluxtrain adapter merge adds adapters to weights beforehand"),
    ),
    "model.attn_masking": missing("no attention mask, as in Black Forest Labs' code"),
    "model.vae_path": field_option("encoders.autoencoder", Reading.text),
    "model.te_name_or_path": field_option("encoders.t5", Reading.text),
    "model.compile": field_option("parallel.compile", Reading.flag),
    **each("model.dtype model.vae_dtype model.te_dtype", automatic("encoders.precision")),
    **each(
        "model.only_if_contains model.ignore_if_contains",
        missing("adapter.ranks, double_blocks and single_blocks select layers"),
    ),
}
_NETWORK: Mapping[str, Option] = {
    "network.type": fields(
        ["adapter.kind", "adapter.dora"], values.network, note="lora, lokr and dora"
    ),
    "network.linear": fields(["adapter.rank", "adapter.alpha"], values.rank),
    "network.rank": fields(["adapter.rank", "adapter.alpha"], values.rank),
    **each(
        "network.alpha network.linear_alpha",
        fields(["adapter.alpha"], values.alpha, note="lokr's; a lora's is the rank for FLUX.1"),
    ),
    **each("network.conv network.conv_alpha", ignored("FLUX.1's blocks have no convolutions")),
    "network.dropout": fields(["adapter.dropout"], values.dropout("adapter.dropout")),
    **{
        f"network.network_kwargs.{name}": fields(
            [f"adapter.{name}"], values.dropout(f"adapter.{name}")
        )
        for name in ("rank_dropout", "module_dropout")
    },
    "network.transformer_only": automatic("the blocks' linear layers"),
    "network.lokr_full_rank": fields(
        ["adapter.lokr.full_matrix"],
        values.of_lokr(to("adapter.lokr.full_matrix", lambda it, _: values.is_full_rank(it))),
        True,
        "with type=lokr",
    ),
    "network.lokr_factor": fields(
        ["adapter.lokr.factor"],
        values.of_lokr(to("adapter.lokr.factor", lambda *at: int(Reading.number(*at)))),
        note="with type=lokr",
    ),
    "network.old_lokr_format": automatic("fluxtrain adapter convert has the layouts of files"),
    "network.pretrained_lora_path": field_option("adapter.initial", Reading.text),
    **each(
        "network.network_kwargs.only_if_contains network.network_kwargs.ignore_if_contains",
        fields(SELECTION_FIELDS, values.layers),
    ),
}
_SAVE: Mapping[str, Option] = {
    "save.dtype": fields(["adapter_file.dtype"], common.file_dtype, "float16"),
    "save.save_every": saved("network.", to("", Reading.whole), 1000),
    "save.max_step_saves_to_keep": missing("files of adapters are all kept"),
    "save.save_format": automatic("safetensors; fluxtrain adapter convert has the other layouts"),
    "save.push_to_hub": missing("nothing is uploaded"),
    **each("save.hf_repo_id save.hf_private", missing("nothing is uploaded")),
}
_TRAIN: Mapping[str, Option] = {
    "train.steps": field_option("schedule.steps", Reading.positive, 1000),
    "train.batch_size": common.batch_option(
        values.batch, 1, "times the gradient accumulation and --gpus"
    ),
    **each(
        "train.gradient_accumulation_steps train.gradient_accumulation",
        automatic("is part of schedule.global_batch_size"),
    ),
    "train.optimizer": fields(
        OPTIMIZER_FIELDS,
        values.OPTIMIZERS.convert,
        "adamw",
        "with its package's settings, epsilon 1e-6",
    ),
    "train.lr": fields(["optim.learning_rate"], values.learning_rate, 1e-6),
    "train.unet_lr": fields(["optim.learning_rate"], values.learning_rate, note="wins over lr"),
    **values.OPTIMIZERS.rows(
        "train.optimizer_params",
        "weight_decay eps d_coef use_bias_correction safeguard_warmup",
    ),
    "train.optimizer_params.betas": fields(["optim.beta1", "optim.beta2"], values.OPTIMIZERS.betas),
    **each(
        "train.optimizer_params.relative_step train.optimizer_params.scale_parameter "
        "train.optimizer_params.warmup_init",
        automatic("is part of train.optimizer"),
    ),
    "train.lr_scheduler": fields(["schedule.decay"], values.schedule, "constant"),
    "train.lr_scheduler_params.num_warmup_steps": fields(
        ["schedule.warmup_steps"],
        values.warmup,
        1000,
        "with constant_with_warmup; cosine has 0 if it is not given",
    ),
    "train.lr_scheduler_params.eta_min": fields(
        ["schedule.min_learning_rate"], values.lowest_rate, 0.0, "with cosine"
    ),
    **each(
        "train.lr_scheduler_params.start_factor train.lr_scheduler_params.end_factor",
        automatic("is part of train.lr_scheduler"),
    ),
    "train.max_grad_norm": fields(
        ["optim.max_grad_norm"], common.no_clipping_at_zero, 1.0, "0: none"
    ),
    "train.gradient_checkpointing": fields(
        ["parallel.activation_checkpointing"], common.recomputation, True
    ),
    "train.dtype": fields(
        ["precision.compute", "precision.weights"],
        values.dtype,
        "fp32",
        "of trained weights too; adapters are float32",
    ),
    "train.timestep_type": fields(["flow.timestep_sampling"], values.timesteps, "sigmoid"),
    **each(
        "train.linear_timesteps train.linear_timesteps2",
        missing("flow.loss_weighting has sigma_sqrt and cosmap"),
    ),
    **each(
        "train.min_denoising_steps train.max_denoising_steps",
        missing("timesteps are drawn from 0 to 1", 0, 999, 1000),
    ),
    "train.noise_scheduler": automatic("rectified flow"),
    "train.noise_offset": field_option("flow.noise_offset", Reading.number),
    **each(
        "train.min_snr_gamma train.snr_gamma", missing("weights by signal-to-noise have no meaning")
    ),
    "train.loss_type": missing("the loss is the squared error", "mse"),
    "train.content_or_style": missing("flow.timestep_sampling has other draws", "balanced"),
    "train.ema_config.use_ema": automatic("is part of train.ema_config.ema_decay"),
    "train.ema_config.ema_decay": fields(
        ["optim.ema_decay"], ema("train.ema_config.use_ema"), 0.999, "with use_ema"
    ),
    "train.train_unet": fields(
        [], common.must_be(True, "the transformer is what is trained here"), note="must be true"
    ),
    "train.train_text_encoder": missing("adapter.clip trains CLIP-L; T5 is not trained"),
    "train.text_encoder_lr": missing("adapter.clip trains CLIP-L; T5 is not trained"),
    "train.bypass_guidance_embedding": missing("flow.guidance is the guidance while training"),
    "train.prompt_dropout_prob": field_option("flow.prompt_dropout", Reading.number),
    **each(
        "train.unload_text_encoder train.cache_text_embeddings",
        automatic("encoded samples need no text encoder"),
    ),
    **each("train.xformers train.sdp", automatic("parallel.attention: auto")),
    **each(
        "train.diff_output_preservation train.diff_output_preservation_multiplier "
        "train.inverted_mask_prior "
        "train.inverted_mask_prior_multiplier train.do_prior_divergence",
        missing("no loss against what the model made before", 1),
    ),
    "train.diff_output_preservation_class": automatic("is part of diff_output_preservation"),
    "train.reg_weight": fields(
        ["data.prior_loss_weight"], values.prior_weight, note="with a data set that is_reg"
    ),
    **each(
        "train.start_step train.skip_first_sample",
        automatic("a run resumes exactly; sampling.at_start is off by default"),
    ),
    "train.force_first_sample": fields(["sampling.at_start"], values.sample_at_start),
    "train.disable_sampling": automatic("then sampling.every_steps is 0"),
}
_LOGGING: Mapping[str, Option] = {
    "logging.log_every": field_option("logging.every_steps", Reading.positive),
    "logging.use_wandb": fields(["logging.wandb.project"], values.wandb),
    **each("logging.project_name logging.run_name", automatic("is part of logging.wandb")),
    "logging.verbose": automatic("one line a step"),
}

AI_TOOLKIT = Trainer(
    "ai-toolkit",
    {**_JOB, **_MODEL, **_NETWORK, **_SAVE, **_TRAIN, **DATA, **SAMPLES, **_LOGGING},
    values.base,
    values.flatten,
    AI_TOOLKIT_KINDS,
)
