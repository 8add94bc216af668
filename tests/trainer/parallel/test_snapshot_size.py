"""The memory of snapshots, computed from the config, is what the ranks of a node reserve."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fluxtrain.contract.run.config import RunConfig, Sharding
from fluxtrain.contract.run.resolve import merge, resolve
from fluxtrain.model.flux import Flux
from fluxtrain.model.layers import adapted_layers
from fluxtrain.model.lora import add_adapters
from fluxtrain.optim import OPTIMIZERS, make_optimizer
from fluxtrain.parallel.distributed import World
from fluxtrain.parallel.node_memory import image_bytes, snapshot_bytes
from fluxtrain.state.checkpoint import training_state
from fluxtrain.state.slots import Shard, offsets, rows_of, source_of
from fluxtrain.state.staging import State

OPEN = {"logging": {"mlperf": {"division": "open"}}}


def config_of(preset: str, **changes: Any) -> RunConfig:
    return resolve(merge(merge({"preset": preset}, OPEN), changes))


def state_of(config: RunConfig) -> State:
    with torch.device("meta"):
        parameters = Flux(config.model).named_parameters()
    return {f"{kind}.{name}": p.detach() for name, p in parameters for kind in ("model", "m", "v")}


def require_reserved(config: RunConfig, state: State, num_shards: int) -> None:
    reserved = offsets(rows_of(state), Shard(0, num_shards))[-1]
    assert image_bytes(config, num_shards) == reserved


@pytest.mark.parametrize("num_shards", [1, 2, 3, 7, 8, 32, 64, 5000])
@pytest.mark.parametrize(
    ("preset", "model"),
    [
        ("micro", {}),
        ("openmoji", {"depth": 0}),
        ("openmoji", {"depth_single_blocks": 0}),
        ("mlperf-schnell", {"depth": 2, "guidance_embed": True}),
    ],
)
def test_an_image(preset: str, model: dict[str, Any], num_shards: int) -> None:
    config = config_of(preset, model=model)
    require_reserved(config, state_of(config), num_shards)


@pytest.mark.parametrize("adapter", [None, {"rank": 4, "split_qkv": True}])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_state_of_every_optimizer(name: Any, adapter: dict[str, Any] | None) -> None:
    """Compare with the state that a run saves; and that of a shard with its rows."""
    ema = 0.9 if name == "lion" else None
    optimizer = {"name": name, "learning_rate": 0.1, "ema_decay": ema}
    config = config_of("micro", optim=optimizer, adapter=adapter, initial_weights="flux")
    with torch.device("meta"):
        model = Flux(config.model)
    if config.adapter is not None:
        add_adapters(model, adapted_layers(config.model, config.adapter), torch.float32)
    state = training_state(model, make_optimizer(model, config.optim))
    for num_shards in (1, 2, 7):
        require_reserved(config, state, num_shards)


@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if name != "schedule_free_adamw"])
def test_the_state_of_weights_in_bfloat16(name: Any) -> None:
    optimizer = {"name": name, "learning_rate": 0.1, "ema_decay": 0.9 if name == "lion" else None}
    precision = {"compute": "bfloat16", "weights": "bfloat16"}
    config = config_of("micro", optim=optimizer, precision=precision)
    with torch.device("meta"):
        model = Flux(config.model).bfloat16()
    state = training_state(model, make_optimizer(model, config.optim, torch.bfloat16))
    for num_shards in (1, 2, 7):
        require_reserved(config, state, num_shards)


@pytest.mark.parametrize("replicas", [1, 2, 4, "per-node"])
@pytest.mark.parametrize(("fewest", "most"), [(1, 1), (1, 2), (2, 2), (2, 5), (3, 8)])
@pytest.mark.parametrize("ranks", [1, 3, 8])
def test_a_node_has_room_for_all_numbers_of_nodes(
    fewest: int, most: int, ranks: int, replicas: int | str
) -> None:
    config = config_of("micro", parallel={"dp_replicate": replicas})
    reserved = 0
    for nodes in range(fewest, most + 1):
        count = Sharding.of(config, nodes * ranks, ranks).dp_shard
        world = World(0, 0, nodes * ranks, torch.device("cpu"), ranks, nodes)
        images = 1 if source_of(world, Shard(0, count)) is None else 2
        reserved = max(reserved, 2 * images * ranks * image_bytes(config, count))
    counts = range(fewest * ranks, most * ranks + 1, ranks)
    assert snapshot_bytes(config, counts, ranks) == reserved


@pytest.mark.parametrize(
    ("changes", "nodes", "gigabytes"),
    [
        ({}, range(8, 9), 71.4),
        ({}, range(4, 9), 142.7),
        ({}, range(1, 2), 285.4),
        ({"parallel": {"dp_replicate": "per-node"}}, range(8, 9), 285.4),
        ({"checkpoint": {"memory_every_steps": 0}}, range(8, 9), 0),
        ({"checkpoint": {"memory_every_steps": 5}}, range(8, 9), 71.4),
        ({"task": "sample"}, range(8, 9), 0),
    ],
)
def test_flux(changes: dict[str, Any], nodes: range, gigabytes: float) -> None:
    counts = [8 * count for count in nodes]
    size = snapshot_bytes(config_of("mlperf-schnell", **changes), counts, 8)
    assert size / 1e9 == pytest.approx(gigabytes, rel=1e-3)
