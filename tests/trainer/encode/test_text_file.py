"""Text encoders in single files, like those of ComfyUI and kohya, compared with transformers' folders."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.trainer.numerics.scaled_weights import KINDS, in_fp8
from tests.trainer.tiny_encoders import (
    BASE,
    caption,
    config,
    t5_tokenizer,
    write_clip,
    write_encoders,
    write_images,
    write_t5,
)
from torch import Tensor
from transformers import AutoTokenizer

from fluxtrain.contract.process import RunPaths
from fluxtrain.contract.run.precision import EncodersConfig
from fluxtrain.contract.run.resolve import merge, resolve
from fluxtrain.encode.encoders import check_files
from fluxtrain.encode.text import TextEncoder, load_text_encoder
from fluxtrain.errors import ConfigError, DataError
from fluxtrain.prepare.preprocess_output import open_outputs

CPU = torch.device("cpu")
CAPTIONS = [caption(0), caption(31), "", " ".join(caption(index) for index in range(40))]
WIDTH, LENGTH = 128, 12
FOLDERS = EncodersConfig()
FILES = EncodersConfig(
    t5="t5xxl_fp16.safetensors",
    t5_tokenizer="tokenizer_2",
    clip="clip_l.safetensors",
    clip_tokenizer="tokenizer",
)
T5_FIRST = "encoder.block.0.layer"
State = dict[str, Tensor]


def t5_state(folder: Path) -> State:
    """Write a T5 1.1 encoder as a folder; return its weights in half precision."""
    model = write_t5(
        folder,
        vocab_size=108,  # more rows than tokens, like the published 32,128 for 32,100
        d_model=24,
        d_kv=16,
        d_ff=40,
        num_layers=3,
        relative_attention_num_buckets=20,
        feed_forward_proj="gated-gelu",
    )
    model.half().save_pretrained(folder)
    return load_file(folder / "model.safetensors")


def clip_state(folder: Path) -> State:
    """Write a CLIP text encoder as a folder; return its weights in half precision."""
    model = write_clip(
        folder,
        hidden_size=WIDTH,
        intermediate_size=96,
        num_hidden_layers=3,
        hidden_act="quick_gelu",
    )
    for parameter in model.parameters():  # activations far from 0, where the GELUs differ
        parameter.data.mul_(4 if parameter.dim() == 2 else 1)
    model.half().save_pretrained(folder)
    state = load_file(folder / "model.safetensors")
    return {
        f"text_model.{name.removeprefix('text_model.')}": value for name, value in state.items()
    }


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a models root with both encoders as folders and as single files."""
    torch.manual_seed(0)
    root = tmp_path_factory.mktemp("models")
    save_file(t5_state(root / "t5"), root / FILES.t5)
    save_file(clip_state(root / "clip"), root / FILES.clip)
    # Copied, because training a tokenizer again gives another one.
    AutoTokenizer.from_pretrained(root / "t5").save_pretrained(root / "tokenizer_2")
    AutoTokenizer.from_pretrained(root / "clip").save_pretrained(root / "tokenizer")
    return root


Change = Callable[[State], State]


@pytest.fixture
def changed(published: Path, tmp_path: Path) -> Callable[[str, Change], Path]:
    """Return a function that makes a models root with changed tensors in one file."""

    def make(name: str, change: Change) -> Path:
        for path in published.iterdir():
            (tmp_path / path.name).symlink_to(path)
        (tmp_path / name).unlink()
        save_file(change(load_file(published / name)), tmp_path / name)
        return tmp_path

    return make


def load(root: Path, encoders: EncodersConfig = FILES, dtype: Any = torch.float32) -> TextEncoder:
    return load_text_encoder(encoders, LENGTH, root, CPU, dtype)


