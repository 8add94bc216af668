"""Generations that the operator ends, as their trainers hang."""

from __future__ import annotations

import pytest
from tests.trainer.rendezvous.membership.simulated_agents import Agents, agents

from fluxtrain.rendezvous.membership import Limits, Membership
from fluxtrain.rendezvous.messages import Heartbeat


def ended(job: Agents, generation: int, size: int = 3) -> Membership:
    """Return a service that starts empty and must end ``generation``."""
    return Membership(Limits(1, size), generation, forms_after=job.now + 2)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_generation_that_must_end_is_followed_by_one_of_the_same_agents(size: int) -> None:
    job = agents(wanted=size)
    names = "abc"[:size]
    job.start(*names)
    job.run(2)
    job.service = ended(job, 1, size)
    reply = job.beat("a")
    assert (reply.reform, reply.ended) == (True, 1)
    job.run(4)
    assert (job.service.generation, job.running) == (2, set(names))
    job.service = ended(job, 1, size)  # it is lost, and replaced by one with the same order
    job.run(30)
    assert (job.service.generation, job.running) == (2, set(names)), "no second restart"


def test_the_generation_after_one_that_must_end_is_always_newer() -> None:
    job = agents()
    job.start("a", "b", "c")
    job.service = ended(job, 7)
    job.run(4)
    assert (job.service.generation, job.running) == (8, {"a", "b", "c"})
    job.run(30)
    assert job.service.generation == 8


def test_an_agent_that_joins_late_is_part_of_the_generation_after() -> None:
    job = agents()
    job.start("a", "b")
    job.run(35)
    job.service = ended(job, 1)
    job.start("c")
    job.run(4)
    assert (job.service.generation, job.running) == (2, {"a", "b", "c"})


def test_a_generation_that_must_end_forms_again_without_a_lost_agent() -> None:
    job = agents()
    job.start("a", "b", "c")
    job.run(2)
    job.service = ended(job, 1)
    job.beat("a")  # so that it knows all three
    job.kill("c")
    job.run(60)  # the new service has not heard it yet
    assert (job.service.generation, job.running) == (2, {"a", "b"})


def test_a_zombie_of_a_generation_that_has_ended_restarts_nothing() -> None:
    job = agents()
    job.start("a", "b", "c")
    job.run(2)
    zombie = job.generations["c"], job.worlds["c"]
    job.kill("c")
    job.run(10)
    assert job.service.generation == 2
    job.service = ended(job, 1)
    late = {"agent": "c", "node": "c", "generation": zombie[0], "world": zombie[1]}
    job.service.heartbeat(Heartbeat(sequence=0, attempt=1, **late), job.now)  # heard first
    job.run(4)
    assert (job.service.generation, job.running) == (2, {"a", "b"})


def test_trainers_that_exit_after_a_success_are_not_restarted() -> None:
    job = agents()
    job.start("a", "b", "c")
    job.run(2)
    job.service = ended(job, 1)
    job.beat("a", closing=True, succeeded=True, leaving=True)
    assert not job.beat("b").reform
