"""The .npy files of MLCommons' layouts: exact round trips; damaged files raise ValueError."""

from __future__ import annotations

import io

import numpy as np
import pytest
import torch

from fluxtrain.data.formats import mlcommons


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", [(3, 5), (7,), (0,), ()])
def test_npy_files_are_read_back_exactly(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    values = torch.randn(shape).to(dtype)
    content = mlcommons.to_bytes(values)
    assert torch.equal(mlcommons.to_tensor(content), values)
    assert mlcommons.to_tensor(content).dtype == dtype
    assert np.load(io.BytesIO(content)).shape == shape


def test_random_damage_raises_nothing_but_value_error() -> None:
    rng, valid = np.random.default_rng(0), mlcommons.to_bytes(torch.zeros(2, 3))
    outcomes = set[bool]()
    for _ in range(1000):
        content = bytearray(valid)
        for place in rng.integers(0, len(valid), 3):
            content[place] = rng.integers(0, 256)
        try:
            outcomes.add(mlcommons.to_tensor(bytes(content)).numel() == 6)
        except ValueError:
            outcomes.add(False)
    assert outcomes == {True, False}
