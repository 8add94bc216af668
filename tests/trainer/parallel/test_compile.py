"""Compiled blocks and activation checkpointing do not change training, in any combination.

A C++ compiler needs half a minute for each kind of block. So most of this stops short of it: torch traces the
blocks, and divides forward and backward as for inductor.
"""

from __future__ import annotations

import json
import os
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tests.trainer import ranks
from tests.trainer.outputs import losses, records
from tests.trainer.ranks import CPU

from fluxtrain import optim
from fluxtrain.contract.process import RunPaths
from fluxtrain.contract.run.config import ParallelConfig, RunConfig
from fluxtrain.contract.run.resolve import merge, resolve
from fluxtrain.data.loader import training_batches
from fluxtrain.data.order import BatchShares
from fluxtrain.data.sources import open_sources
from fluxtrain.errors import ConfigError
from fluxtrain.model.flux import Flux
from fluxtrain.model.loss import FlowLoss
from fluxtrain.parallel import compile
from fluxtrain.parallel.compile import compile_blocks, compiles
from fluxtrain.parallel.distributed import World, process_group
from fluxtrain.parallel.parallelize import DTYPES, build_model, recompute_activations
from fluxtrain.report.observer import Observer

GPU = torch.device("cuda", 0)
WITHOUT_CODE = "aot_eager_decomp_partition"
RUN = {
    "preset": "micro",
    "schedule": {"steps": 3, "warmup_steps": 0},
    "evaluation": {"every_samples": 0, "at_end": False},
    "logging": {"every_steps": 1, "metrics_port": 0},
}
Case = tuple[str, str, bool, float]
"""Precision of forward and backward, fp8, compiled, fraction of the blocks that are recomputed."""
CASES: list[Case] = [
    *product(("float32", "bfloat16"), ("none",), (False, True), (0.0, 0.5, 1.0)),
    ("bfloat16", "tensorwise", False, 0.0),
    ("bfloat16", "tensorwise", True, 0.5),
    ("bfloat16", "rowwise", False, 0.0),
    ("bfloat16", "rowwise", True, 1.0),
]
SIZES = (1, 2)
TOLERANCES = {"float32": 1e-5, "bfloat16": 0.02}


def changes_of(case: Case) -> dict[str, object]:
    compute, fp8, compiled, recompute = case
    return {
        "precision": {"compute": compute, "fp8": fp8},
        "parallel": {
            "compile": compiled,
            "activation_checkpointing": recompute,
            "micro_batch_size": 4,
        },
    }


def numbers_of(config: RunConfig, world: World) -> list[float]:
    """Take three steps; return their losses and gradient norms."""
    model = build_model(config, world)
    compute = DTYPES[config.precision.compute]
    flow_loss = FlowLoss(model, config, compute)
    optimizer = optim.make_optimizer(model, config.optim, compute)
    shares = BatchShares.of(config, world.size)
    batches = training_batches(config, open_sources(config, Path()), shares, world.rank)
    numbers = list[float]()
    for _ in range(config.schedule.steps):
        total = torch.zeros(())
        for _ in range(shares.accumulation_steps):
            each = flow_loss(next(batches))
            torch.autograd.backward(each.sum() / shares.global_batch_size * world.size)
            total += each.detach().sum()
        norm = optimizer.gradient_norm()
        optim.update(optimizer, norm, 1.0, torch.tensor(optim.NEVER))
        optimizer.zero_grad()
        numbers += [world.all_sum(total).item() / shares.global_batch_size, norm.item()]
    return numbers


def take_steps(
    config: RunConfig, paths: RunPaths, world: World, *, port: int, cases: list[Case]
) -> None:
    """Write the numbers of ``cases`` to a file."""
    vars(compile)["BACKEND"] = WITHOUT_CODE
    ranks.set_environment(world, port)
    numbers = list[list[float]]()
    with process_group() as joined:
        for case in cases:
            numbers.append(numbers_of(resolve(merge(RUN, changes_of(case))), joined))
            torch.compiler.reset()
    if joined.is_main:
        (paths.output / "numbers.json").write_text(json.dumps(numbers))


COMPILED = [case for case in CASES if case[2]]
RUNS = [
    *product((case for case in CASES if not case[2]), SIZES),
    *((case, SIZES[number % 2]) for number, case in enumerate(COMPILED)),
    (CASES[-3], 2),  # weights that are gathered in fp8
]
"""Compiled cases have every pair of a precision, a part that is recomputed and a number of ranks."""


@pytest.fixture(scope="module")
def numbers(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[tuple[Case, int], list[float]]:
    """Return the losses and gradient norms of each case and number of ranks that a test asks for."""
    asked = [
        (item.callspec.params["case"], item.callspec.params["size"])
        for item in request.session.items
        if isinstance(item, pytest.Function)
        and item.path == request.path
        and "numbers" in item.fixturenames
    ]
    found = dict[tuple[Case, int], list[float]]()
    for size in SIZES:
        plain = [case for case in CASES if case[2:] == (False, 0.0) and size == 1]
        cases = [case for case in CASES if case in plain or (case, size) in asked]
        output = tmp_path_factory.mktemp("cases")
        ranks.finish_all(take_steps, output, size, resolve(RUN), cases=cases)
        rows = json.loads((output / "numbers.json").read_text())
        found |= {(case, size): row for case, row in zip(cases, rows, strict=True)}
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("case", "size"), RUNS)
def test_no_combination_changes_losses_and_gradients(
    numbers: dict[tuple[Case, int], list[float]], case: Case, size: int
) -> None:
    plain = numbers[(*case[:2], False, 0.0), 1]
    assert numbers[case, size] == pytest.approx(plain, rel=TOLERANCES[case[0]])
    losses_only = slice(None, None, 2)
    exact = numbers[("float32", "none", False, 0.0), 1][losses_only]
    assert plain[losses_only] == pytest.approx(exact, rel=TOLERANCES[case[0]])


