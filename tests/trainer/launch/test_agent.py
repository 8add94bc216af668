"""Agents and the rendezvous store as in the operator's pods: training survives the loss of either."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from cluster.free_ports import free_port
from tests.first_process import catches, first_process
from tests.trainer.commands import Forked, command, start
from tests.trainer.outputs import ledger, losses, mlperf_values
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

from fluxtrain.contract.launch import ENV_CONFIG, RunPaths
from fluxtrain.contract.run.resolve import merge, resolve
from fluxtrain.errors import EXIT_OK, EXIT_STOPPED, EXIT_STORAGE, EXIT_USAGE

pytestmark = pytest.mark.slow

STEPS = 200
HEARTBEAT = {"keep_alive_interval": 1, "keep_alive_max_attempt": 3}
SLOW = {
    "preset": "micro",
    "schedule": {"steps": STEPS},
    "checkpoint": {"every_steps": 10},
    "evaluation": {"every_samples": 0, "at_end": False},
    "logging": {"every_steps": 1, "metrics_port": 0, "ledger": True},
}


def join(endpoint: str, job: str, min_nodes: int, joined: Path, wait_for_nodes: bool) -> None:
    """Join the rendezvous as an agent does and write its size; then, on request, wait for another node."""
    settings = {"is_host": 0, "last_call_timeout": 2, "local_addr": "127.0.0.1"} | HEARTBEAT
    parameters = RendezvousParameters("c10d", endpoint, job, min_nodes, 2, **settings)
    handler = get_rendezvous_handler(parameters)
    joined.write_text(str(handler.next_rendezvous().world_size))
    while wait_for_nodes and not handler.num_nodes_waiting():
        time.sleep(0.1)


class Agents:
    """A store and agents on this machine, each in its own process group."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.port, self.job = folder, free_port(), uuid4().hex
        self.output = folder / "output"
        self.processes: list[Forked] = []
        self.configure({})

    def configure(self, changes: dict[str, Any]) -> None:
        config = resolve(merge(SLOW, changes))
        (self.folder / "config.json").write_text(config.model_dump_json())

    def start(self, *arguments: str, **environment: str) -> Forked:
        log = self.folder / f"{arguments[0]}_{len(self.processes)}.log"
        return self.add(start(*arguments, log=log, **environment))

    def add(self, process: Forked) -> Forked:
        self.processes.append(process)
        return process

    def store(self) -> Forked:
        return self.start("rendezvous", f"--port={self.port}")

    def agent(self, read_timeout: int = 60, nodes: str = "1:2", **more: str) -> Forked:
        paths = RunPaths(self.output, self.folder, self.folder)
        settings = {"is_host": 0, "last_call_timeout": 2, "read_timeout": read_timeout} | HEARTBEAT
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
            PET_RDZV_CONF=",".join(f"{key}={value}" for key, value in settings.items()),
            PET_LOCAL_ADDR="127.0.0.1",
            PET_MAX_RESTARTS="100",
            PET_MONITOR_INTERVAL="0.2",
            TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1",
            **more,
        )

    def peer(self, min_nodes: int = 1, wait_for_nodes: bool = False) -> Forked:
        """Start a process that joins the rendezvous as an agent does."""
        joined = self.folder / "joined"
        arguments = (f"127.0.0.1:{self.port}", self.job, min_nodes, joined, wait_for_nodes)
        return self.add(Forked(join, *arguments))

    def step(self) -> int:
        try:
            return max(losses(self.output), default=0)
        except (OSError, ValueError):
            return 0

    def termination_messages(self) -> list[dict[str, Any]]:
        """Return the termination messages of the agents that have ended."""
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
def agents(tmp_path: Path) -> Iterator[Agents]:
    (tmp_path / "output").mkdir()
    agents = Agents(tmp_path)
    yield agents
    for process in agents.processes:
        process.kill()


def test_training_survives_the_loss_of_the_store_or_an_agent(agents: Agents) -> None:
    store, first, second = agents.store(), agents.agent(), agents.agent()
    agents.wait_for_step(10)
    store.kill()
    time.sleep(1)
    agents.store()
    here = agents.step()
    agents.wait_for_step(here + 15)
    second.kill()
    here = agents.step()
    agents.wait_for_step(here + 15)
    assert first.wait(timeout=240) == EXIT_OK, agents.logs()
    assert list(losses(agents.output)) == list(range(1, STEPS + 1))
    (message,) = agents.termination_messages()
    assert (message["rank"], message["step"], message["checkpointStep"]) == (0, STEPS, STEPS)
    assert message["trainLoss"] == losses(agents.output)[STEPS]
    assert 0 < message["trainSecondsBefore"] < message["trainSeconds"]
    assert 0 < message["firstStepTime"] < message["lastStepTime"]
    assert "message" not in message, "there was no error"


def ranks_of(agents: Agents) -> list[int]:
    """Return the number of ranks after each resume."""
    return [value["num_ranks"] for value in mlperf_values(agents.output, "run_resumed")]


def test_training_continues_when_one_of_three_agents_is_replaced(
    agents: Agents,
) -> None:
    """Of these numbers only two divides the batch of 16."""
    agents.configure({"parallel": {"dp_replicate": 2}})
    agents.store()
    started = [agents.agent(nodes="2:3") for _ in range(3)]
    agents.wait_for_step(15)
    lost = started.pop()
    lost.kill()
    agents.wait_for(lambda: 2 in ranks_of(agents))
    here = agents.step()
    agents.wait_for_step(here + 15)
    started.append(agents.agent(nodes="2:3"))
    agents.wait_for(lambda: ranks_of(agents)[-1] == 3)
    assert [agent.wait(timeout=240) for agent in started] == [EXIT_OK] * 3, agents.logs()
    assert list(losses(agents.output)) == list(range(1, STEPS + 1))
    assert {len(indices) for indices in ledger(agents.output).values()} == {16}


