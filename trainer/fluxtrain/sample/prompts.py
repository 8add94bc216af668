"""The prompts that a config samples: its own, or those of a file in kohya's syntax, one a line.

    # a comment
    a red heart --w 1280 --h 768 --d 42 --s 28 --g 3.5
    a house --l 4 --n blurry, text

| option | meaning                                    | otherwise                       |
|--------|--------------------------------------------|---------------------------------|
| --w    | width in pixels                            | data.image_size                 |
| --h    | height in pixels                           | data.image_size                 |
| --d    | seed                                       | the run's seed and the line     |
| --s    | Euler steps                                | sampling.num_steps              |
| --l    | scale of classifier-free guidance          | sampling.cfg_scale              |
| --g    | distilled guidance, of models that have it | sampling.guidance               |
| --n    | negative prompt, for a --l other than 1    | the empty prompt                |
| --cn   | picture of the model's condition           | none; only Kontext needs none   |
| --mask | mask of that picture: Fill fills its white |                                 |

Sides are rounded down to what the model's patches need, as kohya's are. Without both, an image has the
shape of its --cn. An option that has no effect here is refused, with its line. ``sampling.prompts`` may
have options too.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from unicodedata import category

from fluxtrain.contract.run.config import LARGEST_SEED, RunConfig
from fluxtrain.contract.run.data import PIXELS_PER_TOKEN
from fluxtrain.contract.run.model import CONDITIONS
from fluxtrain.data.pictures.encodings import text_of
from fluxtrain.data.pictures.picture import PictureError, picture_size, read_bytes
from fluxtrain.encode.encoders import check_files
from fluxtrain.errors import UNSET, ConfigError


def chosen_prompts(config: RunConfig, data_root: Path) -> list[Prompt]:
    """Return ``sampling.prompts``, then those of ``sampling.prompt_file``; ConfigError if a line is wrong."""
    sampling, prompts = config.sampling, list[Prompt]()
    for index, text in enumerate(sampling.prompts):
        try:
            if _OPTION.search(text):
                prompts.append(_parse(text, config, index, data_root))
            else:
                _require_files(config, None, None)
                prompts += plain_prompts(config, [text], index)
        except ValueError as error:
            path = f"spec.run.sampling.prompts[{index}]"
            raise ConfigError(path, text, str(error)) from None
    if sampling.prompt_file is not None:
        prompts += read_prompts(data_root / sampling.prompt_file, config, len(prompts), data_root)
    return prompts


def check_sampling(config: RunConfig, data_root: Path, models_root: Path) -> None:
    """Raise ConfigError or DataError, before a training, if it could not sample its images later.

    The prompt file is read; encoders must exist and are not loaded.
    """
    if not config.sampling.is_on:
        return
    prompts = chosen_prompts(config, data_root)
    if not prompts and not config.sampling.num_validation_prompts:
        text = "must be at least 1 without prompts and prompt_file"
        raise ConfigError("spec.run.sampling.num_prompts", UNSET, text)
    needs_text = bool(prompts) or config.data.source == "images"
    check_files(config.encoders, models_root, with_text=needs_text)


MAX_PROMPTS = 256
_MAX_BYTES = 1 << 20
_MAX_TEXT = 1024
_MIN_SIDE = PIXELS_PER_TOKEN
_MAX_SIDE = 8192
_MAX_STEPS = 1000
_SAME_ASPECT = 0.05
"""Part by which the aspect ratio of a mask may differ from that of its picture."""
_OPTION = re.compile(r"(?:^|\s)--(\w+)(?:=|(?=\s)|$)")
_NO_MEANING = {
    "ss": "the sampler is always Euler's",
    "fs": "flow shift is sampling.time_shift, of all images",
    "am": "adapters are those of the run",
    "r": "renoising is not of FLUX.1",
}
"""Options of kohya's that have no effect here."""


@dataclass(frozen=True)
class Prompt:
    """What one image is sampled with."""

    text: str
    width: int
    height: int
    seed: int
    index: int
    """Number of the draw of ``seed``."""
    num_steps: int
    cfg_scale: float
    guidance: float | None
    """None if the model has none."""
    negative: str = ""
    control: Path | None = None
    """Picture of the model's condition, None if it has none; for validation prompts only a name."""
    mask: Path | None = None
    """Of the control: its white is filled."""


