"""Help texts list every option and field; arguments that argparse checks are refused with exit code 2."""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys

import pytest

from fluxtrain.cli import commands, main
from fluxtrain.contract.model_base import iter_fields
from fluxtrain.contract.run.config import RunConfig
from fluxtrain.contract.run.overrides import parse_overrides
from fluxtrain.errors import EXIT_OK, EXIT_USAGE


def help_text(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as exited:
        main(list(arguments))
    assert exited.value.code == 0
    return capsys.readouterr().out


def test_help_without_a_command_has_all_in_three_groups(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main([]) == EXIT_USAGE
    text = capsys.readouterr().out
    assert main(["--help"]) == EXIT_OK
    assert capsys.readouterr().out == f"{text}"
    titles = [line for line in text.splitlines() if line.endswith(":")]
    assert titles == ["train:", "prepare:", "inspect and publish:"]
    parser = commands.make_parser()
    (choices,) = (a.choices for a in parser._actions if a.dest == "command")
    assert list(choices or ()) == list(commands.COMMANDS)
    listed = [line.split()[0] for line in text.splitlines() if line.startswith("  ")]
    last = text.splitlines()[-1].removeprefix("Pods of a job run ").rstrip(".").split(", ")
    assert [*listed, *last, "completion"] == list(commands.COMMANDS)
    assert max(map(len, text.splitlines())) <= 100


def test_each_command_says_in_a_sentence_what_it_does() -> None:
    parsers = {"": commands.make_parser()}
    while parsers:
        name, parser = parsers.popitem()
        assert re.fullmatch(r"[A-Z].*\.", parser.description or ""), name
        for action in parser._subparsers._group_actions if parser._subparsers else ():
            parsers |= {f"{name} {key}": each for key, each in (action.choices or {}).items()}  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("train", "run"),
        ("lora", "init"),
        ("smaple", "sample"),
        ("a.yaml", "run a.yaml"),
        ("zzz", None),
    ],
)
def test_an_unknown_command_leads_to_one(
    given: str, meant: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([given, "x"]) == EXIT_USAGE
    hint = f"did you mean {meant}?" if meant else "see fluxtrain --help"
    expected = f"COMMAND: got '{given}'; there is none of this name; {hint}\n"
    assert capsys.readouterr().err == f"fluxtrain: error: {expected}"


def test_help_and_version_are_words_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert help_text(capsys, "run", "--help") == help_text(capsys, "help", "run")
    assert main(["version"]) == EXIT_OK == main(["--version"])
    first, second = capsys.readouterr().out.splitlines()
    assert first == second


@pytest.mark.parametrize(("command", "names"), [("data", "check or pack"), ("prepare", "cc12m")])
def test_a_missing_command_is_chosen_from_those_that_there_are(
    command: str, names: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main([command])
    assert names in capsys.readouterr().err


def test_no_command_takes_a_part_of_an_option() -> None:
    parsers = [commands.make_parser()]
    for parser in parsers:
        assert not parser.allow_abbrev, parser.prog
        nested = (a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
        parsers += (each for action in nested for each in action.choices.values())
    assert len(parsers) > len(commands.COMMANDS) + 10


def test_help_imports_no_large_package() -> None:
    code = (
        "import sys; from fluxtrain.cli import main; main(['--help'])\n"
        "print(sorted({'torch', 'numpy', 'pydantic', 'yaml', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


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
