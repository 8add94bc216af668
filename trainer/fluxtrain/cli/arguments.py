"""What several commands share: the parser, arguments, a job file with overrides, the start of trainers.

Environment variables of MLPerf's reference scripts are used unless a field or option overrides them:
``DATAROOT`` and ``MODELROOT`` are roots of relative paths, ``LOGDIR`` is the parent of the runs' output,
``SEED`` is ``spec.run.seed``, and ``HF_CACHE`` replaces ``~/.cache``.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import sys
import textwrap
import unicodedata
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeAlias

from fluxtrain.contract.model_base import did_you_mean, iter_fields
from fluxtrain.contract.process import ENV_DATA, ENV_MODELS, RunPaths
from fluxtrain.contract.resource.document import load_job
from fluxtrain.contract.resource.fluxtraining import FluxTraining
from fluxtrain.contract.run.closed_division import is_closed, violations
from fluxtrain.contract.run.config import LARGEST_SEED, RunConfig
from fluxtrain.contract.run.overrides import parse_overrides
from fluxtrain.contract.run.resolve import merge, require_no_lost_nulls, resolve
from fluxtrain.errors import EXIT_OK, EXIT_USAGE, UNSET, ConfigError, one_line
from fluxtrain.runtime.files import writing


class Parser(argparse.ArgumentParser):
    """A parser whose errors look like those of the commands; so do those of its subparsers.

    An option is given once, unless its action is append.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        for action in (None, "store"):
            self.register("action", action, _StoreOnce)

    def error(self, message: str) -> NoReturn:
        of_argument = message.removeprefix("argument ")
        help = "" if of_argument != message else f"; see {self.prog} --help"
        for action in self._subparsers._group_actions if self._subparsers else ():
            if f"{action.metavar}" in message.split():
                help = f": {' or '.join(action.choices or ())}{help}"
        self.exit(EXIT_USAGE, f"fluxtrain: error: {one_line(of_argument)}{help}\n")


class _StoreOnce(argparse._StoreAction):
    """Stores a value, and refuses a second one."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: Any = None) -> None:
        given = vars(namespace).setdefault("given", {})
        if values == "" and self.type is None:  # types have a message of their own
            raise ConfigError(option_string or str(self.metavar), UNSET, "must not be empty")
        if option_string and self.dest in given:
            text = f"was already set to {given[self.dest]}; set it once"
            raise ConfigError(option_string, str(values), text)
        given[self.dest] = values
        super().__call__(parser, namespace, values, option_string)


def whole_number(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"got {text[:80]!r}; must be a whole number") from None


def number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"got {text[:80]!r}; must be a number") from None


_PARAGRAPH = textwrap.TextWrapper(
    96, initial_indent="    ", subsequent_indent="    ", break_on_hyphens=False
)


def add_field_help(parser: argparse.ArgumentParser) -> None:
    """Let the command take overrides; add ``--help-fields`` and a note on them."""
    parser.set_defaults(takes_overrides=True)
    parser.add_argument(
        "--help-fields",
        nargs="?",
        action=_FieldHelp,
        default=argparse.SUPPRESS,
        metavar="PREFIX",
        help="list the fields of spec.run, or those below PREFIX such as optim, and exit",
    )
    parser.epilog = (
        "Every field of spec.run can be set, such as --optim.learning_rate=2e-4: see --help-fields."
    )


class _FieldHelp(argparse.Action):
    """Prints the fields of ``spec.run`` and exits."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        print(field_help(str(values or "")))
        parser.exit()


def field_help(prefix: str) -> str:
    """Return the fields of ``spec.run`` at or below ``prefix``, each with description, values and default.

    Raises ConfigError if there are none.
    """
    prefix = prefix.removeprefix("--")
    fields = [
        field
        for field in iter_fields(RunConfig)
        if "[]" not in field.path  # of entries of a list, which are given as a whole
        and f"{field.path}.".startswith(f"{prefix}." if prefix else "")
    ]
    if not fields:
        hint = did_you_mean(prefix, RunConfig.model_fields)
        raise ConfigError("--help-fields", prefix, f"no such field{hint}")
    lines = [
        "Fields of spec.run. A preset overrides the defaults; the file and options override both."
    ]
    for field in fields:
        lines += ["", f"--{field.path}=VALUE"]
        for text in (
            field.description.replace("``", "`"),
            f"allowed: {field.allowed}",
            _default(field.info.get_default()),
        ):
            lines += _PARAGRAPH.wrap(text)
    return "\n".join(lines)


