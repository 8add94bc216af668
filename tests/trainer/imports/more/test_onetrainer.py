"""What OneTrainer's options mean for FLUX.1."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from fluxtrain.contract.run.config import value_at
from fluxtrain.imports.files import import_file
from fluxtrain.imports.table import Disposition, Imported

FLUX: Mapping[str, object] = {
    "model_type": "FLUX_DEV_1",
    "training_method": "LORA",
    "base_model_name": "b/FLUX.1-dev",
    "train_dtype": "BFLOAT_16",
    "layer_filter": "transformer_block",
    "text_encoder": {"train": False},
    "text_encoder_2": {"train": False},
}
NORMAL = {"timestep_distribution": "LOGIT_NORMAL"}


def imported(folder: Path, options: Mapping[str, object], **more: int) -> Imported:
    path = folder / "a.json"
    path.write_text(json.dumps({**FLUX, **options}))
    return import_file(path, {}, **more)


@pytest.mark.parametrize(
    ("options", "values"),
    [
        ({}, {"adapter.rank": 16, "adapter.alpha": 1.0, "optim.learning_rate": 3e-6}),
        ({}, {"flow.timestep_sampling": "uniform", "flow.guidance": 1.0, "flow.prompt_dropout": 0.0}),
        ({}, {"optim.name": "adamw", "optim.beta2": 0.999, "optim.weight_decay": 0.01}),
        ({"optimizer": {"optimizer": "PRODIGY", "d_coef": 2.0, "beta1": None}, "learning_rate": 1.0},
         {"optim.name": "prodigy", "optim.prodigy.d_coef": 2.0, "optim.beta1": 0.9}),
        ({"transformer": {"learning_rate": 0.01}}, {"optim.learning_rate": 0.01}),
        ({"prior": {"guidance_scale": 3.5, "weight_dtype": "FLOAT_8"}},
         {"flow.guidance": 3.5, "adapter.base_dtype": "fp8"}),
        ({**NORMAL, "noising_bias": 0.5, "noising_weight": 1.0},
         {"flow.timestep_sampling": "logit_normal", "flow.logit_mean": 0.5, "flow.logit_std": 2.0}),
        ({**NORMAL, "timestep_shift": 2.0}, {"flow.timestep_sampling": "shift", "flow.shift": 2.0}),
        ({**NORMAL, "dynamic_timestep_shifting": True}, {"flow.timestep_sampling": "flux_shift"}),
        ({"timestep_distribution": "COS_MAP"}, {"flow.timestep_sampling": "cosmap"}),
        ({"learning_rate_warmup_steps": 30, "gradient_accumulation_steps": 3}, {"schedule.warmup_steps": 10}),
        ({"learning_rate_scheduler": "COSINE", "learning_rate_min_factor": 0.1, "learning_rate": 0.01},
         {"schedule.decay": "cosine", "schedule.min_learning_rate": pytest.approx(0.001)}),
        ({"learning_rate_scheduler": "COSINE_WITH_HARD_RESTARTS", "learning_rate_cycles": 3.0},
         {"schedule.decay": "cosine_with_restarts", "schedule.cycles": 3}),
        ({"epochs": 3}, {"schedule.epochs": 3}),
        ({"resolution": "512,768"}, {"data.buckets.resolutions": [512, 768], "data.image_size": 768}),
        ({"resolution": "512", "aspect_ratio_bucketing": False},
         {"data.buckets": None, "data.image_size": 512}),
        ({"save_every": 10, "save_every_unit": "STEP", "backup_after": 20, "backup_after_unit": "STEP"},
         {"adapter_file.every_steps": 10, "checkpoint.every_steps": 20}),
        ({"output_model_destination": r"models\cat.safetensors", "output_dtype": "BFLOAT_16"},
         {"adapter_file.name": "cat", "adapter_file.dtype": "bfloat16"}),
        ({"concepts": [{"path": "a", "enabled": False}, {"path": "b", "balancing": 2.0}]},
         {"data.images": "b", "data.repeats": 2}),
        ({"ema": "GPU", "ema_update_step_interval": 1}, {"optim.ema_decay": 0.999}),
        ({"ema": "GPU"}, {"optim.ema_decay": pytest.approx(0.999 ** (1 / 5))}),
        ({"weight_dtype": "FLOAT_8"}, {"adapter.base_dtype": "fp8"}),
        ({"weight_dtype": "FLOAT_8", "prior": {"weight_dtype": "BFLOAT_16"}},
         {"adapter.base_dtype": "compute"}),
        ({"training_method": "FINE_TUNE", "weight_dtype": "BFLOAT_16"}, {"precision.weights": "bfloat16"}),
        ({"lora_layers": "attn", "layer_filter": None}, {"adapter.kind": "lora"}),
        ({"concepts": [{"path": "v", "type": "VALIDATION"}, {"path": "b", "repeats": 3}]},
         {"data.images": "b", "data.repeats": 3}),
        ({"gradient_checkpointing": "OFF"}, {"parallel.activation_checkpointing": 0.0}),
        ({"training_method": "FINE_TUNE"}, {"adapter": None, "preset": "dev-finetune"}),
    ],
)  # fmt: skip
def test_an_option_means_what_it_means_there(
    options: Mapping[str, object], values: Mapping[str, object], tmp_path: Path
) -> None:
    found = imported(tmp_path, options).config.model_dump()
    assert {path: value_at(found, path) for path in values} == values


@pytest.mark.parametrize(
    ("options", "lost"),
    [
        ({"text_encoder": {"train": True}}, "text_encoder.train"),
        ({"transformer": {"weight_dtype": "NFLOAT_4"}}, "transformer.weight_dtype"),
        ({"timestep_distribution": "SIGMOID"}, "timestep_distribution"),
        ({"timestep_shift": 3.0, "timestep_distribution": "UNIFORM"}, "timestep_distribution"),
        ({"learning_rate_scheduler": "COSINE_WITH_RESTARTS"}, "learning_rate_scheduler"),
        ({"mae_strength": 0.5}, "mae_strength"),
        ({"concepts": [{"path": "a"}, {"path": "b"}]}, "concepts.more"),
        ({"concepts": [{"path": "a", "text": {"prompt_source": "filename"}}]}, "concepts.text.prompt_source"),
        ({"backup_after": 5, "backup_after_unit": "MINUTE"}, "backup_after"),
        ({"weight_dtype": "NFLOAT_4", "prior": {"weight_dtype": "NONE"}}, "transformer.weight_dtype"),
        ({"concepts": [{"path": "a", "balancing": 200, "balancing_strategy": "SAMPLES"}]},
         "concepts.balancing"),
        ({"loss_weight_fn": "P2"}, "loss_weight_fn"),
    ],
)  # fmt: skip
def test_what_has_no_counterpart_is_named(
    options: Mapping[str, object], lost: str, tmp_path: Path
) -> None:
    lines = imported(tmp_path, options).lines[Disposition.MISSING]
    assert [line.option for line in lines if line.is_given] == [lost]


def test_epochs_become_steps_and_a_part_of_them_is_the_warm_up(tmp_path: Path) -> None:
    options = {"epochs": 4, "batch_size": 2, "learning_rate_warmup_steps": 0.1}
    schedule = imported(tmp_path, options, epoch_samples=20).config.schedule
    assert (schedule.steps, schedule.warmup_steps) == (40, 4)


CONCEPT = {"path": "cats", "balancing": 2.0, "__version": 2, "type": "STANDARD",
           "image": {"random_hue_max_strength": 0.1, "enable_random_hue": False}}  # fmt: skip


@pytest.mark.parametrize(
    ("place", "options"),
    [
        ("training_concepts/concepts.json", {}),
        ("concepts.json", {"concept_file_name": "training_concepts\\concepts.json"}),
        ("mine/cats.json", {"concept_file_name": "mine/cats.json", "concepts": None}),
        ("../training_concepts/concepts.json", {}),
    ],
)
def test_concepts_of_another_file_are_read(
    place: str, options: Mapping[str, object], tmp_path: Path
) -> None:
    presets = tmp_path / "training_presets"
    (presets / place).parent.mkdir(parents=True, exist_ok=True)
    presets.mkdir(exist_ok=True)
    (presets / place).write_text(json.dumps([CONCEPT]))
    found = imported(presets, options)
    assert (found.config.data.images, found.config.data.repeats) == ("cats", 2)
    lost = (*found.lines[Disposition.MISSING], *found.lines[Disposition.UNKNOWN])
    assert not [line for line in lost if line.is_given or line.option == "concept_file_name"]


def test_what_belongs_to_other_models_or_is_off_is_one_line(tmp_path: Path) -> None:
    options = {"unet": {"train": True}, "align_prop": False, "align_prop_steps": 20, "custom": True}
    found = imported(tmp_path, {**options, "text_encoder": {"train": False, "include": False}})
    (line,) = (it for it in found.lines[Disposition.IGNORED] if it.option == "unused")
    assert line.value == ["align_prop", "align_prop_steps", "unet.train"]
    unknown = [it.option for it in found.lines[Disposition.UNKNOWN]]
    assert unknown == ["custom", "text_encoder.include"]
