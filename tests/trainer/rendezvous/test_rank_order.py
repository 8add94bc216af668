"""Ranks are ordered by topology, node and pod; numbers by their value."""

from __future__ import annotations

import pytest

from fluxtrain.rendezvous.membership import Limits, Membership
from fluxtrain.rendezvous.messages import Heartbeat
from fluxtrain.rendezvous.rank_order import natural, rank_order_key


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
