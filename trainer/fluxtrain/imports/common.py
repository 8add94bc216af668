"""Conversions that several trainers' tables share."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import get_args

from fluxtrain.contract.run.adapter import LayerName
from fluxtrain.contract.run.model import CONDITIONS, ModelConfig
from fluxtrain.imports.table import (
    Convert,
    IgnoredError,
    NoCounterpartError,
    Option,
    Reading,
    Values,
    fields,
    read_document,
)
from fluxtrain.model.cost import BUFFERS
from fluxtrain.model.layers import BLOCKS, linear_layers

NO_CLIPPING = 1e12
"""``optim.max_grad_norm`` that clips nothing."""
NUM_BLOCKS = ModelConfig().depth + ModelConfig().depth_single_blocks
"""Blocks of FLUX.1."""
_ALGORITHMS = {"lora": "lora", "locon": "lora", "lokr": "lokr", "loha": "loha"}
"""Kinds of adapters by LyCORIS' algorithms; those of linear layers alone are the same."""
_PRESETS = {
    **dict.fromkeys(("full", "full-lin", "attn-mlp", "unet-only", "unet-transformer-only")),
    "attn-only": ["img_attn.qkv", "img_attn.proj", "txt_attn.qkv", "txt_attn.proj"],
}
"""FLUX.1's layers by LyCORIS' presets; None: all of the blocks."""
LARGEST_RANK = 1024
"""Of ``adapter.rank``; larger ones of LyCORIS' lokr ask for whole matrices."""
WHOLE = f"above {LARGEST_RANK}: no factor is a product of the rank"
"""What such a rank means."""
_EPOCHS = (
    "epochs are counted in steps here: give --epoch-samples, the images times their repeats, or "
)
"""Why an option in epochs is not written; a field follows."""


def preset(name: str, adapter: bool) -> Values:
    """Return the preset of the model ``name``, a file or a repository: schnell if it says so, else dev."""
    is_schnell = "schnell" in name.lower()
    if adapter:
        return {"preset": "schnell-lora" if is_schnell else "dev-lora"}
    if not is_schnell:
        return {"preset": "dev-finetune"}
    return {"preset": "dev-finetune", "model.guidance_embed": False, "data.text_length": 256}


def lycoris_kind(reading: Reading, option: str) -> str | None:
    """Return the kind of adapter that LyCORIS' algorithm in ``option`` is; None: it is no kind here."""
    return _ALGORITHMS.get(reading.word(option, "lora"))


def lycoris_preset(reading: Reading, name: str) -> Values:
    """Return the layers of LyCORIS' preset; those of a file, or of other models, are lost."""
    if reading.word("network_module", "") != "lycoris.kohya":
        raise IgnoredError("is of lycoris.kohya")
    if (preset := reading.text(name)) not in _PRESETS:
        raise NoCounterpartError("adapter.layers names the layers that are trained")
    return {"adapter.layers": layers} if (layers := _PRESETS[preset]) else {}


def launched(reading: Reading, name: str) -> Values:
    """Return nothing; ConfigError unless as many processes are started here as the option says."""
    if (count := reading.positive(name)) != reading.processes:
        text = (
            f"must be the number of GPUs, --gpus, which is {reading.processes}: give --gpus {count}"
        )
        raise reading.wrong(name, text)
    return reading.noted(name, "is part of schedule.global_batch_size")


def encoder(field: str, tokenizer: str) -> Convert:
    """Return the conversion of the path of a text encoder; FLUX.1's repository has the ``tokenizer``."""

    def convert(reading: Reading, name: str) -> Values:
        path = reading.text(name)
        if not path.endswith(".safetensors"):
            return {field: path}
        return {field: path, f"{field}_tokenizer": tokenizer}

    return convert


BATCH, ACCUMULATION = "train_batch_size", "gradient_accumulation_steps"
"""The options of most trainers that have a process' samples, and the batches of a step."""


