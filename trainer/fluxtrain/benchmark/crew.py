"""Runs trials on all ranks: rank 0 orders each one, and every rank runs its process.

The ranks themselves use no GPU: all its memory is the processes'. Each trial has processes of its own, so
that one that ran out of memory leaves nothing behind; if one ends in error, those of the other ranks, which
would wait for it for ever, are killed.
"""

from __future__ import annotations

import json
import os
import socket
import time
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fluxtrain.benchmark.process import Status, TrialProcess
from fluxtrain.benchmark.sweep import Trial
from fluxtrain.benchmark.trial import FACTS_FILE
from fluxtrain.contract.launch import METRICS_FILE, RunPaths
from fluxtrain.contract.run.config import RunConfig
from fluxtrain.distributed import World
from fluxtrain.gpus import num_visible
from fluxtrain.report.endpoint import Endpoint
from fluxtrain.report.records import Record, read_records
from fluxtrain.snapshots.free_memory import free_bytes

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


class Crew:
    """All ranks; rank 0 calls `run` and `dismiss`, the others `follow`."""

    def __init__(
        self, config: RunConfig, paths: RunPaths, world: World, endpoint: Endpoint
    ) -> None:
        """Take part as this rank of ``world``."""
        self._config, self._world, self._endpoint = config, world, endpoint
        self._folder = paths.output / FOLDER

    def run(self, trial: Trial) -> Outcome:
        """Run ``trial`` on all its ranks and return how it ended."""
        folder = self._next_folder()
        order = {
            "config": trial.config(self._config).model_dump(mode="json"),
            "steps": trial.num_steps(self._config),
            "turns": trial.part_steps(self._config) if trial.is_measured else 0,
            "seconds": self._config.benchmark.trial_seconds,
            "num_ranks": trial.num_ranks,
            "folder": str(folder),
            "port": _free_port(),
        }
        self._broadcast(json.dumps(order))
        status, reason = self._take_part(order)
        facts = folder / FACTS_FILE
        return Outcome(
            status,
            reason,
            read_records(folder / METRICS_FILE),
            json.loads(facts.read_text()) if facts.exists() else {},
        )

    def follow(self) -> None:
        """Take part in the trials that rank 0 orders, until it is done."""
        while text := self._broadcast(""):
            self._take_part(json.loads(text))

    def dismiss(self) -> None:
        """Tell the other ranks that there are no more trials."""
        self._broadcast("")

    def _broadcast(self, text: str) -> str:
        return self._world.broadcast([text])[0]

    def _next_folder(self) -> Path:
        numbers = [int(path.name) for path in self._folder.glob("[0-9]*") if path.name.isdigit()]
        folder = self._folder / f"{max(numbers, default=0) + 1:04d}"
        folder.mkdir(parents=True)
        return folder

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
        """Return torchrun's variables for this rank among the first ``num_ranks``."""
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


def _free_port() -> int:
    with closing(socket.create_server(("", 0))) as server:
        return int(server.getsockname()[1])
