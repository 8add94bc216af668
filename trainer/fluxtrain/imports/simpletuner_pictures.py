"""SimpleTuner's options of pictures, which a file of backends or the config states, and of samples."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from fluxtrain.errors import ConfigError
from fluxtrain.imports import common
from fluxtrain.imports.ai_toolkit_values import flat
from fluxtrain.imports.kinds import REFERENCE
from fluxtrain.imports.table import (
    Convert,
    IgnoredError,
    NoCounterpartError,
    Reading,
    Values,
    read_document,
)

OF_BACKEND = "backend."
_TYPES = ("local", "aws", "huggingface")
_OTHER_TYPES = ("csv", "memory", "parquet", "webshart")
_SEPARATORS = {"comma": ",", "space": " ", "period": "."}
SIZES = (
    *("data.image_size", "data.buckets.step", "data.buckets.upscale"),
    "data.buckets.resolutions",
)
"""The fields that resolution sets."""
SHUFFLED = (
    *("data.variants.shuffle_caption", "data.variants.captions"),
    *("data.variants.keep_tokens", "data.variants.separator"),
)
"""The fields that caption_shuffle sets."""


def stated(reading: Reading, name: str) -> str:
    """Return the option of the backend if it states ``name``, else that of all backends."""
    own = f"{OF_BACKEND}{name}"
    return own if reading.has(own) else name


def unless_overridden(convert: Convert) -> Convert:
    """Return ``convert`` for an option of all backends, which the backend's own wins over."""

    def only(reading: Reading, name: str) -> Values:
        own = stated(reading, name)
        if own == name:
            return convert(reading, name)
        with suppress(NoCounterpartError):
            convert(reading, name)
        raise IgnoredError(f"{own} wins")

    return only


def backend_file(reading: Reading, name: str) -> Values:
    """Return nothing if the file of backends was found."""
    reading.text(name)
    if not any(it.startswith(("backend.", "backends")) for it in reading.given):
        raise NoCounterpartError("no such file beside this one; data.images names the pictures")
    return {}


def kind(reading: Reading, name: str) -> Values:
    """Return nothing for a backend that ``data.images`` can name."""
    word = reading.word(name)
    if word in _OTHER_TYPES:
        text = "data.images is a folder, a bucket on S3, a data set of the Hub or shards"
        raise NoCounterpartError(f"{text} (docs/data.md)")
    if word not in _TYPES:
        raise reading.wrong(name, f"must be one of {', '.join(_TYPES + _OTHER_TYPES)}")
    return {}


def _is(reading: Reading, word: str) -> bool:
    return reading.word("backend.type", "local") == word


def folder(reading: Reading, name: str) -> Values:
    """Return the folder of a local backend."""
    path = reading.text(name)
    if not _is(reading, "local"):
        raise IgnoredError("only type=local uses it")
    return {"data.images": path}


def bucket(reading: Reading, name: str) -> Values:
    """Return the URL of a backend on S3."""
    text = reading.text(name)
    if not _is(reading, "aws"):
        raise IgnoredError("only type=aws uses it")
    prefix = next(
        (reading.text(it) for it in ("backend.aws_data_prefix", "backend.instance_data_dir")
         if reading.value(it)),
        "",
    )  # fmt: skip
    return {"data.images": f"s3://{text}/{prefix}".rstrip("/")}


def data_set(reading: Reading, name: str) -> Values:
    """Return the URL of a data set of the Hub."""
    text = reading.text(name)
    if not _is(reading, "huggingface"):
        raise IgnoredError("only type=huggingface uses it")
    revision = "backend.revision"
    suffix = f"@{reading.text(revision)}" if reading.value(revision) else ""
    return {"data.images": f"hf://datasets/{text}{suffix}"}


def repeats(reading: Reading, name: str) -> int:
    """Return how often a picture is used: 0 there stands for once."""
    return reading.whole(name) + 1


def column(reading: Reading, name: str) -> str:
    """Return the name of a column, which may be the only one of a list."""
    value = reading.value(name)
    if isinstance(value, list):
        if len(value) != 1 or not isinstance(value[0], str):
            raise NoCounterpartError("captions are in one column: data.table.caption_column")
        return value[0]
    return reading.text(name)


