"""The trials of a benchmark: what they measure, how all ranks run them, and their results.

The ranks use no GPU: all its memory is that of the trials' processes. Each trial has processes of its
own, so that one that ran out of memory leaves nothing behind; if one ends in error, those of the other
ranks, which would wait for it for ever, are killed. Results are kept after each trial, so that a
benchmark that is stopped goes on where it was.
"""

from __future__ import annotations

import csv
import json
import math
import os
import platform
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields, replace
from enum import IntEnum
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import torch

from fluxtrain.benchmark.trial import EXIT_OUT_OF_MEMORY, FACTS_FILE
from fluxtrain.contract.model_base import validate
from fluxtrain.contract.process import (
    ENV_FATAL_ERROR,
    ENV_NODE_PROGRESS,
    ENV_OUTPUT,
    ENV_SNAPSHOTS,
    ENV_TERMINATION_MESSAGE,
    IMPORT,
    METRICS_FILE,
    RunPaths,
)
from fluxtrain.contract.run.config import RunConfig
from fluxtrain.contract.run.data import DataConfig
from fluxtrain.contract.run.resolve import merge
from fluxtrain.contract.run.setting import Setting, sizes_of
from fluxtrain.errors import EXIT_OK, ConfigError, DataError
from fluxtrain.parallel.compile import compiles
from fluxtrain.parallel.distributed import World
from fluxtrain.report.endpoint import Endpoint
from fluxtrain.report.progress import read_ranks
from fluxtrain.report.records import Record, read_records
from fluxtrain.runtime.devices import num_visible
from fluxtrain.runtime.files import atomic_write
from fluxtrain.state.free_memory import free_bytes

NUM_PARTS = 5
"""Parts of a measurement: their median is its result, their range its spread."""
_FIT_STEPS = 3
"""Steps that show whether a batch fits: the optimizer's memory is there from the first."""


