"""Encodes images and captions, by our tasks or by ``datasets``; run by ``benchmarks.data.preprocess``.

ROOT/train/*.tar    read; the same images and captions are in ROOT/folder
ROOT/models/        T5, CLIP and autoencoder
ROOT/CONTENDER/     written
ROOT/report.json    wall and processor seconds after the encoders were loaded
"""

from __future__ import annotations

import io
import json
import os
import resource
import sys
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch

from fluxtrain.contract.process import RunPaths
from fluxtrain.contract.run.config import RunConfig
from fluxtrain.contract.run.resolve import resolve
from fluxtrain.data.sources import open_images
from fluxtrain.encode.encoders import load_encoders
from fluxtrain.parallel.distributed import World

TEXT_LENGTH, CLIP_LENGTH = 256, 77
BATCH = 16
SHARD = 64
CPU = torch.device("cpu")
Work = Callable[[], None]


def task() -> RunConfig:
    """Return the preprocess task of MLPerf's shapes."""
    return resolve(
        {
            "preset": "mlperf-schnell-raw",
            "task": "preprocess",
            "seed": 1,
            "data": {"train": "train", "num_workers": 1},
            "preprocess": {
                "train": "fluxtrain",
                "validation": None,
                "empty_encodings": "empty.safetensors",
                "shard_size": SHARD,
                "batch_size": BATCH,
            },
            "logging": {"metrics_port": 0},
        }
    )


def fluxtrain(root: Path) -> Work:
    """Return the preprocess task of one rank, its encoders loaded."""
    from fluxtrain.prepare.preprocess import preprocess

    config, paths = task(), RunPaths(root / "output", root, root / "models")
    load_encoders(config, paths.models, CPU)  # cached: the task uses the same ones
    return lambda: preprocess(config, paths, World(0, 0, 1, CPU))


def pictures(root: Path) -> Work:
    """Return what one rank does with ``data.images`` before the first step; it also loads the encoders."""
    from fluxtrain.parallel.distributed import StopRequest
    from fluxtrain.picture_cache.stage import cache_pictures

    config = resolve(
        {
            "preset": "schnell-lora",
            "data": {
                "images": "folder",
                "cache": str(root / "pictures"),
                "image_size": 256,
                "latent_size": 32,
                "text_length": TEXT_LENGTH,
                "num_workers": 1,
            },
            "logging": {"metrics_port": 0},
        }
    )
    paths, world = RunPaths(root / "pictures", root, root / "models"), World(0, 0, 1, CPU)
    return lambda: cache_pictures(config, paths, world, StopRequest(world), lambda: None)


def bare(root: Path) -> Work:
    """Return the encoders alone, on images in memory: the upper bound."""
    config = task()
    encoders = load_encoders(config, root / "models", CPU)
    dataset = open_images(config, root, "train")
    images = torch.empty(len(dataset), 3, dataset.side, dataset.side, dtype=torch.uint8)
    captions = [dataset.read(index, image) for index, image in enumerate(images)]

    def work() -> None:
        for begin in range(0, len(captions), BATCH):
            span = slice(begin, begin + BATCH)
            encoders.encode(images[span], captions[span])

    return work


def datasets(root: Path) -> Work:
    """Return a batched map over the tars that saves the encodings as .npy files."""
    from datasets import load_dataset
    from transformers import AutoTokenizer, CLIPTextModel, T5EncoderModel

    from fluxtrain.contract.run.precision import EncodersConfig
    from fluxtrain.encode.codec import load_encoder

    models = root / "models"
    t5_tokenizer, clip_tokenizer = (
        AutoTokenizer.from_pretrained(models / name) for name in ("t5", "clip")
    )
    t5 = T5EncoderModel.from_pretrained(models / "t5", dtype=torch.bfloat16).eval()
    clip = CLIPTextModel.from_pretrained(models / "clip", dtype=torch.bfloat16).eval()
    autoencoder = load_encoder(EncodersConfig(), models, torch.device("cpu"))

    def ids(tokenizer: Any, captions: list[str], length: int) -> torch.Tensor:
        options = {"padding": "max_length", "truncation": True, "return_tensors": "pt"}
        result: torch.Tensor = tokenizer(captions, max_length=length, **options).input_ids
        return result

    @torch.no_grad()
    def encoded(batch: dict[str, Any]) -> dict[str, Any]:
        pixels = np.stack([np.asarray(image.convert("RGB")) for image in batch["png"]])
        images = torch.from_numpy(pixels).permute(0, 3, 1, 2).contiguous().float() / 127.5 - 1
        mean, logvar = autoencoder.encode(images.bfloat16())
        txt = t5(input_ids=ids(t5_tokenizer, batch["txt"], TEXT_LENGTH)).last_hidden_state
        vec = clip(input_ids=ids(clip_tokenizer, batch["txt"], CLIP_LENGTH)).pooler_output
        columns = {"t5_encodings": txt, "clip_encodings": vec, "mean": mean, "logvar": logvar}
        return {name: [npy(row) for row in rows] for name, rows in columns.items()}

    def work() -> None:
        options = {"split": "train", "cache_dir": str(root / "datasets" / "cache")}
        dataset = load_dataset("webdataset", data_files=str(root / "train" / "*.tar"), **options)
        unused = [name for name in dataset.column_names if name != "__key__"]
        mapped = dataset.map(encoded, batched=True, batch_size=BATCH, remove_columns=unused)
        mapped.save_to_disk(str(root / "datasets"))

    return work


def npy(row: torch.Tensor) -> bytes:
    """Return an encoding as a .npy file of uint16, as the MLPerf reference stores it."""
    buffer = io.BytesIO()
    np.save(buffer, row.contiguous().view(torch.uint16).numpy())
    return buffer.getvalue()


def processor_seconds() -> float:
    """Return the processor seconds of this process and its ended children."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def main(contender: str, folder: str) -> None:
    """Load, encode everything, and write the times."""
    torch.set_num_threads(1)
    root = Path(folder)
    os.dup2(2, 1)  # progress goes to stderr
    work = {"bare": bare, "fluxtrain": fluxtrain, "pictures": pictures, "datasets": datasets}[
        contender
    ](root)
    begin, used = perf_counter(), processor_seconds()
    work()
    times = {"wall": perf_counter() - begin, "processor": processor_seconds() - used}
    (root / "report.json").write_text(json.dumps(times))


if __name__ == "__main__":
    main(*sys.argv[1:])
