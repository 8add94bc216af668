"""DATAROOT, MODELROOT, LOGDIR, SEED and HF_CACHE have their meaning in MLPerf's reference scripts."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.paths import MICRO

from fluxtrain.cli import main
from fluxtrain.cli.arguments import Setting, hugging_face, load_config, output, reference_seed, root
from fluxtrain.errors import EXIT_USAGE, ConfigError


@pytest.mark.parametrize(
    ("kind", "environment", "expected"),
    [
        ("data", {}, Setting("data", "default")),
        ("data", {"DATAROOT": "/sets"}, Setting("/sets", "$DATAROOT")),
        ("data", {"DATAROOT": "/sets", "FLUXTRAIN_DATA": "/d"}, Setting("/d", "$FLUXTRAIN_DATA")),
        ("data", {"DATAROOT": ""}, Setting("data", "default")),
        ("models", {"DATAROOT": "/sets"}, Setting("data", "default")),
        ("models", {"MODELROOT": "/weights"}, Setting("/weights", "$MODELROOT")),
    ],
)
def test_our_variables_override_the_reference_s(
    kind: str, environment: dict[str, str], expected: Setting
) -> None:
    assert root(kind, environment) == expected


def test_outputs_are_below_logdir() -> None:
    assert output("job", {}) == Setting("runs/job", "default")
    assert output("job", {"LOGDIR": "/logs"}) == Setting("/logs/job", "$LOGDIR")


@pytest.mark.parametrize(
    ("run", "environment", "expected"),
    [
        ({}, {}, None),
        ({}, {"SEED": "7"}, Setting("7", "$SEED")),
        ({"seed": 3}, {"SEED": "7"}, None),
        ({"seed": 3}, {"SEED": "no number"}, None),
        ({}, {"SEED": ""}, None),
    ],
)
def test_a_seed_in_the_file_overrides_the_variable(
    run: dict[str, int], environment: dict[str, str], expected: Setting | None
) -> None:
    assert reference_seed(run, environment) == expected


@pytest.mark.parametrize("text", ["-1", "1.5", "seven", "0x10", "9007199254740992", "٣", " 7"])
def test_an_invalid_seed_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"\$SEED: got .*must be a whole number from 0 to"):
        reference_seed({}, {"SEED": text})


def test_hf_home_is_set_from_hf_cache() -> None:
    assert hugging_face({"HF_CACHE": "/cache"}) == {"HF_HOME": "/cache/huggingface"}
    assert hugging_face({"HF_CACHE": "/cache", "HF_HOME": "/home"}) == {}
    assert hugging_face({}) == {}


MODELS = "models weights ($MODELROOT)"


@pytest.mark.parametrize(
    ("flags", "roots"),
    [
        ([], f"data sets ($DATAROOT) · {MODELS} · output logs/micro ($LOGDIR)"),
        (
            ["--seed=5", "--output=mine", "--data=here"],
            f"data here (--data) · {MODELS} · output mine (--output)",
        ),
    ],
)
def test_a_run_uses_and_prints_them_unless_overridden(
    flags: list[str],
    roots: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    variables = {"DATAROOT": "sets", "MODELROOT": "weights", "LOGDIR": "logs", "SEED": "77"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    assert main(["run", str(MICRO), "--data.source=encoded", *flags]) == EXIT_USAGE
    text = capsys.readouterr().err
    assert ("seed 77 ($SEED)" in text) == ("$SEED" in text) == (not flags)
    assert roots in text
    assert f"{tmp_path / roots.split()[1]}/train: no encoded data set is here" in text


def test_the_seed_reaches_the_config(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SEED", "77")
    assert load_config(MICRO, [])[1].seed == 77
    assert load_config(MICRO, ["--seed=5"])[1].seed == 5
