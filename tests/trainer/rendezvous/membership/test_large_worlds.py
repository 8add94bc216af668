"""Heartbeats of worlds of all sizes: how often they are sent, and what each costs."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import pytest

from fluxtrain.rendezvous.membership import Limits, Membership, heartbeat_seconds
from fluxtrain.rendezvous.messages import Heartbeat


@pytest.mark.parametrize(
    ("num_agents", "seconds"), [(1, 0.5), (500, 0.5), (501, 0.501), (1000, 1.0), (4096, 4.096)]
)
def test_agents_of_large_worlds_send_fewer_heartbeats(num_agents: int, seconds: float) -> None:
    assert heartbeat_seconds(num_agents) == seconds
    world = tuple(f"agent-{number}" for number in range(num_agents))
    service = Membership(Limits(1, num_agents))
    beat = Heartbeat(sequence=1, attempt=1, agent=world[0], node="a", generation=1, world=world)
    assert service.heartbeat(beat, 0.0).heartbeat_seconds == seconds
    service.expire(max(6.0, 3 * seconds))
    assert not service.lost
    service.expire(max(6.0, 3 * seconds) + 0.1)
    assert list(service.lost) == [world[0]]
    leaving = [beat.model_copy(update={"agent": name, "leaving": True}) for name in world]
    replies = [service.heartbeat(beat, 20.0) for beat in leaving]
    assert replies[-1].heartbeat_seconds == seconds, "the others still send as seldom"


class Name(str):
    """A name that counts how often it is looked up or compared."""

    operations = 0
    __slots__ = ()

    def __hash__(self) -> int:
        Name.operations += 1
        return super().__hash__()

    def __eq__(self, other: object) -> bool:
        Name.operations += 1
        return super().__eq__(other)


def operations_per_heartbeat(num_agents: int, num_waiting: int, num_spares: int) -> float:
    """Return the lines that run, and the names that are compared, while each agent sends one heartbeat."""
    names = [Name(f"agent-{number:05d}") for number in range(num_agents + num_spares)]
    world = tuple(names[:num_agents])
    service = Membership(Limits(1, num_agents + num_spares + 1))
    plain = Heartbeat(sequence=1, attempt=1, agent="a", node="a", generation=1, step=5)
    beats = [
        plain.model_copy(update={"agent": name, "joining": number < num_waiting, "world": world})
        for number, name in enumerate(names)
    ]
    spare = {"generation": 0, "joining": True, "world": ()}
    beats[num_agents:] = [beat.model_copy(update=spare) for beat in beats[num_agents:]]
    for beat in beats:
        service.heartbeat(beat, 0.0)
    lines = 0

    def count(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal lines
        lines += 1
        return count

    Name.operations, seconds = 0, heartbeat_seconds(len(beats))
    traced = sys.gettrace()
    sys.settrace(count)
    try:
        for number, beat in enumerate(beats):
            service.heartbeat(beat, seconds * (1 + number / len(beats)))
    finally:
        sys.settrace(traced)
    return (lines + Name.operations) / len(beats)


@pytest.mark.parametrize(
    ("waiting", "spares"), [(0.0, 0.0), (0.5, 0.0), (0.0, 0.5)], ids=["train", "wait", "spare"]
)
def test_a_heartbeat_costs_the_same_in_a_large_world(waiting: float, spares: float) -> None:
    small, large = (
        operations_per_heartbeat(number, int(waiting * number), int(spares * number))
        for number in (64, 1024)
    )
    assert large < 1.5 * small