def captions(reading: Reading, name: str) -> Values:
    """Return nothing for captions that are read here."""
    notes = {
        "textfile": "text files beside the pictures; their lines are one caption here",
        "instanceprompt": "is part of instance_prompt",
        "huggingface": "data.table names the column",
    }
    elsewhere = {
        "filename": "names of files are no captions here; metadata.jsonl has them (docs/data.md)",
        "parquet": "metadata.parquet in the folder, with file_name and caption, is read (docs/data.md)",
    }
    elsewhere |= dict.fromkeys(
        ("csv", "webshart"), "captions are beside the pictures (docs/data.md)"
    )
    word = reading.word(name)
    if word in elsewhere:
        raise NoCounterpartError(elsewhere[word])
    if word not in notes:
        raise reading.wrong(name, f"must be one of {', '.join([*notes, *elsewhere])}")
    return reading.noted(name, notes[word])


def instance_prompt(reading: Reading, name: str) -> Values:
    """Return the prefix of captions, or the caption of all pictures."""
    strategy = stated(reading, "caption_strategy")
    if reading.word(strategy, "") == "instanceprompt" or reading.is_on(
        stated(reading, "only_instance_prompt")
    ):
        reading.notes[name] = "for pictures without a caption; leave no text files beside them"
        return common.of_images("data.class_tokens")(reading, name)
    if reading.is_on(stated(reading, "prepend_instance_prompt")):
        return common.of_images("data.caption_prefix")(reading, name)
    raise IgnoredError(
        "only prepend_instance_prompt, only_instance_prompt and instanceprompt use it"
    )


def shuffle(reading: Reading, name: str) -> Values:
    """Return the shuffled captions, of which the one as it is may be one."""
    if not reading.flag(name):
        return reading.noted(name, "off here too")
    above = name.removesuffix("enable")

    count = reading.positive(above + "count", 1)
    has_original = reading.flag(above + "include_original", True)
    word = reading.word(above + "split_on", "comma")
    if word not in _SEPARATORS:
        raise reading.wrong(above + "split_on", f"must be one of {', '.join(_SEPARATORS)}")
    common.require_images(reading)
    values: dict[str, object] = {"data.variants.shuffle_caption": True}
    values["data.variants.captions"] = max(2, count + has_original)
    values["data.variants.keep_tokens"] = reading.whole(above + "position_start", 0)
    values["data.variants.separator"] = _SEPARATORS[word]
    return values


def is_square(reading: Reading) -> bool:
    """Return whether pictures are cut to squares."""
    word = reading.word("backend.crop_aspect", "square")
    return reading.is_on("backend.crop") and word == "square"


def crop(reading: Reading, name: str) -> Values:
    """Return several crops if their places are drawn, as they are by default."""
    if not reading.flag(name):
        return reading.noted(name, "is part of resolution: data.buckets")
    if reading.word("backend.crop_style", "random") != "random":
        return reading.noted(name, "is part of resolution")
    common.require_images(reading)
    return {"data.variants.crops": common.CROPS}


def part_of_crop(words: tuple[str, ...], refused: tuple[str, ...], why: str) -> Convert:
    """Return the conversion of one of ``words`` to no field: crop is written with it."""

    def convert(reading: Reading, name: str) -> Values:
        word = reading.word(name)
        if word not in words:
            raise reading.wrong(name, f"must be one of {', '.join(words)}")
        if not reading.is_on("backend.crop"):
            raise IgnoredError("only crop uses it")
        if word in refused:
            raise NoCounterpartError(why)
        return {}

    return convert


crop_style = part_of_crop(
    ("random", "center", "centre", "corner", "face"),
    ("corner", "face"),
    "crops are of the middle, or drawn: data.variants.crops",
)
crop_aspect = part_of_crop(
    ("square", "preserve", "closest", "random"),
    ("closest", "random"),
    "each picture has the bucket of its own aspect ratio: data.buckets",
)


def resolution(reading: Reading, name: str) -> Values:
    """Return the size of pictures, one or several, as squares or in buckets."""
    given = reading.value(name)
    sides = given if isinstance(given, list) else [given]
    squares = [_square(reading, name, side) for side in sides]
    if not squares:
        raise reading.wrong(name, "must be a number")
    largest = max(squares, key=lambda square: int(str(square["data.image_size"])))
    if is_square(reading) and len(squares) == 1:
        return largest
    step = reading.positive("aspect_bucket_alignment", 64)
    values = {**largest, "data.buckets.step": step, "data.buckets.upscale": True}
    if len(squares) > 1:
        values["data.buckets.resolutions"] = [square["data.image_size"] for square in squares]
    return values


