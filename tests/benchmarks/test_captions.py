"""The captions with which tokenizers are compared: of every kind, and the same in each run."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.data.captions import captions, words_of

WORDS = ("harbour", "lantern", "orchid")


def test_captions_are_of_every_kind_and_repeatable() -> None:
    found = captions(WORDS, 3)
    assert found == captions(WORDS, 3)
    assert {len(texts) for kind, texts in found.items() if kind.isascii()} == {3, 11, 30}
    assert all(any(word in text.lower() for word in WORDS) for text in found["Chinese"])
    assert all(not text.isascii() for text in [*found["Chinese"], *found["emoji"]])
    assert all(len(text.split()) >= 300 for text in found["more than 256 tokens"])
    assert "" in found["no word"]


def test_words_are_the_whole_ones_of_a_vocabulary(tmp_path: Path) -> None:
    path = tmp_path / "vocab.json"
    names = ["harbour</w>", "harb", "é</w>", "1234</w>", "orchid</w>", "a</w>"]
    path.write_text(json.dumps({name: number for number, name in enumerate(names)}))
    assert words_of(path) == ["harbour", "orchid"]
