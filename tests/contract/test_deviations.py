"""The deviations follow the resolved configuration; every field that bears on numbers is known to them."""

from __future__ import annotations

from operator import attrgetter
from typing import Any

import pytest

from fluxtrain.contract.model_base import iter_fields
from fluxtrain.contract.run.closed_division import (
    DESIGN,
    FIXED_VALUES,
    deviations,
    unused_reasons,
)
from fluxtrain.contract.run.config import RunConfig
from fluxtrain.contract.run.optim import ProdigyConfig
from fluxtrain.contract.run.resolve import resolve

NUMERICAL_SECTIONS = ("model", "flow", "optim", "schedule", "precision")
OTHER_FIELDS = {
    *("optim.learning_rate", "schedule.global_batch_size", "schedule.warmup_steps"),  # free
    *(
        "precision.compute",
        "precision.reduce",
        "precision.fp8",
        "schedule.steps",
    ),  # of the design, free
    # without effect while schedule.decay is constant and optim.name adamw, which are fixed
    *(f"schedule.{name}" for name in ("decay_fraction", "min_learning_rate", "cycles", "power")),
    *(f"optim.prodigy.{name}" for name in ProdigyConfig.model_fields),
}
BENCHMARK = resolve({"preset": "mlperf-schnell"})


def topics(config: RunConfig) -> list[str]:
    return [each.topic for each in deviations(config, {})]


def open_run(**changes: Any) -> RunConfig:
    return resolve(
        {"preset": "mlperf-schnell", "logging": {"mlperf": {"division": "open"}}, **changes}
    )


def test_a_run_of_the_benchmark_deviates_by_design_only() -> None:
    found = list(deviations(BENCHMARK, {}))
    assert [each for each in found if each.reason is None] == []
    assert not set(topics(BENCHMARK)) & set(FIXED_VALUES)
    assert {"RoPE angles", "prompt dropout", "noise of evaluations"} <= set(topics(BENCHMARK))
    assert "unreadable validation images" not in topics(BENCHMARK)
    assert "unreadable validation images" in topics(resolve({"preset": "mlperf-schnell-raw"}))


@pytest.mark.parametrize(
    ("changes", "topic", "reference", "given"),
    [
        ({"flow": {"prompt_dropout": 0.2}}, "flow.prompt_dropout", "0.1", "0.2"),
        ({"optim": {"beta2": 0.99}}, "optim.beta2", "0.95", "0.99"),
        ({"model": {"depth": 3}}, "model.depth", "19", "3"),
        ({"schedule": {"decay": "cosine"}}, "schedule.decay", "constant", "cosine"),
        ({"evaluation": {"target_loss": 0.6}}, "evaluation.target_loss", "0.586", "0.6"),
        ({"initial_weights": "w"}, "initial_weights", "null", "w"),
        ({"data": {"source": "synthetic"}}, "data.source", "not synthetic", "synthetic"),
    ],
)
def test_a_changed_field_is_listed_with_both_values(
    changes: dict[str, Any], topic: str, reference: str, given: str
) -> None:
    (found,) = set(deviations(open_run(**changes), {})) - set(deviations(BENCHMARK, {}))
    expected = (topic, reference, given, None)
    assert (found.topic, found.reference, found.run, found.reason) == expected


@pytest.mark.parametrize(
    ("changes", "topic"),
    [
        ({"precision": {"fp8": "rowwise"}}, "linear layers of the blocks"),
        ({"precision": {"reduce": "bfloat16"}}, "data type of the gradients' sum over ranks"),
        ({"precision": {"compute": "float32"}}, "data type of forward and backward passes"),
        ({"precision": {"weights": "bfloat16"}}, "precision.weights"),
    ],
)
def test_precision_below_or_above_the_references_is_listed(
    changes: dict[str, Any], topic: str
) -> None:
    assert set(topics(open_run(**changes))) - set(topics(BENCHMARK)) == {topic}


def test_without_the_references_rounding_its_reason_is_given() -> None:
    config = open_run(flow={"reference_rounding": False})
    (found,) = set(deviations(config, {})) - set(deviations(BENCHMARK, {}))
    assert (found.topic, found.reference, found.run) == ("flow.reference_rounding", "True", "False")
    assert str(found.reason).startswith("float32 latents")
    assert "128 timesteps" in str(found.reason)


def test_without_compilation_it_is_not_listed() -> None:
    assert "compilation" in topics(BENCHMARK)
    assert "compilation" not in topics(open_run(parallel={"compile": False}))


def test_a_reason_holds_for_a_field_or_for_its_section() -> None:
    config = open_run(optim={"beta1": 0.8, "beta2": 0.99})
    reasons = {"optim": "a study", "optim.beta2": "steadier"}
    told = {each.topic: each.reason for each in deviations(config, reasons)}
    assert (told["optim.beta1"], told["optim.beta2"]) == ("a study", "steadier")
    assert unused_reasons(config, {**reasons, "model": "x", "optim.epsilon": "y"}) == [
        "model",
        "optim.epsilon",
    ]


def test_every_field_that_bears_on_numbers_is_known() -> None:
    """A new field of these sections must be fixed, free, or a deviation with its reason."""
    fields = [field.path for field in iter_fields(RunConfig)]
    numerical = {path for path in fields if path.split(".")[0] in NUMERICAL_SECTIONS}
    assert numerical - set(FIXED_VALUES) - OTHER_FIELDS == set()


@pytest.mark.parametrize("preset", ["mlperf-schnell", "mlperf-schnell-raw", "micro", "openmoji"])
def test_every_changed_field_of_every_preset_is_listed_with_its_value(preset: str) -> None:
    config = resolve({"preset": preset})
    found = {each.topic: each for each in deviations(config, {})}
    for field, prescribed in FIXED_VALUES.items():
        given = attrgetter(field)(config)
        assert (field in found) == (given != prescribed)
    assert len(found) == len(list(deviations(config, {})))  # one row a topic
    assert len({design.topic for design in DESIGN}) == len(DESIGN)
