"""A run that is made longer under a decaying learning rate is told what that means."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fluxtrain.contract.run.resolve import resolve
from fluxtrain.state.run_state import changed_decay

SAVED = {"steps": 4, "epochs": 2}


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ({"steps": 8, "decay": "cosine"}, "spec.run.schedule.steps was 4 and is 8: learning rates"),
        (
            {"epochs": 3, "decay": "linear"},
            "spec.run.schedule.epochs was 2 and is 3: learning rates",
        ),
        ({"steps": 4, "decay": "cosine"}, ""),
        ({"steps": 8, "decay": "constant"}, ""),
    ],
)
def test_another_end_of_a_decay_is_told(
    tmp_path: Path, schedule: dict[str, Any], expected: str
) -> None:
    config = resolve({"preset": "micro", "schedule": schedule})
    assert changed_decay(config, tmp_path) == ""
    checkpoint = tmp_path / "step_0000000004"
    checkpoint.mkdir()
    (checkpoint / "DONE").touch()
    assert changed_decay(config, tmp_path) == "", "its config cannot be read"
    write(checkpoint, SAVED)
    found = changed_decay(config, tmp_path)
    assert found.startswith(expected)
    assert bool(found) == bool(expected)


def test_epochs_instead_of_steps_are_another_end(tmp_path: Path) -> None:
    checkpoint = tmp_path / "step_0000000004"
    checkpoint.mkdir()
    (checkpoint / "DONE").touch()
    write(checkpoint, {"steps": 4, "epochs": None})
    schedule = {"epochs": 3, "decay": "cosine"}
    found = changed_decay(resolve({"preset": "micro", "schedule": schedule}), tmp_path)
    assert found.startswith("spec.run.schedule.epochs was null and is 3: learning rates")


def write(checkpoint: Path, schedule: dict[str, Any]) -> None:
    (checkpoint / "config.json").write_text(json.dumps({"schedule": schedule}))
