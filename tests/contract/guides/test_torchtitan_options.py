"""Options and variables of other trainers' guides are refused with what replaces them."""

from __future__ import annotations

import pytest
from tests.paths import MICRO

from fluxtrain.cli import main
from fluxtrain.contract.model_base import iter_fields
from fluxtrain.contract.run.config import RunConfig
from fluxtrain.contract.run.overrides import (
    OPTIONS,
    READ_VARIABLES,
    VARIABLES,
    parse_overrides,
    refuse_variables,
)
from fluxtrain.errors import EXIT_USAGE, ConfigError

FIELDS = {field.path for field in iter_fields(RunConfig)}

GUIDES: list[tuple[str, str]] = [
    ("--training.batch_size=16", "--schedule.global_batch_size and --parallel.micro_batch_size"),
    ("--training.seed=1234", "--seed=1234"),
    ("--training.steps=1000", "--schedule.steps=1000"),
    ("--training.compile", "--parallel.compile=true"),
    ("--parallelism.data_parallel_replicate_degree=4", "--parallel.dp_replicate=4"),
    ("--parallelism.data_parallel_shard_degree=8", "--parallel.dp_replicate: the shard degree"),
    ("--checkpoint.enable_checkpoint", "--checkpoint.every_steps: checkpoints are always on"),
    ("--checkpoint.interval=1000", "--checkpoint.every_steps=1000"),
    ("--optimizer.lr=1e-3", "--optim.learning_rate=1e-3"),
    ("--training.mixed_precision_param=float32", "--precision.compute=float32"),
    ("--training.dataset=coco", "--data.source and --data.train"),
    ("--training.dataset_path=/dataset/coco", "--data.train: a folder"),
    ("--eval.dataset=", "--data.validation: to evaluate nothing, set --evaluation.every_samples=0"),
    ("--eval.dataset_path=/dataset/*", "--data.validation: a folder"),
    ("--encoder.autoencoder_path=", "--encoders.autoencoder"),
    ("--encoder.t5_encoder=", "--encoders.t5"),
    ("--encoder.clip_encoder=", "--encoders.clip"),
    ("--preprocessing.output_dataset_path=/x", "--preprocess.train and --preprocess.validation"),
]
"""Each option of the four guides as they write it, and what the error names."""


@pytest.mark.parametrize(("argument", "replacement"), GUIDES)
def test_an_option_of_a_guide_is_refused_with_its_replacement(
    argument: str, replacement: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", str(MICRO), argument]) == EXIT_USAGE
    expected = f"{argument.partition('=')[0]}: an option of torchtitan; here {replacement}"
    assert expected in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "replacement"),
    [
        (["--training.steps", "7"], "--schedule.steps=7"),
        (["--training.batch-size=2", "--seed=1"], "--schedule.global_batch_size and"),
        (["--training.no-compile"], "--parallel.compile=false"),
        (["--training.no_compile"], "--parallel.compile=false"),
        (["--training.compile", "--seed=1"], "--parallel.compile=true"),
    ],
)
def test_every_way_to_write_an_option_is_recognised(arguments: list[str], replacement: str) -> None:
    with pytest.raises(ConfigError, match=replacement):
        parse_overrides(arguments)


def test_all_of_them_are_refused_at_once() -> None:
    with pytest.raises(ConfigError) as raised:
        parse_overrides([argument for argument, _ in GUIDES[:8]])
    assert str(raised.value).count("an option of torchtitan") == 8


def test_every_replacement_exists_and_no_field_of_ours_is_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        main(["run", "--help"])
    options = capsys.readouterr().out
    assert not FIELDS & OPTIONS.keys()
    for name, row in (*OPTIONS.items(), *VARIABLES.items()):
        assert row.options or row.note, name
        for option in (option.partition("=")[0] for option in row.options):
            assert option in FIELDS or f"--{option} " in options, f"{name}: no --{option}"


@pytest.mark.parametrize(
    ("name", "value", "replacement"),
    [
        ("NGPU", "8", "here --processes=8"),
        ("CONFIG_FILE", "./train_configs/flux_schnell_mlperf.toml", "the first argument"),
        ("CONFIG", "flux_schnell_mlperf.toml", "the first argument"),
        ("ENABLE_CHECKPOINTING", "False", "here --checkpoint.every_steps"),
        ("ENABLE_TB", "True", "here --logging.tensorboard: true or false"),
    ],
)
def test_a_variable_that_would_change_the_run_is_refused(
    name: str,
    value: str,
    replacement: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv(name, value)
    assert main(["run", str(MICRO)]) == EXIT_USAGE
    error = capsys.readouterr().err
    assert f"${name}: got '{value}'; is not read; " in error
    assert replacement in error


@pytest.mark.parametrize(
    ("environment", "processes"),
    [
        ({"NGPU": "8"}, 4),
        ({"NGPU": ""}, None),
        ({"CONFIG_FILE": "/etc/another-program.yaml"}, None),
        ({"ENABLE_CHECKPOINTING": "True"}, None),
        ({"ENABLE_TB": "False", "LOG_RANK": "0,1"}, None),
    ],
)
def test_a_variable_that_changes_nothing_is_not(
    environment: dict[str, str], processes: int | None
) -> None:
    refuse_variables(environment, processes)


def test_torchtitan_s_toml_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "flux_schnell_mlperf.toml"]) == EXIT_USAGE
    assert "must be a FluxTraining, as YAML; docs/coming-from.md" in capsys.readouterr().err


def test_the_variables_that_are_read_are_not_refused() -> None:
    assert not READ_VARIABLES.keys() & VARIABLES.keys()
