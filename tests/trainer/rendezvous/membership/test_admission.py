"""Of two nodes with the same rank one is admitted; none that starts other trainers."""

from __future__ import annotations

from fluxtrain.rendezvous.messages import Heartbeat
from fluxtrain.rendezvous.service import Admission


def beat(
    agent: str, rank: int | None = None, setup: str = "setup", leaving: bool = False
) -> Heartbeat:
    return Heartbeat(
        sequence=1,
        attempt=1,
        agent=agent,
        node=agent,
        node_name=f"host-of-{agent}",
        node_rank=rank,
        setup=setup,
        leaving=leaving,
    )


def test_the_first_of_two_nodes_with_a_rank_is_admitted() -> None:
    admission = Admission("setup", lost_seconds=6)
    for now in range(0, 30, 5):
        assert admission.refusal(beat("a", rank=1), now) == ""
        refusal = admission.refusal(beat("b", rank=1), now + 1)
        assert refusal == "--node-rank: got 1; host-of-a has this rank already"
        assert admission.refusal(beat("c", rank=2), now + 1) == ""


def test_the_rank_of_a_lost_node_is_free_again() -> None:
    admission = Admission("setup", lost_seconds=6)
    assert admission.refusal(beat("a", rank=0), 0) == ""
    assert admission.refusal(beat("b", rank=0), 6) != ""
    assert admission.refusal(beat("b", rank=0), 6.1) == ""
    assert admission.refusal(beat("a", rank=0), 6.2) != "", "it returned too late"


def test_the_rank_of_a_node_that_left_is_free_at_once() -> None:
    admission = Admission("setup")
    assert admission.refusal(beat("a", rank=0), 0) == ""
    assert admission.refusal(beat("a", rank=0, leaving=True), 1) == ""
    assert admission.refusal(beat("b", rank=0), 1) == ""


def test_nodes_without_ranks_are_admitted_if_they_start_the_same_trainers() -> None:
    admission = Admission("8 processes")
    assert admission.refusal(beat("a", setup="8 processes"), 0) == ""
    assert admission.refusal(beat("b", setup="8 processes"), 0) == ""
    refusal = admission.refusal(beat("c", setup="4 processes"), 0)
    assert refusal == "this node starts 4 processes; the node with the rendezvous 8 processes"