def plain_prompts(config: RunConfig, texts: Iterable[str], first: int = 0) -> list[Prompt]:
    """Return ``texts`` with the settings of ``config``; ``first`` is the number of the first image's draw."""
    side, sampling = config.data.image_size, config.sampling
    guidance = sampling.guidance if config.model.guidance_embed else None
    return [
        Prompt(
            *(text, side, side, config.drawn_seed, index),
            *(sampling.num_steps, sampling.cfg_scale, guidance),
        )
        for index, text in enumerate(texts, first)
    ]


def read_prompts(
    path: Path, config: RunConfig, first: int = 0, data_root: Path = Path()
) -> list[Prompt]:
    """Return the prompts of ``path``; ``first`` is the number of the first one without a seed of its own.

    Their controls are below ``data_root``. Raises ConfigError naming the line, what is wrong, and what is
    allowed.
    """
    prompts = list[Prompt]()
    for number, line in enumerate(_lines(path), 1):
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        try:
            prompts.append(_parse(text, config, first + len(prompts), data_root))
        except ValueError as error:
            raise ConfigError(_FIELD, UNSET, f"{path}, line {number}: {error}") from None
        if len(prompts) > MAX_PROMPTS:
            text = f"{path}, line {number}: at most {MAX_PROMPTS} prompts"
            raise ConfigError(_FIELD, UNSET, text)
    if not prompts:
        raise ConfigError(_FIELD, UNSET, f"{path}: it has no prompt")
    return prompts


_FIELD = "spec.run.sampling.prompt_file"


def _lines(path: Path) -> list[str]:
    if path.suffix in (".toml", ".json"):
        text = "must be a text file with a prompt on each line"
        raise ConfigError(_FIELD, UNSET, f"{path}: {text}")
    try:
        with path.open("rb") as file:
            content = file.read(_MAX_BYTES + 1)
        if len(content) > _MAX_BYTES:
            raise ConfigError(_FIELD, UNSET, f"{path}: has more than {_MAX_BYTES} bytes")
        return re.split(r"\r\n?|\n", text_of(content, "utf-8"))  # a line may have U+2028
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ConfigError(_FIELD, UNSET, f"{path}: cannot be read ({reason})") from None


def _parse(line: str, config: RunConfig, index: int, data_root: Path) -> Prompt:
    """Return the prompt in ``line``; ValueError if an option is unknown, wrong or without effect."""
    if any(category(each) == "Cc" and each != "\t" for each in line):
        raise ValueError("has control characters")
    text, options = _split(line)
    takes = config.model.takes
    if not text and not (takes and takes.has_hole):
        raise ValueError("there is no prompt before the options")
    if len(text) > _MAX_TEXT:
        raise ValueError(f"the prompt has more than {_MAX_TEXT} characters")
    for name in options:
        if name in _NO_MEANING:
            raise ValueError(f"--{name} has no effect: {_NO_MEANING[name]}")
        if name not in _READERS:
            known = ", ".join(f"--{known}" for known in _READERS)
            raise ValueError(f"--{name} is unknown; use {known}")
    values = {name: _READERS[name](name, value) for name, value in options.items()}
    sampling, has_guidance = config.sampling, config.model.guidance_embed
    if "g" in values and not has_guidance:
        raise ValueError("--g has no effect: the model has no guidance_embed; use --l")
    cfg_scale = float(values.get("l", sampling.cfg_scale))
    if "n" in values and cfg_scale == 1:
        text = "has no effect with classifier-free guidance 1; add --l, such as --l 4"
        raise ValueError(f"--n {text}")
    guidance = float(values.get("g", sampling.guidance)) if has_guidance else None
    control, mask = (data_root / str(values[name]) if name in values else None for name in _FILES)
    _require_files(config, control, mask)
    has_seed, side = "d" in values, config.data.image_size
    shape = (side, side)
    if control is not None and not {"w", "h"} & values.keys():
        shape = _shape_of(control, side)
    return Prompt(
        text=text,
        width=_rounded(int(values.get("w", shape[0]))),
        height=_rounded(int(values.get("h", shape[1]))),
        seed=int(values["d"]) if has_seed else config.drawn_seed,
        index=0 if has_seed else index,
        num_steps=int(values.get("s", sampling.num_steps)),
        cfg_scale=cfg_scale,
        guidance=guidance,
        negative=str(values.get("n", "")),
        control=control,
        mask=mask,
    )


