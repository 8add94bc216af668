"""The plan against published figures, the model itself, and the memory that forward passes allocate."""

import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from tests.paths import EXAMPLES
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.profiler import ProfilerActivity, profile

from fluxtrain.cli import main
from fluxtrain.contract.run.config import RunConfig, Sharding
from fluxtrain.contract.run.resolve import merge, resolve
from fluxtrain.errors import EXIT_OK, EXIT_USAGE, ConfigError
from fluxtrain.model import flux as latents
from fluxtrain.model import layers
from fluxtrain.model.blocks import DoubleStreamBlock, SingleStreamBlock, rotation
from fluxtrain.model.cost import (
    BYTES,
    first_layers_bytes,
    last_layers_bytes,
    recomputed_blocks,
    saved_by_double_block,
    saved_by_single_block,
)
from fluxtrain.model.flux import Flux
from fluxtrain.model.fp8 import use_fp8
from fluxtrain.model.layers import linear_layers
from fluxtrain.model.parameters import count_parameters
from fluxtrain.parallel.compile import attention_backend
from fluxtrain.parallel.parallelize import recompute_activations
from fluxtrain.parallel.traffic import sent_by_node, sent_by_rank
from fluxtrain.plan.estimate import make_plan
from fluxtrain.plan.table import render
from fluxtrain.runtime.devices import GPUS, peak_flops
from fluxtrain.train.memory import Memory, memory
from fluxtrain.train.micro_batch import USABLE

GIB = 2**30
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
# Partitions a graph into saved and recomputed tensors as inductor does, without compiling.
PARTITIONER = "aot_eager_decomp_partition"

# torch's tracer looks at .grad of inner tensors and means to hide its own warning, but cannot hide errors.
pytestmark = pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"
)


@pytest.fixture(autouse=True)
def nothing_compiled() -> Iterator[None]:
    yield
    if "torch._dynamo" in sys.modules:  # importing it takes seconds
        torch.compiler.reset()


def make_config(preset: str = "mlperf-schnell", **changes: Any) -> RunConfig:
    base = {"preset": preset, "logging": {"mlperf": {"division": "open"}}}  # changes are its point
    return resolve(merge(base, changes))


def at_size(latent_size: int, text_length: int, compiled: bool, recompute: float = 0) -> RunConfig:
    return make_config(
        data={"latent_size": latent_size, "text_length": text_length},
        parallel={"compile": compiled, "activation_checkpointing": recompute, "kernels": []},
    )


def memory_of(
    config: RunConfig, num_ranks: int, micro_batch: int = 1, accumulates: bool = False
) -> Memory:
    return memory(config, Sharding.of(config, num_ranks, num_ranks), micro_batch, accumulates)


def sent_bytes(config: RunConfig, num_ranks: int, accumulation: int = 1) -> int:
    return sent_by_rank(config, Sharding.of(config, num_ranks, num_ranks), accumulation)


def example(folder: Path, nodes: str) -> Path:
    """Return the MLPerf example with other ``nodes``."""
    text = (EXAMPLES / "mlperf-schnell.yaml").read_text()
    for old, new in (
        ("min: 8, max: 8", f"min: {nodes}"),
        ("mlperf: {", "mlperf: {division: open, "),
    ):
        assert old in text
        text = text.replace(old, new)
    (folder / "job.yaml").write_text(text)
    return folder / "job.yaml"


def on_meta(config: RunConfig) -> Flux:
    with torch.device("meta"):
        return Flux(config.model)


def loss_of(model: nn.Module, config: RunConfig, batch: int) -> Tensor:
    """Run the model on random inputs of the config's shapes, made here; return a mean square."""
    size, text, dtype = config.data.latent_size, config.data.text_length, next(model.parameters())
    clean = torch.randn(batch, config.latent_channels, size, size)
    prediction = model(
        latents.pack(clean).to(dtype),
        latents.image_ids(size, size),
        torch.randn(batch, text, config.model.context_in_dim).to(dtype),
        latents.text_ids(text),
        torch.rand(batch),
        torch.randn(batch, config.model.vec_in_dim).to(dtype),
    )
    return (latents.unpack(prediction, size, size).float() - clean).square().mean()


def saved_bytes(forward: Callable[[], object], model: nn.Module) -> int:
    """Return the bytes of all storages that autograd saves in ``forward``, parameters left out."""
    parameters = {p.untyped_storage()._cdata for p in model.parameters()}
    storages: dict[int, int] = {}
    alive: list[Tensor] = []  # so that no address is used twice

    def pack(tensor: Tensor) -> Tensor:
        alive.append(tensor)
        storage = tensor.untyped_storage()
        if storage._cdata not in parameters:
            storages[storage._cdata] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        forward()
    return sum(storages.values())


