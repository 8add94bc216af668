"""The MLPerf log of a run: MLCommons' ``mllog`` formats the lines, and each is written with one call.

File and stdout both have the complete log also after a restart: a resumed run first repeats the earlier lines
on stdout. Only rank 0 opens one; ``MLPerfLog(None, False)`` writes nothing, nor does any without ``mllog``:
a run of the benchmark is refused then.
"""

from __future__ import annotations

import logging
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from fluxtrain.contract.process import CHAIN_FILE, ENV_POD_UID, MLPERF_FILE, RunPaths
from fluxtrain.contract.run.closed_division import SAME_SYSTEM, TO_LEAVE, Violation
from fluxtrain.contract.run.config import RunConfig
from fluxtrain.data.order import BatchShares
from fluxtrain.errors import UNSET, ConfigError, StorageError
from fluxtrain.mlperf.chain import DATA, Chain, OnHead, write_whole
from fluxtrain.mlperf.chain_verify import checkpoint_saved, hash_weights, loaded_state, start_facts
from fluxtrain.mlperf.facts import (
    CHAIN_KEY,
    DATA_KEY,
    DIVISION_KEY,
    RANKS_KEY,
    RunFacts,
    all_flushed,
    division_value,
    gather,
    init_events,
    machine_facts,
    node_mark,
)
from fluxtrain.mlperf.log_lines import TARGET_KEY, LogLine, read_lines
from fluxtrain.mlperf.rcp import reference_band
from fluxtrain.runtime.files import atomic_write_by_several, sync, writing
from fluxtrain.runtime.program import MLPERF_PACKAGE, needs
from fluxtrain.state.run_state import Fence, RunState

if TYPE_CHECKING:
    from fluxtrain.parallel.distributed import World


_SOURCES = str(Path(__file__).parents[2])
"""Removed from metadata.file, so that paths in the log are relative."""
_STDOUT = 1
DIVISION_FIELD = "spec.run.logging.mlperf.division"


