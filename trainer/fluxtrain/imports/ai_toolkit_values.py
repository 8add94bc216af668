"""Conversions of ai-toolkit's options that depend on others."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any

from fluxtrain.errors import ConfigError
from fluxtrain.imports import common
from fluxtrain.imports.common import Optimizers, selection
from fluxtrain.imports.kinds import is_kontext
from fluxtrain.imports.table import Convert, IgnoredError, NoCounterpartError, Reading, Values

_CONDITIONS = (
    *("control_path", "control_path_1", "control_path_2", "control_path_3", "controls"),
    *("inpaint_path", "clip_image_path", "unconditional_path"),
)
"""Options of any data set that ask for another kind of training."""
MORE_PROCESSES, MORE_DATASETS = "process[1]", "datasets[1]"
REGULARISATION, SAMPLES = "datasets.is_reg", "sample.samples"
OFFLOADED = "model.layer_offloading_transformer_percent"
_FLOAT8 = ("qfloat8", "float8")
_SCHEDULER, _PARAMS = "train.lr_scheduler", "train.lr_scheduler_params"
_DIMENSION = ("network.rank", "network.linear")
_RANK = 4
"""The rank if none is given."""
_NAMES = {"adamw": "adamw", "adamw8": "adamw_8bit", "adamw8bit": "adamw_8bit"}
_NAMES |= {"lion": "lion", "lion8bit": "lion", "adafactor": "adafactor"}
_NAMES |= {"prodigy": "prodigy", "prodigy8bit": "prodigy"}
_SMALLEST_FACTOR = 0.1
"""Learning rate below which ai-toolkit gives Prodigy 1.0."""
_SAMPLINGS = {"sigmoid": "sigmoid", "linear": "uniform", "flux_shift": "flux_shift"}
_BATCH, _STEPS = "train.batch_size", "train.gradient_accumulation_steps"


def _other_settings(reading: Reading, name: str) -> str:
    """Return why the optimizer ``name`` of ours is not the same beside optimizer_params; empty: it is."""
    if name == "adafactor":
        for setting in ("relative_step", "scale_parameter"):
            if reading.is_on(f"train.optimizer_params.{setting}"):
                return f"only without {setting}"
    return ""


OPTIMIZERS = Optimizers("train.optimizer", _NAMES, {"optim.epsilon": 1e-6}, refuse=_other_settings)


def layers(reading: Reading, name: str) -> Values:
    """Return the layers that both options of names select."""
    place = name.rpartition(".")[0]
    only, ignore = f"{place}.only_if_contains", f"{place}.ignore_if_contains"
    given = [reading.texts(each) if reading.has(each) else [] for each in (only, ignore)]
    return selection(*given)


def flatten(reading: Reading) -> dict[str, object]:
    """Return the options of the first process, by names with dots.

    Of several data sets, only one is taken apart, too. Null and empty text are what is not given.
    """
    options = dict(reading.given)
    processes = options.pop("config.process", None)
    if (
        not isinstance(processes, list)
        or not processes
        or not all(isinstance(it, dict) for it in processes)
    ):
        raise reading.wrong("config.process", "must be a list with one process")
    if len(processes) > 1:
        options[MORE_PROCESSES] = f"{len(processes)} processes"
    options |= flat(processes[0])
    datasets = options.pop("datasets", None)
    if isinstance(datasets, list) and all(isinstance(it, dict) for it in datasets) and datasets:
        options |= _chosen(datasets)
    elif datasets is not None:
        options["datasets"] = datasets
        reading.given = options
        raise reading.wrong("datasets", "must be a list of mappings")
    _flatten_samples(options)
    return {name: value for name, value in options.items() if value is not None and value != ""}


def _chosen(datasets: list[dict[str, object]]) -> dict[str, object]:
    """Return the options of the first data set that is trained, and whether there are more."""
    chosen = next((it for it in datasets if not it.get("is_reg")), datasets[0])
    options = flat(chosen, "datasets.")
    if len(datasets) > 1:
        options[MORE_DATASETS] = f"{len(datasets)} data sets"
    if any(it.get("is_reg") for it in datasets):
        options[REGULARISATION] = True
    for other in datasets:
        options |= {f"datasets.{it}": other[it] for it in _CONDITIONS if other.get(it)}
    return options


def _flatten_samples(options: dict[str, object]) -> None:
    """Make what the samples of ``options`` have besides a prompt options of their own."""
    samples = options.get(SAMPLES)
    if not isinstance(samples, list) or not all(isinstance(it, dict) for it in samples):
        return
    settings = {str(key): None for it in samples for key in it if key != "prompt"}
    options[SAMPLES] = [it.get("prompt") for it in samples]
    for key in settings:
        options[f"{SAMPLES}.{key}"] = [it.get(key) for it in samples]


def flat(values: Mapping[Any, object], above: str = "") -> dict[str, object]:
    """Return nested mappings as one, by names with dots; empty ones and lists are values."""
    found: dict[str, object] = {}
    for key, value in values.items():
        name = f"{above}{key}"
        found |= flat(value, f"{name}.") if isinstance(value, dict) and value else {name: value}
    return found


def base(reading: Reading) -> Values:
    """Return the preset; ai-toolkit's adapters are those of diffusers' layers.

    Raises ConfigError if no option says that the model is FLUX.1: there, it is Stable Diffusion then.
    """
    if not reading.has("model.arch") and not reading.has("model.is_flux"):
        raise ConfigError("model.arch", None, "must be given, and flux; or model.is_flux: true")
    model = reading.text("model.name_or_path", "")
    files: dict[str, object] = {}
    if _is_adapter(reading):
        files = {"adapter.split_qkv": True, "adapter_file.layout": "ai-toolkit"}
        if not is_full_rank(reading) and not any(map(reading.has, _DIMENSION)):
            files |= {"adapter.rank": _RANK, "adapter.alpha": float(_RANK)}
        if kind(reading) == "lokr":
            files = {"adapter.split_qkv": False, "adapter_file.layout": "kohya"}
        if kind(reading) == "dora":
            files["adapter_file.layout"] = "diffusers"
    return {**common.preset(model, _is_adapter(reading)), **files}


def arch(reading: Reading, name: str) -> Values:
    """Return the condition of Kontext, nothing for other models of FLUX.1."""
    return common.KONTEXT if is_kontext(reading) else common.flux(reading, name)


def controls(reading: Reading, name: str) -> Values:
    """Return the folder of the pictures that Kontext edits."""
    is_list = isinstance(reading.value(name), list)
    paths = reading.texts(name) if is_list else [reading.text(name)]
    if len(paths) != 1:
        raise NoCounterpartError("a picture has one control, in data.controls")
    return common.of_images("data.controls", lambda *_: paths[0])(reading, name)


def control_of_samples(reading: Reading, name: str) -> Values:
    """Return nothing for pictures of samples, which lines of the file have."""
    if not is_kontext(reading):
        raise NoCounterpartError("only Kontext and Fill have pictures beside prompts")
    return common.of_lines("--cn")(reading, name)


def _is_adapter(reading: Reading) -> bool:
    return any(name.startswith("network.") for name in reading.given)


def kind(reading: Reading) -> str:
    """Return the kind of adapter there; lora if none is given."""
    return reading.word("network.type", "lora")


def is_full_rank(reading: Reading) -> bool:
    """Return whether neither factor of a lokr is a product of the rank."""
    return kind(reading) == "lokr" and reading.is_on("network.lokr_full_rank")


def network(reading: Reading, name: str) -> Values:
    known: dict[str, Values] = {
        "lora": {"adapter.kind": "lora"},
        "lokr": {"adapter.kind": "lokr"},
        "dora": {"adapter.kind": "lora", "adapter.dora": True},
    }
    if kind(reading) not in known:
        raise NoCounterpartError("adapters here are lora, lokr and dora; the file has lora")
    if kind(reading) == "lokr":
        reading.notes[name] = "one product for q, k and v, of which each has its own there"
    return known[kind(reading)]


def rank(reading: Reading, name: str) -> Values:
    """Return the rank, and the alpha of a lora, which is the rank for FLUX.1."""
    if name == "network.linear" and reading.has("network.rank"):
        raise IgnoredError("network.rank wins")
    value = reading.positive(name)
    if is_full_rank(reading):
        raise IgnoredError("network.lokr_full_rank ignores it")
    if kind(reading) == "lokr":
        return {"adapter.rank": value, "adapter.alpha": 1.0}
    reading.notes[name] = "alpha is the rank there, whatever linear_alpha is"
    return {"adapter.rank": value, "adapter.alpha": float(value)}


def alpha(reading: Reading, name: str) -> Values:
    """Return the alpha of a lokr; 0 stands for the rank."""
    value = reading.number(name)
    if kind(reading) != "lokr":
        raise IgnoredError("alpha is the rank for FLUX.1; adapter.alpha")
    if is_full_rank(reading):
        raise IgnoredError("network.lokr_full_rank ignores it")
    if name == "network.alpha" and reading.has("network.linear_alpha"):
        raise IgnoredError("network.linear_alpha wins")
    given = [it for it in _DIMENSION if reading.has(it)]
    if value == 0 and not given:
        raise NoCounterpartError("0 stands for the rank, which is not given")
    return {"adapter.alpha": value or float(reading.positive(given[0]))}


def of_lokr(convert: Convert) -> Convert:
    """Return ``convert`` for an option that only a lokr uses."""

    def only(reading: Reading, name: str) -> Values:
        values = convert(reading, name)
        if kind(reading) != "lokr":
            raise IgnoredError("only network.type=lokr uses it")
        return values

    return only


def dropout(path: str) -> Convert:
    """Return the conversion of a dropout of adapters to the field ``path``."""

    def convert(reading: Reading, name: str) -> Values:
        value = reading.number(name)
        if value == 0:
            return reading.noted(name, "off here too")
        if kind(reading) == "lokr":
            if path == "adapter.rank_dropout":
                raise NoCounterpartError("rows of a lokr's product are not dropped here")
            raise IgnoredError("ai-toolkit's lokr has no such dropout")
        if kind(reading) == "dora":
            raise NoCounterpartError(f"{path} must be 0 with adapter.dora")
        return {path: value}

    return convert


def dtype(reading: Reading, name: str) -> Values:
    """Return the data type of forward and backward passes, which is that of trained weights too."""
    found = common.compute_dtype(reading, name)
    if found["precision.compute"] != "bfloat16" or _is_adapter(reading):
        return found
    reading.notes[name] = "trained weights are rounded stochastically"
    return {**found, **common.bfloat16_weights(OPTIMIZERS.ours(reading))}


def small_base(reading: Reading, name: str) -> Values:
    """Return the data type of the frozen weights."""
    if not reading.flag(name):
        return reading.noted(name, "off here too")
    if not _is_adapter(reading):
        raise NoCounterpartError("trained weights are not of 8 bits: precision.weights")
    if reading.word("model.qtype", "float8") not in _FLOAT8:
        raise NoCounterpartError("only qfloat8 and float8 have one, adapter.base_dtype: fp8")
    return {"adapter.base_dtype": "fp8"}


def offloaded(reading: Reading, name: str) -> Values:
    """Return the blocks in host memory: a fraction of all, for which there the layers are drawn."""
    if not reading.flag(name):
        return reading.noted(name, "off here too")
    if not _is_adapter(reading):
        raise NoCounterpartError("parallel.offload_blocks is of weights that are not trained")
    fraction = reading.number(OFFLOADED, 1.0)
    if not 0 <= fraction <= 1:
        raise reading.wrong(OFFLOADED, "must be from 0 to 1")
    return {"parallel.offload_blocks": round(fraction * common.NUM_BLOCKS)}


def prior_weight(reading: Reading, name: str) -> Values:
    """Return the weight of regularisation images."""
    value = reading.number(name)
    if not reading.is_on(REGULARISATION):
        raise IgnoredError("no data set is_reg")
    return common.of_images("data.prior_loss_weight", lambda *_: value)(reading, name)


def batch(reading: Reading, name: str) -> Values:
    steps = "train.gradient_accumulation" if reading.has("train.gradient_accumulation") else _STEPS
    return common.batch(_BATCH, steps)(reading, name)


def learning_rate(reading: Reading, name: str) -> Values:
    """Return the learning rate; Prodigy's is 1 there if it is small."""
    found = OPTIMIZERS.setting("optim.learning_rate")(reading, name)
    if OPTIMIZERS.ours(reading) == "prodigy" and reading.number(name) < _SMALLEST_FACTOR:
        reading.notes[name] = "ai-toolkit gives Prodigy 1.0 instead of less than 0.1"
        return {"optim.learning_rate": 1.0}
    return found


