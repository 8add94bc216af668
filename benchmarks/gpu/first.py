"""Whether the machine, torch, its kernels and memory work, and which figures to expect, in a minute.

Checks follow in the order of their worth, each with a line of its own, as long as there is time; the others
are named. A step's losses are compared with those in float32; on a GPU the host must not wait inside a step.
"""

from __future__ import annotations

import gc
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any

import torch
from benchmarks.gpu import ceiling
from benchmarks.gpu.contenders import CONTENDERS, FP8, Contender, fluxtrain
from benchmarks.gpu.processes import Task
from benchmarks.gpu.setting import Setting, device, gpu_memory, machine
from benchmarks.gpu.step import FP8_LOSS_TOLERANCE, LOSS_TOLERANCE
from benchmarks.gpu.timing import seconds_of, wait
from benchmarks.peers import ROOT

from fluxtrain.errors import ConfigError
from fluxtrain.model.fp8 import Rounded, dialect_of, product, rounded
from fluxtrain.model.parameters import count_parameters
from fluxtrain.parallel.compile import attention_backend, attention_on
from fluxtrain.parallel.distributed import World, process_group
from fluxtrain.runtime.devices import pin, unpin

_STEPS, _MOST_SAMPLES = 4, 4
_EAGER, _COMPILED = {"parallel.compile": False}, {"parallel.compile": True}
_ABOVE_BOUND = (1.05, 1.25)
"""A step is that much longer than its bound: element-wise work and gaps are not in it."""


@dataclass(frozen=True)
class Check:
    """Something that must work: ``run`` returns what it found, and raises an error if it does not."""

    name: str
    run: Callable[[], str]
    seconds: float
    """About what it takes on a GPU."""


class ResultError(Exception):
    """A result that differs from the one it is compared with."""


@dataclass
class Figures:
    """What the checks measured, for the figures to expect."""

    flops_per_second: float | None = None
    bytes_per_second: float | None = None
    losses: list[float] | None = None
    """Of the first step, which is in float32."""


def measure(task: Task, setting: Setting) -> dict[str, Any]:
    """Make the checks that fit into the time and print a line for each; return their outcomes."""
    figures, outcomes, left_out = Figures(), list[dict[str, Any]](), list[str]()
    is_lost = False
    if task.size["toy"]:  # compiling takes longer than all the rest
        torch.compiler.set_stance("force_eager")
    with process_group() as world:
        for check in _checks(task, setting, world, figures):
            if is_lost or task.left < check.seconds:
                left_out.append(check.name)
                continue
            outcomes.append(_outcome(check))
            is_lost = _is_lost()
    expected = _expected(setting.at(task.depths[0]), figures)
    facts = {"machine": machine(), "size": task.size, "expected": expected}
    return {**facts, "checks": outcomes, "left_out": left_out, "is_lost": is_lost}


def _is_lost() -> bool:
    """Return whether a kernel's fault has ended all work of this process on the GPU."""
    try:
        wait()
    except RuntimeError:
        return True
    return False


def _outcome(check: Check) -> dict[str, Any]:
    begin = monotonic()
    try:
        verdict, found = "ok", check.run()
    except (ModuleNotFoundError, ConfigError) as error:  # such as a backend of another vendor
        verdict, found = "absent", str(error)
    except ResultError as error:
        verdict, found = "DIFFERS", str(error)
    except Exception as error:  # whatever a driver or a kernel raises is what this looks for
        verdict, found = "FAILED", f"{type(error).__name__}: {error}".splitlines()[0][:300]
    seconds = monotonic() - begin
    print(f"  {check.name:24} {verdict:7} {seconds:5.1f} s  {found}", flush=True)
    return {"name": check.name, "verdict": verdict, "found": found, "seconds": seconds}


