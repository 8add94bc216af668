"""Agents that follow the replies of a membership, on one clock, without a network."""

from __future__ import annotations

from dataclasses import dataclass, field

from fluxtrain.rendezvous.membership import Limits, Membership
from fluxtrain.rendezvous.messages import Heartbeat, Reply, Restart


@dataclass
class Agents:
    """Agents that follow the service's replies, on one clock."""

    service: Membership
    now: float = 0.0
    generations: dict[str, int] = field(default_factory=dict)
    """Generation of each agent, 0 while it has none."""
    waiting: set[str] = field(default_factory=set)
    worlds: dict[str, tuple[str, ...]] = field(default_factory=dict)
    restarts: dict[str, list[Restart]] = field(default_factory=dict)
    sent: int = 0
    nodes: dict[str, str] = field(default_factory=dict)
    """Names of the nodes of agents that tell theirs."""

    def start(self, *names: str) -> None:
        for name in names:
            self.generations[name], self.worlds[name] = 0, ()
            self.waiting.add(name)

    def kill(self, *names: str) -> None:
        for name in names:
            del self.generations[name]
            self.waiting.discard(name)

    def fail(self, name: str) -> None:
        """The trainers of ``name`` fail, and its agent joins again."""
        self.waiting.add(name)

    def fail_and_tell(self, name: str, cause: str) -> None:
        """The trainers of ``name`` fail by ``cause``, which it tells once it is in another generation."""
        restart = Restart(generation=self.generations[name], cause=cause)
        self.restarts.setdefault(name, []).append(restart)
        self.fail(name)

    def told(self) -> dict[int, tuple[str, str]]:
        """Agent and cause of each restart, by the generation that ended."""
        return {n: (restart.agent, restart.cause) for n, restart in self.service.restarts.items()}

    def beat(self, name: str, **values: object) -> Reply:
        self.sent += 1
        beat = Heartbeat(
            sequence=self.sent,
            attempt=1,
            agent=name,
            node=name,
            node_name=self.nodes.get(name, ""),
            generation=self.generations[name],
            joining=name in self.waiting,
            world=self.worlds[name],
            restarts=tuple(self.restarts.get(name, ())),
        ).model_copy(update=values)
        reply = self.service.heartbeat(beat, self.now)
        if name in self.waiting:
            if reply.generation > self.generations[name] and name in reply.world:
                self.generations[name], self.worlds[name] = reply.generation, reply.world
                self.waiting.discard(name)
        elif reply.reform or reply.generation > self.generations[name]:
            self.waiting.add(name)
        return reply

    def run(self, seconds: float) -> None:
        """Let all agents send heartbeats for ``seconds``, two a second."""
        end = self.now + seconds
        while self.now < end:
            self.now += 0.5
            for name in list(self.generations):
                self.beat(name)

    @property
    def running(self) -> set[str]:
        """Agents that run in the newest generation."""
        newest = self.service.generation
        return {
            name
            for name, generation in self.generations.items()
            if generation == newest and newest and name not in self.waiting
        }


def agents(minimum: int = 1, wanted: int = 3) -> Agents:
    return Agents(Membership(Limits(minimum, wanted)))


def training(names: str = "abc", minimum: int = 1, wanted: int | None = None) -> Agents:
    """Return agents called as the letters of ``names``, of which ``wanted`` train, by default all."""
    job = agents(minimum, wanted or len(names))
    job.start(*names)
    job.run(2)
    return job
