"""Reads untrusted safetensors files: the span of every tensor, and single tensors."""

from __future__ import annotations

import json
import math
import os
import re
import stat
import struct
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from fluxtrain.errors import DataError

_MAX_HEADER_BYTES = 1 << 23
"""kohya's metadata have the counts of all tags of the training."""
_MAX_TENSOR_BYTES = 1 << 28
_STARTS = (
    (
        (b"PK\3\4", b"\x80\2", b"\x80\4"),
        "it is a pickle, which is not read: get the .safetensors file",
    ),
    (
        (b"GGUF",),
        "it is a GGUF file of quantised weights: get the .safetensors file that it was made of",
    ),
    (
        (b"version https://git-lfs",),
        "it is a Git-LFS pointer, and not the file: run git lfs pull there",
    ),
    (
        (b"<!doctype", b"<html", b"<?xml"),
        "it is a web page: the download needs a login, an accepted licence or another address",
    ),
    ((b"\x1f\x8b", b"7z\xbc\xaf", b"Rar!"), "it is an archive: unpack it"),
    ((b"\x89PNG", b"\xff\xd8\xff", b"RIFF"), "it is a picture"),
    ((b"\x89HDF",), "it is an HDF5 file"),
    ((b"\0" * 8,), "it begins with zeros, as an interrupted download does: get it again"),
)
"""What files are that are taken for safetensors files, by their first bytes; torch.save writes a ZIP archive,
before it a pickle alone."""
DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "I32": torch.int32}


class _UnreadTypeError(ValueError):
    """A tensor has a type that is not read."""


@dataclass(frozen=True)
class Span:
    """One tensor inside a file; ``offset`` counts from the file's start."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int

    @cached_property
    def row_bytes(self) -> int:
        """Return the bytes of one entry along the first dim."""
        return math.prod(self.shape[1:]) * self.dtype.itemsize

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def read_header(path: Path, more: Mapping[str, torch.dtype] | None = None) -> dict[str, Span]:
    """Return the tensors of ``path`` by name; DataError if the file is not whole or malformed.

    Types by their names in the file are those of DTYPES and ``more``.
    """
    dtypes = {**DTYPES, **(more or {})}
    try:
        # O_NONBLOCK: opening a named pipe would otherwise block forever.
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
            status = os.fstat(file.fileno())
            if stat.S_ISDIR(status.st_mode):
                raise IsADirectoryError
            if not stat.S_ISREG(status.st_mode):
                raise ValueError("not a regular file")
            start = file.read(8)
            if len(start) < 8:
                raise ValueError(f"it has {len(start)} bytes")
            (length,) = struct.unpack("<Q", start)
            if not 2 <= length <= min(_MAX_HEADER_BYTES, status.st_size - 8):
                other = _other_format(start + file.read(256))
                raise ValueError(other or f"its header claims {length} bytes, get it again")
            return _spans(json.loads(file.read(length)), 8 + length, status.st_size, dtypes)
    except FileNotFoundError:
        raise DataError(f"{path}: missing") from None
    except IsADirectoryError:
        raise DataError(f"{path}: a folder; name the safetensors file in it") from None
    except _UnreadTypeError as error:
        raise DataError(f"{path}: {error}") from None
    except (OSError, struct.error, ValueError, RecursionError) as error:
        raise DataError(f"{path}: not a whole safetensors file ({error})") from None


def read_tensor(path: Path, span: Span, max_bytes: int | None = _MAX_TENSOR_BYTES) -> Tensor:
    """Return the tensor at ``span`` of ``path``; DataError if it is too large or cut off."""
    size = span.num_bytes
    if max_bytes is not None and size > max_bytes:
        raise DataError(f"{path}: a tensor of {size} bytes; at most {max_bytes} are read")
    content = bytearray(size)
    try:
        with path.open("rb") as file:
            file.seek(span.offset)
            count = file.readinto(content)
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}") from None
    if count != size:
        raise DataError(f"{path}: cut off")
    flat = torch.frombuffer(content, dtype=span.dtype) if size else torch.empty(0, dtype=span.dtype)
    return flat.view(span.shape)


@contextmanager
def open_safetensors(path: Path, content: str) -> Iterator[Any]:
    """Yield the safetensors library's reader of ``path``; DataError if it is missing or not whole."""
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except FileNotFoundError:
        raise DataError(f"{path}: missing; it should hold {content}") from None
    except (SafetensorError, OSError) as error:
        read_header(path, ALL_DTYPES)  # says more
        raise DataError(f"{path}: not a whole safetensors file ({error})") from None