def compile_all(modules: list[nn.Module]) -> None:
    for module in modules:
        module.compile(backend=PARTITIONER, fullgraph=True)


@pytest.mark.parametrize(
    ("preset", "model"),
    [
        ("mlperf-schnell", {}),
        ("mlperf-schnell", {"guidance_embed": True}),
        ("openmoji", {"depth": 1, "depth_single_blocks": 1}),
        ("micro", {"mlp_ratio": 3.5}),
    ],
)
def test_parameter_counts_are_those_of_the_model(preset: str, model: dict[str, Any]) -> None:
    config = make_config(preset, model=model)
    flux, counts = on_meta(config), count_parameters(config.model)
    assert counts.total == sum(p.numel() for p in flux.parameters())
    assert counts.blocks[0] == sum(p.numel() for p in flux.double_blocks[0].parameters())
    assert counts.blocks[-1] == sum(p.numel() for p in flux.single_blocks[0].parameters())


def test_schnell_matches_the_reference_sheet() -> None:
    plan = make_plan(make_config(), 1, 8, "MI300X", 0.5)
    assert plan.parameters == plan.trainable_parameters == 11_891_178_560
    assert plan.flops_per_sample == pytest.approx(20.4137e12, rel=1e-5)
    assert plan.checkpoint_bytes == pytest.approx(142.7e9, rel=1e-3)
    assert plan.samples_per_second == pytest.approx(8 * 32.0, rel=1e-3)  # half of the dense peak
    assert plan.seconds == pytest.approx(30_000 * 512 / (8 * 32.0), rel=1e-3)
    large = make_plan(at_size(128, 512, compiled=False), 1, 8)
    assert large.flops_per_sample == pytest.approx(223.139e12, rel=1e-5)


def test_fp8_is_a_fraction_of_its_own_peak() -> None:
    plain, fp8 = (
        make_plan(make_config(precision={"fp8": recipe}), 1, 8, "B200")
        for recipe in ("none", "tensorwise")
    )
    assert plain.samples_per_second is not None
    assert fp8.samples_per_second == pytest.approx(plain.samples_per_second * 4 / 3, rel=1e-3)
    assert "Assumed: 20% of the B200's dense fp8 peak (the default)" in render(fp8)
    assert fp8.memory_bytes_per_gpu.activations < 0.9 * plain.memory_bytes_per_gpu.activations
    with pytest.raises(ConfigError, match=r"precision\.fp8: got 'rowwise'; MI250X has no fp8"):
        make_plan(make_config(precision={"fp8": "rowwise"}), 1, 8, "MI250X")


@pytest.mark.parametrize(("gpu", "peak"), [("MI300X", 163.4), ("MI355X", 157.3), ("H100", 66.9)])
def test_float32_is_a_fraction_of_its_own_peak(gpu: str, peak: float) -> None:
    plain, whole = (
        make_plan(make_config(precision={"compute": compute}), 8, 8, gpu, mfu)
        for compute, mfu in (("bfloat16", 0.3), ("float32", None))
    )
    assert whole.samples_per_second == pytest.approx(
        64 * peak * 1e12 * 0.3 / whole.flops_per_sample
    )
    assert plain.seconds is not None
    assert whole.seconds == pytest.approx(plain.seconds * GPUS[gpu].peak_flops / (peak * 1e12))
    text = render(whole)
    assert f"Assumed: 30% of the {gpu}'s dense float32 peak (the default)" in text
    assert "Assumed: float32 products as torch computes them, not in TF32." in text
    assert "float32 products" not in render(plain)


def test_the_table_says_what_is_trained_and_what_is_frozen() -> None:
    whole = render(make_plan(make_config("dev-finetune"), 1, 8, "MI300X"))
    assert "11,901,408,320  all trained" in whole
    assert "  float32, this rank's shard" in whole
    adapters = render(make_plan(make_config("dev-lora"), 1, 1, "MI300X"))
    assert "11,901,408,320  frozen; 76,578,816 of adapters are trained" in adapters
    assert "frozen as computed with, adapters float32" in adapters
    assert "adapters and optimizer state" in adapters


