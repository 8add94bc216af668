"""Weights in bfloat16 of all three trainers: the same here, where they are trained; adapters are float32."""

from __future__ import annotations

from pathlib import Path

import pytest

from fluxtrain.errors import ConfigError
from fluxtrain.imports.files import import_file
from fluxtrain.imports.table import Disposition

KOHYA = 'pretrained_model_name_or_path = "flux1-dev.safetensors"\n'
FULL_BF16 = KOHYA + "full_bf16 = true\n"
BF16 = 'mixed_precision = "bf16"\n'
TOOLKIT = """
job: extension
config:
  process:
  - model: {name_or_path: black-forest-labs/FLUX.1-dev, is_flux: true}
    train: {dtype: %s}
"""
ADAPTER = "    network: {type: lora, linear: 16, linear_alpha: 16}\n"
TUNER = '{"model_family": "flux", "model_type": "%s", "optimizer": "%s"%s}'
NO_MIXING = ', "mixed_precision": "no"'


@pytest.mark.parametrize(
    ("name", "text", "weights"),
    [
        ("a.toml", FULL_BF16 + BF16, "bfloat16"),
        ("a.toml", KOHYA + "full_bf16 = false\n" + BF16, "float32"),
        ("a.toml", KOHYA + "vae_batch_size = 1\nsave_precision = 'bf16'\n" + BF16, "float32"),
        ("a.toml", FULL_BF16 + BF16 + 'network_module = "networks.lora_flux"\n', "float32"),
        ("a.toml", FULL_BF16 + BF16 + 'optimizer_type = "AdamWScheduleFree"\n', "float32"),
        ("a.yaml", TOOLKIT % "bf16", "bfloat16"),
        ("a.yaml", TOOLKIT % "fp32", "float32"),
        ("a.yaml", TOOLKIT % "bf16" + ADAPTER, "float32"),
        ("a.json", TUNER % ("full", "adamw_bf16", ""), "bfloat16"),
        ("a.json", TUNER % ("full", "adamw_bf16", NO_MIXING), "float32"),
        ("a.json", TUNER % ("full", "optimi-adamw", ""), "float32"),
        ("a.json", TUNER % ("lora", "adamw_bf16", ""), "float32"),
    ],
)
def test_weights_are_in_bfloat16_where_they_are_there(
    tmp_path: Path, name: str, text: str, weights: str
) -> None:
    file = tmp_path / name
    file.write_text(text)
    found = import_file(file, {}, 1)
    assert found.config.precision.weights == weights
    unknown = {line.option for line in found.lines[Disposition.UNKNOWN]}
    assert not unknown & {"full_bf16", "train.dtype", "optimizer"}


def test_sd_scripts_refuses_full_bf16_without_mixed_precision(tmp_path: Path) -> None:
    file = tmp_path / "a.toml"
    file.write_text(FULL_BF16)
    with pytest.raises(ConfigError, match=r"full_bf16.*needs mixed_precision=bf16"):
        import_file(file, {}, 1)
