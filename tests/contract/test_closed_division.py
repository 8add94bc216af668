"""The benchmark presets have the values of the closed division and refuse others."""

from __future__ import annotations

from typing import Any

import pytest
from tests.contract.bad_specs import CLOSED_RUN, CLOSED_VALUES, changed

from fluxtrain.contract.run.closed_division import is_closed
from fluxtrain.contract.run.resolve import resolve
from fluxtrain.errors import ConfigError

ALLOWED: list[tuple[str, Any]] = [
    ("optim.learning_rate", 2.5e-4),
    ("schedule.global_batch_size", 1024),
    ("schedule.warmup_steps", 0),
    ("schedule.steps", 100),
    ("parallel.micro_batch_size", 64),
    ("precision.reduce", "bfloat16"),
    ("seed", 4),
]


def test_the_preset_is_a_closed_run() -> None:
    assert is_closed(resolve(CLOSED_RUN))


@pytest.mark.parametrize(("path", "value"), CLOSED_VALUES)
def test_the_open_division_accepts_them(path: str, value: Any) -> None:
    run = {**CLOSED_RUN, "logging": {"mlperf": {"division": "open"}}}
    assert resolve(changed(run, path, value))


@pytest.mark.parametrize(("path", "value"), ALLOWED)
def test_other_fields_may_change(path: str, value: Any) -> None:
    assert is_closed(resolve(changed(CLOSED_RUN, path, value)))


def test_all_forbidden_fields_are_reported_at_once() -> None:
    run = {**CLOSED_RUN, "optim": {"beta1": 0.5, "beta2": 0.5}}
    with pytest.raises(ConfigError, match=r"(?s)optim\.beta1.*optim\.beta2"):
        resolve(run)
