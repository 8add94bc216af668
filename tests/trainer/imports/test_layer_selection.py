"""Layers by parts of diffusers' names: the adapters are of exactly the layers that have them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from tests.trainer.imports import ai_toolkit_files

from fluxtrain.contract.run.adapter import AdapterConfig
from fluxtrain.contract.run.model import ModelConfig
from fluxtrain.imports.common import selection
from fluxtrain.imports.files import import_file
from fluxtrain.imports.table import Disposition, NoCounterpartError
from fluxtrain.model.layers import adapted_layers, linear_layers

FLUX = ModelConfig()
EVERY = [part for _, parts in linear_layers(FLUX).values() for part, _ in parts]


def adapted(wanted: list[str], unwanted: list[str]) -> list[str]:
    """Return diffusers' names of the layers that the fields of `selection` adapt."""
    fields = selection(wanted, unwanted)
    config = AdapterConfig(
        **{name.removeprefix("adapter."): value for name, value in fields.items()}
    )
    return [part for layer in adapted_layers(FLUX, config) for part, _ in layer.parts]


@pytest.mark.parametrize(
    ("wanted", "unwanted"),
    [
        ([], []),
        (["transformer.single_transformer_blocks.7.proj_out"], []),
        (["single_transformer_blocks.7.proj_out", "single_transformer_blocks.20.proj_out"], []),
        (["single_transformer_blocks.1"], ["proj_out", "norm"]),
        (["transformer_blocks"], ["single_transformer_blocks"]),
        (["add_k_proj", "add_q_proj", "add_v_proj", "to_add_out"], []),
        (["ff.net.0.proj"], []),
        ([], ["norm"]),
        (["to_add_out", "single_transformer_blocks.3.norm"], []),
    ],
)
def test_the_layers_are_those_whose_names_have_a_part(
    wanted: list[str], unwanted: list[str]
) -> None:
    expected = [
        name
        for name in EVERY
        if (not wanted or any(part in f"transformer.{name}" for part in wanted))
        and not any(part in name for part in unwanted)
    ]
    assert expected
    assert sorted(adapted(wanted, unwanted)) == sorted(expected)


@pytest.mark.parametrize(
    ("wanted", "says"),
    [
        (
            ["to_q"],
            "double_blocks.0.img_attn.qkv is one layer here, of which they select 1 of 3 parts",
        ),
        (
            ["single_transformer_blocks.7.proj_out", "single_transformer_blocks.8"],
            "the same in all",
        ),
        (["text_model"], "no layer of FLUX.1's blocks has such a name"),
    ],
)
def test_what_the_fields_cannot_say_has_no_counterpart(wanted: list[str], says: str) -> None:
    with pytest.raises(NoCounterpartError, match=re.escape(says)):
        selection(wanted)


def test_the_options_of_ai_toolkit_select_layers_together(tmp_path: Path) -> None:
    job = yaml.safe_load(ai_toolkit_files.DEV)
    network = job["config"]["process"][0]["network"]
    network["network_kwargs"] = {
        "only_if_contains": ["transformer.single_transformer_blocks."],
        "ignore_if_contains": ["norm", "proj_mlp", "attn"],
    }
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job))
    found = import_file(tmp_path / "job.yaml", {}, 1)
    adapter = found.config.adapter
    assert adapter is not None
    assert (adapter.double_blocks, adapter.single_blocks, adapter.layers) == (
        "none",
        "all",
        ["linear2"],
    )
    assert not any("contains" in line.option for line in found.lines[Disposition.MISSING])
