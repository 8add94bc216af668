"""The encoders encode whatever attention a run names for its model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.trainer.tiny_encoders import SIDE, config, write_encoders

from fluxtrain.encode.codec import load_decoder
from fluxtrain.encode.encoders import load_encoders
from fluxtrain.parallel.compile import attention_backend

CPU = torch.device("cpu")


@pytest.mark.parametrize("name", ["flash", "cudnn", "efficient", "math"])
def test_encodings_and_images_do_not_depend_on_the_model_s_attention(
    name: str, tmp_path: Path
) -> None:
    """On a CPU none of them but math computes all that the encoders need."""
    write_encoders(tmp_path)
    encoders, images = load_encoders(config(), tmp_path, CPU), torch.zeros(1, 3, SIDE, SIDE).byte()
    decode = load_decoder(config().encoders, tmp_path, CPU)
    expected = encoders.encode(images, ["a cat"])
    with attention_backend(name):
        found = encoders.encode(images, ["a cat"])
        decoded = decode(found.mean)
    for field in ("txt", "vec", "mean", "logvar"):
        assert torch.equal(getattr(found, field), getattr(expected, field)), field
    assert torch.equal(decoded, decode(expected.mean))
