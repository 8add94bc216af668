"""Weights in bfloat16: unbiased rounding by SplitMix64's bits, the same on any number of ranks."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from tests.trainer import ranks
from tests.trainer.numerics.full_tensor import full_tensor
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.testing import assert_close

from fluxtrain import optim
from fluxtrain.contract.process import RunPaths
from fluxtrain.contract.run.config import RunConfig
from fluxtrain.contract.run.optim import OptimConfig, ProdigyConfig
from fluxtrain.optim import optimizer as optimizer_module
from fluxtrain.optim.optimizer import LANES, Optimizer, Range, key_of, random_numbers, rounded
from fluxtrain.parallel.distributed import World, process_group
from fluxtrain.parallel.parallelize import finish_sharding
from fluxtrain.parallel.sharding import local_part
from fluxtrain.state.checkpoint import training_state

CPU = torch.device("cpu")
ONE, ZERO = torch.ones(()), torch.zeros(())
SHAPES = ((7, 3), (1,), (4, 2), (2, 5), (6,), (5, 300))
"""On 3 ranks none is divided evenly but the fourth, and three leave the third rank without a part."""
ALL = (
    OptimConfig(learning_rate=0.05),
    OptimConfig(name="adamw", learning_rate=0.05, ema_decay=0.7),
    OptimConfig(name="adamw_8bit", learning_rate=0.05),
    OptimConfig(name="adafactor", learning_rate=0.05),
    OptimConfig(name="lion", learning_rate=0.05),
    OptimConfig(name="prodigy", learning_rate=1.0, prodigy=ProdigyConfig(d0=1e-3)),
)
NAMES = [f"{config.name}{' with ema' * (config.ema_decay is not None)}" for config in ALL]


def numbers(count: int, *parts: object) -> Tensor:
    return random_numbers([Range(key_of(*parts), 0, count)], CPU)


# rounding


def test_exact_values_infinities_and_nan_stay() -> None:
    bits = torch.arange(1 << 16, dtype=torch.int32) << 16  # all numbers of bfloat16
    values = bits.view(torch.float32)
    for seed in range(3):
        found = rounded(values, numbers(len(values), seed))
        assert torch.equal(found.isnan(), values.isnan())
        kept = ~values.isnan()
        assert torch.equal(found.float()[kept].view(torch.int32), bits[kept])
    odd = torch.tensor([0x7F800001, 0x7FFFFFFF], dtype=torch.int32).view(torch.float32)  # NaN
    assert rounded(odd, numbers(2, 0)).isnan().all()


@pytest.mark.parametrize("value", [1.0, -1.0, 3e-39, -7.5e30, 1e-2])
@pytest.mark.parametrize("fraction", [1 / 65536, 1 / 1000, 1 / 3, 0.5, 65535 / 65536])
def test_the_probability_of_rounding_up_is_the_fraction(value: float, fraction: float) -> None:
    count = 1 << 20
    below = torch.tensor(value).bfloat16().float().view(torch.int32)
    low = round(fraction * (1 << 16))
    values = (below + low).view(torch.float32).expand(count).contiguous()
    found = rounded(values, numbers(count, value, fraction)).float().view(torch.int32)
    up = found == below + (1 << 16)
    assert torch.all(up | (found == below))
    exact = low / (1 << 16)
    deviation = (exact * (1 - exact) / count) ** 0.5
    assert abs(up.double().mean().item() - exact) < 6 * deviation


def test_the_error_of_a_long_walk_is_not_biased() -> None:
    values = torch.rand(1 << 16, generator=torch.Generator().manual_seed(0)) + 0.5
    exact, found = values.double(), values.bfloat16()
    for step in range(300):
        exact = found.double() if step == 0 else exact
        change = 1e-3 * 2**-8 * (1 + step % 3)
        exact = exact + change
        found = rounded(found.float() + change, numbers(len(values), step))
    error = found.double() - exact
    ulp = 2.0**-7
    # each step's error has a deviation of at most half an ulp times the root of its probability
    bound = ulp * (300 * 3e-3) ** 0.5 / len(values) ** 0.5
    assert abs(error.mean().item()) < 6 * bound
    moved = (found.float() - values.bfloat16().float()).mean().item()
    assert moved == pytest.approx(600 * 1e-3 * 2**-8, rel=0.05)


# steps


class Layers(nn.Module):
    """A weight of each shape, in ``dtype``."""

    def __init__(self, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        *narrow, wide = (torch.randn(shape, generator=generator) for shape in SHAPES)
        values = [*narrow, 0.1 * wide]
        self.weights = nn.ParameterList([each.bfloat16().to(dtype) for each in values])


def gradients(step: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(shape, generator=generator).bfloat16() for shape in SHAPES]


def set_gradients(model: Layers, step: int) -> None:
    for parameter, gradient in zip(model.weights, gradients(step), strict=True):
        parameter.grad = gradient.to(parameter.dtype)


def take(optimizer: Optimizer, max_norm: float = 2.0) -> None:
    never = torch.tensor(optim.NEVER)
    optim.update(optimizer, optimizer.gradient_norm(), max_norm, never)


@pytest.mark.parametrize("config", ALL, ids=NAMES)
def test_before_rounding_a_step_is_that_of_float32(config: OptimConfig) -> None:
    """Compare with float32 weights that are set to the rounded ones after each step; in small groups too."""
    ours, theirs = Layers(), Layers(torch.float32)
    one = optim.make_optimizer(ours, config, torch.bfloat16, seed=3)
    two = optim.make_optimizer(theirs, config, torch.float32)
    for step in range(1, 9):
        set_gradients(ours, step)
        set_gradients(theirs, step)
        with mock.patch.object(optimizer_module, "MOST_VALUES", 1 << 26 if step % 2 else 25):
            take(one)
        take(two)
        for index, (mine, other) in enumerate(zip(ours.weights, theirs.weights, strict=True)):
            assert mine.dtype == torch.bfloat16
            range_of = Range(key_of("rounding", 3, step, f"weights.{index}"), 0, mine.numel())
            bits = random_numbers([range_of], CPU)
            expected = rounded(other.detach().flatten(), bits).view(mine.shape)
            differs = (mine != expected).float().mean()
            assert differs < 0.01  # where float32 differs in its last digit
            assert_close(mine.float(), other.float(), rtol=2**-7, atol=1e-6)
            other.data.copy_(mine.float())
        for name, value in training_state(ours, one).items():
            if name.startswith("optimizer.") and ".ema." not in name:
                assert value.dtype != torch.bfloat16
                assert_close(value, training_state(theirs, two)[name], rtol=1e-4, atol=1e-6)
    assert_close(one.step_size, two.step_size)


def test_a_norm_is_that_of_float32() -> None:
    model = Layers()
    optimizer = optim.make_optimizer(model, ALL[0], torch.bfloat16)
    set_gradients(model, 1)
    expected = torch.cat([each.float().flatten() for each in gradients(1)]).norm()
    assert optimizer.gradient_norm().dtype == torch.float32
    assert_close(optimizer.gradient_norm(), expected)


def test_updates_of_a_thousandth_of_a_digit_are_taken_on_average() -> None:
    digit, steps = 2.0**-7, 400
    model = nn.ParameterList([torch.ones(64, 256, dtype=torch.bfloat16)])
    config = OptimConfig(name="lion", learning_rate=digit / 1000, weight_decay=0.0)
    optimizer = optim.make_optimizer(model, config, torch.bfloat16)
    for _ in range(steps):
        model[0].grad = torch.full_like(model[0], -1.0)
        optimizer.step(ONE, ZERO)
    moved = (model[0].float() - 1).mean().item() / digit
    count = model[0].numel()
    assert moved == pytest.approx(steps / 1000, abs=6 * (steps / 1000 / count) ** 0.5)
    nearest = torch.tensor(1.0, dtype=torch.bfloat16)
    assert nearest + digit / 1000 == nearest  # plain rounding loses them


@pytest.mark.parametrize("config", ALL, ids=NAMES)
def test_a_step_that_is_not_taken_changes_nothing(config: OptimConfig) -> None:
    model = Layers()
    optimizer = optim.make_optimizer(model, config, torch.bfloat16)
    set_gradients(model, 1)
    take(optimizer)
    before = {name: each.clone() for name, each in training_state(model, optimizer).items()}
    for parameter in model.weights:
        parameter.grad = torch.full_like(parameter, torch.inf)
    optim.update(optimizer, torch.tensor(torch.inf), 1.0, torch.tensor(2))
    after = training_state(model, optimizer)
    assert all(torch.equal(after[name], value) for name, value in before.items())


def test_an_evaluation_of_averages_gives_the_weights_back_to_the_bit() -> None:
    model = Layers()
    config = OptimConfig(learning_rate=0.05, ema_decay=0.9)
    optimizer = optim.make_optimizer(model, config, torch.bfloat16)
    for step in range(3):
        set_gradients(model, step)
        take(optimizer)
    before = {name: each.clone() for name, each in training_state(model, optimizer).items()}
    averages = [optimizer.state[each]["ema"].clone() for each in model.weights]

    def fail() -> None:
        with optimizer.evaluated():
            for parameter, average in zip(model.weights, averages, strict=True):
                assert not torch.equal(parameter.float(), average)
                error = (parameter.float() - average).abs()
                assert (error <= average.abs() * 2**-8).all()  # half a digit
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    after = training_state(model, optimizer)
    assert all(torch.equal(after[name], value) for name, value in before.items())


# ranks


def sharded(world: World) -> Layers:
    layers = Layers()
    if world.size > 1:
        finish_sharding(fully_shard(layers, mesh=world.mesh(1)))
    return layers


def follow(config: RunConfig, paths: RunPaths, world: World, *, port: int) -> None:
    """Take steps with equal gradients on shards, continued in the middle, and on whole weights."""
    ranks.set_environment(world, port)
    with process_group() as joined:
        for values in ALL:
            ours, theirs = sharded(joined), Layers()
            one, two = made(ours, values), made(theirs, values)
            for step in range(1, 7):
                set_gradients(theirs, step)
                for mine, other in zip(ours.weights, theirs.weights, strict=True):
                    mine.grad = like(mine, other.grad)
                    mine.data.copy_(like(mine, other.detach()))  # but for the order of sums, equal
                for optimizer in (one, two):
                    optimizer.step(ONE, ZERO)
                for mine, other in zip(ours.weights, theirs.weights, strict=True):
                    found = full_tensor(mine.detach())
                    if values.name in ("adamw", "adamw_8bit", "lion"):
                        assert torch.equal(found, other.detach()), values
                    assert (found != other).float().mean() < 0.01, values
                if step == 3:
                    ours, one = continued(joined, values, ours, one)


def made(model: Layers, values: OptimConfig) -> Optimizer:
    return optim.make_optimizer(model, values, torch.bfloat16, seed=11)


def like(parameter: Tensor, whole: Tensor | None) -> Any:
    """Return ``whole`` divided as ``parameter`` is."""
    assert whole is not None
    if not hasattr(parameter, "device_mesh"):
        return whole.clone()
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(whole, parameter.device_mesh, parameter.placements)


def continued(
    world: World, values: OptimConfig, model: Layers, optimizer: Optimizer
) -> tuple[Layers, Optimizer]:
    """Return a new model and optimizer that continue with the training state of these."""
    new = sharded(world)
    other = made(new, values)
    state = training_state(model, optimizer)
    for name, tensor in training_state(new, other).items():
        local_part(tensor).copy_(local_part(state[name]))
    other.resume(int(optimizer.steps_taken.item()))
    return new, other


@pytest.mark.parametrize("size", [1, 2, 3])
def test_shards_are_rounded_as_the_whole(tmp_path: Path, size: int) -> None:
    ranks.finish_all(follow, tmp_path, size)


FIRST = 0xE220A8397B1DCDAF
"""The first output of SplitMix64 with the seed 0, as published."""
WORD = (1 << 64) - 1


def split_mix(number: int) -> int:
    """Return output ``number``, from 1, of SplitMix64 with the seed 0, in Python's integers."""
    z = number * 0x9E3779B97F4A7C15 & WORD
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & WORD
    z = (z ^ z >> 27) * 0x94D049BB133111EB & WORD
    return z ^ z >> 31


