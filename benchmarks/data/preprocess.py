"""The preprocess task and ``data.images`` beside ``datasets.map``: samples/s per core, peak memory.

All read the same 256 x 256 PNGs and captions, ``data.images`` in a folder and the others in tars, and write
encodings of MLPerf's shapes, 2.16 MB each, on one thread. T5, CLIP and the autoencoder are small:
the published ones would take most of the time. Rates are samples per second of processor time after imports
and loading (``data.images`` loads its encoders in that time), which depend little on other programs.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import shutil
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import numpy as np
import torch
from benchmarks.data.clean import measure
from benchmarks.data.tiny_tokenizers import caption, clip_tokenizer, t5_tokenizer
from benchmarks.peers import peers_python
from benchmarks.table import print_table, spread
from PIL import Image
from safetensors.torch import save_file
from transformers import CLIPTextConfig, CLIPTextModel, T5Config, T5EncoderModel
from transformers.utils.logging import disable_progress_bar

from fluxtrain.data.dataset import Encodings
from fluxtrain.data.formats.convert import open_encoded
from fluxtrain.data.formats.tar_writer import TarWriter
from fluxtrain.data.shard_dataset import FileDataset
from fluxtrain.data.shards import FIELDS
from fluxtrain.encode.codec import Autoencoder
from fluxtrain.launch.torchrun import MALLOC_SETTINGS

SIDE = 256
CONTENDERS = {
    "fluxtrain": "fluxtrain, task preprocess",
    "pictures": "fluxtrain, data.images",
    "datasets": "datasets.map and save_to_disk",
    "bare": "the encoders alone",
}

ENVIRONMENT = {
    **MALLOC_SETTINGS,  # for all, as set by our launcher
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
    "DATASETS_VERBOSITY": "error",
    "TRANSFORMERS_VERBOSITY": "error",
}


@dataclass
class Turns:
    """The measurements of one contender."""

    processor: list[float] = field(default_factory=list)
    wall: list[float] = field(default_factory=list)
    peak: list[float] = field(default_factory=list)


def write_images(folder: Path, count: int) -> None:
    """Write ``count`` images as detailed as photographs in tars and a folder."""
    rng = np.random.default_rng(0)
    pictures = folder.with_name("folder")
    pictures.mkdir()
    with TarWriter(folder, 100) as writer:
        for index in range(count):
            coarse = Image.fromarray(rng.integers(0, 256, (30, 30, 3), dtype=np.uint8))
            smooth = np.asarray(coarse.resize((SIDE, SIDE), Image.Resampling.BICUBIC), dtype=int)
            noisy = (smooth + rng.integers(-6, 7, smooth.shape)).clip(0, 255).astype(np.uint8)
            buffer = io.BytesIO()
            Image.fromarray(noisy).save(buffer, "PNG", compress_level=1)
            writer.add(f"{index:09d}", buffer.getvalue(), "png", caption(index), {})
            (pictures / f"{index:09d}.png").write_bytes(buffer.getvalue())
            (pictures / f"{index:09d}.txt").write_text(caption(index))


def write_encoders(root: Path) -> None:
    """Write fast encoders whose encodings have the published shapes."""
    torch.manual_seed(0)
    tokenizer = t5_tokenizer()
    tokenizer.save_pretrained(root / "t5")
    T5EncoderModel(
        T5Config(
            vocab_size=len(tokenizer),
            d_model=4096,
            d_ff=256,
            num_layers=1,
            num_heads=4,
            feed_forward_proj="gated-gelu",
        )
    ).bfloat16().save_pretrained(root / "t5")
    tokenizer = clip_tokenizer()
    tokenizer.save_pretrained(root / "clip")
    CLIPTextModel(
        CLIPTextConfig(
            vocab_size=len(tokenizer),
            hidden_size=768,
            intermediate_size=768,
            num_hidden_layers=1,
            bos_token_id=0,
            eos_token_id=1,
            pad_token_id=1,
        )
    ).bfloat16().save_pretrained(root / "clip")
    (root / "autoencoder").mkdir()
    save_file(Autoencoder(width=32).state_dict(), root / "autoencoder" / "ae.safetensors")


def take_turn(contender: str, root: Path, turns: Turns) -> None:
    """Let ``contender`` encode all images in its own process; append its times to ``turns``."""
    shutil.rmtree(root / contender, ignore_errors=True)
    report = root / "report.json"
    program = [str(peers_python()), "-W", "ignore", "-m", "benchmarks.data.preprocess_contender"]
    _, usage = measure([*program, contender, str(root)])
    times = json.loads(report.read_text())
    report.unlink()
    turns.processor.append(times["processor"])
    turns.wall.append(times["wall"])
    turns.peak.append(usage.peak_bytes)


def encodings(folder: Path) -> tuple[FileDataset, dict[str, int]]:
    """Return the data set in ``folder`` and its indices by key."""
    dataset = open_encoded(folder)
    return dataset, {dataset.key(index): index for index in range(len(dataset))}


def differences(ours: Path, theirs: Path) -> tuple[int, float]:
    """Return the number of samples that are not bit-equal, and the largest difference of a value."""
    (own, own_indices), (other, other_indices) = encodings(ours), encodings(theirs)
    assert own_indices.keys() == other_indices.keys()
    count, most = 0, 0.0
    rows = [Encodings.empty(1, each.shape) for each in (own, other)]
    for key, index in own_indices.items():
        for dataset, place, row in zip(
            (own, other), (index, other_indices[key]), rows, strict=True
        ):
            assert dataset.read(np.array([place]), row, np.array([False])) == [None]
        pairs = [[getattr(row, name).float() for row in rows] for name in FIELDS]
        gaps = [float((first - second).abs().max()) for first, second in pairs]
        count, most = count + (max(gaps) > 0), max(most, *gaps)
    return count, most


def main(arguments: list[str] | None = None) -> None:
    """Write images and encoders in a temporary folder, encode in turn, and compare."""
    parser = argparse.ArgumentParser(prog="benchmarks.data.preprocess", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--samples", type=int, default=128)
    options, _ = parser.parse_known_args(arguments)
    os.environ |= ENVIRONMENT
    disable_progress_bar()
    turns = {contender: Turns() for contender in CONTENDERS}
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        write_images(root / "train", options.samples)
        write_encoders(root / "models")
        for number in range(options.rounds):
            for contender in list(CONTENDERS)[:: 1 if number % 2 == 0 else -1]:
                take_turn(contender, root, turns[contender])
        count, most = differences(root / "fluxtrain", root / "datasets")
    print(f"samples that differ: {count} of {options.samples}, by {most:.2g} at most")
    print_table(
        f"encoding {options.samples} images and captions, one process, medians of {options.rounds}",
        ["", "samples/s per core", "seconds in all", "peak MiB"],
        [
            [
                CONTENDERS[contender],
                spread([options.samples / seconds for seconds in taken.processor], digits=2),
                f"{median(taken.wall):.1f}",
                f"{median(taken.peak) / 2**20:.0f}",
            ]
            for contender, taken in turns.items()
        ],
    )


if __name__ == "__main__":
    sys.exit(main())
