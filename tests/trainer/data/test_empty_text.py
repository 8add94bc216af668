"""The empty prompt's encodings: both formats are read back; malformed files raise DataError."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from tests.trainer.data.formats.encoded_sets import BAD_CELLS, cell, sample
from torch import Tensor

from fluxtrain.data.sources import read_empty_text, write_empty_text
from fluxtrain.errors import DataError

TXT, VEC = torch.full((3, 5), -1.0), torch.full((6,), -2.0)


@pytest.mark.parametrize("name", ["a/empty.safetensors", "empty_encodings"])
def test_the_encodings_are_read_back(tmp_path: Path, name: str) -> None:
    write_empty_text(tmp_path / name, TXT, VEC)
    txt, vec = read_empty_text(tmp_path / name)
    assert torch.equal(txt, TXT)
    assert torch.equal(vec, VEC)


def test_mlcommons_encodings_are_read(tmp_path: Path) -> None:
    txt, vec = np.random.rand(1, 4, 16).astype(np.float16), np.random.rand(1, 16).astype(np.float16)
    np.save(tmp_path / "t5_empty.npy", txt)
    np.save(tmp_path / "clip_empty.npy", vec)
    read = read_empty_text(tmp_path)
    assert np.array_equal(read[0].numpy(), txt[0])
    assert np.array_equal(read[1].numpy(), vec[0])


@pytest.mark.parametrize(
    ("txt", "vec"),
    [
        (torch.full((3, 5), float("nan")), VEC),
        (TXT, torch.zeros(())),
        (torch.zeros(1, 3, 5), VEC),
    ],
)
def test_tensors_of_other_shapes_and_nan_are_refused(
    tmp_path: Path, txt: Tensor, vec: Tensor
) -> None:
    write_empty_text(tmp_path / "empty.safetensors", txt, vec)
    with pytest.raises(DataError, match=r"empty\.safetensors: its tensors are not"):
        read_empty_text(tmp_path / "empty.safetensors")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("t5_empty.npy", None, "missing"),
        ("clip_empty.npy", BAD_CELLS["pickle"], "of type |O"),
        ("t5_empty.npy", cell(sample(0).txt), "not that of one prompt's encodings"),
        ("clip_empty.npy", b"x", "not a .npy file"),
    ],
)
def test_malformed_npy_files_are_refused(
    tmp_path: Path, name: str, content: bytes | None, message: str
) -> None:
    write_empty_text(tmp_path / "empty", sample(0).txt, sample(0).vec)
    path = tmp_path / "empty" / name
    path.unlink() if content is None else path.write_bytes(content)
    with pytest.raises(DataError) as error:
        read_empty_text(tmp_path / "empty")
    assert message in str(error.value)
    assert str(path) in str(error.value)
