"""Generations of agents, decided from heartbeats at chosen times."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from types import FrameType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.trainer.rendezvous.membership.simulated_agents import Agents, agents, training

from fluxtrain.contract.process import MAX_RESTARTS, natural, read_places, write_places
from fluxtrain.rendezvous.membership import UNHEARD_SECONDS, Limits, Membership, heartbeat_seconds
from fluxtrain.rendezvous.messages import Heartbeat, Restart, rank_order_key
from fluxtrain.rendezvous.service import Admission


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
    job = training()
    job.kill("b")
    job.run(6)
    assert job.running == {"a", "b", "c"} - {"b"}
    assert job.service.generation == 1
    job.run(1.5)
    assert job.service.world == ("a", "c")
    assert job.running == {"a", "c"}


def test_too_few_agents_wait_for_a_replacement() -> None:
    job = training("ab", minimum=2)
    job.kill("b")
    job.run(100)
    assert job.running == set()
    job.start("d")
    job.run(1)
    assert job.service.world == ("a", "d")
    assert job.service.generation == 2


def test_an_agent_that_joins_again_ends_the_generation_once() -> None:
    job = training()
    job.fail("b")
    job.run(3)
    assert job.service.generation == 2
    assert job.running == {"a", "b", "c"}
    late = beat("b", generation=1, joining=True)
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
    job = training("ab")
    job.start("0")
    job.run(60)
    assert job.running == {"a", "b"}
    assert job.service.generation == 1
    job.kill("a")
    job.run(8)
    assert job.running == {"0", "b"}
    assert job.service.generation == 2


def test_a_larger_wanted_number_takes_the_spares_in() -> None:
    job = training(wanted=2)
    assert job.running == {"a", "b"}
    job.service.limits = Limits(1, 3)
    job.run(2)
    assert job.running == {"a", "b", "c"}


def test_an_agent_that_leaves_is_not_waited_for() -> None:
    job = training()
    job.beat("c", leaving=True)
    job.kill("c")
    job.run(1.5)
    assert job.running == {"a", "b"}


def test_a_frozen_agent_that_returns_stops_its_trainers_and_joins() -> None:
    job = training()
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
    job = training()
    job.kill("c")
    for step in range(1, 61):
        job.now += 0.5
        job.beat("a", step=step)
        assert not job.beat("b").reform
    job.run(8)
    assert job.running == {"a", "b"}
    assert job.service.generation == 2


def test_a_closed_attempt_forms_no_generation() -> None:
    job = training()
    job.beat("a", closing=True)
    assert job.beat("b").closed
    job.fail("b")
    job.run(60)
    assert job.service.generation == 1


def test_trainers_that_still_exit_after_a_success_are_not_stopped() -> None:
    job = training()
    job.beat("a", closing=True, succeeded=True, leaving=True)
    assert not job.beat("b").reform


def test_only_rank_0_reports_the_store() -> None:
    job = training()
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
    job = training()
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
    service.heartbeat(beat(), 10.0)
    service.expire(16.0)
    assert not service.lost
    service.expire(16.1)
    assert service.lost == {"a": 10.0}


def beat(agent: str = "a", **values: Any) -> Heartbeat:
    plain = {"sequence": 1, "attempt": 1, "agent": agent, "node": agent, "setup": "setup"}
    return Heartbeat(**{**plain, "node_name": f"host-of-{agent}", **values})


def test_the_first_of_two_nodes_with_a_rank_is_admitted() -> None:
    admission = Admission("setup", lost_seconds=6)
    for now in range(0, 30, 5):
        assert admission.refusal(beat("a", node_rank=1), now) == ""
        refusal = admission.refusal(beat("b", node_rank=1), now + 1)
        assert refusal == "--node-rank: got 1; host-of-a has this rank already"
        assert admission.refusal(beat("c", node_rank=2), now + 1) == ""


def test_the_rank_of_a_lost_node_is_free_again() -> None:
    admission = Admission("setup", lost_seconds=6)
    assert admission.refusal(beat("a", node_rank=0), 0) == ""
    assert admission.refusal(beat("b", node_rank=0), 6) != ""
    assert admission.refusal(beat("b", node_rank=0), 6.1) == ""
    assert admission.refusal(beat("a", node_rank=0), 6.2) != "", "it returned too late"


def test_the_rank_of_a_node_that_left_is_free_at_once() -> None:
    admission = Admission("setup")
    assert admission.refusal(beat("a", node_rank=0), 0) == ""
    assert admission.refusal(beat("a", node_rank=0, leaving=True), 1) == ""
    assert admission.refusal(beat("b", node_rank=0), 1) == ""


def test_nodes_without_ranks_are_admitted_if_they_start_the_same_trainers() -> None:
    admission = Admission("8 processes")
    assert admission.refusal(beat("a", setup="8 processes"), 0) == ""
    assert admission.refusal(beat("b", setup="8 processes"), 0) == ""
    refusal = admission.refusal(beat("c", setup="4 processes"), 0)
    assert refusal == "this node starts 4 processes; the node with the rendezvous 8 processes"


def test_a_fault_that_several_agents_tell_is_one_restart_with_its_root_cause() -> None:
    job = training()
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
    job = training()
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
    job = training("a")
    job.beat("a", restarts=(Restart(generation=2), Restart(generation=9_007_199_254_740_991)))
    assert job.told() == {}


def test_the_newest_restarts_are_kept() -> None:
    service = Membership(Limits(1, 1))
    for number in range(1, 3 * MAX_RESTARTS):
        restarts = (Restart(generation=number),)
        service.heartbeat(beat(generation=number + 1, restarts=restarts), 1.0)
    assert sorted(service.restarts) == [*range(2 * MAX_RESTARTS, 3 * MAX_RESTARTS)]


@pytest.mark.parametrize("first", ["a", "b", "c"])
def test_a_service_that_starts_empty_changes_nothing(first: str) -> None:
    job = training()
    job.service = Membership(Limits(1, 3), forms_after=job.now + 6)
    job.now += 4
    job.beat(first)
    job.run(30)
    assert job.running == {"a", "b", "c"}
    assert job.service.generation == 1


def test_a_service_that_starts_empty_sees_who_was_lost_meanwhile() -> None:
    job = training()
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


@pytest.mark.parametrize(("wanted", "left"), [(1, "a"), (2, "ab")])
def test_a_new_service_does_not_wait_for_agents_that_are_not_wanted(wanted: int, left: str) -> None:
    """Scaled down: the others end while the service is replaced, so none hears that they leave."""
    job = training()
    job.kill(*({"a", "b", "c"} - set(left)))
    job.service = Membership(Limits(1, wanted), forms_after=job.now + 2)
    job.beat("a")
    for name in left:
        job.fail(name)
    job.run(4)
    assert (job.service.generation, job.running) == (2, set(left))
    job.run(2 * UNHEARD_SECONDS)
    assert (job.service.generation, job.running) == (2, set(left))


def test_a_new_service_ends_a_generation_of_more_agents_than_are_wanted() -> None:
    job = training()
    job.service = Membership(Limits(1, 2), forms_after=job.now + 2)
    job.beat("a")
    assert job.beat("a").reform, "its trainers may hang: one whose peer has gone tells nobody"
    job.run(4)
    assert (job.service.generation, job.running) == (2, {"a", "b"})
    job.kill("c")
    job.run(60)
    assert (job.service.generation, job.running) == (2, {"a", "b"})


@pytest.mark.parametrize("late", [0.5, 5.5, 8, 33, 44])
@pytest.mark.parametrize("first", ["a", "b", "c"])
def test_agents_find_a_new_service_at_different_times(first: str, late: float) -> None:
    """No step is reported meanwhile: the trainers evaluate, save, or make a long step."""
    job = training()
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
    job = training()
    job.service = Membership(Limits(1, 3))
    for step in range(1, 200):
        job.now += 0.5
        assert not job.beat("a", step=step).reform
    assert sorted(job.service.alive) == ["a", "b", "c"]


def test_a_new_agent_alone_does_not_start_beside_a_generation_that_the_service_does_not_know() -> (
    None
):
    job = training("a")
    job.service = Membership(Limits(1, 1), forms_after=job.now + 2)
    job.start("b")
    job.beat("b")
    job.run(5)
    assert job.running == {"a"}
    assert job.service.generation == 1


def ended(job: Agents, generation: int, size: int = 3) -> Membership:
    """Return a service that starts empty and must end ``generation``."""
    return Membership(Limits(1, size), generation, forms_after=job.now + 2)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_generation_that_must_end_is_followed_by_one_of_the_same_agents(size: int) -> None:
    names = "abc"[:size]
    job = training(names)
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
    job = training()
    job.service = ended(job, 1)
    job.beat("a")  # so that it knows all three
    job.kill("c")
    job.run(60)  # the new service has not heard it yet
    assert (job.service.generation, job.running) == (2, {"a", "b"})


def test_a_zombie_of_a_generation_that_has_ended_restarts_nothing() -> None:
    job = training()
    zombie = job.generations["c"], job.worlds["c"]
    job.kill("c")
    job.run(10)
    assert job.service.generation == 2
    job.service = ended(job, 1)
    job.service.heartbeat(beat("c", generation=zombie[0], world=zombie[1]), job.now)  # heard first
    job.run(4)
    assert (job.service.generation, job.running) == (2, {"a", "b"})


def test_trainers_that_exit_after_a_success_are_not_restarted() -> None:
    job = training()
    job.service = ended(job, 1)
    job.beat("a", closing=True, succeeded=True, leaving=True)
    assert not job.beat("b").reform


@pytest.mark.parametrize(
    ("num_agents", "seconds"), [(1, 0.5), (500, 0.5), (501, 0.501), (1000, 1.0), (4096, 4.096)]
)
def test_agents_of_large_worlds_send_fewer_heartbeats(num_agents: int, seconds: float) -> None:
    assert heartbeat_seconds(num_agents) == seconds
    world = tuple(f"agent-{number}" for number in range(num_agents))
    service = Membership(Limits(1, num_agents))
    first = beat(world[0], generation=1, world=world)
    assert service.heartbeat(first, 0.0).heartbeat_seconds == seconds
    service.expire(max(6.0, 3 * seconds))
    assert not service.lost
    service.expire(max(6.0, 3 * seconds) + 0.1)
    assert list(service.lost) == [world[0]]
    leaving = [first.model_copy(update={"agent": name, "leaving": True}) for name in world]
    replies = [service.heartbeat(each, 20.0) for each in leaving]
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
    plain = beat(generation=1, step=5)
    beats = [
        plain.model_copy(update={"agent": name, "joining": number < num_waiting, "world": world})
        for number, name in enumerate(names)
    ]
    spare = {"generation": 0, "joining": True, "world": ()}
    beats[num_agents:] = [each.model_copy(update=spare) for each in beats[num_agents:]]
    for each in beats:
        service.heartbeat(each, 0.0)
    lines = 0

    def count(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal lines
        lines += 1
        return count

    Name.operations, seconds = 0, heartbeat_seconds(len(beats))
    traced = sys.gettrace()
    sys.settrace(count)
    try:
        for number, each in enumerate(beats):
            service.heartbeat(each, seconds * (1 + number / len(beats)))
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


@pytest.mark.parametrize(
    ("topology", "node", "key"),
    [
        (None, None, "job-0"),
        ("", "", "job-0"),  # the pod has no such label
        ("rack-1", None, "rack-1/job-0"),
        ("rack-1", "node7", "rack-1/node7/job-0"),
        ("", "node7", "node7/job-0"),
    ],
)
def test_the_key_of_a_pod(topology: str | None, node: str | None, key: str) -> None:
    given = {"FLUXTRAIN_TOPOLOGY": topology, "FLUXTRAIN_NODE": node}
    environment = {name: value for name, value in given.items() if value is not None}
    assert rank_order_key(environment, "job-0") == key


def test_the_longest_names_make_a_valid_key() -> None:
    environment = {"FLUXTRAIN_TOPOLOGY": "t" * 63, "FLUXTRAIN_NODE": "n" * 253}
    key = rank_order_key(environment, "h" * 63)
    assert beat(node=key).node == key


@pytest.mark.parametrize(
    "keys",
    [
        ["job-0", "job-1", "job-2", "job-10", "job-100"],
        ["node9/job-3", "node10/job-0"],
        ["a/n2/job-1", "a/n10/job-0", "b/n1/job-2"],
        ["2026-11-0", "2026-11-1", "2026-11-10"],
        ["7", "007b", "a"],
        ["", "a"],
    ],
)
def test_keys_sort_naturally(keys: list[str]) -> None:
    assert sorted(reversed(keys), key=natural) == keys


def test_ranks_are_ordered_by_rack_and_not_by_pod() -> None:
    racks = {"job-0": "b", "job-1": "a", "job-10": "a", "job-2": "a", "job-3": "b"}
    service = Membership(Limits(5, 5))
    for sequence, (pod, rack) in enumerate(racks.items()):
        key = rank_order_key({"FLUXTRAIN_TOPOLOGY": rack}, pod)
        service.heartbeat(beat(pod, node=key, node_name="", joining=True), now=float(sequence))
    assert service.world == ("job-1", "job-2", "job-10", "job-0", "job-3")


def told(places: Mapping[str, str]) -> dict[str, int]:
    """Return the places of nodes as the service reads them."""
    return read_places(write_places(places))


def world(places: Mapping[str, str], nodes: Sequence[str], keys: Sequence[str] = ()) -> list[str]:
    """Return the nodes in the order of their ranks; agent ``job-N`` is the one on the Nth node."""
    service = Membership(Limits(len(nodes), len(nodes)), places=told(places))
    for index, node in enumerate(nodes):
        pod = f"job-{index}"
        key = keys[index] if keys else rank_order_key({"FLUXTRAIN_NODE": node}, pod)
        service.heartbeat(beat(pod, node=key, node_name=node, joining=True), now=float(index))
    return [nodes[int(agent.removeprefix("job-"))] for agent in service.world]


RACKS = {"n1": "rack-10", "n2": "rack-9", "n3": "rack-10", "n4": "rack-9", "n5": "rack-9"}


@pytest.mark.parametrize(
    ("nodes", "ordered"),
    [
        (["n1"], ["n1"]),
        (["n9"], ["n9"]),
        (["n1", "n2"], ["n2", "n1"]),
        (["n1", "n2", "n3"], ["n2", "n1", "n3"]),
        (["n5", "n1", "n4", "n3", "n2"], ["n2", "n4", "n5", "n1", "n3"]),
        (["n0", "n1", "n9", "n2"], ["n2", "n1", "n0", "n9"]),  # two have no label
        (["n0", "n9"], ["n0", "n9"]),
    ],
)
def test_ranks_are_ordered_by_the_places_that_the_operator_told(
    nodes: list[str], ordered: list[str]
) -> None:
    assert world(RACKS, nodes) == ordered


def test_in_a_queue_ranks_of_a_place_are_ordered_by_pod() -> None:
    nodes = ["n5", "n3", "n2", "n4"]
    keys = [rank_order_key({}, f"job-{index}") for index in range(4)]
    assert world(RACKS, nodes, keys) == ["n5", "n2", "n4", "n3"]


def test_without_places_the_label_of_the_pod_decides_as_before() -> None:
    keys = ["b/n1/job-0", "a/n2/job-1", "n3/job-2"]
    assert world({}, ["n1", "n2", "n3"], keys) == ["n2", "n1", "n3"]


def test_agents_that_do_not_tell_their_node_come_last() -> None:
    service = Membership(Limits(3, 3), places=told(RACKS))
    for sequence, (pod, node) in enumerate({"job-0": "", "job-1": "n1", "job-2": ""}.items()):
        service.heartbeat(beat(pod, node_name=node, joining=True), now=float(sequence))
    assert service.world == ("job-1", "job-0", "job-2")


def test_other_places_end_no_generation_and_count_in_the_next_one() -> None:
    """A label has changed, and a service that starts empty is told it."""
    before, after = {"n0": "a", "n1": "b", "n2": "a"}, {"n0": "b", "n1": "a", "n2": "a"}
    job = Agents(Membership(Limits(2, 3), places=told(before)))
    job.nodes = {f"job-{index}": f"n{index}" for index in range(3)}
    job.start("job-0", "job-1", "job-2")
    job.run(2)
    assert job.service.world == ("job-0", "job-2", "job-1")
    job.service = Membership(Limits(2, 3), places=told(after))
    job.run(60)
    assert job.service.generation == 1
    assert job.service.world == ("job-0", "job-2", "job-1")
    job.fail("job-1")
    job.run(60)
    assert job.service.generation == 2
    assert job.service.world == ("job-1", "job-2", "job-0")
