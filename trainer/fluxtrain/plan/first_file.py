"""The first file of a LoRA, which ``fluxtrain init`` writes: from a folder of pictures and the GPUs."""

from __future__ import annotations

import json
import math
import re
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import yaml

from fluxtrain.contract.run.config import AUTO, RunConfig, Sharding
from fluxtrain.contract.run.model import CONDITIONS, Condition, ModelConfig
from fluxtrain.contract.run.resolve import merge, resolve
from fluxtrain.data.pictures.faults import unread_tables
from fluxtrain.data.pictures.inspection import Inspection
from fluxtrain.encode.files import encoder_bytes
from fluxtrain.errors import UNSET, ConfigError
from fluxtrain.model.cost import host_sizes
from fluxtrain.plan.estimate import make_plan
from fluxtrain.plan.table import duration, gib
from fluxtrain.runtime.devices import (
    GPUS,
    Gpu,
    find_device,
    find_gpu,
    missing_gpus,
    num_visible,
    plain,
)
from fluxtrain.runtime.progress import binary, counted
from fluxtrain.state.free_memory import memory_limit
from fluxtrain.train.micro_batch import Room, settle_micro_batch, step_memory


@dataclass(frozen=True)
class Base:
    """A published model, and how a run names it."""

    name: str
    preset: str
    run: Mapping[str, Any] = field(default_factory=dict)
    """What differs from the preset."""
    controls: str = ""
    """Folder beside ``target`` of what its condition takes; "" if it has no condition."""
    needs_controls: bool = False
    side: int | None = None
    """The only side of its images; None: one of `SIDES`."""
    learning_rate: float = 1e-4
    on_cpu: bool = False
    """Whether it is small enough to train without a GPU."""

    @staticmethod
    def conditioned(name: str, condition: Condition) -> Base:
        """Return the base that takes ``condition``, whose ``model.condition`` is ``name``."""
        plain = ModelConfig().in_channels
        channels = condition.token_channels(plain)
        changes = {} if channels == plain else {"in_channels": channels}
        return Base(
            f"FLUX.1 {condition.name} [dev]",
            "dev-lora",
            {"model": {"condition": name, **changes}},
            condition.folder,
            needs_controls=not condition.has_hole,
        )

    def images_of(self, folder: Path, images: str) -> dict[str, Any]:
        """Return the fields of ``data`` for ``images`` in ``folder``, which are pairs if it takes such.

        Raises ConfigError if they must be and are not, or are and cannot be.
        """
        names = ("target", self.controls)
        missing = [name for name in names if not name or not (folder / name).is_dir()]
        if not missing:
            return {"images": f"{images}/target", "controls": f"{images}/{self.controls}"}
        if self.needs_controls:
            text = f"lacks {' and '.join(missing)}: {self.name} makes the pictures of one from the other's"
            raise ConfigError("PICTURES", str(folder), text)
        others = (
            sorted(each.name for each in folder.iterdir() if each.is_dir())
            if folder.is_dir()
            else []
        )
        if "target" in others and len(others) > 1:
            text = f"holds pairs, in {', '.join(others)}: name {images}/target to train its pictures alone"
            takes = [
                f"{name} takes {each.controls}" for name, each in BASES.items() if each.controls
            ]
            raise ConfigError("PICTURES", str(folder), f"{text}; of bases, {', '.join(takes)}")
        return {"images": images}


BASES = {
    "dev": Base("FLUX.1 [dev]", "dev-lora"),
    "schnell": Base("FLUX.1 [schnell]", "schnell-lora"),
    **{name: Base.conditioned(name, condition) for name, condition in CONDITIONS.items()},
    "demo": Base(
        "The model of make run",
        "openmoji",
        {
            "initial_weights": "../runs/openmoji",
            "data": {"validation": "none"},
            "evaluation": {"every_samples": 0, "at_start": False, "at_end": False},
        },
        side=64,
        learning_rate=2e-3,
        on_cpu=True,
    ),
}