def _square(reading: Reading, name: str, side: object) -> Values:
    """Return the square of ``side``, which is in pixels or megapixels."""
    one = Reading({name: side}, {})
    word = reading.choice(stated(reading, "resolution_type"), "pixel", "pixel_area", "area")
    if word == "area":
        number = one.number(name)
        reading.notes[name] = "the square of as many megapixels"
        return common.square(one, name, round(max(number, 0) ** 0.5 * 1024 / 16) * 16)
    if word == "pixel" and not is_square(reading):
        reading.notes[name] = "the root of the area here, not the shorter side"
    return common.square(one, name, one.whole(name))


def conditions(reading: Reading, name: str) -> Values:
    """Return the folder of the masks that weigh the loss, or of the pictures that Kontext edits."""
    path = reading.text(name)
    word = reading.word("conditioning.conditioning_type", "controlnet")
    if re.match(REFERENCE, word):
        reading.notes[name] = "each in the size of the picture that is made of it"
        return common.of_images("data.controls", lambda *_: path)(reading, name)
    if word != "mask":
        text = "masks that weigh the loss, conditioning_type=mask, are data.masks; control nets"
        raise NoCounterpartError(f"{text} and the like are not trained here")
    return common.of_images("data.masks", lambda *_: path)(reading, name)


_NEGATIVE = "validation_negative_prompt"
STEPS = "validation_step_interval"


def prompt(reading: Reading, name: str) -> Values:
    """Return the prompt of images, in each of their sizes if a file of prompts can have them."""
    text = reading.text(name)
    if reading.prompt_file is None:
        return {"sampling.prompts": [text]}
    options: dict[str, object] = {}
    if reading.has("validation_seed"):
        options["d"] = reading.whole("validation_seed")
    if reading.has(_NEGATIVE) and _is_guided(reading):
        options["n"] = " ".join(reading.text(_NEGATIVE).split())
    sizes = _sizes(reading) or [{}]
    return common.written(
        reading, [common.line(reading, name, text, {**size, **options}) for size in sizes]
    )


def _sizes(reading: Reading) -> list[dict[str, object]]:
    """Return the sizes of sampled images, such as 1024 or 1280x768, as options of lines."""
    name = "validation_resolution"
    if not reading.has(name):
        return []
    found = list[dict[str, object]]()
    for part in reading.text(name).split(","):
        width, _, height = part.strip().lower().partition("x")
        sides = (width, height or width)
        if not all(side.isdecimal() and len(side) < 6 for side in sides):
            raise reading.wrong(name, "must be sizes in pixels such as 1024 or 1280x768")
        found.append({"w": int(sides[0]), "h": int(sides[1])})
    return found


def _is_guided(reading: Reading) -> bool:
    return reading.number("validation_guidance_real", 1.0) > 1


def negative(reading: Reading, name: str) -> Values:
    """Return nothing: only lines of prompts have a negative prompt."""
    reading.text(name)
    if not _is_guided(reading):
        raise IgnoredError("used with validation_guidance_real above 1 only")
    return common.of_lines("--n")(reading, name)


def sample_size(reading: Reading, name: str) -> Values:
    """Return nothing if images are sampled in the size of the training."""
    size = reading.text(name)
    if reading.prompt_file is not None:
        return reading.noted(name, common.PROMPT_NOTE)
    option = stated(reading, "resolution")
    trained = resolution(reading, option) if reading.has(option) else {}
    if size.isdecimal() and trained.get("data.image_size") == int(size):
        return reading.noted(name, "is data.image_size")
    raise NoCounterpartError("is data.image_size; lines of sampling.prompt_file have --w and --h")


def sample_steps(reading: Reading, name: str) -> Values:
    """Return the interval of images, unless they are switched off."""
    _require_prompt(reading)
    return {"sampling.every_steps": reading.whole(name)}


def sample_epochs(reading: Reading, name: str) -> Values:
    """Return the interval of images for a number of epochs, unless steps are given too."""
    _require_prompt(reading)
    epochs = reading.whole(name)
    if not epochs:
        raise IgnoredError("0 asks for none")
    if reading.number(STEPS, 0):
        raise NoCounterpartError(f"images have one interval: {STEPS}")
    steps = common.steps_of(epochs, reading)
    return {"sampling.every_steps": common.required_steps(steps, "sampling.every_steps")}


def sample_at_start(reading: Reading, name: str) -> Values:
    """Return whether there are images before the first step, unless they are switched off."""
    _require_prompt(reading)
    return {"sampling.at_start": reading.flag(name)}


def _require_prompt(reading: Reading) -> None:
    if reading.is_on("validation_disable"):
        raise IgnoredError("validation_disable is on")
    if not reading.has("validation_prompt"):
        raise NoCounterpartError("images need validation_prompt")