@pytest.mark.parametrize(
    ("changes", "nodes", "limit", "row"),
    [
        ({}, (8, 8), None, "66 GiB  in the memory of each node, at its fewest nodes"),
        ({}, (4, 8), None, "133 GiB  in the memory of each node, at its fewest nodes"),
        ({}, (8, 8), 76, "at its fewest nodes"),
        ({}, (8, 8), 75, "fewest nodes: DO NOT FIT in limits.memory, 75 GiB; none are taken"),
        ({"checkpoint": {"memory_every_steps": 0}}, (8, 8), 8, "none are taken in memory"),
    ],
)
def test_the_memory_of_snapshots(
    changes: dict[str, Any], nodes: tuple[int, int], limit: int | None, row: str
) -> None:
    plan = make_plan(
        make_config(**changes),
        nodes[1],
        8,
        fewest_nodes=nodes[0],
        memory_limit=limit * GIB if limit else None,
    )
    (line,) = (line for line in render(plan).splitlines() if line.startswith("  snapshots "))
    assert line.endswith(row)


def test_the_state_has_sixteen_bytes_per_parameter_and_is_sharded() -> None:
    half, eighth = (memory_of(make_config(), num_ranks, accumulates=True) for num_ranks in (2, 8))
    assert half.weights + half.gradients + half.optimizer == pytest.approx(95.15e9, rel=1e-3)
    for part in ("weights", "gradients", "optimizer"):
        assert getattr(eighth, part) == pytest.approx(getattr(half, part) / 4, rel=1e-6)
    assert eighth.total == sum(eighth.model_dump().values()) - eighth.total


@pytest.mark.parametrize(("compute", "width"), [("bfloat16", 6), ("float32", 4)])
def test_a_single_rank_also_has_its_weights_in_the_compute_dtype(compute: str, width: int) -> None:
    found = memory_of(make_config(precision={"compute": compute}), 1, accumulates=True)
    assert found.weights == found.optimizer * width // 8
    assert found.gradients == found.optimizer // 2
    assert found.gathered == 0


def test_a_single_rank_keeps_gradients_of_one_micro_batch_as_they_come() -> None:
    parallel = {"activation_checkpointing": 1.0}
    for optim, bytes_of_one in (({}, 2), ({"name": "lion", "learning_rate": 1e-5}, 4)):
        config = make_config(parallel=parallel, optim=optim)
        sums, one = (memory_of(config, 1, accumulates=each).gradients for each in (True, False))
        count = count_parameters(config.model).total
        assert sums == 4 * count
        assert 0.99 * bytes_of_one * count < one <= bytes_of_one * count


def test_each_replica_has_the_whole_state() -> None:
    config = make_config(parallel={"dp_replicate": 4})
    plan = make_plan(config, 4, 8)
    assert (plan.dp_replicate, plan.dp_shard) == (4, 8)
    alone = make_plan(make_config(), 1, 8).memory_bytes_per_gpu
    assert plan.memory_bytes_per_gpu.weights == alone.weights


def test_with_a_replica_per_node_a_node_sends_its_gradients_only() -> None:
    per_node, plain = (
        make_plan(
            make_config(parallel={"dp_replicate": value, "reshard_after_forward": True}), 7, 8
        )
        for value in ("per-node", 1)
    )
    assert (per_node.dp_replicate, per_node.dp_shard) == (7, 8)
    alone = make_plan(make_config(), 1, 8)
    assert per_node.memory_bytes_per_gpu.weights == alone.memory_bytes_per_gpu.weights
    assert (alone.node_communication_bytes_per_step, alone.shards_cross_nodes) == (0, False)
    gradients = 4 * 11_891_178_560
    assert per_node.node_communication_bytes_per_step == round(2 * gradients * 6 / 7)
    assert plain.node_communication_bytes_per_step == plain.communication_bytes_per_step
    for plan in (per_node, plain):
        sent = (
            plan.node_communication_bytes_per_step + plan.communication_bytes_within_node_per_step
        )
        assert sent == 8 * plan.communication_bytes_per_step
    assert per_node.communication_bytes_within_node_per_step == pytest.approx(8 * 83.2e9, rel=1e-2)
    assert "7 × 8 shards)" in render(per_node)
    assert "to other nodes: gradients only, no shard group crosses nodes" in render(per_node)
    assert "to other nodes: shard groups of 56 ranks cross nodes" in render(plain)
    assert "sent by each node" not in render(alone)


