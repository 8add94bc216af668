"""The results of a benchmark: kept after each trial, so that one that is stopped goes on where it was."""

from __future__ import annotations

import csv
import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from statistics import median
from typing import Any

from fluxtrain.benchmark.crew import Outcome
from fluxtrain.benchmark.process import Status
from fluxtrain.benchmark.sweep import NUM_PARTS, Trial
from fluxtrain.contract.run.config import RunConfig
from fluxtrain.errors import ConfigError, DataError
from fluxtrain.files import atomic_write
from fluxtrain.setting import Setting

JSON_FILE, CSV_FILE = "benchmark.json", "benchmark.csv"
_FREE_SECTIONS = {"benchmark", "logging"}
"""Sections of the config that may change before a benchmark goes on."""
_MEMORY = "memory_gib"
"""What a trial that was out of memory had: with another value it is run again."""


@dataclass(frozen=True)
class Measurement:
    """Speed and memory of a trial, of rank 0 where ranks differ; medians over the trial's parts."""

    images_per_second_per_gpu: float
    slowest: float
    """Images/s per GPU in the slowest part."""
    fastest: float
    """Images/s per GPU in the fastest part."""
    step_seconds: float
    tflops_per_gpu: float
    """Model TFLOP/s; recomputation is not counted."""
    mfu: float | None
    mfu_peak: str
    """The dense peak that MFU is a fraction of, or "unknown"."""
    memory_allocated_bytes: int
    memory_reserved_bytes: int | None
    data_wait_fraction: float
    """Part of the time in which it waited for data."""
    device: str
    device_memory_bytes: int | None
    """None without a GPU."""
    compiled: bool

    @staticmethod
    def of(outcome: Outcome, num_ranks: int) -> Measurement:
        """Return what the last parts of ``outcome`` measured."""
        records = [{"seconds": 0.0}, *outcome.records]
        first, parts = records[-NUM_PARTS - 1], records[-NUM_PARTS:]
        last = parts[-1]
        rates = [part["samples_per_second"] / num_ranks for part in parts]
        mfus = [part["mfu"] for part in parts if part["mfu"] is not None]
        seconds = last["seconds"] - first["seconds"]
        return Measurement(
            images_per_second_per_gpu=median(rates),
            slowest=min(rates),
            fastest=max(rates),
            step_seconds=last["samples"] / last["step"] / (median(rates) * num_ranks),
            tflops_per_gpu=median(part["tflops_per_gpu"] for part in parts),
            mfu=median(mfus) if mfus else None,
            mfu_peak=last["mfu_peak"],
            memory_allocated_bytes=last["memory_allocated_bytes"],
            memory_reserved_bytes=last["memory_reserved_bytes"],
            data_wait_fraction=sum(part["data_wait_seconds"] for part in parts) / seconds,
            device=outcome.facts["device"],
            device_memory_bytes=outcome.facts["device_memory_bytes"],
            compiled=outcome.facts["compiled"],
        )


@dataclass(frozen=True)
class Result:
    """How a trial ended."""

    trial: Trial
    status: Status
    reason: str
    """Why it failed; empty if it did not."""
    measurement: Measurement | None
    """None if it only shows whether the batch fits, or did not end well."""

    @property
    def fits(self) -> bool:
        """Return whether the batch fits."""
        return self.status == Status.DONE

    @property
    def ending(self) -> str:
        """Return how it ended, for people."""
        if self.fits:
            return "fits"
        return f"{self.status.name.lower().replace('_', ' ')}: {self.reason}"

    def may_end_otherwise(self, has_same_memory: bool) -> bool:
        """Return whether another start should run the trial again: one that failed by something else."""
        if self.status == Status.OUT_OF_MEMORY:
            return not has_same_memory
        return not self.fits

    def row(self) -> dict[str, Any]:
        """Return it as a row of the table of all measurements."""
        trial, measured = self.trial, self.measurement
        return {
            **asdict(trial.setting),
            "micro_batch_size": trial.micro_batch_size,
            "num_ranks": trial.num_ranks,
            "global_batch_size": trial.global_batch_size,
            "status": self.status.name.lower().replace("_", " "),
            **(
                asdict(measured)
                if measured
                else dict.fromkeys(field.name for field in fields(Measurement))
            ),
            "reason": self.reason,
        }


class Results:
    """The trials of a benchmark so far, in ``benchmark.json`` and ``benchmark.csv``."""

    def __init__(self, folder: Path, config: RunConfig) -> None:
        """Read what is in ``folder``.

        Raises ConfigError if it is of another config, DataError if it is unreadable.
        """
        self._folder, self._memory = folder, config.benchmark.memory_gib
        values = config.model_dump(mode="json")
        self._run = {key: value for key, value in values.items() if key not in _FREE_SECTIONS}
        self._results: dict[Trial, Result] = {}
        path = folder / JSON_FILE
        if path.exists():
            self._results = {result.trial: result for result in self._read(path)}

    def _read(self, path: Path) -> list[Result]:
        try:
            values = json.loads(path.read_text())
            if values["run"] != self._run:
                text = "the results there are of another run; use another folder"
                raise ConfigError("--output", str(path), text)
            found = [_decode(entry) for entry in values["trials"]]
            has_same_memory = values.get(_MEMORY, self._memory) == self._memory
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(f"{path}: not the results of a benchmark ({error!r})") from None
        return [result for result in found if not result.may_end_otherwise(has_same_memory)]

    def get(self, trial: Trial) -> Result | None:
        """Return how ``trial`` ended, None if it was not run yet."""
        return self._results.get(trial)

    def add(self, result: Result) -> None:
        """Add ``result`` and write the files anew."""
        self._results[result.trial] = result
        entries = [_encode(each) for each in self._results.values()]
        with atomic_write(self._folder / JSON_FILE) as partial:
            content = {"run": self._run, _MEMORY: self._memory, "trials": entries}
            partial.write_text(json.dumps(content, indent=1) + "\n")
        with (
            atomic_write(self._folder / CSV_FILE) as partial,
            partial.open("w", newline="") as file,
        ):
            rows = [each.row() for each in self.measured]
            writer = csv.DictWriter(file, list(result.row()))
            writer.writeheader()
            writer.writerows(rows)

    @property
    def measured(self) -> list[Result]:
        """Return the trials that measure, in the order in which they were run."""
        return [result for result in self._results.values() if result.trial.is_measured]

    @property
    def last(self) -> Result | None:
        """Return the trial that was run last, None before the first."""
        return next(reversed(self._results.values()), None)

    @property
    def num_trials(self) -> int:
        """Return the number of trials so far."""
        return len(self._results)


def _encode(result: Result) -> dict[str, Any]:
    measured = result.measurement
    return {
        "trial": asdict(result.trial),
        "status": result.status.name,
        "reason": result.reason,
        "measurement": asdict(measured) if measured else None,
    }


def _decode(entry: dict[str, Any]) -> Result:
    trial, measured = entry["trial"], entry["measurement"]
    return Result(
        Trial(**{**trial, "setting": Setting(**trial["setting"])}),
        Status[entry["status"]],
        entry["reason"],
        Measurement(**measured) if measured else None,
    )
