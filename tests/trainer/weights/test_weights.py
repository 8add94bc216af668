"""Weights in BFL's, diffusers' and our own layout: the same model, verified before it is used."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from cluster.free_ports import free_port
from diffusers import FluxTransformer2DModel
from safetensors.torch import load_file, save_file
from tests.paths import MICRO
from tests.trainer import in_process, ranks
from tests.trainer.commands import fluxtrain
from tests.trainer.numerics.scaled_weights import KINDS, in_fp8
from tests.trainer.tiny_model import SMALL
from torch import Tensor

from fluxtrain.cli import main
from fluxtrain.contract.process import RunPaths
from fluxtrain.contract.run.model import ModelConfig
from fluxtrain.contract.run.resolve import merge, resolve
from fluxtrain.errors import EXIT_OK, EXIT_USAGE, DataError
from fluxtrain.model.flux import Flux, image_ids, text_ids
from fluxtrain.model.layers import entries
from fluxtrain.parallel.distributed import World
from fluxtrain.runtime import files
from fluxtrain.runtime.files import FileSums
from fluxtrain.runtime.safetensors import read_header
from fluxtrain.sample import task
from fluxtrain.state.run_state import DONE, latest, read_checksums
from fluxtrain.weights import open_weights, write_weights

GUIDED = SMALL.model_copy(update={"guidance_embed": True})
SHAPES = {
    "guided": GUIDED,
    "schnell-like": SMALL,
    "only double": GUIDED.model_copy(update={"depth_single_blocks": 0}),
    "only single": GUIDED.model_copy(update={"depth": 0}),
}


def random_state(model: ModelConfig, seed: int = 0) -> dict[str, Tensor]:
    torch.manual_seed(seed)
    return {name: 0.1 * torch.randn(p.shape) for name, p in Flux(model).state_dict().items()}


def bfl_file(path: Path, state: dict[str, Tensor]) -> Path:
    save_file(state, path, metadata={"axes_dims_rope": "[8, 12, 12]"})
    return path


def convert(source: Path, output: Path, layout: Any, **more: Any) -> Path:
    write_weights(open_weights(source), output, layout, torch.float32, **more)
    return output


def read_all(path: Path) -> dict[str, Tensor]:
    weights = open_weights(path)
    return dict(weights.read(list(weights.shapes)))


@pytest.mark.parametrize("layout", ["bfl", "diffusers"])
@pytest.mark.parametrize("kind", KINDS)
def test_weights_in_fp8_are_their_values_times_their_scales(
    tmp_path: Path, kind: str, layout: str
) -> None:
    state = random_state(GUIDED)
    source = bfl_file(tmp_path / "whole.safetensors", state)
    if layout == "diffusers":
        folder = convert(source, tmp_path / "transformer", "diffusers")
        (file,) = folder.glob("*.safetensors")
        stored, expected = in_fp8(load_file(file), kind)
        save_file(expected, file)
        rounded = read_all(folder)
        save_file(stored, file)
        given = read_all(folder)
    else:
        stored, rounded = in_fp8(state, kind)
        given = read_all(bfl_file(tmp_path / "fp8.safetensors", stored))
    assert given.keys() == rounded.keys() == state.keys()
    for name, value in rounded.items():
        assert torch.equal(given[name].float(), value.float()), name
        assert (given[name] - state[name]).abs().max() <= 2**-4 * state[name].abs().max()


def test_a_tensor_of_no_model_is_named(tmp_path: Path) -> None:
    state = {**random_state(SMALL), "double_blocks.0.other.scale": torch.ones(3)}
    with pytest.raises(
        DataError, match=r"'double_blocks\.0\.other\.scale' is not a tensor of this"
    ):
        read_all(bfl_file(tmp_path / "other.safetensors", state))


def test_of_a_whole_checkpoint_the_transformer_is_read(tmp_path: Path) -> None:
    state = random_state(SMALL)
    whole = {f"model.diffusion_model.{name}": value for name, value in state.items()}
    whole |= {
        "vae.decoder.conv_in.weight": torch.ones(2),
        "text_encoders.t5xxl.shared": torch.ones(3),
    }
    given = read_all(bfl_file(tmp_path / "checkpoint.safetensors", whole))
    assert given.keys() == state.keys()
    assert all(torch.equal(given[name], value) for name, value in state.items())


@pytest.mark.parametrize(
    ("scale", "says"),
    [
        (torch.ones(3), r"has a scale of shape \[3\] for"),
        (torch.ones(0), r"has a scale of shape \[0\] for"),
        (torch.ones(1, 64), r"has a scale of shape \[1, 64\] for"),
        *(
            (torch.tensor(value), "has a scale that is not a positive, finite number")
            for value in (float("nan"), float("inf"), 0.0, -1.0)
        ),
    ],
)
def test_a_scale_of_no_use_is_named_before_any_weight_is_read(
    tmp_path: Path, scale: Tensor, says: str
) -> None:
    stored, _ = in_fp8(random_state(SMALL), "scale_weight")
    stored["img_in.scale_weight"] = scale
    with pytest.raises(DataError, match=f"fp8.safetensors: 'img_in.weight' {says}"):
        open_weights(bfl_file(tmp_path / "fp8.safetensors", stored))


@pytest.mark.parametrize("kind", ["scale_weight", "weight_scale", "rows"])
def test_a_weight_in_fp8_without_its_scale_is_named(tmp_path: Path, kind: str) -> None:
    stored, _ = in_fp8(random_state(SMALL), kind)
    for suffix in ("scale_weight", "weight_scale"):
        stored.pop(f"txt_in.{suffix}", None)
    says = "txt_in.weight is in fp8 without a scale, which the file has for others"
    with pytest.raises(DataError, match=says):
        open_weights(bfl_file(tmp_path / "fp8.safetensors", stored))


def test_a_weight_with_two_scales_is_named(tmp_path: Path) -> None:
    stored, _ = in_fp8(random_state(SMALL), "scale_weight")
    stored["txt_in.weight_scale"] = torch.tensor(1.0)
    with pytest.raises(DataError, match=r"txt_in\.weight has two scales"):
        open_weights(bfl_file(tmp_path / "fp8.safetensors", stored))


def test_a_cast_that_overflowed_is_named(tmp_path: Path) -> None:
    stored, _ = in_fp8(random_state(SMALL), "plain")
    stored["txt_in.weight"] = torch.full(stored["txt_in.weight"].shape, float("nan")).to(
        torch.float8_e4m3fn
    )
    with pytest.raises(DataError, match=r"'txt_in\.weight' is in fp8 and has values that are not"):
        read_all(bfl_file(tmp_path / "fp8.safetensors", stored))


def test_weights_in_e5m2_are_read_and_those_of_other_types_are_named(tmp_path: Path) -> None:
    state = random_state(SMALL)
    stored = {name: value.to(torch.float8_e5m2) for name, value in state.items()}
    given = read_all(bfl_file(tmp_path / "e5m2.safetensors", stored))
    assert all(torch.equal(given[name], value.float()) for name, value in stored.items())
    stored["txt_in.weight"] = state["txt_in.weight"].to(torch.float8_e4m3fnuz)
    with pytest.raises(DataError, match=r"'txt_in\.weight' is of type 'F8_E4M3FNUZ'; read are"):
        open_weights(bfl_file(tmp_path / "fnuz.safetensors", stored))


@pytest.mark.parametrize("model", SHAPES.values(), ids=SHAPES)
def test_entries_are_the_tensors_of_the_model(model: ModelConfig) -> None:
    ours = {name: tuple(p.shape) for name, p in Flux(model).state_dict().items()}
    assert {entry.name: entry.shape for entry in entries(model)} == ours


@pytest.mark.parametrize("shard_bytes", [10**9, 100_000], ids=["one file", "sharded"])
@pytest.mark.parametrize("model", SHAPES.values(), ids=SHAPES)
def test_diffusers_computes_the_same_with_exported_weights(
    model: ModelConfig, shard_bytes: int, tmp_path: Path
) -> None:
    state = random_state(model)
    source = bfl_file(tmp_path / "bfl.safetensors", state)
    folder = convert(source, tmp_path / "transformer", "diffusers", shard_bytes=shard_bytes)
    assert (len(list(folder.glob("*.safetensors"))) > 1) == (shard_bytes == 100_000)
    theirs = FluxTransformer2DModel.from_pretrained(folder)
    ours = Flux(model)
    ours.load_state_dict(state)
    torch.manual_seed(1)
    img, txt = torch.randn(2, 24, 16), torch.randn(2, 7, 48)
    vec, t, guidance = torch.randn(2, 40), torch.rand(2), 4 * torch.rand(2)
    with torch.no_grad():
        expected = theirs(
            hidden_states=img,
            encoder_hidden_states=txt,
            pooled_projections=vec,
            timestep=t,
            img_ids=image_ids(8, 12),
            txt_ids=text_ids(7),
            guidance=guidance if model.guidance_embed else None,
            return_dict=False,
        )[0]
        prediction = ours(
            img,
            image_ids(8, 12),
            txt,
            text_ids(7),
            t,
            vec,
            guidance if model.guidance_embed else None,
        )
    torch.testing.assert_close(prediction, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("model", SHAPES.values(), ids=SHAPES)
def test_weights_from_diffusers_are_bit_equal(model: ModelConfig, tmp_path: Path) -> None:
    state = random_state(model)
    folder = convert(
        bfl_file(tmp_path / "a.safetensors", state), tmp_path / "diffusers", "diffusers"
    )
    theirs = FluxTransformer2DModel.from_pretrained(folder)
    theirs.save_pretrained(tmp_path / "pipeline" / "transformer", max_shard_size="100KB")
    back = load_file(convert(tmp_path / "pipeline", tmp_path / "back.safetensors", "bfl"))
    assert back.keys() == state.keys()
    for name, tensor in state.items():
        assert torch.equal(back[name], tensor), name


def test_prefixes_and_other_norm_names_are_read(tmp_path: Path) -> None:
    state = random_state(GUIDED)
    renamed = {
        "model.diffusion_model." + name.replace("norm.scale", "norm.weight"): tensor
        for name, tensor in state.items()
    }
    source = bfl_file(tmp_path / "comfy.safetensors", renamed)
    back = load_file(convert(source, tmp_path / "back.safetensors", "bfl"))
    assert all(torch.equal(back[name], tensor) for name, tensor in state.items())


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_weights_are_rounded_once_to_the_dtype(dtype: str, tmp_path: Path) -> None:
    state = random_state(GUIDED)
    source = bfl_file(tmp_path / "a.safetensors", state)
    output = tmp_path / "b.safetensors"
    assert main(["export", str(source), "--output", str(output), "--dtype", dtype]) == EXIT_OK
    exported = load_file(output)
    assert all(torch.equal(exported[n], t.to(getattr(torch, dtype))) for n, t in state.items())


def run_micro(output: Path, *more: str) -> None:
    flags = ["--logging.metrics_port=0", "--schedule.steps=4", "--evaluation.every_samples=0"]
    done = fluxtrain("run", str(MICRO), "--output", str(output), *flags, *more)
    assert done.returncode == EXIT_OK, done.stderr


def test_a_trained_run_is_exported_and_another_starts_from_it(tmp_path: Path) -> None:
    run_micro(tmp_path / "first", "--processes=2", "--precision.compute=float32")
    trained = tmp_path / "trained.safetensors"
    arguments = ["--output", str(trained), "--dtype", "float32"]
    assert main(["export", str(tmp_path / "first"), *arguments]) == EXIT_OK
    # With a learning rate of next to nothing, the second run's first loss is the first run's last model's.
    run_micro(
        tmp_path / "second",
        f"--initial_weights={trained}",
        "--optim.learning_rate=1e-12",
        "--processes=2",
    )
    again = tmp_path / "again.safetensors"
    assert (
        main(["export", str(tmp_path / "second"), "--output", str(again), "--dtype", "float32"])
        == 0
    )
    before, after = load_file(trained), load_file(again)
    assert all(torch.allclose(before[n], after[n], rtol=1e-5, atol=1e-8) for n in before)
    fresh = Flux(ModelConfig(**json.loads((tmp_path / "first/config.json").read_text())["model"]))
    assert before.keys() == fresh.state_dict().keys()


def break_shape(state: dict[str, Tensor]) -> None:
    state["img_in.bias"] = torch.zeros(3)


MISTAKES: list[tuple[str, Any, str]] = [
    ("missing", lambda s: s.pop("txt_in.bias"), "txt_in.bias is missing"),
    ("extra", lambda s: s.update(other=torch.zeros(1)), "other is not a tensor of this model"),
    ("shape", break_shape, r"img_in.bias has shape \[3\] but the model has \[64\]"),
    ("not finite", lambda s: s["txt_in.bias"].fill_(torch.nan), "txt_in.bias is not finite"),
    ("another model", lambda s: s.pop("img_in.weight"), "neither BFL's nor diffusers'"),
    ("no norms", lambda s: [s.pop(n) for n in list(s) if "norm" in n], "not the weights of a FLUX"),
]


@pytest.mark.parametrize(
    ("change", "message"), [m[1:] for m in MISTAKES], ids=[m[0] for m in MISTAKES]
)
def test_incomplete_weights_are_refused(change: Any, message: str, tmp_path: Path) -> None:
    state = random_state(GUIDED)
    change(state)
    source = bfl_file(tmp_path / "bad.safetensors", state)
    with pytest.raises(DataError, match=message):
        convert(source, tmp_path / "out.safetensors", "bfl")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad.safetensors"]


def test_pickles_and_empty_folders_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "dcp").mkdir()
    (tmp_path / "dcp" / ".metadata").write_bytes(b"\x80\x04.")
    for name, message in (("empty", "no *.safetensors"), ("dcp", "a pickle"), ("none", "missing")):
        output = str(tmp_path / "out.safetensors")
        code = main(["import", str(tmp_path / name), "--output", output])
        assert code == EXIT_USAGE
        assert message in capsys.readouterr().err


@pytest.mark.parametrize("command", ["import", "export"])
def test_a_file_of_another_suffix_is_refused_before_anything_is_read(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, "none", "--output", "a.ckpt"]) == EXIT_USAGE
    assert "--output: got 'a.ckpt'; must end in .safetensors" in capsys.readouterr().err


def test_an_existing_file_is_not_overwritten(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = bfl_file(tmp_path / "a.safetensors", random_state(GUIDED))
    before = source.read_bytes()
    assert main(["export", str(source), "--output", str(source)]) == EXIT_USAGE
    assert "exists already" in capsys.readouterr().err
    assert source.read_bytes() == before


def test_a_killed_export_leaves_nothing_and_can_be_repeated(
    tmp_path: Path,
) -> None:
    model = GUIDED.model_copy(update={"hidden_size": 256, "num_heads": 8})
    source = bfl_file(tmp_path / "a.safetensors", random_state(model))
    began = time.monotonic()
    whole = convert(source, tmp_path / "whole", "diffusers", shard_bytes=10**7)
    undisturbed = time.monotonic() - began
    expected = {path.name: path.read_bytes() for path in whole.iterdir()}
    output, met = tmp_path / "out", 0
    for attempt in range(6):
        child = os.fork()
        if child == 0:
            convert(source, output, "diffusers", shard_bytes=10**7)
            os._exit(0)
        time.sleep(undisturbed * attempt / 6)
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        met += os.WIFSIGNALED(status)
        if output.exists():
            assert {p.name: p.read_bytes() for p in output.iterdir()} == expected
            shutil.rmtree(output)
    assert met, "some kills interrupted an export"
    convert(source, output, "diffusers", shard_bytes=10**7)
    assert {path.name: path.read_bytes() for path in output.iterdir()} == expected
    assert not list(tmp_path.glob(".*")), "no partial file is left"


@pytest.mark.slow
def test_memory_is_far_below_the_size_of_the_model(tmp_path: Path) -> None:
    model = GUIDED.model_copy(
        update={"hidden_size": 512, "num_heads": 16, "depth_single_blocks": 6}
    )
    source = bfl_file(tmp_path / "a.safetensors", random_state(model))
    program = (
        "import resource, sys, torch; from pathlib import Path\n"
        "from fluxtrain.weights import open_weights, write_weights\n"
        "def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024\n"
        "before = peak()\n"
        "write_weights(open_weights(Path(sys.argv[1])), Path(sys.argv[2]), 'bfl', torch.bfloat16)\n"
        "print(peak() - before)\n"
    )
    command = [sys.executable, "-c", program, str(source), str(tmp_path / "b.safetensors")]
    grown = int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    size = source.stat().st_size
    print(f"{size / 2**20:.0f} MiB of weights converted in {grown / 2**20:.0f} MiB more memory")
    assert grown < size / 4


CHANGES: dict[str, Any] = {
    "preset": "micro",
    "schedule": {"steps": 1},
    "evaluation": {"every_samples": 1 << 20, "at_end": False},
    "sampling": {"at_end": False},
    "logging": {"metrics_port": 0},
}


def train(output: Path, size: int = 1, **changes: Any) -> list[int | None]:
    run = ranks.train_alone if size == 1 else partial(ranks.train_together, port=free_port())
    config = resolve(merge(CHANGES, changes))
    return in_process.finish(run, config, RunPaths(output, output, output), size)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a checkpoint of two ranks, whose checksums are of blocks of 1 KiB."""
    output = tmp_path_factory.mktemp("saved") / "run"
    assert train(output, 2) == [EXIT_OK] * 2
    checkpoint = latest(output / "checkpoints")
    assert checkpoint is not None
    sums = {name: FileSums(block_bytes=1 << 10) for name in read_checksums(checkpoint)}
    for name, own in sums.items():
        own.add(memoryview((checkpoint / name).read_bytes()))
    (checkpoint / DONE).write_text(files.encode(sums))
    return checkpoint