# What a step needs less memory by, from the cheapest on: recomputation, 8 bits, blocks in host memory.
_RUNGS: list[tuple[str, float, int]] = [
    *(("compute", fraction, 0) for fraction in (0.0, 0.25, 0.5, 0.75, 1.0)),
    *(("fp8", 1.0, blocks) for blocks in (0, 16, 32, 57)),
]
_BATCH = 4
_WARMUP = 50
"""Steps at most; a short training has a quarter of its own."""
_LEAST_SAMPLES, _SAMPLES_EACH, _EACH_OF_MANY = 4000, 200, 10
"""Samples of a training: so many of each of a few pictures, at least the first, fewer each of many."""
SIDES = (1024, 768, 512)
"""Sides of the squares that pictures may have as many pixels as, the largest first."""
_ENLARGED = 0.9
"""Part of a side from which on a picture is enlarged without being blurred."""
_PROMPTS = 4
_NAMED = 3
"""Files of each kind that a message names."""
_HELD_OUT = 0.1
"""Part of the pairs that are not trained, but evaluated and sampled: their prompts need pictures."""
_WORDS = (AUTO, "fp8", "none", *CONDITIONS, *(base.preset for base in BASES.values()))
"""Strings that the file has without quotes."""


@dataclass(frozen=True)
class Machine:
    """The GPUs of a training, or, with none per node, this machine's CPU."""

    gpu: Gpu
    nodes: int
    gpus_per_node: int

    @staticmethod
    def without_gpu() -> Machine:
        return Machine(Gpu("CPU", 0.0, None, memory_limit()), 1, 0)

    @property
    def num_ranks(self) -> int:
        """Return the number of GPUs, or 1."""
        return self.nodes * self.ranks_per_node

    @property
    def ranks_per_node(self) -> int:
        """Return the GPUs of a node, or 1."""
        return self.gpus_per_node or 1

    @property
    def _room(self) -> Room:
        memory = self.gpu.memory_bytes if self.gpus_per_node else None
        return Room.of(memory, self.ranks_per_node)

    def __str__(self) -> str:
        if not self.gpus_per_node:
            return "this machine's CPU"
        nodes = f"{self.nodes} nodes of " if self.nodes > 1 else ""
        return f"{nodes}{self.gpus_per_node} × {self.gpu.name}"

    def settled(self, config: RunConfig) -> RunConfig:
        """Return ``config`` with the micro batch of these GPUs."""
        return settle_micro_batch(config, self.num_ranks, self.ranks_per_node, self._room)

    def memory(self, config: RunConfig) -> int | None:
        """Return the bytes that a step of ``config`` needs of each GPU; None if they do not fit.

        The encoders must fit too: the pictures and captions are encoded before.
        """
        room = self._room
        encoding = config.data.model_copy(update={"source": "images"})
        if encoder_bytes(config.model_copy(update={"data": encoding})) > room.usable:
            return None
        sharding = Sharding.of(config, self.num_ranks, self.ranks_per_node)
        size = self.settled(config).parallel.most_samples
        used = step_memory(config, sharding, size, copies_ahead=room.is_gpu).total
        return used if used <= room.usable else None


def gpu_here() -> Gpu:
    """Return the smallest GPU of this machine; raise ConfigError if torch sees none."""
    if not num_visible():
        reason = missing_gpus() or "torch sees no GPU here"
        text = f"{reason}; name the one that it will run on, such as --gpu=rx7900xtx: {_known()}"
        text += "; or --base=demo, the model of `make run`, which trains on a CPU"
        raise ConfigError("--gpu", UNSET, text)
    found = (torch.cuda.get_device_properties(index) for index in range(num_visible()))
    smallest = min(found, key=lambda each: each.total_memory)
    known = find_device(smallest.name)
    peaks = (known.peak_flops, known.fp8_flops) if known else (0.0, None)
    return Gpu(known.name if known else smallest.name, *peaks, int(smallest.total_memory))


def named_gpu(name: str) -> Gpu:
    """Return the GPU model ``name``; raise ConfigError if it is none, such as a CPU or several."""
    if plain(name) == "cpu":
        text = "is no GPU; --base=demo, the model of `make run`, trains on a CPU"
        raise ConfigError("--gpu", name, text)
    if (several := re.fullmatch(r"(\d+)[x*×](.+)", plain(name))) and several[2] in map(plain, GPUS):
        text = f"must be one model: --gpu={several[2]} --gpus-per-node={several[1]}"
        raise ConfigError("--gpu", name, text)
    return find_gpu(name)


