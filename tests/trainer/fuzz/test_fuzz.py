"""Mutated files, and those that were found to fail, raise our errors only."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tests.trainer.fuzz.fuzzing import Finding, check, fuzz
from tests.trainer.fuzz.target import Target
from tests.trainer.fuzz.targets import targets

from fluxtrain.adapter.file import DIFFUSERS_METADATA, read_adapter
from fluxtrain.errors import DataError
from fluxtrain.weights.reader import open_weights


@pytest.mark.slow
@pytest.mark.parametrize("examples", [5, pytest.param(40, marks=pytest.mark.proof)])
def test_changed_inputs_are_read_or_refused(examples: int) -> None:
    results = fuzz(list(targets()), seconds=0, examples=examples)
    assert [result for result in results if result.finding] == []
    assert [result.name for result in results] == list(targets())


@pytest.mark.parametrize("name", targets())
def test_the_inputs_to_begin_from_are_valid(tmp_path: Path, name: str) -> None:
    target = targets()[name]
    for content in target.seeds():
        (tmp_path / target.file).write_bytes(content)
        check(target, tmp_path / target.file)


def test_what_may_not_happen_is_found(tmp_path: Path) -> None:
    def crash(path: Path) -> object:
        raise KeyError(path.name)

    (tmp_path / "a").write_bytes(b"")
    with pytest.raises(Finding, match="uncaught KeyError"):
        check(Target("a", crash, lambda: [b""]), tmp_path / "a")


SINGLE = "single_transformer_blocks.0"
NARROW = "lora_unet_double_blocks_0_img_mlp_0"
SHORT = "lora_unet_single_blocks_0_linear2"


@pytest.mark.parametrize(
    ("alpha", "message"),
    [
        ("[" * 100_000, "not a valid LoRA"),
        ('{"lora_alpha": NaN}', "is not finite"),
        ('{"lora_alpha": 1e999}', "is not finite"),
        ('{"lora_alpha": ' + "9" * 400 + "}", "not a valid LoRA"),
    ],
)
def test_alphas_of_the_metadata_are_finite_numbers(
    tmp_path: Path, alpha: str, message: str
) -> None:
    pair = {
        f"transformer.{SINGLE}.attn.to_q.lora_A.weight": torch.ones(1, 8),
        f"transformer.{SINGLE}.attn.to_q.lora_B.weight": torch.ones(8, 1),
    }
    save_file(pair, tmp_path / "a.safetensors", {DIFFUSERS_METADATA: alpha})
    with pytest.raises(DataError, match=message):
        read_adapter(tmp_path / "a.safetensors")


@pytest.mark.parametrize(
    ("name", "down", "up"),
    [(NARROW, (1, 0), (4, 1)), (SHORT, (1, 4), (0, 1)), (NARROW, (1, 0), (0, 1))],
)
def test_a_matrix_without_values_is_no_update(
    tmp_path: Path, name: str, down: tuple[int, int], up: tuple[int, int]
) -> None:
    tensors = {
        f"{name}.lora_down.weight": torch.ones(down),
        f"{name}.lora_up.weight": torch.ones(up),
    }
    save_file(tensors, tmp_path / "a.safetensors")
    with pytest.raises(DataError, match="which are no low-rank update"):
        read_adapter(tmp_path / "a.safetensors")


def base_model(path: Path, axes: str = "[2, 2, 4]", query: tuple[int, ...] = (16, 16)) -> Path:
    """Write some of diffusers' tensors of a tiny model."""
    tensors = {
        **{name: torch.ones(16, 4) for name in ("x_embedder.weight", "context_embedder.weight")},
        "time_text_embed.text_embedder.linear_1.weight": torch.ones(16, 4),
        f"{SINGLE}.attn.norm_q.weight": torch.ones(8),
        f"{SINGLE}.proj_mlp.weight": torch.ones(64, 16),
        f"{SINGLE}.attn.to_q.weight": torch.ones(query),
        **{f"{SINGLE}.attn.to_{name}.weight": torch.ones(16, 16) for name in "kv"},
    }
    save_file(tensors, path, {"axes_dims_rope": axes})
    return path


def test_a_part_of_a_fused_layer_that_is_one_number_is_refused(tmp_path: Path) -> None:
    assert "single_blocks.0.linear1.weight" in open_weights(base_model(tmp_path / "a")).shapes
    with pytest.raises(DataError, match=r"to_q.weight has shape \[\]"):
        open_weights(base_model(tmp_path / "b", query=()))


def test_axes_that_are_nested_too_deeply_are_the_default(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="not the weights of a FLUX transformer"):
        open_weights(base_model(tmp_path / "a", axes="[" * 100_000))


def test_a_config_of_a_base_model_is_bounded(tmp_path: Path) -> None:
    base_model(tmp_path / "a.safetensors")
    with (tmp_path / "config.json").open("wb") as file:
        file.truncate(1 << 31)  # it takes no space
    with pytest.raises(DataError, match=r"config.json: 2147483648 bytes, at most"):
        open_weights(tmp_path)
