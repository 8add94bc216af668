"""Agents and their store as the operator's pods run them: either may go, and training goes on."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from tests.first_process import catches, first_process
from tests.free_ports import free_port

from fluxtrain.contract.launch import ENV_CONFIG, RunPaths
from fluxtrain.contract.run.resolve import merge, resolve
from fluxtrain.errors import EXIT_OK, EXIT_STOPPED, EXIT_STORAGE, EXIT_USAGE

Process = subprocess.Popen[bytes]
SLOW = {
    "preset": "micro",
    "schedule": {"steps": 400},
    "checkpoint": {"every_steps": 10},
    "evaluation": {"every_samples": 0, "at_end": False},
    "logging": {"every_steps": 1, "metrics_port": 0, "ledger": True},
}


PEER = """
import time
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler
settings = dict(is_host=0, last_call_timeout=2, keep_alive_interval=1, keep_alive_max_attempt=3)
where = RendezvousParameters("c10d", "{endpoint}", "{job}", {least}, 2, local_addr="127.0.0.1", **settings)
handler = get_rendezvous_handler(where)
met = handler.next_rendezvous().world_size
"""
OTHERS = """
print("met", met, flush=True)
while not handler.num_nodes_waiting():
    time.sleep(0.1)
"""


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

    def agent(self, read_timeout: int = 60, nodes: str = "1:2", **more: str) -> Process:
        paths = RunPaths(self.folder / "output", self.folder, self.folder)
        quick = "is_host=0,last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=3"
        quick += f",read_timeout={read_timeout}"
        log = self.folder / f"termination_{len(self.processes)}.json"
        log.touch()  # as kubelet does
        return self.start(
            "agent",
            f"--termination-log={log}",
            **paths.environment(),
            **{ENV_CONFIG: str(self.folder / "config.json")},
            PET_NNODES=nodes,
            PET_NPROC_PER_NODE="1",
            PET_RDZV_BACKEND="c10d",
            PET_RDZV_ENDPOINT=f"127.0.0.1:{self.port}",
            PET_RDZV_ID=self.job,
            PET_RDZV_CONF=quick,
            PET_LOCAL_ADDR="127.0.0.1",
            PET_MAX_RESTARTS="100",
            PET_MONITOR_INTERVAL="0.2",
            TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1",
            **more,
        )

    def peer(self, what: str = "", least: int = 1) -> Process:
        """Start what joins the rendezvous as an agent would, and then does ``what``."""
        program = PEER.format(endpoint=f"127.0.0.1:{self.port}", job=self.job, least=least)
        with (self.folder / "peer.log").open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-c", program + what], stdout=log, start_new_session=True
            )
        self.processes.append(process)
        return process

    def step(self) -> int:
        try:
            lines = (self.folder / "output" / "metrics.jsonl").read_text().splitlines()
            return int(json.loads(lines[-1])["step"]) if lines else 0
        except (OSError, ValueError):
            return 0

    def last_words(self) -> list[dict[str, Any]]:
        """Return what agents that have ended left for Kubernetes."""
        texts = [path.read_text() for path in sorted(self.folder.glob("termination_*.json"))]
        return [json.loads(text) for text in texts if text]

    def wait_for_step(self, step: int) -> None:
        self.wait_for(lambda: self.step() >= step)

    def wait_for(self, done: Callable[[], bool], seconds: float = 120) -> None:
        deadline = time.monotonic() + seconds
        while not done():
            assert time.monotonic() < deadline, self.logs()
            time.sleep(0.2)

    def log_of(self, agent: int) -> str:
        return (self.folder / f"agent_{agent}.log").read_text()

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


def losses_of(folder: Path) -> list[float]:
    return [record["train_loss"] for record in records_of(folder)]


def steps_of(folder: Path) -> list[int]:
    return [record["step"] for record in records_of(folder)]


def records_of(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "output" / "metrics.jsonl").read_text().splitlines()
    return [record for line in lines if "train_loss" in (record := json.loads(line))]


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
    (words,) = cluster.last_words()
    assert (words["rank"], words["step"], words["checkpointStep"]) == (0, 400, 400)
    assert words["trainLoss"] == losses_of(cluster.folder)[-1]
    assert 0 < words["trainSecondsBefore"] < words["trainSeconds"]
    assert 0 < words["firstStepTime"] < words["lastStepTime"]
    assert "message" not in words, "nothing went wrong"


def ranks_of(folder: Path) -> list[int]:
    """Return the number of ranks after each resume, as the MLPerf log has it."""
    lines = (folder / "output" / "mlperf.log").read_text().splitlines()
    events = [json.loads(line.removeprefix(":::MLLOG ")) for line in lines]
    return [event["value"]["num_ranks"] for event in events if event["key"] == "run_resumed"]


def test_of_three_agents_one_is_lost_and_another_joins_and_training_goes_on(
    cluster: Cluster,
) -> None:
    """No number of them divides the batch of 16 but two."""
    config = resolve(merge(SLOW, {"parallel": {"dp_replicate": 2}}))
    (cluster.folder / "config.json").write_text(config.model_dump_json())
    cluster.store()
    agents = [cluster.agent(nodes="2:3") for _ in range(3)]
    cluster.wait_for_step(15)
    lost = agents.pop()
    os.killpg(lost.pid, signal.SIGKILL)
    lost.wait()
    cluster.wait_for(lambda: 2 in ranks_of(cluster.folder))
    here = cluster.step()
    cluster.wait_for_step(here + 15)
    agents.append(cluster.agent(nodes="2:3"))
    cluster.wait_for(lambda: ranks_of(cluster.folder)[-1] == 3)
    assert [agent.wait(timeout=240) for agent in agents] == [EXIT_OK] * 3, cluster.logs()
    assert steps_of(cluster.folder) == list(range(1, 401))
    used: dict[int, list[int]] = {}
    for path in (cluster.folder / "output" / "ledger").glob("rank_*.jsonl"):
        for record in map(json.loads, path.read_text().splitlines()):
            used.setdefault(record["step"], []).extend(record["indices"])
    assert {len(indices) for indices in used.values()} == {16}


def test_a_node_that_is_lost_while_it_joins_ends_no_training(cluster: Cluster) -> None:
    cluster.store()
    lost, agent = cluster.peer(least=2), cluster.agent(read_timeout=5)
    assert lost.wait(timeout=60) == 0, "it met the agent, and died"
    cluster.wait_for_step(5)
    agent.send_signal(signal.SIGTERM)
    assert agent.wait(timeout=60) == EXIT_STOPPED, cluster.logs()
    assert "rendezvous lost" in cluster.log_of(2)


def test_an_agent_that_was_given_up_knocks_and_does_not_train_beside_the_others(
    cluster: Cluster,
) -> None:
    # Longer than the test: trainers that were done would have nothing to knock for.
    config = resolve(merge(SLOW, {"schedule": {"steps": 1_000_000}}))
    (cluster.folder / "config.json").write_text(config.model_dump_json())
    cluster.store()
    agent = cluster.agent()
    cluster.wait_for(lambda: cluster.step() >= 1)
    os.kill(agent.pid, signal.SIGSTOP)  # the agent; its trainer goes on
    time.sleep(4)
    others = cluster.peer(OTHERS)
    cluster.wait_for(lambda: "met 1" in (cluster.folder / "peer.log").read_text())
    os.kill(agent.pid, signal.SIGCONT)
    assert others.wait(timeout=60) == 0, cluster.logs()


def test_a_stop_saves_and_leaves_with_the_agreed_code(cluster: Cluster) -> None:
    cluster.store()
    agent = cluster.agent()
    cluster.wait_for_step(5)
    agent.send_signal(signal.SIGTERM)
    assert agent.wait(timeout=60) == EXIT_STOPPED, cluster.logs()
    assert list((cluster.folder / "output" / "checkpoints").glob("step_*/DONE"))
    (words,) = cluster.last_words()
    assert words["step"] == words["checkpointStep"] == steps_of(cluster.folder)[-1]
    assert "stopped by SIGTERM" in words["message"]
    assert words["trainSecondsBefore"] == 0, "nothing was trained before"


def test_an_agent_whose_run_is_over_does_not_wait_for_one_that_is_lost(cluster: Cluster) -> None:
    """Torchrun's agents wait five minutes for each other, and a lost pod's successor for those that wait."""
    config = resolve(merge(SLOW, {"schedule": {"steps": 60}}))
    (cluster.folder / "config.json").write_text(config.model_dump_json())
    cluster.store()
    agent, lost = cluster.agent(nodes="2:2"), cluster.agent(nodes="2:2")
    cluster.wait_for_step(1)
    os.kill(lost.pid, signal.SIGSTOP)  # the agent; its trainer goes on to the end
    cluster.wait_for_step(60)
    assert agent.wait(timeout=30) == EXIT_OK, cluster.logs()
    (words,) = cluster.last_words()
    assert (words["numNodes"], words["phase"]) == (2, "complete")
    assert words["aliveTime"] >= words["lastStepTime"]


def test_a_stop_while_there_is_no_store_is_heeded(cluster: Cluster) -> None:
    agent = cluster.agent()
    cluster.wait_for(lambda: catches(agent.pid, signal.SIGTERM))
    agent.send_signal(signal.SIGTERM)
    assert agent.wait(timeout=20) == EXIT_STOPPED, cluster.logs()


def test_a_stop_before_enough_nodes_have_met_is_heeded(cluster: Cluster) -> None:
    """Kubernetes would wait out the pod's grace: it drops signals that a first process does not expect."""
    store, agent = cluster.store(), cluster.agent(nodes="2:2")
    cluster.wait_for(lambda: catches(agent.pid, signal.SIGTERM))
    time.sleep(4)  # it has found the store, and waits for the other
    agent.send_signal(signal.SIGTERM)
    assert agent.wait(timeout=20) == EXIT_STOPPED, cluster.logs()
    (words,) = cluster.last_words()
    assert "stopped by SIGTERM" in words["message"]
    assert store.poll() is None


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be a first process")
def test_the_first_process_of_a_container_heeds_a_stop_from_the_start(tmp_path: Path) -> None:
    """It waits for its file here; the kernel drops a SIGTERM for which it has no handler."""
    file = tmp_path / "job.yaml"
    os.mkfifo(file)
    command = [sys.executable, "-m", "fluxtrain.cli", "run", str(file)]
    with first_process(command) as (process, pid):
        while not catches(pid, signal.SIGTERM):
            time.sleep(0.1)
        os.kill(pid, signal.SIGTERM)
        assert process.wait(timeout=20) == EXIT_STOPPED


