"""ai-toolkit's options of pictures and of sampled images, by their names below ``config.process[0]``."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from fluxtrain.other_trainers import ai_toolkit_pictures as pictures
from fluxtrain.other_trainers import buckets, common, copies
from fluxtrain.other_trainers.ai_toolkit_values import IMAGES, MORE_DATASETS
from fluxtrain.other_trainers.option import (
    Convert,
    Option,
    automatic,
    each,
    field,
    fields,
    inert,
    missing,
)
from fluxtrain.other_trainers.reading import Reading

_SUBSETS = "a data set config, kohya's, has a subset for each folder (docs/data.md)"
_PROMPTS = ("sampling.prompts", "sampling.prompt_file")
_IN_FILE = "in lines of sampling.prompt_file, with --prompt-file"
_LINES = "lines of sampling.prompt_file have"
_FOLDER = "a folder below --data; encoded before the first step"


def of_folder(path: str, read: Callable[[Reading, str], object] = Reading.text) -> Convert:
    """Return the conversion of an option of the pictures to the field ``path``."""
    return common.of_images(IMAGES, path, read)


DATA: Mapping[str, Option] = {
    MORE_DATASETS: missing(f"only the first without is_reg was read; {_SUBSETS}"),
    "datasets.folder_path": fields(["data.images"], pictures.folder, note=_FOLDER),
    "datasets.dataset_path": fields(
        ["data.images"], pictures.folder, note=f"{_FOLDER}; of metadata.jsonl, its folder"
    ),
    "datasets.caption_ext": fields([], pictures.caption_files, note="txt and caption are read"),
    "datasets.default_caption": fields(["data.class_tokens"], of_folder("data.class_tokens")),
    "datasets.trigger_word": fields(
        ["data.caption_prefix"], of_folder("data.caption_prefix"), note="wins over trigger_word"
    ),
    "datasets.random_triggers": missing("captions have one prefix: data.caption_prefix"),
    "datasets.caption_dropout_rate": field("flow.prompt_dropout", Reading.number, 0.0),
    "datasets.shuffle_tokens": fields(copies.SHUFFLED, copies.shuffle, note=copies.NOTE),
    "datasets.token_dropout_rate": fields(copies.DROPPED, copies.dropout, note=copies.NOTE),
    "datasets.keep_tokens": fields(
        ["data.variants.keep_tokens"],
        copies.setting("data.variants.keep_tokens", Reading.whole),
        note="not shuffled either here; 0: none",
    ),
    "datasets.resolution": fields(
        [
            "data.image_size",
            "data.buckets.step",
            "data.buckets.upscale",
            "data.buckets.resolutions",
        ],
        buckets.ai_toolkit,
        512,
        "without buckets the largest of several",
    ),
    **each(
        "datasets.cache_latents datasets.cache_latents_to_disk datasets.cache_text_embeddings",
        automatic("data.images is encoded before the first step"),
    ),
    **each("datasets.buckets datasets.square_crop", automatic("is part of datasets.resolution")),
    "datasets.bucket_tolerance": missing("data.buckets.step is 64", 64),
    "datasets.flip_x": fields(["data.variants.flip"], copies.flip, note=copies.NOTE),
    "datasets.flip_y": missing("data.variants.flip mirrors left to right only"),
    "datasets.random_crop": fields(["data.variants.crops"], copies.crops, note=copies.NOTE),
    **each(
        "datasets.random_scale datasets.scale datasets.augments datasets.augmentations "
        "datasets.shuffle_augmentations datasets.standardize_images",
        missing("colours and scales are not changed: add changed copies to the folder", 1),
    ),
    "datasets.mask_path": fields(
        ["data.masks"], pictures.masks, note=f"a folder below --data; {pictures.MEAN}"
    ),
    "datasets.alpha_mask": fields(
        ["data.masks"], copies.alpha_masks, note=f"the pictures' opacity; {pictures.MEAN}"
    ),
    "datasets.mask_min_value": fields([], pictures.least_weight, note="0: black counts nothing"),
    "datasets.invert_mask": missing("white counts here: invert the masks of data.masks"),
    "datasets.num_repeats": fields(["data.repeats"], of_folder("data.repeats", Reading.positive)),
    "datasets.is_reg": missing(f"is_reg of a subset: {_SUBSETS}"),
    **each(
        "datasets.network_weight datasets.loss_multiplier",
        missing("all pictures count the same; data.prior_loss_weight is of those with is_reg", 1),
    ),
    "datasets.num_workers": field("data.num_workers", Reading.whole),
    "datasets.prefetch_factor": field("data.prefetch", Reading.positive),
    **each(
        "datasets.control_path datasets.control_path_1 datasets.control_path_2 "
        "datasets.control_path_3 datasets.inpaint_path datasets.unconditional_path "
        "datasets.clip_image_path datasets.controls datasets.type datasets.num_frames",
        missing("pictures and captions only", "image", 1),
    ),
    **each(
        "datasets.shrink_video_to_frames datasets.fps datasets.do_i2v",
        inert("is of films, not of pictures"),
    ),
}
SAMPLES: Mapping[str, Option] = {
    "sample.sample_every": fields(["sampling.every_steps"], pictures.sample_steps, 100),
    "sample.prompts": fields(_PROMPTS, pictures.prompts),
    "sample.samples": fields(_PROMPTS, pictures.prompts, note="their prompts"),
    **{
        f"sample.samples.{name}": fields([], pictures.of_lines(option), note=_IN_FILE)
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
        inert("FLUX.1 is sampled without a negative prompt there"),
    ),
    **each(
        "sample.samples.network_multiplier sample.samples.ctrl_img sample.samples.ctrl_idx "
        "sample.samples.num_frames sample.samples.fps",
        missing(f"{_LINES} sizes, seeds, steps and guidance only"),
    ),
    "sample.sample_steps": field("sampling.num_steps", Reading.positive, 20),
    "sample.guidance_scale": field("sampling.guidance", Reading.number, 7.0),
    "sample.sampler": automatic("FLUX.1 is sampled with Euler's method"),
    "sample.width": fields([], pictures.side("--w"), note=_IN_FILE),
    "sample.height": fields([], pictures.side("--h"), note=_IN_FILE),
    "sample.seed": fields([], pictures.of_lines("--d"), note=_IN_FILE),
    "sample.walk_seed": fields([], pictures.walk_seed, note=_IN_FILE),
    "sample.sample_start_step": missing("from sampling.every_steps on", 0),
    **each("sample.network_multiplier sample.format", missing("strength 1, PNG", 1, "png")),
    **each("sample.num_frames sample.fps", inert("is of films, not of pictures")),
}