def test_fewer_replicas_than_requested_are_named() -> None:
    config = make_config(parallel={"dp_replicate": 8})
    assert "(7 × 8 shards, not 8: each is part of one node, or whole nodes)" in render(
        make_plan(config, 7, 8)
    )
    assert "(8 × 8 shards)" in render(make_plan(config, 8, 8))
    assert "(1 × 24 shards, not 2" in render(
        make_plan(make_config(parallel={"dp_replicate": 2}), 3, 8)
    )


@pytest.mark.parametrize("dp_replicate", [1, 2, 4, 8, 24, "per-node"])
@pytest.mark.parametrize(("nodes", "per_node"), [(1, 8), (2, 2), (3, 8), (4, 6), (5, 1), (8, 8)])
def test_a_node_sends_what_the_rings_of_its_ranks_send_to_other_nodes(
    dp_replicate: int | str, nodes: int, per_node: int
) -> None:
    config = make_config(parallel={"dp_replicate": dp_replicate})
    sharding = Sharding.of(config, nodes * per_node, per_node)
    shards, replicas = sharding.dp_shard, sharding.dp_replicate
    padded = count_parameters(config.model, shards).total
    gradients = 2 * 4 * padded / shards * (replicas - 1) / replicas
    within = [range(first, first + shards) for first in range(0, nodes * per_node, shards)]
    between = [range(first, nodes * per_node, shards) for first in range(shards)]
    weights = sent_by_rank(config, sharding, 1) - gradients
    sent = [0.0] * nodes
    for rings, of_rank in ((within, weights), (between, gradients)):
        for ring in rings:
            for rank, following in zip(ring, [*ring[1:], ring[0]], strict=True):
                sent[rank // per_node] += of_rank * (rank // per_node != following // per_node)
    assert sent == pytest.approx([sent_by_node(config, sharding, 1)] * nodes, abs=4)


def test_without_resharding_the_whole_model_is_gathered() -> None:
    config = make_config(parallel={"reshard_after_forward": False})
    more, less = memory_of(config, 8).gathered, memory_of(make_config(), 8).gathered
    assert more > 23.8e9 > 8 * less


def test_gradients_do_not_exist_beside_all_activations() -> None:
    once, accumulating = (memory_of(make_config(), 8, 32, each) for each in (False, True))
    assert once.gradients < 0.1 * accumulating.gradients
    assert accumulating.total - once.total == pytest.approx(accumulating.weights, rel=0.1)
    plan = make_plan(make_config(schedule={"global_batch_size": 256}), 1, 8, "H200")
    assert plan.gpu_memory_bytes == 143_771 * 2**20
    assert (plan.micro_batch_size, plan.fits) == (32, True)
    assert plan.largest_micro_batch is not None
    assert plan.largest_micro_batch >= 32


def test_padding_of_small_shards_counts() -> None:
    config = make_config("openmoji")
    padded = memory_of(config, 512).weights
    assert padded > 1.8 * 4 * count_parameters(config.model).total / 512
    assert padded == 4 * count_parameters(config.model, 512).total // 512


@pytest.mark.parametrize(
    ("reshard", "reduce", "gigabytes"),
    [(True, "float32", 95.1), (False, "float32", 71.3), (False, "bfloat16", 47.6)],
)
def test_communication_matches_the_reference_sheet(
    reshard: bool, reduce: str, gigabytes: float
) -> None:
    config = make_config(parallel={"reshard_after_forward": reshard}, precision={"reduce": reduce})
    sent = sent_bytes(config, 8)
    assert sent == pytest.approx(gigabytes * 1e9 * 7 / 8, rel=2e-3)
    assert sent_bytes(config, 8, accumulation=3) == pytest.approx(3 * sent)


def test_replicas_also_all_reduce_their_shards_and_a_single_rank_sends_nothing() -> None:
    within, both = make_config(), make_config(parallel={"dp_replicate": 2})
    assert sent_bytes(both, 16) - sent_bytes(within, 8) == pytest.approx(5.95e9, rel=1e-3)
    assert make_plan(make_config("openmoji"), 1, 0).communication_bytes_per_step == 0


def test_replicas_reduce_once_a_step_unless_in_bfloat16() -> None:
    for reduce, times in (("float32", 1), ("bfloat16", 4)):
        config = make_config(parallel={"dp_replicate": 2}, precision={"reduce": reduce})
        sharding = Sharding.of(config, 16, 8)
        once, several = (sent_by_node(config, sharding, accumulation) for accumulation in (1, 4))
        assert several == pytest.approx(times * once)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({}, "× 16 per step; the sum of gradients, in bfloat16, has an error of about 0.44 %"),
        ({"precision": {"weights": "float32"}}, "× 16 per step"),
        ({"schedule": {"global_batch_size": 8}}, "× 1 per step"),
        ({"parallel": {"dp_replicate": 2}}, "× 16 per step"),  # waiting, they sum in float32
        (
            {"parallel": {"dp_replicate": 2}, "precision": {"reduce": "bfloat16"}},
            "× 16 per step; the sum of gradients, in bfloat16, has an error of about 0.44 %",
        ),
    ],
    ids=str,
)
def test_the_error_of_gradients_that_are_summed_in_bfloat16_is_told(
    changes: dict[str, Any], says: str
) -> None:
    run = {
        "preset": "dev-finetune",
        "precision": {"weights": "bfloat16"},
        "schedule": {"global_batch_size": 128},
        "parallel": {"micro_batch_size": 1},
    }
    lines = render(make_plan(resolve(merge(run, changes)), 1, 8)).splitlines()
    (line,) = (line for line in lines if line.startswith("  micro batch "))
    assert line.endswith(f" {says}")


