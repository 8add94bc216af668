"""``fluxtrain adapter``: merged weights, extracted, resized and converted LoRAs, and bad arguments."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import torch
from benchmarks.reference_model import random_model
from safetensors.torch import load_file, save_file
from tests.trainer.adapter.random_adapters import adapter_of
from tests.trainer.numerics.predictions import inputs, relative_error
from tests.trainer.tiny_model import SMALL, save_flux

from fluxtrain.adapter.file import read_adapter, write_adapter
from fluxtrain.adapter.training_files import trained_adapter
from fluxtrain.adapter.updates import Adapter, low_rank
from fluxtrain.cli import main
from fluxtrain.contract.run.adapter import AdapterConfig, AdapterRanks
from fluxtrain.errors import EXIT_OK, EXIT_STORAGE, EXIT_USAGE
from fluxtrain.model.flux import Flux
from fluxtrain.model.layers import adapted_layers
from fluxtrain.model.lora import add_adapters
from fluxtrain.weights import open_weights

CONFIG = AdapterConfig(rank=4, alpha=6.0, ranks=AdapterRanks(single=3, img_mod=0), split_qkv=True)
LAYERS = adapted_layers(SMALL, CONFIG)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with weights.safetensors, and with style.safetensors, a LoRA of them."""
    folder = tmp_path_factory.mktemp("files")
    save_flux(random_model(SMALL), folder)
    write_adapter(folder / "style.safetensors", adapter(), "kohya", torch.float32)
    return folder


def parameters() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        f"{layer.name}.{name}": 0.1 * torch.randn(shape, generator=generator)
        for layer in LAYERS
        for name, shape in layer.shapes.items()
    }


def adapter() -> Adapter:
    return trained_adapter(LAYERS, parameters())


def run(*arguments: object) -> None:
    assert main(["adapter", *map(str, arguments)]) == EXIT_OK


def test_merged_weights_predict_what_the_adapter_does(folder: Path, tmp_path: Path) -> None:
    adapted = random_model(SMALL)
    add_adapters(adapted, LAYERS, torch.float32)
    adapted.load_state_dict(parameters(), strict=False)
    batch = inputs(SMALL)
    for layout, output in (("bfl", tmp_path / "merged.safetensors"), ("diffusers", tmp_path / "d")):
        target = ("--to", layout, "--dtype", "float32", "--output", output)
        run("merge", folder / "weights.safetensors", folder / "style.safetensors", *target)
        weights = open_weights(output)
        merged = Flux(SMALL)
        merged.load_state_dict(dict(weights.read(list(weights.shapes))))
        assert relative_error(merged(**batch), adapted(**batch)) < 1e-5


def test_a_merge_takes_several_adapters_and_a_strength(folder: Path, tmp_path: Path) -> None:
    style, output = folder / "style.safetensors", tmp_path / "merged.safetensors"
    options = ("--strength", -0.5, "--dtype", "float32", "--output", output)
    run("merge", folder / "weights.safetensors", style, style, *options)
    before, after = load_file(folder / "weights.safetensors"), load_file(output)
    for layer, update in adapter().items():
        expected = before[f"{layer}.weight"] - update.delta()
        assert torch.allclose(after[f"{layer}.weight"], expected, atol=1e-6)