def batch(per_process: str = BATCH, accumulation: str = ACCUMULATION) -> Convert:
    """Return the conversion of the samples ``per_process``; another option has the batches of a step."""

    def convert(reading: Reading, name: str) -> Values:
        samples = reading.positive(per_process)
        batches = reading.positive(accumulation, 1)
        return {
            "schedule.global_batch_size": samples * batches * reading.processes,
            "parallel.micro_batch_size": samples,
        }

    return convert


def batch_option(convert: Convert, default: object, note: str) -> Option:
    """Return the row of the option of a process' samples, which `batch` converts."""
    return fields(
        ["schedule.global_batch_size", "parallel.micro_batch_size"], convert, default, note
    )


def steps_of(
    epochs: float, reading: Reading, per_process: str = BATCH, held_out: float = 0.0
) -> int | None:
    """Return the optimizer steps of ``epochs``; None if the samples of an epoch are unknown.

    ``held_out`` is the part of the pictures that is not trained. As these trainers count: an epoch's batches
    are divided among processes, each part rounded up.
    """
    if reading.epoch_samples is None:
        return None
    samples = max(1, math.ceil(reading.epoch_samples * (1 - held_out)))
    batches = math.ceil(samples / reading.positive(per_process))
    accumulated = reading.positive(ACCUMULATION, 1)
    return math.ceil(epochs * math.ceil(batches / reading.processes / accumulated))


def required_steps(steps: int | None, field: str) -> int:
    """Return ``steps`` of `steps_of`; raise NoCounterpartError if ``field`` must be stated instead."""
    if steps is None:
        raise NoCounterpartError(f"{_EPOCHS}--{field}")
    return steps


def no_clipping_at_zero(reading: Reading, name: str) -> Values:
    """Return the clipping of gradients; 0 stands for none."""
    norm = reading.number(name)
    if norm == 0:
        reading.notes[name] = "0 clips nothing"
    return {"optim.max_grad_norm": norm or NO_CLIPPING}


def file_name(reading: Reading, name: str) -> Values:
    """Return the name of the adapter's files, with '-' for what it may not have."""
    text = reading.text(name)
    clean = re.sub(r"[^A-Za-z0-9._-]+", "-", text).lstrip("._-")[:64]
    if not clean and any(map(str.isalnum, text)):
        raise NoCounterpartError("names of files have ASCII letters and digits: adapter_file.name")
    if not clean:
        raise reading.wrong(name, "must have a letter or a digit")
    if clean != text:
        reading.notes[name] = "'-' stands for characters that names of files do not have here"
    return {"adapter_file.name": clean}


def compute_dtype(reading: Reading, name: str) -> Values:
    """Return the data type of forward and backward passes; float16 has no counterpart."""
    known = {"bf16": "bfloat16", "bfloat16": "bfloat16", "no": "float32", "float32": "float32"}
    known |= {"fp32": "float32", "float": "float32"}
    why = "float16 would need a loss scale; here bfloat16, or float32 with precision.compute"
    return {"precision.compute": reading.among(name, known, why)}


def bfloat16_weights(optimizer: str | None) -> Values:
    """Return the data type of trained weights in bfloat16; ``optimizer`` is the name of ours, if any."""
    if optimizer == "schedule_free_adamw":
        raise NoCounterpartError("weights of schedule_free_adamw are float32 here")
    return {"precision.weights": "bfloat16"}


def file_dtype(reading: Reading, name: str) -> Values:
    """Return the data type of the adapter's files."""
    known = {"bf16": "bfloat16", "bfloat16": "bfloat16", "fp16": "float16", "float16": "float16"}
    known |= {"float": "float32", "fp32": "float32", "float32": "float32"}
    why = "the data types of files are bfloat16, float16 and float32"
    return {"adapter_file.dtype": reading.among(name, known, why)}


def kept_checkpoints(reading: Reading, name: str) -> Values:
    """Return the number of checkpoints; 0 stands for all."""
    return {"checkpoint.keep": reading.whole(name) or 10_000}


def swapped_blocks(count: int) -> Values:
    """Return the offloaded blocks of which ``count`` are not on the GPU: two have buffers there."""
    return {"parallel.offload_blocks": min(count + BUFFERS, NUM_BLOCKS)} if count else {}


