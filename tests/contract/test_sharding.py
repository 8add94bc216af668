"""HSDP on any number of nodes: no replica shares a node with part of another one."""

from __future__ import annotations

import pytest

from fluxtrain.contract.run.config import RunConfig, Sharding, require_replicas
from fluxtrain.contract.run.resolve import resolve
from fluxtrain.errors import ConfigError


def make_config(dp_replicate: int | str) -> RunConfig:
    return resolve({"preset": "micro", "parallel": {"dp_replicate": dp_replicate}})


SHARDINGS: list[tuple[int | str, int, int, int, int]] = [
    # dp_replicate, nodes, ranks of a node, replicas, ranks of a replica
    (1, 8, 8, 1, 64),
    (8, 8, 8, 8, 8),
    (8, 7, 8, 7, 8),  # one node lost: still one replica on each node
    (8, 1, 8, 8, 1),
    (2, 2, 2, 2, 2),
    (2, 3, 2, 1, 6),  # two replicas would have one node and a half
    (4, 8, 8, 4, 16),
    (4, 6, 8, 3, 16),
    (16, 3, 8, 12, 2),
    (5, 7, 1, 1, 7),
    (1_000_000_000, 2, 3, 6, 1),
    ("per-node", 1, 1, 1, 1),
    ("per-node", 1, 8, 1, 8),
    ("per-node", 2, 2, 2, 2),
    ("per-node", 3, 2, 3, 2),
    ("per-node", 7, 8, 7, 8),
    ("per-node", 5, 1, 5, 1),
    ("per-node", 500, 8, 500, 8),
]


@pytest.mark.parametrize(("dp_replicate", "nodes", "per_node", "replicas", "shards"), SHARDINGS)
def test_replicas_and_shards(
    dp_replicate: int | str, nodes: int, per_node: int, replicas: int, shards: int
) -> None:
    sharding = Sharding.of(make_config(dp_replicate), nodes * per_node, per_node)
    assert (sharding.dp_replicate, sharding.dp_shard) == (replicas, shards)
    assert sharding.num_nodes == nodes


def nodes_of(sharding: Sharding, replica: int) -> set[int]:
    first = replica * sharding.dp_shard
    return {rank // sharding.ranks_per_node for rank in range(first, first + sharding.dp_shard)}


@pytest.mark.parametrize("dp_replicate", [1, 2, 3, 4, 6, 8, 16, 100, "per-node"])
def test_every_replica_is_part_of_one_node_or_has_whole_nodes(dp_replicate: int | str) -> None:
    config = make_config(dp_replicate)
    for num_nodes in range(1, 10):
        for per_node in range(1, 9):
            sharding = Sharding.of(config, num_nodes * per_node, per_node)
            assert sharding.dp_replicate * sharding.dp_shard == num_nodes * per_node
            replicas = [nodes_of(sharding, n) for n in range(sharding.dp_replicate)]
            assert sharding.crosses_nodes == any(len(nodes) > 1 for nodes in replicas)
            if sharding.crosses_nodes:
                assert sharding.dp_shard == len(replicas[0]) * per_node
                assert sum(map(len, replicas)) == num_nodes, "no node has two of them"
            if isinstance(dp_replicate, int):
                assert sharding.dp_replicate <= dp_replicate
                assert sharding.crosses_nodes <= (dp_replicate < num_nodes)
            else:
                assert replicas == [{node} for node in range(num_nodes)]


@pytest.mark.parametrize(("rank_counts", "text"), [([24], "24"), ([16, 24], "16 to 24")])
def test_a_fixed_number_must_divide_a_number_of_ranks(rank_counts: list[int], text: str) -> None:
    config = make_config(5)
    with pytest.raises(ConfigError, match=f"got 5; must divide the number of ranks, {text}$"):
        require_replicas(config, rank_counts)
    require_replicas(config, [*rank_counts, 25])
    require_replicas(make_config("per-node"), rank_counts)


@pytest.mark.parametrize("value", [2.0, 2, "per-node"])
def test_whole_floats_are_numbers_also_beside_a_word(value: object) -> None:
    config = resolve({"preset": "micro", "parallel": {"dp_replicate": value}})
    assert repr(config.parallel.dp_replicate) in ("2", "'per-node'")


@pytest.mark.parametrize("value", [0, -1, 1.5, 10**10, True, None, [], "2", "per_node", "node"])
def test_other_values_are_refused(value: object) -> None:
    text = r"dp_replicate: got .*; must be a whole number from 1 to 1000000000 or per-node(;|$)"
    with pytest.raises(ConfigError, match=text):
        resolve({"preset": "micro", "parallel": {"dp_replicate": value}})
