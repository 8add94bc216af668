"""Agents and their store as the operator's pods run them: either may go, and training goes on."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest

from fluxtrain.contract.launch import ENV_CONFIG, Places
from fluxtrain.contract.resolve import resolve
from fluxtrain.errors import EXIT_OK, EXIT_STOPPED, EXIT_STORAGE, EXIT_USAGE

Process = subprocess.Popen[bytes]
SLOW = {
    "preset": "micro",
    "schedule": {"steps": 400},
    "checkpoint": {"every_steps": 10},
    "evaluation": {"every_samples": 0, "at_end": False},
    "logging": {"every_steps": 1, "metrics_port": 0, "ledger": True},
}


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


class Cluster:
    """A store and agents on this machine, each a process group of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.port, self.job = folder, free_port(), uuid4().hex
        self.processes: list[Process] = []
        config = resolve(SLOW)
        (folder / "config.json").write_text(config.model_dump_json())

    def start(self, *arguments: str, **environment: str) -> Process:
        with (self.folder / f"{arguments[0]}_{len(self.processes)}.log").open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "fluxtrain.cli", *arguments],
                env={**os.environ, **environment, "OMP_NUM_THREADS": "1"},
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self.processes.append(process)
        return process

    def store(self) -> Process:
        return self.start("rendezvous", f"--port={self.port}")

    def agent(self) -> Process:
        places = Places(self.folder / "output", self.folder, self.folder)
        quick = "is_host=0,last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=3"
        return self.start(
            "agent",
            **places.environment(),
            **{ENV_CONFIG: str(self.folder / "config.json")},
            PET_NNODES="1:2",
            PET_NPROC_PER_NODE="1",
            PET_RDZV_BACKEND="c10d",
            PET_RDZV_ENDPOINT=f"127.0.0.1:{self.port}",
            PET_RDZV_ID=self.job,
            PET_RDZV_CONF=quick,
            PET_LOCAL_ADDR="127.0.0.1",
            PET_MAX_RESTARTS="100",
            PET_MONITOR_INTERVAL="0.2",
            TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1",
        )

    def step(self) -> int:
        try:
            lines = (self.folder / "output" / "metrics.jsonl").read_text().splitlines()
            return int(json.loads(lines[-1])["step"]) if lines else 0
        except (OSError, ValueError):
            return 0

    def wait_for_step(self, step: int, seconds: float = 120) -> None:
        deadline = time.monotonic() + seconds
        while self.step() < step:
            assert time.monotonic() < deadline, self.logs()
            time.sleep(0.2)

    def logs(self) -> str:
        return "\n".join(
            f"== {path.name}\n{path.read_text()[-2000:]}" for path in self.folder.glob("*.log")
        )


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    (tmp_path / "output").mkdir()
    made = Cluster(tmp_path)
    yield made
    for process in made.processes:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def steps_of(folder: Path) -> list[int]:
    lines = (folder / "output" / "metrics.jsonl").read_text().splitlines()
    return [record["step"] for line in lines if "train_loss" in (record := json.loads(line))]


def test_losing_the_store_or_an_agent_ends_no_training(cluster: Cluster) -> None:
    store, first, second = cluster.store(), cluster.agent(), cluster.agent()
    cluster.wait_for_step(10)
    os.killpg(store.pid, signal.SIGKILL)
    store.wait()
    time.sleep(1)
    cluster.store()
    here = cluster.step()
    cluster.wait_for_step(here + 15)
    os.killpg(second.pid, signal.SIGKILL)
    second.wait()
    here = cluster.step()
    cluster.wait_for_step(here + 15)
    assert first.wait(timeout=240) == EXIT_OK, cluster.logs()
    assert steps_of(cluster.folder) == list(range(1, 401))


def test_a_stop_saves_and_leaves_with_the_agreed_code(cluster: Cluster) -> None:
    cluster.store()
    agent = cluster.agent()
    cluster.wait_for_step(5)
    agent.send_signal(signal.SIGTERM)
    assert agent.wait(timeout=60) == EXIT_STOPPED, cluster.logs()
    assert list((cluster.folder / "output" / "checkpoints").glob("step_*/DONE"))


def test_a_stop_while_there_is_no_store_is_heeded(cluster: Cluster) -> None:
    agent = cluster.agent()
    time.sleep(6)
    agent.send_signal(signal.SIGTERM)
    assert agent.wait(timeout=20) == EXIT_STOPPED, cluster.logs()


def test_what_no_restart_can_help_ends_the_agent_at_once(cluster: Cluster) -> None:
    lost = resolve({**SLOW, "data": {"source": "encoded"}})
    (cluster.folder / "config.json").write_text(lost.model_dump_json())
    cluster.store()
    agent = cluster.agent()
    assert agent.wait(timeout=120) == EXIT_USAGE, cluster.logs()
    assert cluster.logs().count("no encoded data set is here") == 1


def test_a_store_whose_port_is_taken_says_so(cluster: Cluster) -> None:
    with socket.create_server(("0.0.0.0", cluster.port)):
        assert cluster.store().wait(timeout=60) == EXIT_STORAGE
    assert "cannot listen on 0.0.0.0" in cluster.logs()
