"""Every preset resolves to its golden file."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from pydantic import BaseModel
from tests.contract.bad_specs import GOOD, changed
from tests.paths import EXAMPLES, MICRO

from fluxtrain.contract.model_base import StrictModel, iter_fields
from fluxtrain.contract.resource.document import load_job, parse_yaml
from fluxtrain.contract.resource.fluxtraining import FluxTraining, cluster_only_fields
from fluxtrain.contract.run.config import RunConfig
from fluxtrain.contract.run.overrides import parse_overrides
from fluxtrain.contract.run.presets import PRESETS
from fluxtrain.contract.run.resolve import merge, resolve
from fluxtrain.errors import ConfigError

GOLDEN = Path(__file__).parent / "golden"


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_resolves_to_its_golden_file(preset: str) -> None:
    path = GOLDEN / f"{preset}.json"
    text = json.dumps(resolve({"preset": preset}).model_dump(mode="json"), indent=1) + "\n"
    if os.environ.get("UPDATE_GOLDEN"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    assert text == path.read_text()


def test_a_resolved_config_resolves_to_itself() -> None:
    config = resolve({"preset": "openmoji"})
    again = resolve(json.loads(config.model_dump_json()))
    assert again == config


@pytest.mark.parametrize("path", sorted(EXAMPLES.rglob("*.yaml")), ids=lambda p: p.name)
def test_an_example_resolves(path: Path) -> None:
    assert resolve(load_job(path).spec.run)


def test_the_file_overrides_the_preset_and_the_command_line_overrides_both() -> None:
    file = {"preset": "micro", "optim": {"learning_rate": 0.5, "beta1": 0.7}}
    flags = parse_overrides(["--optim.learning_rate=2e-4", "--seed", "7"])
    config = resolve(merge(file, flags))
    assert (config.optim.learning_rate, config.optim.beta1, config.seed) == (2e-4, 0.7, 7)
    assert config.optim.epsilon == 1e-8


@pytest.mark.parametrize(
    ("text", "value"),
    [
        *[
            ("1e-4", 1e-4),
            ("2e5", 2e5),
            ("1_000", 1000),
            ("2026-01-01", "2026-01-01"),
            ("on", True),
        ],
        *[
            ("0", 0),
            ("-7", -7),
            ("0x1f", 31),
            ("017", 15),
            ("0b11", 3),
            ("1:30", "1:30"),
        ],
    ],
)
def test_scalars_are_parsed_as_in_kubernetes(text: str, value: object) -> None:
    assert parse_yaml(f"a: {text}", "here") == {"a": value}


def test_an_integral_float_is_an_integer(tmp_path: Path) -> None:
    flags = parse_overrides(["--schedule.steps=1e3", "--model.axes_dim=[16.0, 56, 56]"])
    config = resolve({"preset": "mlperf-schnell", "prepare": {"samples": 2.0}, **flags})
    assert repr((config.schedule.steps, config.prepare.samples)) == "(1000, 2)"
    assert config.model.axes_dim == (16, 56, 56)
    path = tmp_path / "job.yaml"
    path.write_text(json.dumps(changed(GOOD, "spec.nodes", {"max": 2.0})))
    assert repr(load_job(path).spec.nodes.max) == "2"


@pytest.mark.parametrize("value", [1.5, "1e3", True, float("inf"), float("nan")])
def test_other_values_are_not_integers(value: object) -> None:
    with pytest.raises(ConfigError, match=r"spec\.run\.schedule\.steps: got .*; must be a whole"):
        resolve({"preset": "micro", "schedule": {"steps": value}})


def test_every_field_has_a_description_and_bounded_allowed_values() -> None:
    # Unbounded text or numbers would let one object fill the API server's store.
    for field in (*iter_fields(RunConfig), *iter_fields(FluxTraining)):
        assert field.description.endswith("."), field.path
        unbounded = field.allowed in ("", "text", "a whole number", "a mapping")
        assert unbounded == (field.path == "spec.run"), field.path


def test_the_fields_that_only_a_cluster_reads_are_listed() -> None:
    fields = ["spec.gpuResource", "spec.gpusPerNode", "spec.nodes", "spec.storage"]
    assert cluster_only_fields(load_job(MICRO)) == []
    assert cluster_only_fields(load_job(EXAMPLES / "mlperf-schnell.yaml")) == fields


def test_models_are_frozen() -> None:
    def models(model: type[BaseModel]) -> list[type[BaseModel]]:
        return [model, *(below for sub in model.__subclasses__() for below in models(sub))]

    assert all(model.model_config["frozen"] for model in models(StrictModel))