def _require_files(config: RunConfig, control: Path | None, mask: Path | None) -> None:
    """Raise ValueError if the files of a prompt are not those that the model's condition is made of."""
    condition, takes = config.model.condition, config.model.takes
    holes = [name for name, each in CONDITIONS.items() if each.has_hole]
    has_hole = condition in holes
    if control is not None and takes is None:
        raise ValueError("--cn has no effect: model.condition is none, without a picture")
    if mask is not None and not has_hole:
        text = f"model.condition is {condition}, not {' or '.join(holes)}"
        raise ValueError(f"--mask has no effect: {text}")
    if (has_hole and mask is None) or (takes and not takes.adds_tokens and control is None):
        example = f"such as --cn photo.png{' --mask hole.png' * has_hole}"
        what = f"a picture{' and its mask' * has_hole}"
        raise ValueError(f"needs {what}, {example}: model.condition is {condition}")
    ratios = [w / h for w, h in (_shape_of(path, 1024) for path in (control, mask) if path)]
    if abs(ratios[0] / ratios[-1] - 1 if ratios else 0) > _SAME_ASPECT:
        raise ValueError("--mask is of another aspect ratio than --cn")


def _shape_of(path: Path, side: int) -> tuple[int, int]:
    """Return width and height in the shape of the picture ``path``, with ``side`` x ``side`` pixels.

    ValueError if it is none.
    """
    try:
        width, height = picture_size(read_bytes(path))
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror})") from None
    except PictureError as error:
        raise ValueError(f"{path}: {error}") from None
    ratio = (width / height) ** 0.5
    return max(_MIN_SIDE, int(side * ratio)), max(_MIN_SIDE, int(side / ratio))


def _split(line: str) -> tuple[str, dict[str, str]]:
    """Return the prompt of ``line``, and the text of each option; ValueError if one is repeated."""
    found = list(_OPTION.finditer(line))
    text = line[: found[0].start()] if found else line
    options = dict[str, str]()
    ends = [option.start() for option in found[1:]] + [len(line)]
    for option, end in zip(found, ends, strict=False):
        name = option[1].lower()
        if name in options:
            raise ValueError(f"--{name} is given twice")
        options[name] = line[option.end() : end].strip()
    return text.strip(), options


def _whole(least: int, most: int) -> Callable[[str, str], int]:
    def read(name: str, value: str) -> int:
        try:
            number = int(value)
        except ValueError:
            number = least - 1
        if not least <= number <= most:
            allowed = f"must be a whole number from {least} to {most}"
            raise ValueError(f"--{name} {value}: {allowed}")
        return number

    return read


def _number(name: str, value: str) -> float:
    try:
        number = float(value)
    except ValueError:
        number = -1.0
    if not 0 <= number <= 100:
        raise ValueError(f"--{name} {value}: must be a number from 0 to 100")
    return number


def _text(name: str, value: str) -> str:
    if not value or len(value) > _MAX_TEXT:
        raise ValueError(f"--{name}: must be a text of 1 to {_MAX_TEXT} characters")
    return value


_READERS: dict[str, Callable[[str, str], int | float | str]] = {
    "w": _whole(_MIN_SIDE, _MAX_SIDE),
    "h": _whole(_MIN_SIDE, _MAX_SIDE),
    "d": _whole(0, LARGEST_SEED),
    "s": _whole(1, _MAX_STEPS),
    "l": _number,
    "g": _number,
    "n": _text,
    "cn": _text,
    "mask": _text,
}
_FILES = ("cn", "mask")


def _rounded(side: int) -> int:
    return side // _MIN_SIDE * _MIN_SIDE
