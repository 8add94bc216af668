"""Conversions that several trainers' tables share."""

from __future__ import annotations

import math
import re
from collections.abc import Callable

from fluxtrain.contract.run.model import ModelConfig
from fluxtrain.model.offloaded_blocks import BUFFERS
from fluxtrain.other_trainers.option import Convert, Values
from fluxtrain.other_trainers.reading import NoCounterpartError, Reading

NO_CLIPPING = 1e12
"""``optim.max_grad_norm`` that clips nothing."""
NUM_BLOCKS = ModelConfig().depth + ModelConfig().depth_single_blocks
"""Blocks of FLUX.1."""
EPOCHS = (
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


def encoder(field: str, tokenizer: str) -> Convert:
    """Return the conversion of the path of a text encoder; FLUX.1's repository has the ``tokenizer``."""

    def convert(reading: Reading, name: str) -> Values:
        path = reading.text(name)
        if not path.endswith(".safetensors"):
            return {field: path}
        return {field: path, f"{field}_tokenizer": tokenizer}

    return convert


def batch(per_process: str, accumulation: str) -> Convert:
    """Return the conversion of the samples ``per_process``; another option has the batches of a step."""

    def convert(reading: Reading, name: str) -> Values:
        samples = reading.positive(per_process)
        batches = reading.positive(accumulation) if reading.has(accumulation) else 1
        return {
            "schedule.global_batch_size": samples * batches * reading.processes,
            "parallel.micro_batch_size": samples,
        }

    return convert


def steps_of(
    epochs: float, reading: Reading, per_process: str, accumulation: str, held_out: float = 0.0
) -> int | None:
    """Return the optimizer steps of ``epochs``; None if the samples of an epoch are unknown.

    ``held_out`` is the part of the pictures that is not trained. As these trainers count: an epoch's batches
    are divided among processes, each part rounded up.
    """
    if reading.epoch_samples is None:
        return None
    samples = max(1, math.ceil(reading.epoch_samples * (1 - held_out)))
    batches = math.ceil(samples / reading.positive(per_process))
    accumulated = reading.positive(accumulation) if reading.has(accumulation) else 1
    return math.ceil(epochs * math.ceil(batches / reading.processes / accumulated))


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


def two_numbers(reading: Reading, name: str) -> tuple[float, float]:
    """Return the value of ``name``, a list or a text such as "0.9,0.999", as two numbers."""
    value = reading.value(name)
    parts = value.strip("()[] ").split(",") if isinstance(value, str) else value
    try:
        numbers = [float(part) for part in parts] if isinstance(parts, list) else []
    except (TypeError, ValueError):
        numbers = []
    if len(numbers) != 2:
        raise reading.wrong(name, "must be two numbers, such as 0.9,0.999")
    return numbers[0], numbers[1]


def of_images(folders: str, path: str, read: Callable[[Reading, str], object]) -> Convert:
    """Return the conversion of an option of the images, which one of the options ``folders`` names."""

    def convert(reading: Reading, name: str) -> Values:
        value = read(reading, name)
        if not any(map(reading.has, folders.split())):
            raise NoCounterpartError(f"{path} needs data.images")
        return {path: value}

    return convert
