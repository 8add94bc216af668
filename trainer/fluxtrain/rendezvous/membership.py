"""The agents of one attempt: who is in the current generation, and when the next one forms.

Decided from heartbeats alone; ``now`` is the service's monotonic clock in seconds. A service that starts
empty learns the current generation from the next heartbeats, so its loss costs no step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from fluxtrain.contract.process import LOST_SECONDS, MAX_RESTARTS, place_of, root_cause
from fluxtrain.rendezvous.messages import (
    HEARTBEAT_SECONDS,
    MAX_NODES,
    Heartbeat,
    RankReport,
    Reply,
    rank_order,
)


@dataclass(frozen=True)
class RecordedRestart:
    """The end of a generation because trainers failed, as one or more agents told it."""

    agent: str
    """The agent that tells the cause; of several with the same one the first."""
    cause: str


class Restarts(dict[int, RecordedRestart]):
    """The newest restarts by the generation that ended: one, however many agents tell it."""

    def record(self, beat: Heartbeat) -> None:
        """Record the restarts of ``beat``; none of a generation that its agent does not know yet."""
        for told in beat.restarts:
            if told.generation <= beat.generation:
                known = self.get(told.generation)
                cause = root_cause([told.cause, *([known.cause] if known else [])])
                if known is None or cause != known.cause:
                    self[told.generation] = RecordedRestart(beat.agent, cause)
        while len(self) > MAX_RESTARTS:
            del self[min(self)]


HEARTBEATS_PER_SECOND = 1000.0
"""Of all agents together; in larger worlds each sends fewer."""
LOST_HEARTBEATS = 3.0
"""An agent is not lost before it missed as many."""
UNHEARD_SECONDS = 45.0
"""An agent that this service knows only from the world of another is lost after this long: agents find a new
service at different times, as a DNS record can be cached for 30 s."""


def heartbeat_seconds(num_agents: int) -> float:
    """Return the time between two heartbeats of one of ``num_agents``."""
    return max(HEARTBEAT_SECONDS, num_agents / HEARTBEATS_PER_SECOND)


@dataclass(frozen=True)
class Limits:
    """The sizes of a generation, and how long to wait for agents."""

    min_nodes: int
    wanted_nodes: int
    """Agents beyond these wait as spares."""
    settle_seconds: float = 30.0
    """How long a first generation, or a larger one, waits for further agents up to the wanted number."""
    lost_seconds: float = LOST_SECONDS
    """Or three heartbeats, if they take longer."""
    unheard_seconds: float = UNHEARD_SECONDS
    """The same for an agent that a new service knows only from others, and that may not find it at once."""


@dataclass
class _Agent:
    node: str
    last_seen: float
    waiting: bool = False
    """Whether its trainers are stopped and it waits for a new generation."""
    step: int = 0
    heard: bool = True
    """Whether it sent a heartbeat to this service; else it is known from the world of another agent."""
    ranks: tuple[RankReport, ...] = ()
    node_name: str = ""


@dataclass
class Membership:
    """The agents of one attempt."""

    limits: Limits
    ended: int = 0
    """The generations up to this one must end: their trainers hang."""
    places: Mapping[str, int] = field(default_factory=dict)
    """Places of nodes, such as racks, as `read_places` returns them: ranks are ordered by them first."""
    generation: int = 0
    world: tuple[str, ...] = ()
    """The agents of the generation in the order of their ranks; empty if they are unknown."""
    store: str = ""
    closed: bool = False
    """Whether an agent ended the attempt: no further generation forms."""
    succeeded: bool = False
    """Whether it ended because the task is complete: trainers that still exit are not stopped."""
    exit_code: int = 0
    """Exit code of all agents, if an agent ended the attempt with one."""
    forms_after: float = 0.0
    """No generation forms before: the agents of one that runs have not been heard yet."""
    lost: dict[str, float] = field(default_factory=dict)
    """Agents that were lost and did not return, with the time of their last heartbeat; the oldest first."""
    restarts: Restarts = field(default_factory=Restarts)
    _agents: dict[str, _Agent] = field(default_factory=dict)
    _members: frozenset[str] = frozenset()
    """The agents in ``world``."""
    _waiting: set[str] = field(default_factory=set)
    _running: set[str] = field(default_factory=set)
    """The members that are alive and do not wait."""
    _remaining: set[str] = field(default_factory=set)
    _lost_members: set[str] = field(default_factory=set)
    _unheard: set[str] = field(default_factory=set)  # known from the world of another
    _most_agents: int = 0
    """The largest number of agents so far."""
    _expires_after: float = float("-inf")
    """Lost agents are looked for once per time between heartbeats: it costs as much as all agents have."""
    _stepped: float = float("-inf")
    """When an agent of the generation last reported a new step: all its ranks were alive then."""
    _waiting_since: float | None = None
    """When the first of the agents that wait now began to."""

    def heartbeat(self, beat: Heartbeat, now: float) -> Reply:
        """Record ``beat``, form a generation if all is ready, and return what the agent must know."""
        self._adopt(beat, now)
        self._record(beat, now)
        self._most_agents = max(self._most_agents, len(self._agents))
        if now >= self._expires_after:
            self.expire(now)
        if not self._waiting:
            self._waiting_since = None
        elif self._waiting_since is None:
            self._waiting_since = now
        if self._is_ready(now):
            self._form()
        return self._reply(beat, now)

    @property
    def alive(self) -> list[str]:
        """Return the agents that send heartbeats, or whose world makes steps; waiting ones included."""
        return [
            name
            for name, agent in self._agents.items()
            if agent.heard or self._last_alive(name, agent) > agent.last_seen
        ]

    def rank_reports(self, now: float) -> list[tuple[str, RankReport]]:
        """Return the progress by ``now`` of each rank, with its agent; none of agents that are not heard."""
        reports = []
        for name in self._running:
            agent = self._agents[name]
            age = now - agent.last_seen
            if age <= self._lost_seconds(agent):
                reports += [(name, report.aged(age)) for report in agent.ranks]
        return reports

    def expire(self, now: float) -> None:
        """Drop the agents that are lost by ``now``."""
        self._expires_after = now + self._heartbeat_seconds
        for name, agent in list(self._agents.items()):
            if now - self._last_alive(name, agent) > self._lost_seconds(agent):
                del self._agents[name]
                self.lost[name] = agent.last_seen
                self._update_sets(name)
        while len(self.lost) > MAX_NODES:
            oldest = next(iter(self.lost))
            del self.lost[oldest]
            self._update_sets(oldest)

    @property
    def _heartbeat_seconds(self) -> float:
        return heartbeat_seconds(self._most_agents)

    def _lost_seconds(self, agent: _Agent) -> float:
        seconds = max(self.limits.lost_seconds, LOST_HEARTBEATS * self._heartbeat_seconds)
        return seconds if agent.heard else max(seconds, self.limits.unheard_seconds)

    def _set_world(self, world: tuple[str, ...]) -> None:
        changed = self._members.union(world)
        self.world, self._members = world, frozenset(world)
        for name in changed:
            self._update_sets(name)

    def _update_sets(self, name: str) -> None:
        """Update the sets of agents after a change of ``name``: no heartbeat looks at all agents."""
        agent, is_member = self._agents.get(name), name in self._members
        waiting = agent is not None and agent.waiting
        for names, belongs in (
            (self._waiting, waiting),
            (self._running, is_member and agent is not None and not waiting),
            (self._remaining, is_member and waiting),
            (self._lost_members, is_member and name in self.lost),
            (self._unheard, agent is not None and not agent.heard),
        ):
            if belongs:
                names.add(name)
            else:
                names.discard(name)

    def _adopt(self, beat: Heartbeat, now: float) -> None:
        """Take over the generation of ``beat`` if it is newer: this service was started after it formed."""
        if beat.generation > self.generation:
            self.generation, self.store = beat.generation, ""
            self._set_world(())
        if beat.generation == self.generation and beat.world and not self.world:
            for agent in beat.world:
                self._agents.setdefault(agent, _Agent(agent, now, heard=False))
            self._set_world(beat.world)

    def _record(self, beat: Heartbeat, now: float) -> None:
        self.closed |= beat.closing
        self.succeeded |= beat.succeeded
        self.exit_code = self.exit_code or beat.exit_code
        self.lost.pop(beat.agent, None)
        self.restarts.record(beat)
        if beat.leaving:
            self._agents.pop(beat.agent, None)
            self._update_sets(beat.agent)
            return
        is_member = beat.generation == self.generation or beat.agent not in self._members
        waiting = beat.joining and is_member  # else a late repetition from before this generation
        before = self._agents.get(beat.agent)
        if beat.generation == self.generation and before and beat.step > before.step > 0:
            self._stepped = now
        self._agents[beat.agent] = _Agent(
            beat.node, now, waiting, beat.step, ranks=beat.ranks, node_name=beat.node_name
        )
        self._update_sets(beat.agent)
        has_rank_0 = beat.generation == self.generation and self.world[:1] == (beat.agent,)
        if beat.store and has_rank_0:
            self.store = beat.store

    def _last_alive(self, name: str, agent: _Agent) -> float:
        """Return when ``agent`` was alive for certain: a step needs the ranks of all agents."""
        runs = name in self._running
        return max(agent.last_seen, self._stepped) if runs else agent.last_seen

    @property
    def _broken(self) -> bool:
        """Return whether an agent of the generation is lost, has left or waits for the next one."""
        return len(self._running) < len(self._members)

    def _is_ready(self, now: float) -> bool:
        """Return whether a generation can form: every agent waits, and they are enough.

        If they are all that are wanted, those that this service has not heard may have left.
        """
        waiting = self._waiting
        if self.closed or now < self.forms_after:
            return False
        needless = len(self._unheard) if len(waiting) >= self.limits.wanted_nodes else 0
        awaited = len(self._agents) - needless
        if len(waiting) < max(1, self.limits.min_nodes) or len(waiting) < awaited:
            return False
        remains = bool(self._remaining)  # of the generation before
        return len(waiting) >= self.limits.wanted_nodes or remains or self._is_settled(now)

    def _is_settled(self, now: float) -> bool:
        since = self._waiting_since
        return since is not None and now - since >= self.limits.settle_seconds

    def _form(self) -> None:
        """Form the next generation: of the waiting agents those that were in the last one come first."""
        waiting = sorted(
            self._waiting, key=lambda name: (name not in self._members, *self._order(name))
        )
        world = tuple(sorted(waiting[: self.limits.wanted_nodes], key=self._order))
        self.generation = max(self.generation, self.ended) + 1
        self.store, self._stepped = "", float("-inf")
        for name in world:
            self._agents[name].waiting = False
        self._set_world(world)
        self._waiting_since = None

    def _order(self, name: str) -> tuple[object, ...]:
        agent = self._agents[name]
        return rank_order(place_of(agent.node_name, self.places), agent.node, name)

    def _reply(self, beat: Heartbeat, now: float) -> Reply:
        is_member = beat.agent in self._members
        current = beat.generation == self.generation
        # one of an earlier service may be for more nodes
        is_small_enough = len(self._members) <= self.limits.wanted_nodes
        is_whole = is_member and is_small_enough and not self._broken
        must_end = 0 < self.generation <= self.ended
        must_reform = must_end or not is_whole or self._can_grow(now)
        return Reply.model_construct(  # all values are checked; a world has thousands
            boot="",
            generation=self.generation,
            world=self.world if is_member and not current else (),
            store=self.store,
            broken=self._broken,
            lost=bool(self._lost_members),
            reform=must_reform and not self.succeeded,
            closed=self.closed,
            ended=self.ended,
            exit_code=self.exit_code,
            waiting=len(self._waiting),
            unknown=current and not self.world and self.generation > 0,
            heartbeat_seconds=self._heartbeat_seconds,
        )

    def _can_grow(self, now: float) -> bool:
        """Return whether agents wait that the generation has room for: all that are wanted, or settled."""
        waiting, wanted = len(self._waiting), self.limits.wanted_nodes
        if not waiting or len(self.world) >= wanted:
            return False
        return len(self.world) + waiting >= wanted or self._is_settled(now)
