"""What is said of files that are no LoRA of the model, or that hold more than one."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
import torch
from benchmarks.reference_model import random_model
from safetensors.torch import load_file, save_file
from tests.trainer.adapter.dialects import DIALECTS, SHAPES, WEIGHTS, of_parts, pair
from tests.trainer.adapter.random_adapters import MODEL
from tests.trainer.tiny_model import save_flux
from torch import Tensor

from fluxtrain.adapter.file import describe_file, read_adapter
from fluxtrain.adapter.merge import tell_skipped
from fluxtrain.adapter.opening import initial_parameters, model_of
from fluxtrain.cli import main
from fluxtrain.contract.run.resolve import resolve
from fluxtrain.encode.codec import load_autoencoder
from fluxtrain.errors import EXIT_OK, EXIT_USAGE, DataError
from fluxtrain.parallel.distributed import World
from fluxtrain.weights.reader import open_weights

UP, DOWN = "lora_up.weight", "lora_down.weight"
OTHERS = {
    "SDXL": (["lora_unet_input_blocks_4_1_proj_in." + UP, "lora_te2_text_model_x." + UP], "a LoRA of SDXL"),
    "SD 1.5": (["lora_unet_down_blocks_0_attentions_0_proj_in." + UP], "a LoRA of Stable Diffusion 1.5 or 2"),
    "SD 1.5 of diffusers": (["unet.down_blocks.0.attentions.0.to_q.lora_A.weight"], "a LoRA of Stable"),
    "SD 3": (["lora_unet_joint_blocks_0_x_block_attn_qkv." + UP], "a LoRA of Stable Diffusion 3"),
    "HunyuanVideo": (["transformer.double_blocks.0.img_attn_qkv.lora_A.weight"], "a LoRA of HunyuanVideo"),
    "Wan of diffusers": (["transformer.blocks.0.attn1.to_q.lora_A.weight"], "a LoRA of Wan"),
    "Anima": (["lora_unet_blocks_0_self_attn_q_proj." + UP], "a LoRA of Cosmos or Anima"),
    "Z-Image": (["diffusion_model.layers.0.attention.to_q.lora_A.weight"], "a LoRA of Lumina, Z-Image or"),
    "FLUX.3": (["diffusion_model.single_blocks.0.q_proj.lora_A.weight"], "a LoRA of FLUX.3"),
    "FLUX.3 of diffusers": (
        ["transformer.single_transformer_blocks.0.attn.to_q.lora_A.weight",
         "transformer.single_transformer_blocks.0.attn.to_out.0.lora_A.weight"], "a LoRA of FLUX.3"),
    "Nunchaku": (
        ["transformer_blocks.0.qkv_proj.lora_down", "transformer_blocks.0.norm1.linear.lora_down"],
        "a LoRA of Nunchaku's quantised weights"),
    "EasyControl": (
        ["single_transformer_blocks.0.attn.processor.q_loras.0.down.weight"], "a LoRA of EasyControl"),
    "a model to come": (["transformer.layer.0.lora_A.weight"], "adapters of an unknown model or tool"),
    "Wan": (["diffusion_model.blocks.0.self_attn.q.lora_A.weight"], "a LoRA of Wan"),
    "Qwen-Image": (
        ["transformer.transformer_blocks.0.img_mlp.net.0.proj.lora_A.weight",
         "transformer.transformer_blocks.0.txt_mlp.net.0.proj.lora_A.weight",
         "transformer.transformer_blocks.0.attn.to_q.lora_A.weight"], "a LoRA of Qwen-Image"),
    "a language model": (["base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"], "a LoRA of a"),
    "T5 alone": (["lora_te3_encoder_block_0_layer_0_SelfAttention_q." + UP], "a LoRA of text encoders alone"),
    "a ControlNet's LoRA": (
        ["controlnet.transformer_blocks.0.attn.to_q.lora_A.weight"], "a LoRA of a ControlNet"),
    "OFT": (["lora_unet_single_blocks_0_linear1.oft_blocks"], "an adapter by OFT"),
    "GLoRA": (["lora_unet_single_blocks_0_linear1.a1.weight"], "an adapter by GLoRA"),
    "BFL's FLUX": (["double_blocks.0.img_attn.qkv.weight", "img_in.weight"], "a FLUX transformer"),
    "diffusers' FLUX": (["single_transformer_blocks.0.attn.to_q.weight", "x_embedder.weight"], "a FLUX tr"),
    "Chroma": (["distilled_guidance_layer.in_proj.weight", "double_blocks.0.img_attn.qkv.weight"], "Chroma"),
    "FLUX.2": (["double_stream_modulation_img.lin.weight", "double_blocks.0.img_attn.qkv.weight"], "FLUX.2"),
    "a checkpoint": (["model.diffusion_model.double_blocks.0.img_attn.qkv.weight", "vae.x"], "a FLUX tr"),
    "SDXL's checkpoint": (["model.diffusion_model.input_blocks.0.0.weight"], "a U-Net of Stable Diffusion"),
    "a ControlNet": (["controlnet_x_embedder.weight", "transformer_blocks.0.attn.to_q.weight"], "a Contr"),
    "an IP-Adapter": (["double_blocks.0.processor.ip_adapter_double_stream_k_proj.weight"], "an IP-Adapter"),
    "Redux": (["redux_up.weight", "redux_down.weight"], "FLUX.1 Redux"),
    "diffusers' VAE": (["encoder.down_blocks.0.resnets.0.conv1.weight", "decoder.conv_in.weight"],
                       "an autoencoder in diffusers' layout"),
    "BFL's VAE": (["encoder.down.0.block.0.conv1.weight", "decoder.conv_in.weight"], "an autoencoder"),
    "T5": (["encoder.block.0.layer.0.SelfAttention.q.weight"], "a text encoder"),
    "CLIP": (["text_model.embeddings.token_embedding.weight"], "a text encoder"),
    "an embedding": (["clip_l", "t5xxl"], "an embedding of tokens"),
    "an old embedding": (["emb_params"], "an embedding of tokens"),
    "anything": (["a", "b"], "nothing that is known"),
    "nothing": ([], "no tensors"),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_another_file_is_described_and_refused_as_what_it_is(tmp_path: Path, name: str) -> None:
    names, says = OTHERS[name]
    path = tmp_path / "other.safetensors"
    save_file({each: torch.ones(4, 4) for each in names}, path, {"software": "a tool"})
    found = dict(describe_file(path))
    assert says in found["holds"]
    assert found["written by"] == "a tool"
    with pytest.raises(DataError) as caught:
        read_adapter(path, skip_unknown=True)
    if says.startswith(("a ", "an ", "adapters ")) and "text encoders" not in says:
        assert f"it holds {says}" in str(caught.value)


CONTENTS = {
    "GGUF": (b"GGUF\3\0\0\0" + bytes(64), "it is a GGUF file of quantised weights: get the .safetensors"),
    "Git LFS": (b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\n", "a Git-LFS pointer"),
    "a web page": (b"\n<!DOCTYPE html><html><head></head></html>", "it is a web page: the download needs"),
    "a refusal": (b"Access to model black-forest-labs/FLUX.1-dev is restricted.", "it is a text: 'Access"),
    "a pickle": (b"PK\3\4" + bytes(64), "it is a pickle, which is not read: get the .safetensors file"),
    "an old pickle": (b"\x80\2}q\0." + bytes(64), "it is a pickle, which is not read"),
    "zeros": (bytes(64), "it begins with zeros, as an interrupted download does"),
    "a picture": (b"\x89PNG\r\n\x1a\n" + bytes(64), "it is a picture"),
}  # fmt: skip


@pytest.mark.parametrize("name", CONTENTS)
def test_what_is_no_safetensors_file_is_named_wherever_weights_are_read(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    content, says = CONTENTS[name]
    path = tmp_path / "file.safetensors"
    path.write_bytes(content)
    for read in (read_adapter, open_weights, load_autoencoder):
        with pytest.raises(DataError) as caught:
            read(path)
        assert says in str(caught.value)
    assert main(["adapter", "info", str(path)]) == EXIT_USAGE
    assert says in capsys.readouterr().err


def test_a_diffusers_autoencoder_is_named_where_bfls_is_expected(tmp_path: Path) -> None:
    path = tmp_path / "diffusion_pytorch_model.safetensors"
    save_file({name: torch.ones(4, 4) for name in OTHERS["diffusers' VAE"][0]}, path)
    with pytest.raises(DataError, match=r"it holds an autoencoder in diffusers' layout; ae\.safet"):
        load_autoencoder(path)


def bundle(folder: Path) -> Path:
    path = folder / "bundle.safetensors"
    save_file(DIALECTS["OneTrainer with embeddings"].file.tensors, path)
    return path


UNKNOWN = "bundle_emb.tok.clip_l, bundle_emb.tok.t5"


def test_unknown_keys_are_left_out_only_with_the_option(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = bundle(tmp_path)
    save_flux(random_model(MODEL), tmp_path)
    weights, output = tmp_path / "weights.safetensors", tmp_path / "out.safetensors"
    for command in (
        ["convert", str(source)],
        ["resize", str(source), "--rank", "2"],
        ["merge", str(weights), str(source)],
    ):
        arguments = ["adapter", *command, "--output", str(output)]
        assert main(arguments) == EXIT_USAGE
        text = f"2 keys are unknown: {UNKNOWN}; --skip-unknown leaves them out and takes the rest"
        assert text in capsys.readouterr().err
        assert main([*arguments, "--skip-unknown"]) == EXIT_OK
        assert f"2 unknown keys are left out: {UNKNOWN}" in capsys.readouterr().out
        output.unlink()
    arguments = ["export", str(weights), "--adapter", str(source), "--output", str(output)]
    assert main(arguments) == EXIT_USAGE
    assert main([*arguments, "--skip-unknown"]) == EXIT_OK
    assert f"2 unknown keys are left out: {UNKNOWN}" in capsys.readouterr().out
    assert main(["adapter", "info", str(source)]) == EXIT_OK
    assert f"unknown:       2: {UNKNOWN}" in capsys.readouterr().out


def test_a_run_samples_with_the_layers_that_are_known(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = bundle(tmp_path)
    save_flux(random_model(MODEL), tmp_path)
    run = {"preset": "micro", "task": "sample", "initial_weights": "weights.safetensors"}
    run |= {"model": open_weights(tmp_path / "weights.safetensors").model.model_dump()}
    added = {"path": source.name, "strength": 0.5}
    with pytest.raises(DataError, match="2 keys are unknown"):
        model_of(resolve(run | {"added_adapters": [added]}), tmp_path)
    model = model_of(resolve(run | {"added_adapters": [added | {"skip_unknown": True}]}), tmp_path)
    assert model is not None
    tell_skipped(model, World.alone())
    assert f"2 unknown keys are left out: {UNKNOWN}" in capsys.readouterr().err


def test_a_layer_of_another_shape_is_left_out_with_the_option(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A control LoRA's first layer has more channels."""
    file = of_parts("transformer.", pair(), ["img_in", "txt_in"])
    source, weights = tmp_path / "control.safetensors", tmp_path / "weights.safetensors"
    more = {"transformer.x_embedder.lora_A.weight": torch.ones(4, 128)}
    save_file(file.tensors | more, source)
    save_file(WEIGHTS, weights)
    output = tmp_path / "out.safetensors"
    arguments = ["adapter", "merge", str(weights), str(source), "--dtype=float32", "--output"]
    assert main([*arguments, str(output)]) == EXIT_USAGE
    assert "img_in is [64, 128]; in" in capsys.readouterr().err
    assert main([*arguments, str(output), "--skip-unknown"]) == EXIT_OK
    assert "1 layer left out: img_in is [64, 128]; in" in capsys.readouterr().out
    found = load_file(output)
    assert torch.equal(found["img_in.weight"], WEIGHTS["img_in.weight"])
    assert torch.allclose(found["txt_in.weight"], file.updated["txt_in.weight"], atol=1e-5)
    assert main(["adapter", "info", str(source)]) == EXIT_OK
    assert "with a control image (Depth, Canny)" in capsys.readouterr().out