class MLPerfLog:
    """Writes the MLPerf log; one method per event of a run."""

    def __init__(
        self, path: Path | None, stdout: bool, now: Callable[[], float] = time.time
    ) -> None:
        """Write to ``path`` (if not None) and to ``stdout`` (if true); ``now`` returns Unix time."""
        self._path, self._stdout, self._now = path, stdout, now
        self.chain: Chain | None = None
        self.band: tuple[float, float] | None = None
        """Samples between which the reference's runs reach the target of a run of the benchmark."""
        self._state = LogState()
        self._division, self._begins_closed, self._eval_samples = "open", False, 0
        self._lines = _LineCapture()
        self._mllog = _mllogger(self._lines) if path or stdout else None
        self._file = _open(path)

    @classmethod
    def open(
        cls,
        path: Path | None,
        samples: int,
        stdout: bool,
        facts: RunFacts,
        now: Callable[[], float] = time.time,
        open_chain: Callable[[list[str]], Chain] | None = None,
    ) -> MLPerfLog:
        """Start the log of a run, or resume the one at ``path`` after ``samples``.

        Later events and incomplete lines are removed from the file. If the run's earlier lines are lost they
        are not recreated, and the checker will refuse the log. ``open_chain`` returns the chain of a log that
        keeps the given lines. Raises StorageError if the file cannot be read
        or written, ConfigError if there is a log and MLCommons' package to continue it is not installed.
        """
        if find_spec(MLPERF_PACKAGE) is None:
            if path is not None and path.exists():
                text = f"to continue {path} or to replace it, {needs(MLPERF_PACKAGE, 'mlperf')}"
                raise ConfigError(DIVISION_FIELD, facts.config.logging.mlperf.division, text)
            return cls(None, False)
        try:
            kept = [] if path is None else lines_until(path, samples, facts.config)
            chain = open_chain([line.text for line in kept]) if open_chain else None
            if path is not None:
                rewrite(path, kept)
        except OSError as error:
            raise StorageError(f"{path}: cannot be read or written ({error.strerror})") from None
        log = cls(path, stdout, now)
        log.chain = chain
        log._division = facts.config.logging.mlperf.division
        log._begins_closed = facts.begins_closed
        log._eval_samples = facts.eval_samples or 0
        for line in kept:
            log._state.update(line.key, line.samples, line.value)
            log._print(line.text)
        if "run_start" in log._state.keys or samples:
            log._resume(samples, facts)
        else:
            log._start(facts)
        return log

    def ready(self) -> None:
        """Log the end of the initialisation and the start of the run, once per run."""
        if "init_start" in self._state.keys and "run_start" not in self._state.keys:
            self._write("end", "init_stop")
            self._write("start", "run_start")

    def data_opened(
        self, train_samples: int, eval_samples: int, digests: Mapping[str, str]
    ) -> None:
        """Log the sizes of the data sets, unless they are stated, and the ``digests`` of their indices."""
        self._eval_samples = eval_samples
        if "train_samples" not in self._state.keys:
            self._write("event", "train_samples", train_samples)
        if self._division == "closed" and "eval_samples" not in self._state.keys:
            self._write("event", "eval_samples", eval_samples)
        if self.chain is not None:
            self.chain.append(DATA, digests=dict(digests))
        if self._state.digests != dict(digests):
            self._write("event", DATA_KEY, dict(digests))

    def block_start(self, samples: int) -> None:
        """Log that training continues after ``samples``, unless a block is open."""
        if not self._state.block_open:
            self._write("start", "block_start", samples=samples)

    def block_stop(self, samples: int) -> None:
        """Log that training pauses or ends after ``samples``, if a block is open."""
        if self._state.block_open:
            self._write("end", "block_stop", samples=samples)

    def tracked_stats(self, samples: int, stats: Mapping[str, float]) -> None:
        """Log the values of a step: throughput in samples/s, loss, lr."""
        values = {name: float(value) for name, value in stats.items()}
        self._write("event", "tracked_stats", values, samples=samples)

    def eval_start(self, samples: int) -> None:
        """Log the start of an evaluation, which ends an open block."""
        self.block_stop(samples)
        self._write("start", "eval_start", samples=samples)

    def eval_accuracy(self, samples: int, loss: float, used: int | None = None) -> None:
        """Log the evaluation loss after ``samples``, in the open division under a second key too.

        ``used`` is the number of validation samples in the mean, None for the whole set.
        """
        used = self._eval_samples if used is None else used
        if "eval_samples" not in self._state.keys:
            self._write("event", "eval_samples", used)
        self._write("event", "eval_accuracy", float(loss), samples=samples, eval_samples=used)
        if not self._is_closed:
            self._write("event", "averaged_validation_loss", float(loss), samples=samples)

    def saved(self, step: int) -> None:
        """Chain the complete checkpoint of ``step``; thread-safe."""
        if self.chain is not None and self._path is not None:
            checkpoint_saved(self.chain, self._path.parent, step)

    def eval_stop(self, samples: int) -> None:
        self._write("end", "eval_stop", samples=samples)

    def run_stop(self, status: str, samples: int) -> None:
        """Log the end of the run, ``success`` or ``aborted``; later events are not written."""
        self.block_stop(samples)
        self._write("end", "run_stop", samples=samples, status=status)

    def rule_broken(self, violation: Violation, samples: int) -> bool:
        """Log that a rule of the closed division is broken after ``samples``; return whether that is new.

        A run that must be closed is about to end, one of ``division: auto`` is open from here on.
        """
        if not self._is_closed:
            return False
        division = "closed" if self._division == "closed" else "open"
        value = division_value(division, [violation])
        self._write("event", DIVISION_KEY, value, samples=samples)
        return True

    @property
    def _is_closed(self) -> bool:
        return self._begins_closed and DIVISION_KEY not in self._state.keys

    @property
    def _is_finished(self) -> bool:
        return "run_stop" in self._state.keys

    def close(self) -> None:
        if self.chain is not None:
            self.chain.close(self._is_finished)
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _start(self, facts: RunFacts) -> None:
        began, flushed = facts.started, facts.flushed
        if flushed is None or flushed <= began:
            at = began if flushed is None else flushed
            self._write("event", "cache_clear", flushed is not None, at=at)
            self._write("start", "init_start", at=began)
        else:  # another node was later
            self._write("start", "init_start", at=began)
            self._write("event", "cache_clear", True, at=flushed)
        for key, value in init_events(facts):
            self._write("event", key, value)
        if self.chain is not None:
            self._write("event", CHAIN_KEY, {"run": self.chain.run})

    def _resume(self, samples: int, facts: RunFacts) -> None:
        """Log the eval_stop that a killed run did not log, the resume, and the target if it is another one.

        Raises ConfigError if the run must be closed, and has other ranks or nodes than before.
        """
        if self._is_finished:
            return
        before, other = self._state.ranks, _other_ranks(self._state.ranks, facts)
        if other is not None and self._is_closed and self._division == "closed":
            raise ConfigError(DIVISION_FIELD, "closed", f"{other}; {TO_LEAVE}, or auto")
        if (evaluated := self._state.eval_without_stop) is not None:
            self._write("end", "eval_stop", samples=evaluated)
        ranks = {
            **facts.ranks,
            "same_nodes": None if before is None else before.get("nodes") == list(facts.node_marks),
            "micro_batch_size": facts.shares.micro_batch_size,
            "gradient_accumulation_steps": facts.shares.accumulation_steps,
        }
        self._write("event", "run_resumed", ranks, samples=samples)
        target = facts.config.evaluation.target_loss
        if self._state.target not in (UNSET, target):
            self._write("event", TARGET_KEY, target)
        if other is not None:
            self.rule_broken(other, samples)

    def _write(
        self,
        kind: Literal["event", "start", "end"],
        key: str,
        value: object = None,
        samples: int | None = None,
        status: str | None = None,
        eval_samples: int | None = None,
        at: float | None = None,
    ) -> None:
        """Write one event; stack_offset puts the line of the calling method into its metadata."""
        if self._is_finished or self._mllog is None:
            return
        fields = {"status": status, "samples_count": samples, "eval_samples": eval_samples}
        metadata = {name: value for name, value in fields.items() if value is not None}
        time_ms = int((self._now() if at is None else at) * 1000)
        getattr(self._mllog, kind)(key, value, metadata=metadata, time_ms=time_ms, stack_offset=2)
        self._state.update(key, samples, value)
        line = self._lines.take()  # of mllog, in ASCII
        self._save(line, durable=kind == "end")
        self._print(line)

    def _save(self, line: str, durable: bool) -> None:
        """Append ``line`` to the chain, then to the file; ``durable`` also waits until it is on the disk."""
        if self.chain is not None:
            self.chain.line(line, durable)
        if self._path is None or self._file is None:
            return
        with writing(self._path):
            write_whole(self._file, f"{line}\n".encode("latin-1"))
            if durable:
                os.fsync(self._file)

    def _print(self, line: str) -> None:
        """Write ``line`` to stdout; a closed stdout does not stop the training."""
        if not self._stdout:
            return
        try:
            sys.stdout.flush()
            write_whole(_STDOUT, f"{line}\n".encode("latin-1"))
        except OSError:
            self._stdout = False