def train(config: RunConfig, paths: RunPaths, world: World, *, port: int, backend: str) -> None:
    """Train; print how many graphs there are when the clock starts, and at the end."""
    from torch._dynamo.utils import counters
    from torch._inductor import config as inductor

    inductor.compile_threads = 1
    vars(compile)["BACKEND"] = backend
    on_train_begin = Observer.on_train_begin

    def begin(observer: Observer) -> None:
        on_train_begin(observer)
        print("graphs before the clock:", counters["stats"]["unique_graphs"])

    Observer.on_train_begin = begin  # type: ignore[method-assign]
    ranks.train_together(config, paths, world, port=port)
    print("graphs at the end:", counters["stats"]["unique_graphs"])


def finish(output: Path, backend: str, **changes: object) -> tuple[int, int]:
    """Train; return the number of graphs when the clock starts, and at the end."""
    config = resolve(merge(RUN, changes))
    paths = ranks.finish_all(train, output, config=config, backend=backend)
    lines = [line for line in ranks.output_of(paths).splitlines() if line.startswith("graphs ")]
    before, after = (int(line.rpartition(": ")[2]) for line in lines)
    return before, after


@pytest.mark.slow
def test_nothing_is_compiled_after_the_clock_has_started(tmp_path: Path) -> None:
    evaluation = {"at_start": True, "at_end": True, "batch_size": 24}
    changes = {"evaluation": evaluation, "schedule": {"steps": 2}}
    parallel = {"compile": True, "micro_batch_size": 8}
    before, after = finish(tmp_path / "run", WITHOUT_CODE, parallel=parallel, **changes)
    assert before == after == 4  # two kinds of block, in training and evaluation
    assert finish(
        tmp_path / "plain", WITHOUT_CODE, parallel={"micro_batch_size": 8}, **changes
    ) == (0, 0)
    for key in ("train_loss", "eval_loss"):
        expected = losses(tmp_path / "plain", key)
        assert losses(tmp_path / "run", key) == pytest.approx(expected, rel=1e-5)


@pytest.mark.torch_range
@pytest.mark.proof
def test_the_code_of_compiled_blocks_computes_the_same(tmp_path: Path) -> None:
    parallel = {"compile": True, "activation_checkpointing": 0.5}  # the second block is recomputed
    finish(tmp_path / "plain", WITHOUT_CODE)
    graphs = finish(tmp_path / "run", "inductor", parallel=parallel)
    assert graphs == (2, 2)
    for key in ("train_loss", "grad_norm"):
        expected = [row[key] for row in records(tmp_path / "plain")]
        assert [row[key] for row in records(tmp_path / "run")] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("wanted", "device", "commands", "expected"),
    [
        (None, GPU, ("gcc",), True),
        (None, GPU, ("clang",), True),
        (None, GPU, (), False),
        (None, CPU, ("g++",), False),
        (False, GPU, ("gcc",), False),
        (True, CPU, ("g++",), True),
        (True, GPU, ("gcc",), True),
    ],
)
def test_blocks_are_compiled_on_gpus_unless_the_config_says_otherwise(
    monkeypatch: pytest.MonkeyPatch,
    wanted: bool | None,
    device: torch.device,
    commands: tuple[str, ...],
    expected: bool,
) -> None:
    only(commands, monkeypatch)
    assert compiles(ParallelConfig(compile=wanted), device) == expected


@pytest.mark.parametrize(
    ("device", "commands", "missing"),
    [(CPU, ("gcc",), r"C\+\+ compiler g\+\+"), (GPU, ("g++",), r"C compiler \(gcc or clang\)")],
)
def test_a_machine_that_cannot_compile_is_refused(
    monkeypatch: pytest.MonkeyPatch, device: torch.device, commands: tuple[str, ...], missing: str
) -> None:
    only(commands, monkeypatch)
    with pytest.raises(ConfigError, match=rf"spec\.run\.parallel\.compile.*{missing} is missing"):
        compiles(ParallelConfig(compile=True), device)


@pytest.mark.parametrize("device", [CPU, GPU])
def test_a_folder_without_programs_is_refused(
    monkeypatch: pytest.MonkeyPatch, device: torch.device, tmp_path: Path
) -> None:
    only(("g++", "gcc"), monkeypatch)
    folder, asked = tmp_path / "not" / "yet", list[Path]()

    def statvfs(path: Path) -> SimpleNamespace:
        asked.append(path)
        return SimpleNamespace(f_flag=os.ST_NOEXEC | os.ST_NOSUID)

    monkeypatch.setattr(os, "statvfs", statvfs)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder))
    with pytest.raises(ConfigError, match=rf"{folder}, for compiled code, is mounted noexec"):
        compiles(ParallelConfig(compile=True), device)
    assert not compiles(ParallelConfig(), device)
    assert set(asked) == {tmp_path}


def only(commands: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this machine have Triton and ``commands`` only."""
    for name in ("CC", "CXX"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(compile, "find_spec", lambda name: object())
    monkeypatch.setattr(compile.shutil, "which", lambda name: name in commands or None)


def test_parameters_keep_their_names() -> None:
    model = Flux(resolve({"preset": "micro"}).model)
    names = [name for name, _ in model.named_parameters()]
    recompute_activations(model, 1.0)
    compile_blocks(model)
    assert [name for name, _ in model.named_parameters()] == names