def activation_bytes(config: RunConfig) -> tuple[int, int]:
    """Return the bytes saved per sample until backward, and those of a block that is being recomputed."""
    tokens = config.image_tokens + config.data.text_length
    inputs = tokens * config.model.hidden_size * BYTES[config.precision.compute]
    kept, live = first_layers_bytes(config) + last_layers_bytes(config), 0
    depth, singles = config.model.depths.values()
    fraction = config.parallel.activation_checkpointing
    for saved, num_blocks, recomputed in (
        (saved_by_double_block(config), depth, recomputed_blocks(depth, fraction)),
        (saved_by_single_block(config), singles, recomputed_blocks(singles, fraction, depth)),
    ):
        kept += (num_blocks - recomputed) * saved.bytes(tokens) + recomputed * inputs
        live = max(live, saved.bytes(tokens)) if recomputed else live
    return kept, live


@pytest.mark.parametrize(
    ("latent_size", "text", "compiled", "gib"),
    [
        (32, 256, False, 4.66),
        (64, 512, False, 13.97),
        (128, 512, False, 41.9),
        (32, 256, True, 3.21),
        (64, 512, True, 9.63),
        (128, 512, True, 28.9),
    ],
)
def test_activations_match_the_reference_sheet(
    latent_size: int, text: int, compiled: bool, gib: float
) -> None:
    kept, live = activation_bytes(at_size(latent_size, text, compiled))
    assert kept / GIB == pytest.approx(gib, rel=0.01)
    assert live == 0


@pytest.mark.parametrize(("latent_size", "text", "gib"), [(32, 256, 0.17), (128, 512, 1.5)])
def test_full_recomputation_saves_the_inputs_of_the_blocks(
    latent_size: int, text: int, gib: float
) -> None:
    kept, live = activation_bytes(at_size(latent_size, text, compiled=True, recompute=1))
    assert kept / GIB == pytest.approx(gib, rel=0.06)  # the sheet leaves out what is outside blocks
    assert live / GIB == pytest.approx(0.065 * gib / 0.17, rel=0.15)


@pytest.mark.parametrize(
    ("preset", "compute", "compiled"),
    [
        ("micro", "float32", False),
        ("micro", "bfloat16", False),
        ("openmoji", "float32", False),
        ("openmoji", "bfloat16", False),
        pytest.param("openmoji", "float32", True, marks=pytest.mark.slow),
    ],
)
def test_activations_are_those_that_autograd_saves(
    preset: str, compute: str, compiled: bool
) -> None:
    config = make_config(preset, precision={"compute": compute}, parallel={"compile": compiled})
    model = Flux(config.model).to(DTYPES[compute])
    if compiled:
        compile_all(model.blocks)
    measured = saved_bytes(lambda: loss_of(model, config, batch=3), model)
    assert 3 * activation_bytes(config)[0] == pytest.approx(measured, rel=0.02)


@pytest.mark.slow
def test_compiled_recomputing_blocks_save_as_estimated() -> None:
    config = make_config("openmoji", parallel={"compile": True, "activation_checkpointing": 1.0})
    model = Flux(config.model)
    recompute_activations(model, 1.0)
    compile_all(model.blocks)
    measured = saved_bytes(lambda: loss_of(model, config, batch=3), model)
    assert 3 * activation_bytes(config)[0] == pytest.approx(measured, rel=0.05)