def _checks(task: Task, setting: Setting, world: World, figures: Figures) -> Iterator[Check]:
    is_toy = bool(task.size["toy"])
    yield Check("memory", partial(_memory, figures, is_toy), 2)
    yield Check("pinned host memory", partial(_pinned, is_toy), 2)
    yield Check("product, bfloat16", partial(_product, figures, is_toy), 2)
    yield Check("product, fp8", partial(_fp8_product, is_toy), 2)
    yield Check("attention", partial(_attention, setting), 5)
    small = replace(setting, batch=min(_MOST_SAMPLES, setting.batch)).at((1, 1))

    def step(contender: Contender, attention: str = "auto") -> Callable[[], str]:
        return partial(_step, contender, small, world, figures, attention)

    def ours(overrides: dict[str, Any], attention: str = "auto") -> Callable[[], str]:
        return step(Contender(fluxtrain, "", overrides), attention)

    yield Check("step, float32", ours(_EAGER | {"precision.compute": "float32"}), 4)
    yield Check("step, not compiled", ours(_EAGER), 3)
    yield Check("step, fp8, not compiled", ours(_EAGER | FP8), 3)
    yield Check("step", ours(_COMPILED), 25)
    yield Check("step, fp8", ours(_COMPILED | FP8), 33)
    yield Check("fluxtrain run, resumed", partial(_run, task), 90)
    yield Check("step, torchtitan", step(CONTENDERS["torchtitan-shipped"]), 10)
    for attention in ("auto", "efficient"):  # cuDNN's gradients were wrong for some layouts
        theirs = step(CONTENDERS["diffusers-plain"], attention)
        yield Check(f"step, diffusers, attention {attention}", theirs, 10)
    for name in ("flash", "cudnn", "efficient"):
        yield Check(f"step, attention {name}", ours(_COMPILED, name), 10)
    for name, overrides in (
        ("fp8 rowwise", {"precision.fp8": "rowwise"}),
        ("weights in bfloat16", {"precision.weights": "bfloat16"}),
        ("recomputed", {"parallel.activation_checkpointing": 1.0}),
    ):
        yield Check(f"step, {name}", ours(_COMPILED | overrides), 25)


def _memory(figures: Figures, is_toy: bool) -> str:
    """Fill nine tenths of what is free, and copy a part of it."""
    total = gpu_memory()
    free = torch.cuda.mem_get_info()[0] if total else 1 << 20
    filled = torch.full((int(0.9 * free),), 7, dtype=torch.uint8, device=device())
    if int(filled[:: 1 << 20].amin()) != 7 or int(filled[-1]) != 7:
        raise ResultError("memory does not hold what was written")
    del filled
    torch.cuda.empty_cache()
    size = 1 << (20 if is_toy else 30)
    figures.bytes_per_second = 2 * size / seconds_of(ceiling.copy(size))
    held = f"{free / 2**30:.1f} of {total / 2**30:.1f} GiB free; " if total else ""
    return f"{held}copies {figures.bytes_per_second / 1e12:.3f} TB/s, read and written"


def _pinned(is_toy: bool) -> str:
    host = torch.ones(1 << (20 if is_toy else 28), dtype=torch.uint8)
    is_pinned = device().type == "cuda" and pin(host)
    try:
        there = torch.empty_like(host, device=device())
        rate = len(host) / seconds_of(lambda: there.copy_(host, non_blocking=True))
        wait()
        if not bool(there.all()):
            raise ResultError("a copy differs")
    finally:
        if is_pinned:
            unpin(host)
    return f"{'pinned' if is_pinned else 'not pinned'}, to the device {rate / 1e9:.1f} GB/s"


def _factors(is_toy: bool) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (32, 64, 64) if is_toy else (16384, 3072, 12288)
    m, k, n = shape
    a, b = torch.randn(m, k, device=device()), torch.randn(n, k, device=device())
    return a.bfloat16(), b.bfloat16().t()


def _product(figures: Figures, is_toy: bool) -> str:
    a, b = _factors(is_toy)
    error = _error(a @ b, a, b, 0.01)
    figures.flops_per_second = 2 * len(a) * b.numel() / seconds_of(lambda: a @ b)
    return f"{figures.flops_per_second / 1e12:.3g} TFLOP/s, {error:.1e} from float32"


def _fp8_product(is_toy: bool) -> str:
    dtype = dialect_of(device()).forward
    a, b = _factors(is_toy)
    left, right = (rounded(x, dtype, None) for x in (a, b.t()))
    right = Rounded(right.values.t(), right.unit)
    multiply = partial(product, left, right, torch.bfloat16, fast=True)
    error = _error(multiply(), a, b, 0.1)
    rate = 2 * len(a) * b.numel() / seconds_of(multiply)
    return f"{rate / 1e12:.3g} TFLOP/s, {error:.1e} from float32"


def _error(found: torch.Tensor, a: torch.Tensor, b: torch.Tensor, most: float) -> float:
    """Return the relative error of the first rows of the product ``found``."""
    expected = a[:32].float() @ b.float()
    error = float((found[:32].float() - expected).norm() / expected.norm())
    if not error < most:
        raise ResultError(f"{error:.1e} from float32, of at most {most}")
    return error


