"""The benchmark presets have the values of the closed division and refuse others."""

from __future__ import annotations

from typing import Any

import pytest

from fluxtrain.contract.run.closed_division import FIXED_VALUES, is_closed
from fluxtrain.contract.run.resolve import merge, resolve
from fluxtrain.errors import ConfigError

PRESET = {"preset": "mlperf-schnell"}
FORBIDDEN: list[tuple[str, Any]] = [
    ("optim.beta1", 0.95),
    ("optim.beta2", 0.999),
    ("optim.epsilon", 1e-5),
    ("optim.weight_decay", 0.01),
    ("optim.max_grad_norm", 2.0),
    ("schedule.decay", "cosine"),
    ("evaluation.every_samples", 262_656),
    ("evaluation.target_loss", 0.6),
    ("flow.timestep_sampling", "logit_normal"),
    ("flow.prompt_dropout", 0.0),
    ("model.depth", 18),
    ("model.guidance_embed", True),
    ("data.text_length", 512),
    ("encoders.latent_scale", 0.3),
]
ALLOWED: list[tuple[str, Any]] = [
    ("optim.learning_rate", 2.5e-4),
    ("schedule.global_batch_size", 1024),
    ("schedule.warmup_steps", 0),
    ("schedule.steps", 100),
    ("parallel.micro_batch_size", 64),
    ("precision.reduce", "bfloat16"),
    ("seed", 4),
]


def changed(path: str, value: Any, **more: Any) -> dict[str, Any]:
    """Return a run of the preset with one field changed."""
    inner: Any = value
    for name in reversed(path.split(".")):
        inner = {name: inner}
    return merge({**PRESET, **more}, inner)


def test_the_preset_is_a_closed_run() -> None:
    assert is_closed(resolve(PRESET))


@pytest.mark.parametrize(("path", "value"), FORBIDDEN)
def test_a_forbidden_value_is_refused_with_the_allowed_one(path: str, value: Any) -> None:
    with pytest.raises(ConfigError) as refused:
        resolve(changed(path, value))
    message = str(refused.value)
    assert f"spec.run.{path}: got {value!r}; the closed division allows only" in message
    assert str(FIXED_VALUES[path]) in message


@pytest.mark.parametrize(("path", "value"), FORBIDDEN)
def test_the_open_division_accepts_them(path: str, value: Any) -> None:
    assert resolve(changed(path, value, logging={"mlperf": {"division": "open"}}))


@pytest.mark.parametrize(("path", "value"), ALLOWED)
def test_other_fields_may_change(path: str, value: Any) -> None:
    assert is_closed(resolve(changed(path, value)))


def test_all_forbidden_fields_are_reported_at_once() -> None:
    run = {**PRESET, "optim": {"beta1": 0.5, "beta2": 0.5}}
    with pytest.raises(ConfigError, match=r"(?s)optim\.beta1.*optim\.beta2"):
        resolve(run)
