"""LoRA files of other tools: what is read of them, how they are described, and what is written of them."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from benchmarks.adapters.other_loaders import clip_model, in_diffusers
from safetensors.torch import load_file, save_file
from tests.trainer.adapter.dialects import (
    DIALECTS,
    ENTRIES,
    KOHYA,
    RANK,
    SHAPES,
    WEIGHTS,
    File,
    lokr,
    of_whole_layers,
    rand,
    with_more,
)
from tests.trainer.adapter.random_adapters import MODEL, Base
from torch import Tensor

from fluxtrain.adapter.file import LAYOUTS, describe_file, read_adapter, write_adapter
from fluxtrain.adapter.merge import MergedWeights, clip_adapters
from fluxtrain.adapter.merge import updated as updated_clip
from fluxtrain.adapter.opening import initial_parameters
from fluxtrain.adapter.updates import Hadamard, Product, is_dora
from fluxtrain.cli import main
from fluxtrain.contract.run.adapter import ClipAdapterConfig
from fluxtrain.contract.run.resolve import resolve
from fluxtrain.encode.text import TextModel
from fluxtrain.errors import EXIT_OK, DataError
from fluxtrain.runtime.safetensors import identify

pytestmark = pytest.mark.slow

TOLERANCE = 1e-5


def merged(path: Path) -> dict[str, Tensor]:
    """Return the tensors that the adapter at ``path`` changes, with its update."""
    weights = MergedWeights(Base(WEIGHTS), [(read_adapter(path, skip_unknown=True), 1.0)])
    found = dict(weights.read(list(SHAPES)))
    return {name: each for name, each in found.items() if each is not WEIGHTS[name]}


def written(folder: Path, name: str) -> Path:
    path = folder / "foreign.safetensors"
    save_file({key: each.contiguous() for key, each in DIALECTS[name].file.tensors.items()}, path)
    return path


def require_equal(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.allclose(found[name], tensor, atol=tolerance), name


@pytest.mark.parametrize("name", DIALECTS)
def test_it_is_read_described_and_written_in_the_layouts_that_have_a_place(
    tmp_path: Path, name: str
) -> None:
    dialect, path = DIALECTS[name], written(tmp_path, name)
    require_equal(merged(path), dialect.file.updated, TOLERANCE)
    found = dict(describe_file(path))
    assert dialect.dialect in found["dialect"]
    assert found["holds"].startswith(dialect.holds) or dialect.holds in found["holds"]
    assert identify(dialect.file.tensors).startswith("; it holds adapters, which spec.run.adapter")
    file = read_adapter(path, skip_unknown=True)
    for layout in LAYOUTS:
        target = tmp_path / f"{layout}.safetensors"
        if layout in found["use"]:
            write_adapter(target, file.adapter, layout, torch.float32)
            require_equal(merged(target), dialect.file.updated, 10 * TOLERANCE)
        else:
            with pytest.raises(DataError, match=f"layout {layout} has no (place|name) for"):
                write_adapter(target, file.adapter, layout, torch.float32)


@pytest.mark.parametrize("name", [name for name, each in DIALECTS.items() if each.is_of_diffusers])
def test_diffusers_reads_what_we_read(tmp_path: Path, name: str) -> None:
    theirs = in_diffusers(written(tmp_path, name), MODEL)
    ours: dict[str, Tensor] = {}
    for weight, updated in DIALECTS[name].file.updated.items():
        delta, entry = updated - WEIGHTS[weight], ENTRIES[weight]
        delta = torch.cat(delta.chunk(2)[::-1]) if entry.swapped else delta
        rows = torch.split(delta, [count for _, count in entry.parts])
        parts = zip(entry.parts, rows, strict=True)
        ours |= {part.removesuffix(".weight"): each for (part, _), each in parts if each.any()}
    require_equal(theirs, ours, TOLERANCE)


class Row(NamedTuple):
    """A file, what its description says, and what can be done with it; "" is nothing."""

    tensors: dict[str, Tensor]
    says: str
    uses: str = ""


ALL = "kohya diffusers ai-toolkit bfl merge sample resize adapter.initial"
OF_CLIP = ALL.replace(" merge", "")
CLIP = "text_model.encoder.layers.3.self_attn.q_proj"


def one(name: str, outputs: int = 64, inputs: int = 64) -> dict[str, Tensor]:
    matrices = {"A": rand(RANK, inputs), "B": rand(outputs, RANK)}
    return {f"{name}.lora_{key}.weight": matrix for key, matrix in matrices.items()}


def changed(start: File, name: str, tensor: Tensor) -> dict[str, Tensor]:
    assert name in start.tensors
    return start.tensors | {name: tensor}


ONES = of_whole_layers("lora_unet_", KOHYA, dot="_")
QKV = "lora_unet_double_blocks_0_img_attn_qkv"
WHOLE_LOKR = of_whole_layers("lora_unet_", lokr(3.0, False), dot="_")
ATTENTION = "transformer.transformer_blocks.{}.attn.to_q"
PREFIXES = (
    "text_encoder.", "clip_l.", "te1.", "te.", "", "text_encoder.base_model.model.", "base_model.model.",
    "text_encoder_1.", "text_encoders.clip_l.transformer.", "cond_stage_model.transformer.",
)  # fmt: skip
UNKNOWN_PARTS = {
    "scalar": ("scalar", ONES), "Tucker": ("lora_mid.weight", ONES), "Tucker's LoKr": ("lokr_t2", WHOLE_LOKR),
    "weight": ("weight", ONES), "a part to come": ("new_part", ONES),
}  # fmt: skip
OTHERS = {
    "SD 1.5, attention": (one("unet.down_blocks.0.attentions.0.transformer_blocks.0.attn1.to_q"), "1.5"),
    "SD 1.5, peft": (one("base_model.model.mid_block.attentions.0.transformer_blocks.0.attn2.to_k"), "1.5"),
    "SD 1.5, MLPs": (one("lora_unet_up_blocks_1_attentions_0_transformer_blocks_0_ff_net_0_proj"), "1.5"),
    "SDXL, ComfyUI": (one("diffusion_model.middle_block.1.transformer_blocks.0.attn1.to_q"), "or of SDXL"),
    "SDXL's second encoder": (one(f"clip_g.{CLIP}"), "SDXL"),
    "SD 3, attention": (one(ATTENTION.format(0), 1536, 1536), "Stable Diffusion 3 or 3.5 Medium"),
    "SD 3.5": (one(ATTENTION.format(0), 2432, 2432), "Stable Diffusion 3.5 Large"),
    "HiDream": (one("double_stream_blocks.0.block.attn1.to_q"), "HiDream"),
    "AuraFlow": (one("lora_unet_joint_transformer_blocks_0_attn_to_q"), "AuraFlow"),
    "Qwen-Image, attention": (one(ATTENTION.format(59), 3072, 3072), "Qwen-Image"),
    "FLUX.2, attention": (one("diffusion_model.double_blocks.0.img_attn.proj", 6144, 6144), "FLUX.2"),
    "FLUX.2 klein": (one("diffusion_model.single_blocks.0.linear1", 9 * 3072, 3072), "FLUX.2 klein 4B"),
    "Chroma": (one("lora_unet_distilled_guidance_layer_in_proj") | ONES.tensors, "Chroma"),
}  # fmt: skip
DAMAGED = {
    "another width": (changed(ONES, f"{QKV}.lora_up.weight", rand(144, 4)), "is [144, 64]; at the width 64"),
    "another MLP": (ONES.tensors | one("lora_unet_single_blocks_9_linear2", 64, 192), "it is [64, 320]"),
    "one layer of it": (one(QKV, 200, 64), "is [200, 64]; at the width 64 of most layers it is [192, 64]"),
    "LoKr": (changed(WHOLE_LOKR, f"{QKV}.lokr_w2", rand(40, 16)), "is [160, 64]; at the width 64"),
    "CLIP": (one(f"text_encoder.{CLIP}", 64, 65), "is [64, 65]"),
    "not a number": (changed(ONES, f"{QKV}.lora_up.weight", rand(192, 4) * torch.tensor(4 * [torch.nan])),
                     f"{QKV}.lora_up.weight is not finite"),
    "infinite": (changed(ONES, f"{QKV}.alpha", torch.tensor(torch.inf)), f"{QKV}.alpha is not finite"),
    "no down": ({f"{QKV}.lora_up.weight": rand(192, 4)}, "has no down matrix"),
}  # fmt: skip
ROWS = {
    **{f"CLIP, {prefix}": Row(one(prefix + CLIP), "1 of text_encoder", OF_CLIP) for prefix in PREFIXES},
    **{
        f"CLIP, {prefix}": Row(one(prefix + CLIP.replace(".", "_")), "1 of text_encoder", OF_CLIP)
        for prefix in ("lora_te1_", "lora_te_", "lycoris_", "lora_clip_l_")
    },
    "CLIP and T5": Row(
        one(f"text_encoder.{CLIP}") | one("text_encoder_2.encoder.block.0.layer.0.SelfAttention.q"),
        "2 tensors of other text encoders", OF_CLIP),
    "CLIP and blocks": Row(one(f"te1.{CLIP}") | ONES.tensors, "1 of text_encoder", ALL),
    "CLIP, biases": Row(
        one(f"text_encoders.clip_l.transformer.{CLIP}")
        | {f"text_encoders.clip_l.transformer.{CLIP}.diff_b": rand(64)},
        "values of biases and norms (1 layers)", "kohya bfl sample resize adapter.initial"),
    "CLIP, a bias of another width": Row(
        one(f"te1.{CLIP}") | {f"te1.{CLIP}.diff_b": rand(65)}, "bias is [65]; at the width 64"),
    "CLIP, an unknown part": Row(
        one(f"te1.{CLIP}") | {f"te1.{CLIP}.scalar": rand(1)}, "a LoRA of text encoders alone"),
    **{
        f"an unknown part: {name}": Row(
            with_more(file, f"{QKV}.{part}").tensors, f"{QKV}.{part}, {QKV}",
            ALL if file is ONES else "kohya bfl merge sample resize adapter.initial")
        for name, (part, file) in UNKNOWN_PARTS.items()
    },
    "an unknown part of a part": Row(
        one(ATTENTION.format(0)) | one("transformer.transformer_blocks.0.attn.to_k")
        | {f"{ATTENTION.format(0)}_lora.mid.weight": rand(4, 4)}, "to_q_lora.mid.weight", ALL),
    "more is unknown than known": Row(
        with_more(File(one("transformer.transformer_blocks.0.attn.to_k"), {}), "a", "b", "c").tensors,
        "3: a, b, c", ALL),
    **{name: Row(tensors, says) for name, (tensors, says) in OTHERS.items()},
    **{name: Row(tensors, says) for name, (tensors, says) in DAMAGED.items()},
    "too large": Row({name: 1e20 * each for name, each in one(QKV, 192, 64).items()}, "is beyond float32"),
    **{name: Row(each.file.tensors, each.dialect, "?") for name, each in DIALECTS.items()},
}  # fmt: skip


def attempt(use: str, path: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """Return why ``use`` of the file at ``path`` is refused; "" if it has an effect."""
    output = path.parent / "output.safetensors"
    if use in ("sample", "adapter.initial"):
        try:
            return "" if (_sampled if use == "sample" else _begun)(path) else "no effect"
        except DataError as error:
            return str(error)
    base = path.parent / "base.safetensors"
    commands = {"merge": ["merge", str(base), str(path), "--dtype=float32"]}
    commands["resize"] = ["resize", str(path), "--rank=2"]
    command = commands.get(use, ["convert", str(path), f"--to={use}"])
    capsys.readouterr()
    if main(["adapter", *command, "--skip-unknown", "--output", str(output)]) != EXIT_OK:
        return capsys.readouterr().err
    found = load_file(output)
    output.unlink()
    return "no effect" if all(torch.equal(found[n], WEIGHTS.get(n, rand(1))) for n in found) else ""


def _sampled(path: Path) -> bool:
    weights = MergedWeights(Base(WEIGHTS), [(read_adapter(path, skip_unknown=True), 1.0)])
    is_changed = any(each is not WEIGHTS[name] for name, each in weights.read(list(SHAPES)))
    before, added = clip_model(64), clip_adapters(weights)
    after = updated_clip(TextModel(None, before, 77), added).encoder.state_dict() if added else {}
    own = before.state_dict()
    return is_changed or any(not torch.equal(each, own[name]) for name, each in after.items())


def _begun(path: Path) -> bool:
    file = read_adapter(path, skip_unknown=True)
    blocks = [each for name, each in file.adapter.items() if "_blocks." in name and each.inputs]
    begin = {"rank": 4, "alpha": 4.0, "split_qkv": True, "initial": path.name, "skip_unknown": True}
    if any(isinstance(each, Product) for each in blocks):
        has_rank = any(each.rank for each in blocks if isinstance(each, Product))
        begin = begin | {"kind": "lokr", "rank": 2, "split_qkv": False}
        begin["lokr"] = {"factor": 4, "full_matrix": not has_rank}
    elif any(isinstance(each, Hadamard) for each in blocks):
        begin = begin | {"kind": "loha", "rank": 3, "split_qkv": False}
    elif is_dora(file.adapter):
        begin["dora"] = True
    model = MODEL.model_dump() | {"vec_in_dim": 64}
    run = {"preset": "micro", "initial_weights": "w", "model": model, "adapter": begin}
    config = resolve(run)
    if config.adapter and not {"kind", "dora"} & begin.keys():
        own = config.adapter.model_copy(update={"clip": ClipAdapterConfig(rank=4)})
        config = config.model_copy(update={"adapter": own})
    found = initial_parameters(config, path.parent)
    return any(each.any() for name, each in found.items() if name.endswith(("_B", "w2", "_b")))


@pytest.mark.parametrize("name", ROWS)
def test_what_its_description_offers_works_and_the_rest_is_refused(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    row, path = ROWS[name], tmp_path / "foreign.safetensors"
    save_file({key: each.contiguous() for key, each in row.tensors.items()}, path)
    save_file(WEIGHTS, tmp_path / "base.safetensors")
    found = dict(describe_file(path))
    assert row.says in " ".join(found.values())
    offered = {each.removeprefix("convert to ").split()[0] for each in found["use"].split(", ")}
    offered &= set(ALL.split())
    assert row.uses == "?" or offered == set(row.uses.split())
    for use in ALL.split():
        refusal = attempt(use, path, capsys)
        assert (refusal == "") == (use in offered), (use, refusal)
        if refusal:
            assert str(path) in refusal or "output.safetensors" in refusal
            assert "; " in refusal
            assert len(refusal.strip().splitlines()) == 1, refusal