@pytest.mark.parametrize(
    ("attention", "fp8", "compiled"),
    [
        ("flash", "none", False),
        ("math", "none", False),
        ("flash", "tensorwise", False),
        ("flash", "rowwise", False),
        pytest.param("flash", "none", True, marks=pytest.mark.slow),
        pytest.param("math", "none", True, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("kind", ["double", "single"])
def test_a_full_size_block_saves_as_estimated(
    kind: str, attention: str, fp8: str, compiled: bool
) -> None:
    config = make_config(
        parallel={"compile": compiled, "attention": attention, "kernels": []},
        precision={"fp8": fp8},
        data={"latent_size": 8, "text_length": 48},
    )
    hidden, heads, tokens = config.model.hidden_size, config.model.num_heads, 64
    make = DoubleStreamBlock if kind == "double" else SingleStreamBlock
    with torch.device("meta"):
        block = make(hidden, heads, 4 * hidden, config.model.qk_norm_eps).to(torch.bfloat16)
    # shapes count, values do not; only a compiler needs real weights
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    with contextlib.nullcontext() if compiled else fake:
        block.to_empty(device="cpu")
        if config.precision.fp8 != "none":
            model = nn.ModuleDict({f"{kind}_blocks": nn.ModuleList([block])})
            use_fp8(cast(Flux, model), config.precision.fp8, torch.device("cpu"))
        if compiled:
            compile_all([block])
        lengths = [tokens // 2, tokens // 2] if kind == "double" else [tokens]
        vec, *streams = (
            torch.zeros(*shape, hidden, dtype=torch.bfloat16, requires_grad=True)
            for shape in [(1,), *((1, length) for length in lengths)]
        )
        positions = rotation(torch.zeros(tokens, 3), config.model.axes_dim, config.model.theta)
        with attention_backend(attention):
            measured = saved_bytes(lambda: block(*streams, vec, positions), block)
    formula = saved_by_double_block if kind == "double" else saved_by_single_block
    assert formula(config).bytes(tokens) == pytest.approx(measured, rel=0.02)


@pytest.mark.parametrize("fraction", [0.0, 0.25, 0.5, 0.9, 1.0])
def test_as_many_blocks_recompute_as_estimated(fraction: float) -> None:
    config = make_config("openmoji", model={"depth": 3, "depth_single_blocks": 7})
    model = on_meta(config)
    recompute_activations(model, fraction)
    changed = ["forward" in vars(block) for block in model.blocks]
    assert sum(changed[:3]) == recomputed_blocks(3, fraction)
    assert sum(changed[3:]) == recomputed_blocks(7, fraction, start=3)


@pytest.mark.parametrize("fraction", [0.5, 1.0])
def test_recomputing_blocks_use_as_much_memory_as_estimated(fraction: float) -> None:
    config = make_config("openmoji", parallel={"activation_checkpointing": fraction})
    model = Flux(config.model)
    recompute_activations(model, fraction)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        loss = loss_of(model, config, batch=4)
    in_use = sum(event.self_cpu_memory_usage for event in profiled.key_averages())
    assert loss.requires_grad  # the graph, and what it keeps, is alive until here
    assert 4 * activation_bytes(config)[0] == pytest.approx(in_use, rel=0.05)


@pytest.mark.parametrize(("batch", "nodes"), [(512, 1), (256, 1), (64, 1), (4096, 8)])
def test_the_largest_micro_batch_is_the_last_that_fits(batch: int, nodes: int) -> None:
    config = make_config(schedule={"global_batch_size": batch})
    plan = make_plan(config, nodes, 8, "MI300X")
    largest = plan.largest_micro_batch
    assert largest is not None
    room = USABLE * GPUS["MI300X"].memory_bytes
    share = batch // (8 * nodes)
    last, more = (
        memory_of(config, 8 * nodes, largest + n, accumulates=largest + n < share).total
        for n in (0, 1)
    )
    assert last <= room < more
    assert plan.fits is (plan.micro_batch_size <= largest)


def test_a_model_that_does_not_fit_is_reported() -> None:
    plan = make_plan(make_config(schedule={"global_batch_size": 32}), 1, 1, "H100")
    assert (plan.largest_micro_batch, plan.fits) == (0, False)
    assert "DOES NOT FIT at any micro batch" in render(plan)


@pytest.mark.parametrize(
    ("batch", "nodes", "largest", "micro", "accumulation", "padded"),
    [
        (2304, 9, 32, 32, 1, 0),
        (72 * 40, 9, 32, 20, 2, 0),
        (512, 7, 32, 10, 1, 48),  # a share of 9.14
        (512, 3, 32, 22, 1, 16),
        (512, 3, 16, 11, 2, 16),
        (512, 3, 8, 8, 3, 64),
        (512, 8, 32, 8, 1, 0),
        (520, 8, 4, 3, 3, 56),  # a share of 8.125: 9 samples
        (16, 7, 32, 1, 1, 40),  # fewer samples than ranks
        (1, 1, 32, 1, 1, 7),
    ],
)
def test_unequal_shares_are_padded_as_little_as_possible(
    batch: int, nodes: int, largest: int, micro: int, accumulation: int, padded: int
) -> None:
    config = make_config(
        schedule={"global_batch_size": batch}, parallel={"micro_batch_size": largest}
    )
    plan = make_plan(config, nodes, 8, mfu=0.3)
    assert (plan.micro_batch_size, plan.accumulation_steps) == (micro, accumulation)
    assert plan.samples_per_rank == micro * accumulation
    assert plan.padded_samples == padded
    computed = nodes * 8 * plan.samples_per_rank
    assert plan.padding_percent == pytest.approx(100 * (1 - batch / computed))
    even = make_plan(config, 1, 1, mfu=0.3)
    assert plan.samples_per_second is not None
    assert even.samples_per_second is not None
    whole = plan.num_ranks * even.samples_per_second
    assert plan.samples_per_second == pytest.approx(whole * batch / computed)


def test_the_plan_reports_the_cost_of_padding(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = example(tmp_path, "4, max: 7")
    assert main(["plan", str(file)]) == EXIT_OK
    output = capsys.readouterr().out
    assert "10  of 9.143 needed: 48 samples, 8.6 % of the work, are padding" in output
    assert main(["plan", str(file), "--json"]) == EXIT_OK
    values = json.loads(capsys.readouterr().out)
    assert (values["samples_per_rank"], values["padded_samples"]) == (10, 48)
    assert values["padding_percent"] == pytest.approx(8.571, abs=1e-3)


@pytest.mark.parametrize(
    ("nodes", "replicate", "error"),
    [
        ("2, max: 3", 16, ""),
        ("1, max: 7", 5, ""),
        ("3, max: 3", 16, "parallel.dp_replicate: got 16; must divide the number of ranks, 24\n"),
    ],
)
def test_replicas_must_fit_one_size_of_the_job(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], nodes: str, replicate: int, error: str
) -> None:
    file = example(tmp_path, nodes)
    code = main(["plan", str(file), f"--parallel.dp_replicate={replicate}"])
    assert code == (EXIT_USAGE if error else EXIT_OK)
    assert error in capsys.readouterr().err


def test_wrong_arguments_are_refused() -> None:
    config = make_config()
    with pytest.raises(ConfigError, match=r"--gpu: got 'MI300B'; known: MI250X, MI300A, MI300X"):
        make_plan(config, 1, 8, "MI300B")
    with pytest.raises(ConfigError, match=r"--mfu: got 40; must be above 0 and at most 1"):
        make_plan(config, 1, 8, "h200", 40)


def test_the_json_has_plain_numbers() -> None:
    values = json.loads(json.dumps(make_plan(make_config(), 2, 8).model_dump()))
    parts = values.pop("memory_bytes_per_gpu")
    beside = ["encoders", "copied_ahead", "offload_buffers", "total"]
    assert list(parts) == ["weights", "gradients", "optimizer", "gathered", "activations", *beside]
    assert all(isinstance(value, int) for value in parts.values())
    for key in ("parameters", "flops_per_sample", "communication_bytes_per_step", "disk_bytes"):
        assert isinstance(values[key], int)
    assert isinstance(values["seconds"], float)


def test_the_table_has_units_and_assumptions() -> None:
    text = render(make_plan(make_config(), 1, 8))
    for part in (
        "11,891,178,560",
        "20.41 TFLOP",
        "GiB",
        "8 × MI300X",
        "Predicted: 36% of the MI300X's dense bfloat16 peak; --gpu, --mfu and --measured change it.",
    ):
        assert part in text
    assert max(len(line) for line in text.splitlines()) <= 110


def test_cpus_have_no_known_speed() -> None:
    plan = make_plan(make_config("micro"), 1, 0)
    assert (plan.gpu, plan.seconds, plan.largest_micro_batch) == (None, None, None)
    assert plan.memory_bytes_per_gpu.gathered == 0  # one rank in float32: nothing is sharded
    assert "unknown" in render(plan)


def test_cpus_have_a_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(example(tmp_path, "1, max: 1")), "--gpu=cpu"]) == EXIT_OK
    assert "1 × CPU process" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("device_name", "peak"),
    [
        ("AMD Instinct MI300X", 1307.4e12),
        ("AMD Instinct MI300X VF", 1307.4e12),
        ("AMD Instinct MI250X / MI250", 191.5e12),
        ("NVIDIA H100 80GB HBM3", 989.4e12),
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA GB200", 2500e12),
        ("NVIDIA B200", 2250e12),
        ("AMD Radeon Graphics", None),
        ("", None),
    ],
)
def test_peaks_are_found_by_the_device_names_of_torch(device_name: str, peak: float | None) -> None:
    assert peak_flops(device_name) == peak


def test_all_examples_but_those_that_prepare_have_a_plan(
    capsys: pytest.CaptureFixture[str],
) -> None:
    paths = sorted(EXAMPLES.rglob("*.yaml"))
    codes = {path.stem: main(["plan", str(path)]) for path in paths}
    refused = {name for name, code in codes.items() if code == EXIT_USAGE}
    assert refused == {"1-cc12m", "2-coco"}
    assert set(codes.values()) == {EXIT_OK, EXIT_USAGE}
    assert capsys.readouterr().err.count("spec.run.task: got 'prepare'; has no plan") == 2


def test_a_lora_trains_and_saves_its_adapters_only() -> None:
    plan, full = (
        make_plan(resolve({"preset": name}), 1, 1, "MI300X")
        for name in ("dev-lora", "dev-finetune")
    )
    assert plan.parameters == full.parameters == 11_901_408_320
    assert plan.trainable_parameters == 16 * 4_786_176
    assert plan.checkpoint_bytes == 12 * plan.trainable_parameters
    frozen = 2 * plan.parameters
    assert plan.memory_bytes_per_gpu.weights == frozen + 6 * plan.trainable_parameters
    assert plan.memory_bytes_per_gpu.optimizer == 8 * plan.trainable_parameters
    assert 0.6 < plan.flops_per_sample / full.flops_per_sample < 0.8


@pytest.mark.parametrize(("base_dtype", "width"), [("compute", 2), ("fp8", 1)])
def test_offloaded_blocks_are_in_host_memory_but_for_two(base_dtype: str, width: int) -> None:
    changes = {"preset": "dev-lora", "adapter": {"base_dtype": base_dtype}}
    kept, moved, all_moved = (
        make_plan(resolve({**changes, "parallel": {"offload_blocks": count}}), 1, 2, "H100")
        for count in (0, 20, 57)
    )
    # of a double and of a single block: the matrices; biases and norms are in bfloat16
    double, single = (width * n * 3072**2 for n in (36, 15))
    double, single = double + 2 * 2 * (15 * 3072 + 2 * 128), single + 2 * (11 * 3072 + 2 * 128)
    assert moved.memory_bytes_per_gpu.offload_buffers == 2 * double
    assert all_moved.offloaded_bytes_per_node == 2 * (19 * double + 38 * single)
    sent = (plan.communication_bytes_per_step for plan in (kept, moved))
    assert next(sent) > next(sent)
    alone = make_plan(resolve({**changes, "parallel": {"offload_blocks": 20}}), 1, 1, "H100")
    before = make_plan(resolve(changes), 1, 1, "H100")
    weights = [plan.memory_bytes_per_gpu.weights for plan in (before, alone)]
    assert weights[0] - weights[1] == alone.offloaded_bytes_per_node
    assert alone.offload_copied_bytes_per_step == 2 * (
        alone.offloaded_bytes_per_node - double - single
    )
    text = render(alone)
    assert ": hidden behind it" in text
    assert max(len(line) for line in text.splitlines()) <= 110
    tight = make_plan(
        resolve({**changes, "parallel": {"offload_blocks": 57}}), 1, 2, "H100", memory_limit=GIB
    )
    assert "page-locked, in each node: DO NOT FIT in limits.memory" in render(tight)
    assert "offload" not in render(before)


def test_the_adapters_of_a_deep_model_are_listed_a_few_times_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A plan tries dozens of micro batches, each with all blocks."""
    calls = []

    def counted(*arguments: Any) -> Any:
        calls.append(arguments)
        return linear_layers(*arguments)

    monkeypatch.setattr(layers, "linear_layers", counted)
    make_plan(resolve({"preset": "dev-lora", "adapter": {"rank": 7}}), 2, 8)
    assert 0 < len(calls) < 10