def _known() -> str:
    return ", ".join(map(plain, GPUS))


def base_of(name: str) -> Base:
    """Return the model ``name``; raise ConfigError unless a LoRA of it can be trained."""
    if name.lower() not in BASES:
        raise ConfigError("--base", name, f"must be {' or '.join(BASES)}")
    return BASES[name.lower()]


def first_run(
    images: Mapping[str, Any],
    found: Inspection,
    name: str,
    trigger: str | None,
    base: Base,
    machine: Machine,
) -> dict[str, Any]:
    """Return ``spec.run`` of a LoRA on the pictures ``found`` by ``images``, fields of ``data``.

    Raises ConfigError if they have neither captions nor a ``trigger``, or nothing fits ``machine``, or one
    cannot be held out.
    """
    if base.controls and len(found.used) < 2:
        text = f"has {counted(len(found.used), 'picture')} to train: {base.name} needs two, one to look at"
        reasons = (f"; {name}: {why}" for name, why in islice(found.skipped.items(), _NAMED))
        raise ConfigError("PICTURES", str(images["images"]), "".join([text, *reasons]))
    run_length = length(len(found.used), machine.num_ranks)
    repeats, schedule = run_length["data"]["repeats"], run_length["schedule"]
    batch = schedule["global_batch_size"]
    period = max(50, round(schedule["epochs"] * repeats * len(found.used) / batch / 200) * 50)
    captions = [look.picture.file.caption for look in found.used]
    prefix = _prefix(captions, trigger, found)
    run: dict[str, Any] = {
        "preset": base.preset,
        **base.run,
        "data": {
            **base.run.get("data", {}),
            **images,
            "repeats": repeats,
            **({"caption_prefix": prefix} if prefix else {}),
            **({"class_tokens": trigger} if trigger and not prefix and not all(captions) else {}),
        },
        "adapter": {"rank": 16, "alpha": 16.0},
        "adapter_file": {"name": name, "every_steps": period},
        "optim": {"learning_rate": base.learning_rate},
        "schedule": schedule,
        "parallel": {"micro_batch_size": AUTO},
        "sampling": {
            "every_steps": period,
            "at_start": True,
            "at_end": True,
            "prompts": _prompts(captions, prefix, trigger),
        },
    }
    if base.controls:
        run["data"]["validation_split"] = _HELD_OUT
        run["evaluation"] = {"every_samples": batch * period}
        run["sampling"] |= {"prompts": [], "num_prompts": _PROMPTS}
    return merge(run, fitting(run, machine))


