"""SimpleTuner's options of pictures: of the config, and of its file of backends as ``backend.*``."""

from __future__ import annotations

from collections.abc import Mapping

from fluxtrain.other_trainers import copies
from fluxtrain.other_trainers import simpletuner_pictures as pictures
from fluxtrain.other_trainers.option import (
    Option,
    automatic,
    each,
    elsewhere,
    fields,
    missing,
)

_SUBSETS = "a data set config, kohya's, has a subset for each folder (docs/data.md)"
_S3 = "of S3's client, in the environment (docs/data.md)"
_ALL = ["data.caption_prefix", "data.class_tokens"]


def _both(name: str, row: Option) -> dict[str, Option]:
    """Return ``row`` for the option ``name`` of all backends, and of the one that is read."""
    convert = row.convert and pictures.unless_overridden(row.convert)
    shared = Option(row.fate, row.fields, row.note, convert, off=row.off)
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
    "backend.crop": fields(["data.variants.crops"], pictures.crop, note=copies.NOTE),
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
        fields(["data.table.split"], pictures.of_pictures("data.table.split")),
    ),
    **each(
        "backend.image_column backend.huggingface.image_column",
        fields(["data.table.image_column"], pictures.of_pictures("data.table.image_column")),
    ),
    **each(
        "backend.caption_column backend.huggingface.caption_column",
        fields(
            ["data.table.caption_column"],
            pictures.of_pictures("data.table.caption_column", pictures.column),
        ),
    ),
    "backend.aws_bucket_name": fields(["data.images"], pictures.bucket, note="s3://"),
    "backend.aws_endpoint_url": elsewhere(f"AWS_ENDPOINT_URL {_S3}"),
    "backend.aws_region_name": elsewhere(f"AWS_DEFAULT_REGION {_S3}"),
    **each(
        "backend.aws_access_key_id backend.aws_secret_access_key backend.aws_session_token",
        elsewhere(f"AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY {_S3}", is_secret=True),
    ),
    "backend.repeats": fields(
        ["data.repeats"],
        pictures.of_pictures("data.repeats", pictures.repeats),
        note="one more: 0 there is 1 here",
    ),
    "backend.is_regularisation_data": missing(
        "no loss against what the model made before; data.prior_loss_weight weighs pictures"
    ),
    "backend.is_regularization_data": automatic("is is_regularisation_data"),
    "conditioning.instance_data_dir": fields(
        ["data.masks"], pictures.masks, note="with conditioning_type=mask"
    ),
    "conditioning.conditioning_type": automatic("is part of conditioning.instance_data_dir"),
    "backend.conditioning_data": automatic("is part of conditioning.instance_data_dir"),
    "backend.conditioning": missing("pictures and captions only"),
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
