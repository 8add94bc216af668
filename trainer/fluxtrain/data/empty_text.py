"""The empty prompt's encodings, read and written as one .safetensors file or MLCommons' two .npy files.

Axes: l text tokens, d text width, v pooled width.
"""

from __future__ import annotations

from pathlib import Path

from jaxtyping import Float
from torch import Tensor

from fluxtrain.data.layouts import npy
from fluxtrain.data.shard_writer import save_aligned
from fluxtrain.errors import DataError
from fluxtrain.files import atomic_write
from fluxtrain.safetensors_file import read_header, read_tensor

T5_FILE, CLIP_FILE = "t5_empty.npy", "clip_empty.npy"
EmptyText = tuple[Float[Tensor, "l d"], Float[Tensor, " v"]]


def read_empty_text(path: Path) -> EmptyText:
    """Return the encodings in the file or the folder ``path``; DataError if they are missing or malformed."""
    txt, vec = _read_folder(path) if path.is_dir() else _read_file(path)
    if (txt.ndim, vec.ndim) != (2, 1) or not (txt.isfinite().all() and vec.isfinite().all()):
        raise DataError(f"{path}: its tensors are not the encodings of a prompt")
    return txt, vec


def write_empty_text(path: Path, txt: Float[Tensor, "l d"], vec: Float[Tensor, " v"]) -> None:
    """Write the encodings to ``path``: a .safetensors file, else a folder in MLCommons' layout."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".safetensors":
        save_aligned(path, {"txt": txt, "vec": vec})
        return
    path.mkdir(exist_ok=True)
    for name, values in ((T5_FILE, txt), (CLIP_FILE, vec)):
        # float32 represents every bfloat16 exactly; the reference reads these two files as float.
        with atomic_write(path / name) as partial:
            partial.write_bytes(npy.to_bytes(values.float().unsqueeze(0)))


def _read_file(path: Path) -> tuple[Tensor, Tensor]:
    spans = read_header(path)
    if {"txt", "vec"} - set(spans):
        raise DataError(f"{path}: does not hold the tensors txt and vec of the empty prompt")
    return read_tensor(path, spans["txt"]), read_tensor(path, spans["vec"])


def _read_folder(path: Path) -> tuple[Tensor, Tensor]:
    """Return element 0 of both arrays, which have a batch axis."""
    return _read_array(path / T5_FILE, dims=3), _read_array(path / CLIP_FILE, dims=2)


def _read_array(path: Path, dims: int) -> Tensor:
    try:
        if path.stat().st_size > npy.MAX_CELL_BYTES:
            raise ValueError(f"more than {npy.MAX_CELL_BYTES} bytes")
        content = path.read_bytes()
        values = npy.to_tensor(content)
    except FileNotFoundError:
        raise DataError(f"{path}: missing") from None
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: not an array of encodings ({error})") from None
    if values.ndim != dims or not len(values):
        raise DataError(
            f"{path}: its shape {list(values.shape)} is not that of one prompt's encodings"
        )
    return values[0]