@dataclass(frozen=True)
class Trial:
    """A few training steps in processes of their own."""

    setting: Setting
    micro_batch_size: int
    """Samples per rank and step."""
    num_ranks: int
    global_batch_size: int
    """Samples per step of all ranks."""
    is_measured: bool
    """False: it only shows whether the batch fits."""

    def __str__(self) -> str:
        ranks = "1 rank" if self.num_ranks == 1 else f"{self.num_ranks} ranks"
        if self.has_equal_batches:
            return f"{self.setting}, {ranks}, batch {self.micro_batch_size} each"
        return f"{self.setting}, {ranks}, batch {self.global_batch_size} of all"

    @property
    def has_equal_batches(self) -> bool:
        """Return whether each rank computes one whole micro batch in a step."""
        return self.global_batch_size == self.micro_batch_size * self.num_ranks

    def part_steps(self, config: RunConfig) -> int:
        """Return the steps of one part of the measurement; with buckets each size is in it equally often."""
        if not self.is_measured:
            return _FIT_STEPS
        sizes = self.setting.num_sizes
        return math.ceil(max(1, config.benchmark.steps // NUM_PARTS) / sizes) * sizes

    def num_steps(self, config: RunConfig) -> int:
        parts = NUM_PARTS if self.is_measured else 1
        steps = config.benchmark.warmup_steps if self.is_measured else 0
        return self.part_steps(config) * (math.ceil(steps / self.part_steps(config)) + parts)

    def config(self, config: RunConfig) -> RunConfig:
        """Return the training that this trial takes the first steps of; it saves and evaluates nothing."""
        setting, size = self.setting, self.micro_batch_size
        changes = {
            "task": "train",
            "data": {
                "image_size": setting.image_size,
                "text_length": setting.text_length,
                "order": config.data.order if config.data.buckets is None else "sequential",
            },
            "precision": {"compute": setting.compute, "fp8": setting.fp8},
            "parallel": {
                "micro_batch_size": size,
                "activation_checkpointing": setting.activation_checkpointing,
                "compile": setting.compile,
            },
            "schedule": {
                "global_batch_size": self.global_batch_size,
                "steps": self.num_steps(config) + 1,  # the last step would save a checkpoint
            },
            "evaluation": {"every_samples": 0, "at_start": False, "at_end": False},
            "checkpoint": {"every_steps": 0, "memory_every_steps": 0},
            "sampling": {"every_steps": 0, "at_end": False},
            "preflight": None,
            "logging": {
                "every_steps": self.part_steps(config),
                "metrics_port": 0,
                "ledger": False,
                "tensorboard": False,
                "wandb": None,
            },
        }
        return validate(RunConfig, merge(config.model_dump(mode="json"), changes), "spec.run")


def settings(config: RunConfig) -> Iterator[Setting]:
    """Yield every combination of the lists in ``config.benchmark``; an empty one has the run's value."""
    swept, own = config.benchmark, Setting.of(config)
    compiled: list[bool | None] = [*swept.compile] or [own.compile]
    for values in product(
        swept.image_sizes or [own.image_size],
        swept.text_lengths or [own.text_length],
        swept.compute or [own.compute],
        swept.fp8 or [own.fp8],
        swept.activation_checkpointing or [own.activation_checkpointing],
        compiled,
    ):
        setting = Setting(*values)
        data = merge(config.data.model_dump(mode="json"), {"image_size": setting.image_size})
        num_sizes, largest = sizes_of(DataConfig.model_validate(data))
        yield replace(setting, num_sizes=num_sizes, largest=largest)


def facts(config: RunConfig, world: World) -> dict[str, Any]:
    has_gpu = world.device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(world.device) if has_gpu else platform.machine(),
        "device_memory_bytes": (
            torch.cuda.get_device_properties(world.device).total_memory if has_gpu else None
        ),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "rocm": torch.version.hip,
        "compiled": compiles(config.parallel, world.device),
    }


_OF_THE_AGENT = ("TORCHELASTIC_ERROR_FILE", ENV_FATAL_ERROR, ENV_TERMINATION_MESSAGE, ENV_SNAPSHOTS)
"""Files by which a rank tells its agent about itself; the processes of trials have none."""
_OWN_STORE = {"TORCHELASTIC_USE_AGENT_STORE": "False"}
"""Torch's variable: rank 0 of the trial opens a store for its process group."""
_LOG_BYTES = 1 << 16


class Status(IntEnum):
    """How the process of a rank is; the higher of two ranks is that of both."""

    DONE = 0
    RUNNING = 1
    FAILED = 2
    OUT_OF_MEMORY = 3


class TrialProcess:
    """A process that takes training steps as one rank of a process group of its own."""

    def __init__(
        self,
        order: Mapping[str, Any],
        variables: Mapping[str, str],
        folder: Path,
        endpoint: Endpoint,
    ) -> None:
        """Start it with ``order`` on stdin; it writes to ``folder``. What it gets done is progress here."""
        self._endpoint = endpoint
        endpoint.set_phase(IMPORT)
        self._progress = tempfile.TemporaryDirectory()
        self._progressed = 0.0
        self._log = folder / f"rank_{variables['RANK']}.log"
        self._deadline = time.monotonic() + float(order["seconds"])
        self._is_late = False
        environment = {k: v for k, v in os.environ.items() if k not in _OF_THE_AGENT}
        environment |= {**_OWN_STORE, **variables, ENV_OUTPUT: str(folder)}
        environment[ENV_NODE_PROGRESS] = self._progress.name
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "fluxtrain.benchmark.trial"],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
            )
        assert self._process.stdin is not None
        with self._process.stdin as stdin:
            stdin.write(json.dumps(order).encode())

    def status(self) -> Status:
        """Return how it is at present, and report its progress."""
        self._report()
        code = self._process.poll()
        if code is None:
            self._is_late = time.monotonic() > self._deadline
            return Status.FAILED if self._is_late else Status.RUNNING
        if code == EXIT_OK:
            return Status.DONE
        # the kernel kills a process with SIGKILL if the machine's memory is short
        is_out = code in (EXIT_OUT_OF_MEMORY, -9)
        return Status.OUT_OF_MEMORY if is_out else Status.FAILED

    def end(self) -> None:
        """Kill it if it runs, and wait until it is gone, and its memory with it."""
        self._process.kill()
        self._process.wait()
        self._progress.cleanup()

    def reason(self) -> str:
        """Return why it failed: the last line of its log."""
        if self._is_late:
            return "it took longer than benchmark.trial_seconds"
        with self._log.open("rb") as log:
            log.seek(max(0, self._log.stat().st_size - _LOG_BYTES))
            lines = log.read().decode(errors="replace").strip().splitlines()
        return f"{lines[-1] if lines else 'it printed nothing'} ({self._log})"

    def _report(self) -> None:
        for rank in read_ranks({ENV_NODE_PROGRESS: self._progress.name}):
            if rank.progressed > self._progressed:
                self._progressed = rank.progressed
                self._endpoint.set_phase(rank.phase)
                self._endpoint.alive()


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
        return self.status == Status.DONE

    @property
    def ending(self) -> str:
        """Return how it ended, for people."""
        if self.status == Status.FAILED:
            return f"failed: {self.reason}"
        return "fits" if self.fits else "out of memory"

    def may_end_otherwise(self, has_same_memory: bool) -> bool:
        """Return whether another start should run the trial again: one that failed by something else."""
        if self.status == Status.OUT_OF_MEMORY:
            return not has_same_memory
        return not self.fits

    def row(self) -> dict[str, Any]:
        trial, measured = self.trial, self.measurement
        return {
            **asdict(trial.setting),
            "micro_batch_size": trial.micro_batch_size,
            "num_ranks": trial.num_ranks,
            "global_batch_size": trial.global_batch_size,
            "status": self.status.name.lower().replace("_", " "),
            **{it.name: getattr(measured, it.name, None) for it in fields(Measurement)},
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
            values = json.loads(path.read_text(encoding="utf-8"))
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
        entries = [{**asdict(each), "status": each.status.name} for each in self._results.values()]
        with atomic_write(self._folder / JSON_FILE) as partial:
            content = {"run": self._run, _MEMORY: self._memory, "trials": entries}
            partial.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        with (
            atomic_write(self._folder / CSV_FILE) as partial,
            partial.open("w", newline="", encoding="utf-8") as file,
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
        return len(self._results)


def _decode(entry: dict[str, Any]) -> Result:
    trial, measured = entry["trial"], entry["measurement"]
    return Result(
        Trial(**{**trial, "setting": Setting(**trial["setting"])}),
        Status[entry["status"]],
        entry["reason"],
        Measurement(**measured) if measured else None,
    )


FOLDER = "trials"
"""Folder in the output with the logs of each trial."""
_POLL_SECONDS = 0.3
_FREE_PART = 0.8
"""Part of the free memory that the ranks of a node without GPUs may take."""


@dataclass(frozen=True)
class Outcome:
    """How a trial ended, and what it measured."""

    status: Status
    reason: str
    """Why it failed; empty if it did not."""
    records: list[Record]
    """The records of its metrics.jsonl."""
    facts: dict[str, Any]
    """Of its device."""


class TrialRunner:
    """All ranks; rank 0 calls `run` and `dismiss`, the others `follow`."""

    def __init__(
        self, config: RunConfig, paths: RunPaths, world: World, endpoint: Endpoint
    ) -> None:
        self._config, self._world, self._endpoint = config, world, endpoint
        self._folder = paths.output / FOLDER

    def run(self, trial: Trial) -> Outcome:
        """Run ``trial`` on all its ranks and return how it ended."""
        numbers = [int(path.name) for path in self._folder.glob("[0-9]*") if path.name.isdigit()]
        folder = self._folder / f"{max(numbers, default=0) + 1:04d}"
        folder.mkdir(parents=True)
        with socket.create_server(("", 0)) as server:
            port = int(server.getsockname()[1])
        order = {
            "config": trial.config(self._config).model_dump(mode="json"),
            "steps": trial.num_steps(self._config),
            "turns": trial.part_steps(self._config) if trial.is_measured else 0,
            "seconds": self._config.benchmark.trial_seconds,
            "num_ranks": trial.num_ranks,
            "folder": str(folder),
            "port": port,
        }
        self._broadcast(json.dumps(order))
        status, reason = self._take_part(order)
        facts = folder / FACTS_FILE
        return Outcome(
            status,
            reason,
            read_records(folder / METRICS_FILE),
            json.loads(facts.read_text(encoding="utf-8")) if facts.exists() else {},
        )

    def follow(self) -> None:
        """Take part in the trials that rank 0 orders, until it is done."""
        while text := self._broadcast(""):
            self._take_part(json.loads(text))

    def dismiss(self) -> None:
        """Tell the other ranks that there are no more trials."""
        self._broadcast("")

    def _broadcast(self, text: str) -> str:
        return self._world.from_main(lambda: text)

    def _take_part(self, order: dict[str, Any]) -> tuple[Status, str]:
        """Run this rank's process, if it has one; return how those of all ranks ended, and why."""
        process = None
        if self._world.rank < order["num_ranks"]:
            order = {**order, "memory_bytes": self._memory_limit()}
            variables = self._variables(order["num_ranks"], order["port"])
            process = TrialProcess(order, variables, Path(order["folder"]), self._endpoint)
        try:
            status, own = self._wait(process)
        finally:
            if process is not None:
                process.end()
        is_cause = process is not None and own == status != Status.DONE
        reasons = self._world.all_gather([process.reason()] if process and is_cause else [])
        return status, reasons[0] if reasons else ""

    def _wait(self, process: TrialProcess | None) -> tuple[Status, Status]:
        """Wait until all ranks are done or one is not well; return that, and how this rank is."""
        while True:
            own = Status.DONE if process is None else process.status()
            [*statuses] = (Status(int(s)) for [s] in self._world.gather_numbers([float(own)]))
            if max(statuses) != Status.RUNNING:
                return max(statuses), own
            time.sleep(_POLL_SECONDS)

    def _variables(self, num_ranks: int, port: int) -> dict[str, str]:
        world = self._world
        local_size = min(world.local_size, num_ranks - world.node * world.local_size)
        return {
            "RANK": str(world.rank),
            "LOCAL_RANK": str(world.local_rank),
            "WORLD_SIZE": str(num_ranks),
            "LOCAL_WORLD_SIZE": str(local_size),
            "GROUP_WORLD_SIZE": str(-(-num_ranks // world.local_size)),
            "MASTER_ADDR": os.environ.get("MASTER_ADDR", "127.0.0.1"),
            "MASTER_PORT": str(port),
        }

    def _memory_limit(self) -> int:
        """Return the most bytes of a process without a GPU; 0 if there are GPUs."""
        if num_visible():
            return 0
        given = self._config.benchmark.memory_gib
        if given is not None:
            return int(given * (1 << 30))
        return int(_FREE_PART * free_bytes() / self._world.local_size)
