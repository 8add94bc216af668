"""Configurations of Kontext from ai-toolkit and SimpleTuner become runs on pairs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from fluxtrain.contract.run.config import RunConfig
from fluxtrain.errors import ConfigError
from fluxtrain.imports.files import import_file

KONTEXT = "flux1-kontext-dev.safetensors"


def ai_toolkit(model: dict[str, Any], **dataset: Any) -> str:
    process = {
        "type": "sd_trainer",
        "network": {"type": "lora", "linear": 16, "linear_alpha": 16},
        "datasets": [{"folder_path": "pairs/target", "caption_ext": "txt", **dataset}],
        "train": {"steps": 3000, "batch_size": 1, "timestep_type": "weighted"},
        "model": {"arch": "flux_kontext", **model},
        "sample": {
            "sample_every": 250,
            "width": 768,
            "height": 512,
            "samples": [
                {"prompt": "as paint", "ctrl_img": "pairs/control/1.png"},
                {"prompt": "plain"},
            ],
        },
    }
    return yaml.safe_dump({"job": "extension", "config": {"name": "edit", "process": [process]}})


@pytest.mark.parametrize("path", ["pairs/control", ["pairs/control"]])
@pytest.mark.parametrize("name", ["black-forest-labs/FLUX.1-Kontext-dev", None])
def test_ai_toolkit_s_controls_are_those_of_pairs(
    path: str | list[str], name: str | None, tmp_path: Path
) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(ai_toolkit({"name_or_path": name} if name else {}, control_path=path))
    found = import_file(file, {})
    _require_pairs(found.config)
    assert found.config.initial_weights == (name or KONTEXT)
    assert found.config.sampling.prompts == ["as paint", "plain"]
    lines = import_file(file, {}, prompt_file="prompts.txt").prompts
    assert lines == (
        "as paint --w 768 --h 512 --s 20 --d 0 --cn pairs/control/1.png",
        "plain --w 768 --h 512 --s 20 --d 0",
    )


@pytest.mark.parametrize("kind", ["reference_strict", "reference_loose"])
def test_simpletuner_s_references_are_those_of_pairs(kind: str, tmp_path: Path) -> None:
    backends = [
        {"id": "edits", "type": "local", "instance_data_dir": "pairs/target", "crop": False},
        {
            "id": "sources",
            "type": "local",
            "dataset_type": "conditioning",
            "conditioning_type": kind,
            "source_dataset_id": "edits",
            "instance_data_dir": "pairs/control",
        },
    ]
    (tmp_path / "backends.json").write_text(json.dumps(backends))
    options = {
        "model_family": "flux",
        "model_flavour": "kontext",
        "model_type": "lora",
        "lora_rank": 16,
        "max_train_steps": 100,
        "data_backend_config": "backends.json",
    }
    file = tmp_path / "config.json"
    file.write_text(json.dumps(options))
    config = import_file(file, {}).config
    _require_pairs(config)
    assert config.initial_weights == KONTEXT
    del backends[1]["dataset_type"], backends[1]["source_dataset_id"]  # as in its guide
    backends[0]["conditioning_data"] = ["sources", "more"]
    (tmp_path / "backends.json").write_text(json.dumps(backends))
    _require_pairs(import_file(file, {}).config)
    (tmp_path / "backends.json").write_text(json.dumps([*backends, {**backends[1], "id": "more"}]))
    with pytest.raises(
        ConfigError, match=r"conditioning_data: got .* one for each picture, data.controls"
    ):
        import_file(file, {})
    backends[1]["conditioning_type"] = "mask"
    (tmp_path / "backends.json").write_text(json.dumps(backends))
    with pytest.raises(ConfigError, match="must not be kontext without"):
        import_file(file, {})


def _require_pairs(config: RunConfig) -> None:
    assert config.model.condition == "kontext"
    assert (config.data.images, config.data.controls) == ("pairs/target", "pairs/control")
    assert config.adapter is not None
    assert config.adapter.rank == 16
