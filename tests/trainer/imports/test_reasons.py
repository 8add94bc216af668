"""The reasons for "no counterpart": none names a field that does not exist, or denies one that does."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import pytest

import fluxtrain.imports
from fluxtrain.contract.model_base import iter_fields
from fluxtrain.contract.run.config import RunConfig
from fluxtrain.imports.ai_toolkit import AI_TOOLKIT
from fluxtrain.imports.kohya import KOHYA
from fluxtrain.imports.simpletuner import SIMPLETUNER
from fluxtrain.imports.table import Disposition, Trainer
from fluxtrain.imports.variables import GUIDE


def _prefixes(path: str) -> Iterator[str]:
    parts = path.split(".")
    return (".".join(parts[:end]) for end in range(1, len(parts) + 1))


FIELDS = {field.path for field in iter_fields(RunConfig)}
SECTIONS = {path.partition(".")[0] for path in FIELDS if re.match(r"\w+\.", path)}
SECTIONS_AND_FIELDS = {prefix for path in FIELDS for prefix in _prefixes(path)}
TRAINERS = (KOHYA, AI_TOOLKIT, SIMPLETUNER, GUIDE)
PACKAGE = Path(str(fluxtrain.imports.__file__)).parent

DENIALS: Mapping[str, str] = {
    "a factor is learned nowhere": r"adapter\..*scalar",
    "a file has one training; import the others by themselves": r"^process",
    "a checkpoint is written from a copy in host memory": r"checkpoint\..*(stream|tensor)",
    "all pictures are trained from the first step to the last": r"data\..*(start|end|begin)",
    "all pictures are trained in the same way": r"data\..*(offset|slider)",
    "all pictures of data.images are used": r"data\.(max_|num_)?(pictures|samples)$",
    "an image for each prompt: repeat it in sampling.prompts": r"sampling\..*(images|repeats)",
    "at every step": r"optim\.ema_(every|interval|update)",
    "captions are encoded beforehand, for all epochs": r"caption.*epoch|token_warmup",
    "captions have no syntax of their own": r"wildcard|weighted",
    "change the captions beforehand": r"caption.*(filter|replace)",
    "colours and scales are not changed: add changed copies to the folder": r"colou?r|variants\..*scale",
    "colours are not changed, nor faces found": r"colou?r|face",
    "control nets are not trained here": r"control(?!s$)",
    "encoders.precision is bfloat16 or float32": r"encoders\.(quanti|.*dtype)",
    "files are safetensors": r"adapter_file\.format",
    "files of adapters are all kept": r"adapter_file\.(keep|max)",
    "fluxtrain adapter info prints the rank of network_weights": r"adapter\..*from",
    "fluxtrain adapter merge adds adapters to weights beforehand": r"adapter\.(base$|added|merge)",
    "fluxtrain adapter merge has --strength": r"adapter\..*strength",
    "images are of the average": r"sampling\..*(ema|average)",
    "is_reg of a subset: a data set config, kohya's, has a subset for each folder (docs/data.md)":
        r"data\.(is_)?reg",
    "only the first without is_reg was read; a data set config, kohya's, has a subset for each folder "
    "(docs/data.md)": r"data\.(subsets|sources|folders)",
    "only the first without is_regularisation_data was read; a data set config, kohya's, has a subset for "
    "each folder (docs/data.md)": r"data\.(subsets|sources|folders)",
    "the noise follows from seed": r"sampling\.seed",
    "inputs are not perturbed": r"perturb",
    "the model's input is not perturbed": r"perturb",
    "DoRA of LyCORIS' algorithms; adapter.dora is of networks.lora_flux": r"adapter\.lokr\.dora",
    "Kaiming-uniform and zeros": r"adapter\..*init(_|$|ialization)",
    "learning_rate is used as it is": r"optim\..*scale",
    "LyCORIS' adapters have module_dropout here": r"adapter\.lo(kr|ha)\..*dropout",
    "metadata has no text of yours": r"adapter_file\.(meta|title|comment|author|tags|description)",
    "the metadata of files have no text of yours": r"adapter_file\.(meta|title|comment|author|tags)",
    "metadata.jsonl in the folder has captions (docs/data.md)": r"data\.metadata",
    "metadata.parquet in the folder has file_name, and text, caption or prompt": r"data\.metadata",
    "no attention mask, as in Black Forest Labs' code": r"(text|attention|t5)_mask",
    "no beta distribution": r"flow\.beta",
    "no file of yours is deleted": r"delete",
    "no loss against what the model made before": r"preserv|(?<!prior_)prior_(?!loss)|teacher",
    "norms of adapters are not bounded here": r"adapter\..*norm",
    "nothing is uploaded": r"upload|push|hub",
    "of a subset in dataset_config": r"data\.caption_suffix",
    "only Prodigy has it": r"prodigy\.steps",
    "only the blocks' linear layers have adapters": r"adapter\.(in_|final|other)",
    "no perturbed gradients": r"ggpo|perturb",
    "beside a picture there are its caption and data.controls alone": r"data\..*(film|video|audio)",
    "pictures are drawn as often as their repeats say": r"data\..*probability",
    "pictures are resized before they are cropped": r"data\..*(resize|downsample)",
    "products are 0 at first, unless adapter.initial names some": r"lokr\.init",
    "readers of other packages are not loaded": r"data\..*class$",
    "schedules of other packages are not loaded": r"schedule\.(class|module|arguments)",
    "settings of other optimizers": r"optim\.(arguments|config|options)",
    "strength 1": r"adapter\.(strength|multiplier)",
    "strength 1, PNG": r"adapter\.(strength|multiplier)|sampling\.(format|strength)",
    "T5 is not trained here": r"adapter\.(text|t5)|encoders\..*train",
    "adapters of the transformer are always trained": r"adapter\.(only|transformer)",
    "the loss is the squared error": r"flow\.(loss$|loss_type|loss_kind|huber)",
    "the update is one for all weights; FSDP2 shards its states": r"optim\.fused",
    "timesteps are drawn from 0 to 1": r"flow\.(min|max)",
    "weights by signal-to-noise have no meaning": r"snr",
}  # fmt: skip
"""Reasons that name no field, each with the fields that would make it untrue if they existed."""


def reasons(trainer: Trainer) -> Iterator[str]:
    """Yield the reasons of the options of ``trainer`` that have no counterpart."""
    return (row.note for row in trainer.options.values() if row.disposition is Disposition.MISSING)


def named_fields(text: str) -> list[str]:
    """Return what looks like a field in ``text``, and not like a page."""
    return re.findall(rf"\b(?:{'|'.join(SECTIONS)})(?:\.(?!md\b)[a-z_0-9]+)+", text)


def contradictions(denials: Mapping[str, str], fields: Iterable[str]) -> dict[str, list[str]]:
    """Return the reasons that a field contradicts, with those fields."""
    found = {
        text: [it for it in fields if re.search(pattern, it)] for text, pattern in denials.items()
    }
    return {text: names for text, names in found.items() if names}


def test_a_reason_that_a_field_contradicts_is_found() -> None:
    denials = {"no masks": r"data\.masks", "no beta distribution": r"flow\.beta"}
    assert contradictions(denials, FIELDS) == {"no masks": ["data.masks"]}
    assert named_fields("data.masks, or adapter.lokr.factor") == [
        "data.masks",
        "adapter.lokr.factor",
    ]


def test_no_reason_denies_what_exists() -> None:
    assert not contradictions(DENIALS, FIELDS)


@pytest.mark.parametrize("trainer", TRAINERS, ids=lambda it: it.name)
def test_every_reason_names_a_field_or_is_reviewed(trainer: Trainer) -> None:
    named = SECTIONS_AND_FIELDS
    plain = {text for text in reasons(trainer) if not named & set(named_fields(text))}
    assert plain - DENIALS.keys() == set(), "add what would make them untrue to DENIALS"


def test_reviewed_reasons_are_in_use() -> None:
    used = {text for trainer in TRAINERS for text in reasons(trainer)}
    assert DENIALS.keys() - used == set()


@pytest.mark.parametrize("path", sorted(PACKAGE.glob("*.py")), ids=lambda it: it.stem)
def test_fields_that_texts_name_exist(path: Path) -> None:
    known = SECTIONS_AND_FIELDS | {name for trainer in TRAINERS for name in trainer.options}
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            assert set(named_fields(node.value)) - known == set(), f"line {node.lineno}"
