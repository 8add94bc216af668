"""Tokenizes texts with transformers' slow tokenizers; run by ``benchmarks.data.tokenizers``.

Arguments: ``clip`` or ``t5``, a folder with its vocabulary, the length, and whether ``ftfy`` may be imported.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path


def main() -> None:
    """Read a list of texts from stdin, in JSON; print their ids, padded and truncated to the length."""
    name, folder, length, ftfy = sys.argv[1:]
    if ftfy == "without":
        sys.modules["ftfy"] = None  # type: ignore[assignment]
    from transformers import CLIPTokenizer, T5Tokenizer

    tokenizers = {"clip": CLIPTokenizer, "t5": T5Tokenizer}
    tokenizer = tokenizers[name].from_pretrained(Path(folder), local_files_only=True)
    if tokenizer.is_fast:
        raise TypeError(f"{tokenizer} is fast")
    options = {"padding": "max_length", "truncation": True, "max_length": int(length)}
    json.dump(tokenizer(json.load(sys.stdin), **options)["input_ids"], sys.stdout)


if __name__ == "__main__":
    main()
