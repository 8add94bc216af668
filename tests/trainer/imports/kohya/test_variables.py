"""The variables of kohya's container for MI300X: each becomes a field, or says what to use."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from tests.paths import MICRO

from fluxtrain.cli import main
from fluxtrain.contract.run.optim import OPTIMIZER_KINDS, OptimizerName
from fluxtrain.contract.run.resolve import resolve
from fluxtrain.errors import EXIT_OK, EXIT_USAGE, ConfigError
from fluxtrain.imports.table import Disposition
from fluxtrain.imports.variables import VARIABLES, import_variables, refuse_different

ADAMW = {"PARAMS_OPTIMIZER_TYPE": "AdamW", "PARAMS_LEARNING_RATE": "3e-4"}


def test_the_values_are_those_of_the_variables_and_of_the_script() -> None:
    environment = {
        **ADAMW,
        "PARAMS_LEARNING_SCHEDULER": "cosine",
        "PARAMS_NETWORK_DIM": "8",
        "PARAMS_SPLIT_QKV": "True",
        "PARAMS_WEIGHT_DECAY": "0.2",
        "PARAMS_MAX_EPOCHS": "10",
        "PARAMS_SAVE_EVERY_N_STEPS": "7",
        "OUTPUT_NAME": "7318cd4a8c75-1740076123",
        "SAMPLE_PROMPTS": "prompts.txt",
    }
    config = import_variables(environment, {}, epoch_samples=400).config
    assert config.adapter is not None
    assert (config.adapter.rank, config.adapter.alpha, config.adapter.split_qkv) == (8, 4.0, True)
    assert (config.optim.learning_rate, config.optim.weight_decay) == (3e-4, 0.2)
    assert (config.optim.beta1, config.optim.beta2) == (0.9, 0.999)
    assert (config.schedule.decay, config.schedule.steps) == ("cosine", 4000)
    assert (config.flow.timestep_sampling, config.flow.guidance) == ("sigmoid", 1.0)
    assert (config.seed, config.parallel.activation_checkpointing) == (42, 1.0)
    assert (config.adapter_file.every_steps, config.sampling.every_steps) == (7, 200)
    assert (config.adapter_file.name, config.adapter_file.dtype) == (
        "7318cd4a8c75-1740076123",
        "bfloat16",
    )


def test_a_variable_that_the_guide_does_not_have_is_refused() -> None:
    config = resolve({"preset": "micro"})
    misspelt = {"PARAMS_LERNING_RATE": "1e-4", "PARAMS_SERVICE_HOST": "10.0.0.1"}
    says = r"\$PARAMS_LERNING_RATE: got '1e-4'; no variable of the guide; did you mean PARAMS_LEARNING_RATE"
    with pytest.raises(ConfigError, match=says):
        import_variables(misspelt, {})
    with pytest.raises(ConfigError, match=says):
        refuse_different(misspelt, config)
    with pytest.raises(ConfigError, match="did you mean DATASET_NAME"):
        refuse_different({"PARAMS_DATASET_NAME": "a"}, config)
    with pytest.raises(ConfigError, match=r"did you mean PARAMS_NETWORK_DIM\?;"):
        refuse_different({"PARAMS_NETWORK_DIMM": "4"}, config)
    other = {"PARAMS_X": "1"}
    refuse_different(other, config)
    with pytest.raises(
        ConfigError, match=r"\$PARAMS_X: got '1'; no variable of the guide; unset it"
    ):
        import_variables(other, {})
    refuse_different({"PARAMS_PORT_80_TCP": "a", "PARAMS_SERVICE_PORT": "80"}, config)


@pytest.mark.parametrize(("epochs", "cycles"), [("12", 4), ("2", 1), (None, 1)])
def test_restarts_are_a_third_of_the_epochs_as_in_the_script(
    epochs: str | None, cycles: int
) -> None:
    environment = {"PARAMS_LEARNING_SCHEDULER": "cosine_with_restarts"}
    environment |= {"PARAMS_MAX_EPOCHS": epochs} if epochs else {}
    assert import_variables(environment, {}).config.schedule.cycles == cycles
    given = environment | {"PARAMS_NUM_CYCLES": "7"}
    assert import_variables(given, {}).config.schedule.cycles == 7


@pytest.mark.parametrize("name", ["PARAMS_NOISE_OFFSET", "PARAMS_NUM_CYCLES"])
def test_what_does_nothing_in_sd_scripts_says_so(name: str) -> None:
    lines = import_variables({name: "3"}, {}).lines[Disposition.IGNORED]
    assert f"${name}" in {line.option for line in lines if line.is_given and line.note}


def test_the_script_s_own_values_are_those_of_prodigy() -> None:
    config = import_variables({}, {}, epoch_samples=400).config
    assert config.adapter is not None
    assert (config.optim.name, config.optim.learning_rate) == ("prodigy", 1.0)
    assert (config.optim.prodigy.d_coef, config.optim.weight_decay) == (2.0, 0.1)
    assert not config.optim.prodigy.bias_correction
    assert not config.optim.prodigy.safeguard_warmup
    assert (config.optim.beta2, config.optim.epsilon) == (0.999, 1e-8)
    assert (config.schedule.decay, config.schedule.steps) == ("constant", 2000)
    assert (config.adapter.rank, config.adapter.alpha) == (32, 4.0)


def test_what_the_script_does_not_pass_on_is_used_here() -> None:
    arguments = "use_bias_correction=True weight_decay=0.3 growth_rate=1.02"
    environment = {"PARAMS_OPTIMIZER_ARGS": arguments, "PARAMS_RESUME_FROM": "style.safetensors"}
    found = import_variables(environment, {})
    assert found.config.adapter is not None
    assert found.config.adapter.initial == "style.safetensors"
    assert found.config.optim.prodigy.bias_correction
    assert found.config.optim.prodigy.growth_rate == 1.02
    assert found.config.optim.weight_decay == 0.3
    environment["PARAMS_WEIGHT_DECAY"] = "0.2"
    assert import_variables(environment, {}).config.optim.weight_decay == 0.2, "the variable wins"


def test_every_variable_is_named_once_by_its_name() -> None:
    values = {"BASE_MODEL": "flux", "OUTPUT_NAME": "cat", **ADAMW}
    values |= {name: row.default for name, row in VARIABLES.items() if row.default} | values
    values["PARAMS_OPTIMIZER_ARGS"] = "d0=1e-5"
    values |= {name: "1" for name in VARIABLES if name not in values and name != "OUTPUT_PATH"}
    lines = import_variables(values, {}).lines
    named = [line.option for those in lines.values() for line in those if line.is_given]
    expected = ["optimizer_args.d0", *(f"${name}" for name in values)]
    assert sorted(named) == sorted(expected)


def test_the_file_of_an_environment_is_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in ADAMW.items():
        monkeypatch.setenv(name, value)
    assert main(["import-config", "--from-env", "--schedule.steps=100"]) == EXIT_OK
    out, report = capsys.readouterr()
    run = yaml.safe_load(out)["spec"]["run"]
    assert resolve(run).optim.learning_rate == 3e-4
    assert "$PARAMS_LEARNING_RATE=3e-4: optim.learning_rate=0.0003" in report
    assert "$PARAMS_NETWORK_DIM=32 (not given): adapter.rank=32" in report
    assert "$PARAMS_MAX_EPOCHS=5 (not given): schedule.epochs=5" in report


def test_an_environment_without_any_of_them_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OUTPUT_NAME", "")
    file = tmp_path / "env.yaml"
    assert main(["import-config", "--from-env", f"--output={file}"]) == EXIT_USAGE
    out, error = capsys.readouterr()
    assert (out, file.exists()) == ("", False)
    assert error == (
        "fluxtrain: error: --from-env: none of the guide's variables is set; set those that differ from "
        "its script, such as PARAMS_LEARNING_RATE, PARAMS_NETWORK_DIM and DATASET_CONFIG\n"
    )


@pytest.mark.parametrize(
    ("name", "value", "line"),
    [
        ("PARAMS_NETWORK_DIM", "big", "$PARAMS_NETWORK_DIM: got 'big'; must be a number"),
        ("PARAMS_NETWORK_DIM", "9999", "got '9999'; adapter.rank must be a whole number from 1"),
        ("PARAMS_MAX_EPOCHS", "2.5", "got '2.5'; must be a whole number, 1 or more"),
        ("PARAMS_MAX_EPOCHS", "0", "got '0'; must be a whole number, 1 or more"),
        ("PARAMS_SPLIT_QKV", "yes", "$PARAMS_SPLIT_QKV: got 'yes'; must be true or false"),
        ("PARAMS_TIMESTEP_SAMPLING", "x", "$PARAMS_TIMESTEP_SAMPLING: got 'x'; must be sigma,"),
        ("BASE_MODEL", "sdxl", "$BASE_MODEL: got 'sdxl'; must be flux"),
        ("PARAMS_OPTIMIZER_ARGS", "fast", "must be a list of NAME=VALUE, not 'fast'"),
        ("PARAMS_LEARNING_RATE", "1e-4", "got '1e-4'; optim.learning_rate must be at least 0.01"),
        ("OUTPUT_NAME", "___", "$OUTPUT_NAME: got '___'; must have a letter or a digit"),
    ],
)
def test_a_wrong_value_is_refused_by_the_variables_name(name: str, value: str, line: str) -> None:
    with pytest.raises(ConfigError) as raised:
        import_variables({name: value}, {})
    assert line in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_run_refuses_variables_that_ask_for_something_else(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PARAMS_NETWORK_DIM", "8")
    monkeypatch.setenv("PARAMS_D_COEF", "2")
    assert main(["run", str(MICRO)]) == EXIT_USAGE
    error = capsys.readouterr().err
    assert (
        "$PARAMS_NETWORK_DIM: got '8'; is not read; here --adapter.rank=8, which is null" in error
    )
    assert "$PARAMS_D_COEF: got '2'; is not read; adamw has no such setting here" in error


def test_a_run_names_null_in_the_words_of_the_file() -> None:
    with pytest.raises(ConfigError, match=r"here --schedule.epochs=5, which is null; unset"):
        refuse_different({"PARAMS_MAX_EPOCHS": "5"}, resolve({"preset": "dev-lora"}))
    with pytest.raises(ConfigError, match=r"--adapter.split_qkv=true, which is false; unset"):
        refuse_different({"PARAMS_SPLIT_QKV": "True"}, resolve({"preset": "dev-lora"}))


def test_a_run_of_their_own_file_does_not_refuse_them() -> None:
    environment = {**ADAMW, "PARAMS_NOISE_OFFSET": "0.1", "PARAMS_NETWORK_DIM": "8"}
    config = import_variables(environment, {}).config
    refuse_different(environment, config)
    refuse_different({"OUTPUT_DIR": "/elsewhere", "DATASET_NAME": "other/program"}, config)
    with pytest.raises(ConfigError, match="NETWORK_DIM"):
        refuse_different({**environment, "PARAMS_NETWORK_DIM": "16"}, config)


DEPENDENT = [
    ("PARAMS_SAMPLE_EVERY_N_STEPS", "5", "7", "sampling.every_steps=7, which is 5"),
    ("PARAMS_LEARNING_RATE", "3e-4", "1e-4", "optim.learning_rate=0.0001, which is 0.0003"),
    ("PARAMS_OPTIMIZER_TYPE", "AdamW", "prodigy", "optim.name=prodigy, which is adamw"),
    ("PARAMS_NETWORK_ALPHA", "0", "4", "adapter.alpha=4.0, which is 8.0"),
    ("PARAMS_NUM_CYCLES", "3", "4", "schedule.cycles=4, which is 3"),
]
"""Variables whose meaning depends on others: the value of the file, another one, and what is said of it."""


@pytest.mark.parametrize(("name", "same", "other", "text"), DEPENDENT)
def test_variables_that_are_not_set_have_the_values_of_the_file(
    name: str, same: str, other: str, text: str
) -> None:
    config = resolve(
        {
            "preset": "dev-lora",
            "adapter": {"rank": 8, "alpha": 8},
            "optim": {"learning_rate": 3e-4, "weight_decay": 0.05, "beta2": 0.999},
            "schedule": {"decay": "cosine_with_restarts", "cycles": 3},
            "sampling": {"prompt_file": "prompts.txt", "every_steps": 5},
        }
    )
    refuse_different({name: same}, config)
    for prompts in ({}, {"SAMPLE_PROMPTS": "prompts.toml"}):
        with pytest.raises(ConfigError) as raised:
            refuse_different({name: other, **prompts}, config)
        assert str(raised.value) == (
            f"${name}: got '{other}'; is not read; here --{text}; unset it to continue"
        )


@pytest.mark.parametrize("name", [*OPTIMIZER_KINDS])
def test_the_learning_rate_is_that_of_the_file_s_optimizer(name: OptimizerName) -> None:
    config = resolve({"preset": "dev-lora", "optim": {"name": name, "learning_rate": 0.02}})
    refuse_different({"PARAMS_LEARNING_RATE": "0.02"}, config)
    with pytest.raises(ConfigError, match=r"--optim.learning_rate=0.03, which is 0.02"):
        refuse_different({"PARAMS_LEARNING_RATE": "0.03"}, config)
