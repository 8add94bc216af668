"""The settings of a benchmark, and the search for the largest micro batch."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fluxtrain.benchmark.results import NUM_PARTS, Trial, settings
from fluxtrain.benchmark.task import batches_up_to, largest_that_fits
from fluxtrain.contract.run.config import RunConfig
from fluxtrain.contract.run.resolve import resolve
from fluxtrain.contract.run.setting import Setting
from fluxtrain.errors import ConfigError

SETTING = Setting(64, 8, "bfloat16", "tensorwise", 0.5, True)


def make_config(**benchmark: object) -> RunConfig:
    return resolve({"preset": "micro", "task": "benchmark", "benchmark": benchmark})


def test_the_product_of_all_lists_is_measured() -> None:
    config = make_config(
        image_sizes=[32, 64],
        text_lengths=[4, 8],
        compute=["bfloat16", "float32"],
        fp8=["none", "rowwise"],
        activation_checkpointing=[0.0, 1.0],
        compile=[True, False],
    )
    found = list(settings(config))
    assert len(found) == len(set(found)) == 64
    assert Setting(64, 4, "float32", "rowwise", 1.0, False) in found


def test_an_empty_list_has_the_value_of_the_run() -> None:
    assert list(settings(make_config())) == [Setting(32, 4, "float32", "none", 0.0, False)]


def test_a_trial_is_a_training_of_its_setting_that_never_saves() -> None:
    config = make_config(steps=20, warmup_steps=6)
    trial = Trial(SETTING, 3, 4, 12, is_measured=True)
    run = trial.config(config)
    assert (run.task, run.data.image_size, run.data.latent_size) == ("train", 64, 8)
    assert (run.data.text_length, run.precision.compute) == (8, "bfloat16")
    assert run.precision.fp8 == "tensorwise"
    assert (run.parallel.activation_checkpointing, run.parallel.compile) == (0.5, True)
    assert run.schedule.global_batch_size == 12
    assert trial.num_steps(config) == 28, "two parts of 4 steps before five that are measured"
    assert run.logging.every_steps * NUM_PARTS == 20
    assert run.schedule.steps > trial.num_steps(config), "the last step would save"
    never = run.checkpoint.every_steps, run.checkpoint.memory_every_steps, run.evaluation_steps
    assert never == (0, 0, 0)


def test_a_trial_that_only_has_to_fit_is_short() -> None:
    trial = Trial(SETTING, 3, 4, 12, is_measured=False)
    assert trial.num_steps(make_config(steps=1000, warmup_steps=100)) == 3


@pytest.mark.parametrize(
    ("benchmark", "message"),
    [
        ({"image_sizes": [100]}, r"spec\.run\.benchmark\.image_sizes.*100"),
        ({"micro_batch_sizes": [0]}, r"spec\.run\.benchmark\.micro_batch_sizes.*0"),
        ({"compute": ["float8"]}, r"spec\.run\.benchmark\.compute.*float8"),
        ({"memory_gib": 0}, r"spec\.run\.benchmark\.memory_gib: got 0"),
        ({"steps": 0}, r"spec\.run\.benchmark\.steps: got 0"),
    ],
)
def test_bad_values_are_refused_with_their_field(
    benchmark: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        make_config(**benchmark)


def test_the_preset_has_the_setting_of_fluxbenchmark() -> None:
    config = resolve({"preset": "benchmark"})
    (setting,) = settings(config)
    assert (setting.image_size, setting.text_length, setting.compute) == (512, 512, "bfloat16")
    assert setting.activation_checkpointing == 0
    assert config.model.guidance_embed
    assert config.image_tokens + config.data.text_length == 1536


@given(
    limit=st.integers(0, 300),
    first=st.integers(1, 300),
    most=st.integers(1, 300),
)
def test_the_largest_that_fits_is_found_in_few_tries(limit: int, first: int, most: int) -> None:
    tried = list[int]()

    def fits(batch: int) -> bool:
        tried.append(batch)
        return batch <= limit

    assert largest_that_fits(fits, first, most) == min(limit, most)
    assert len(tried) == len(set(tried)), "nothing is tried twice"
    assert all(1 <= batch <= most for batch in tried)
    assert len(tried) <= 2 * math.log2(300) + 3


def test_it_doubles_then_bisects() -> None:
    tried = list[int]()

    def fits(batch: int) -> bool:
        tried.append(batch)
        return batch <= 21

    assert largest_that_fits(fits, 4, 256) == 21
    assert tried == [4, 8, 16, 32, 24, 20, 22, 21]


@pytest.mark.parametrize(
    ("largest", "batches"),
    [(0, []), (1, [1]), (2, [1, 2]), (7, [1, 2, 4, 7]), (8, [1, 2, 4, 8])],
)
def test_powers_of_two_and_the_largest_are_measured(largest: int, batches: list[int]) -> None:
    assert batches_up_to(largest) == batches
