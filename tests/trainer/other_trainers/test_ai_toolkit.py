"""ai-toolkit's YAML: the fields have its values, or its defaults, and no option is dropped silently."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.trainer.other_trainers import ai_toolkit_files

from fluxtrain.cli import main
from fluxtrain.contract.describe import iter_fields
from fluxtrain.contract.resource.document import load_job, parse_yaml
from fluxtrain.contract.run.config import RunConfig
from fluxtrain.contract.run.resolve import resolve
from fluxtrain.other_trainers.ai_toolkit import AI_TOOLKIT
from fluxtrain.other_trainers.ai_toolkit_values import flat
from fluxtrain.other_trainers.files import import_file
from fluxtrain.other_trainers.imported import Imported
from fluxtrain.other_trainers.option import Fate

FIELDS = {field.path for field in iter_fields(RunConfig)}


def imported(tmp_path: Path, text: str, processes: int = 1) -> Imported:
    file = tmp_path / "job.yaml"
    file.write_text(text)
    return import_file(file, {}, processes)


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
    missing = {line.option for line in found.lines[Fate.MISSING]}
    assert missing >= {"train.optimizer", "train.lr", "datasets[1]"}
    assert [line.option for line in found.lines[Fate.UNKNOWN]] == ["train.made_up"]


@pytest.mark.parametrize("text", [ai_toolkit_files.DEV, ai_toolkit_files.SCHNELL])
def test_every_option_is_named_once(tmp_path: Path, text: str) -> None:
    found = imported(tmp_path, text)
    named = [line.option for lines in found.lines.values() for line in lines if line.is_given]
    document = parse_yaml(text, "file")
    process = document["config"].pop("process")[0]
    datasets = process.pop("datasets")
    given = set(flat(document)) | set(flat(process)) | set(flat(datasets[0], "datasets."))
    assert sorted(named) == sorted(given | ({"datasets[1]"} if len(datasets) > 1 else set()))


def test_the_file_resolves_to_the_same(tmp_path: Path) -> None:
    found = imported(tmp_path, ai_toolkit_files.DEV)
    output = tmp_path / "lora.yaml"
    assert main(["import-config", str(tmp_path / "job.yaml"), "--output", str(output)]) == 0
    assert resolve(load_job(output).spec.run) == found.config


def test_every_field_of_the_table_exists() -> None:
    for name, row in AI_TOOLKIT.options.items():
        assert row.note or row.fields, name
        assert set(row.fields) <= FIELDS, name


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
        f"job: extension\nconfig: {{name: a, process: [{{type: sd_trainer, train: {{{train}}}}}]}}"
    )
    optim = imported(tmp_path, text).config.optim.model_dump()
    assert {key: optim[key] for key in expected} == expected
