"""The clocks of a small cluster's nodes, and what a leader has seen of the changes that they tell."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from fluxtrain_operator.base.names import Transition, seconds, stamp, transition
from fluxtrain_operator.base.reports import Progress
from fluxtrain_operator.planner.observed import NodeView, Observed, Pod


class NodeClocks:
    """Nodes whose clocks are ahead by ``offsets``, in seconds by name, watched by one leader at a time."""

    def __init__(self, offsets: Mapping[str, float]) -> None:
        self.offsets = offsets
        self._known: set[str] = set()
        self._transitions: dict[tuple[str, float], Transition] = {}

    def change_leader(self) -> None:
        """Forget what was seen: another leader has another cache, which lists all objects at once."""
        self._known, self._transitions = set(), {}

    def watch(self, observed: Observed, now: float) -> None:
        """Let the leader's cache see what has changed ``now``, whatever it plans from."""
        self.seen(observed, now)

    def seen(self, observed: Observed, now: float) -> Observed:
        """Return ``observed``, which has true times, with those that the leader's cache has."""
        service, answer = observed.rendezvous, observed.progress
        told = self._told(answer, observed.pods, now) if answer is not None else None
        return replace(
            observed,
            pods=tuple(self._pod(pod, now) for pod in observed.pods),
            rendezvous=None if service is None else self._pod(service, now),
            nodes={name: self._node(node, now) for name, node in observed.nodes.items()},
            progress=told,
            any_progress=told or observed.any_progress,
        )

    def _pod(self, pod: Pod, now: float) -> Pod:
        newest, offset = pod.finished or pod.started, self.offsets.get(pod.node, 0.0)
        if newest is None:
            self._known.add(pod.uid)
            return pod
        shift = offset + self._transition(pod.uid, newest + offset, pod.created, now).shift
        return replace(
            pod,
            started=None if pod.started is None else pod.started + shift,
            finished=None if pod.finished is None else pod.finished + shift,
        )

    def _node(self, node: NodeView, now: float) -> NodeView:
        told = node.since + self.offsets[node.name]
        newest = self._transition(node.name, told, node.created, now)
        return replace(node, since=newest.time, told_since=told)

    def _transition(self, name: str, told: float, created: float, now: float) -> Transition:
        """Return the transition that the leader knows; a watch that lags may tell an older one again."""
        newest = transition(
            told,
            self._transitions.get((name, told)),
            is_watched=name in self._known,
            earliest=created,
            now=now,
        )
        self._known.add(name)
        self._transitions[name, told] = newest
        return newest

    def _told(self, answer: Progress, pods: tuple[Pod, ...], now: float) -> Progress:
        """Return rank 0's ``answer`` as it is told now; one without ranks is of an older trainer."""
        last = seconds(answer.status.last_step_time)
        if last is None or not answer.ranks:
            return answer
        node = next((pod.node for pod in pods if pod.uid == answer.ranks[0].pod), "")
        told = stamp(last + self.offsets.get(node, 0.0))
        status = answer.status.model_copy(update={"last_step_time": told})
        return replace(answer, status=status, seconds_since_step=now - last)