def test_a_run_begins_with_the_layers_that_it_adapts(tmp_path: Path) -> None:
    source = bundle(tmp_path)
    begin = {"rank": 4, "alpha": 4.0, "split_qkv": True, "initial": source.name}
    run = {"preset": "micro", "initial_weights": "w", "model": MODEL.model_dump()}
    with pytest.raises(DataError, match="2 keys are unknown"):
        initial_parameters(resolve(run | {"adapter": begin}), tmp_path)
    told: list[str] = []
    config = resolve(run | {"adapter": begin | {"skip_unknown": True}})
    found = initial_parameters(config, tmp_path, told.append)
    assert len(found) == 2 * 29
    assert f"2 unknown keys are left out: {UNKNOWN}" in told[0]
    assert "layers are left out: final_layer.adaLN_modulation.1, final_layer.linear" in told[1]


def test_a_type_without_arithmetic_and_a_header_with_many_tags_are_described(
    tmp_path: Path,
) -> None:
    path = tmp_path / "a.safetensors"
    tags = json.dumps({f"tag {index}": index for index in range(100_000)})
    save_file({"img_in.lora_A.weight": torch.ones(1, 64), "img_in.lora_B.weight": torch.ones(64, 1)},
              path, {"ss_tag_frequency": tags})  # fmt: skip
    assert struct.unpack("<Q", path.read_bytes()[:8])[0] > 1 << 20
    assert dict(describe_file(path))["written by"].startswith("kohya")
    names = {"img_in.lora_A.weight": torch.ones(1, 64, dtype=torch.int32)}
    save_file(names, path)
    assert "is int32, of a quantised file" in dict(describe_file(path))["damaged"]