def _other_format(start: bytes) -> str | None:
    """Return what a file is that begins with ``start``, and what to do; None if that is not known."""
    lower = start.lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    for starts, text in _STARTS:
        if start.startswith(starts) or lower.startswith(starts):
            return text
    text = start.decode("utf-8", "replace")
    if text.isprintable() or text.replace("\n", "").isprintable():
        return f"it is a text: {' '.join(text.split())[:80]!r}"
    return None


def read_shapes(file: Any) -> dict[str, list[int]]:
    """Return the shape of every tensor of an open safetensors file."""
    return {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118


def _spans(
    header: object, start: int, size: int, dtypes: Mapping[str, torch.dtype]
) -> dict[str, Span]:
    if not isinstance(header, dict):
        raise ValueError("its header is not a JSON object")
    spans = {
        name: _span(name, entry, start, size, dtypes)
        for name, entry in header.items()
        if name != "__metadata__"
    }
    total = sum(span.num_bytes for span in spans.values())
    if total > size - start:  # they would need more memory than the file has bytes
        raise ValueError(f"its tensors have {total} bytes, its data {size - start}: they overlap")
    return spans


def _span(
    name: str, entry: object, start: int, size: int, dtypes: Mapping[str, torch.dtype]
) -> Span:
    if not isinstance(entry, dict):
        raise ValueError(f"tensor {name!r} has no type, shape and offsets")
    if (given := str(entry.get("dtype"))) not in dtypes:
        kinds = ", ".join(dtypes)
        raise _UnreadTypeError(f"tensor {name!r} is of type {given[:20]!r}; read are {kinds}")
    dtype = dtypes[given]
    shape, offsets = _naturals(entry.get("shape")), _naturals(entry.get("data_offsets"))
    if math.prod(length or 1 for length in shape) >= 1 << 62:
        raise ValueError(f"tensor {name!r} has shape {list(shape)}")
    if len(offsets) != 2 or offsets[1] - offsets[0] != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"tensor {name!r} has offsets {list(offsets)} for shape {list(shape)}")
    if start + offsets[1] > size:
        raise ValueError(
            f"tensor {name!r} ends at byte {start + offsets[1]} of {size}: cut off, get it again"
        )
    return Span(dtype, shape, start + offsets[0])


def _naturals(value: object) -> tuple[int, ...]:
    if not isinstance(value, list) or len(value) > 8:
        raise ValueError("a shape or offsets are not a list of integers")
    for number in value:
        if type(number) is not int or not 0 <= number < 1 << 62:
            raise ValueError(f"{str(number)[:40]} is not a size or an offset")
    return tuple(value)


# Writes safetensors files: a header, then the bytes of each tensor, from where they are.
#
# The safetensors library's `save` copies all tensors into one string and holds the interpreter
# meanwhile, so that a thread that writes stops the whole process. Here only the system's calls take
# long, and they do not.


