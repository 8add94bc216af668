"""Agents and the rendezvous service as in the operator's pods: training survives the loss of either."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.request import ProxyHandler, build_opener
from uuid import uuid4

import pytest
from cluster.free_ports import free_port
from tests.first_process import catches, first_process
from tests.trainer.commands import Forked, Job, children, command
from tests.trainer.outputs import ledger, losses, resumed_steps

from fluxtrain.contract.process import ENV_CONFIG, STACKS_SIGNAL, RunPaths
from fluxtrain.contract.run.resolve import merge, resolve
from fluxtrain.errors import EXIT_ERROR, EXIT_OK, EXIT_STOPPED, EXIT_STORAGE, EXIT_USAGE
from fluxtrain.rendezvous.client import Client
from fluxtrain.rendezvous.messages import Heartbeat, Key

pytestmark = pytest.mark.slow

STEPS, PAUSE = 100, 0.1
KEY = b"a key of this job"
SLOW = {
    "preset": "micro",
    "schedule": {"steps": STEPS},
    "checkpoint": {"every_steps": 10},
    "evaluation": {"every_samples": 0, "at_end": False},
    "logging": {"every_steps": 1, "metrics_port": 0, "ledger": True},
}


class Agents(Job):
    """A rendezvous service and agents on this machine, each in its own process group."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.job, self.nodes, self.peers = f"{uuid4().hex}-1", "1:2", list[Client]()
        self.output.mkdir()
        (folder / "key").write_bytes(KEY)
        self.configure({})

    def configure(self, changes: dict[str, Any]) -> None:
        config = resolve(merge(SLOW, changes))
        (self.folder / "config.json").write_text(config.model_dump_json())

    def service(self, nodes: str = "1:2", *options: str, members_port: int = 0) -> Forked:
        self.nodes = nodes
        ports = [f"--port={self.port}", f"--members-port={members_port}"]
        key = f"--key={self.folder / 'key'}"
        return self.start("rendezvous", *ports, f"--nodes={nodes}", key, *options, pause=PAUSE)

    def agent(self, processes: int = 1, restarts: str = "100", **more: str) -> Forked:
        paths = RunPaths(self.output, self.folder, self.folder)
        log = self.folder / f"termination_{len(self.processes)}.json"
        log.touch()  # as kubelet does
        return self.start(
            "agent",
            f"--termination-log={log}",
            pause=PAUSE,
            **paths.environment(),
            **{ENV_CONFIG: str(self.folder / "config.json")},
            PET_NNODES=self.nodes,
            PET_NPROC_PER_NODE=f"{processes}",
            FLUXTRAIN_RENDEZVOUS_KEY=str(self.folder / "key"),
            PET_RDZV_ENDPOINT=f"127.0.0.1:{self.port}",
            PET_RDZV_ID=self.job,
            PET_MAX_RESTARTS=restarts,
            PET_MONITOR_INTERVAL="0.2",
            TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1",
            **more,
        )

    def agent_with_memory(self, name: str, restarts: str = "100") -> Forked:
        """Start an agent whose node keeps snapshots in the folder ``name``."""
        (self.folder / name).mkdir()
        return self.agent(restarts=restarts, FLUXTRAIN_SNAPSHOTS=str(self.folder / name))

    def peer(self) -> Client:
        """Return a client that waits for a generation, ordered before all agents."""
        beat = Heartbeat(sequence=0, attempt=1, agent="peer", node="!", joining=True)
        client = Client("127.0.0.1", self.port, Key(KEY), beat)
        client.start()
        self.peers.append(client)
        return client

    def termination_messages(self) -> list[dict[str, Any]]:
        """Return the termination messages of the agents that have ended."""
        texts = [path.read_text() for path in sorted(self.folder.glob("termination_*.json"))]
        return [json.loads(text) for text in texts if text]

    def log_of(self, agent: int) -> str:
        return self.log(agent).read_text()


@pytest.fixture
def agents(tmp_path: Path) -> Iterator[Agents]:
    agents = Agents(tmp_path)
    yield agents
    for peer in agents.peers:
        peer.stop()
    agents.kill()