def test_pefts_own_file_has_alpha_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "adapter_model.safetensors"
    file = of_parts("base_model.model.", pair())
    save_file(file.tensors, path)
    config = {"r": 4, "lora_alpha": 8, "alpha_pattern": {}, "use_rslora": False}
    for is_rs, scale in ((False, 2.0), (True, 4.0)):
        text = json.dumps(config | {"use_rslora": is_rs})
        (tmp_path / "adapter_config.json").write_text(text)
        adapter = read_adapter(path).adapter
        for name, updated in file.updated.items():
            delta: Tensor = scale * (updated - WEIGHTS[name])
            assert torch.allclose(adapter[name.removesuffix(".weight")].delta(), delta, atol=1e-5)
    assert set(SHAPES) > set(file.updated)


def test_layers_of_blocks_that_flux_does_not_have_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "deep.safetensors"
    names = ("lora_unet_double_blocks_18_img_attn_qkv", "lora_unet_double_blocks_19_img_attn_qkv")
    names += ("lora_unet_single_blocks_38_linear2",)
    ends = {"lora_down.weight": (2, 64), "lora_up.weight": (192, 2)}
    save_file(
        {f"{name}.{end}": torch.ones(each) for name in names for end, each in ends.items()}, source
    )
    assert main(["adapter", "info", str(source)]) == EXIT_OK
    told = capsys.readouterr().out
    assert "no such block: 2: double_blocks.19.img_attn.qkv, single_blocks.38.linear2" in told