def random_bits(*ranges: tuple[int, int, int]) -> list[int]:
    return [n & 0xFFFF for n in random_numbers([Range(*each) for each in ranges], CPU).tolist()]


def expected(key: int, begin: int, count: int) -> list[int]:
    return [
        split_mix(key + n // LANES) >> 16 * (n % LANES) & 0xFFFF
        for n in range(begin, begin + count)
    ]


def test_numbers_are_those_of_split_mix() -> None:
    assert split_mix(1) == FIRST
    assert random_bits((1, 0, 4)) == [FIRST >> shift & 0xFFFF for shift in (0, 16, 32, 48)]
    for key in (0, 1, key_of("a"), (1 << 62) - 1):
        assert random_bits((key, 0, 50)) == expected(key, 0, 50)


@pytest.mark.parametrize("cuts", [(1, 2, 3), (4, 5, 49), (17, 30, 31), (0, 50, 50)])
def test_parts_have_the_numbers_of_the_whole(cuts: tuple[int, ...]) -> None:
    key = key_of(7, 1, "weight")
    parts = [(key, begin, end - begin) for begin, end in pairwise((0, *cuts, 50))]
    assert random_bits(*parts) == expected(key, 0, 50)
    assert random_bits((5, 9, 2), *parts)[2:] == expected(key, 0, 50)


def test_numbers_are_even_and_streams_have_nothing_in_common() -> None:
    count = 1 << 18
    keys = [key_of(seed, step, name) for seed in (0, 1) for step in (1, 2) for name in "ab"]
    streams = [random_numbers([Range(key, 0, count)], CPU).double() / 2**15 for key in keys]
    for stream in streams:
        assert abs(stream.mean()) < 6 / (3 * count) ** 0.5  # six standard deviations
        assert stream.square().mean().item() == pytest.approx(
            1 / 3, abs=6 * (4 / 45 / count) ** 0.5
        )
        assert abs((stream[1:] * stream[:-1]).mean()) < 6 / 3 / count**0.5
    products = torch.stack(streams) @ torch.stack(streams).T / count
    assert (products - torch.eye(len(keys)) / 3).abs().max() < 6 / 3 / count**0.5


def test_keys_differ_where_any_part_does() -> None:
    keys = {key_of(*parts) for parts in (("a", 1), ("a", 2), ("b", 1), ("a", 11), ("a1", 1))}
    assert len(keys) == 5
    assert all(0 <= key < 1 << 62 for key in keys)
