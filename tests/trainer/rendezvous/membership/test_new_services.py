"""A service that starts empty, while its agents train."""

from __future__ import annotations

import pytest
from tests.trainer.rendezvous.membership.simulated_agents import agents

from fluxtrain.rendezvous.membership import UNHEARD_SECONDS, Limits, Membership


@pytest.mark.parametrize("first", ["a", "b", "c"])
def test_a_service_that_starts_empty_changes_nothing(first: str) -> None:
    job = agents()
    job.start("a", "b", "c")
    job.run(2)
    job.service = Membership(Limits(1, 3), forms_after=job.now + 6)
    job.now += 4
    job.beat(first)
    job.run(30)
    assert job.running == {"a", "b", "c"}
    assert job.service.generation == 1


def test_a_service_that_starts_empty_sees_who_was_lost_meanwhile() -> None:
    job = agents()
    job.start("a", "b", "c")
    job.run(2)
    job.kill("b")
    job.service = Membership(Limits(1, 3))
    job.run(UNHEARD_SECONDS)
    assert job.service.generation == 1
    assert sorted(job.service.alive) == ["a", "c"]
    assert not job.service.lost
    job.run(2)
    assert job.running == {"a", "c"}
    assert job.service.generation == 2
    assert list(job.service.lost) == ["b"]


@pytest.mark.parametrize("late", [0.5, 5.5, 8, 33, 44])
@pytest.mark.parametrize("first", ["a", "b", "c"])
def test_agents_find_a_new_service_at_different_times(first: str, late: float) -> None:
    """No step is reported meanwhile: the trainers evaluate, save, or make a long step."""
    job = agents()
    job.start("a", "b", "c")
    job.run(2)
    job.service = Membership(Limits(1, 3), forms_after=job.now + 2)
    for _ in range(int(late * 2)):
        job.now += 0.5
        reply = job.beat(first)
        assert not reply.reform
        assert not reply.lost
    job.run(10)
    assert job.running == {"a", "b", "c"}
    assert job.service.generation == 1
    job.kill("b")  # heard before: lost after the usual time
    job.run(8)
    assert job.running == {"a", "c"}


def test_an_agent_that_is_not_heard_yet_is_alive_if_its_world_makes_steps() -> None:
    job = agents()
    job.start("a", "b", "c")
    job.run(2)
    job.service = Membership(Limits(1, 3))
    for step in range(1, 200):
        job.now += 0.5
        assert not job.beat("a", step=step).reform
    assert sorted(job.service.alive) == ["a", "b", "c"]


def test_a_new_agent_alone_does_not_start_beside_a_generation_that_the_service_does_not_know() -> (
    None
):
    job = agents(wanted=1)
    job.start("a")
    job.run(2)
    job.service = Membership(Limits(1, 1), forms_after=job.now + 2)
    job.start("b")
    job.beat("b")
    job.run(5)
    assert job.running == {"a"}
    assert job.service.generation == 1
