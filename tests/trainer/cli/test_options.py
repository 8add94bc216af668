"""Options of commands: their limits, and what a plan prints besides its tables."""

from __future__ import annotations

import errno
import json
import os
import re
from pathlib import Path

import pytest
from tests.paths import MICRO, ROOT

from fluxtrain.cli import main
from fluxtrain.cli.arguments import job_name, path
from fluxtrain.contract.process import RunPaths
from fluxtrain.contract.resource.document import load_job
from fluxtrain.contract.run.resolve import resolve
from fluxtrain.errors import EXIT_OK, EXIT_USAGE, DataError
from fluxtrain.launch.torchrun import check_before_starting
from fluxtrain.runtime import program

MLPERF = str(ROOT / "examples" / "mlperf-schnell.yaml")


def refused(command: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Return what ``fluxtrain`` says of a ``command`` that it does not take, in one line."""
    try:
        code: object = main(command)
    except SystemExit as exited:  # of argparse
        code = exited.code
    assert code == EXIT_USAGE
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("fluxtrain: error: ")
    return line


@pytest.mark.parametrize("number", [0, -3, 1025])
@pytest.mark.parametrize("command", [f"run {MICRO}", "sample absent --output=x"])
def test_a_number_of_processes_out_of_range_is_refused(
    command: str, number: int, capsys: pytest.CaptureFixture[str]
) -> None:
    error = refused([*command.split(), f"--processes={number}"], capsys)
    assert f"--processes: got {number}; must be between 1 and 1024" in error


WHOLE, REAL = "must be a whole number", "must be a number"
STRENGTH = "must be a number from -1000 to 1000"
MERGE, SAMPLE = "adapter merge a b --output=c", "sample weights --adapter lora --output=x"
NUMBERS = [
    ("data check toys --image-size", WHOLE),
    ("data pack toys packed --shard-size", WHOLE),
    ("run job.yaml --processes", WHOLE),
    ("sample weights --output=x --processes", WHOLE),
    ("plan job.yaml --mfu", REAL),
    ("convert a b --to=arrow --shard-size", WHOLE),
    ("import-config a.toml --gpus", WHOLE),
    ("import-config a.toml --epoch-samples", WHOLE),
    ("adapter resize a --output=b --rank", WHOLE),
    (f"{MERGE} --strength", STRENGTH),
    ("mlperf campaign a.yaml --runs", WHOLE),
    ("mlperf campaign a.yaml --parallel", WHOLE),
    ("prepare coco --workers", "must be a whole number, 1 or more"),
]


@pytest.mark.parametrize(("command", "allowed"), NUMBERS)
def test_an_option_that_is_no_number_is_one_line(
    command: str, allowed: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = command.split()
    expected = f"fluxtrain: error: {arguments[-1]}: got 'abc\\n'; {allowed}"
    assert refused([*arguments, "abc\n"], capsys) == expected


@pytest.mark.parametrize("command", [MERGE, SAMPLE])
@pytest.mark.parametrize("value", ["nan", "inf", "1e39", "-1000.5", "strong"])
def test_a_strength_that_is_no_usable_number_is_refused(
    command: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    error = refused([*command.split(), "--strength", value], capsys)
    assert f"--strength: got '{value}'; {STRENGTH}" in error


LONG = "x" * 300
TOO_LONG = f"{LONG}: cannot be used (File name too long)"
CAMPAIGN = f"mlperf campaign {MLPERF}"


@pytest.mark.parametrize(
    ("command", "says"),
    [
        *((f"{command} {LONG}", TOO_LONG) for command in ("plan", "init", "mlperf verify")),
        (f"gallery {LONG}", "metrics.jsonl: cannot be used (File name too long)"),
        ("mlperf check a b", "'b'; is one too many; see fluxtrain mlperf check --help"),
        ("convert a b c --to=arrow", "'c'; is one too many; see fluxtrain convert --help"),
        (f"{CAMPAIGN} --ruleset=4.1.0", "--ruleset: is an option of campaign status"),
        (f"{CAMPAIGN} --selector=a", "--selector: is an option of campaign status"),
        ("mlperf campaign status a --runs=3", "--runs: is an option of campaign FILE"),
        ("mlperf campaign status a --apply", "--apply: is an option of campaign FILE"),
        (f"plan {MLPERF} --gpu=", "--gpu: must not be empty"),
        ("mlperf campaign status --selector=", "--selector: must not be empty"),
        ("adapter resize a", "required: --rank, --output; see fluxtrain adapter resize --help"),
        ("adapter shrink a", "COMMAND: invalid choice: 'shrink' (choose from "),
        ("data check toys --json=1", "--json: ignored explicit argument '1'"),
    ],
)
def test_what_a_command_does_not_take_is_one_line(
    command: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert says in refused(command.split(), capsys)


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
    assert refused(arguments, capsys) == f"fluxtrain: error: {option}: must not be empty"


def test_a_folder_that_may_not_be_read_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    def refuse() -> int:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), "locked/x")

    assert program.run("fluxtrain", "trainer", refuse) == EXIT_USAGE
    expected = "fluxtrain: error: locked/x: cannot be used (Permission denied)\n"
    assert capsys.readouterr().err == expected


def test_a_current_folder_that_was_removed_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert "current folder: was removed" in refused(["doctor"], capsys)


def test_a_tilde_that_the_shell_left_is_the_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    assert path("~/runs/a") == Path("/home/me/runs/a")
    assert path("~unknown-user/a") == Path("~unknown-user/a")


def test_a_plan_names_the_convergence_point_and_ignores_no_field(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["plan", MLPERF]) == EXIT_OK
    errors = capsys.readouterr().err
    assert "6.1.0: the reference needs 7,223,524 samples" in errors
    assert "ignored" not in errors, "a plan is for spec.nodes and spec.gpusPerNode"


def test_a_plan_as_json_prints_nothing_else(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", MLPERF, "--json"]) == EXIT_OK
    output = capsys.readouterr()
    assert output.err == ""
    assert json.loads(output.out)["global_batch_size"] == 512


def test_a_closed_run_without_its_data_ends_before_the_model_is_made(tmp_path: Path) -> None:
    config = resolve(load_job(Path(MLPERF)).spec.run)
    paths = RunPaths(tmp_path / "run", tmp_path, tmp_path)
    for name in ("train", "validation"):
        folder = tmp_path / getattr(config.data, name)
        with pytest.raises(DataError, match=f"{folder}: missing; docs/data.md"):
            check_before_starting(config, paths, [1])
        folder.mkdir(parents=True)
    check_before_starting(config, paths, [1])


def test_names_without_letters_are_not_the_same_name() -> None:
    assert job_name("Cats 2") == "cats-2"
    assert job_name("2024") == "run-2024"
    assert job_name("Bilder für Öl") == "bilder-fur-ol"
    assert len({job_name(stem) for stem in ("猫", "犬", "猫1", "犬1")}) == 4
    assert re.fullmatch(r"run-[0-9a-f]{8}", job_name("猫"))