def _default(value: Any) -> str:
    try:
        return f"default: {json.dumps(value)}"
    except TypeError:  # PydanticUndefined
        return "required"


ROOTS = {"data": (ENV_DATA, "DATAROOT"), "models": (ENV_MODELS, "MODELROOT")}
_DEFAULT_ROOT, _DEFAULT_OUTPUT = "data", "runs"


@dataclass(frozen=True)
class Setting:
    """A value and its source."""

    value: str
    source: str

    def __str__(self) -> str:
        return f"{self.value} ({self.source})"


def root(kind: str, environment: Mapping[str, str]) -> Setting:
    """Return the root of relative "data" or "models" paths: our variable, the reference's, or ./data."""
    for name in ROOTS[kind]:
        if environment.get(name):
            return Setting(environment[name], f"${name}")
    return Setting(_DEFAULT_ROOT, "default")


def given_root(arguments: argparse.Namespace, kind: str) -> str:
    """Return ``--data`` or ``--models`` with its folder, after a blank; "" for the default."""
    folder = str(getattr(arguments, kind))
    return "" if folder == root(kind, os.environ).value else f" --{kind} {shlex.quote(folder)}"


def output(job: str, environment: Mapping[str, str]) -> Setting:
    """Return the output folder of the run ``job``, below LOGDIR or ./runs."""
    if environment.get("LOGDIR"):
        return Setting(str(Path(environment["LOGDIR"]) / job), "$LOGDIR")
    return Setting(str(Path(_DEFAULT_OUTPUT) / job), "default")


def reference_seed(run: Mapping[str, Any], environment: Mapping[str, str]) -> Setting | None:
    """Return SEED unless ``run`` has a seed; raise ConfigError if it is invalid."""
    text = environment.get("SEED")
    if "seed" in run or not text:
        return None
    if not (text.isascii() and text.isdecimal() and int(text) <= LARGEST_SEED):
        raise ConfigError("$SEED", text, f"must be a whole number from 0 to {LARGEST_SEED}")
    return Setting(text, "$SEED")


