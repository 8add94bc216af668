"""``data.image_size`` and ``latent_size``: whichever is given decides the other."""

from __future__ import annotations

from typing import Any

import pytest

from fluxtrain.contract.run.data import DataConfig
from fluxtrain.contract.run.overrides import parse_overrides
from fluxtrain.contract.run.resolve import merge, resolve
from fluxtrain.errors import ConfigError

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
