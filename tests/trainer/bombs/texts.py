"""Text files that are too long, too deep, or become far more than their bytes."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path

import torch
from safetensors.torch import save_file
from tests.trainer.bombs.limited import Make

from fluxtrain.contract.resource.document import load_job
from fluxtrain.contract.run.data import DataConfig
from fluxtrain.contract.run.resolve import resolve
from fluxtrain.data.formats.arrow import stream_files
from fluxtrain.data.formats.tar_index import build_index, open_index
from fluxtrain.data.pictures.kohya_config import read_dataset_config
from fluxtrain.data.shards import read_listing
from fluxtrain.encode.files import check_text_folder
from fluxtrain.encode.text import load_tokenizer
from fluxtrain.imports.files import read_options
from fluxtrain.mlperf.review.package import read_answers
from fluxtrain.plan.speed import MeasuredSpeeds
from fluxtrain.sample.prompts import read_prompts

ALIASES = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{after}: &{after} [{', '.join([f'*{name}'] * 9)}]\n"
    for name, after in zip("abcdefgh", "bcdefghi", strict=True)
)
"""Nine lists of nine, each of the one before: 387 million texts."""


def write(name: str, text: str, times: int = 1, end: str = "") -> Make:
    """Return what writes ``text``, ``times`` times, and ``end``."""

    def make(folder: Path) -> Path:
        (folder / name).write_text(text * times + end)
        return folder / name

    return make


def empty(name: str, size: int = 2 << 30, beside: str = "") -> Make:
    """Return what writes a file of ``size`` zero bytes that take no space; ``beside`` is a file of {}."""

    def make(folder: Path) -> Path:
        if beside:
            (folder / beside).write_text("{}")
        with (folder / name).open("wb") as file:
            file.truncate(size)
        return folder / name

    return make


def extension(folder: Path) -> Path:
    """Write a tar whose extension header claims 4 GiB."""
    header = tarfile.TarInfo("x")
    header.type, header.size = tarfile.XHDTYPE, 1 << 32
    (folder / "a.tar").write_bytes(header.tobuf())
    return folder / "a.tar"


def long_caption(folder: Path) -> Path:
    """Write a tar of a caption of 2 GiB that takes no space."""
    with (folder / "a.tar").open("wb") as file:
        for name, size in (("a.txt", 2 << 30), ("a.png", 512)):
            header = tarfile.TarInfo(name)
            header.size = size
            file.write(header.tobuf())
            file.seek(size, 1)
        file.write(bytes(1024))
    return folder / "a.tar"


def caption_beside(folder: Path) -> Path:
    (folder / "a.png").write_bytes(b"")
    return empty("a.txt")(folder)


def sidecar(folder: Path) -> Path:
    """Write a tar, and an index of it of 6 MiB whose spans are empty lists."""
    path = write("a.tar", "\0" * 1024)(folder)
    spans = "[" + "[]," * 2_000_000 + "[]]"
    (folder / "a.tar.index.json").write_text('{"keys": [], "spans": ' + spans + "}")
    return path


def listing(folder: Path) -> Path:
    text = '{"format": 1, "shards": [' + "[]," * 2_000_000 + "[]]}"
    (folder / "dataset.json").write_text(text)
    return folder / "dataset.json"


def many_layers(folder: Path) -> Path:
    config = {"model_type": "t5", "num_layers": 10**9, "d_model": 8, "vocab_size": 8}
    (folder / "config.json").write_text(json.dumps(config))
    save_file({"shared.weight": torch.zeros(8, 8)}, folder / "model.safetensors")
    return folder / "config.json"


def job(path: Path) -> object:
    return load_job(path)


def index(path: Path) -> object:
    found = open_index(path)
    return found.keys, found.skipped.messages


def tar(path: Path) -> object:
    found = build_index(path)
    return found.keys, found.skipped.messages


def prompts(path: Path) -> object:
    return read_prompts(path, resolve({"preset": "dev-lora"}))


def dataset_config(path: Path) -> object:
    return read_dataset_config(path, DataConfig(), path.parent)


def options(path: Path) -> object:
    return read_options(path)


def system(path: Path) -> object:
    return read_answers(path)


def measured(path: Path) -> object:
    return MeasuredSpeeds(path)


def listed(path: Path) -> object:
    return read_listing(path.parent)


def saved(path: Path) -> object:
    return stream_files(path.parent)


def tokenizer(path: Path) -> object:
    return load_tokenizer(path.parent)


def text_encoder(path: Path) -> object:
    return check_text_folder(path.parent, "t5")