def hugging_face(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables for Hugging Face's libraries: HF_HOME, if HF_CACHE is set and HF_HOME is not."""
    if environment.get("HF_CACHE") and not environment.get("HF_HOME"):
        return {"HF_HOME": str(Path(environment["HF_CACHE"]) / "huggingface")}
    return {}


Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def add_command(
    commands: Commands,
    name: str,
    action: Callable[[argparse.Namespace], int],
    help: str,
    description: str = "",
) -> argparse.ArgumentParser:
    """Add the command ``name`` with its help texts; ``action`` returns its exit code."""
    text = description or sentence(help)
    parser = commands.add_parser(name, allow_abbrev=False, help=help, description=text)
    parser.set_defaults(action=action)
    return parser


def sentence(text: str) -> str:
    """Return ``text`` with a capital and a full stop."""
    return f"{text[:1].upper()}{text[1:]}."


def path(text: str) -> Path:
    """Return ``text`` as a path; the type of every path argument."""
    if not text:
        raise argparse.ArgumentTypeError("must not be empty")
    return Path(os.path.expanduser(text))  # "~" in --output=~/runs, which shells leave; never fails


def job_name(stem: str) -> str:
    """Return ``stem`` as the name of a job: small letters, digits and '-'; a checksum of other letters."""
    plain = re.sub(r"[\u0300-\u036f]", "", unicodedata.normalize("NFKD", stem))  # ü as u
    name = re.sub(r"[^a-z0-9]+", "-", plain.lower()).strip("-")[:60].rstrip("-")
    if name[:1].isalpha():
        return name
    return f"run-{name}" if name and plain.isascii() else f"run-{zlib.crc32(stem.encode()):08x}"


def add_file(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", type=path, metavar="FILE", help="a FluxTraining, as YAML")
    add_field_help(parser)


def add_paths(parser: argparse.ArgumentParser, names: Sequence[str] = tuple(ROOTS)) -> None:
    """Add ``--data`` and ``--models``, or those of ``names``."""
    for name in names:
        variables = ROOTS[name]
        default = root(name, os.environ).value
        sources = " or ".join(f"${variable}" for variable in variables)
        text = f"root of relative {name} paths (default: {sources}, else {default})"
        parser.add_argument(f"--{name}", type=path, default=Path(default), help=text)


def add_output(parser: argparse.ArgumentParser, text: str = "folder to write (required)") -> None:
    parser.add_argument("--output", type=path, required=True, help=text)


def add_adapters(parser: argparse.ArgumentParser) -> None:
    text = "LoRA file, or a run or checkpoint of adapters, to add; may be repeated"
    parser.add_argument("--adapter", type=path, action="append", default=[], help=text)
    text = "factor of the adapters' updates (default: 1)"
    parser.add_argument("--strength", type=strength, help=text)
    add_skip_unknown(parser)


def add_skip_unknown(parser: argparse.ArgumentParser) -> None:
    text = "leave out what an adapter has beside layers of the model, and name it"
    parser.add_argument("--skip-unknown", action="store_true", help=text)


def strength(text: str) -> float:
    """Return the factor of an adapter's updates; ArgumentTypeError if it is no number from -1000 to 1000."""
    with suppress(ValueError):
        if abs(value := float(text)) <= 1000:  # false for nan
            return value
    raise argparse.ArgumentTypeError(f"got {text[:80]!r}; must be a number from -1000 to 1000")


def added_adapters(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the values of ``spec.run.added_adapters`` from the options."""
    strength = strength_of(arguments)
    values = {"strength": strength, "skip_unknown": arguments.skip_unknown}
    return [{"path": str(each.resolve()), **values} for each in arguments.adapter]


def strength_of(arguments: argparse.Namespace) -> float:
    """Return the factor of the updates of the adapters in the options; ConfigError if there are none."""
    strength: float | None = arguments.strength
    if strength is not None and not arguments.adapter:
        text = (
            "needs --adapter; to scale a run's adapters, give its base as WEIGHTS and --adapter RUN"
        )
        raise ConfigError("--strength", strength, text)
    return 1.0 if strength is None else strength


def load_config(
    file: Path, overrides: list[str], quiet: bool = False
) -> tuple[FluxTraining, RunConfig]:
    """Return the job in ``file`` and its resolved config, with ``--section.field=value`` overrides.

    Prints the seed of the environment and the targets of a closed run to stderr, unless ``quiet``.
    """
    job = load_job(file)
    run = merge(job.spec.run, parse_overrides(overrides))
    seed = reference_seed(run, os.environ)
    config = resolve({**run, "seed": int(seed.value)} if seed else run)
    require_no_lost_nulls(job.spec.run)
    if not quiet:
        _print_notes(config, seed)
    return job, config


def _print_notes(config: RunConfig, seed: Setting | None) -> None:
    if seed:
        print(f"seed {seed}", file=sys.stderr)
    if config.logging.mlperf.division == "auto":
        broken = violations(config)
        division = "open" if broken else "closed as long as no rule is broken"
        print(f"division: {division}", file=sys.stderr)
        for violation in broken:
            print(f"  {violation}", file=sys.stderr)
    if is_closed(config):
        from fluxtrain.mlperf import RULESETS
        from fluxtrain.mlperf.rcp import describe_targets

        print("closed division of MLPerf Training, flux1", file=sys.stderr)
        for line in describe_targets(config.schedule.global_batch_size, RULESETS):
            print(f"  {line}", file=sys.stderr)


def write_text(file: Path, text: str) -> None:
    """Write ``text`` to ``file``; StorageError if that fails."""
    with writing(file):
        file.write_text(text, encoding="utf-8")


def require_processes(processes: int | None) -> None:
    if processes is not None and not 1 <= processes <= 1024:
        raise ConfigError("--processes", processes, "must be between 1 and 1024")


def run_task(config: RunConfig, paths: RunPaths, processes: int | None) -> int:
    """Run the task of ``config`` on this machine and return its exit code; print why it failed."""
    from fluxtrain.launch import torchrun

    return report_end(*torchrun.run(config, paths, processes or torchrun.default_processes()))


def report_end(code: int, message: str) -> int:
    """Print the ``message`` of an exit ``code`` other than 0; return the code."""
    if code != EXIT_OK:
        print(f"fluxtrain: {message}", file=sys.stderr)
    return code
