"""A small run with a log, a chain and checkpoints, which was resumed once."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fluxtrain.contract.run.config import RunConfig
from fluxtrain.contract.run.resolve import resolve
from fluxtrain.data.order import BatchShares
from fluxtrain.mlperf.chain import Chain, digest, encode, parse, split
from fluxtrain.mlperf.chain_verify import (
    Head,
    Verdict,
    checkpoint_saved,
    loaded_state,
    start_facts,
    verify,
)
from fluxtrain.mlperf.facts import RunFacts
from fluxtrain.mlperf.log import MLPerfLog
from fluxtrain.state.run_state import RunState

SIZE, EVERY, SEEN = 1024, 262_144, "2040-01-01T00:00:00Z"
POD = "0b5f6b5e-0000-4000-8000-000000000001"


@dataclass
class ChainedRun:
    """The files of a run, as they are on its volume."""

    folder: Path
    heads: list[Head] | None = None

    @property
    def log(self) -> Path:
        return self.folder / "mlperf.log"

    @property
    def chain(self) -> Path:
        return self.folder / "mlperf.chain.jsonl"

    @property
    def lines(self) -> list[str]:
        return self.log.read_text().splitlines(keepends=True)

    def write_lines(self, lines: Sequence[str]) -> None:
        self.log.write_text("".join(lines))

    @property
    def records(self) -> list[bytes]:
        return split(self.chain.read_bytes())[0]

    def write_records(self, records: Sequence[bytes]) -> None:
        self.chain.write_bytes(b"".join(record + b"\n" for record in records))

    def rechain(self, change: Callable[[list[dict[str, Any]]], object]) -> None:
        """Change the values of records, and compute all hashes anew: what an opponent does."""
        values = [json.loads(record) for record in self.records]
        change(values)
        records, previous = list[bytes](), "0" * 64
        for number, value in enumerate(values):
            rest = {k: v for k, v in value.items() if k not in ("number", "previous", "kind")}
            records.append(encode(number, previous, value["kind"], rest))
            previous = digest(records[-1])
        self.write_records(records)

    def record(self, kind: str) -> int:
        """Return the number of the last record of ``kind``."""
        return max(n for n, line in enumerate(self.records) if parse(line).kind == kind)

    def see(self) -> None:
        """Let the operator see the present head."""
        records = self.records
        self.heads = [*(self.heads or ()), Head(len(records), digest(records[-1]), SEEN)]

    def verify(self, deep: bool = False) -> Verdict:
        config = json.loads((self.folder / "config.json").read_text())
        return verify(
            self.log.read_bytes(),
            self.chain.read_bytes(),
            self.heads,
            ("config.json", config),
            self.folder,
            deep,
        )


def open_log(
    run: ChainedRun, config: RunConfig, state: RunState, pods: Sequence[str] = (POD,)
) -> MLPerfLog:
    loaded = loaded_state(run.folder, state, state.step)
    facts = start_facts(config, 1, pods, loaded, {"FLUXTRAIN_RUN_IMAGE": "example.org/trainer"})
    return MLPerfLog.open(
        run.log,
        state.samples,
        False,
        RunFacts(config, BatchShares(SIZE, 32, 16), 1_099_776, 29_696, time.time()),
        open_chain=lambda kept: Chain.open(run.chain, kept, facts, state.samples),
    )


def save(run: ChainedRun, log: MLPerfLog, step: int) -> None:
    """Save a checkpoint of one small file."""
    folder = run.folder / "checkpoints" / f"step_{step:010d}"
    folder.mkdir(parents=True)
    (folder / "run.json").write_text(json.dumps({"step": step}))
    from fluxtrain.runtime import files

    sums = {"run.json": files.sums_of((folder / "run.json").read_bytes())}
    (folder / "DONE").write_text(files.encode(sums))
    assert log.chain is not None
    checkpoint_saved(log.chain, run.folder, step)


def evaluate(log: MLPerfLog, count: int, loss: float) -> None:
    samples = count * EVERY
    log.block_start(samples - EVERY)
    log.tracked_stats(samples, {"throughput": 500.0 + count, "loss": loss, "lr": 1e-4})
    log.block_stop(samples)
    log.eval_start(samples)
    log.eval_accuracy(samples, loss)
    log.eval_stop(samples)


def configuration() -> RunConfig:
    changes = {"organization": "example-org", "platform": "8xMI300X"}
    return resolve(
        {
            "preset": "mlperf-schnell",
            "seed": 7,
            "schedule": {"global_batch_size": SIZE},
            "logging": {"mlperf": changes},
        }
    )


def chained_run(folder: Path, ends: bool = True) -> ChainedRun:
    """Return a run that was resumed from its checkpoint after lines that it then dropped."""
    folder.mkdir(parents=True, exist_ok=True)
    run, config = ChainedRun(folder), configuration()
    (folder / "config.json").write_text(config.model_dump_json())
    log = open_log(run, config, RunState(0, 0))
    log.data_opened(1_099_776, 29_696, {"train": "a" * 64, "validation": "b" * 64})
    log.ready()
    evaluate(log, 1, 0.7)
    save(run, log, EVERY // SIZE)
    evaluate(log, 2, 0.65)
    log.close()
    run.see()
    log = open_log(run, config, RunState(EVERY // SIZE, EVERY))
    log.ready()
    evaluate(log, 2, 0.66)
    evaluate(log, 3, 0.58)
    if ends:
        log.run_stop("success", 3 * EVERY)
        save(run, log, 3 * EVERY // SIZE)
    log.close()
    run.see()
    return run
