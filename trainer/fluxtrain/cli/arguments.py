"""What several commands share: the FILE argument, the roots, and the way from a file to its config."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from fluxtrain.cli import reference_environment
from fluxtrain.contract.resource.document import load
from fluxtrain.contract.resource.fluxtraining import FluxTraining, local_meaning
from fluxtrain.contract.run.closed_division import is_closed
from fluxtrain.contract.run.config import RunConfig
from fluxtrain.contract.run.overrides import parse_overrides
from fluxtrain.contract.run.resolve import merge, resolve
from fluxtrain.errors import ConfigError


def add_file(parser: argparse.ArgumentParser) -> None:
    """Add the FILE argument and the note on overrides."""
    parser.add_argument("file", type=Path, metavar="FILE", help="a FluxTraining, as YAML")
    parser.epilog = (
        "Any field of spec.run can be set: --optim.learning_rate=2e-4; see docs/config.md."
    )


def add_paths(parser: argparse.ArgumentParser) -> None:
    """Add the roots of relative paths."""
    for name, variables in reference_environment.ROOTS.items():
        chosen = reference_environment.root(name, os.environ)
        known = " or ".join(f"${variable}" for variable in variables)
        text = f"root of relative {name} paths (default: {known}, else {chosen.value})"
        parser.add_argument(f"--{name}", type=Path, default=Path(chosen.value), help=text)


def configured(
    file: Path, overrides: list[str], loud: bool = False
) -> tuple[FluxTraining, RunConfig]:
    """Return the job in ``file`` and its resolved config, changed by ``--section.field=value`` words.

    With ``loud`` stderr gets the fields that only a cluster reads, and what a closed run has to reach.
    """
    job = load(file)
    run = merge(job.spec.run, parse_overrides(overrides))
    seed = reference_environment.seed(run, os.environ)
    config = resolve({**run, "seed": int(seed.value)} if seed else run)
    if loud and (ignored := local_meaning(job)):
        print(
            f"ignored on this machine, where there is no cluster: {', '.join(ignored)}",
            file=sys.stderr,
        )
    if loud and seed:
        print(f"seed {seed}", file=sys.stderr)
    if loud and is_closed(config):
        from fluxtrain.mlperf import RULESETS
        from fluxtrain.mlperf.rcp import expectation

        print("closed division of MLPerf Training, flux1", file=sys.stderr)
        for line in expectation(config.schedule.global_batch_size, RULESETS):
            print(f"  {line}", file=sys.stderr)
    return job, config


def require_no_more(rest: list[str]) -> None:
    """Raise ConfigError for arguments that no option of the command takes."""
    if rest:
        raise ConfigError("arguments", " ".join(rest), "no such option")