def assert_equal(root: Path, published: Path, dtype: Any = torch.float32) -> None:
    """Check that the files in ``root`` encode bit-identically to the folders in ``published``."""
    ours = load(root, dtype=dtype).encode(CAPTIONS)
    theirs = load(published, FOLDERS, dtype).encode(CAPTIONS)
    for actual, expected in zip(ours, theirs, strict=True):
        assert actual.dtype == dtype
        assert actual.isfinite().all()
        assert torch.equal(actual, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_files_encode_like_transformers_folders(published: Path, dtype: torch.dtype) -> None:
    assert_equal(published, published, dtype)


def without(*names: str) -> Change:
    return lambda state: {name: value for name, value in state.items() if name not in names}


def renamed(old: str, new: str) -> Change:
    return lambda state: {name.replace(old, new): value for name, value in state.items()}


def with_copy(state: State) -> State:
    return state | {"encoder.embed_tokens.weight": state["shared.weight"].clone()}


def with_extras(state: State) -> State:
    return state | {
        "text_model.embeddings.position_ids": torch.arange(77)[None],
        "text_projection.weight": torch.eye(WIDTH),
    }


@pytest.mark.parametrize(
    ("name", "change"),
    [
        (FILES.t5, with_copy),
        (FILES.t5, renamed("shared.", "encoder.embed_tokens.")),
        (FILES.t5, lambda state: {name: value.float() for name, value in state.items()}),
        (FILES.clip, with_extras),
        (FILES.clip, renamed("text_model.", "")),
    ],
    ids=["t5 twice", "t5 other name", "t5 float32", "clip extras", "clip without prefix"],
)
def test_every_layout_of_the_files_is_read(
    published: Path, changed: Callable[[str, Change], Path], name: str, change: Change
) -> None:
    assert_equal(changed(name, change), published)


@pytest.mark.slow
@pytest.mark.parametrize("name", [FILES.t5, FILES.clip])
@pytest.mark.parametrize("kind", KINDS)
def test_weights_in_fp8_are_their_values_times_their_scales(
    published: Path, changed: Callable[[str, Change], Path], tmp_path: Path, kind: str, name: str
) -> None:
    stored, expected = in_fp8(load_file(published / name), kind)
    given = load(changed(name, lambda state: stored)).encode(CAPTIONS)
    save_file(expected, tmp_path / name)
    rounded = load(tmp_path).encode(CAPTIONS)
    exact = load(published).encode(CAPTIONS)
    for one, other in zip(given, rounded, strict=True):
        assert torch.equal(one, other)
        assert one.isfinite().all()
    assert not all(torch.equal(one, third) for one, third in zip(given, exact, strict=True))


@pytest.mark.parametrize("name", [FILES.t5, FILES.clip])
def test_a_layer_in_fp8_without_its_scale_is_named_and_an_embedding_needs_none(
    published: Path, changed: Callable[[str, Change], Path], name: str
) -> None:
    stored, _ = in_fp8(load_file(published / name), "scale_weight")
    embeddings = [it for it in stored if it.endswith(".scale_weight") and _is_embedding(it)]
    layer = next(it for it in stored if it.endswith(".scale_weight") and it not in embeddings)
    kept = {it: value for it, value in stored.items() if it not in embeddings}
    root = changed(name, lambda state: kept)
    assert all(one.isfinite().all() for one in load(root).encode(CAPTIONS))
    save_file({it: value for it, value in kept.items() if it != layer}, root / name)
    weight = layer.replace(".scale_weight", ".weight")
    with pytest.raises(DataError, match=f"{weight} is in fp8 without a scale"):
        load(root)


def _is_embedding(name: str) -> bool:
    return any(part in name for part in ("shared", "embed", "relative_attention_bias"))


def test_the_published_end_token_of_clip_is_not_used(published: Path, tmp_path: Path) -> None:
    """CLIP's published config has 2, for which transformers uses the token with the highest id."""
    tokenizer = json.loads((published / "clip" / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    last = max(vocabulary, key=vocabulary.__getitem__)
    end = vocabulary["<|endoftext|>"]
    for path in published.iterdir():
        if path.name not in ("clip", "tokenizer"):
            (tmp_path / path.name).symlink_to(path)
    swapped = vocabulary | {last: end, "<|endoftext|>": vocabulary[last]}
    for folder in ("clip", "tokenizer"):
        copy_with_token_ids(published / folder, tmp_path / folder, swapped)
    path = tmp_path / "clip" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": 2}))
    assert_equal(tmp_path, tmp_path)


def copy_with_token_ids(source: Path, folder: Path, vocabulary: dict[str, int]) -> None:
    """Copy a CLIP folder with other ids for its tokens."""
    shutil.copytree(source, folder)
    changed = json.loads((folder / "tokenizer.json").read_text())
    end_id = vocabulary["<|endoftext|>"]
    changed["model"]["vocab"] = vocabulary
    for token in changed["added_tokens"]:
        token["id"] = vocabulary[token["content"]]
    changed["post_processor"]["special_tokens"]["<|endoftext|>"]["ids"] = [end_id]
    if changed["padding"]:
        changed["padding"]["pad_id"] = end_id
    (folder / "tokenizer.json").write_text(json.dumps(changed))


def test_activations_beyond_half_precision_stay_finite(
    published: Path, changed: Callable[[str, Change], Path]
) -> None:
    def scaled(state: State) -> State:
        wide = [f"{T5_FIRST}.1.DenseReluDense.{name}.weight" for name in ("wi_0", "wi_1", "wo")]
        return {name: value * 100 if name in wide else value for name, value in state.items()}

    root = changed(FILES.t5, scaled)
    encoder = load(root, dtype=torch.bfloat16)
    states = encoder.t5.encoder(  # type: ignore[union-attr]
        torch.arange(LENGTH)[None], output_hidden_states=True
    ).hidden_states
    assert max(state.abs().max() for state in states) > 65504
    assert encoder.encode(CAPTIONS)[0].isfinite().all()


def replaced(name: str, value: Tensor) -> Change:
    return lambda state: state | {name: value}


def differing_copy(state: State) -> State:
    return state | {"encoder.embed_tokens.weight": state["shared.weight"] + 1}


BIAS = "text_model.final_layer_norm.bias"
GATE = f"{T5_FIRST}.1.DenseReluDense.wi_0.weight"


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        (FILES.clip, without(BIAS), f"{BIAS} is missing"),
        (
            FILES.clip,
            replaced(BIAS, torch.zeros(3)),
            rf"{BIAS} has shape \[3\], expected \[{WIDTH}\]",
        ),
        (FILES.clip, replaced("lora.down", torch.zeros(3)), "'lora.down' is not a tensor of this"),
        (FILES.clip, renamed("layers.1.", "layers.7."), "encoder.layers.1.* is missing"),
        (FILES.t5, without(f"{T5_FIRST}.0.layer_norm.weight"), "layer_norm.weight is missing"),
        (
            FILES.t5,
            without("shared.weight"),
            "not a T5 encoder; tensor encoder.embed_tokens.weight",
        ),
        (FILES.t5, without(GATE), f"not a T5 encoder; tensor {GATE} is missing"),
        (FILES.t5, differing_copy, "shared.weight and encoder.embed_tokens.weight differ"),
        (FILES.t5, replaced("shared.weight", torch.zeros(9, 24)), "9: this is another model's"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_wrong_tensor_is_named(
    changed: Callable[[str, Change], Path], name: str, change: Change, message: str
) -> None:
    with pytest.raises(DataError, match=message):
        load(changed(name, change))


def test_the_other_encoders_file_is_an_error(published: Path) -> None:
    swapped = FILES.model_copy(update={"t5": FILES.clip})
    with pytest.raises(DataError, match=r"clip_l\.safetensors: not a T5 encoder; tensor"):
        load(published, swapped)


def test_the_other_encoders_tokenizer_is_an_error(published: Path, tmp_path: Path) -> None:
    tokenizer = t5_tokenizer()
    tokenizer.add_tokens([f"token{number}" for number in range(200)])
    tokenizer.save_pretrained(tmp_path / "large")
    wrong = FILES.model_copy(update={"clip_tokenizer": str(tmp_path / "large")})
    with pytest.raises(DataError, match=r"large: has \d+ tokens, .*clip_l.* only \d+: this is"):
        load(published, wrong)


def test_a_truncated_file_is_an_error(changed: Callable[[str, Change], Path]) -> None:
    path = changed(FILES.clip, dict) / FILES.clip
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DataError, match=r"clip_l\.safetensors: not a whole safetensors file"):
        load(path.parent)


@pytest.mark.parametrize("name", ["t5", "clip"])
def test_a_file_without_a_tokenizer_is_an_error_that_names_the_field(name: str) -> None:
    given = merge(BASE, {"encoders": {name: "models/x.safetensors"}})
    with pytest.raises(ConfigError) as refused:
        resolve(given)
    assert str(refused.value) == (
        f"spec.run.encoders.{name}: got 'models/x.safetensors'; may be a .safetensors file only if "
        f"{name}_tokenizer names the folder of its tokenizer"
    )


@pytest.mark.parametrize(
    "name", [FILES.t5, FILES.clip, "tokenizer/tokenizer_config.json", "autoencoder/ae.safetensors"]
)
def test_a_missing_file_is_named(published: Path, tmp_path: Path, name: str) -> None:
    write_placeholders(published, tmp_path)
    check_files(FILES, tmp_path)
    (tmp_path / name).unlink()
    with pytest.raises(DataError, match=f"{name}: missing; the encoders need it"):
        check_files(FILES, tmp_path)


def write_placeholders(published: Path, root: Path) -> None:
    """Write the text encoders of ``published`` to ``root``, and empty files for everything else."""
    for path in (FILES.t5, FILES.clip):
        shutil.copy(published / path, root / path)
    (root / "autoencoder").mkdir()
    (root / "autoencoder/ae.safetensors").touch()
    for folder in ("tokenizer", "tokenizer_2"):
        (root / folder).mkdir()
        (root / folder / "tokenizer_config.json").touch()


@pytest.mark.parametrize(
    ("name", "other", "says"),
    [
        (FILES.t5, FILES.clip, "not a T5 encoder; tensor encoder.embed_tokens.weight is missing"),
        (FILES.clip, FILES.t5, "not a CLIP text encoder; tensor embeddings.token_embedding.weight"),
    ],
)
def test_a_file_of_another_kind_is_named_before_anything_is_loaded(
    published: Path, tmp_path: Path, name: str, other: str, says: str
) -> None:
    write_placeholders(published, tmp_path)
    shutil.copy(published / other, tmp_path / name)
    with pytest.raises(DataError, match=f"{name}: {says}"):
        check_files(FILES, tmp_path)
    (tmp_path / name).write_bytes(b"cut off")
    with pytest.raises(DataError, match=f"{name}: not a whole safetensors file"):
        check_files(FILES, tmp_path)


@pytest.mark.parametrize("name", [FILES.t5, FILES.clip])
def test_a_missing_scale_is_named_before_anything_is_loaded(
    published: Path, tmp_path: Path, name: str
) -> None:
    write_placeholders(published, tmp_path)
    stored, _ = in_fp8(load_file(published / name), "scale_weight")
    scale = next(it for it in stored if it.endswith("scale_weight") and not _is_embedding(it))
    save_file({it: value for it, value in stored.items() if it != scale}, tmp_path / name)
    with pytest.raises(DataError, match="is in fp8 without a scale"):
        check_files(FILES, tmp_path)


def test_the_preprocess_task_identifies_the_files_by_content(
    published: Path, tmp_path: Path, changed: Callable[[str, Change], Path]
) -> None:
    data = write_images(tmp_path / "data" / "train", 3).parent
    write_images(data / "validation", 2)
    models = changed(FILES.t5, dict)
    (models / "autoencoder").mkdir()
    write_encoders(tmp_path / "others")
    (models / "autoencoder" / "ae.safetensors").symlink_to(
        tmp_path / "others" / "autoencoder" / "ae.safetensors"
    )
    run = config(task="preprocess", encoders=FILES.model_dump(mode="json") | BASE["encoders"])

    def weights() -> object:
        return open_outputs(run, RunPaths(tmp_path, data, models))[0].settings["weights"]

    before = weights()
    assert weights() == before
    (models / FILES.t5).unlink()
    another = load_file(published / FILES.t5)
    save_file({name: value + 1 for name, value in another.items()}, models / FILES.t5)
    assert weights() != before