Options = Mapping[str, object]
BACKENDS, LYCORIS = "data_backend_config", "lycoris_config"
_CACHES = ("text_embeds", "image_embeds", "conditioning_image_embeds", "distillation_cache")
"""Kinds of backends without pictures."""
_OF_ONE = ("id", "resolution", "cache_dir_vae", "minimum_image_size", "maximum_image_size")
"""What backends of the same pictures in several resolutions differ in."""
_REGULARISATION = ("is_regularisation_data", "is_regularization_data")


def with_named_files(options: Options, path: Path) -> dict[str, object]:
    """Return ``options`` of the file ``path``, and those of the files that it names, if they are found.

    Of the backends, the first one of pictures has the options ``backend.*``; ``lycoris.*`` are LyCORIS'.
    Raises ConfigError for a file that is found, but cannot be read.
    """
    found = dict(options)
    readers: Mapping[str, Callable[[object, Path], dict[str, object]]] = {
        BACKENDS: _backends,
        LYCORIS: _lycoris,
    }
    for name, read in readers.items():
        named = options.get(name, options.get(f"--{name}"))
        file = common.near(named, path.parent, ".json")
        if file is not None:
            found |= read(read_document(file), file)
    return found


def _lycoris(document: object, path: Path) -> dict[str, object]:
    if not isinstance(document, dict):
        raise ConfigError(str(path), document, "must be a mapping of options")
    options = {str(name): value for name, value in document.items()}
    preset = options.pop("apply_preset", None)
    named = {f"lycoris.{name}": value for name, value in options.items()}
    if isinstance(preset, dict):
        return named | {f"lycoris.apply_preset.{name}": value for name, value in preset.items()}
    return named | {"lycoris.apply_preset": preset}


def _backends(document: object, path: Path) -> dict[str, object]:
    if not isinstance(document, list) or not all(isinstance(it, dict) for it in document):
        raise ConfigError(str(path), document, "must be a list of mappings, one for each backend")
    used = [it for it in document if not (it.get("disabled") or it.get("disable"))]
    pictures = [it for it in used if _kind(it) == "image"]
    kinds = {_kind(it) for it in used} - {"image", "conditioning", *_CACHES}
    found: dict[str, object] = {"backends.dataset_type": sorted(kinds) or None}
    if not pictures:
        return {**found, "backends": f"{len(document)} without pictures that are trained"}
    chosen = next((it for it in pictures if not _is_regularisation(it)), pictures[0])
    for name, value in flat(chosen).items():
        if isinstance(value, str) and value.lower() == "false":
            text = "is a text, which SimpleTuner takes for true; write false without quotes"
            raise ConfigError(f"{path}: {name}", value, text)
    found |= flat(chosen, "backend.")
    same = [it for it in pictures if _without_size(it) == _without_size(chosen)]
    if all(it.get("resolution") is not None for it in same) and len(same) > 1:
        found["backend.resolution"] = [it["resolution"] for it in same]
    else:
        same = [chosen]
    if len(pictures) > len(same):
        found["backends"] = f"{len(pictures)} of pictures"
    if any(map(_is_regularisation, pictures)):
        found["backend.is_regularisation_data"] = True
    return found | _conditioning(chosen, used)


def _kind(backend: Options) -> str:
    """Return what the backend holds; the guides leave it out for Kontext's references."""
    implied = "conditioning" if backend.get("conditioning_type") else "image"
    return str(backend.get("dataset_type", implied))


def _is_regularisation(backend: Options) -> bool:
    return any(backend.get(name) for name in _REGULARISATION)


def _without_size(backend: Options) -> dict[str, object]:
    return {name: value for name, value in backend.items() if name not in _OF_ONE}


def _conditioning(chosen: Options, backends: list[dict[str, object]]) -> dict[str, object]:
    """Return the kind and the folder of the backend that conditions ``chosen``."""
    given = chosen.get("conditioning_data")
    names = given if isinstance(given, list) else [given]
    meant = [
        backend
        for backend in backends
        if _kind(backend) == "conditioning"
        and (backend.get("id") in names or backend.get("source_dataset_id") == chosen.get("id"))
    ]
    if len(meant) > 1:  # refused by name
        return {"backend.conditioning_data": [backend.get("id") for backend in meant]}
    options = ("conditioning_type", "instance_data_dir")
    return {f"conditioning.{name}": it.get(name) for it in meant for name in options}
