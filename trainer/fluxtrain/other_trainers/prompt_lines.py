"""Lines of a file of prompts, kohya's syntax, for prompts of other trainers with sizes and seeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fluxtrain.other_trainers.option import Values
from fluxtrain.other_trainers.reading import Reading

NOTE = "is in the lines of sampling.prompt_file"


def line(reading: Reading, name: str, text: str, options: Mapping[str, object]) -> str:
    """Return the line of the prompt ``text``, of the option ``name``, with ``options`` by their letters.

    Raises ConfigError for a text that a line cannot begin with.
    """
    prompt = " ".join(text.split())
    if not prompt or prompt.startswith(("#", "--")) or " --" in prompt:
        raise reading.wrong(name, "must begin with text, without # and --, for --prompt-file")
    return " ".join([prompt, *(f"--{name} {value}" for name, value in options.items())])


def written(reading: Reading, lines: Sequence[str]) -> Values:
    """Return the field that names the file, whose ``lines`` are kept in ``reading``."""
    reading.prompts += lines
    return {"sampling.prompt_file": reading.prompt_file}
