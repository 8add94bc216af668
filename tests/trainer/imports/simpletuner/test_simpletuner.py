"""SimpleTuner's config.json: the fields have its values, or its defaults, and no option is dropped."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.trainer.imports.simpletuner import simpletuner_files

from fluxtrain.cli import main
from fluxtrain.contract.resource.document import load_job
from fluxtrain.contract.run.resolve import resolve
from fluxtrain.imports.files import import_file
from fluxtrain.imports.table import Disposition, Imported


def imported(tmp_path: Path, text: str, samples: int | None = None) -> Imported:
    file = tmp_path / "config.json"
    file.write_text(text)
    return import_file(file, {}, 1, samples)


def test_a_lora_has_the_values_of_its_file(tmp_path: Path) -> None:
    config = imported(tmp_path, simpletuner_files.LORA).config
    assert config.adapter is not None
    assert (config.adapter.rank, config.adapter.alpha) == (8, 4.0)
    assert (config.adapter.ranks.img_mod, config.adapter.ranks.img_mlp) == (0, None)
    assert config.adapter.split_qkv
    assert (config.optim.learning_rate, config.optim.weight_decay) == (1e-4, 0.01)
    assert (config.optim.beta2, config.optim.max_grad_norm) == (0.999, 1.0)
    assert (config.schedule.decay, config.schedule.min_learning_rate) == ("polynomial", 1e-6)
    assert (config.schedule.steps, config.schedule.warmup_steps) == (3000, 100)
    assert (config.schedule.global_batch_size, config.parallel.micro_batch_size) == (6, 2)
    assert config.parallel.activation_checkpointing == 0.5
    assert (config.flow.timestep_sampling, config.flow.shift) == ("shift", 3.0)
    assert (config.flow.guidance, config.flow.prompt_dropout) == (1.0, 0.05)
    assert (config.checkpoint.every_steps, config.checkpoint.keep) == (250, 4)
    assert (config.adapter_file.every_steps, config.adapter_file.layout) == (250, "diffusers")
    assert (config.sampling.prompts, config.sampling.num_steps) == (["a pin on a jacket"], 20)
    assert (config.sampling.every_steps, config.sampling.guidance) == (500, 3.0)
    assert config.logging.wandb is not None
    assert config.logging.wandb.project == "pins"


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ("tiny", ("none", "7,20", ["linear2"])),
        ("nano", ("none", "7", ["linear2"])),
        ("context", ("all", "none", ["txt_attn.qkv", "txt_attn.proj"])),
        (
            "context+ffs",
            ("all", "none", ["txt_attn.qkv", "txt_attn.proj", "txt_mlp.0", "txt_mlp.2"]),
        ),
    ],
)
def test_a_target_selects_its_layers(
    tmp_path: Path, target: str, expected: tuple[str, str, list[str]]
) -> None:
    options = {**json.loads(simpletuner_files.LORA), "flux_lora_target": target}
    adapter = imported(tmp_path, json.dumps(options)).config.adapter
    assert adapter is not None
    assert (adapter.double_blocks, adapter.single_blocks, adapter.layers) == expected


@pytest.mark.parametrize(("count", "expected"), [(0, 0), (18, 20), (56, 57)])
def test_swapped_blocks_are_offloaded(tmp_path: Path, count: int, expected: int) -> None:
    options = {**json.loads(simpletuner_files.LORA), "musubi_blocks_to_swap": count}
    assert imported(tmp_path, json.dumps(options)).config.parallel.offload_blocks == expected


def test_a_full_training_has_the_values_of_its_file(tmp_path: Path) -> None:
    found = imported(tmp_path, simpletuner_files.FULL, samples=1000)
    config = found.config
    assert config.adapter is None
    assert not config.model.guidance_embed
    assert (config.flow.timestep_sampling, config.flow.prompt_dropout) == ("uniform", 0.1)
    assert (config.schedule.steps, config.schedule.global_batch_size) == (500, 4)
    assert (config.data.image_size, config.sampling.every_steps) == (1024, 0)
    assert (config.optim.name, config.optim.learning_rate) == ("lion", 1e-6)
    assert "lora_rank" in {line.option for line in found.lines[Disposition.IGNORED]}


@pytest.mark.parametrize("text", [simpletuner_files.LORA, simpletuner_files.FULL])
def test_every_option_is_named_once(tmp_path: Path, text: str) -> None:
    found = imported(tmp_path, text)
    named = [line.option for lines in found.lines.values() for line in lines if line.is_given]
    given = {name.removeprefix("--") for name in json.loads(text)}
    renamed = {"checkpointing_steps", "validation_steps"}
    present = {"checkpoint_step_interval", "validation_step_interval"}
    assert sorted({*named} - present) == sorted(given - renamed - present)
    assert len(named) == len(given)


def test_images_need_a_prompt(tmp_path: Path) -> None:
    found = imported(tmp_path, '{"model_family": "flux", "validation_steps": 5}')
    assert "validation_step_interval" in {line.option for line in found.lines[Disposition.MISSING]}
    assert found.config.sampling.every_steps == 0


@pytest.mark.parametrize(
    ("more", "samples", "expected", "note"),
    [
        ({}, 100, 3 * 13, ""),
        ({}, None, 0, "give --epoch-samples"),
        ({"validation_step_interval": 7}, 100, 7, "images have one interval"),
        ({"validation_epoch_interval": 0}, 100, 0, ""),
    ],
)
def test_images_every_few_epochs_need_the_number_of_samples(
    tmp_path: Path, more: dict[str, object], samples: int | None, expected: int, note: str
) -> None:
    options = {
        **{"model_family": "flux", "validation_prompt": "a pin", "train_batch_size": 8},
        **{"validation_epoch_interval": 3, **more},
    }
    found = imported(tmp_path, json.dumps(options), samples=samples)
    assert found.config.sampling.every_steps == expected
    missing = {line.option: line.note for line in found.lines[Disposition.MISSING]}
    assert note in missing.get("validation_epoch_interval", "")
    assert bool(note) == ("validation_epoch_interval" in missing)


def test_clipping_by_value_has_no_counterpart(tmp_path: Path) -> None:
    found = imported(tmp_path, '{"model_family": "flux", "max_grad_norm": 0.5}')
    missing = {line.option: line.note for line in found.lines[Disposition.MISSING]}
    assert "grad_clip_method=norm" in missing["max_grad_norm"]
    assert found.config.optim.max_grad_norm == 1.0, "the preset's"


def test_the_file_resolves_to_the_same_and_hides_the_token(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = imported(tmp_path, simpletuner_files.LORA)
    output = tmp_path / "lora.yaml"
    assert main(["import-config", str(tmp_path / "config.json"), "--output", str(output)]) == 0
    assert resolve(load_job(output).spec.run) == found.config
    shown = capsys.readouterr().err + output.read_text()
    assert "sparkle" in shown
    assert "not-to-be-shown" not in shown


def test_dropout_of_adapters_that_is_on_by_default_is_named(tmp_path: Path) -> None:
    missing = imported(tmp_path, '{"model_family": "flux"}').lines[Disposition.MISSING]
    assert ("lora_dropout", 0.1, False) in {(it.option, it.value, it.is_given) for it in missing}


@pytest.mark.parametrize(
    ("options", "sampling", "shift"),
    [
        ({}, "shift", 3.0),
        ({"flux_schedule_shift": 2}, "shift", 2.0),
        ({"flux_schedule_shift": 0, "flow_matching_sigmoid_scale": 1.2}, "sigmoid", None),
        ({"flux_schedule_auto_shift": True}, "flux_shift", None),
        ({"flux_use_uniform_schedule": True, "flux_schedule_shift": 0}, "uniform", None),
    ],
)
def test_timesteps_have_older_names_too(
    options: dict[str, object], sampling: str, shift: float | None, tmp_path: Path
) -> None:
    given = {"model_family": "flux", "model_type": "lora", "max_train_steps": 9, **options}
    found = imported(tmp_path, json.dumps(given))
    assert found.config.flow.timestep_sampling == sampling
    assert shift is None or found.config.flow.shift == shift
    assert not found.lines[Disposition.UNKNOWN]


@pytest.mark.parametrize("shift", [{}, {"flow_schedule_shift": 0}])
def test_a_uniform_draw_that_is_shifted_by_the_size_is_named(
    tmp_path: Path, shift: dict[str, object]
) -> None:
    flags = {"flow_use_uniform_schedule": True, "flow_schedule_auto_shift": True}
    found = imported(tmp_path, json.dumps({"model_family": "flux", **flags, **shift}))
    missing = {line.option: line.note for line in found.lines[Disposition.MISSING]}
    assert "a uniform draw is not shifted here" in missing["flow_schedule_shift"]


def test_versions_with_a_variable_for_each_model_shift_no_timesteps(tmp_path: Path) -> None:
    file = tmp_path / "config.env"
    for lines, sampling in (("", "sigmoid"), ("FLUX_SCHEDULE_SHIFT=2\n", "shift")):
        file.write_text(f"MODEL_TYPE=lora\n{lines}FLUX=true\nMAX_NUM_STEPS=9\n")
        assert import_file(file, {}).config.flow.timestep_sampling == sampling
