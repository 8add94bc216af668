"""``fluxtrain mlperf verify RUN|LOG``: whether a log is what the run wrote, by the chain beside it."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from fluxtrain.cli.arguments import Commands, described, path
from fluxtrain.errors import EXIT_ERROR, EXIT_OK, UNSET, ConfigError

if TYPE_CHECKING:
    from fluxtrain.mlperf.chain import Head, Verdict


def add(subcommands: Commands) -> None:
    """Add the command's parser to ``fluxtrain mlperf``."""
    text = "verify a log by its chain of hashes"
    verify = subcommands.add_parser("verify", help=text, description=described(__doc__))
    text = "output folder of a run, or its log with the chain beside it"
    verify.add_argument("run", type=path, metavar="RUN|LOG", help=text)
    text = "the job with its status, which has the heads that the operator saw; YAML or JSON"
    verify.add_argument("--status", type=path, metavar="JOB", help=text)
    text = "read all blocks of the checkpoints too, which takes minutes"
    verify.add_argument("--checkpoints", action="store_true", help=text)
    verify.add_argument("--json", action="store_true", help="print JSON")
    verify.set_defaults(action=action)


def action(arguments: argparse.Namespace) -> int:
    """Print a line for each finding; return 0 without one, 1 with one."""
    from fluxtrain.contract.launch import CHAIN_FILE, CONFIG_FILE, MLPERF_FILE
    from fluxtrain.mlperf.chain import verify
    from fluxtrain.mlperf.evidence import read_bytes, read_object

    is_folder = arguments.run.is_dir()
    log = arguments.run / MLPERF_FILE if is_folder else arguments.run
    folder = log.parent
    chain, config = folder / CHAIN_FILE, folder / CONFIG_FILE
    content = read_bytes(log)
    if not chain.exists():
        raise ConfigError("RUN|LOG", str(folder), f"has no {CHAIN_FILE}")
    values = read_object(config) if is_folder else None
    if is_folder and values is None:
        raise ConfigError("RUN|LOG", str(folder), f"has no {CONFIG_FILE}")
    verdict = verify(
        content,
        read_bytes(chain),
        None if arguments.status is None else _heads(arguments.status),
        None if values is None else (CONFIG_FILE, values),
        folder if is_folder else None,
        arguments.checkpoints,
    )
    print(json.dumps(asdict(verdict), indent=1) if arguments.json else _text(verdict))
    return EXIT_OK if verdict.holds else EXIT_ERROR


def _heads(file: Path) -> list[Head]:
    from fluxtrain.contract.resource.document import parse_yaml, read_text
    from fluxtrain.mlperf.chain import read_heads

    job = parse_yaml(read_text(file), str(file))
    if not isinstance(job, dict):
        raise ConfigError("--status", UNSET, f"{file} is no FluxTraining")
    return read_heads(job)


def _text(verdict: Verdict) -> str:
    lines = [f"found: {text}" for text in verdict.findings]
    lines += [f"note: {text}" for text in verdict.notes]
    result = verdict.result
    shown = ", ".join(
        f"{name} {value:.6g}" if isinstance(value, float) else f"{name} {value}"
        for name, value in result.items()
        if value is not None
    )
    lines += [f"result by the chain: {shown or 'none yet'}"]
    word = "VERIFIED" if verdict.holds else "FAILED"
    return "\n".join([*lines, f"{word}: {verdict.records} records, head {verdict.head}"])
