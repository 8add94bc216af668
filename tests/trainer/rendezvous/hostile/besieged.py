"""A rendezvous service in a process of its own, with two agents that go on while others attack it."""

from __future__ import annotations

import http.client
import json
import math
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cluster.free_ports import free_port
from tests.trainer.rendezvous.hostile.attacks import Target, post

from fluxtrain.contract.process import MEMBERS_PATH
from fluxtrain.rendezvous.client import Client
from fluxtrain.rendezvous.messages import Heartbeat, Key, request_signature

KEY = b"0123456789abcdef" * 4
SOFT_LIMIT = 1024
"""Of open files: what containers often get."""
_PAUSE = 0.02


@dataclass
class Agent:
    """An honest agent, which measures how long its heartbeats take."""

    client: Client
    reconnects: bool = False
    """Whether each heartbeat has a connection of its own, as those of agents that begin."""
    seconds: list[float] = field(default_factory=list)
    failed: int = 0
    failed_together: int = 0
    """The longest series of heartbeats without a reply."""
    _stopped: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        """Send heartbeats until stopped."""
        together = 0
        while not self._stopped.is_set():
            if self.reconnects:
                self.client._connection.close()
            start = time.monotonic()
            answered = self.client.exchange()
            self.seconds.append(time.monotonic() - start)
            together = 0 if answered else together + 1
            self.failed += not answered
            self.failed_together = max(self.failed_together, together)
            self._stopped.wait(_PAUSE)

    def stop(self) -> None:
        """End `run`."""
        self._stopped.set()


@dataclass
class Besieged:
    """The service, its two agents, and how much it uses."""

    process: subprocess.Popen[bytes]
    target: Target
    key_file: Path
    agents: list[Agent]

    def members(self) -> dict[str, Any]:
        """Return what the operator reads."""
        connection = http.client.HTTPConnection("127.0.0.1", self.target.members_port, timeout=20)
        with closing(connection):
            connection.request("GET", MEMBERS_PATH)
            answer: dict[str, Any] = json.loads(connection.getresponse().read())
        return answer

    def meet(self) -> None:
        """Let the agents form the next generation, and train in it."""
        clients = [agent.client for agent in self.agents]
        before = max((c.reply.generation if c.reply else 0) for c in clients)
        for client in clients:
            client.update(joining=True)
        deadline = time.monotonic() + 30
        while any(c.reply is None or c.reply.generation <= before for c in clients):
            assert time.monotonic() < deadline, [c.problem for c in clients]
            for client in clients:
                client.exchange()
        for client in clients:
            assert client.reply is not None
            values = {"generation": client.reply.generation, "world": client.reply.world}
            client.update(joining=False, **values)
            client.exchange()

    @property
    def peak_mib(self) -> int:
        """Return the largest memory of the process so far."""
        lines = Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
        (peak,) = (line.split()[1] for line in lines if line.startswith("VmHWM"))
        return int(peak) // 1024

    @property
    def open_files(self) -> int:
        """Return how many files and connections the process has."""
        return len(list(Path(f"/proc/{self.process.pid}/fd").iterdir()))


def p99(seconds: list[float]) -> float:
    return sorted(seconds)[math.ceil(0.99 * len(seconds)) - 1]


@contextmanager
def besieged(folder: Path) -> Iterator[Besieged]:
    """Start a service and two agents, which have formed a generation."""
    key_file = folder / "key"
    key_file.write_bytes(KEY)
    port, members_port = free_port(), free_port()
    options = [f"--key={key_file}", f"--port={port}", f"--members-port={members_port}"]
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    process = subprocess.Popen(
        [sys.executable, "-m", "fluxtrain.cli", "rendezvous", "--nodes=2:2", *options],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (SOFT_LIMIT, hard)),
    )
    with ExitStack() as stack:
        stack.callback(process.wait)
        stack.callback(process.kill)
        agents = [_agent(number, port, key_file) for number in range(2)]
        for agent in agents:
            stack.callback(agent.client._connection.close)
        deadline = time.monotonic() + 60
        while not all(agent.client.exchange() for agent in agents):
            assert time.monotonic() < deadline, agents[0].client.problem
            time.sleep(0.1)
        target = Target(port, members_port, KEY, b"", "")
        job = Besieged(process, target, key_file, agents)
        job.meet()
        target.boot = agents[0].client._beat.boot
        target.recorded = _record(agents[0].client, target)
        yield job


def _agent(number: int, port: int, key_file: Path) -> Agent:
    name = f"agent-{number}"
    beat = Heartbeat(sequence=0, attempt=1, agent=name, node=f"node-{number}", joining=True)
    return Agent(Client("127.0.0.1", port, Key(KEY, key_file), beat), reconnects=number == 1)


def _record(client: Client, target: Target) -> bytes:
    """Return a request that the service has answered."""
    body = client._next_body()
    request = post(body, request_signature(KEY, body))
    assert target.send(request).startswith("200")
    return request


@contextmanager
def heartbeats(agents: list[Agent]) -> Iterator[None]:
    """Let ``agents`` send heartbeats meanwhile."""
    threads = [threading.Thread(target=agent.run) for agent in agents]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        for agent, thread in zip(agents, threads, strict=True):
            agent.stop()
            thread.join()