def damaged(saved: Path, folder: Path, kind: str) -> tuple[Path, str]:
    """Return a copy with a flipped byte in a large tensor of ``kind``, and the name of its file."""
    checkpoint = folder / saved.name
    shutil.copytree(saved, checkpoint)
    file = max(checkpoint.glob("*.safetensors"))
    spans = [span for name, span in read_header(file).items() if name.startswith(kind)]
    span = max(spans, key=lambda span: span.num_bytes)
    assert span.num_bytes > 1 << 12, "it fills some blocks"
    content = bytearray(file.read_bytes())
    content[span.offset + span.num_bytes // 2] ^= 1
    file.write_bytes(content)
    return checkpoint, file.name


def export(checkpoint: Path, output: Path) -> int:
    return main(["export", str(checkpoint), "--output", str(output), "--dtype", "float32"])


def test_damaged_weights_are_not_exported(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint, file = damaged(saved, tmp_path, "model.")
    assert export(checkpoint, tmp_path / "out.safetensors") == EXIT_USAGE
    error = capsys.readouterr().err
    assert f"{checkpoint}: damaged ({file}: wrong checksum of bytes " in error
    assert "Traceback" not in error
    assert not list(tmp_path.glob("*out*"))


def test_whole_weights_are_exported_whatever_the_optimizer_state_is(
    saved: Path, tmp_path: Path
) -> None:
    checkpoint, _ = damaged(saved, tmp_path, "optimizer.")
    for number, source in enumerate((saved, checkpoint)):
        assert export(source, tmp_path / f"{number}.safetensors") == EXIT_OK
    first, second = ((tmp_path / f"{n}.safetensors").read_bytes() for n in range(2))
    assert first == second


@pytest.mark.parametrize("name", ["cut", "header", "config.json"])
def test_other_damages_are_named(saved: Path, tmp_path: Path, name: str) -> None:
    checkpoint = tmp_path / saved.name
    shutil.copytree(saved, checkpoint)
    file = min(checkpoint.glob("*.safetensors"))
    content = bytearray(file.read_bytes())
    if name == "cut":
        file.write_bytes(content[:-1])
    elif name == "header":
        content[100] ^= 1
        file.write_bytes(content)
    else:
        file = checkpoint / name
        file.write_text(file.read_text().replace("micro", "macro"))
    with pytest.raises(DataError, match=file.name):
        open_weights(checkpoint).verify(World.alone(), lambda: None)


@pytest.mark.parametrize("size", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_no_run_starts_from_damaged_weights(saved: Path, tmp_path: Path, size: int) -> None:
    checkpoint, file = damaged(saved, tmp_path, "model.")
    output = tmp_path / "run"
    assert train(output, size, initial_weights=str(checkpoint)) == [EXIT_USAGE] * size
    for rank in range(size):
        text = ranks.output_of(RunPaths(output, output, output), rank)
        assert f"damaged ({file}: wrong checksum" in text
    assert train(output, size, initial_weights=str(saved)) == [EXIT_OK] * size


def test_no_image_is_sampled_with_damaged_weights(saved: Path, tmp_path: Path) -> None:
    checkpoint, file = damaged(saved, tmp_path, "model.")
    config = resolve(merge(CHANGES, {"initial_weights": str(checkpoint)}))
    paths = RunPaths(tmp_path, tmp_path, tmp_path)
    with pytest.raises(DataError, match=f"damaged .{file}: wrong checksum"):
        task._load_model(config, paths, World.alone(), lambda: None)
    whole = resolve(merge(CHANGES, {"initial_weights": str(saved)}))
    task._load_model(whole, paths, World.alone(), lambda: None)