def length(pictures: int, num_ranks: int) -> dict[str, Any]:
    """Return the repeats and the schedule of a training on so many ``pictures``."""
    batch = max(_BATCH, num_ranks)
    samples = min(_SAMPLES_EACH * pictures, max(_LEAST_SAMPLES, _EACH_OF_MANY * pictures))
    repeats = 10 if pictures < 10 * batch else 1
    epochs = max(1, round(samples / (pictures * repeats)))
    warmup = min(_WARMUP, math.ceil(epochs * repeats * pictures / batch) // 4)
    schedule = {"epochs": epochs, "global_batch_size": batch, "warmup_steps": warmup}
    return {"data": {"repeats": repeats}, "schedule": schedule}


def is_prompt(text: str) -> bool:
    """Return whether ``text`` can begin a prompt, which has no options."""
    has_controls = any(unicodedata.category(each) == "Cc" for each in text)
    return not has_controls and "--" not in text and not text.startswith("#")


def _prefix(captions: Sequence[str], trigger: str | None, found: Inspection) -> str:
    """Return what comes before the captions, so that each has the ``trigger``."""
    if trigger is None:
        if not any(captions):
            text = "no picture has a caption: give a word that stands for them"
            hint = "".join(f"; {line}" for line in unread_tables(found.left_out, _NAMED))
            raise ConfigError("--trigger", UNSET, f"{text}, such as --trigger=ohwx{hint}")
        return ""
    return "" if all(map(_has(trigger), filter(None, captions))) and any(captions) else trigger


def _has(trigger: str) -> Callable[[str], object]:
    """Return what finds ``trigger`` in a caption, as whole words in any case."""
    return re.compile(rf"(?<!\w){re.escape(trigger.strip())}(?!\w)", re.IGNORECASE).search


def caption_notes(config: RunConfig, found: Inspection) -> Iterator[str]:
    """Yield what is trained of the pictures ``found`` without a caption, if only some have none.

    Also tables that are not read, and how many captions have the prefix already.
    """
    yield from unread_tables(found.left_out, _NAMED)
    count, lacking, prefix = len(found.used), len(found.without_caption), config.data.caption_prefix
    if 0 < lacking < count:
        caption = found.without_caption[0].picture.caption
        prompt = (
            repr(caption) if caption else "the empty prompt; --trigger=WORD names what they show"
        )
        yield f"{lacking} of {count} pictures without a caption: trained on {prompt}"
    captions = [look.picture.file.caption for look in found.used]
    if prefix and (doubled := sum(map(bool, map(_has(prefix), captions)))):
        yield f"{doubled} of {count - lacking} captions with {prefix!r} already, which they have twice now"


def _prompts(captions: Sequence[str], prefix: str, trigger: str | None) -> list[str]:
    """Return some of the ``captions`` as they are trained, or prompts with the ``trigger``."""
    own = list(dict.fromkeys(" ".join(caption.split()) for caption in captions if caption))
    own = [each for each in own if len(prefix) + len(each) < 1000 and is_prompt(each)]
    if own:
        chosen = own[:: -(-len(own) // _PROMPTS)]
        return [f"{prefix} {caption}".strip() for caption in chosen]
    if trigger is None:  # no caption can be a prompt
        return ["a photo", "a drawing"]
    return [trigger, f"a photo of {trigger}", f"a drawing of {trigger}"]


def sizes(found: Inspection) -> dict[str, Any]:
    """Return the fields of ``data`` for the sizes of a training on the pictures ``found``, {} without any.

    A square has as many pixels as at least half of the pictures have; other shapes have buckets.
    """
    sides = sorted((look.width * look.height) ** 0.5 for look in found.used)
    if not sides:
        return {}
    middle = sides[len(sides) // 2]
    side = next((side for side in SIDES if middle >= _ENLARGED * side), SIDES[-1])
    are_square = all(look.width == look.height for look in found.used)
    return {"image_size": side, **({} if are_square else {"buckets": {}})}


def fitting(run: Mapping[str, Any], machine: Machine) -> dict[str, Any]:
    """Return the first changes with which ``run`` fits; raise ConfigError if none do."""
    for rung in _RUNGS if machine.gpus_per_node else _RUNGS[:1]:
        changes = _changes(*rung)
        config = resolve(merge(run, changes))
        if machine.memory(config) is not None:
            return changes
    by_memory = sorted(GPUS.values(), key=lambda gpu: gpu.memory_bytes)
    least = next(gpu for gpu in by_memory if replace(machine, gpu=gpu).memory(config))
    own, enough = binary(machine.gpu.memory_bytes), binary(least.memory_bytes)
    text = f"has {own}, which no setting fits; the smallest that does is {least.name}, {enough}"
    raise ConfigError("--gpu", machine.gpu.name, text)


def _changes(base_dtype: str, recomputed: float, offloaded: int) -> dict[str, Any]:
    parallel = {"activation_checkpointing": recomputed} if recomputed else {}
    if offloaded:
        parallel["offload_blocks"] = offloaded
    adapter = {"base_dtype": base_dtype} if base_dtype != "compute" else {}
    return {"adapter": adapter, "parallel": parallel}


def summary(config: RunConfig, pictures: int, steps: int, machine: Machine) -> str:
    """Return what the run of ``steps`` is, in one line for people."""
    used = machine.memory(config)
    assert used is not None, "it was chosen to fit"
    batch, total = config.schedule.global_batch_size, machine.gpu.memory_bytes
    parts = [
        counted(pictures, "picture"),
        f"{counted(steps, 'step')} of {batch} on {machine}",
        f"{gib(used)} of {gib(total)} by plan",
    ]
    if machine.gpu.name in GPUS:
        plan = make_plan(config, machine.nodes, machine.gpus_per_node, machine.gpu.name)
        if plan.samples_per_second:
            parts.append(f"about {duration(steps * batch / plan.samples_per_second)}")
    return ", ".join(parts)


def file_text(
    name: str, run: Mapping[str, Any], config: RunConfig, about: str, machine: Machine, base: Base
) -> str:
    """Return the file of ``run``, whose resolved form is ``config``, with comments."""
    gpu = f" --gpu {plain(machine.gpu.name)}" if machine.gpu.name in GPUS else ""
    head = [
        f"# {base.name}, a LoRA: {about}.",
        f"# Override any field (docs/config.md); `fluxtrain plan FILE{gpu}` then says whether it still fits.",
        "apiVersion: fluxtrain.dev/v1alpha1",
        "kind: FluxTraining",
        f"metadata: {{name: {name if yaml.safe_load(name) == name else json.dumps(name)}}}",
        "spec:",
    ]
    if machine.gpus_per_node:
        head.append(f"  nodes: {{min: {machine.nodes}, max: {machine.nodes}}}")
        head.append(f"  gpusPerNode: {machine.gpus_per_node}")
    head.append("  run:")
    comments = _comments(config, machine)
    return "\n".join([*head, *_lines(run, "", 4, comments)]) + "\n"


def _comments(config: RunConfig, machine: Machine) -> dict[str, str]:
    """Return what the file says of its fields, by their paths."""
    side = config.data.image_size
    shapes = f"; other shapes have as many pixels as {side} × {side}" if config.data.buckets else ""
    size = machine.settled(config).parallel.most_samples
    offloaded = binary(machine.ranks_per_node * sum(host_sizes(config)))
    return {
        "preset": f"with {config.initial_weights}, below --models",
        "model.condition": "the picture that the model takes beside the prompt",
        "data.controls": "for each picture one of its name: what it is made from",
        "data.validation_split": "not trained; their loss shows when to stop",
        "data.images": "a path, or a folder below the data volume (--data)",
        "data.image_size": f"pixels{shapes}",
        "data.buckets": "keep the shape of each picture",
        "data.repeats": "times that an epoch has each picture, so that batches are full",
        "data.caption_prefix": "before each caption: say it in prompts too",
        "adapter.base_dtype": "frozen weights in 8 bits",
        "adapter_file.every_steps": "a file to try, next to the last one",
        "schedule.global_batch_size": "samples of a step, of all GPUs together",
        "optim.learning_rate": "of the AdamW that trains the adapters",
        "parallel.micro_batch_size": f"samples at a time, here {size}: as many as fit each GPU",
        "parallel.activation_checkpointing": "part of the blocks computed twice, for less memory",
        "parallel.offload_blocks": f"their weights take {offloaded} of host memory",
        "sampling.every_steps": "images of the prompts below"
        if config.sampling.prompts
        else "images of some that are not trained",
    }


def _lines(
    values: Mapping[str, Any], above: str, indent: int, comments: Mapping[str, str]
) -> Iterator[str]:
    """Yield ``values`` as lines of YAML; strings are JSON's, which YAML reads."""
    for key, value in values.items():
        path, start = f"{above}{key}", f"{' ' * indent}{key}:"
        comment = f" # {comments[path]}" if comments.get(path) else ""
        if value == []:
            continue
        if isinstance(value, Mapping) and value:
            yield start + comment
            yield from _lines(value, f"{path}.", indent + 2, comments)
        elif isinstance(value, list):
            yield start + comment
            yield from (f"{' ' * indent}  - {_scalar(each)}" for each in value)
        else:
            yield f"{start} {_scalar(value)}{comment}"


def _scalar(value: Any) -> str:
    return str(value) if value in _WORDS else json.dumps(value, ensure_ascii=False)
