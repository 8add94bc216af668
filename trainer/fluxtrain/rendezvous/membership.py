"""The agents of one attempt: who is in the current generation, and when the next one forms.

Decided from heartbeats alone; ``now`` is the service's monotonic clock in seconds. A service that starts
empty learns the current generation from the next heartbeats, so its loss costs no step.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from fluxtrain.contract.launch import LOST_SECONDS
from fluxtrain.contract.members import MAX_RESTARTS, root_cause
from fluxtrain.rendezvous.messages import MAX_NODES, Heartbeat, Reply
from fluxtrain.rendezvous.rank_order import natural


@dataclass(frozen=True)
class Limits:
    """The sizes of a generation, and how long to wait for agents."""

    min_nodes: int
    wanted_nodes: int
    """Agents beyond these wait as spares."""
    settle_seconds: float = 30.0
    """How long a first generation, or a larger one, waits for further agents up to the wanted number."""
    lost_seconds: float = LOST_SECONDS


@dataclass(frozen=True)
class Restart:
    """The end of a generation because trainers failed."""

    agent: str
    """The agent that tells the cause; of several with the same one the first."""
    cause: str


@dataclass
class _Agent:
    node: str
    last_seen: float
    waiting: bool = False
    """Whether its trainers are stopped and it waits for a new generation."""
    step: int = 0


@dataclass
class Membership:
    """The agents of one attempt."""

    limits: Limits
    ended: int = 0
    """The generations up to this one must end: their trainers hang."""
    generation: int = 0
    world: tuple[str, ...] = ()
    """The agents of the generation in the order of their ranks; empty if they are unknown."""
    store: str = ""
    closed: bool = False
    """Whether an agent ended the attempt: no further generation forms."""
    succeeded: bool = False
    """Whether it ended because the task is complete: trainers that still exit are not stopped."""
    forms_after: float = 0.0
    """No generation forms before: the agents of one that runs have not been heard yet."""
    lost: dict[str, float] = field(default_factory=dict)
    """Agents that were lost and did not return, with the time of their last heartbeat; the oldest first."""
    restarts: dict[int, Restart] = field(default_factory=dict)
    """The newest restarts by the generation that ended: one, however many agents tell it."""
    _agents: dict[str, _Agent] = field(default_factory=dict)
    _stepped: float = float("-inf")
    """When an agent of the generation last reported a new step: all its ranks were alive then."""
    _waiting_since: float | None = None
    """When the first of the agents that wait now began to."""

    def heartbeat(self, beat: Heartbeat, now: float) -> Reply:
        """Record ``beat``, form a generation if all is ready, and return what the agent must know."""
        self._adopt(beat, now)
        self._record(beat, now)
        self.expire(now)
        self._update_waiting(now)
        if self._is_ready(now):
            self._form()
        return self._reply(beat, now)

    @property
    def alive(self) -> list[str]:
        """Return the agents that are not lost, waiting ones included."""
        return list(self._agents)

    def expire(self, now: float) -> None:
        """Drop the agents that are lost by ``now``."""
        for name, agent in list(self._agents.items()):
            if now - self._last_alive(name, agent) > self.limits.lost_seconds:
                del self._agents[name]
                self.lost[name] = agent.last_seen
        while len(self.lost) > MAX_NODES:
            del self.lost[next(iter(self.lost))]

    def _adopt(self, beat: Heartbeat, now: float) -> None:
        """Take over the generation of ``beat`` if it is newer: this service was started after it formed."""
        if beat.generation > self.generation:
            self.generation, self.world, self.store = beat.generation, (), ""
        if beat.generation == self.generation and beat.world and not self.world:
            self.world = beat.world
            for agent in self.world:  # each has the usual time for its next heartbeat
                self._agents.setdefault(agent, _Agent(agent, now))

    def _record(self, beat: Heartbeat, now: float) -> None:
        self.closed |= beat.closing
        self.succeeded |= beat.succeeded
        self.lost.pop(beat.agent, None)
        self._record_restarts(beat)
        if beat.leaving:
            self._agents.pop(beat.agent, None)
            return
        is_member = beat.generation == self.generation or beat.agent not in self.world
        waiting = beat.joining and is_member  # else a late repetition from before this generation
        before = self._agents.get(beat.agent)
        if beat.generation == self.generation and before and beat.step > before.step > 0:
            self._stepped = now
        self._agents[beat.agent] = _Agent(beat.node, now, waiting, beat.step)
        if beat.store and beat.generation == self.generation and self._has_rank_0(beat.agent):
            self.store = beat.store

    def _record_restarts(self, beat: Heartbeat) -> None:
        """Record the restarts of ``beat``; none of a generation that its agent does not know yet."""
        for told in beat.restarts:
            if told.generation <= beat.generation:
                known = self.restarts.get(told.generation)
                cause = root_cause([told.cause, *([known.cause] if known else [])])
                if known is None or cause != known.cause:
                    self.restarts[told.generation] = Restart(beat.agent, cause)
        while len(self.restarts) > MAX_RESTARTS:
            del self.restarts[min(self.restarts)]

    def _has_rank_0(self, agent: str) -> bool:
        return self.world[:1] == (agent,)

    def _update_waiting(self, now: float) -> None:
        if not self._waiting:
            self._waiting_since = None
        elif self._waiting_since is None:
            self._waiting_since = now

    def _last_alive(self, name: str, agent: _Agent) -> float:
        """Return when ``agent`` was alive for certain: a step needs the ranks of all agents."""
        runs = name in self.world and not agent.waiting
        return max(agent.last_seen, self._stepped) if runs else agent.last_seen

    @property
    def _waiting(self) -> list[str]:
        return [name for name, agent in self._agents.items() if agent.waiting]

    @property
    def _broken(self) -> bool:
        """Return whether an agent of the generation is lost, has left or waits for the next one."""
        return any(name not in self._agents or self._agents[name].waiting for name in self.world)

    @property
    def _must_end(self) -> bool:
        return 0 < self.generation <= self.ended

    def _is_ready(self, now: float) -> bool:
        """Return whether a generation can form: every agent waits, and they are enough."""
        waiting = self._waiting
        if self.closed or now < self.forms_after:
            return False
        if len(waiting) < max(1, self.limits.min_nodes) or len(waiting) < len(self._agents):
            return False
        remains = any(name in self.world for name in waiting)  # of the generation before
        return len(waiting) >= self.limits.wanted_nodes or remains or self._is_settled(now)

    def _is_settled(self, now: float) -> bool:
        since = self._waiting_since
        return since is not None and now - since >= self.limits.settle_seconds

    def _form(self) -> None:
        """Form the next generation: of the waiting agents those that were in the last one come first."""
        waiting = self._waiting
        waiting.sort(key=lambda name: (name not in self.world, *self._order(name)))
        self.world = tuple(sorted(waiting[: self.limits.wanted_nodes], key=self._order))
        self.generation = max(self.generation, self.ended) + 1
        self.store, self._stepped = "", float("-inf")
        for name in self.world:
            self._agents[name].waiting = False
        self._waiting_since = None

    def _order(self, name: str) -> tuple[list[str | int], str]:
        return natural(self._agents[name].node), name

    def _reply(self, beat: Heartbeat, now: float) -> Reply:
        is_member = beat.agent in self.world
        current = beat.generation == self.generation
        must_reform = self._must_end or self._broken or not is_member or self._can_grow(now)
        return Reply(
            boot="",
            generation=self.generation,
            world=() if current else self.world,
            store=self.store,
            broken=self._broken,
            lost=any(name in self.lost for name in self.world),
            reform=must_reform and not self.succeeded,
            closed=self.closed,
            ended=self.ended,
            unknown=current and not self.world and self.generation > 0,
        )

    def _can_grow(self, now: float) -> bool:
        """Return whether agents wait that the generation has room for: all that are wanted, or settled."""
        waiting, wanted = len(self._waiting), self.limits.wanted_nodes
        if not waiting or len(self.world) >= wanted:
            return False
        return len(self.world) + waiting >= wanted or self._is_settled(now)