def _attention(setting: Setting) -> str:
    chosen = attention_on(device(), setting.config())
    seconds = dict(ceiling.attention_seconds(setting))
    return f"{chosen}; ms: " + ", ".join(f"{name} {1e3 * s:.2f}" for name, s in seconds.items())


def _step(
    contender: Contender, setting: Setting, world: World, figures: Figures, attention: str
) -> str:
    """Take some steps; compare their losses with those in float32."""
    torch._dynamo.reset()
    gc.collect()
    torch.cuda.empty_cache()
    attention_on(device(), setting.config({"parallel.attention": attention}))
    with attention_backend(attention):
        step = contender.step(setting, world)
        losses = [float(loss) for loss in [step() for _ in range(_STEPS)]]
        waits = _host_waits(step)
    figures.losses = figures.losses or losses
    pairs = zip(losses, figures.losses, strict=True)
    worst = max(abs(loss / other - 1) for loss, other in pairs)
    if not worst < (
        FP8_LOSS_TOLERANCE if "precision.fp8" in contender.overrides else LOSS_TOLERANCE
    ):
        raise ResultError(f"losses {worst:.1e} from the first step's: {losses}")
    return f"loss {losses[0]:.4f} to {losses[-1]:.4f}, {worst:.1e} from the first step's{waits}"


def _host_waits(step: Callable[[], object]) -> str:
    """Return whether the host waits for the GPU inside a step; "" without a GPU."""
    if not torch.cuda.is_available():
        return ""
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")  # an error would leave the step unfinished
        try:
            step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    waits = [each for each in warned if "called a synchronizing" in str(each.message)]
    return f"; THE HOST WAITS {len(waits)} times in a step" if waits else "; no wait of the host"


def _run(task: Task) -> str:
    """Train, keep a checkpoint, resume: the loader, evaluation and the pinned copies of the real trainer."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            *(sys.executable, "-m", "fluxtrain.cli", "run", "examples/micro.yaml"),
            *("--output", str(Path(folder) / "run"), "--checkpoint.every_steps=5"),
            *(
                "--precision.compute=bfloat16",
                f"--parallel.compile={str(not task.size['toy']).lower()}",
            ),
        ]
        for steps in (6, 12):
            done = subprocess.run(
                [*command, f"--schedule.steps={steps}"],
                cwd=ROOT,
                capture_output=True,
                text=True,
                timeout=task.left,
            )
            if done.returncode != 0:
                last = (done.stderr.strip().splitlines() or [""])[-1]
                raise ResultError(f"exit {done.returncode} of the run to step {steps}: {last}")
    return "exit 0 at step 6, and at step 12 after a resume"


def _expected(setting: Setting, figures: Figures) -> dict[str, Any] | None:
    """Return the seconds of a step that follow from the measured product and copy."""
    if figures.flops_per_second is None or figures.bytes_per_second is None:
        return None
    moved = count_parameters(setting.model).total * ceiling.ADAMW_BYTES
    bound = setting.batch * setting.flops / figures.flops_per_second
    bound += moved / figures.bytes_per_second
    least, most = (bound * factor for factor in _ABOVE_BOUND)
    return {
        "depth": setting.depth,
        "batch": setting.batch,
        "bound": bound,
        "least": least,
        "most": most,
    }


def report(result: dict[str, Any]) -> None:
    """Print the figures to expect, and what is wrong."""
    expected = result["expected"]
    if expected is not None:
        double, single = expected["depth"]
        bound, least, most = (1e3 * expected[key] for key in ("bound", "least", "most"))
        text = f"a step of {double}+{single} blocks, batch {expected['batch']}, in bfloat16"
        print(f"expect {text}: {least:.0f} to {most:.0f} ms; its products and AdamW {bound:.0f}")
    if result["left_out"]:
        why = "a fault has ended the work on the GPU" if result["is_lost"] else "see --minutes"
        print(f"left out: {', '.join(result['left_out'])}; {why}")
    wrong = problems(result)
    print(f"{len(result['checks'])} checks; " + (f"WRONG: {', '.join(wrong)}" if wrong else "ok"))


def problems(result: dict[str, Any]) -> list[str]:
    """Return the names of the checks that failed or found a difference."""
    return [c["name"] for c in result["checks"] if c["verdict"] in ("FAILED", "DIFFERS")]
