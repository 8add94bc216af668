"""The benchmark presets have the values of the closed division and refuse others."""

from __future__ import annotations

import json
from importlib.resources import files
from typing import Any

import pytest
from tests.contract.bad_specs import CLOSED_RUN, CLOSED_VALUES, changed

from fluxtrain.contract.run.closed_division import REFERENCE_SCHEDULES, is_closed
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


@pytest.mark.parametrize("preset", ["mlperf-schnell", "mlperf-schnell-raw"])
@pytest.mark.parametrize("ruleset", ["6.0.0", "6.1.0"])
def test_rate_and_warm_up_are_those_of_the_reference_points(ruleset: str, preset: str) -> None:
    name = f"rcp_checker/training_{ruleset}/rcps_flux1.json"
    records = json.loads(files("mlperf_logging").joinpath(name).read_text())
    sizes = {record["BS"] for record in records.values()}
    assert sizes == set(REFERENCE_SCHEDULES)
    for record in records.values():
        config = resolve({"preset": preset, "schedule": {"global_batch_size": record["BS"]}})
        given = record["Hyperparams"]
        assert config.optim.learning_rate == given["opt_base_learning_rate"]
        assert config.schedule.warmup_steps == given["opt_learning_rate_warmup_steps"]


def test_what_the_file_gives_wins_over_the_reference() -> None:
    schedule = {"global_batch_size": 1024, "warmup_steps": 3}
    config = resolve({**CLOSED_RUN, "schedule": schedule, "optim": {"learning_rate": 1e-4}})
    assert (config.optim.learning_rate, config.schedule.warmup_steps) == (1e-4, 3)
    again = resolve(json.loads(config.model_dump_json()))
    assert again == config


def test_the_preset_without_a_batch_size_has_the_references_schedule() -> None:
    config = resolve(CLOSED_RUN)
    reference = REFERENCE_SCHEDULES[config.schedule.global_batch_size]
    assert config.optim.learning_rate == reference.learning_rate
    assert config.schedule.warmup_steps == reference.warmup_steps


def test_a_batch_size_without_a_reference_needs_a_schedule_of_its_own() -> None:
    with pytest.raises(ConfigError, match=r"global_batch_size: got 2304; .*512, 1024, 2048, 4096"):
        resolve({**CLOSED_RUN, "schedule": {"global_batch_size": 2304}})
    own = {"schedule": {"global_batch_size": 2304, "warmup_steps": 0}}
    assert resolve({**CLOSED_RUN, **own, "optim": {"learning_rate": 1.85e-4}})
    open_run = {"logging": {"mlperf": {"division": "open"}}}
    assert resolve({**CLOSED_RUN, **open_run, "schedule": {"global_batch_size": 64}})


def test_other_presets_keep_their_schedule() -> None:
    config = resolve({"preset": "micro", "schedule": {"global_batch_size": 1024}})
    assert (config.optim.learning_rate, config.schedule.warmup_steps) == (1e-2, 5)


def test_all_forbidden_fields_are_reported_at_once() -> None:
    run = {**CLOSED_RUN, "optim": {"beta1": 0.5, "beta2": 0.5}}
    with pytest.raises(ConfigError, match=r"(?s)optim\.beta1.*optim\.beta2"):
        resolve(run)
