"""DATAROOT, MODELROOT, LOGDIR, SEED and HF_CACHE mean what they mean to MLPerf's reference scripts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.paths import MICRO

from fluxtrain.cli.arguments import configured
from fluxtrain.cli.reference_environment import Chosen, hugging_face, output, root, seed
from fluxtrain.errors import ConfigError


@pytest.mark.parametrize(
    ("kind", "environment", "expected"),
    [
        ("data", {}, Chosen("data", "default")),
        ("data", {"DATAROOT": "/sets"}, Chosen("/sets", "$DATAROOT")),
        ("data", {"DATAROOT": "/sets", "FLUXTRAIN_DATA": "/d"}, Chosen("/d", "$FLUXTRAIN_DATA")),
        ("data", {"DATAROOT": ""}, Chosen("data", "default")),
        ("models", {"DATAROOT": "/sets"}, Chosen("data", "default")),
        ("models", {"MODELROOT": "/weights"}, Chosen("/weights", "$MODELROOT")),
    ],
)
def test_roots_are_ours_else_the_reference_s(
    kind: str, environment: dict[str, str], expected: Chosen
) -> None:
    assert root(kind, environment) == expected


def test_outputs_lie_below_logdir() -> None:
    assert output("job", {}) == Chosen("runs/job", "default")
    assert output("job", {"LOGDIR": "/logs"}) == Chosen("/logs/job", "$LOGDIR")


@pytest.mark.parametrize(
    ("run", "environment", "expected"),
    [
        ({}, {}, None),
        ({}, {"SEED": "7"}, Chosen("7", "$SEED")),
        ({"seed": 3}, {"SEED": "7"}, None),
        ({"seed": 3}, {"SEED": "no number"}, None),
        ({}, {"SEED": ""}, None),
    ],
)
def test_a_seed_in_the_file_wins(
    run: dict[str, int], environment: dict[str, str], expected: Chosen | None
) -> None:
    assert seed(run, environment) == expected


@pytest.mark.parametrize("text", ["-1", "1.5", "seven", "0x10", "9007199254740992", "٣", " 7"])
def test_a_seed_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"\$SEED: got .*must be a whole number from 0 to"):
        seed({}, {"SEED": text})


def test_hugging_face_s_libraries_get_their_cache() -> None:
    assert hugging_face({"HF_CACHE": "/cache"}) == {"HF_HOME": "/cache/huggingface"}
    assert hugging_face({"HF_CACHE": "/cache", "HF_HOME": "/home"}) == {}
    assert hugging_face({}) == {}


def said(tmp_path: Path, *flags: str) -> str:
    """Return what a run with all variables set says before it finds that its data is missing."""
    variables = {"DATAROOT": "sets", "MODELROOT": "weights", "LOGDIR": "logs", "SEED": "77"}
    words = ["run", str(MICRO), "--data.source=encoded", *flags]
    done = subprocess.run(
        [sys.executable, "-m", "fluxtrain.cli", *words],
        env={**os.environ, **variables, "OMP_NUM_THREADS": "1"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    return done.stderr


def test_a_run_uses_them_and_says_so(tmp_path: Path) -> None:
    text = said(tmp_path)
    assert "seed 77 ($SEED)" in text
    roots = "data sets ($DATAROOT) · models weights ($MODELROOT)"
    assert f"{roots} · output logs/micro ($LOGDIR)" in text
    assert f"{tmp_path}/sets/train: no encoded data set is here" in text


def test_fields_and_flags_win(tmp_path: Path) -> None:
    text = said(tmp_path, "--seed=5", "--output", "mine", "--data", "here")
    assert "$SEED" not in text
    assert "data here (--data) · models weights ($MODELROOT) · output mine (--output)" in text
    assert f"{tmp_path}/here/train: no encoded data set is here" in text


def test_the_seed_reaches_the_config(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SEED", "77")
    assert configured(MICRO, [])[1].seed == 77
    assert configured(MICRO, ["--seed=5"])[1].seed == 5
