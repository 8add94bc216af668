"""Wrong files of other trainers: one line with the file, the option, what was given and what is allowed."""

from __future__ import annotations

from pathlib import Path

import pytest

from fluxtrain.cli import main
from fluxtrain.errors import EXIT_USAGE

LORA = 'network_module = "networks.lora_flux"\n'
JOB = "job: extension\nconfig:\n  name: a\n  process:\n  - type: sd_trainer\n"
TUNER = '{"model_family": "flux", "max_train_steps": 10, '
BOMB = "a: &a [1, 1]\nb: &b [*a, *a]\nc: [*b, *b]\n"
# (name of the file, its text, the line on stderr)
BAD_FILES: list[tuple[str, str | bytes, str]] = [
    ("k.toml", "a = ", "k.toml: invalid TOML: Invalid value"),
    ("k.toml", 'a = "C:\\Users\\me"', "(at line 1, column 10); write \\ in a path as /"),
    ("k.toml", 'a = "D:\\me"', "(at line 1, column 10); write \\ in a path as /"),
    ("k.toml", "a = 1\na = 2", "k.toml: invalid TOML: Cannot overwrite a value"),
    ("k.toml", "a = " + "[" * 5000, "k.toml: invalid TOML: "),
    ("k.toml", b"\xff\xfe", "k.toml: not UTF-8 text (byte 0)"),
    ("k.toml", "#" * (1 << 20) + "##", "k.toml: got '1048578 bytes'; at most 1048576 are read"),
    ("k.toml", "[a]\nunet_lr = 1\n[b]\nunet_lr = 2", "k.toml: unet_lr: got 2; is given twice"),
    ("k.toml", "[training]\nunheard = 5", "k.toml: model.name: got 'llama3'; must be flux"),
    ("k.toml", "[[datasets]]\nbatch_size = 4", "k.toml: is kohya's data set config"),
    ("k.toml", LORA + 'network_dim = "big"', "k.toml: network_dim: got 'big'; must be a number"),
    ("k.toml", LORA + "network_dim = -4", "network_dim: got -4; must be a whole number, 1 or more"),
    ("k.toml", LORA + "network_dim = 0", "network_dim: got 0; must be a whole number, 1 or more"),
    ("k.toml", LORA + "network_dim = 99999",
     "network_dim: got 99999; adapter.rank must be a whole number from 1 to 1024"),
    ("k.toml", LORA + "network_alpha = nan", "network_alpha: got nan; must be a finite number"),
    ("k.toml", LORA + f"network_dim = 1{'0' * 400}", "must be a finite number"),
    ("k.toml", LORA + "learning_rate = true", "learning_rate: got true; must be a number"),
    ("k.toml", LORA + "learning_rate = 1000.0", "learning_rate: got 1000.0; optim.learning_rate must be"),
    ("k.toml", LORA + "learning_rate = [1]", "learning_rate: got [1]; must be a number"),
    ("k.toml", LORA + "learning_rate = 2024-01-01", "learning_rate: got datetime.date(2024, 1, 1); must"),
    ("k.toml", 'network_args = "split_qkv=True"', "network_args: got 'split_qkv=True'; must be a list"),
    ("k.toml", 'network_args = ["split_qkv"]', "must be a list of NAME=VALUE, not 'split_qkv'"),
    ("k.toml", LORA + 'network_args = ["train_blocks=none"]', "must be all, single or double"),
    ("k.toml", LORA + 'network_args = ["train_double_block_indices=0-40"]',
     "network_args.train_double_block_indices: got '0-40'; adapter.double_blocks there is no block 40"),
    ("k.toml", 'optimizer_args = ["betas=0.9"]', "optimizer_args.betas: got '0.9'; must be two numbers"),
    ("k.toml", LORA + 'gradient_checkpointing = "yes"', "got 'yes'; must be true or false"),
    ("k.toml", 'timestep_sampling = "gauss"', "must be sigma, uniform, sigmoid, shift or flux_shift"),
    ("k.toml", LORA + "resolution = 1000", "got 1000; a side of images must be a multiple of 16"),
    ("k.toml", LORA + "text_encoder_lr = -1", "text_encoder_lr: got -1; must be 0 or more"),
    ("k.toml", LORA + "text_encoder_lr = []", "text_encoder_lr: got []; must be 0 or more"),
    ("k.toml", LORA + "text_encoder_lr = [1e-4, -1]", "got [0.0001, -1]; must be 0 or more"),
    ("k.toml", LORA + "blocks_to_swap = 36", "blocks_to_swap: got 36; must be at most 35"),
    ("k.toml", LORA + "resolution = 17", "a side of images must be a multiple of 16, such as 16"),
    ("k.toml", LORA + 'resolution = "wide"', "resolution: got 'wide'; must be a number of pixels"),
    ("k.toml", LORA + "resolution = [1, 2, 3]", "must be a number of pixels, or width and height"),
    ("k.toml", LORA + "resolution = 64000", "resolution: got 64000; data.image_size must be a whole number"),
    ("k.toml", "enable_bucket = true\nmin_bucket_reso = 100",
     "min_bucket_reso: got 100; data.buckets.min_side must be"),
    ("k.toml", "enable_bucket = true\nmax_bucket_reso = 1056",
     "max_bucket_reso: got 1056; data.buckets.max_side must be a multiple of step"),
    ("k.toml", "enable_bucket = true\nresolution = 512\nbucket_reso_steps = 1024",
     "bucket_reso_steps: got 1024; must be at most resolution, 512"),
    ("k.toml", "enable_bucket = true\nbucket_reso_steps = 512",
     "bucket_reso_steps: got 512; must divide min_bucket_reso, which is 256 if not given"),
    ("k.toml", "enable_bucket = true\nbucket_reso_steps = 8",
     "bucket_reso_steps: got 8; data.buckets.step must be a whole number from 16"),
    ("k.toml", LORA + 'output_name = "///"', "output_name: got '///'; must have a letter or a digit"),
    ("k.toml", LORA + "max_train_steps = 0", "max_train_steps: got 0; must be a whole number, 1 or more"),
    ("k.toml", LORA + 'log_with = "mlflow"', "log_with: got 'mlflow'; must be tensorboard, wandb or all"),
    ("k.json", '{"LoRA_type": "Flux1"}', "k.json: is of a GUI for kohya's sd-scripts, for another model"),
    ("a.yaml", "job: [\n", "a.yaml line 2, column 1: invalid YAML"),
    ("a.yaml", BOMB, "invalid YAML: aliases are not read"),
    ("a.yaml", "a: 1\na: 2", "invalid YAML: duplicate key 'a'"),
    ("a.yaml", "- 1", "a.yaml: got [1]; must be a mapping of options"),
    ("a.yaml", "", "a.yaml: got null; must be a mapping of options"),
    ("a.yaml", "foo: 1", "must be kohya's TOML, ai-toolkit's YAML or SimpleTuner's config.json"),
    ("a.yaml", "apiVersion: fluxtrain.dev/v1alpha1", "a.yaml: is a FluxTraining already, or another"),
    ("a.yaml", "job: extension\nconfig: 3", "a.yaml: config: got 3; must be a mapping"),
    ("a.yaml", "job: extension\nconfig: {process: 3}", "config.process: got 3; must be a list with"),
    ("a.yaml", "job: extension\nconfig: {name: a}", "config.process: got null; must be a list with"),
    ("a.yaml", JOB + "    datasets: 3", "datasets: got 3; must be a list of mappings"),
    ("a.yaml", JOB.replace("sd_trainer", "slider"), "type: got 'slider'; asks for a slider; here FLUX.1"),
    ("a.yaml", JOB + "    model: {is_flux: false}", "model.is_flux: got false; must be true: other"),
    ("a.yaml", JOB + "    model: {arch: sdxl}", "model.arch: got 'sdxl'; asks for another model"),
    ("a.yaml", JOB + "    train: {lr: fast}", "train.lr: got 'fast'; must be a number"),
    ("a.yaml", JOB + "    train: {train_unet: false}", "train.train_unet: got false; must be true"),
    ("a.yaml", JOB + "    sample: {prompts: a}", "sample.prompts: got 'a'; must be a list of texts"),
    ("a.yaml", JOB + "    sample: {samples: [a, {prompt: b}]}", "samples: got ['a', {'prompt': 'b'}]; must"),
    ("a.yaml", JOB + "    sample: {samples: [{seed: 1}]}", "must be a list of mappings, each with a prompt"),
    ("a.yaml", JOB + "    datasets: [[]]", "datasets: got [[]]; must be a list of mappings"),
    ("a.yaml", JOB + "    datasets: [{flip_x: [true]}]", "datasets.flip_x: got [true]; must be true or"),
    ("a.yaml", JOB + "    model: {arch: flux}\n    network: {type: lokr, lokr_factor: 0}",
     "network.lokr_factor: got 0; adapter.lokr.factor must be -1, or 1 and more"),
    ("a.yaml", JOB + "    network: [1]", "network: got [1]; must be a mapping of options"),
    ("a.yaml", JOB + "    sample: hello", "sample: got 'hello'; must be a mapping of options"),
    ("a.yaml", "job: " + "[" * 10_000, "a.yaml: invalid YAML: nested too deeply"),
    ("a.yaml", "job: " + "{a: " * 10_000, "a.yaml: invalid YAML: nested too deeply"),
    ("a.yaml", "job: a\nconfig: " + "{a: " * 40 + "1" + "}" * 40, "is nested more than 32 levels"),
    ("a.yaml", "job: a\nconfig: {process: [3]}", "config.process: got [3]; must be a list with"),
    ("a.yaml", JOB + "    network: {type: {a: 1}}", "network.type: got {'a': 1}; must not be a"),
    ("a.yaml", JOB + "    network: {type: lora, linear: .5}", "network.linear: got 0.5; must be a whole"),
    ("s.json", "{", "s.json: invalid JSON: Expecting property name"),
    ("s.json", "[" * 100_000, "s.json: invalid JSON: nested too deeply"),
    ("s.json", TUNER + '"a": ' + "[" * 90 + "]" * 90 + "}", "s.json: is nested more than 32 levels"),
    ("s.json", TUNER + '"resolution_type": "mega"}', "got 'mega'; must be pixel, pixel_area or area"),
    ("s.json", '{"seed": NaN}', "s.json: invalid JSON: NaN is not a number of JSON"),
    ("s.json", '{"seed": 1, "seed": 2}', "s.json: invalid JSON: duplicate key 'seed'"),
    ("s.json", TUNER + '"--seed": 1, "seed": 2}', "seed: got 2; is given twice, as seed too"),
    ("s.json", '{"model_family": "sdxl"}', "model_family: got 'sdxl'; asks for another model"),
    ("s.json", TUNER + '"model_type": "embedding"}', "got 'embedding'; asks for textual inversion"),
    ("s.json", TUNER + '"train_batch_size": 1.5}', "train_batch_size: got 1.5; must be a whole"),
    ("s.json", TUNER + '"flow_schedule_shift": 3, "flow_schedule_auto_shift": true}',
     "flow_schedule_shift: got 3; must be 0 with flow_schedule_auto_shift"),
    ("s.json", TUNER + '"grad_clip_method": "both"}', "got 'both'; must be norm or value"),
    ("s.json", TUNER + '"resolution": -1}', "resolution: got -1; must be a whole number, 0 or more"),
    ("s.json", '{"model_family": "flux", "num_train_epochs": 0}', "must be above 0, or max_train_steps"),
    ("c.cfg", "A=1", "c.cfg: must end in one of .toml, .json, .yaml, .yml, .env, .sh, .bash"),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("name", "text", "line"), BAD_FILES, ids=range(len(BAD_FILES)))
