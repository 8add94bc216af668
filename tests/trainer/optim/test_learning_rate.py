"""The learning rate of every step, compared with torch's, transformers' and diffusers' schedules."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers.optimization
import pytest
import torch
import transformers.optimization
from torch import nn

from fluxtrain.contract.run.optim import OptimConfig, ScheduleConfig
from fluxtrain.contract.run.resolve import resolve
from fluxtrain.optim import learning_rate
from fluxtrain.state.run_state import changed_decay

OPTIM = OptimConfig(learning_rate=0.5)
SCHEDULES: dict[str, tuple[dict[str, Any], str, dict[str, Any]]] = {
    "constant": ({}, "constant_with_warmup", {}),
    "linear": ({"decay": "linear"}, "linear", {}),
    "cosine": ({"decay": "cosine"}, "cosine", {}),
    "one restart": (
        {"decay": "cosine_with_restarts", "cycles": 2},
        "cosine_with_restarts",
        {"num_cycles": 2},
    ),
    "restarts": (
        {"decay": "cosine_with_restarts", "cycles": 7},
        "cosine_with_restarts",
        {"num_cycles": 7},
    ),
    "square": ({"decay": "polynomial", "power": 2.0}, "polynomial", {"power": 2.0}),
    "root": ({"decay": "polynomial", "power": 0.5}, "polynomial", {"power": 0.5}),
}
"""Fields of ``schedule``, their name for it, and their arguments."""


def rates(schedule: ScheduleConfig) -> list[float]:
    return [learning_rate(step, OPTIM, schedule) for step in range(1, schedule.steps + 1)]


def rates_of(make: Callable[[torch.optim.Optimizer], Any], count: int) -> list[float]:
    """Return the learning rates of a reference after each of ``count`` steps."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.5)
    reference, values = make(optimizer), []
    for _ in range(count):
        optimizer.step()
        reference.step()
        values.append(optimizer.param_groups[0]["lr"])
    return values


@pytest.mark.parametrize("library", [transformers.optimization, diffusers.optimization])
@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("warmup", [0, 10, 49])
def test_every_step_equals_the_schedule_of_the_same_name(
    name: str, warmup: int, library: Any
) -> None:
    fields, theirs, arguments = SCHEDULES[name]
    schedule = ScheduleConfig(steps=150, warmup_steps=warmup, **fields)
    makers = {str(kind.value): make for kind, make in library.TYPE_TO_SCHEDULER_FUNCTION.items()}
    steps = {} if name == "constant" else {"num_training_steps": schedule.steps}
    if theirs == "polynomial":
        arguments = {**arguments, "lr_end": 0.0}
    expected = rates_of(
        lambda optimizer: makers[theirs](optimizer, num_warmup_steps=warmup, **steps, **arguments),
        schedule.steps,
    )
    assert rates(schedule) == pytest.approx(expected, abs=1e-12)


def test_a_cosine_that_ends_at_a_floor_equals_transformers() -> None:
    schedule = ScheduleConfig(steps=90, warmup_steps=9, decay="cosine", min_learning_rate=0.1)
    make = transformers.optimization.get_cosine_with_min_lr_schedule_with_warmup
    expected = rates_of(lambda optimizer: make(optimizer, 9, 90, min_lr=0.1), 90)
    assert rates(schedule) == pytest.approx(expected)


@pytest.mark.parametrize("power", [1.0, 3.0])
def test_a_polynomial_that_ends_at_a_floor_equals_transformers(power: float) -> None:
    schedule = ScheduleConfig(
        steps=90, warmup_steps=9, decay="polynomial", power=power, min_learning_rate=0.1
    )
    make = transformers.optimization.get_polynomial_decay_schedule_with_warmup
    expected = rates_of(lambda optimizer: make(optimizer, 9, 90, lr_end=0.1, power=power), 90)
    assert rates(schedule) == pytest.approx(expected)


def test_warm_up_is_linear_and_ends_at_the_base_rate() -> None:
    schedule = ScheduleConfig(steps=10, warmup_steps=4)
    assert rates(schedule) == [0.125, 0.25, 0.375] + [0.5] * 7


def test_cosine_equals_torchs_annealing() -> None:
    schedule = ScheduleConfig(steps=20, decay="cosine", min_learning_rate=0.1)
    expected = rates_of(
        lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(
            optimizer, T_max=20, eta_min=0.1
        ),
        20,
    )
    assert rates(schedule) == pytest.approx(expected)


@pytest.mark.parametrize("decay", ["linear", "cosine", "cosine_with_restarts", "polynomial"])
def test_a_decay_of_the_last_part_is_constant_before(decay: Any) -> None:
    values = rates(ScheduleConfig(steps=100, decay=decay, decay_fraction=0.4))
    assert values[:60] == [0.5] * 60
    assert values[79] == pytest.approx(0.25)
    assert values[-1] == pytest.approx(0.0)


@pytest.mark.parametrize("decay", ["linear", "cosine", "cosine_with_restarts", "polynomial"])
def test_a_decay_begins_where_the_warm_up_ends(decay: Any) -> None:
    values = rates(ScheduleConfig(steps=1000, warmup_steps=500, decay=decay))
    assert values[499] == 0.5
    assert values[500] == pytest.approx(0.5, rel=0.01)


def test_a_warm_up_as_long_as_the_run_never_decays() -> None:
    assert rates(ScheduleConfig(steps=5, warmup_steps=9, decay="linear"))[-1] == 0.5 * 5 / 9


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