def schedule(reading: Reading, name: str) -> Values:
    known = {"constant": "constant", "constant_with_warmup": "constant", "linear": "linear"}
    known |= {"cosine": "cosine"}
    why = "ai-toolkit's constant, constant_with_warmup, cosine and linear have counterparts"
    decay = reading.among(name, known, why)
    factors = [f"{_PARAMS}.start_factor", f"{_PARAMS}.end_factor"]
    if decay == "linear" and [reading.has(it) and reading.number(it) for it in factors] != [1, 0]:
        raise NoCounterpartError(
            "torch's LinearLR rises there, from start_factor, 1/3, to end_factor, 1, unless they are 1 and 0"
        )
    return {"schedule.decay": decay}


def warmup(reading: Reading, name: str) -> Values:
    """Return the steps of the warm-up, which constant_with_warmup and cosine have."""
    schedule = reading.word(_SCHEDULER)
    if schedule == "cosine":
        if name not in reading.given:
            reading.notes[name] = "cosine has none there if it is not given"
            return {"schedule.warmup_steps": 0}
        reading.notes[name] = (
            "the decay ends with the last step here, and so many steps later there"
        )
    elif schedule != "constant_with_warmup":
        raise IgnoredError("only constant_with_warmup and cosine use it")
    return {"schedule.warmup_steps": reading.whole(name)}


