"""Read the words of commands."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fluxtrain.errors import UNSET, ConfigError
from fluxtrain.imports.common import near
from fluxtrain.imports.table import read_document

NO_IMPORT = "which is not imported: docs/lora.md has a file to begin with"
TO_TOML = (
    "add --config_file FILE.toml --output_config to the command, which then writes them as TOML"
)
_VARIABLE = r"\$[\w{(]|`|%\w+%|!\w+!|<[\w ]+>|^@\w+$"
"""Variables and commands of shells, and what guides write for a value of one's own."""
_LONGEST_VARIABLE = 1 << 16
_LISTS = ("network_args", "optimizer_args", "base_weights", "base_weights_multiplier")


def refused(path: Path, text: str) -> ConfigError:
    """Return the error that the file at ``path`` is refused with ``text``."""
    return ConfigError(str(path), UNSET, text)


def joined(text: str) -> Iterator[str]:
    """Yield the lines of ``text``, as one those that end in a shell's sign of continuation, without comments.

    A line of options alone goes on too: guides lose the sign.
    """
    parts, goes_on = list[str](), False
    for line in text.splitlines():
        is_comment = not goes_on and re.match(r"\s*(#|::|@?(?i:rem)\b)", line)
        if not goes_on and not re.match(r"\s*--\w", line):
            yield " ".join(parts)
            parts.clear()
        parts.append("" if is_comment else line.rstrip().rstrip("\\^`"))
        goes_on = not is_comment and parts[-1] != line.rstrip()
    yield " ".join(parts)


def arguments(text: str, path: Path, step: str = TO_TOML) -> dict[str, object]:
    """Return the options in ``text``, the rest of a command; those without a value are flags."""
    text = re.sub(r"(?<=\s)\d+(?=[<>])", "", text.lstrip("\"'"))  # the file descriptor of 2>&1
    text = re.sub(r"(?<=\s)[\\^`](?=--\w)", "", text)  # fluxgym escapes an option's dash
    found: dict[str, list[str]] = {}
    name = ""
    for word in words(text, path, escape=""):
        if word and not word.strip(";&|<>"):
            break
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            found[name] = [value] if equals else []
        elif name or re.search(_VARIABLE, word):
            found.setdefault(name, []).append(word)
    for name, values in found.items():
        if any(re.search(_VARIABLE, value) for value in values):
            text = f"must not have variables; {step}"
            raise ConfigError(f"{path}: {name or 'command'}", " ".join(values), text)
    options: dict[str, object] = {}
    for name, values in found.items():
        is_list = name in _LISTS or len(values) > 1
        options[name] = values if is_list else values[0] if values else True
    return options


def launched(text: str) -> dict[str, object]:
    """Return the number of processes, if accelerate's part ``text`` of a command has it."""
    found = re.search(r"--num_processes[\s=]+(\d+)", text)
    return {"num_processes": found[1]} if found else {}


def words(text: str, path: Path, escape: str = "\\") -> list[str]:
    """Return the words of a shell's ``text``, without quotes and comments."""
    lexer = shlex.shlex(text, posix=True, punctuation_chars=";&|<>")
    lexer.whitespace_split, lexer.commenters, lexer.escape = True, "#", escape
    try:
        return list(lexer)
    except ValueError as error:
        raise refused(path, f"invalid command: {error}") from None


def resolved(text: str, known: Mapping[str, str], path: Path) -> str:
    """Return ``text`` with the values of ``known`` variables; other forms, such as ``${A:-b}``, stay.

    Raises ConfigError if it becomes too long.
    """
    parts = re.split(r"(\$\w+|\$\{\w+\})", text)
    parts[1::2] = [known.get(part.strip("${}"), part) for part in parts[1::2]]
    if sum(map(len, parts)) > max(_LONGEST_VARIABLE, len(text)):
        raise refused(path, f"has a variable of more than {_LONGEST_VARIABLE} characters")
    return "".join(parts)


