"""Verifies the log of a run by its chain, and the chain by the heads that the operator has seen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fluxtrain.mlperf.chain.comparison import compare
from fluxtrain.mlperf.chain.folder import check_checkpoints, check_config
from fluxtrain.mlperf.chain.heads import Head, check_heads, read_heads
from fluxtrain.mlperf.chain.links import check_links, check_resumes
from fluxtrain.mlperf.chain.record import Record, digest, parsed, split
from fluxtrain.mlperf.chain.replay import lines_of
from fluxtrain.mlperf.chain.verdict import Verdict
from fluxtrain.mlperf.evidence import Run
from fluxtrain.mlperf.facts import CHAIN_KEY
from fluxtrain.mlperf.lines import parse

__all__ = ["Head", "read_heads", "verify"]


def verify(
    log: bytes,
    chain: bytes,
    heads: Sequence[Head] | None = None,
    config: tuple[str, Mapping[str, Any]] | None = None,
    output: Path | None = None,
    deep: bool = False,
) -> Verdict:
    """Return what is wrong with ``log``, whose chain is ``chain``.

    ``heads`` are those that the operator saw, ``config`` the name and the values of the file with the
    configuration, and ``output`` the folder of the run, of whose checkpoints ``deep`` reads all blocks.
    """
    verdict = Verdict()
    lines, torn = split(chain)
    verdict.records, verdict.head = len(lines), digest(lines[-1]) if lines else None
    if not lines:
        verdict.find("the chain has no record")
        return verdict
    if torn:
        verdict.note(f"the last record is torn after {len(torn)} bytes: a process was killed in it")
    check_links(lines, verdict)
    found = parsed(lines)
    records = [record for record in found if record is not None]
    if heads is None:
        verdict.note(
            "without --status: a log and a chain that were rewritten as a whole are not found"
        )
    else:
        check_heads(lines, found, heads, verdict)
    check_resumes(records, verdict)
    compare(log, records, verdict)
    verdict.result = _result(records, verdict)
    if config is not None:
        check_config(config[1], config[0], records, verdict)
    if output is not None and records:
        check_checkpoints(output, records, deep, verdict)
    return verdict


def _result(records: Sequence[Record], verdict: Verdict) -> dict[str, object]:
    """Return the result by the chained lines; find the lines that name another chain."""
    chained = [parse(line.number, line.text) for line in lines_of(records)]
    run = Run("chain", Path(), chained)
    names = {
        str(line.value.get("run")) for line in run.all(CHAIN_KEY) if isinstance(line.value, dict)
    }
    own = str(records[0].values.get("run")) if records else ""
    if names - {own}:
        verdict.find("the log names another chain than this one: it is that of another run")
    stop, losses = run.first("run_stop"), run.all("eval_accuracy")
    return {
        "status": None if stop is None else stop.fields["metadata"].get("status"),
        "minutes": run.minutes if run.samples is not None else None,
        "samples": run.samples,
        "eval_loss": losses[-1].value if losses else None,
    }