def lowest_rate(reading: Reading, name: str) -> Values:
    """Return the learning rate at the end of cosine."""
    if reading.word(_SCHEDULER) != "cosine":
        raise IgnoredError("only cosine uses it")
    return {"schedule.min_learning_rate": reading.number(name)}


def timesteps(reading: Reading, name: str) -> Values:
    why = "flow.timestep_sampling has sigmoid, uniform (linear there), shift and flux_shift"
    return {"flow.timestep_sampling": reading.among(name, _SAMPLINGS, why)}


def wandb(reading: Reading, name: str) -> Values:
    if not reading.flag(name):
        return reading.noted(name, "metrics.jsonl has the same")
    options = ("logging.project_name", "logging.run_name")
    return common.sinks(reading, "wandb", *options, "ai-toolkit")


MEAN = "there the masks of a batch are divided by their mean"
"""What differs with masks."""
_METADATA = ("metadata.jsonl", "metadata.csv", "metadata.parquet")
_CAPTIONS = ("txt", "caption")
_TRIGGER = "[trigger]"


def folder(reading: Reading, name: str) -> Values:
    """Return the folder of the pictures; of a metadata file, its folder."""
    path = reading.text(name)
    if name == "datasets.folder_path" and reading.has("datasets.dataset_path"):
        raise IgnoredError("datasets.dataset_path wins")
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
    return reading.noted(name, "text files beside the pictures are read")