class _LineCapture(logging.Handler):
    """Captures mllog's lines: mllog writes text and newline separately, we write both with one call."""

    def __init__(self) -> None:
        super().__init__()
        self._captured: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self._captured.append(record.getMessage())

    def take(self) -> str:
        """Return the one line captured since the last call."""
        (line,) = self._captured
        assert line.startswith(":::MLLOG {"), line  # otherwise mllog could not encode a value
        self._captured.clear()
        return line


def _mllogger(handler: logging.Handler) -> Any:
    """Return MLCommons' logger, which gives its lines to ``handler``."""
    from mlperf_logging.mllog.mllog import MLLogger

    logger = logging.Logger("fluxtrain.mlperf")
    logger.addHandler(handler)
    return MLLogger(logger, root_dir=re.escape(_SOURCES))


def _other_ranks(before: Mapping[str, Any] | None, facts: RunFacts) -> Violation | None:
    """Return the rule that a resume on other ranks or nodes than ``before`` breaks."""
    if before is None:
        return None
    now = facts.shares.num_ranks
    if before.get("num_ranks") != now:
        text = f"the run was resumed on {now} ranks, before it had {before.get('num_ranks')}"
        return Violation(SAME_SYSTEM, text)
    if before.get("nodes") != list(facts.node_marks):
        return Violation(SAME_SYSTEM, "the run was resumed on other nodes")
    return None


def _open(path: Path | None) -> int | None:
    if path is None:
        return None
    with writing(path):
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)