def without_levels(document: Mapping[str, Any]) -> dict[str, object]:
    """Return the options in the sections of ``document``, with dots in their names."""
    return {
        f"{section}.{name}": value
        for section, below in document.items()
        if isinstance(below, dict)
        for name, value in below.items()
    }


_TITAN_COMMAND = (
    r"run_(?:train|preprocessing)\.sh|-m\s+torchtitan[\w.]*\.train|"
    r"torchtitan[\w./]*train(?:\.py)?(?=\s)"
)
_MLPERF_FILES = {
    "flux_schnell_mlperf.toml": "cc12m_disk",
    "flux_schnell_mlperf_preprocessed.toml": "cc12m_preprocessed",
}
"""Files of MLPerf's reference, whose values the presets have, and their data sets."""

_VALUE = r"(?:\"[^\"]*\"|'[^']*'|[^\s\"';])+"


def _command(lines: Sequence[str], path: Path, pattern: str) -> tuple[dict[str, str], str]:
    """Return the variables that ``lines`` set up to that with the ``pattern``, and it with their values."""
    named = [it for it in lines if re.search(pattern, it)]
    commands = [
        it for it in named if not re.fullmatch(rf"\s*(export\s+)?\w+={_VALUE}\s*(#.*)?", it)
    ]
    if named and not commands:
        raise refused(path, "has the script's name in a variable: write it in the command")
    if len(commands) != 1:
        raise refused(path, f"has {len(commands)} commands that train; leave one")
    known = dict[str, str]()
    text = "\n".join(lines[: lines.index(commands[0]) + 1])
    for name, value in re.findall(rf"(?:^|\s)([A-Z]\w*)=({_VALUE})", text):
        known[name] = resolved(value.strip("\"'"), known, path)
    return known, resolved(commands[0], known, path).replace('"$@"', "").replace("$@", "")


DIFFUSERS_SCRIPT = r"train_dreambooth(?:_lora)?_flux\.py"


def diffusers_command(lines: Sequence[str], path: Path) -> dict[str, object]:
    """Return the options of a command of one of diffusers' scripts, and the script's name."""
    _, command = _command(lines, path, DIFFUSERS_SCRIPT)
    script = re.findall(DIFFUSERS_SCRIPT, command)[0]
    launch, _, rest = command.partition(script)
    given = arguments(rest, path, "write what they stand for")
    return {"script": script, **given, **launched(launch)}


def titan_command(lines: Sequence[str], path: Path) -> dict[str, object]:
    """Return the options of a command of torchtitan's, and of the file that it names, over which they win."""
    known, command = _command(lines, path, _TITAN_COMMAND)
    launch, _, rest = command.partition(re.findall(_TITAN_COMMAND, command)[0])
    if re.search(r"--module\b", rest):
        raise refused(path, f"is of torchtitan's configurations in Python, {NO_IMPORT}")
    given = dict[str, object]()
    for name, value in arguments(rest, path, "write what they stand for").items():
        plain = name.replace("-", "_")
        is_negated = value is True and ".no_" in plain
        given[plain.replace(".no_", ".", 1)] = False if is_negated else value
    if any(name.startswith("preprocessing.") for name in given):
        step = "examples/mlperf-from-raw/3-preprocess.yaml encodes beforehand"
        raise refused(path, f"is torchtitan's preprocessing: {step}")
    if ranks := re.search(r"--nproc[-_]per[-_]node[\s=]+(\d+)", launch):
        known["NGPU"] = ranks[1]
    given |= {"num_processes": known["NGPU"]} if known.get("NGPU", "").isdecimal() else {}
    named = str(given.pop("job.config_file", known.get("CONFIG_FILE", known.get("CONFIG", ""))))
    if file := near(named, path.parent, ".toml"):
        document = read_document(file)
        return {**without_levels(document if isinstance(document, dict) else {}), **given}
    if Path(named).name in _MLPERF_FILES:
        return {"training.dataset": _MLPERF_FILES[Path(named).name], **given}
    text = f"names {named}, which is not beside it" if named else "names no file (CONFIG_FILE)"
    raise refused(path, f"is a command of torchtitan's that {text}: put its TOML there")
