"""ai-toolkit's YAML: the fields have its values, or its defaults, and no option is dropped silently."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.trainer.imports import ai_toolkit_files

from fluxtrain.contract.resource.document import parse_yaml
from fluxtrain.contract.run.config import value_at
from fluxtrain.contract.run.data import VariantsConfig
from fluxtrain.imports.ai_toolkit_values import flat
from fluxtrain.imports.files import import_file
from fluxtrain.imports.table import Disposition, Imported


def imported(tmp_path: Path, text: str, processes: int = 1, **fields: Any) -> Imported:
    file = tmp_path / "job.yaml"
    file.write_text(text)
    return import_file(file, fields, processes)


def test_a_lora_has_the_values_of_its_file(tmp_path: Path) -> None:
    config = imported(tmp_path, ai_toolkit_files.DEV, processes=2).config
    assert config.adapter is not None
    assert (config.adapter.rank, config.adapter.alpha) == (32, 32.0), "alpha is the rank there"
    assert config.adapter.split_qkv
    assert config.model.guidance_embed
    assert (config.optim.name, config.optim.learning_rate) == ("adamw_8bit", 2e-4)
    assert (config.optim.epsilon, config.optim.weight_decay) == (1e-6, 1e-3)
    assert (config.optim.beta2, config.optim.ema_decay) == (0.999, 0.99)
    assert (config.schedule.steps, config.schedule.global_batch_size) == (1500, 16)
    assert (config.schedule.decay, config.schedule.warmup_steps) == ("constant", 40)
    assert (config.parallel.micro_batch_size, config.parallel.activation_checkpointing) == (2, 1.0)
    assert (config.flow.timestep_sampling, config.flow.prompt_dropout) == ("sigmoid", 0.1)
    assert (config.data.image_size, config.data.latent_size) == (768, 96)
    assert (config.adapter_file.name, config.adapter_file.every_steps) == ("watercolour_v2", 200)
    assert (config.adapter_file.dtype, config.adapter_file.layout) == ("bfloat16", "ai-toolkit")
    assert (config.sampling.every_steps, config.sampling.num_steps) == (300, 24)
    assert config.sampling.prompts == ["a lighthouse", "a harbour, in fog"]
    assert config.sampling.guidance == 3.5
    assert (config.data.images, config.data.repeats) == ("/data/watercolour", 3)
    assert (config.data.caption_prefix, config.data.class_tokens) == ("wtrclr", "a picture")
    assert config.initial_weights == "black-forest-labs/FLUX.1-dev"


def test_files_of_all_weights_are_checkpoints(tmp_path: Path) -> None:
    lora = ai_toolkit_files.DEV
    start = lora.index("      network:")
    network = lora[start : lora.index("\n      save:", start) + 1]
    config = imported(tmp_path, lora.replace(network, "")).config
    assert config.adapter is None
    assert config.checkpoint.every_steps == 200


def test_a_lora_of_schnell_has_the_values_of_its_file(tmp_path: Path) -> None:
    found = imported(tmp_path, ai_toolkit_files.SCHNELL)
    config = found.config
    assert config.adapter is not None
    assert (config.adapter.rank, config.adapter.alpha) == (8, 8.0)
    assert not config.model.guidance_embed
    assert config.data.text_length == 256
    assert (config.flow.timestep_sampling, config.sampling.every_steps) == ("uniform", 0)
    assert config.data.buckets is not None
    assert (config.data.buckets.resolutions, config.data.buckets.upscale) == ([512, 768], False)
    assert config.optim.learning_rate == 1e-4, "the preset's: its own is meant for automagic"
    assert (config.schedule.steps, config.schedule.global_batch_size) == (600, 1)
    missing = {line.option for line in found.lines[Disposition.MISSING]}
    assert missing >= {"train.optimizer", "train.lr", "datasets[1]"}
    assert [line.option for line in found.lines[Disposition.UNKNOWN]] == ["train.made_up"]


def test_a_lokr_of_pictures_with_masks_has_the_values_of_its_file(tmp_path: Path) -> None:
    found = imported(tmp_path, ai_toolkit_files.PAGE, data={"images": "/data/pins"})
    config = found.config
    assert config.adapter is not None
    assert (config.adapter.kind, config.adapter.rank, config.adapter.alpha) == ("lokr", 16, 8.0)
    assert (config.adapter.lokr.factor, config.adapter.lokr.full_matrix) == (8, False)
    assert (config.adapter.split_qkv, config.adapter_file.layout) == (False, "kohya")
    assert config.adapter.base_dtype == "fp8"
    data = config.data
    assert (data.images, data.masks, data.repeats) == ("/data/pins", "/data/pins-masks", 4)
    assert (data.caption_prefix, data.class_tokens, data.prior_loss_weight) == ("enpn", "", 0.5)
    assert data.variants == VariantsConfig(
        flip=True, crops=4, captions=8, shuffle_caption=True, keep_tokens=2, tag_dropout=0.2
    )
    assert data.buckets is not None
    assert data.buckets.resolutions == [512, 768, 1024]
    assert config.sampling.prompts == ["enpn, a red heart", "a green leaf"]
    assert config.sampling.at_start
    missing = {line.option: line.note for line in found.lines[Disposition.MISSING]}
    assert missing.keys() == {
        *("datasets[1]", "datasets.is_reg", "datasets.mask_min_value"),
        *("sample.height", "sample.seed", "sample.samples.seed", "sample.samples.width"),
        *("save.max_step_saves_to_keep", "model.quantize_te"),
        *("meta.name", "meta.version"),
    }
    assert missing["sample.height"].endswith("have --h 768")
    assert "network.dropout" in {line.option for line in found.lines[Disposition.IGNORED]}
    assert not found.lines[Disposition.UNKNOWN]


LORA = {"type": "lora", "linear": 8}
LOKR = {"type": "lokr", "linear": 8, "lokr_full_rank": False}
PICTURES = {"folder_path": "toy", "resolution": 512}
RULES: list[tuple[str, dict[str, object], dict[str, object]]] = [
    ("network", {"type": "lokr", "linear": 8}, {"adapter.lokr.full_matrix": True}),
    ("network", LOKR,
     {"adapter.kind": "lokr", "adapter.rank": 8, "adapter.alpha": 1.0}),
    ("network", {**LOKR, "linear_alpha": 0}, {"adapter.alpha": 8.0}),
    ("network", {**LOKR, "alpha": 2, "linear_alpha": 4}, {"adapter.alpha": 4.0}),
    ("network", {"type": "lokr", "linear": 8, "lokr_full_rank": True},
     {"adapter.lokr.full_matrix": True, "adapter.rank": 16}),
    ("network", {"type": "dora", "linear": 8},
     {"adapter.dora": True, "adapter.split_qkv": True, "adapter_file.layout": "diffusers"}),
    ("network", {**LORA, "dropout": 0.25, "network_kwargs": {"module_dropout": 0.5}},
     {"adapter.dropout": 0.25, "adapter.module_dropout": 0.5}),
    ("network", {**LORA, "pretrained_lora_path": "a.safetensors"}, {"adapter.initial": "a.safetensors"}),
    ("model", {"low_vram": True}, {"parallel.offload_blocks": 0}),
    ("model", {"layer_offloading": True}, {"parallel.offload_blocks": 57}),
    ("model", {"layer_offloading": True, "layer_offloading_transformer_percent": 0.3},
     {"parallel.offload_blocks": 17}),
    ("model", {"layer_offloading": False, "layer_offloading_transformer_percent": 1.0},
     {"parallel.offload_blocks": 0}),
    ("datasets", {**PICTURES, "alpha_mask": True, "mask_path": "m"}, {"data.masks": "alpha"}),
    ("datasets", {"dataset_path": "toy/metadata.jsonl"}, {"data.images": "toy"}),
    ("datasets", {**PICTURES, "dataset_path": "toys"}, {"data.images": "toys"}),
    ("datasets", {**PICTURES, "square_crop": True}, {"data.buckets": None, "data.image_size": 512}),
    ("datasets", {**PICTURES, "buckets": False, "resolution": [512, 768]},
     {"data.buckets": None, "data.image_size": 768}),
    ("datasets", {**PICTURES, "flip_x": False, "shuffle_tokens": False, "token_dropout_rate": 0},
     {"data.variants": None}),
    ("datasets", {**PICTURES, "trigger_word": "ohwx", "num_workers": 1, "prefetch_factor": 2},
     {"data.caption_prefix": "ohwx", "data.num_workers": 1, "data.prefetch": 2}),
    ("train", {"lr_scheduler": "constant_with_warmup"}, {"schedule.warmup_steps": 1000}),
    ("train", {"lr_scheduler": "cosine"}, {"schedule.decay": "cosine", "schedule.warmup_steps": 0}),
    ("train", {"lr_scheduler": "cosine", "lr_scheduler_params": {"num_warmup_steps": 20, "eta_min": 1e-6}},
     {"schedule.decay": "cosine", "schedule.warmup_steps": 20, "schedule.min_learning_rate": 1e-6}),
    ("train", {"lr_scheduler": "linear", "lr_scheduler_params": {"start_factor": 1.0, "end_factor": 0}},
     {"schedule.decay": "linear"}),
]  # fmt: skip


@pytest.mark.parametrize(("section", "options", "expected"), RULES, ids=range(len(RULES)))
def test_an_option_is_that_field(
    tmp_path: Path, section: str, options: dict[str, object], expected: dict[str, object]
) -> None:
    changes = {section: [options] if section == "datasets" else options}
    document = job(**({"network": LORA} if section == "model" else {}), **changes)
    run = imported(tmp_path, document).config.model_dump()
    assert {path: value_at(run, path) for path in expected} == expected


NO_COUNTERPARTS: list[tuple[str, dict[str, object], str]] = [
    ("network", {"type": "locon"}, "network.type"),
    ("network", {"type": "dora", "linear": 8, "dropout": 0.1}, "network.dropout"),
    ("network", {"type": "lokr", "network_kwargs": {"rank_dropout": 0.1}},
     "network.network_kwargs.rank_dropout"),
    ("network", {"type": "lokr", "lokr_full_rank": False, "linear_alpha": 0}, "network.linear_alpha"),
    ("model", {"quantize": True}, "model.quantize"),
    ("model", {"layer_offloading": True}, "model.layer_offloading"),
    ("train", {"lr_scheduler": "linear"}, "train.lr_scheduler"),
    ("train", {"lr_scheduler": "linear", "lr_scheduler_params": {"end_factor": 0.0}}, "train.lr_scheduler"),
    ("train", {"diff_output_preservation": True}, "train.diff_output_preservation"),
    ("datasets", {"dataset_path": "pairs.json"}, "datasets.dataset_path"),
    ("datasets", {"caption_ext": "json"}, "datasets.caption_ext"),
    ("datasets", {"flip_x": True}, "datasets.flip_x"),
    ("datasets", {"mask_path": "m"}, "datasets.mask_path"),
    ("datasets", {**PICTURES, "flip_y": True}, "datasets.flip_y"),
    ("datasets", {**PICTURES, "random_scale": True}, "datasets.random_scale"),
    ("sample", {"width": 640, "prompts": ["a"]}, "sample.width"),
    ("sample", {"walk_seed": False, "prompts": ["a"]}, "sample.walk_seed"),
    ("sample", {"prompts": [], "sample_every": 5}, "sample.sample_every"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("section", "options", "name"), NO_COUNTERPARTS, ids=range(len(NO_COUNTERPARTS))
)
def test_an_option_without_a_counterpart_is_named(
    tmp_path: Path, section: str, options: dict[str, object], name: str
) -> None:
    document = job(**{section: [options] if section == "datasets" else options})
    missing = {line.option for line in imported(tmp_path, document).lines[Disposition.MISSING]}
    assert name in missing


def job(**process: Any) -> str:
    """Return a job of one process that has these sections, for FLUX.1."""
    process["model"] = {"is_flux": True, **process.get("model", {})}
    return yaml.safe_dump(
        {"job": "extension", "config": {"process": [{"type": "sd_trainer", **process}]}}
    )


@pytest.mark.parametrize("text", [ai_toolkit_files.DEV, ai_toolkit_files.SCHNELL])
def test_every_option_is_named_once(tmp_path: Path, text: str) -> None:
    found = imported(tmp_path, text)
    named = [line.option for lines in found.lines.values() for line in lines if line.is_given]
    document = parse_yaml(text, "file")
    process = document["config"].pop("process")[0]
    datasets = process.pop("datasets")
    sections = flat(document) | flat(process) | flat(datasets[0], "datasets.")
    given = {name for name, value in sections.items() if value != ""}
    assert sorted(named) == sorted(given | ({"datasets[1]"} if len(datasets) > 1 else set()))


@pytest.mark.parametrize(
    ("train", "expected"),
    [
        ("optimizer: prodigy8bit, lr: 1e-4, optimizer_params: {d_coef: 2}",
         {"name": "prodigy", "learning_rate": 1.0, "epsilon": 1e-6, "weight_decay": 0.0}),
        ("optimizer: lion8bit, lr: 1e-5", {"name": "lion", "learning_rate": 1e-5, "beta2": 0.99}),
        ("optimizer: adafactor, lr: 1e-5", {"name": "adafactor", "learning_rate": 1e-5}),
        ("optimizer: adafactor, optimizer_params: {relative_step: true}", {"name": "adamw"}),
    ],
)  # fmt: skip
def test_an_optimizer_has_ai_toolkit_s_settings(
    tmp_path: Path, train: str, expected: dict[str, object]
) -> None:
    text = (
        f"job: extension\nconfig: {{name: a, process: "
        f"[{{type: sd_trainer, model: {{is_flux: true}}, train: {{{train}}}}}]}}"
    )
    optim = imported(tmp_path, text).config.optim.model_dump()
    assert {key: optim[key] for key in expected} == expected