@pytest.mark.proof
def test_training_survives_the_loss_of_the_service_or_an_agent(agents: Agents) -> None:
    service, first, second = agents.service(), agents.agent(), agents.agent()
    agents.wait_for_step(10)
    service.kill()
    agents.wait_for_step(agents.step() + 15)
    agents.service()
    agents.wait_for_step(agents.step() + 15)
    assert agents.ranks() == [], "the loss of the service restarts nothing"
    second.kill()
    here = agents.step()
    agents.wait_for_step(here + 15)
    agents.wait_for_ends([first], EXIT_OK)
    assert list(losses(agents.output)) == list(range(1, STEPS + 1))
    (message,) = agents.termination_messages()
    assert (message["rank"], message["step"], message["checkpointStep"]) == (0, STEPS, STEPS)
    assert message["trainLoss"] == losses(agents.output)[STEPS]
    assert 0 < message["trainSecondsBefore"] < message["trainSeconds"]
    assert 0 < message["firstStepTime"] < message["lastStepTime"]
    assert "message" not in message, "there was no error"
    assert message["processRestarts"] == 0, "a lost node uses no restart of its peers"


@pytest.mark.proof
@pytest.mark.torch_range
def test_a_trainer_that_fails_counts_as_one_restart_of_all_nodes(agents: Agents) -> None:
    agents.configure({"schedule": {"steps": 50}})
    agents.service("2:2")
    started = [agents.agent() for _ in range(2)]
    agents.wait_for_step(20)
    (trainer,) = children(started[1].pid)
    os.kill(trainer, signal.SIGKILL)
    agents.wait_for_ends(started, EXIT_OK)
    (message,) = agents.termination_messages()[:1]
    assert message["processRestarts"] == 1
    printed = {*agents.log_of(1).splitlines(), *agents.log_of(2).splitlines()}
    assert printed >= set((agents.output / "mlperf.log").read_text().splitlines()), "as in pods"


@pytest.mark.proof
def test_each_killed_trainer_is_one_restart_whichever_agent_tells_it(agents: Agents) -> None:
    """Its peer's trainer fails too, sooner or later than its agent hears of it."""
    agents.configure({"schedule": {"steps": 1_000_000}})
    port = free_port()
    service = agents.service("2:2", members_port=port)
    started = [agents.agent() for _ in range(2)]
    causes = list[str]()
    for number in (0, 1, 0):
        agents.wait_for_step(agents.step() + 10)
        os.kill(children(started[number].pid)[0], signal.SIGKILL)
        causes.append("ProcessKilled")
        agents.wait_for(lambda: told_causes(port) == causes)
    service.kill()
    agents.service("2:2", members_port=port)
    agents.wait_for(lambda: told_causes(port) == causes)
    agents.wait_for_step(agents.step() + 10)
    assert told_causes(port) == causes


def told_causes(port: int) -> list[str]:
    """Return the causes of the restarts at /members, in the order of their generations."""
    return [restart["cause"] for restart in answer(port, "members").get("restarts", ())]


def reported_ranks(port: int) -> list[dict[str, Any]]:
    """Return the ranks that the agents report through the service."""
    return list(answer(port, "progress").get("ranks", ()))


def answer(port: int, path: str) -> dict[str, Any]:
    """Return the answer of the service at ``path``, empty without one."""
    try:
        address = f"http://127.0.0.1:{port}/{path}"
        with build_opener(ProxyHandler({})).open(address, timeout=5) as response:
            return dict(json.loads(response.read()))
    except OSError:
        return {}


def test_training_continues_when_one_of_three_agents_is_replaced(
    agents: Agents,
) -> None:
    """Of these numbers only two divides the batch of 16."""
    agents.configure({"parallel": {"dp_replicate": 2}})
    agents.service("2:3")
    started = [agents.agent() for _ in range(3)]
    agents.wait_for_step(15)
    lost = started.pop()
    lost.kill()
    agents.wait_for(lambda: 2 in agents.ranks())
    here = agents.step()
    agents.wait_for_step(here + 15)
    started.append(agents.agent())
    agents.wait_for(lambda: agents.ranks()[-1] == 3)
    agents.wait_for_ends(started, EXIT_OK)
    assert list(losses(agents.output)) == list(range(1, STEPS + 1))
    assert {len(indices) for indices in ledger(agents.output).values()} == {16}


@pytest.mark.parametrize("first", [0, 1])
def test_agents_that_are_stopped_one_after_the_other_report_the_last_step(
    agents: Agents, first: int
) -> None:
    agents.service("2:2")
    started = [agents.agent() for _ in range(2)]
    agents.wait_for_step(10)
    started[first].send_signal(signal.SIGTERM)
    time.sleep(0.5)
    started[1 - first].send_signal(signal.SIGTERM)
    agents.wait_for_ends(started, EXIT_STOPPED, seconds=60)
    steps = max(losses(agents.output))
    messages = agents.termination_messages()
    assert [m["step"] for m in messages if m.get("rank") == 0] == [steps]


