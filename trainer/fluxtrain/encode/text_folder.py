"""Checks the folder of a text encoder without loading its weights: config, tensors, tokenizer."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch

from fluxtrain.encode.text import load_tokenizer, require_small_files
from fluxtrain.errors import DataError
from fluxtrain.safetensors_file import open_safetensors, read_shapes

Kind = Literal["t5", "clip"]
_OPTIONAL = ("encoder.embed_tokens.weight", "embeddings.position_ids")
"""Tensors that files may lack: the second copy of T5's embedding, CLIP's counted positions."""
_PREFIX = "text_model."  # some files and some versions of transformers have CLIP's names without it


def check_text_folder(folder: Path, kind: Kind) -> str:
    """Return what is in ``folder`` in one line, such as its width and the number of its tensors.

    Raises DataError if a tensor is missing or has another shape than the config says, or if the tokenizer
    is missing or another model's.
    """
    require_small_files(folder)
    config, model = _config(folder, kind)
    found = _shapes(folder)
    if config.num_hidden_layers > len(found):  # the model is made before its tensors are compared
        text = f"its config says {config.num_hidden_layers} layers, there are {len(found)} tensors"
        raise DataError(f"{folder}: not a whole {kind} text encoder; {text}")
    expected = _expected(model, config)
    for name, shape in expected.items():
        if name not in found:
            raise DataError(f"{folder}: not a whole {kind} text encoder; tensor {name} is missing")
        if found[name] != shape:
            text = f"tensor {name} has shape {found[name]}, its config says {shape}"
            raise DataError(f"{folder}: {text}")
    tokenizer = load_tokenizer(folder)
    if len(tokenizer) > config.vocab_size or tokenizer.eos_token_id is None:
        text = f"{len(tokenizer)} tokens with the end {tokenizer.eos_token!r}"
        raise DataError(
            f"{folder}: another model's tokenizer: {text}, {config.vocab_size} have an embedding"
        )
    width = config.d_model if kind == "t5" else config.hidden_size
    return f"{width} wide, {len(expected)} tensors, {len(tokenizer)} tokens"


def _config(folder: Path, kind: Kind) -> tuple[Any, Any]:
    """Return config and class of the encoder."""
    from transformers import CLIPTextConfig, CLIPTextModel, T5Config, T5EncoderModel

    if not (folder / "config.json").is_file():
        raise DataError(f"{folder}: no text encoder (config.json is missing)")
    of_config, model = {"t5": (T5Config, T5EncoderModel), "clip": (CLIPTextConfig, CLIPTextModel)}[
        kind
    ]
    try:
        return of_config.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        ), model
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{folder}: not the config of a {kind} text encoder ({error})") from None


def _shapes(folder: Path) -> dict[str, list[int]]:
    """Return the shapes of all tensors of the folder's files, CLIP's without their prefix."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise DataError(f"{folder}: no .safetensors file; pickles (.bin) are not read")
    shapes: dict[str, list[int]] = {}
    for path in files:
        with open_safetensors(path, "a text encoder") as file:
            shapes |= {
                name.removeprefix(_PREFIX): shape for name, shape in read_shapes(file).items()
            }
    return shapes


def _expected(model: Any, config: Any) -> Mapping[str, list[int]]:
    with torch.device("meta"):
        state: dict[str, torch.Tensor] = model(config).state_dict()
    names = {name.removeprefix(_PREFIX): list(tensor.shape) for name, tensor in state.items()}
    return {name: shape for name, shape in names.items() if name not in _OPTIONAL}