def test_what_no_restart_can_help_ends_the_agent_at_once(cluster: Cluster) -> None:
    lost = resolve({**SLOW, "data": {"source": "encoded"}})
    (cluster.folder / "config.json").write_text(lost.model_dump_json())
    cluster.store()
    agent = cluster.agent()
    assert agent.wait(timeout=120) == EXIT_USAGE, cluster.logs()
    assert cluster.logs().count("no encoded data set is here") == 1
    (words,) = cluster.last_words()
    assert "no encoded data set is here" in words["message"]


def test_a_pod_without_its_gpus_is_refused_before_anything_starts(cluster: Cluster) -> None:
    agent = cluster.agent(FLUXTRAIN_GPUS="8", CUDA_VISIBLE_DEVICES="-1", HIP_VISIBLE_DEVICES="-1")
    assert agent.wait(timeout=60) == EXIT_USAGE, cluster.logs()
    (words,) = cluster.last_words()
    assert words["message"].startswith("spec.gpusPerNode: got 8; torch sees 0 GPUs in this pod")
    assert "HIP_VISIBLE_DEVICES='-1'" in words["message"]
    assert not (cluster.folder / "output" / "metrics.jsonl").exists()


def test_a_store_whose_port_is_taken_says_so(cluster: Cluster) -> None:
    with socket.create_server(("0.0.0.0", cluster.port)):
        assert cluster.store().wait(timeout=60) == EXIT_STORAGE
    assert "cannot listen on 0.0.0.0" in cluster.logs()
