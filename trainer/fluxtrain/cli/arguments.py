"""What several commands share: arguments, a job file with overrides, and starting the trainers."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeAlias

from fluxtrain.cli import reference_environment
from fluxtrain.cli.field_help import add_field_help
from fluxtrain.contract.launch import RunPaths
from fluxtrain.contract.resource.document import load_job
from fluxtrain.contract.resource.fluxtraining import FluxTraining
from fluxtrain.contract.run.closed_division import is_closed, violations
from fluxtrain.contract.run.config import RunConfig
from fluxtrain.contract.run.lost_nulls import require_no_lost_nulls
from fluxtrain.contract.run.overrides import parse_overrides
from fluxtrain.contract.run.resolve import merge, resolve
from fluxtrain.errors import EXIT_OK, ConfigError

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def add_command(
    commands: Commands,
    name: str,
    action: Callable[[argparse.Namespace], int],
    help: str,
    description: str | None = None,
) -> argparse.ArgumentParser:
    """Add the command ``name`` with its help texts; ``action`` returns its exit code."""
    parser = commands.add_parser(name, allow_abbrev=False, help=help, description=description)
    parser.set_defaults(action=action)
    return parser


def described(docstring: str | None) -> str:
    """Return what a command does, from its module's docstring, which begins with the command line."""
    sentence = (docstring or "").rpartition("``: ")[2]
    return sentence[:1].upper() + sentence[1:]


def path(text: str) -> Path:
    """Return ``text`` as a path; the type of every path argument."""
    if not text:
        raise argparse.ArgumentTypeError("must not be empty")
    return Path(text)


def add_file(parser: argparse.ArgumentParser) -> None:
    """Add the FILE argument and the help on overrides."""
    parser.add_argument("file", type=path, metavar="FILE", help="a FluxTraining, as YAML")
    add_field_help(parser)


def add_paths(
    parser: argparse.ArgumentParser, names: Sequence[str] = tuple(reference_environment.ROOTS)
) -> None:
    """Add ``--data`` and ``--models``, or those of ``names``."""
    for name in names:
        variables = reference_environment.ROOTS[name]
        default = reference_environment.root(name, os.environ).value
        sources = " or ".join(f"${variable}" for variable in variables)
        text = f"root of relative {name} paths (default: {sources}, else {default})"
        parser.add_argument(f"--{name}", type=path, default=Path(default), help=text)


def add_output(parser: argparse.ArgumentParser, text: str = "folder to write (required)") -> None:
    """Add the required ``--output``."""
    parser.add_argument("--output", type=path, required=True, help=text)


def add_adapters(parser: argparse.ArgumentParser) -> None:
    """Add the options for adapters that are added to the weights."""
    text = "LoRA file, or a run or checkpoint of adapters, to add; may be repeated"
    parser.add_argument("--adapter", type=path, action="append", default=[], help=text)
    text = "factor of the adapters' updates (default: 1)"
    parser.add_argument("--strength", type=strength, help=text)


def strength(text: str) -> float:
    """Return the factor of an adapter's updates; ArgumentTypeError if it is no number from -1000 to 1000."""
    with suppress(ValueError):
        if abs(value := float(text)) <= 1000:  # false for nan
            return value
    raise argparse.ArgumentTypeError(f"got {text[:80]!r}; must be a number from -1000 to 1000")


def added_adapters(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the values of ``spec.run.added_adapters`` from the options."""
    strength = strength_of(arguments)
    return [{"path": str(each.resolve()), "strength": strength} for each in arguments.adapter]


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
    seed = reference_environment.seed(run, os.environ)
    config = resolve({**run, "seed": int(seed.value)} if seed else run)
    require_no_lost_nulls(job.spec.run)
    if not quiet:
        _print_notes(config, seed)
    return job, config


def _print_notes(config: RunConfig, seed: reference_environment.Setting | None) -> None:
    if seed:
        print(f"seed {seed}", file=sys.stderr)
    if config.logging.mlperf.division == "auto":
        broken = violations(config)
        print(
            f"division: {'open' if broken else 'closed as long as no rule is broken'}",
            file=sys.stderr,
        )
        for violation in broken:
            print(f"  {violation}", file=sys.stderr)
    if is_closed(config):
        from fluxtrain.mlperf import RULESETS
        from fluxtrain.mlperf.rcp import describe_targets

        print("closed division of MLPerf Training, flux1", file=sys.stderr)
        for line in describe_targets(config.schedule.global_batch_size, RULESETS):
            print(f"  {line}", file=sys.stderr)


def require_processes(processes: int | None) -> None:
    """Raise ConfigError if ``--processes`` is out of range."""
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
