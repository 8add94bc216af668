"""Every preset, resolved, is what the golden file says; presets and fields that come later are refused."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from pydantic import BaseModel
from tests.paths import ROOT

from fluxtrain.contract.describe import walk
from fluxtrain.contract.resource.document import load, parse
from fluxtrain.contract.resource.fluxtraining import FluxTraining
from fluxtrain.contract.run.config import PRESETS, RunConfig
from fluxtrain.contract.run.overrides import parse_overrides
from fluxtrain.contract.run.presets import PRESET_VALUES
from fluxtrain.contract.run.resolve import NOT_YET, merge, resolve
from fluxtrain.errors import ConfigError

GOLDEN = Path(__file__).parent / "golden"
LATER = tuple(str(value) for path, value in NOT_YET if path == "preset")


@pytest.mark.parametrize("preset", [name for name in PRESETS if name not in LATER])
def test_a_preset_resolves_to_its_golden_file(preset: str) -> None:
    path = GOLDEN / f"{preset}.json"
    text = json.dumps(resolve({"preset": preset}).model_dump(mode="json"), indent=1) + "\n"
    if os.environ.get("UPDATE_GOLDEN"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    assert text == path.read_text()


@pytest.mark.parametrize("preset", LATER)
def test_a_preset_that_comes_later_is_refused_but_sound(preset: str) -> None:
    with pytest.raises(ConfigError, match="not yet"):
        resolve({"preset": preset})
    assert RunConfig.model_validate(merge(PRESET_VALUES[preset], {"preset": preset}))


def test_a_resolved_config_resolves_to_itself() -> None:
    config = resolve({"preset": "openmoji"})
    again = resolve(json.loads(config.model_dump_json()))
    assert again == config


@pytest.mark.parametrize("path", sorted((ROOT / "examples").rglob("*.yaml")), ids=lambda p: p.name)
def test_an_example_is_a_job_that_resolves(path: Path) -> None:
    assert resolve(load(path).spec.run)


def test_the_file_wins_over_the_preset_and_the_command_line_over_both() -> None:
    file = {"preset": "micro", "optim": {"learning_rate": 0.5, "beta1": 0.7}}
    flags = parse_overrides(["--optim.learning_rate=2e-4", "--seed", "7"])
    config = resolve(merge(file, flags))
    assert (config.optim.learning_rate, config.optim.beta1, config.seed) == (2e-4, 0.7, 7)
    assert config.optim.epsilon == 1e-8


@pytest.mark.parametrize(
    ("text", "value"),
    [("1e-4", 1e-4), ("2e5", 2e5), ("1_000", 1000), ("2026-01-01", "2026-01-01"), ("on", True)],
)
def test_numbers_are_read_as_kubernetes_reads_them(text: str, value: object) -> None:
    assert parse(f"a: {text}", "here") == {"a": value}


def test_every_field_says_what_it_is_and_what_it_may_hold() -> None:
    for model in (RunConfig, FluxTraining):
        for facts in walk(model):
            assert facts.sentence.endswith("."), facts.path
            assert facts.allowed, facts.path


def test_every_field_has_a_bound() -> None:
    # Unbounded text or numbers would let one object fill the API server's store.
    open_ended = {"spec.run"}
    for model in (RunConfig, FluxTraining):
        for facts in walk(model):
            plain = facts.allowed in ("text", "a whole number", "a mapping")
            assert not plain or facts.path in open_ended, facts.path


def test_models_are_frozen() -> None:
    def models(model: type[BaseModel]) -> list[type[BaseModel]]:
        return [model, *(below for sub in model.__subclasses__() for below in models(sub))]

    from fluxtrain.contract.section import Section

    assert all(model.model_config["frozen"] for model in models(Section))