def masks(reading: Reading, name: str) -> Values:
    """Return the folder of masks, which alpha_mask wins over."""
    path = reading.text(name)
    if reading.is_on("datasets.alpha_mask"):
        raise IgnoredError("datasets.alpha_mask wins")
    return common.of_images("data.masks", lambda *_: path)(reading, name)


def least_weight(reading: Reading, name: str) -> Values:
    """Return nothing: what is black in a mask counts nothing here."""
    if reading.number(name) == 0:
        return {}
    if not reading.has("datasets.mask_path") and not reading.is_on("datasets.alpha_mask"):
        raise IgnoredError("only masks use it")
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
        raise IgnoredError("sample.samples wins")
    trigger = reading.text("trigger_word") if reading.value("trigger_word") else _TRIGGER
    texts = [text.replace(_TRIGGER, trigger) for text in _texts(reading, name)]
    plain = [text.partition(" --")[0].strip() for text in texts]
    if plain != texts:
        reading.notes[name] = "without options after --, which lines of sampling.prompt_file have"
    if not plain:
        return reading.noted(name, "no prompts")
    if reading.prompt_file is None:
        return {"sampling.prompts": plain}
    lines = [_line(reading, name, number, text) for number, text in enumerate(plain)]
    return common.written(reading, lines)