def test_training_survives_a_node_that_is_lost_while_it_joins(agents: Agents) -> None:
    agents.service()
    peer, agent = agents.peer(), agents.agent()
    agents.wait_for(lambda: bool(peer.reply and peer.reply.generation == 1))
    peer.update(generation=1, joining=False)  # as the first of the world it would open the store
    peer.stop()
    agents.wait_for_step(5)
    agent.send_signal(signal.SIGTERM)
    agents.wait_for_ends([agent], EXIT_STOPPED, seconds=60)


def test_an_agent_that_was_removed_joins_again_and_does_not_train_in_parallel(
    agents: Agents,
) -> None:
    # longer than the test: finished trainers would not join again
    agents.configure({"schedule": {"steps": 1_000_000}})
    agents.service("1:1")
    agent = agents.agent()
    agents.wait_for(lambda: agents.step() >= 1)
    (trainer,) = children(agent.pid)
    os.kill(agent.pid, signal.SIGSTOP)  # the agent; its trainer continues
    peer = agents.peer()
    agents.wait_for(lambda: bool(peer.reply and peer.reply.generation == 2))
    peer.update(generation=2, joining=False)
    os.kill(agent.pid, signal.SIGCONT)
    agents.wait_for(lambda: trainer not in children(agent.pid))
    assert children(agent.pid) == []
    peer.stop(leaving=True)
    agents.wait_for(lambda: len(children(agent.pid)) == 1)


@pytest.mark.torch_range
def test_a_trainer_prints_its_stacks_on_a_signal_goes_on_and_saves_at_a_stop(
    agents: Agents,
) -> None:
    agents.service("1:1")
    agent = agents.agent()
    agents.wait_for_step(5)
    (trainer,) = children(agent.pid)
    os.kill(trainer, STACKS_SIGNAL)
    agents.wait_for(lambda: "most recent call first" in agents.log_of(1))
    agents.wait_for(lambda: "in train" in agents.log_of(1))
    agents.wait_for_step(agents.step() + 5)
    assert children(agent.pid) == [trainer]
    agent.send_signal(signal.SIGTERM)
    agents.wait_for_ends([agent], EXIT_STOPPED, seconds=60)
    assert list((agents.output / "checkpoints").glob("step_*/DONE"))
    (message,) = agents.termination_messages()
    assert message["step"] == message["checkpointStep"] == max(losses(agents.output))
    assert "stopped by SIGTERM" in message["message"]
    assert message["trainSecondsBefore"] == 0, "there was no earlier training"


def test_the_stacks_of_a_stalled_trainer_are_in_the_log_before_it_is_stopped(
    agents: Agents,
) -> None:
    agents.service("2:2")
    first, second = agents.agent(), agents.agent()
    agents.wait_for_step(5)
    (stopped,) = children(second.pid)
    os.kill(stopped, signal.SIGSTOP)  # so the other hangs in a collective
    time.sleep(13)  # more than until its state is told
    assert "most recent call first" not in agents.log_of(1)
    first.send_signal(signal.SIGTERM)
    agents.wait_for(lambda: "most recent call first" in agents.log_of(1), seconds=20)
    (line,) = [line for line in agents.log_of(1).splitlines() if ": no progress for " in line]
    assert "in phase step" in line
    assert "; waits for gloo:" in line


@pytest.mark.proof
def test_the_peer_of_an_agent_that_fails_continues_from_memory_with_its_successor(
    agents: Agents,
) -> None:
    """Without a checkpoint. The agent whose restarts are used up leaves, and closes nothing."""
    agents.configure({"checkpoint": {"every_steps": 0, "memory_every_steps": 5}})
    port = free_port()
    agents.service("2:2", members_port=port)

    first = agents.agent_with_memory("memory_1")
    second = agents.agent_with_memory("memory_2", restarts="0")
    agents.wait_for_step(30)
    os.kill(children(second.pid)[0], signal.SIGKILL)
    failed_at = agents.step()
    agents.wait_for_ends([second], EXIT_ERROR, seconds=60)
    agents.wait_for(lambda: len(answer(port, "members")["alive"]) == 1)
    third = agents.agent_with_memory("memory_3")
    agents.wait_for_ends((first, third), EXIT_OK)
    (resumed,) = resumed_steps(agents.output)
    assert failed_at - 10 <= resumed
    assert list(losses(agents.output)) == list(range(1, STEPS + 1))
    assert told_causes(port) == [], "the operator charges the end of the pod"
    restarts = [message["processRestarts"] for message in agents.termination_messages()]
    assert restarts == [0, 0, 0]


