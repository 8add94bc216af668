"""What the options of diffusers' two scripts for FLUX.1 mean."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from fluxtrain.contract.run.config import value_at
from fluxtrain.errors import ConfigError
from fluxtrain.imports.files import import_file
from fluxtrain.imports.table import Disposition, Imported

LORA, FULL = "train_dreambooth_lora_flux.py", "train_dreambooth_flux.py"
FLUX = "--pretrained_model_name_or_path b/FLUX.1-dev --instance_data_dir p --instance_prompt dog"


def imported(folder: Path, options: str, script: str = LORA, **more: int) -> Imported:
    path = folder / "t.sh"
    path.write_text(f"accelerate launch {script} {FLUX} {options}\n")
    return import_file(path, {}, **more)


@pytest.mark.parametrize(
    ("options", "values"),
    [
        ("", {"adapter.rank": 4, "adapter.alpha": 4.0, "schedule.global_batch_size": 4}),
        ("", {"flow.timestep_sampling": "uniform", "flow.guidance": 3.5, "flow.prompt_dropout": 0.0}),
        ("--rank 8 --lora_alpha 16", {"adapter.rank": 8, "adapter.alpha": 16.0}),
        ("", {"optim.name": "adamw", "optim.beta2": 0.999, "optim.weight_decay": 1e-4}),
        ("--use_8bit_adam", {"optim.name": "adamw_8bit"}),
        ("--optimizer Lion", {"optim.name": "adamw"}),
        ("--optimizer prodigy --learning_rate 1 --prodigy_safeguard_warmup False",
         {"optim.name": "prodigy", "optim.prodigy.safeguard_warmup": True,
          "optim.prodigy.bias_correction": True}),
        ("--scale_lr --train_batch_size 2 --gradient_accumulation_steps 3 --learning_rate 1e-5",
         {"optim.learning_rate": pytest.approx(6e-5)}),
        ("--weighting_scheme logit_normal --logit_mean 0.5",
         {"flow.timestep_sampling": "logit_normal", "flow.logit_mean": -0.5}),
        ("--weighting_scheme sigma_sqrt",
         {"flow.timestep_sampling": "uniform", "flow.loss_weighting": "sigma_sqrt"}),
        ("--weighting_scheme mode --mode_scale 1",
         {"flow.timestep_sampling": "mode", "flow.mode_scale": 1.0}),
        ("--lr_warmup_steps 9", {"schedule.warmup_steps": 0}),
        ("--report_to wandb", {"logging.wandb.project": "dreambooth-flux-dev-lora"}),
        ('--instance_prompt ""', {"data.class_tokens": ""}),
        ("--lr_scheduler cosine --lr_warmup_steps 9",
         {"schedule.warmup_steps": 9, "schedule.decay": "cosine"}),
        ("--lr_scheduler cosine", {"schedule.warmup_steps": 500}),
        ("--max_train_steps 7 --num_train_epochs 3", {"schedule.steps": 7, "schedule.epochs": None}),
        ("--num_train_epochs 3", {"schedule.epochs": 3}),
        ("", {"data.variants.crops": 4, "data.class_tokens": "dog"}),
        ("--center_crop --caption_column text",
         {"data.variants": None, "data.class_tokens": "", "data.table.caption_column": "text"}),
        ("", {"adapter.split_qkv": True, "data.text_length": 512, "checkpoint.keep": 10_000}),
    ],
)  # fmt: skip
def test_an_option_means_what_it_means_there(
    options: str, values: Mapping[str, object], tmp_path: Path
) -> None:
    found = imported(tmp_path, options).config.model_dump()
    assert {path: value_at(found, path) for path in values} == values


def test_the_other_script_trains_all_weights_with_short_prompts(tmp_path: Path) -> None:
    found = imported(tmp_path, "--rank 8", FULL)
    assert found.config.adapter is None
    assert found.config.data.text_length == 77
    assert [line.option for line in found.lines[Disposition.IGNORED]] == ["rank"]


@pytest.mark.parametrize(
    "options",
    ["--train_text_encoder", "--lora_dropout 0.1", "--lora_layers attn.to_k", "--unheard 1"],
)
def test_what_has_no_counterpart_is_named(options: str, tmp_path: Path) -> None:
    found = imported(tmp_path, options)
    lost = [*found.lines[Disposition.MISSING], *found.lines[Disposition.UNKNOWN]]
    assert [line.option for line in lost if line.is_given] == [options.split()[0].strip("-")]


def test_the_layers_of_its_default_are_named_as_not_the_same(tmp_path: Path) -> None:
    found = imported(tmp_path, "")
    (lost,) = (line for line in found.lines[Disposition.MISSING] if line.option == "lora_layers")
    assert lost.note.startswith(
        "linear1 has one adapter here, 3 of its 4 parts there; before October 2024"
    )
    assert found.config.adapter is not None
    assert "linear1" in found.config.adapter.layers
    assert "linear2" not in found.config.adapter.layers


def test_images_of_epochs_need_the_number_of_samples(tmp_path: Path) -> None:
    options = "--validation_prompt 'a dog' --validation_epochs 5 --train_batch_size 2"
    found = imported(tmp_path, options, epoch_samples=10).config.sampling
    assert (found.every_steps, found.prompts, found.at_end) == (25, ["a dog"], True)


def test_variables_of_the_script_have_their_values(tmp_path: Path) -> None:
    path = tmp_path / "t.sh"
    text = f"export DIR='my dogs'\nR=8\npython {LORA} --instance_data_dir=\"$DIR\" --rank=${{R}}"
    path.write_text(f"{text} --output_dir=$DIR2")
    with pytest.raises(ConfigError, match="must not have variables; write what they stand for"):
        import_file(path, {})
    path.write_text(text)
    found = import_file(path, {}).config
    assert found.data.images == "my dogs"
    assert found.adapter is not None
    assert found.adapter.rank == 8


@pytest.mark.parametrize("value", [f"examples/{LORA}", f'"${{T:-a/{LORA}}}"', f"'{LORA}'  # ours"])
def test_a_script_in_a_variable_is_no_command_without_options(value: str, tmp_path: Path) -> None:
    path = tmp_path / "t.sh"
    path.write_text(f'T={value}\naccelerate launch "$T" --rank 8')
    with pytest.raises(ConfigError, match="has the script's name in a variable: write it in the"):
        import_file(path, {})
    path.write_text(f"T={value}\naccelerate launch {LORA} --rank 8")
    found = import_file(path, {}).config
    assert found.adapter is not None
    assert found.adapter.rank == 8


@pytest.mark.parametrize(
    ("before", "value", "expected"),
    [
        ("DIR=cats", "${DIR:-dogs}", "got '${DIR:-dogs}'; must not have variables"),
        ("DIR=cats", "${DIR%s}", "got '${DIR%s}'; must not have variables"),
        ("DIR=`pwd`/b", "$DIR/a", "got '`pwd`/b/a'; must not have variables"),
        ('DIR="`pwd`/b c"', "$DIR", "got '`pwd`/b c'; must not have variables"),
        ("DIR=cats\nDIR=$(pwd)/cats", "$DIR", "got '$(pwd)/cats'; must not have variables"),
        ("DIR=cats\nDIR=$DIR/small", "$DIR", "cats/small"),
        ("A=1 DIR='my cats'; B=2", "${DIR}", "my cats"),
    ],
)
def test_a_variable_has_the_value_of_its_last_assignment_or_is_refused(
    before: str, value: str, expected: str, tmp_path: Path
) -> None:
    path = tmp_path / "t.sh"
    path.write_text(f'{before}\npython {LORA} --instance_data_dir="{value}"\nDIR=later')
    try:
        found = import_file(path, {}).config.data.images
    except ConfigError as error:
        found = str(error)
    assert found is not None
    assert expected in found if "must" in expected else found == expected


def test_alpha_is_the_ranks_in_older_scripts_and_is_asked_for(tmp_path: Path) -> None:
    found = imported(tmp_path, "--rank 128")
    notes = {line.option: line.note for line in found.lines[Disposition.MISSING]}
    assert found.config.adapter is not None
    assert found.config.adapter.alpha == 4.0
    assert "--adapter.alpha" in notes["lora_alpha"]
    stated = import_file(tmp_path / "t.sh", {"adapter": {"alpha": 128.0}})
    assert "lora_alpha" not in {line.option for line in stated.lines[Disposition.MISSING]}
    for options in ("", "--rank 128 --lora_alpha 4"):
        lines = imported(tmp_path, options).lines[Disposition.WRITTEN]
        assert "lora_alpha" in {line.option for line in lines}
