"""DATAROOT, MODELROOT, LOGDIR, SEED and HF_CACHE have their meaning in MLPerf's reference scripts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.paths import MICRO

from fluxtrain.cli.arguments import load_config
from fluxtrain.cli.reference_environment import Setting, hugging_face, output, root, seed
from fluxtrain.errors import ConfigError


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
    assert seed(run, environment) == expected


@pytest.mark.parametrize("text", ["-1", "1.5", "seven", "0x10", "9007199254740992", "٣", " 7"])
def test_an_invalid_seed_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"\$SEED: got .*must be a whole number from 0 to"):
        seed({}, {"SEED": text})


def test_hf_home_is_set_from_hf_cache() -> None:
    assert hugging_face({"HF_CACHE": "/cache"}) == {"HF_HOME": "/cache/huggingface"}
    assert hugging_face({"HF_CACHE": "/cache", "HF_HOME": "/home"}) == {}
    assert hugging_face({}) == {}


def stderr_of(tmp_path: Path, *flags: str) -> str:
    """Return stderr of a run with all variables set, which fails because its data is missing."""
    variables = {"DATAROOT": "sets", "MODELROOT": "weights", "LOGDIR": "logs", "SEED": "77"}
    arguments = ["run", str(MICRO), "--data.source=encoded", *flags]
    completed = subprocess.run(
        [sys.executable, "-m", "fluxtrain.cli", *arguments],
        env={**os.environ, **variables, "OMP_NUM_THREADS": "1"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert completed.returncode == 2, completed.stderr
    return completed.stderr


def test_a_run_uses_and_prints_them(tmp_path: Path) -> None:
    text = stderr_of(tmp_path)
    assert "seed 77 ($SEED)" in text
    roots = "data sets ($DATAROOT) · models weights ($MODELROOT)"
    assert f"{roots} · output logs/micro ($LOGDIR)" in text
    assert f"{tmp_path}/sets/train: no encoded data set is here" in text


def test_fields_and_options_override_them(tmp_path: Path) -> None:
    text = stderr_of(tmp_path, "--seed=5", "--output", "mine", "--data", "here")
    assert "$SEED" not in text
    assert "data here (--data) · models weights ($MODELROOT) · output mine (--output)" in text
    assert f"{tmp_path}/here/train: no encoded data set is here" in text


def test_the_seed_reaches_the_config(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SEED", "77")
    assert load_config(MICRO, [])[1].seed == 77
    assert load_config(MICRO, ["--seed=5"])[1].seed == 5