def test_an_extracted_adapter_is_the_one_that_was_merged(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base, tuned = folder / "weights.safetensors", tmp_path / "tuned.safetensors"
    run("merge", base, folder / "style.safetensors", "--dtype", "float32", "--output", tuned)
    output = tmp_path / "found.safetensors"
    run("extract", base, tuned, "--rank", 12, "--dtype", "float32", "--output", output)
    assert "keeps 100.00% of the squared differences" in capsys.readouterr().out
    found, expected = read_adapter(output).adapter, adapter()
    assert found.keys() == expected.keys()
    for layer, update in expected.items():
        assert relative_error(found[layer].delta(), update.delta()) < 1e-4


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_rounding_to_the_type_of_a_file_is_no_difference(
    folder: Path, tmp_path: Path, dtype: str, capsys: pytest.CaptureFixture[str]
) -> None:
    base, tuned, style = (tmp_path / f"{n}.safetensors" for n in ("base", "tuned", "style"))
    tensors = load_file(folder / "weights.safetensors")
    tensors = {name: tensor + 1e-3 * torch.randn(tensor.shape) for name, tensor in tensors.items()}
    save_file(tensors, base)  # no value is one of the smaller types
    one = {name: update for name, update in adapter().items() if name.startswith("double_blocks.1")}
    write_adapter(style, one, "kohya", torch.float32)
    run("merge", base, style, "--dtype", dtype, "--output", tuned)
    for models in ((base, tuned), (tuned, base)):
        output = tmp_path / f"of-{models[0].name}"
        run("extract", *models, "--rank", 4, "--output", output)
        assert "other tensors differ" not in capsys.readouterr().out
    assert read_adapter(tmp_path / "of-base.safetensors").adapter.keys() == one.keys()
    changed = load_file(tuned)
    changed["final_layer.linear.weight"] += 1
    save_file(changed, tuned)
    run("extract", base, tuned, "--rank", 4, "--output", tmp_path / "again.safetensors")
    assert (
        "1 other tensor differs too; a LoRA of the blocks cannot hold it" in capsys.readouterr().out
    )


def test_a_resized_adapter_is_the_closest_of_its_rank(folder: Path, tmp_path: Path) -> None:
    output = tmp_path / "small.safetensors"
    run("resize", folder / "style.safetensors", "--rank", 2, "--output", output)
    small = read_adapter(output)
    assert small.dtype == torch.float32
    assert small.metadata["ss_network_dim"] == "2"
    for layer, update in adapter().items():
        left, values, right = torch.linalg.svd(update.delta(), full_matrices=False)
        closest = left[:, :2] @ (values[:2, None] * right[:2])
        assert relative_error(small.adapter[layer].delta(), closest) < 1e-4, layer


def test_a_larger_rank_leaves_the_smaller_ones_and_says_so(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "large.safetensors"
    run("resize", folder / "style.safetensors", "--rank", 5, "--output", output)
    resized, given = read_adapter(output).adapter, adapter()
    smaller = [layer for layer, update in low_rank(given).items() if update.rank < 5]
    assert 0 < len(smaller) < len(given)
    text = f"{len(smaller)} of {len(given)} layers keep their smaller rank (3, 4): a larger one only adds"
    assert text in capsys.readouterr().out
    for layer in smaller:
        assert low_rank(resized)[layer].rank == low_rank(given)[layer].rank
        assert relative_error(resized[layer].delta(), given[layer].delta()) < 1e-5
    run("resize", output, "--rank", 2, "--output", tmp_path / "small.safetensors")
    assert "smaller rank" not in capsys.readouterr().out


def test_a_converted_file_keeps_type_metadata_and_update(folder: Path, tmp_path: Path) -> None:
    source = tmp_path / "source.safetensors"
    given = {"ss_steps": "7", "modelspec.title": "a style", "other": "x"}
    write_adapter(source, adapter(), "kohya", torch.bfloat16, given, is_dev=True)
    output = tmp_path / "converted.safetensors"
    run("convert", source, "--to", "diffusers", "--output", output)
    before, after = read_adapter(source), read_adapter(output)
    assert after.dtype == torch.bfloat16
    assert after.metadata["ss_steps"] == "7"
    assert after.metadata["modelspec.title"] == "a style"
    assert after.metadata["modelspec.architecture"] == "flux-1-dev/lora"
    assert "other" not in after.metadata
    for layer, update in before.adapter.items():
        assert relative_error(after.adapter[layer].delta(), update.delta()) < 0.01  # scaled in bf16


def test_info_names_layers_ranks_and_scales(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run("info", folder / "style.safetensors")
    out = capsys.readouterr().out
    assert "18 of double_blocks, 9 of single_blocks" in out
    assert "float32" in out
    assert "1.5 (" in out
    (line,) = (line for line in out.splitlines() if line.startswith("largest norm"))
    norms = {layer: update.delta().norm().item() for layer, update in adapter().items()}
    layer = max(norms, key=norms.__getitem__)
    assert line.split()[2:] == [f"{norms[layer]:.4g}", "of", layer]


NO_RUN = "F: no complete checkpoint is here; name a LoRA file, or a run or checkpoint with adapters"
BAD = [
    (["convert", "S", "--to", "comfyui", "--output", "x.safetensors"], "must be one of kohya, diff"),
    (["convert", "S", "--dtype", "bf16", "--output", "x.safetensors"], "must be one of bfloat16"),
    (["convert", "S", "--output", "x.ckpt"], "must end in .safetensors"),
    (["convert", "S", "--output", "S"], "exists already"),
    (["convert", "W", "--output", "x.safetensors"], "not a LoRA of FLUX's blocks; it has double_bl"),
    (["convert", "missing", "--output", "x.safetensors"], "missing: missing"),
    (["resize", "S", "--rank", "0", "--output", "x.safetensors"], "must be between 1 and 1024"),
    (["extract", "W", "W", "--rank", "4", "--output", "x.safetensors"], "layers are those of"),
    (["merge", "W", "S", "--to", "kohya", "--output", "x"], "must be one of bfl, diffusers"),
    (["info", "F"], NO_RUN),
    (["convert", "F", "--output", "x.safetensors"], NO_RUN),
    (["resize", "F", "--rank", "4", "--output", "x.safetensors"], NO_RUN),
    (["merge", "W", "S", "--output", "x.ckpt"], "must end in .safetensors"),
    (["merge", "W", "S", "--to", "diffusers", "--output", "x.safetensors"], "is a folder with --to=d"),
    (["merge", "W", "F", "--output", "x.safetensors"], NO_RUN),
    (["merge", "S", "S", "--output", "x.safetensors"], "neither BFL's nor diffusers' FLUX transformer"),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "says"), BAD)
def test_a_bad_argument_is_refused(
    folder: Path,
    tmp_path: Path,
    arguments: list[str],
    says: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    named = {"S": folder / "style.safetensors", "W": folder / "weights.safetensors", "F": folder}
    assert main(["adapter", *(str(named.get(each, each)) for each in arguments)]) == EXIT_USAGE
    assert says.replace("F:", f"{folder}:") in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("layout", ["bfl", "diffusers"])
def test_a_read_only_file_system_is_told_in_a_line(
    folder: Path,
    tmp_path: Path,
    layout: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    for name in ("mkdir", "unlink"):  # there, both fail for a path that does not exist, too
        monkeypatch.setattr(Path, name, refuse)
    weights, style = folder / "weights.safetensors", folder / "style.safetensors"
    output = str(tmp_path / ("out.safetensors" if layout == "bfl" else "out"))
    for command in (["adapter", "merge", weights, style], ["export", weights]):
        given = [*map(str, command), "--to", layout, "--output", output]
        assert main(given) == EXIT_STORAGE
        error = capsys.readouterr().err.splitlines()[-1]
        assert error == f"fluxtrain: error: {output}: cannot be written (Read-only file system)"


def test_an_adapter_of_another_model_is_not_merged(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = SMALL.model_copy(update={"depth": 3})
    layers = adapted_layers(other, AdapterConfig(rank=1, double_blocks="2"))
    tensors = {f"{each.name}.{n}": torch.ones(s) for each in layers for n, s in each.shapes.items()}
    path = tmp_path / "other.safetensors"
    write_adapter(path, trained_adapter(layers, tensors), "kohya", torch.float32)
    weights, output = folder / "weights.safetensors", tmp_path / "merged.safetensors"
    assert (
        main(["adapter", "merge", str(weights), str(path), "--output", str(output)]) == EXIT_USAGE
    )
    assert "double_blocks.2.img_attn.proj is [64, 64]; in" in capsys.readouterr().err


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_converted_adapter_with_magnitudes_keeps_its_type(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], dtype: torch.dtype
) -> None:
    given = adapter_of(AdapterConfig(rank=2, alpha=2.0, dora=True))
    write_adapter(tmp_path / "dora.safetensors", given, "kohya", dtype)
    run(
        "convert",
        tmp_path / "dora.safetensors",
        "--to=diffusers",
        "--output",
        tmp_path / "a.safetensors",
    )
    name = str(dtype).removeprefix("torch.")
    assert f"diffusers, {name}," in capsys.readouterr().out
    assert read_adapter(tmp_path / "a.safetensors").dtype == dtype


def test_a_type_that_is_not_read_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, name = tmp_path / "other.safetensors", "lora_unet_single_blocks_0_linear1.alpha"
    save_file({name: torch.ones(1, dtype=torch.complex64)}, source)
    arguments = ["convert", str(source), "--output", str(tmp_path / "out.safetensors")]
    assert main(["adapter", *arguments]) == EXIT_USAGE
    says = f"tensor '{name}' is of type 'C64'; read are BF16, F16, F32, I32, F64, F8_E4M3, F8_E5M2, I64"
    assert says in capsys.readouterr().err
    run("info", source)
    assert "data type:     C64" in capsys.readouterr().out