def test_training_survives_a_node_that_is_lost_while_it_joins(agents: Agents) -> None:
    agents.store()
    lost, agent = agents.peer(min_nodes=2), agents.agent(read_timeout=5)
    assert lost.wait(timeout=60) == 0, "it joined and exited"
    agents.wait_for_step(5)
    agent.send_signal(signal.SIGTERM)
    assert agent.wait(timeout=60) == EXIT_STOPPED, agents.logs()
    assert "rendezvous lost" in agents.log_of(2)


def test_an_agent_that_was_removed_joins_again_and_does_not_train_in_parallel(
    agents: Agents,
) -> None:
    # longer than the test: finished trainers would not join again
    agents.configure({"schedule": {"steps": 1_000_000}})
    agents.store()
    agent = agents.agent()
    agents.wait_for(lambda: agents.step() >= 1)
    os.kill(agent.pid, signal.SIGSTOP)  # the agent; its trainer continues
    time.sleep(4)
    other = agents.peer(wait_for_nodes=True)
    agents.wait_for(lambda: (agents.folder / "joined").exists())
    assert (agents.folder / "joined").read_text() == "1"
    os.kill(agent.pid, signal.SIGCONT)
    assert other.wait(timeout=60) == 0, agents.logs()


def test_a_stop_saves_a_checkpoint_and_returns_its_exit_code(agents: Agents) -> None:
    agents.store()
    agent = agents.agent()
    agents.wait_for_step(5)
    agent.send_signal(signal.SIGTERM)
    assert agent.wait(timeout=60) == EXIT_STOPPED, agents.logs()
    assert list((agents.output / "checkpoints").glob("step_*/DONE"))
    (message,) = agents.termination_messages()
    assert message["step"] == message["checkpointStep"] == max(losses(agents.output))
    assert "stopped by SIGTERM" in message["message"]
    assert message["trainSecondsBefore"] == 0, "there was no earlier training"


def test_a_finished_agent_does_not_wait_for_a_lost_one(agents: Agents) -> None:
    """Torchrun's agents wait five minutes for each other by default."""
    agents.configure({"schedule": {"steps": 60}})
    agents.store()
    agent, lost = agents.agent(nodes="2:2"), agents.agent(nodes="2:2")
    agents.wait_for_step(1)
    os.kill(lost.pid, signal.SIGSTOP)  # the agent; its trainer continues to the end
    agents.wait_for_step(60)
    assert agent.wait(timeout=30) == EXIT_OK, agents.logs()
    (message,) = agents.termination_messages()
    assert (message["numNodes"], message["phase"]) == (2, "complete")
    assert message["aliveTime"] >= message["lastStepTime"]


def test_a_stop_without_a_store_ends_the_agent(agents: Agents) -> None:
    agent = agents.agent()
    agents.wait_for(lambda: catches(agent.pid, signal.SIGTERM))
    agent.send_signal(signal.SIGTERM)
    assert agent.wait(timeout=20) == EXIT_STOPPED, agents.logs()


def test_a_stop_before_enough_nodes_have_joined_ends_the_agent(agents: Agents) -> None:
    """Else the pod would run until the end of its grace period: process 1 ignores unhandled signals."""
    store, agent = agents.store(), agents.agent(nodes="2:2")
    agents.wait_for(lambda: catches(agent.pid, signal.SIGTERM))
    time.sleep(2)  # it is connected to the store and waits for the other
    agent.send_signal(signal.SIGTERM)
    assert agent.wait(timeout=20) == EXIT_STOPPED, agents.logs()
    (message,) = agents.termination_messages()
    assert "stopped by SIGTERM" in message["message"]
    assert store.poll() is None


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, for a PID namespace")
def test_process_1_of_a_container_handles_a_stop_from_the_start(tmp_path: Path) -> None:
    """It waits for its file here; the kernel ignores a SIGTERM without a handler."""
    file = tmp_path / "job.yaml"
    os.mkfifo(file)
    with first_process(command("run", str(file))) as (process, pid):
        while not catches(pid, signal.SIGTERM):
            time.sleep(0.1)
        os.kill(pid, signal.SIGTERM)
        assert process.wait(timeout=20) == EXIT_STOPPED


def test_an_error_that_a_restart_cannot_fix_ends_the_agent(agents: Agents) -> None:
    agents.configure({"data": {"source": "encoded"}})
    agents.store()
    agent = agents.agent()
    assert agent.wait(timeout=120) == EXIT_USAGE, agents.logs()
    assert agents.logs().count("no encoded data set is here") == 1
    (message,) = agents.termination_messages()
    assert "no encoded data set is here" in message["message"]


def test_a_pod_without_its_gpus_fails_before_training_starts(agents: Agents) -> None:
    agent = agents.agent(FLUXTRAIN_GPUS="8", CUDA_VISIBLE_DEVICES="-1", HIP_VISIBLE_DEVICES="-1")
    assert agent.wait(timeout=60) == EXIT_USAGE, agents.logs()
    (message,) = agents.termination_messages()
    assert message["message"].startswith("spec.gpusPerNode: got 8; torch sees 0 GPUs in this pod")
    assert "HIP_VISIBLE_DEVICES='-1'" in message["message"]
    assert not (agents.output / "metrics.jsonl").exists()


def test_a_store_whose_port_is_in_use_fails(agents: Agents) -> None:
    with socket.create_server(("0.0.0.0", agents.port)):
        assert agents.store().wait(timeout=60) == EXIT_STORAGE
    assert "cannot listen on 0.0.0.0" in agents.logs()