def _line(reading: Reading, name: str, number: int, text: str) -> str:
    """Return the line for the sample ``number``, whose own settings win over those of all."""

    def whole(setting: str, default: int) -> int:
        own = reading.value(f"{SAMPLES}.{setting}")
        if isinstance(own, list) and own[number] is not None:
            return Reading({f"{SAMPLES}.{setting}": own[number]}, {}).whole(f"{SAMPLES}.{setting}")
        return reading.whole(f"sample.{setting}", default)

    steps = whole("sample_steps", 20)
    options: dict[str, object] = {"w": whole("width", 512), "h": whole("height", 512), "s": steps}
    seed = _seed(reading, number)
    if seed is not None:
        options["d"] = seed
    pictures = reading.value(f"{SAMPLES}.ctrl_img")
    if isinstance(pictures, list) and pictures[number] and is_kontext(reading):
        options["cn"] = str(pictures[number])
    return common.line(reading, name, text, options)


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
        raise IgnoredError("train.disable_sampling is on")
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
            return reading.noted(name, common.PROMPT_NOTE)
        if pixels == sizes(reading, "datasets.resolution")["data.image_size"]:
            return reading.noted(name, "is data.image_size")
        raise NoCounterpartError(
            f"is data.image_size; lines of sampling.prompt_file have {option} {pixels}"
        )

    return convert


def walk_seed(reading: Reading, name: str) -> Values:
    """Return nothing if every image has noise of its own."""
    if reading.prompt_file is not None:
        reading.flag(name)
        return reading.noted(name, common.PROMPT_NOTE)
    if reading.flag(name):
        return reading.noted(name, "every image has noise of its own")
    raise NoCounterpartError(
        "every image has noise of its own; lines of sampling.prompt_file with the same --d do not"
    )


def sizes(reading: Reading, name: str) -> Values:
    """Return ai-toolkit's resolutions, one or several, in buckets without enlarged images."""
    given = reading.value(name)
    sides = given if isinstance(given, list) else [given]
    if not sides:
        raise reading.wrong(name, "must be a number of pixels, or a list of them")
    squares = [common.square(reading, name, side) for side in sides]
    largest = max(squares, key=lambda square: int(str(square["data.image_size"])))
    has_buckets = not reading.has("datasets.buckets") or reading.flag("datasets.buckets")
    if not has_buckets or reading.is_on("datasets.square_crop"):
        return largest
    values = {"data.buckets.step": 64, "data.buckets.upscale": False}
    if len(sides) == 1:
        return {**largest, **values}
    resolutions = [square["data.image_size"] for square in squares]
    return {**largest, **values, "data.buckets.resolutions": resolutions}