def square(reading: Reading, name: str, side: object, step: int = 16) -> Values:
    """Return the size of images for ``side``, pixels; raise ConfigError unless it fits FLUX.1."""
    if isinstance(side, str):
        side = int(side) if side.strip().isdecimal() and len(side) < 10 else None
    if isinstance(side, bool) or not isinstance(side, int) or side <= 0:
        raise reading.wrong(name, "must be a number of pixels")
    if side % step:
        nearest = max(side // step, 1) * step
        raise reading.wrong(
            name, f"a side of images must be a multiple of {step}, such as {nearest}"
        )
    return {"data.image_size": side}


def recomputation(reading: Reading, name: str) -> Values:
    """Return the fraction of blocks that recompute their activations: all or none."""
    return {"parallel.activation_checkpointing": 1.0 if reading.flag(name) else 0.0}


IMAGES = (
    *("train_data_dir", "dataset_config", "datasets.folder_path", "datasets.dataset_path"),
    *("backend.instance_data_dir", "backend.dataset_name", "backend.aws_bucket_name"),
)
"""The options of all trainers that become ``data.images``."""


def of_images(
    path: str,
    read: Callable[[Reading, str], object] = Reading.text,
    folders: Sequence[str] = IMAGES,
) -> Convert:
    """Return the conversion of an option of the images, which one of the options ``folders`` names."""

    def convert(reading: Reading, name: str) -> Values:
        value = read(reading, name)
        if not any(map(reading.has, folders)):
            raise NoCounterpartError(f"{path} needs data.images")
        return {path: value}

    return convert


def image_option(
    path: str,
    read: Callable[[Reading, str], object] = Reading.text,
    note: str = "",
    folders: Sequence[str] = IMAGES,
) -> Option:
    """Return the row of an option of the images, for the field at ``path``."""
    return fields([path], of_images(path, read, folders), note=note)


def one_of(*words: str, note: str = "") -> Convert:
    """Return the conversion of one of ``words`` to no field; ``note`` says what it is part of."""

    def convert(reading: Reading, name: str) -> Values:
        reading.choice(name, *words)
        return reading.noted(name, note) if note else {}

    return convert


KONTEXT: Values = {
    "model.condition": "kontext",
    "initial_weights": CONDITIONS["kontext"].weights,
}
"""What has the model of Kontext, if no other option names its weights."""


def flux(reading: Reading, name: str) -> Values:
    """Return nothing for FLUX.1; raise ConfigError for other models."""
    if reading.word(name) != "flux":
        raise reading.wrong(name, "must be flux: other models are not trained here")
    return {}


def must_be(value: bool, why: str) -> Convert:
    """Return the conversion of a flag that must have ``value``, to no field."""

    def convert(reading: Reading, name: str) -> Values:
        if reading.flag(name) != value:
            raise reading.wrong(name, f"must be {str(value).lower()}: {why}")
        return {}

    return convert


def sinks(reading: Reading, word: str, project: str, run: str, default: str) -> Values:
    """Return the sinks that ``word`` asks for: tensorboard, wandb or both; options name project and run."""
    values: dict[str, object] = {}
    if word != "wandb":
        values["logging.tensorboard"] = True
    if word != "tensorboard":
        values["logging.wandb.project"] = reading.text(project, default)
        if reading.has(run):
            values["logging.wandb.name"] = reading.text(run)
    return values


CROPS, CAPTIONS = 4, 8
"""Copies that are encoded where the other trainer changes a picture or a caption whenever it is read."""
NOTE = "copies are encoded beforehand: data.variants says how many"


def require_images(reading: Reading) -> None:
    """Raise NoCounterpartError for variants of pictures that no option names."""
    if not any(map(reading.has, IMAGES)):
        raise NoCounterpartError("data.variants needs data.images")


def setting(
    path: str, read: Callable[[Reading, str], object], off: float = 0, beside: Values | None = None
) -> Convert:
    """Return the conversion of a setting of images to the field at ``path``, unless it is ``off``.

    The fields ``beside`` it are set with it.
    """

    def convert(reading: Reading, name: str) -> Values:
        value = read(reading, name)
        if value == off:
            return {}
        require_images(reading)
        return {path: value, **(beside or {})}

    return convert


def if_on(values: Values, note: str = NOTE) -> Option:
    """Return the row of a flag of images that sets ``values``."""

    def convert(reading: Reading, name: str) -> Values:
        if not reading.flag(name):
            return {}
        require_images(reading)
        return values

    return fields(values, convert, note=note)


_CAPTIONS = {"data.variants.captions": CAPTIONS}
FLIPPED = if_on({"data.variants.flip": True})
CROPPED = if_on({"data.variants.crops": CROPS})
SHUFFLED = if_on({"data.variants.shuffle_caption": True, **_CAPTIONS})
DROPPED = fields(
    ("data.variants.tag_dropout", *_CAPTIONS),
    setting("data.variants.tag_dropout", Reading.number, beside=_CAPTIONS),
    note=NOTE,
)
"""Rows of options of several trainers."""


_ADAMW: Values = {
    "optim.weight_decay": 0.01,
    "optim.beta1": 0.9,
    "optim.beta2": 0.999,
    "optim.epsilon": 1e-8,
}
_LION: Values = {"optim.weight_decay": 0.0, "optim.beta1": 0.9, "optim.beta2": 0.99}
_UNDECAYED: Values = {**_ADAMW, "optim.weight_decay": 0.0}
DEFAULTS: Mapping[str, Values] = {
    "adamw": _ADAMW,
    "adamw_8bit": _ADAMW,
    "lion": _LION,
    "prodigy": _UNDECAYED,
    "adafactor": {"optim.weight_decay": 0.0},
    "schedule_free_adamw": _UNDECAYED,
}
"""Settings that the optimizers' packages have, by our names."""
OPTIMIZER_FIELDS = ("optim.name", *_ADAMW)
"""The fields that the choice of an optimizer sets."""


_PRODIGY = ("prodigy",)
_SETTINGS: Mapping[str, tuple[str, tuple[str, ...], Callable[[Reading, str], object]]] = {
    "beta1": ("optim.beta1", (), Reading.number),
    "beta2": ("optim.beta2", (), Reading.number),
    "weight_decay": ("optim.weight_decay", (), Reading.number),
    "eps": ("optim.epsilon", ("adamw", "prodigy"), Reading.number),
    "d_coef": ("optim.prodigy.d_coef", _PRODIGY, Reading.number),
    "d0": ("optim.prodigy.d0", _PRODIGY, Reading.number),
    "growth_rate": ("optim.prodigy.growth_rate", _PRODIGY, Reading.number),
    "use_bias_correction": ("optim.prodigy.bias_correction", _PRODIGY, Reading.flag),
    "safeguard_warmup": ("optim.prodigy.safeguard_warmup", _PRODIGY, Reading.flag),
}
"""Arguments of the packages' optimizers: the field, the optimizers that have it if not all, and its type."""


@dataclass(frozen=True)
class Optimizers:
    """The optimizers of one trainer."""

    option: str
    """The option that names one."""
    known: Mapping[str, str]
    """Ours by the trainer's names, in small letters."""
    over: Values = field(default_factory=dict)
    """Settings that the trainer has instead of the packages'."""
    refuse: Callable[[Reading, str], str] = lambda reading, name: ""
    """Returns why ours, by its name, is not the same beside other options; empty: it is."""

    def ours(self, reading: Reading) -> str | None:
        """Return the name of our optimizer; None if there is no counterpart."""
        name = self.known.get(reading.word(self.option))
        return None if name is None or self.refuse(reading, name) else name

    def convert(self, reading: Reading, option: str) -> Values:
        """Return the optimizer with its settings."""
        word = reading.word(option)
        name = self.known.get(word)
        why = self.refuse(reading, name) if name else "has no counterpart"
        if name is None or why:
            raise NoCounterpartError(f"{why}; here adamw, with the preset's learning rate")
        if word.replace("_", "") != name.replace("_", ""):
            states = "of 8 bits" if name == "adamw_8bit" else "float32"
            reading.notes[option] = f"the same update; its states are {states} here"
        defaults = DEFAULTS[name]
        over = {path: value for path, value in self.over.items() if path in defaults}
        return {"optim.name": name, **defaults, **over}

    def setting(
        self, path: str, *only: str, read: Callable[[Reading, str], object] = Reading.number
    ) -> Convert:
        """Return the conversion of a setting of the optimizer in use, of the optimizers ``only`` if any."""

        def convert(reading: Reading, option: str) -> Values:
            self._require(reading, option, only)
            return {path: read(reading, option)}

        return convert

    def rows(self, prefix: str, names: str) -> dict[str, Option]:
        """Return the rows of the settings ``names``, which blanks separate, of our optimizers' packages."""
        return {
            f"{prefix}.{name}": fields([path], self.setting(path, *only, read=read))
            for name in names.split()
            for path, only, read in [_SETTINGS[name]]
        }

    def betas(self, reading: Reading, option: str) -> Values:
        """Return the decay rates, two numbers."""
        self._require(reading, option, ("adamw", "lion", "prodigy", "schedule_free_adamw"))
        value = reading.value(option)
        parts = value.strip("()[] ").split(",") if isinstance(value, str) else value
        try:
            numbers = [float(part) for part in parts] if isinstance(parts, list) else []
        except (TypeError, ValueError):
            numbers = []
        if len(numbers) != 2:
            raise reading.wrong(option, "must be two numbers, such as 0.9,0.999")
        first, second = numbers[0], numbers[1]
        return {"optim.beta1": first, "optim.beta2": second}

    def _require(self, reading: Reading, option: str, only: tuple[str, ...]) -> None:
        """Raise NoCounterpartError unless the optimizer in use is here, and one of ``only`` if any."""
        name = self.ours(reading)
        if name is None:
            raise NoCounterpartError(f"is a setting of {reading.text(self.option)}")
        if only and name.removesuffix("_8bit") not in only:
            raise NoCounterpartError(f"{reading.text(self.option)} has no such setting here")


def ema(flag: str) -> Convert:
    """Return the conversion of the decay of an average of the weights, which ``flag`` switches on."""

    def convert(reading: Reading, option: str) -> Values:
        decay = reading.number(option)
        if reading.is_on(flag):
            return {"optim.ema_decay": decay}
        return reading.noted(option, f"only with {flag}")

    return convert


SELECTION_FIELDS = ("adapter.double_blocks", "adapter.single_blocks", "adapter.layers")
_ROOT = "transformer."


def selection(wanted: Sequence[str], unwanted: Sequence[str] = ()) -> Values:
    """Return the fields that select the layers whose names have a part that is ``wanted`` and none unwanted.

    Without ``wanted`` parts all are wanted. Raises NoCounterpartError for what the fields cannot say.
    """
    chosen: dict[str, dict[int, frozenset[str]]] = {blocks: {} for blocks in BLOCKS}
    for name, (_, parts) in linear_layers(ModelConfig()).items():
        blocks, number, layer = name.split(".", 2)
        hits = [_is_chosen(_ROOT + part, wanted, unwanted) for part, _ in parts]
        if len(set(hits)) > 1:
            text = (
                f"{name} is one layer here, of which they select {sum(hits)} of {len(hits)} parts"
            )
            raise NoCounterpartError(text)
        if hits[0]:
            before = chosen[blocks].get(int(number), frozenset())
            chosen[blocks][int(number)] = before | {layer}
    layers = set[str]()
    for found in chosen.values():
        if len(set(found.values())) > 1:
            raise NoCounterpartError("adapter.layers are the same in all selected blocks")
        layers.update(*found.values())
    if not layers:
        raise NoCounterpartError("no layer of FLUX.1's blocks has such a name")
    names: Sequence[str] = get_args(LayerName)
    return {
        "adapter.double_blocks": _blocks(chosen["double_blocks"], ModelConfig().depth),
        "adapter.single_blocks": _blocks(
            chosen["single_blocks"], ModelConfig().depth_single_blocks
        ),
        "adapter.layers": []
        if layers == set(names)
        else [name for name in names if name in layers],
    }


def _is_chosen(name: str, wanted: Sequence[str], unwanted: Sequence[str]) -> bool:
    is_wanted = not wanted or any(part in name for part in wanted)
    return is_wanted and not any(part in name for part in unwanted)


def _blocks(numbers: Iterable[int], count: int) -> str:
    """Return ``numbers`` as fields have them: all, none, or numbers and ranges."""
    ordered = sorted(numbers)
    if len(ordered) in (0, count):
        return "all" if ordered else "none"
    ranges = list[str]()
    for _, group in groupby(enumerate(ordered), lambda pair: pair[1] - pair[0]):
        run = [number for _, number in group]
        ranges.append(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}")
    return ",".join(ranges)


PROMPT_NOTE = "is in the lines of sampling.prompt_file"


def line(reading: Reading, name: str, text: str, options: Mapping[str, object]) -> str:
    """Return the line of the prompt ``text``, of the option ``name``, with ``options`` by their letters.

    Raises ConfigError for a text that a line cannot begin with.
    """
    prompt = " ".join(text.split())
    if not prompt or prompt.startswith(("#", "--")) or " --" in prompt:
        raise reading.wrong(name, "must begin with text, without # and --, for --prompt-file")
    return " ".join([prompt, *(f"--{name} {value}" for name, value in options.items())])


def of_lines(option: str, read: Callable[[Reading, str], object] = Reading.value) -> Convert:
    """Return the conversion of a setting of images that only lines of a file have, as ``option``."""

    def convert(reading: Reading, name: str) -> Values:
        read(reading, name)
        if reading.prompt_file is None:
            raise NoCounterpartError(f"lines of sampling.prompt_file have {option}: --prompt-file")
        return reading.noted(name, PROMPT_NOTE)

    return convert


def written(reading: Reading, lines: Sequence[str]) -> Values:
    """Return the field that names the file, whose ``lines`` are kept in ``reading``."""
    reading.prompts += lines
    return {"sampling.prompt_file": reading.prompt_file}


def near(name: object, folder: Path, *suffixes: str) -> Path | None:
    """Return the file ``name`` in ``folder``, below the one above it, or there by its last part."""
    if not isinstance(name, str) or not name.lower().endswith(suffixes):
        return None
    places = (folder / name, folder.parent / name, folder / re.split(r"[/\\]", name)[-1])
    try:
        return next((place for place in places if place.is_file()), None)
    except OSError:
        return None


_OF_DATA_SETS = {"batch_size": "train_batch_size"} | {
    name: name
    for name in (
        *("resolution", "enable_bucket", "min_bucket_reso", "max_bucket_reso"),
        *("bucket_reso_steps", "bucket_no_upscale"),
    )
}


def with_data_sets(options: Mapping[str, object], folder: Path) -> dict[str, object]:
    """Return ``options`` of sd-scripts with those of the data set config that they name, which win there.

    It is read if it is found from ``folder``. Of several data sets, what is the same in all counts, and the
    largest batch.
    """
    found = dict(options)
    file = near(options.get("dataset_config"), folder, ".toml", ".json")
    document = read_document(file) if file else None
    general, sets = (
        document.get(key) if isinstance(document, dict) else None for key in ("general", "datasets")
    )
    shared = general if isinstance(general, dict) else {}
    tables = [shared | it for it in sets if isinstance(it, dict)] if isinstance(sets, list) else []
    for name, option in _OF_DATA_SETS.items():
        values = [table.get(name) for table in tables]
        if values and values[0] is not None and all(value == values[0] for value in values):
            found[option] = values[0]
        elif name == "batch_size" and (sizes := [it for it in values if type(it) is int]):
            found[option] = max(sizes)
    return found
