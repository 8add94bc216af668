"""Whether a CLIP encoder is told from another: by its tensors, wherever its files are."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from fluxtrain.contract.run.precision import EncodersConfig
from fluxtrain.encode.files import clip_digest
from fluxtrain.errors import DataError

TENSORS = {
    "text_model.embeddings.position_ids": torch.arange(77)[None],  # int64, as in published files
    "text_model.first.weight": torch.zeros(600, 1000),  # more than a megabyte
    "text_model.last.weight": torch.ones(4, 4),
    "text_model.scaled.weight": torch.ones(4, 4).to(torch.float8_e4m3fn),
}


def digest(root: Path, tensors: dict[str, Tensor], name: str = "clip/model.safetensors") -> str:
    path = root / name
    path.parent.mkdir(exist_ok=True)
    save_file(tensors, path)
    clip = path.parent.name if path.parent != root else name
    return clip_digest(EncodersConfig(clip=clip, clip_tokenizer="tokenizer"), root)


def test_a_folder_and_a_file_of_the_same_tensors_are_the_same(tmp_path: Path) -> None:
    assert digest(tmp_path, TENSORS) == digest(tmp_path, TENSORS, "clip_l.safetensors")


@pytest.mark.parametrize("name", TENSORS)
def test_each_tensor_counts(tmp_path: Path, name: str) -> None:
    other = TENSORS[name].float().add(1).to(TENSORS[name].dtype)
    assert digest(tmp_path, TENSORS) != digest(tmp_path, {**TENSORS, name: other})


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"clip_l\.safetensors"):
        clip_digest(EncodersConfig(clip="clip_l.safetensors", clip_tokenizer="clip"), tmp_path)
