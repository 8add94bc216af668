"""The options of kohya's sd-scripts for FLUX.1: flux_train_network.py and flux_train.py."""

from __future__ import annotations

from collections.abc import Mapping

from fluxtrain.other_trainers import buckets, common, copies, kohya_clip
from fluxtrain.other_trainers import kohya_validation as validation
from fluxtrain.other_trainers import kohya_values as values
from fluxtrain.other_trainers.imported import Trainer
from fluxtrain.other_trainers.kohya_training import TRAINING
from fluxtrain.other_trainers.option import (
    Option,
    automatic,
    each,
    elsewhere,
    field,
    fields,
    inert,
    missing,
)
from fluxtrain.other_trainers.reading import Reading

_PATH = "a relative path is below --models"
_TOKENIZER = "the tokenizer is that folder of FLUX.1's repository, below --models"
_EPOCHS = "files are counted in steps: adapter_file.every_steps"
_MODEL: Mapping[str, Option] = {
    "pretrained_model_name_or_path": field("initial_weights", Reading.text, note=_PATH),
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
    "ae": field("encoders.autoencoder", Reading.text, note=_PATH),
    "vae": inert("FLUX.1's autoencoder is ae"),
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
    "t5xxl_max_token_length": fields(["data.text_length"], values.text_tokens),
    "apply_t5_attn_mask": missing("no attention mask, as in Black Forest Labs' code"),
    **each("v2 v_parameterization sdxl", fields([], values.other_model, note="other models")),
    **each("clip_skip max_token_length", inert("is not for FLUX.1")),
}
_NETWORK: Mapping[str, Option] = {
    "network_module": fields(["adapter.kind"], values.network_kind),
    "network_dim": fields(
        ["adapter.rank"],
        values.of_network(lambda reading, name: {"adapter.rank": reading.positive(name)}),
        4,
    ),
    "network_alpha": fields(
        ["adapter.alpha"], values.of_network(values.alpha), 1.0, "0 is the rank"
    ),
    "network_dropout": fields(
        ["adapter.dropout"],
        values.of_network(values.of_lora("adapter.dropout", Reading.number)),
    ),
    "network_weights": field("adapter.initial", Reading.text, note=_PATH),
    "dim_from_weights": missing("fluxtrain adapter info prints the rank of network_weights"),
    "base_weights": missing("fluxtrain adapter merge adds adapters to weights beforehand"),
    "base_weights_multiplier": missing("fluxtrain adapter merge has --strength"),
    "network_train_unet_only": fields(
        kohya_clip.FIELDS,
        kohya_clip.unet_only,
        False,
        "without it, CLIP-L has adapters too, with the captions of data.images",
    ),
    "network_train_text_encoder_only": missing("adapters of the transformer are always trained"),
    "scale_weight_norms": missing("norms of adapters are not bounded here", 0),
    "network_args.train_blocks": fields(
        ["adapter.double_blocks", "adapter.single_blocks"], values.blocks
    ),
    "network_args.train_double_block_indices": field("adapter.double_blocks", Reading.text),
    "network_args.train_single_block_indices": field("adapter.single_blocks", Reading.text),
    **{
        f"network_args.{kind}_dim": field(f"adapter.ranks.{kind}", Reading.whole)
        for kind in values.KINDS
    },
    "network_args.split_qkv": fields(
        ["adapter.split_qkv"],
        values.of_lora("adapter.split_qkv", Reading.flag),
        note="sd-scripts since September 2025 fails with it",
    ),
    "network_args.algo": automatic("is part of network_module"),
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
    "network_args.module_dropout": field("adapter.module_dropout", Reading.number),
    "network_args.dropout": inert("network_dropout is read"),
    kohya_clip.LORA_PLUS: fields([kohya_clip.ALL_UP, kohya_clip.UP], kohya_clip.up_of_all),
    kohya_clip.LORA_PLUS_UNET: fields(
        [kohya_clip.ALL_UP, kohya_clip.UP],
        kohya_clip.up_of_transformer,
        note=f"wins over {kohya_clip.LORA_PLUS}",
    ),
    kohya_clip.LORA_PLUS_CLIP: fields(
        [kohya_clip.UP], kohya_clip.up_of_clip, note=f"wins over {kohya_clip.LORA_PLUS}"
    ),
    "network_args.network_reg_lrs": missing("adapter.rates has factors for kinds of layers"),
    "network_args.network_reg_dims": missing("adapter.ranks has ranks for kinds of layers"),
    **each("network_args.ggpo_beta network_args.ggpo_sigma", missing("no perturbed gradients")),
}
_FILES: Mapping[str, Option] = {
    "output_dir": elsewhere("fluxtrain run FILE --output DIR"),
    "output_name": fields(["adapter_file.name"], common.file_name),
    "save_precision": fields(["adapter_file.dtype"], common.file_dtype, "float"),
    "save_model_as": missing("files are safetensors", "safetensors"),
    "save_every_n_steps": field("adapter_file.every_steps", Reading.whole, 0),
    "save_every_n_epochs": fields(
        ["adapter_file.every_steps"],
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
    "resume": elsewhere("the same fluxtrain run with the same --output resumes"),
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
    "huggingface_token": elsewhere("HF_TOKEN is read by the Hub's client", is_secret=True),
    "log_with": fields(
        ["logging.tensorboard", "logging.wandb.project", "logging.wandb.name"], values.tracker
    ),
    **each("log_tracker_name wandb_run_name", automatic("is part of logging.wandb")),
    "wandb_api_key": elsewhere("WANDB_API_KEY in the environment", is_secret=True),
    **each(
        "logging_dir log_prefix log_tracker_config log_config console_log_level console_log_file "
        "console_log_simple",
        automatic("logs are in the run's --output"),
    ),
}
_DATA: Mapping[str, Option] = {
    "train_data_dir": field(
        "data.images",
        Reading.text,
        note="a folder below --data; numbers of repeats in names of folders are not read",
    ),
    "dataset_config": field(
        "data.images",
        Reading.text,
        note="below --data; its batch_size is schedule.global_batch_size, and fluxtrain run names the "
        "fields of data that must be as in it",
    ),
    "caption_extension": automatic("text files beside the images: docs/data.md"),
    "in_json": missing("metadata.jsonl in the folder has captions (docs/data.md)"),
    "reg_data_dir": missing("is_reg of a subset in dataset_config; data.prior_loss_weight"),
    "dataset_class": missing("readers of other packages are not loaded"),
    "dataset_repeats": fields(
        ["data.repeats"], common.of_images("train_data_dir", "data.repeats", Reading.positive)
    ),
    "resolution": fields(["data.image_size"], values.resolution),
    "enable_bucket": fields(buckets.FIELDS, buckets.kohya, note="false: squares"),
    **{
        name: fields([path], buckets.of_kohya(path, read), default, "with enable_bucket")
        for name, path, read, default in buckets.SETTINGS
    },
    "caption_dropout_rate": field("flow.prompt_dropout", Reading.number, 0.0),
    **each(
        "caption_dropout_every_n_epochs token_warmup_step token_warmup_min",
        missing("captions are encoded beforehand, for all epochs", 0, 1),
    ),
    "caption_suffix": missing("of a subset in dataset_config"),
    "keep_tokens_separator": missing("data.variants.keep_tokens is a number of tags"),
    "secondary_separator": missing("tags have one separator: data.variants.separator"),
    **each("enable_wildcard weighted_captions", missing("captions have no syntax of their own")),
    "caption_prefix": fields(
        ["data.caption_prefix"],
        common.of_images("train_data_dir", "data.caption_prefix", Reading.text),
    ),
    "shuffle_caption": fields(copies.SHUFFLED, copies.shuffle, note=copies.NOTE),
    "caption_tag_dropout_rate": fields(copies.DROPPED, copies.dropout, note=copies.NOTE),
    "keep_tokens": fields(
        ["data.variants.keep_tokens"],
        copies.setting("data.variants.keep_tokens", Reading.whole),
        note="0: none",
    ),
    "caption_separator": fields(
        ["data.variants.separator"],
        copies.setting("data.variants.separator", Reading.text),
        note="for shuffle_caption and caption_tag_dropout_rate",
    ),
    "flip_aug": fields(["data.variants.flip"], copies.flip, note=copies.NOTE),
    "random_crop": fields(["data.variants.crops"], copies.crops, note=copies.NOTE),
    **each("color_aug face_crop_aug_range", missing("colours are not changed, nor faces found")),
    "cache_info": automatic("indices are kept in the folders of samples"),
    **each(
        "cache_latents cache_latents_to_disk cache_text_encoder_outputs skip_cache_check "
        "cache_text_encoder_outputs_to_disk vae_batch_size text_encoder_batch_size",
        automatic("data.images is encoded before the first step"),
    ),
    "max_data_loader_n_workers": field("data.num_workers", Reading.whole, 8),
    "persistent_data_loader_workers": automatic("data loader processes live on"),
    "validation_split": fields(
        ["data.validation_split", "evaluation.at_end"],
        validation.split,
        note="the loss of these pictures is also computed after the last step",
    ),
    "validate_every_n_steps": fields(
        [validation.EVERY], validation.every_steps, note="times the global batch"
    ),
    "validate_every_n_epochs": fields(
        [validation.EVERY],
        validation.every_epochs,
        1,
        "with --epoch-samples, unless validate_every_n_steps is given",
    ),
    "validation_seed": fields([], validation.seed, note="the seed of the run chooses the pictures"),
    "max_validation_steps": fields(
        [], validation.most_batches, note="an evaluation has all pictures that are held out"
    ),
}
_SAMPLES: Mapping[str, Option] = {
    "sample_every_n_steps": fields(
        ["sampling.every_steps"],
        values.with_prompts(lambda reading, name: {"sampling.every_steps": reading.whole(name)}),
        note="beside sample_prompts",
    ),
    "sample_every_n_epochs": fields(
        ["sampling.every_steps"],
        values.with_prompts(values.every_epochs("sampling.every_steps")),
        note="beside sample_prompts, with --epoch-samples",
    ),
    "sample_prompts": fields(
        ["sampling.prompt_file"], values.prompt_file, note="a text file below --data"
    ),
    "sample_at_first": fields(
        ["sampling.at_start"],
        values.with_prompts(lambda reading, name: {"sampling.at_start": reading.flag(name)}),
        note="beside sample_prompts",
    ),
    "sample_sampler": inert("FLUX.1 is sampled with Euler's method"),
}
_MACHINE: Mapping[str, Option] = {
    **each(
        "sdpa xformers mem_eff_attn flash_attn split_attn", automatic("parallel.attention: auto")
    ),
    "torch_compile": field("parallel.compile", Reading.flag),
    "dynamo_backend": automatic("torch's inductor"),
    **each(
        "highvram lowvram disable_mmap_load_safetensors config_file output_config "
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
    {
        **_MODEL,
        **_NETWORK,
        **TRAINING,
        **_FILES,
        **_DATA,
        **_SAMPLES,
        **_MACHINE,
    },
    values.base,
    values.take_apart,
)
