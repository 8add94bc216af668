"""The rule that a run's log is the one that the chain beside it, or in the package, has."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from fluxtrain.contract.launch import CHAIN_FILE, CONFIG_FILE
from fluxtrain.mlperf.chain import verify
from fluxtrain.mlperf.evidence import Run, is_file, read_bytes
from fluxtrain.mlperf.facts import CHAIN_KEY
from fluxtrain.mlperf.ran_job import heads_of_job
from fluxtrain.mlperf.review.rule import Rule, rule

_SUBMISSION_RULES = ""
_MAX_SHOWN = 3


def chain_of(run: Run) -> Path | None:
    """Return where the chain of ``run`` belongs: beside its log, in a package beside its configuration.

    None if only its log is given, which has neither.
    """
    if run.config_file is None:
        return None
    if run.config_file.name == CONFIG_FILE:
        return run.log.parent / CHAIN_FILE
    return run.config_file.with_name(enclosed_name(run.config_file.stem.removeprefix("config_")))


def enclosed_name(number: int | str) -> str:
    """Return the name of a chain in a package."""
    return f"chain_{number}.jsonl"


@rule(
    "log-follows-its-chain",
    _SUBMISSION_RULES,
    "Give the log and the chain that the run wrote; fluxtrain mlperf verify compares them.",
)
def log_follows_its_chain(run: Run) -> Iterator[str]:
    """The log has the lines of its chain, and the chain has the heads that the operator saw, where known."""
    path = chain_of(run)
    if path is None:
        return
    if not is_file(path):
        if run.first(CHAIN_KEY) is not None:
            yield f"the log has a chain, and there is no {path.name}"
        return
    heads = heads_of_job(run.log.parent) if path.name == CHAIN_FILE else None
    found = verify(read_bytes(run.log), read_bytes(path), heads).findings
    yield from found[:_MAX_SHOWN]


RULES: tuple[Rule[Run], ...] = (log_follows_its_chain,)