def open_log(
    config: RunConfig,
    paths: RunPaths,
    world: World,
    run: RunState,
    fence: Fence,
    shares: BatchShares,
    saved_step: int | None,
    lengths: tuple[int | None, int | None],
    on_head: OnHead,
    closing: ExitStack,
) -> MLPerfLog | None:
    """Open the log of ``run`` until ``closing`` is closed; every rank must call this, None but on rank 0.

    ``saved_step`` is the step of the newest checkpoint; ``lengths`` are those of the data sets, None if these
    are opened after the clock has started. ``on_head`` is called with the heads of the chain. Raises
    FencedError if there is a newer start, whose log would be replaced.
    """
    is_first, environment = world.local_rank == 0, os.environ
    nodes = gather(world)
    marks = tuple(sorted(world.all_gather([node_mark()] if is_first else [])))
    uid = environment.get(ENV_POD_UID) if is_first else None
    pods = tuple(sorted(world.all_gather([uid] if uid else [])))
    started = min(map(float, world.all_gather([repr(paths.started or time.time())])))
    flushed = all_flushed(world, environment)
    if not world.is_main:
        return None
    fence.check()
    loaded = loaded_state(paths.output, run, saved_step)
    log = MLPerfLog.open(
        paths.output / MLPERF_FILE,
        samples=run.samples,
        stdout=paths.mlperf_on_stdout,
        facts=RunFacts(
            config,
            shares,
            *lengths,
            started=started,
            machine=machine_facts(world.size, world.local_size),
            num_nodes=paths.num_nodes,
            node_marks=marks,
            flushed=flushed,
            nodes=nodes,
            pods=pods,
        ),
        open_chain=partial(
            Chain.open,
            paths.output / CHAIN_FILE,
            facts=start_facts(config, fence.start, pods, loaded, environment),
            samples=run.samples,
            on_head=on_head,
        ),
    )
    closing.callback(log.close)
    log.band = reference_band(config)
    if loaded is None and config.initial_weights is not None and log.chain is not None:
        _hash_weights(log.chain, paths.models / config.initial_weights, closing)
    return log


def _hash_weights(chain: Chain, weights: Path, closing: ExitStack) -> None:
    """Hash the initial ``weights`` into ``chain``, while the run trains."""
    stop = threading.Event()
    task = partial(hash_weights, chain, weights, stop)
    thread = threading.Thread(target=task, name="weights-hash", daemon=True)
    thread.start()
    closing.callback(thread.join)
    closing.callback(stop.set)


@dataclass
class LogState:
    """The events of a log so far, and its open intervals."""

    keys: set[str] = field(default_factory=set)
    """Those of all events so far; DIVISION_KEY says that rules of the closed division were broken."""
    digests: object = None
    """Those of the data sets' indices that the log states."""
    target: object = UNSET
    """The evaluation loss that ends the run, as the log states it."""
    block_open: bool = False
    ranks: dict[str, Any] | None = None
    """The ranks and nodes of the last start, None if no line has them."""
    eval_without_stop: int | None = None
    """Samples at an evaluation that has its loss but no eval_stop."""

    def update(self, key: str, samples: int | None = None, value: object = None) -> None:
        self.keys.add(key)
        if key in (RANKS_KEY, "run_resumed") and isinstance(value, dict):
            self.ranks = value
        if key in ("block_start", "block_stop"):
            self.block_open = key == "block_start"
        elif key in ("eval_accuracy", "eval_stop"):
            self.eval_without_stop = samples if key == "eval_accuracy" else None
        if key == DATA_KEY:
            self.digests = value
        if key == TARGET_KEY:
            self.target = value


def lines_until(path: Path, samples: int, config: RunConfig) -> list[LogLine]:
    """Return the lines of the log at ``path`` that a run resuming at ``samples`` keeps.

    No lines if the run has no checkpoint and never logged run_start: it starts over.
    """
    valid = [line for line in read_lines(path) if not line.fault] if path.exists() else []
    lines = list(takewhile(lambda line: (line.samples or 0) <= samples, valid))
    if samples == 0 and not any(line.key == "run_start" for line in lines):
        return []
    if _has_more_steps(lines, samples, config):
        lines = [line for line in lines if line.key != "run_stop"]
    starts = [i for i, line in enumerate(lines) if line.key == "eval_start"]
    if starts and not any(line.key == "eval_accuracy" for line in lines[starts[-1] :]):
        del lines[starts[-1]]
    return lines


def rewrite(path: Path, lines: Iterable[LogLine]) -> None:
    """Replace the file by ``lines`` atomically: ranks that were left behind write to the file before."""
    content = "".join(f"{line.text}\n" for line in lines).encode("latin-1")
    with atomic_write_by_several(path) as partial:
        partial.write_bytes(content)
        sync(partial)


def _has_more_steps(lines: list[LogLine], samples: int, config: RunConfig) -> bool:
    """Return whether a run that had ended was given more steps, so that its ``run_stop`` is removed."""
    target = config.evaluation.target_loss
    losses = [line.value for line in lines if line.key == "eval_accuracy"]
    if target is not None and losses and isinstance(losses[-1], float) and losses[-1] <= target:
        return False
    return samples < config.schedule.steps * config.schedule.global_batch_size
