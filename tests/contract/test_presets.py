"""Every preset resolves to its golden file; those of the benchmark refuse other values."""

from __future__ import annotations

import json
import os
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel
from tests.contract.bad_specs import CLOSED_RUN, CLOSED_VALUES, GOOD, changed
from tests.paths import EXAMPLES, MICRO

from fluxtrain.contract.model_base import StrictModel, iter_fields
from fluxtrain.contract.resource.document import load_job, parse_yaml
from fluxtrain.contract.resource.fluxtraining import FluxTraining, cluster_only_fields
from fluxtrain.contract.run.closed_division import REFERENCE_SCHEDULES, is_closed
from fluxtrain.contract.run.config import RunConfig
from fluxtrain.contract.run.data import DataConfig
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
        *(
            ("1e-4", 1e-4),
            ("2e5", 2e5),
            ("2026-01-01", "2026-01-01"),
            ("1:30", "1:30"),
            ("on", True),
        ),
        *(("0", 0), ("-7", -7), ("0x1f", 31), ("017", 15), ("0b11", 3), ("1_000", 1000)),
        *((r'"\ud83d\ude00 a"', "😀 a"), (r'"\ud83d a"', "\ud83d a"), (r'"\/"', "/")),
    ],
)
def test_scalars_are_parsed_as_in_kubernetes(text: str, value: object) -> None:
    assert parse_yaml(f"a: {text}", "here") == {"a": value}


def test_sections_of_which_one_begins_like_the_other_are_two() -> None:
    flags = parse_overrides(["--adapter.rank=8", "--adapter_file.name=a", "--adapter.alpha=4"])
    assert flags == {"adapter": {"rank": 8, "alpha": 4}, "adapter_file": {"name": "a"}}


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


PRESET = {"preset": "dev-lora"}
"""Its own sides are 1024 and 128."""


def sides(run: dict[str, Any]) -> tuple[int, int]:
    data = resolve(run).data
    return data.image_size, data.latent_size


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, (1024, 128)),
        ({"image_size": 512}, (512, 64)),
        ({"latent_size": 64}, (512, 64)),
        ({"image_size": 512, "latent_size": 64}, (512, 64)),
        ({"image_size": 512.0}, (512, 64)),
        ({"latent_size": 6.4e1}, (512, 64)),
        ({"image_size": 16}, (16, 2)),
        ({"image_size": 32_768}, (32_768, 4096)),
        ({"image_size": 768, "buckets": {}}, (768, 96)),
    ],
)
def test_the_side_that_is_given_decides_the_other(
    given: dict[str, Any], expected: tuple[int, int]
) -> None:
    assert sides({**PRESET, "data": given}) == expected


@pytest.mark.parametrize("file", [{}, {"image_size": 768}, {"image_size": 768, "latent_size": 96}])
@pytest.mark.parametrize("flag", ["--data.image_size=512", "--data.latent_size=64"])
def test_the_command_line_decides_over_both_sides_of_the_file(
    file: dict[str, Any], flag: str
) -> None:
    assert sides(merge({**PRESET, "data": file}, parse_overrides([flag]))) == (512, 64)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--schedule.steps=10"], (10, None)),
        (["--schedule.steps=10", "--schedule.epochs=3"], (10, 3)),
        (["--schedule.warmup_steps=5"], (2000, 20)),
    ],
)
def test_steps_of_the_command_line_replace_the_epochs_of_the_file(
    flags: list[str], expected: tuple[int, int | None]
) -> None:
    run = merge({**PRESET, "schedule": {"epochs": 20}}, parse_overrides(flags))
    schedule = resolve(run | {"sampling": {"prompts": ["a"]}}).schedule
    assert (schedule.steps, schedule.epochs) == expected


def test_a_config_without_a_preset_has_both_sides() -> None:
    assert DataConfig(image_size=512).latent_size == 64
    assert DataConfig(latent_size=64).image_size == 512
    assert (DataConfig().image_size, DataConfig().latent_size) == (256, 32)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"image_size": 512, "latent_size": 128},
         "spec.run.data.latent_size: got 128; must be image_size / 8, or left out; image_size is 512"),
        ({"image_size": 1000}, "spec.run.data.image_size: got 1000; must be a whole number from 16 to 32768"),
        ({"image_size": 0}, "spec.run.data.image_size: got 0; must be a whole number"),
        ({"image_size": 100_000}, "spec.run.data.image_size: got 100000; must be a whole number"),
        ({"image_size": "512"}, "spec.run.data.image_size: got '512'; must be a whole number"),
        ({"image_size": True}, "spec.run.data.image_size: got true; must be a whole number"),
        ({"image_size": None}, "spec.run.data.image_size: got null; must be a whole number"),
        ({"image_size": [512]}, "spec.run.data.image_size: got [512]; must be a whole number"),
        ({"latent_size": 7}, "spec.run.data.latent_size: got 7; must be a whole number"),
        ({"latent_size": float("nan")}, "spec.run.data.latent_size: got nan; must be a whole number"),
    ],
)  # fmt: skip
def test_a_wrong_side_is_told_in_one_line(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve({**PRESET, "data": given})
    text = str(caught.value)
    assert text.startswith(message)
    assert "\n" not in text


def test_data_that_is_no_mapping_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"spec\.run\.data: got 5"):
        resolve({**PRESET, "data": 5})
