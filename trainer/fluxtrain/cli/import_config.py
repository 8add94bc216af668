"""``fluxtrain import-config FILE``: write a FluxTraining for the options of another trainer."""

from __future__ import annotations

import argparse
import os
import re
import sys
from pathlib import Path

from fluxtrain.cli.arguments import Commands, add_command, path, whole_number
from fluxtrain.contract.run.overrides import parse_overrides
from fluxtrain.errors import EXIT_OK, UNSET, ConfigError, StorageError


def add(commands: Commands) -> None:
    """Add the command's parser."""
    text = "write a FluxTraining for another trainer's options"
    parser = add_command(
        commands,
        "import-config",
        _action,
        text,
        "Write a FluxTraining for the options of another trainer.",
    )
    parser.set_defaults(takes_overrides=True)
    text = "kohya's TOML, command or GUI's JSON, ai-toolkit's YAML, SimpleTuner's config.json, .toml or .env"
    parser.add_argument("file", type=path, nargs="?", metavar="FILE", help=text)
    text = "instead of FILE: PARAMS_* and the other variables of kohya's container for MI300X"
    parser.add_argument("--from-env", action="store_true", help=text)
    text = "file to write (default: print it)"
    parser.add_argument("--output", type=path, help=text)
    text = "file below --data to write, for prompts with sizes and seeds: sampling.prompt_file"
    parser.add_argument("--prompt-file", type=path, metavar="PROMPTS", help=text)
    text = "refuse a file of which an option has no counterpart, instead of naming it"
    parser.add_argument("--strict", action="store_true", help=text)
    text = "GPUs of the training there, a process for each (default: 1)"
    parser.add_argument("--gpus", type=whole_number, default=1, help=text)
    text = (
        "samples of an epoch, images times repeats, with the images that the options hold out: "
        "for options in epochs"
    )
    parser.add_argument("--epoch-samples", type=whole_number, help=text)


def _action(arguments: argparse.Namespace) -> int:
    """Print or write the file; the report goes to stderr."""
    from fluxtrain.imports.files import file_text, import_file, refuse_lost, report
    from fluxtrain.imports.variables import import_variables, require_any

    _check(arguments)
    overrides = parse_overrides(arguments.overrides)
    numbers = (arguments.gpus, arguments.epoch_samples)
    if arguments.from_env:
        imported = import_variables(os.environ, overrides, *numbers)
        require_any(os.environ)
        source, stem = "the environment", imported.config.adapter_file.name
    else:
        prompts = arguments.prompt_file and arguments.prompt_file.name
        imported = import_file(arguments.file, overrides, *numbers, prompts)
        source, stem = arguments.file.name, arguments.file.stem
    if arguments.strict:
        refuse_lost(imported, source)
    text = file_text(imported, job_name(stem), source, arguments.gpus)
    for line in report(imported):
        print(line, file=sys.stderr)
    if arguments.prompt_file and not imported.prompts:
        print(f"{arguments.prompt_file}: not written: there are no prompts", file=sys.stderr)
    if imported.prompts:
        _write(arguments.prompt_file, "".join(f"{line}\n" for line in imported.prompts))
    if arguments.output is None:
        print(text, end="")
    else:
        _write(arguments.output, text)
        print(f"{arguments.output}: to train, fluxtrain run {arguments.output}", file=sys.stderr)
    return EXIT_OK


def _check(arguments: argparse.Namespace) -> None:
    if (arguments.file is None) != arguments.from_env:
        raise ConfigError("arguments", UNSET, "need one of FILE and --from-env")
    if not 1 <= arguments.gpus <= 64:
        raise ConfigError("--gpus", arguments.gpus, "must be between 1 and 64, those of one node")
    samples = arguments.epoch_samples
    if samples is not None and not 1 <= samples <= 10**9:
        raise ConfigError("--epoch-samples", samples, "must be between 1 and 1000000000")
    for name, file in (("--output", arguments.output), ("--prompt-file", arguments.prompt_file)):
        if file is not None and file.exists():
            raise ConfigError(name, str(file), "exists already; remove it or name another")
    _check_prompt_file(arguments)


def _check_prompt_file(arguments: argparse.Namespace) -> None:
    file = arguments.prompt_file
    if file is not None and arguments.from_env:
        raise ConfigError("--prompt-file", str(file), "is for FILE, not for --from-env")
    if file is not None and file.suffix != ".txt":
        raise ConfigError("--prompt-file", str(file), "must end in .txt")


def job_name(stem: str) -> str:
    """Return ``stem`` as the name of a job: small letters, digits and '-'."""
    name = re.sub(r"[^a-z0-9]+", "-", stem.lower()).strip("-")[:60].rstrip("-")
    return name if name[:1].isalpha() else f"run-{name}".rstrip("-")


def _write(output: Path, text: str) -> None:
    try:
        output.write_text(text, encoding="utf-8")
    except OSError as error:
        raise StorageError(f"{output}: cannot be written ({error.strerror})") from None
