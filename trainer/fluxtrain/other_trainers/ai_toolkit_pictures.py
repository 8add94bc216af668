"""Conversions of ai-toolkit's options of pictures and of sampled images."""

from __future__ import annotations

from pathlib import PurePosixPath

from fluxtrain.other_trainers import buckets, prompt_lines
from fluxtrain.other_trainers.ai_toolkit_values import IMAGES, SAMPLES
from fluxtrain.other_trainers.option import Convert, Values
from fluxtrain.other_trainers.reading import InertError, NoCounterpartError, Reading

MEAN = "there the masks of a batch are divided by their mean"
"""What differs with masks."""
_METADATA = ("metadata.jsonl", "metadata.csv", "metadata.parquet")
_CAPTIONS = ("txt", "caption")
_TRIGGER = "[trigger]"


def folder(reading: Reading, name: str) -> Values:
    """Return the folder of the pictures; of a metadata file, its folder."""
    path = reading.text(name)
    if name == "datasets.folder_path" and reading.has("datasets.dataset_path"):
        raise InertError("datasets.dataset_path wins")
    file = PurePosixPath(path)
    if file.name in _METADATA:
        return {"data.images": str(file.parent)}
    if file.suffix in (".json", ".jsonl", ".csv", ".parquet"):
        text = f"captions are read from {', '.join(_METADATA)} in the folder (docs/data.md)"
        raise NoCounterpartError(text)
    return {"data.images": path}


def caption_files(reading: Reading, name: str) -> Values:
    """Return nothing for captions in text files beside the pictures."""
    if reading.word(name).removeprefix(".") not in _CAPTIONS:
        raise NoCounterpartError("captions are in .txt or .caption files, or in metadata.jsonl")
    reading.notes[name] = "text files beside the pictures are read"
    return {}


def masks(reading: Reading, name: str) -> Values:
    """Return the folder of masks, which alpha_mask wins over."""
    path = reading.text(name)
    if reading.is_on("datasets.alpha_mask"):
        raise InertError("datasets.alpha_mask wins")
    if not any(map(reading.has, IMAGES.split())):
        raise NoCounterpartError("data.masks needs data.images")
    return {"data.masks": path}


def least_weight(reading: Reading, name: str) -> Values:
    """Return nothing: what is black in a mask counts nothing here."""
    if reading.number(name) == 0:
        return {}
    if not reading.has("datasets.mask_path") and not reading.is_on("datasets.alpha_mask"):
        raise InertError("only masks use it")
    raise NoCounterpartError("black counts nothing here: brighten the masks of data.masks instead")


def sample_steps(reading: Reading, name: str) -> Values:
    """Return the interval of images, unless they are switched off."""
    _require_prompts(reading)
    return {"sampling.every_steps": reading.whole(name)}


def sample_at_start(reading: Reading, name: str) -> Values:
    """Return whether there are images before the first step, unless they are switched off."""
    _require_prompts(reading)
    return {"sampling.at_start": reading.flag(name)}


def prompts(reading: Reading, name: str) -> Values:
    """Return the prompts of images, with the trigger word where they say so, without their options."""
    if name == "sample.prompts" and reading.has(SAMPLES):
        raise InertError("sample.samples wins")
    trigger = reading.text("trigger_word") if reading.value("trigger_word") else _TRIGGER
    texts = [text.replace(_TRIGGER, trigger) for text in _texts(reading, name)]
    plain = [text.partition(" --")[0].strip() for text in texts]
    if plain != texts:
        reading.notes[name] = "without options after --, which lines of sampling.prompt_file have"
    if not plain:
        reading.notes[name] = "no prompts"
        return {}
    if reading.prompt_file is None:
        return {"sampling.prompts": plain}
    lines = [_line(reading, name, number, text) for number, text in enumerate(plain)]
    return prompt_lines.written(reading, lines)


def _line(reading: Reading, name: str, number: int, text: str) -> str:
    """Return the line for the sample ``number``, whose own settings win over those of all."""

    def whole(setting: str, default: int) -> int:
        own = reading.value(f"{SAMPLES}.{setting}")
        if isinstance(own, list) and own[number] is not None:
            return Reading({f"{SAMPLES}.{setting}": own[number]}, {}).whole(f"{SAMPLES}.{setting}")
        shared = f"sample.{setting}"
        return reading.whole(shared) if reading.has(shared) else default

    steps = whole("sample_steps", 20)
    options = {"w": whole("width", 512), "h": whole("height", 512), "s": steps}
    seed = _seed(reading, number)
    if seed is not None:
        options["d"] = seed
    return prompt_lines.line(reading, name, text, options)


def _seed(reading: Reading, number: int) -> int | None:
    """Return the seed of the sample ``number``; None for -1, which draws one there."""
    own = reading.value(f"{SAMPLES}.seed")
    if isinstance(own, list) and own[number] is not None:
        name, value, walked = f"{SAMPLES}.seed", own[number], 0
    else:
        name, value = "sample.seed", reading.value("sample.seed")
        walked = number if reading.is_on("sample.walk_seed") else 0
    if value == -1:
        return None
    return walked if value is None else Reading({name: value}, {}).whole(name) + walked


def _require_prompts(reading: Reading) -> None:
    if reading.is_on("train.disable_sampling"):
        raise InertError("train.disable_sampling is on")
    if not any(reading.has(name) and _texts(reading, name) for name in (SAMPLES, "sample.prompts")):
        raise NoCounterpartError("images need sample.prompts")


def _texts(reading: Reading, name: str) -> list[str]:
    value = reading.value(name)
    is_text = isinstance(value, list) and all(isinstance(it, str) for it in value)
    if name == SAMPLES and not is_text:
        raise reading.wrong(name, "must be a list of mappings, each with a prompt")
    return reading.texts(name)


def side(option: str) -> Convert:
    """Return the conversion of the width or height of images; prompts in files have ``option``."""

    def convert(reading: Reading, name: str) -> Values:
        pixels = reading.positive(name)
        if reading.prompt_file is not None:
            reading.notes[name] = prompt_lines.NOTE
            return {}
        if pixels == buckets.ai_toolkit(reading, "datasets.resolution")["data.image_size"]:
            reading.notes[name] = "is data.image_size"
            return {}
        raise NoCounterpartError(
            f"is data.image_size; lines of sampling.prompt_file have {option} {pixels}"
        )

    return convert


def of_lines(option: str) -> Convert:
    """Return the conversion of a setting of images that only lines of a file have, as ``option``."""

    def convert(reading: Reading, name: str) -> Values:
        if reading.prompt_file is None:
            raise NoCounterpartError(f"lines of sampling.prompt_file have {option}: --prompt-file")
        reading.notes[name] = prompt_lines.NOTE
        return {}

    return convert


def walk_seed(reading: Reading, name: str) -> Values:
    """Return nothing if every image has noise of its own."""
    if reading.prompt_file is not None:
        reading.flag(name)
        reading.notes[name] = prompt_lines.NOTE
        return {}
    if reading.flag(name):
        reading.notes[name] = "every image has noise of its own"
        return {}
    raise NoCounterpartError(
        "every image has noise of its own; lines of sampling.prompt_file with the same --d do not"
    )
