"""Help texts list every option and field; arguments that argparse checks are refused with exit code 2."""

from __future__ import annotations

import json

import pytest
from tests.paths import MICRO

from fluxtrain.cli import main
from fluxtrain.contract.model_base import iter_fields
from fluxtrain.contract.run.config import RunConfig
from fluxtrain.contract.run.overrides import parse_overrides
from fluxtrain.errors import EXIT_USAGE


def help_text(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as exited:
        main(list(arguments))
    assert exited.value.code == 0
    return capsys.readouterr().out


def test_help_fields_lists_every_field_with_description_values_and_default(
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = help_text(capsys, "run", "--help-fields")
    for command in ("plan", "sample"):
        assert help_text(capsys, command, "--help-fields") == text
        assert "--help-fields" in help_text(capsys, command, "--help")
    fields = [field for field in iter_fields(RunConfig) if "[]" not in field.path]
    assert len(fields) > 90
    for field in fields:
        _, listed, below = text.partition(f"--{field.path}=VALUE\n")
        assert listed, field.path
        paragraph = " ".join(below.split("\n--")[0].split())
        assert field.description.replace("``", "`") in paragraph
        assert field.allowed in paragraph
    assert "default: 0.0001\n" in text.partition("--optim.learning_rate=")[2].split("\n--")[0]
    assert "default: null\n" in text.partition("--initial_weights=")[2].split("\n--")[0]
    assert "required\n" in text.partition("--preset=")[2].split("\n--")[0]


def test_every_default_of_help_fields_is_accepted(capsys: pytest.CaptureFixture[str]) -> None:
    for paragraph in help_text(capsys, "run", "--help-fields").split("\n--")[1:]:
        path, _, default = paragraph.partition("=VALUE")[0], *paragraph.partition("default: ")[1:]
        if default:
            values = parse_overrides([f"--{path}={default.splitlines()[0]}"])
            for name in path.split("."):
                values = values[name]
            assert values == json.loads(default.splitlines()[0])


def test_help_fields_takes_a_prefix(capsys: pytest.CaptureFixture[str]) -> None:
    text = help_text(capsys, "run", "--help-fields", "optim")
    listed = [line for line in text.splitlines() if line.startswith("--")]
    assert listed[1] == "--optim.learning_rate=VALUE"
    assert all(line.startswith("--optim.") for line in listed)
    one = help_text(capsys, "plan", "--help-fields", "optim.beta2")
    assert [line for line in one.splitlines() if line.startswith("--")] == ["--optim.beta2=VALUE"]


def test_help_fields_refuses_an_unknown_prefix(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--help-fields", "optimizer"]) == EXIT_USAGE
    expected = "--help-fields: got 'optimizer'; no such field; did you mean optim?"
    assert expected in capsys.readouterr().err


@pytest.mark.parametrize("command", ["sample", "export", "import"])
def test_help_names_the_required_output(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = " ".join(help_text(capsys, command, "--help").split())
    options = text.partition(" options: ")[2]
    assert "(required)" in options.partition("--output OUTPUT ")[2].partition(" --")[0]


@pytest.mark.parametrize(
    ("arguments", "option"),
    [
        (["run", str(MICRO), "--output", ""], "--output"),
        (["run", str(MICRO), "--output="], "--output"),
        (["run", str(MICRO), "--data", ""], "--data"),
        (["run", ""], "FILE"),
        (["sample", "weights", "--output="], "--output"),
        (["export", "run", "--output="], "--output"),
        (["import", "", "--output=x"], "SOURCE"),
        (["mlperf", "package", "run", "--output="], "--output"),
        (["convert", "source", "", "--to=arrow"], "TARGET"),
        (["prepare", "coco", "--images=x", "--captions=y", "--output="], "--output"),
    ],
)
def test_an_empty_path_is_refused(
    arguments: list[str], option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exited:
        main(arguments)
    assert exited.value.code == EXIT_USAGE
    assert capsys.readouterr().err == f"fluxtrain: error: {option}: must not be empty\n"
