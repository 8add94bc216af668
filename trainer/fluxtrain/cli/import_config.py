"""``fluxtrain import-config`` and ``from-env``: a FluxTraining for another trainer's options, and its run."""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from fluxtrain.cli import run
from fluxtrain.cli.arguments import (
    ROOTS,
    add_field_help,
    job_name,
    path,
    whole_number,
    write_text,
)
from fluxtrain.cli.prepare import add_from, fetch_missing, stoppable
from fluxtrain.contract.model_base import join_errors
from fluxtrain.contract.process import ADAPTERS_FOLDER
from fluxtrain.contract.resource.document import load_job
from fluxtrain.contract.run.data import is_url
from fluxtrain.contract.run.overrides import parse_overrides
from fluxtrain.contract.run.resolve import merge
from fluxtrain.errors import EXIT_OK, UNSET, ConfigError, DataError
from fluxtrain.runtime.files import atomic_write, storage_errors


def add(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(action=_action)
    parser.description = "Write a FluxTraining for the options of another trainer."
    parser.set_defaults(takes_overrides=True)
    text = "options of another trainer: TOML, YAML, JSON, .env or a command; docs/coming-from.md"
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
        write_text(arguments.prompt_file, "".join(f"{line}\n" for line in imported.prompts))
    if arguments.output is None:
        print(text, end="")
    else:
        write_text(arguments.output, text)
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
    file = arguments.prompt_file
    if file is not None and arguments.from_env:
        raise ConfigError("--prompt-file", str(file), "is for FILE, not for --from-env")
    if file is not None and file.suffix != ".txt":
        raise ConfigError("--prompt-file", str(file), "must end in .txt")


FILE = "from-env.yaml"
"""The FluxTraining that the variables make, in OUTPUT_PATH."""


def add_from_env(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(action=_from_env)
    parser.description = (
        "Fetch models and DATASET_NAME, train as PARAMS_* and DATASET_CONFIG say, and put the "
        "LoRA into OUTPUT_PATH; the same command resumes. docs/coming-from.md has the variables."
    )
    add_field_help(parser)
    variables = " or ".join(f"${name}" for name in ROOTS["models"])
    text = f"folder of the models (default: {variables}, else the guide's)"
    parser.add_argument("--models", type=path, help=text)
    add_from(parser)
    text = "trainer processes (default: the GPUs, or one)"
    parser.add_argument("--processes", type=whole_number, help=text)
    parser.add_argument("--cpu", action="store_true", help="run on the CPU, also where a GPU is")


def _from_env(arguments: argparse.Namespace) -> int:
    """Import the environment, fetch what it needs, and run that; print what became of each variable."""
    from fluxtrain.imports.files import file_text, report
    from fluxtrain.imports.variables import FOLDERS, MODELS, import_variables, require_any

    require_any(os.environ)
    given = {name: value for name, value in os.environ.items() if value}
    data, output = (Path(given.get(name, default)).resolve() for name, default in FOLDERS.items())
    models = arguments.models or next((given[n] for n in ROOTS["models"] if n in given), MODELS)
    if errors := list(_unusable(given, data)):
        raise join_errors(errors)
    name = given.get("OUTPUT_NAME") or _kept_name(output / FILE)
    named = {key: str(Path(given[key]).resolve()) for key in _FILES if key in given}
    every = given.get("PARAMS_SAVE_EVERY_N_STEPS", "")
    interval = {"every_steps": int(every) if every.isdecimal() else 100}
    overrides = merge({"checkpoint": interval}, parse_overrides(arguments.overrides))
    imported = import_variables({**given, **named, "OUTPUT_NAME": name}, overrides)
    for line in report(imported):
        print(line, file=sys.stderr)
    text = file_text(imported, job_name(name), "the environment", gpus=0 if arguments.cpu else 1)
    file, last = output / FILE, output / f"{imported.config.adapter_file.name}.safetensors"
    if last.exists() and file.exists() and file.read_text(encoding="utf-8") == text:
        print(f"{last}: it is there already; another OUTPUT_PATH or OUTPUT_NAME trains again")
        return EXIT_OK
    with storage_errors(output):
        output.mkdir(parents=True, exist_ok=True)
        with atomic_write(file) as partial:
            partial.write_text(text, encoding="utf-8")
    with stoppable():
        _fetch_data_set(given, data)
        fetch_missing(imported.config, Path(models).resolve(), arguments.published)
    folders = {"output": output, "data": data, "models": Path(models)}
    alone = dict.fromkeys(("nodes", "rendezvous", "node_rank", "rendezvous_timeout"))
    given_here = {**vars(arguments), "file": file, "overrides": []}
    try:
        code = run.action(argparse.Namespace(**{**given_here, **folders, **alone}))
    finally:
        _link_files(output, imported.config.adapter_file.name)
    if code == EXIT_OK and not last.exists():
        text = "is missing, and the run that made it is finished; it has its weights still"
        own, other = (shlex.quote(str(path)) for path in (output, last))
        raise DataError(f"{last}: {text}: fluxtrain adapter convert {own} --output {other}")
    return code


_FILES = {
    "DATASET_CONFIG": "kohya's data set config, .json or .toml, such as /opt/sd-scripts/dataset.json",
    "SAMPLE_PROMPTS": "a text file of prompts; without it there are no sample images",
}


def _unusable(given: Mapping[str, str], data: Path) -> Iterator[ConfigError]:
    """Yield an error for each variable that is missing, or names a file that is."""
    if "DATASET_NAME" not in given and not (data.is_dir() and any(data.iterdir())):
        text = (
            f"must be OWNER/NAME of a data set on Kaggle, or a URL such as hf://datasets/OWNER/NAME or "
            f"https://HOST/FILE.zip; or put the pictures into {data}, $DATASET_PATH"
        )
        yield ConfigError("$DATASET_NAME", UNSET, text)
    for name, what in _FILES.items():
        if name not in given and name == "DATASET_CONFIG":
            yield ConfigError(f"${name}", UNSET, f"must name {what}: mount it into the container")
        elif name in given and not Path(given[name]).is_file():
            text = f"there is no such file: mount it there; it is {what}"
            yield ConfigError(f"${name}", given[name], text)


def _kept_name(file: Path) -> str:
    """Return the name of the files of the run that ``file`` began, else a new one as the guide's."""
    if file.is_file():
        return str(load_job(file).spec.run["adapter_file"]["name"])
    return f"{socket.gethostname()}-{int(time.time())}"


_DATA_SET = ".data_set"
"""Has the name of the data set in its folder."""


def _fetch_data_set(given: Mapping[str, str], folder: Path) -> None:
    from fluxtrain.fetch.http import RetryPolicy
    from fluxtrain.fetch.source import fetch_source, list_source
    from fluxtrain.imports.variables import DATASET_HOST
    from fluxtrain.picture_cache.fetching import fetch_bar, is_wanted
    from fluxtrain.prepare.download import fetch_archive

    name, marker = given.get("DATASET_NAME", ""), folder / _DATA_SET
    before = marker.read_text("utf-8") if marker.is_file() else name
    if name and name != before:
        text = f"{folder}, $DATASET_PATH, has {before} already: empty it, or name another folder"
        raise ConfigError("$DATASET_NAME", name, text)
    if name:
        folder.mkdir(parents=True, exist_ok=True)
        marker.write_text(name, "utf-8")
    if is_url(name) and not name.startswith(("http://", "https://")):
        source = list_source("$DATASET_NAME", name, is_wanted, RetryPolicy())
        with fetch_bar(True, name, len(source.files), source.size) as console:
            fetch_source(source, folder, 8, RetryPolicy(check=console.show), console.advance)
    elif name:
        host = given.get("DATASET_HOST", DATASET_HOST).rstrip("/")
        fetch_archive(name if is_url(name) else f"{host}/{name}", folder)


def _link_files(output: Path, name: str) -> None:
    """Link the files of the adapters into ``output``, by the names that sd-scripts gives them."""
    for file in sorted((output / ADAPTERS_FOLDER).glob(f"{name}*.safetensors")):
        step = file.stem.removeprefix(name)
        target = output / f"{name}{f'-step{int(step[1:]):08d}' if step else ''}.safetensors"
        if target.exists() and target.samefile(file):
            continue
        partial = output / f".{target.name}"
        partial.unlink(missing_ok=True)
        try:
            os.link(file, partial)
        except OSError:  # a file system without links
            shutil.copyfile(file, partial)
        partial.replace(target)
        print(target, file=sys.stderr)