def test_the_others_go_on_without_an_agent_that_fails(agents: Agents) -> None:
    agents.configure({"schedule": {"steps": 50}})
    agents.service("1:2")
    first, second = agents.agent(), agents.agent(restarts="0")
    agents.wait_for_step(20)
    os.kill(children(second.pid)[0], signal.SIGKILL)
    agents.wait_for_ends([second], EXIT_ERROR, seconds=60)
    agents.wait_for_ends([first], EXIT_OK)
    assert agents.ranks() == [1]
    assert list(losses(agents.output)) == list(range(1, 51))


@pytest.mark.torch_range
def test_hung_trainers_are_killed_and_continue_from_memory(agents: Agents) -> None:
    """The service is replaced by one that ends their generation, as the operator does."""
    agents.configure({"checkpoint": {"every_steps": 0, "memory_every_steps": 5}})
    service = agents.service("2:2")
    started = [agents.agent_with_memory(name) for name in ("memory_1", "memory_2")]
    agents.wait_for_step(30)
    before = [children(agent.pid)[0] for agent in started]
    os.kill(before[1], signal.SIGSTOP)  # so the other hangs in a collective
    hung = agents.step()
    service.kill()
    began = time.monotonic()
    agents.service("2:2", "--ended=1:1")
    agents.wait_for_step(hung + 10)
    print(f"10 steps after {time.monotonic() - began:.1f} s")
    after = [children(agent.pid)[0] for agent in started]
    assert not set(before) & set(after)
    (resumed,) = resumed_steps(agents.output)
    assert hung - 10 <= resumed
    agents.processes[-1].kill()
    agents.service("2:2", "--ended=1:1")  # the same order once more restarts nothing
    agents.wait_for_ends(started, EXIT_OK)
    assert len(resumed_steps(agents.output)) == 1
    assert list(losses(agents.output)) == list(range(1, STEPS + 1))
    restarts = [message["processRestarts"] for message in agents.termination_messages()]
    assert restarts == [0, 0], "the operator counts it"


@pytest.mark.proof
@pytest.mark.parametrize(("processes", "frozen"), [(1, 0), (2, 1)])
def test_the_agent_reports_a_frozen_rank_of_its_only_node_and_restarts_it(
    agents: Agents, processes: int, frozen: int
) -> None:
    """Local rank 0, which serves the progress of its node, may be the one that does not answer."""
    port, members = free_port(), free_port()
    agents.configure({"logging": {"metrics_port": port}})
    service, agent = (
        agents.service("1:1", members_port=members),
        agents.agent(processes, FLUXTRAIN_POD_UID="uid-0"),
    )
    agents.wait_for_step(5)
    steps = ["step"] * processes
    agents.wait_for(lambda: [rank.get("phase") for rank in reported_ranks(members)] == steps)
    assert not any("frozen" in rank for rank in reported_ranks(members))
    pids = children(agent.pid)  # in the order of their ranks
    os.kill(pids[frozen], signal.SIGSTOP)
    began = time.monotonic()
    agents.wait_for(lambda: any(rank.get("frozen") for rank in reported_ranks(members)))
    (rank,) = [rank for rank in reported_ranks(members) if rank.get("frozen")]
    assert (rank["rank"], rank["pod"], rank["phase"]) == (frozen, "uid-0", "step")
    assert rank["stack"] == "the process does not respond, its state is T (stopped)"
    assert 5 < rank["secondsSinceProgress"] < time.monotonic() - began + 5
    if frozen == 0:
        with pytest.raises(TimeoutError):
            build_opener(ProxyHandler({})).open(f"http://127.0.0.1:{port}/progress", timeout=1)
    hung = agents.step()
    service.kill()
    ended = f"--ended=1:{rank['generation']}"  # as the operator does
    agents.service("1:1", ended, members_port=members)
    agents.wait_for(lambda: not any("frozen" in rank for rank in reported_ranks(members)))
    agents.wait_for_step(hung + 5)
    assert not set(pids) & set(children(agent.pid))


