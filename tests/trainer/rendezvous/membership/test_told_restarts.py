"""Restarts that agents tell: one for each generation, with its root cause."""

from __future__ import annotations

from tests.trainer.rendezvous.membership.simulated_agents import agents

from fluxtrain.contract.process import MAX_RESTARTS
from fluxtrain.rendezvous.membership import Limits, Membership
from fluxtrain.rendezvous.messages import Heartbeat, Restart


def test_a_fault_that_several_agents_tell_is_one_restart_with_its_root_cause() -> None:
    job = agents()
    job.start("a", "b", "c")
    job.run(2)
    assert job.told() == {}
    for name, cause in (("a", "ProcessFailed"), ("b", "ProcessKilled"), ("c", "ProcessFailed")):
        job.fail_and_tell(name, cause)
    job.run(3)
    assert job.told() == {1: ("b", "ProcessKilled")}
    job.fail_and_tell("c", "ProcessFailed")
    job.run(3)
    job.fail_and_tell("a", "a cause of a newer version")
    job.run(3)
    second, third = ("c", "ProcessFailed"), ("a", "ProcessFailed")
    assert job.told() == {1: ("b", "ProcessKilled"), 2: second, 3: third}


def test_restarts_outlive_the_agents_that_tell_them_and_the_service() -> None:
    job = agents()
    job.start("a", "b", "c")
    job.run(2)
    job.fail_and_tell("c", "ProcessKilled")
    job.run(3)
    job.beat("c", leaving=True)
    job.kill("c")
    job.fail_and_tell("a", "ProcessFailed")
    job.run(3)
    assert set(job.told()) == {1, 2}
    before, job.service = job.told(), Membership(Limits(1, 3), forms_after=job.now + 2)
    job.run(3)
    assert job.told() == {2: before[2]}, "the agent that told the other one has ended"


def test_a_restart_of_a_generation_that_its_agent_does_not_know_is_ignored() -> None:
    job = agents(wanted=1)
    job.start("a")
    job.run(2)
    job.beat("a", restarts=(Restart(generation=2), Restart(generation=9_007_199_254_740_991)))
    assert job.told() == {}


def test_the_newest_restarts_are_kept() -> None:
    service = Membership(Limits(1, 1))
    for number in range(1, 3 * MAX_RESTARTS):
        restarts = (Restart(generation=number),)
        beat = Heartbeat(
            sequence=number,
            attempt=1,
            agent="a",
            node="a",
            generation=number + 1,
            restarts=restarts,
        )
        service.heartbeat(beat, 1.0)
    assert sorted(service.restarts) == [*range(2 * MAX_RESTARTS, 3 * MAX_RESTARTS)]