def test_a_merge_without_a_layer_that_fits_is_refused_with_the_option_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, weights = tmp_path / "clip.safetensors", tmp_path / "weights.safetensors"
    names = ("te1.text_model.encoder.layers.0.self_attn.q_proj", "double_blocks.9.img_attn.proj")
    modules = [pair()(name, (64, 64))[0] for name in names]
    save_file(WEIGHTS, weights)
    for tensors, says in (
        (modules[0], "it adapts CLIP-L alone, and these are the transformer's weights; sample"),
        (modules[0] | modules[1], "double_blocks.9.img_attn.proj is [64, 64]; in"),
    ):
        save_file(tensors, source)
        output = tmp_path / "out.safetensors"
        arguments = [str(weights), str(source), "--skip-unknown", "--output", str(output)]
        assert main(["adapter", "merge", *arguments]) == EXIT_USAGE
        assert f"{source}: {says}" in capsys.readouterr().err
        assert not output.exists()


NAME = "lora_unet_double_blocks_0_img_attn_qkv"
WHOLE = {f"{NAME}.{DOWN}": torch.full((2, 64), 1e20), f"{NAME}.{UP}": torch.full((192, 2), 1e20)}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            {f"{NAME}.{UP}": torch.full((192, 2), torch.nan)},
            "holds:         a damaged LoRA of FLUX.1",
        ),
        ({f"{NAME}.{UP}": torch.ones(192, 2, dtype=torch.int8)}, "is int8, of a quantised file"),
        ({}, f"largest norm:  {1e40 * 2 * (64 * 192) ** 0.5:.4g} of double_blocks.0.img_attn.qkv"),
        ({f"{NAME}.{UP}": torch.zeros(192, 2)}, "largest norm:  0: no effect"),
        ({"\x1b[31m\nred": torch.ones(1)}, "unknown:       1: \\x1b[31m\\nred"),
    ],
    ids=["not a number", "int8", "large", "zero", "escape"],
)
def test_odd_values_and_names_are_described(
    change: dict[str, Tensor], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_file(WHOLE | change, tmp_path / "odd.safetensors")
    assert main(["adapter", "info", str(tmp_path / "odd.safetensors")]) == EXIT_OK
    assert says in capsys.readouterr().out


def test_values_that_overflow_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_file(WHOLE, tmp_path / "large.safetensors")
    resize = ["adapter", "resize", "--rank=1", "--output", str(tmp_path / "small.safetensors")]
    assert main([*resize, str(tmp_path / "large.safetensors")]) == EXIT_USAGE
    assert "img_attn" in capsys.readouterr().err
    model = random_model(MODEL)
    with torch.no_grad():
        model.img_in.weight.fill_(1e5)
    base = save_flux(model, tmp_path)
    wide = ["export", str(base), "--output", str(tmp_path / "half.safetensors"), "--to=bfl"]
    assert main([*wide, "--dtype=float16"]) == EXIT_USAGE
    assert "is not finite in float16; bfloat16 has a wider range" in capsys.readouterr().err
