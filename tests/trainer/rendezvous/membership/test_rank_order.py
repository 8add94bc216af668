"""Ranks are ordered by place, node and pod; numbers by their value."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
from tests.trainer.rendezvous.membership.simulated_agents import Agents

from fluxtrain.contract.process import natural, read_places, write_places
from fluxtrain.rendezvous.membership import Limits, Membership
from fluxtrain.rendezvous.messages import Heartbeat, rank_order_key


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
    assert Heartbeat(sequence=0, attempt=1, agent="a", node=key).node == key


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
        beat = Heartbeat(sequence=sequence, attempt=1, agent=pod, node=key, joining=True)
        service.heartbeat(beat, now=float(sequence))
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
        beat = Heartbeat(
            sequence=index, attempt=1, agent=pod, node=key, node_name=node, joining=True
        )
        service.heartbeat(beat, now=float(index))
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
        beat = Heartbeat(
            sequence=sequence, attempt=1, agent=pod, node=pod, node_name=node, joining=True
        )
        service.heartbeat(beat, now=float(sequence))
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