@pytest.mark.proof
def test_a_finished_agent_does_not_wait_for_a_lost_one(agents: Agents) -> None:
    """Torchrun's agents wait five minutes for each other by default."""
    agents.configure({"schedule": {"steps": 30}})
    agents.service("2:2", "--lost-seconds=600")  # steps may be slow here
    agent, lost = agents.agent(), agents.agent()
    agents.wait_for_step(1)
    os.kill(lost.pid, signal.SIGSTOP)  # the agent; its trainer continues to the end
    agents.wait_for_step(30)
    agents.wait_for_ends([agent], EXIT_OK, seconds=30)
    (message,) = agents.termination_messages()
    assert (message["numNodes"], message["phase"]) == (2, "finish")


def test_a_stop_without_a_service_ends_the_agent(agents: Agents) -> None:
    agent = agents.agent()
    agents.wait_for(lambda: catches(agent.pid, signal.SIGTERM))
    agent.send_signal(signal.SIGTERM)
    agents.wait_for_ends([agent], EXIT_STOPPED, seconds=20)


def test_a_stop_before_enough_nodes_have_joined_ends_the_agent(agents: Agents) -> None:
    """Else the pod would run until the end of its grace period: process 1 ignores unhandled signals."""
    service, agent = agents.service("2:2"), agents.agent()
    agents.wait_for(lambda: catches(agent.pid, signal.SIGTERM))
    time.sleep(2)  # it is known to the service and waits for the other
    agent.send_signal(signal.SIGTERM)
    agents.wait_for_ends([agent], EXIT_STOPPED, seconds=20)
    (message,) = agents.termination_messages()
    assert "stopped by SIGTERM" in message["message"]
    assert service.poll() is None


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
    agents.service("1:1")
    agents.wait_for_ends([agents.agent()], EXIT_USAGE, seconds=120)
    assert agents.logs().count("no encoded data set is here") == 1
    (message,) = agents.termination_messages()
    assert "no encoded data set is here" in message["message"]


def test_a_pod_without_its_gpus_fails_before_training_starts(agents: Agents) -> None:
    agent = agents.agent(FLUXTRAIN_GPUS="8", CUDA_VISIBLE_DEVICES="-1", HIP_VISIBLE_DEVICES="-1")
    agents.wait_for_ends([agent], EXIT_USAGE, seconds=60)
    (message,) = agents.termination_messages()
    assert message["message"].startswith("spec.gpusPerNode: got 8; torch sees 0 GPUs in this pod")
    assert "HIP_VISIBLE_DEVICES='-1'" in message["message"]
    assert not (agents.output / "metrics.jsonl").exists()


def test_a_service_whose_port_is_in_use_fails(agents: Agents) -> None:
    with socket.create_server(("0.0.0.0", agents.port)):
        assert agents.service().wait(timeout=60) == EXIT_STORAGE
    assert f"cannot listen on [::]:{agents.port} (" in agents.logs()


def test_a_killed_trainer_and_a_replaced_node_continue_from_memory(agents: Agents) -> None:
    """There is no checkpoint; each node's memory has the images of both."""
    agents.configure({"checkpoint": {"every_steps": 0, "memory_every_steps": 5}})
    agents.service("2:2")
    first, second = (agents.agent_with_memory(name) for name in ("memory_1", "memory_2"))
    agents.wait_for_step(30)
    os.kill(children(second.pid)[0], signal.SIGKILL)
    killed = agents.step()
    agents.wait_for(lambda: len(resumed_steps(agents.output)) == 1)
    agents.wait_for_step(killed + 30)
    second.kill()
    lost = agents.step()
    third = agents.agent_with_memory("memory_3")
    agents.wait_for_ends((first, third), EXIT_OK)
    for before, step in zip((killed, lost), resumed_steps(agents.output), strict=True):
        assert before - 10 <= step, (
            "at most the newest snapshot, which was not complete yet, is lost"
        )
    assert list(losses(agents.output)) == list(range(1, STEPS + 1))
    assert {len(indices) for indices in ledger(agents.output).values()} == {16}
    newest = [message.get("snapshotStep", 0) for message in agents.termination_messages()]
    assert STEPS - 10 <= max(newest) < STEPS, "reported by rank 0"
    assert list((agents.folder / "memory_1").iterdir()) == [], "the agent frees the memory"
