"""DATAROOT, MODELROOT, LOGDIR, SEED and HF_CACHE mean what they mean to MLPerf's reference scripts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fluxtrain.cli.reference_environment import Chosen, hugging_face, output, root, seed
from fluxtrain.errors import ConfigError

MICRO = Path(__file__).parents[2] / "examples" / "micro.yaml"


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


def run(tmp_path: Path, *flags: str) -> str:
    """Run one step with all variables set; return what it says on stderr."""
    variables = {"DATAROOT": "sets", "MODELROOT": "weights", "LOGDIR": "logs", "SEED": "77"}
    quick = ["--schedule.steps=1", "--evaluation.every_samples=0", "--evaluation.at_end=false"]
    done = subprocess.run(
        [sys.executable, "-m", "fluxtrain.cli", "run", str(MICRO), *quick, *flags],
        env={**os.environ, **variables, "OMP_NUM_THREADS": "1"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stderr


def test_a_run_uses_them_and_says_so(tmp_path: Path) -> None:
    said = run(tmp_path, "--logging.metrics_port=0")
    assert "seed 77 ($SEED)" in said
    roots = "data sets ($DATAROOT) · models weights ($MODELROOT)"
    assert f"{roots} · output logs/micro ($LOGDIR)" in said
    assert json.loads((tmp_path / "logs/micro/config.json").read_text())["seed"] == 77


def test_fields_and_flags_win(tmp_path: Path) -> None:
    said = run(
        tmp_path, "--seed=5", "--output", "mine", "--data", "here", "--logging.metrics_port=0"
    )
    assert "data here (--data) · models weights ($MODELROOT) · output mine (--output)" in said
    assert json.loads((tmp_path / "mine/config.json").read_text())["seed"] == 5