def test_a_bad_file_is_refused_in_one_line(
    name: str, text: str | bytes, line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / name
    file.write_bytes(text.encode() if isinstance(text, str) else text)
    assert main(["import-config", str(file)]) == EXIT_USAGE
    out, error = capsys.readouterr()
    assert line in error
    assert error.count("\n") == 1
    assert len(error) < 600
    assert not out


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ([], "arguments: need one of FILE and --from-env"),
        (["k.toml", "--from-env"], "arguments: need one of FILE and --from-env"),
        (["missing.toml"], "missing.toml: cannot be read (No such file or directory)"),
        (["--from-env", "--gpus=0"], "--gpus: got 0; must be between 1 and 64"),
        (["--from-env", "--epoch-samples=0"], "--epoch-samples: got 0; must be between 1 and"),
        (["--from-env", "--output=/"], "--output: got '/'; exists already"),
        (["--from-env", "--adapter.size=3"], "--adapter.size: no such field"),
        (
            ["--from-env", "--adapter.rank=0"],
            "spec.run.adapter.rank: got 0; must be a whole number",
        ),
    ],
)
def test_wrong_arguments_are_refused_in_one_line(
    arguments: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["import-config", *arguments]) == EXIT_USAGE
    error = capsys.readouterr().err
    assert line in error
    assert error.count("\n") == 1


def test_several_wrong_options_are_all_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "k.toml"
    file.write_text('seed = "x"\nnetwork_dim = 0\nmax_grad_norm = "y"\n' + LORA)
    assert main(["import-config", str(file)]) == EXIT_USAGE
    error = capsys.readouterr().err
    assert all(name in error for name in ("seed", "network_dim", "max_grad_norm"))


def test_names_and_values_cannot_change_the_file_that_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "k.toml"
    file.write_text(
        '"a\\n  run: {}" = "b\\nspec: {}"\n' + LORA + 'pretrained_model_name_or_path = "x: [y"\n'
    )
    assert main(["import-config", str(file)]) == 0
    out = capsys.readouterr().out
    assert "\nspec: {}" not in out
    assert "initial_weights: 'x: [y'" in out
