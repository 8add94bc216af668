"""Conversions of SimpleTuner's options of sampled images."""

from __future__ import annotations

from fluxtrain.other_trainers import common, prompt_lines
from fluxtrain.other_trainers import simpletuner_pictures as pictures
from fluxtrain.other_trainers.option import Values
from fluxtrain.other_trainers.reading import InertError, NoCounterpartError, Reading
from fluxtrain.other_trainers.simpletuner_pictures import stated
from fluxtrain.other_trainers.simpletuner_values import ACCUMULATION, BATCH

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
    return prompt_lines.written(
        reading, [prompt_lines.line(reading, name, text, {**size, **options}) for size in sizes]
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
    scale = "validation_guidance_real"
    return reading.has(scale) and reading.number(scale) > 1


def sample_seed(reading: Reading, name: str) -> Values:
    """Return nothing: lines of prompts have it."""
    reading.whole(name)
    if reading.prompt_file is None:
        raise NoCounterpartError("lines of sampling.prompt_file have --d: --prompt-file")
    reading.notes[name] = prompt_lines.NOTE
    return {}


def negative(reading: Reading, name: str) -> Values:
    """Return nothing: only lines of prompts have a negative prompt."""
    reading.text(name)
    if not _is_guided(reading):
        raise InertError("used with validation_guidance_real above 1 only")
    if reading.prompt_file is None:
        raise NoCounterpartError("lines of sampling.prompt_file have --n: --prompt-file")
    reading.notes[name] = prompt_lines.NOTE
    return {}


def sample_size(reading: Reading, name: str) -> Values:
    """Return nothing if images are sampled in the size of the training."""
    size = reading.text(name)
    if reading.prompt_file is not None:
        reading.notes[name] = prompt_lines.NOTE
        return {}
    option = stated(reading, "resolution")
    trained = pictures.resolution(reading, option) if reading.has(option) else {}
    if size.isdecimal() and trained.get("data.image_size") == int(size):
        reading.notes[name] = "is data.image_size"
        return {}
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
        raise InertError("0 asks for none")
    if reading.has(STEPS) and reading.number(STEPS):
        raise NoCounterpartError(f"images have one interval: {STEPS}")
    steps = common.steps_of(epochs, reading, BATCH, ACCUMULATION)
    if steps is None:
        raise NoCounterpartError(f"{common.EPOCHS}--sampling.every_steps")
    return {"sampling.every_steps": steps}


def sample_at_start(reading: Reading, name: str) -> Values:
    """Return whether there are images before the first step, unless they are switched off."""
    _require_prompt(reading)
    return {"sampling.at_start": reading.flag(name)}


def _require_prompt(reading: Reading) -> None:
    if reading.is_on("validation_disable"):
        raise InertError("validation_disable is on")
    if not reading.has("validation_prompt"):
        raise NoCounterpartError("images need validation_prompt")
