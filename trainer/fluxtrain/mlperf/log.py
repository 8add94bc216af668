"""The MLPerf log of one run: MLCommons' ``mllog`` makes the lines, each is written whole and at once.

One whole log goes to the file and to stdout, whatever restarts lie between: a resumed run first repeats
the earlier lines on its own stdout, then both go on. Only rank 0 opens one; ``MLPerfLog(None, False)`` is
silent.
"""

from __future__ import annotations

import logging
import os
import re
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from mlperf_logging.mllog.mllog import MLLogger

from fluxtrain.errors import StorageError
from fluxtrain.mlperf.facts import RunFacts, statements
from fluxtrain.mlperf.history import LogState, kept_lines, rewrite

_SOURCES = str(Path(__file__).parents[2])  # cut from metadata.file: no machine's paths in the log
_STDOUT = 1


class MLPerfLog:
    """Writes one method's worth of lines for each thing that happens in a run."""

    def __init__(
        self, path: Path | None, stdout: bool, now: Callable[[], float] = time.time
    ) -> None:
        """Write to ``path`` and to stdout, as far as they are wanted; ``now`` gives Unix time."""
        self._path, self._stdout, self._now = path, stdout, now
        self._state = LogState()
        self._open_division, self._eval_samples = False, 0
        self._lines = _Lines()
        logger = logging.Logger("fluxtrain.mlperf")
        logger.addHandler(self._lines)
        self._mllog = MLLogger(logger, root_dir=re.escape(_SOURCES))
        self._file = _opened(path)

    @classmethod
    def open(
        cls,
        path: Path | None,
        samples: int,
        stdout: bool,
        facts: RunFacts,
        now: Callable[[], float] = time.time,
    ) -> MLPerfLog:
        """Begin the log of a run, or go on with the one at ``path`` after ``samples``.

        Later events and torn lines are cut off the file. Where the run's earlier lines are lost, no new
        beginning is invented: the log goes on without one and the checker will refuse it. Raises
        StorageError where the file cannot be read or written.
        """
        try:
            kept = [] if path is None else kept_lines(path, samples, facts.config)
            if path is not None:
                rewrite(path, kept)
        except OSError as error:
            raise StorageError(f"{path}: cannot be read or written ({error.strerror})") from None
        log = cls(path, stdout, now)
        log._open_division = facts.config.logging.mlperf.division == "open"
        log._eval_samples = facts.eval_samples
        for line in kept:
            log._state.note(line.key, line.samples)
            log._say(line.text)
        if log._state.run_started or samples:
            log._go_on(samples, facts)
        else:
            log._begin(facts)
        return log

    def ready(self) -> None:
        """Everything is built: the initialisation ends and the run's clock starts, once in a run."""
        if self._state.begun and not self._state.run_started:
            self._write(self._mllog.end, "init_stop")
            self._write(self._mllog.start, "run_start")

    def block_start(self, samples: int) -> None:
        """Training goes on after ``samples``; says nothing where a block is open already."""
        if not self._state.block_open:
            self._write(self._mllog.start, "block_start", samples=samples)

    def block_stop(self, samples: int) -> None:
        """Training pauses or ends after ``samples``; says nothing where no block is open."""
        if self._state.block_open:
            self._write(self._mllog.end, "block_stop", samples=samples)

    def tracked_stats(self, samples: int, stats: Mapping[str, float]) -> None:
        """Numbers of a logged step: throughput in samples/s, loss, lr."""
        values = {name: float(value) for name, value in stats.items()}
        self._write(self._mllog.event, "tracked_stats", values, samples=samples)

    def eval_start(self, samples: int) -> None:
        """An evaluation begins."""
        self._write(self._mllog.start, "eval_start", samples=samples)

    def eval_accuracy(self, samples: int, loss: float, used: int | None = None) -> None:
        """The evaluation loss after ``samples``; the open division has a second name for it.

        ``used`` are the validation samples that it is the mean of, None for the whole set.
        """
        used = self._eval_samples if used is None else used
        if not self._state.eval_samples_stated:
            self._write(self._mllog.event, "eval_samples", used)
        self._write(
            self._mllog.event, "eval_accuracy", float(loss), samples=samples, eval_samples=used
        )
        if self._open_division:
            self._write(self._mllog.event, "averaged_validation_loss", float(loss), samples=samples)

    def eval_stop(self, samples: int) -> None:
        """The evaluation is over."""
        self._write(self._mllog.end, "eval_stop", samples=samples)

    def run_stop(self, status: str, samples: int) -> None:
        """The run is over, ``success`` or ``aborted``: its clock stops, and nothing is written any more."""
        self._write(self._mllog.end, "run_stop", samples=samples, status=status)

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _begin(self, facts: RunFacts) -> None:
        self._write(self._mllog.event, "cache_clear", facts.caches_cleared, at=facts.started)
        self._write(self._mllog.start, "init_start", at=facts.started)
        for key, value in statements(facts):
            self._write(self._mllog.event, key, value)

    def _go_on(self, samples: int, facts: RunFacts) -> None:
        """Close what a kill left open, and tell of the resume: who reads the log shall know of it."""
        if self._state.finished:
            return
        if (evaluated := self._state.eval_without_stop) is not None:
            self._write(self._mllog.end, "eval_stop", samples=evaluated)
        division = {
            "num_ranks": facts.shares.num_ranks,
            "micro_batch_size": facts.shares.micro_batch_size,
            "gradient_accumulation_steps": facts.shares.accumulation_steps,
        }
        self._write(self._mllog.event, "run_resumed", division, samples=samples)

    def _write(
        self,
        kind: Callable[..., None],
        key: str,
        value: object = None,
        samples: int | None = None,
        status: str | None = None,
        eval_samples: int | None = None,
        at: float | None = None,
    ) -> None:
        """Write one event; the calling method's line goes into its metadata."""
        if self._state.finished:
            return
        facts = {"status": status, "samples_count": samples, "eval_samples": eval_samples}
        metadata = {name: fact for name, fact in facts.items() if fact is not None}
        time_ms = int((self._now() if at is None else at) * 1000)
        kind(key, value, metadata=metadata, time_ms=time_ms, stack_offset=2)
        self._state.note(key, samples)
        line = self._lines.take()
        self._save(line, durable=kind == self._mllog.end)
        self._say(line)

    def _save(self, line: str, durable: bool) -> None:
        """Append ``line`` to the file; the ends of intervals also reach the disk before the run goes on."""
        if self._file is None:
            return
        try:
            _write_whole(self._file, line)
            if durable:
                os.fsync(self._file)
        except OSError as error:
            raise StorageError(f"{self._path}: cannot be written ({error.strerror})") from None

    def _say(self, line: str) -> None:
        """Write ``line`` to stdout in one piece; a reader who left is no reason to stop training."""
        if not self._stdout:
            return
        try:
            sys.stdout.flush()
            _write_whole(_STDOUT, line)
        except OSError:
            self._stdout = False


class _Lines(logging.Handler):
    """Catches the lines that mllog makes: it would write text and newline apart, we write both at once."""

    def __init__(self) -> None:
        super().__init__()
        self._caught: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep the line."""
        self._caught.append(record.getMessage())

    def take(self) -> str:
        """Return the one line made since the last call."""
        (line,) = self._caught
        assert line.startswith(":::MLLOG {"), line  # else mllog could not encode a value of ours
        self._caught.clear()
        return line


def _opened(path: Path | None) -> int | None:
    if path is None:
        return None
    try:
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    except OSError as error:
        raise StorageError(f"{path}: cannot be written ({error.strerror})") from None


def _write_whole(file: int, line: str) -> None:
    """Write ``line`` and its newline with one call: no other writer's text can come between."""
    rest = f"{line}\n".encode("latin-1")  # mllog's lines are ASCII
    while rest:
        rest = rest[os.write(file, rest) :]