_CODES = {
    **{dtype: code for code, dtype in DTYPES.items()},
    torch.float64: "F64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_ALIGNMENT = 64
"""Bytes: where the data begins; copying from elsewhere in a mapped file takes half as long again."""


class Target(Protocol):
    """A file that is written."""

    def write(self, content: Any, /) -> object:
        """Write all bytes of ``content``, a buffer."""


def header(
    tensors: Mapping[str, tuple[torch.dtype, Sequence[int]]], metadata: Mapping[str, str]
) -> bytes:
    """Return the first bytes of a file with tensors of these types and shapes, in this order.

    Raises DataError if the format has no name for a type.
    """
    entries: dict[str, object] = {"__metadata__": dict(metadata)}
    offset = 0
    for name, (dtype, shape) in tensors.items():
        if dtype not in _CODES:
            raise DataError(f"{name} is of type {dtype}, which safetensors files cannot hold")
        end = offset + prod(shape) * dtype.itemsize
        entries[name] = {
            "dtype": _CODES[dtype],
            "shape": list(shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(entries).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)
    return struct.pack("<Q", len(text)) + text


def write(file: Target, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write ``tensors``, which are on the host, to ``file``."""
    # tensors of larger types first, so that each begins at a multiple of its type
    ordered = dict(sorted(tensors.items(), key=lambda item: -item[1].dtype.itemsize))
    file.write(header({name: (t.dtype, t.shape) for name, t in ordered.items()}, metadata))
    for tensor in ordered.values():
        if tensor.numel():
            file.write(content_of(tensor))


def content_of(tensor: Tensor) -> memoryview:
    """Return the bytes of ``tensor``, which is on the host: not copied if it is contiguous."""
    flat = tensor.detach().contiguous().view(-1)
    content: Any = flat.as_strided(flat.shape, (1,)).view(torch.uint8).numpy()  # one has any stride
    return memoryview(content)


# Weights in fp8 as ComfyUI's files have them: plain, or with a scale next to each.
#
# LAYER.weight                                values in e4m3, or e5m2
# LAYER.scale_weight, LAYER.weight_scale      float32 factor of all of them, or of each row
# LAYER.scale_input, LAYER.input_scale        for products in fp8; not read
# scaled_fp8, LAYER.comfy_quant               mark such a file and layer; not read


FP8 = {"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2}
"""Types of such weights by their names in safetensors files."""
SCALED_FP8_DTYPES = {**FP8, "U8": torch.uint8}
"""Types of all these tensors."""
ALL_DTYPES = {code: dtype for dtype, code in _CODES.items()}
"""Types of files of other tools."""
_SCALES = (".scale_weight", ".weight_scale")
_NOT_READ = (".scale_input", ".input_scale", ".comfy_quant")
_MARKER = "scaled_fp8"
_EMBEDDINGS = ("shared.", "embed", "relative_attention_bias.")
"""Parts of the names of embeddings, whose values are looked up as they are."""


def is_beside(name: str) -> bool:
    """Return whether tensor ``name`` is a scale or a mark, and no weight of the model."""
    return name == _MARKER or name.endswith((*_SCALES, *_NOT_READ))


def scales_of(names: Iterable[str]) -> dict[str, str]:
    """Return the names of scales among ``names``, by those of their weights."""
    return {
        f"{name.removesuffix(suffix)}.weight": name
        for name in names
        for suffix in _SCALES
        if name.endswith(suffix)
    }


def require_scales(in_fp8: Mapping[str, Sequence[int]], names: Collection[str]) -> None:
    """Raise ValueError naming the first of the weights ``in_fp8``, by their shapes, without one scale.

    ``names`` are all tensors of the file. One without any scale has plain values. Embeddings have none.
    """
    scales = scales_of(names)
    if not scales and _MARKER not in names:
        return
    for name, shape in in_fp8.items():
        layer = name.removesuffix(".weight")
        if all(f"{layer}{suffix}" in names for suffix in _SCALES):
            raise ValueError(f"{name} has two scales, {' and '.join(_SCALES)}")
        is_layer = name.endswith(".weight") and len(shape) > 1
        if is_layer and name not in scales and not any(part in name for part in _EMBEDDINGS):
            raise ValueError(f"{name} is in fp8 without a scale, which the file has for others")


def require_shape(scale: Sequence[int], num_rows: int) -> None:
    """Raise ValueError unless a scale of this shape is one number, or one for each of ``num_rows``."""
    count = prod(scale)
    if count not in (1, num_rows) or (count > 1 and scale[0] != count):
        shape = list(scale)
        raise ValueError(
            f"has a scale of shape {shape} for {num_rows} rows: one number, or one a row"
        )


def require_usable(scale: Tensor, num_rows: int) -> None:
    """Raise ValueError unless ``scale`` is a positive number, or one for each of ``num_rows``."""
    require_shape(scale.shape, num_rows)
    factors = scale.float()
    if not (torch.isfinite(factors) & (factors > 0)).all():
        raise ValueError("has a scale that is not a positive, finite number")


def unscaled(values: Tensor, scale: Tensor | None) -> Tensor:
    """Return ``values``, whose first axis has the rows, times ``scale``; float32 if they are in fp8.

    Raises ValueError if the scale is of no use, or a value in fp8 is not finite: a cast without a scale makes
    NaN of what is too large.
    """
    is_fp8 = values.dtype in FP8.values()
    found = values.float() if is_fp8 or scale is not None else values
    if scale is not None:
        require_usable(scale, values.shape[0])
        found = found * scale.float().reshape(-1, *(1 for _ in values.shape[1:]))
    if is_fp8 and not found.isfinite().all():
        raise ValueError("is in fp8 and has values that are not finite")
    return found


# What a file of other tools holds, by the names of its tensors.


class Kind(NamedTuple):
    """What a file holds, and what it is good for here."""

    text: str
    use: str = "not read"

    def __str__(self) -> str:
        return self.text if self.use == "not read" else f"{self.text}, which {self.use}"


_ENCODERS, ADAPTER_USE = (
    "spec.run.encoders takes",
    "spec.run.adapter.initial and added_adapters take",
)
_WEIGHTS = "spec.run.initial_weights takes"
_LORA = re.compile(
    r"(?m)loras?\d?[._]|lora_(up|down|[AB])|lokr_w|hada_w|\.diff(_b)?$|oft_|dora_scale|ia3_|vera_|fourierft_|\.[ab][12]\.weight$"
)
_ADAPTERS = (
    (
        r"(te2[._]|clip_g\.|text_encoder_2\.)text_model|lora_unet_(in|out)put_blocks|add_embedding",
        "a LoRA of SDXL",
    ),
    (
        r"(^|[._])((down|up|mid|input|output)_blocks?|middle_block)[._]",
        "a LoRA of Stable Diffusion 1.5 or 2, or of SDXL",
    ),
    (r"joint_blocks", "a LoRA of Stable Diffusion 3"),
    (r"joint_transformer_blocks", "a LoRA of AuraFlow"),
    (r"(double|single)_stream_blocks", "a LoRA of HiDream"),
    (r"controlnet|control_model", "a LoRA of a ControlNet"),
    (r"distilled_guidance_layer", "a LoRA of Chroma"),
    (r"(double|single)_stream_modulation|to_qkv_mlp_proj", "a LoRA of FLUX.2"),
    (
        r"mode_blocks|single_blocks[._]\d+[._][qkv]_proj|single_transformer_blocks[._]\d+[._]attn[._]to_out[._]0",
        "a LoRA of FLUX.3",
    ),
    (r"[._]img_mlp[._]net[._]", "a LoRA of Qwen-Image"),
    (r"\.img_attn_qkv|token_refiner|img_mod_linear|img_mlp_fc1", "a LoRA of HunyuanVideo"),
    (r"blocks[._]\d+[._](self|cross)_attn[._][a-z]+_proj", "a LoRA of Cosmos or Anima"),
    (r"blocks[._]\d+[._](self|cross)_attn|(^|\.)blocks\.\d+\.attn[12]\.", "a LoRA of Wan"),
    (r"transformer_blocks[._]\d+[._]attn1", "a LoRA of LTX-Video, PixArt or CogVideoX"),
    (
        r"(noise|context)_refiner|caption_embedder|layers[._]\d+[._](attention|feed_forward)[._]",
        "a LoRA of Lumina, Z-Image or Ideogram",
    ),
    (
        r"(?<!encoder[._])layers[._]\d+[._](self_attn|mlp)[._](q|k|v|o|gate|up|down)_proj",
        "a LoRA of a language model",
    ),
    (r"oft_(blocks|diag|R)|[._]oft[._]", "an adapter by OFT"),
    (r"\.[ab][12]\.weight$", "an adapter by GLoRA"),
    (r"(vera|ia3|fourierft|boft)_", "an adapter of peft that is no LoRA"),
    (r"qweight|wscales|blocks\.\d+\.(qkv_proj|mlp_fc)", "a LoRA of Nunchaku's quantised weights"),
    (r"\.(cond_)?[a-z]+_loras\.\d", "a LoRA of EasyControl"),
)
_MODELS = (
    (r"controlnet|input_hint_block|control_model|zero_convs", Kind("a ControlNet")),
    (r"redux_(up|down)", Kind("FLUX.1 Redux, an encoder of pictures")),
    (r"pulid", Kind("PuLID, an adapter of faces")),
    (r"ip_adapter|to_k_ip|^image_proj|double_stream_modules", Kind("an IP-Adapter")),
    (r"distilled_guidance_layer", Kind("the transformer of Chroma")),
    (r"double_stream_modulation|to_qkv_mlp_proj", Kind("the transformer of FLUX.2")),
    (
        r"double_blocks\.0\.img_attn|single_transformer_blocks\.0\.attn",
        Kind("a FLUX transformer", _WEIGHTS),
    ),
    (
        r"input_blocks\.|down_blocks\.0\.attentions|^down_blocks\.1",
        Kind("a U-Net of Stable Diffusion"),
    ),
    (r"joint_blocks\.", Kind("a transformer of Stable Diffusion 3")),
    (
        r"^(model\.)?diffusion_model\.|^blocks\.\d+\.(self|cross)_attn|^transformer_blocks\.",
        Kind("another model's transformer"),
    ),
    (r"vision_model\.|visual\.transformer", Kind("an encoder of pictures")),
    (
        r"encoder\.block\.0\.|text_model\.|embeddings\.token_embedding\.",
        Kind("a text encoder", _ENCODERS),
    ),
    (
        r"encoder\.down_blocks\.|decoder\.up_blocks\.",
        Kind("an autoencoder in diffusers' layout; ae.safetensors of FLUX.1 is BFL's", _ENCODERS),
    ),
    (r"decoder\.conv_in\.", Kind("an autoencoder", _ENCODERS)),
    (
        r"layers\.\d+\.self_attn|lm_head|resblocks",
        Kind("a language model or a text encoder of another model"),
    ),
    (r"body\.\d+\.|conv_first\.|^model\.\d+\.", Kind("a model that scales pictures up")),
    (
        r"^(\S*(clip_[lg]|t5(xxl)?|emb_params|string_to_param\S*|<.*>)\n?)+$",
        Kind("an embedding of tokens"),
    ),
)
"""Patterns of names, of which any file of a kind has one; kinds that hold others first."""


def is_adapter(names: Iterable[str]) -> bool:
    """Return whether ``names`` are those of a LoRA or of another adapter, of whatever model."""
    return _LORA.search("\n".join(names)) is not None


def kind_of_file(names: Iterable[str]) -> Kind | None:
    """Return what a file with tensors of these ``names`` holds; None if that is not known."""
    text = "\n".join(names)
    if is_adapter([text]):
        for pattern, kind in _ADAPTERS:
            if re.search(f"(?m){pattern}", text):
                return Kind(kind)
        return Kind("adapters", ADAPTER_USE)
    return next((kind for pattern, kind in _MODELS if re.search(f"(?m){pattern}", text)), None)


def identify(names: Iterable[str]) -> str:
    """Return "; it holds ..." for a known kind of file, "" for others."""
    kind = kind_of_file(names)
    return "" if kind is None else f"; it holds {kind}"
