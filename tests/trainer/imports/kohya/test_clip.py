"""Adapters of CLIP-L: sd-scripts trains them unless network_train_unet_only is true."""

from __future__ import annotations

from typing import Any

import pytest

from fluxtrain.contract.run.adapter import ClipAdapterConfig
from fluxtrain.imports.kohya import KOHYA
from fluxtrain.imports.table import Disposition, Imported, Reading, import_options
from fluxtrain.imports.variables import import_variables
from fluxtrain.model.layers import adapted_layers, is_clip

OPTIONS: dict[str, Any] = {
    "network_module": "networks.lora_flux",
    "network_dim": 8,
    "network_alpha": 4,
    "optimizer_type": "AdamW",
    "learning_rate": 1e-4,
    "train_data_dir": "pictures",
}
_RATIO = "network_args.loraplus_text_encoder_lr_ratio"
SAME = ClipAdapterConfig(rank=8, alpha=4.0)


def imported(changes: dict[str, Any], overrides: dict[str, Any] | None = None) -> Imported:
    options = {n: value for n, value in {**OPTIONS, **changes}.items() if value is not None}
    return import_options(KOHYA, Reading(options, {}, epoch_samples=100), overrides or {})


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, SAME),
        ({"network_train_unet_only": False}, SAME),
        ({"network_train_unet_only": True}, None),
        ({"text_encoder_lr": 5e-5}, ClipAdapterConfig(rank=8, alpha=4.0, rate=0.5)),
        ({"text_encoder_lr": [5e-5, 1e-6]}, ClipAdapterConfig(rank=8, alpha=4.0, rate=0.5)),
        ({"text_encoder_lr": 0}, None),
        ({"unet_lr": 4e-4}, ClipAdapterConfig(rank=8, alpha=4.0, rate=0.25)),
        ({"network_dim": None, "network_alpha": 0}, ClipAdapterConfig(rank=4, alpha=4.0)),
    ],
    ids=str,
)
def test_clip_has_the_rank_of_the_others_and_its_learning_rate(
    changes: dict[str, Any], expected: ClipAdapterConfig | None
) -> None:
    adapter = imported(changes).config.adapter
    assert adapter is not None
    if expected is None or adapter.clip is None:
        assert adapter.clip is expected
    else:
        assert adapter.clip.model_dump() == pytest.approx(expected.model_dump())


@pytest.mark.parametrize(
    ("ratios", "up", "of_clip"),
    [
        ({"": 4}, 4.0, None),
        ({"unet": 4}, 4.0, 1.0),
        ({"text_encoder": 4}, 1.0, 4.0),
        ({"": 2, "unet": 4}, 4.0, 2.0),
        ({"": 2, "text_encoder": 4}, 2.0, 4.0),
        ({"unet": 4, "text_encoder": 8}, 4.0, 8.0),
        ({"": 2, "unet": 4, "text_encoder": 8}, 4.0, 8.0),
    ],
    ids=str,
)
def test_matrices_b_of_clip_learn_as_sd_scripts_lets_them(
    ratios: dict[str, int], up: float, of_clip: float | None
) -> None:
    """There, an own ratio wins over loraplus_lr_ratio, and without any there is none."""
    arguments = [
        f"loraplus_{f'{part}_' if part else ''}lr_ratio={ratio}" for part, ratio in ratios.items()
    ]
    adapter = imported({"network_args": arguments}).config.adapter
    assert adapter is not None
    assert adapter.clip is not None
    assert (adapter.rates.up, adapter.clip.up) == (up, of_clip)
    alone = {"network_args": arguments, "network_train_unet_only": True}
    found = imported(alone)
    adapter = found.config.adapter
    assert adapter is not None
    assert adapter.clip is None
    assert adapter.rates.up == up
    inert = {line.option for line in found.lines[Disposition.IGNORED]}
    assert (_RATIO in inert) == ("text_encoder" in ratios)


@pytest.mark.parametrize(
    ("changes", "option", "says"),
    [
        ({"train_data_dir": None}, "network_train_unet_only", "adapter.clip does, with the captions"),
        (
            {"network_module": "lycoris.kohya", "network_args": ["algo=lokr"]},
            "network_train_unet_only",
            "here those are networks.lora_flux's, not lycoris.kohya's lokr",
        ),
        (
            {"network_module": "lycoris.kohya", "network_args": ["algo=lora", "dora_wd=True"]},
            "network_train_unet_only",
            "here those are networks.lora_flux's, not lycoris.kohya's lora with DoRA",
        ),
        (
            {"optimizer_type": "prodigy", "learning_rate": 1.0, "text_encoder_lr": 0.5},
            "text_encoder_lr",
            "Prodigy finds one step size",
        ),
        (
            {
                **{"optimizer_type": "prodigy", "learning_rate": 1.0, "text_encoder_lr": 0.5},
                "network_args": ["loraplus_text_encoder_lr_ratio=1"],
            },
            _RATIO,
            "Prodigy finds one step size",
        ),
        (
            {"train_data_dir": None, "network_args": ["loraplus_text_encoder_lr_ratio=4"]},
            _RATIO,
            "CLIP-L has no adapters here",
        ),
    ],
    ids=["no pictures", "lokr", "dora", "prodigy", "prodigy with a ratio", "a ratio without pictures"],
)  # fmt: skip
def test_what_has_no_counterpart_is_said(changes: dict[str, Any], option: str, says: str) -> None:
    found = imported(changes)
    assert found.config.adapter is not None
    assert found.config.adapter.clip is None
    lines = {line.option: line.note for line in found.lines[Disposition.MISSING]}
    assert says in lines[option]


def test_pictures_may_be_named_by_a_field_of_ours() -> None:
    found = imported({"train_data_dir": None}, {"data": {"images": "pictures"}}).config.adapter
    assert found is not None
    assert found.clip == SAME


def test_the_guides_variables_train_the_modules_of_its_file() -> None:
    """Its LoRA of rank 8 has 304 modules of the transformer and 72 of CLIP-L."""
    environment = {"DATASET_CONFIG": "dataset.toml", "PARAMS_NETWORK_DIM": "8"}
    config = import_variables(environment, {}, epoch_samples=400).config
    assert config.adapter is not None
    layers = adapted_layers(config.model, config.adapter)
    assert (len(layers), sum(is_clip(layer.name) for layer in layers)) == (376, 72)
    assert {layer.rank for layer in layers} == {8}
