"""Generations of agents, decided from heartbeats at chosen times."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.trainer.rendezvous.membership.simulated_agents import agents

from fluxtrain.rendezvous.membership import Limits, Membership
from fluxtrain.rendezvous.messages import Heartbeat


def test_a_generation_forms_as_soon_as_all_wanted_agents_wait() -> None:
    job = agents()
    job.start("c", "a")
    job.run(10)
    assert job.running == set()
    job.start("b")
    job.run(1)
    assert job.running == {"a", "b", "c"}
    assert (job.service.generation, job.service.world) == (1, ("a", "b", "c"))


def test_the_first_generation_waits_for_further_agents_but_not_forever() -> None:
    job = agents(minimum=2)
    job.start("a")
    job.run(60)
    assert not job.running
    job.start("b")
    job.run(1)
    assert job.running == {"a", "b"}
    job = agents(minimum=2)
    job.start("a", "b")
    job.run(29)
    assert not job.running
    job.run(2)
    assert job.running == {"a", "b"}


def test_the_rest_goes_on_without_a_lost_agent_at_once() -> None:
    job = agents()
    job.start("a", "b", "c")
    job.run(2)
    job.kill("b")
    job.run(6)
    assert job.running == {"a", "b", "c"} - {"b"}
    assert job.service.generation == 1
    job.run(1.5)
    assert job.service.world == ("a", "c")
    assert job.running == {"a", "c"}


def test_too_few_agents_wait_for_a_replacement() -> None:
    job = agents(minimum=2, wanted=2)
    job.start("a", "b")
    job.run(2)
    job.kill("b")
    job.run(100)
    assert job.running == set()
    job.start("d")
    job.run(1)
    assert job.service.world == ("a", "d")
    assert job.service.generation == 2


def test_an_agent_that_joins_again_ends_the_generation_once() -> None:
    job = agents()
    job.start("a", "b", "c")
    job.run(2)
    job.fail("b")
    job.run(3)
    assert job.service.generation == 2
    assert job.running == {"a", "b", "c"}
    late = Heartbeat(sequence=0, attempt=1, agent="b", node="b", generation=1, joining=True)
    job.service.heartbeat(late, job.now)  # repeated after the generation was formed
    job.run(5)
    assert job.service.generation == 2


def test_a_new_agent_is_taken_in_once_all_wanted_ones_are_there_or_the_time_is_over() -> None:
    job = agents(wanted=4)
    job.start("a", "b")
    job.run(35)
    job.start("c")
    job.run(10)
    assert job.running == {"a", "b"}
    assert job.service.generation == 1
    job.start("d")
    job.run(2)
    assert job.running == {"a", "b", "c", "d"}
    assert job.service.generation == 2
    job = agents(wanted=4)
    job.start("a", "b")
    job.run(35)
    job.start("c")
    job.run(33)
    assert job.running == {"a", "b", "c"}
    assert job.service.generation == 2


def test_agents_beyond_the_wanted_number_are_spares() -> None:
    job = agents(wanted=2)
    job.start("a", "b")
    job.run(2)
    job.start("0")
    job.run(60)
    assert job.running == {"a", "b"}
    assert job.service.generation == 1
    job.kill("a")
    job.run(8)
    assert job.running == {"0", "b"}
    assert job.service.generation == 2


def test_a_larger_wanted_number_takes_the_spares_in() -> None:
    job = agents(wanted=2)
    job.start("a", "b", "c")
    job.run(3)
    assert job.running == {"a", "b"}
    job.service.limits = Limits(1, 3)
    job.run(2)
    assert job.running == {"a", "b", "c"}


def test_an_agent_that_leaves_is_not_waited_for() -> None:
    job = agents()
    job.start("a", "b", "c")
    job.run(2)
    job.beat("c", leaving=True)
    job.kill("c")
    job.run(1.5)
    assert job.running == {"a", "b"}


def test_a_frozen_agent_that_returns_stops_its_trainers_and_joins() -> None:
    job = agents()
    job.start("a", "b", "c")
    job.run(2)
    frozen = (job.generations["c"], job.worlds["c"])
    job.kill("c")
    job.run(10)
    job.generations["c"], job.worlds["c"] = frozen
    reply = job.beat("c")
    assert reply.generation == 2
    assert "c" in job.waiting
    job.run(2)
    assert job.running == {"a", "b", "c"}
    assert job.service.generation == 3


def test_a_silent_agent_is_not_lost_while_steps_are_reported() -> None:
    """Its ranks take part in each of them: the agent alone is frozen, or cut off from the service."""
    job = agents()
    job.start("a", "b", "c")
    job.run(2)
    job.kill("c")
    for step in range(1, 61):
        job.now += 0.5
        job.beat("a", step=step)
        assert not job.beat("b").reform
    job.run(8)
    assert job.running == {"a", "b"}
    assert job.service.generation == 2


def test_a_closed_attempt_forms_no_generation() -> None:
    job = agents()
    job.start("a", "b", "c")
    job.run(2)
    job.beat("a", closing=True)
    assert job.beat("b").closed
    job.fail("b")
    job.run(60)
    assert job.service.generation == 1


def test_trainers_that_still_exit_after_a_success_are_not_stopped() -> None:
    job = agents()
    job.start("a", "b", "c")
    job.run(2)
    job.beat("a", closing=True, succeeded=True, leaving=True)
    assert not job.beat("b").reform


def test_only_rank_0_reports_the_store() -> None:
    job = agents()
    job.start("a", "b", "c")
    job.run(2)
    job.beat("b", store="b:1")
    assert job.beat("c").store == ""
    job.beat("a", store="a:1")
    assert job.beat("c").store == "a:1"
    job.fail("c")
    job.run(2)
    assert job.beat("c").store == ""


def assert_sets_match(service: Membership) -> None:
    """Compare the sets that are kept up to date with what they say, member by member."""
    waiting = {name for name, agent in service._agents.items() if agent.waiting}
    members = set(service.world)
    assert service._members == members
    assert service._waiting == waiting
    assert service._running == members & set(service._agents) - waiting
    assert service._remaining == members & waiting
    assert service._lost_members == members & set(service.lost)


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["start", "kill", "fail", "restart", "end", "wait"]),
        st.sampled_from("abcdef"),
        st.floats(0, 12),
    ),
    max_size=25,
)


@settings(deadline=None)
@given(EVENTS, st.integers(1, 3), st.integers(3, 5))
def test_after_any_history_as_many_train_as_can(
    events: list[tuple[str, str, float]], minimum: int, wanted: int
) -> None:
    job, must_end = agents(minimum, wanted), 0
    for kind, name, seconds in events:
        if kind == "start" and name not in job.generations:
            job.start(name)
        elif kind == "kill" and name in job.generations:
            job.kill(name)
        elif kind == "fail" and name in job.running:
            job.fail(name)
        elif kind == "restart":
            job.service = Membership(Limits(minimum, wanted), must_end, forms_after=job.now + 2)
        elif kind == "end":
            must_end = job.service.generation
            job.service = Membership(Limits(minimum, wanted), must_end, forms_after=job.now + 2)
        before = job.service.generation
        job.run(seconds)
        assert job.service.generation >= before
        assert len(job.service.world) <= wanted
        assert_sets_match(job.service)
    job.run(150)
    alive = len(job.generations)
    assert len(job.running) == (min(alive, wanted) if alive >= minimum else 0)
    quiet = job.service.generation
    job.run(90)
    assert job.service.generation == quiet  # and then nothing changes


def test_a_lost_agent_is_listed_until_it_returns_or_leaves() -> None:
    job = agents()
    job.start("a", "b", "c")
    job.run(2)
    assert (sorted(job.service.alive), job.service.lost) == (["a", "b", "c"], {})
    job.kill("b")
    job.run(8)
    assert (sorted(job.service.alive), set(job.service.lost)) == (["a", "c"], {"b"})
    job.start("b")
    job.run(2)
    assert (sorted(job.service.alive), job.service.lost) == (["a", "b", "c"], {})
    job.beat("b", leaving=True)
    job.kill("b")
    job.run(8)
    assert (sorted(job.service.alive), job.service.lost) == (["a", "c"], {})


def test_an_agent_is_lost_without_any_further_heartbeat() -> None:
    service = Membership(Limits(1, 1))
    service.heartbeat(Heartbeat(sequence=1, attempt=1, agent="a", node="a"), 10.0)
    service.expire(16.0)
    assert not service.lost
    service.expire(16.1)
    assert service.lost == {"a": 10.0}
