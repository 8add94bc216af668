"""The measuring kit for GPUs: its arithmetic, its limits, and docs/gpu.md's commands with a tiny model."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.gpu import __main__ as kit
from benchmarks.gpu import ablate, ceiling, contenders, processes, profile, step
from benchmarks.gpu.ceiling import Product, products
from benchmarks.gpu.contenders import CONTENDERS
from benchmarks.gpu.processes import Request, Task
from benchmarks.gpu.setting import (
    DEPTHS,
    SCHNELL,
    Depth,
    Setting,
    deepest,
    halves,
    make_setting,
    random_batch,
)
from benchmarks.gpu.wheels import torchtitan
from cluster.layout import CACHE
from tests.paths import ROOT

FULL = Setting(SCHNELL, batch=1, latent=32, text=256)
GIB = 1 << 30
H100, H200 = 78 * GIB, 139 * GIB
TOY = {"toy": True, "batch": None, "latent": None, "text": None}
COMMANDS = re.findall(r"^ *\$ (.*benchmarks\.gpu .*)$", (ROOT / "docs/gpu.md").read_text(), re.M)
"""Those of docs/gpu.md."""
MOST_SECONDS = 590
START_SECONDS, INSTALL_SECONDS = 15, 20
"""Of a process's imports, before its limit begins, and of the wheels."""


def test_products_and_attention_are_all_flops_of_a_step() -> None:
    multiplied = sum(product.flops * count for product, count in products(FULL).items())
    tokens, blocks = FULL.image_tokens + FULL.text, sum(FULL.depth)
    attention = 3 * blocks * 4 * tokens * tokens * SCHNELL.hidden_size
    assert multiplied + attention == FULL.flops == pytest.approx(20.414e12, rel=1e-4)


def test_products_grow_with_the_batch_in_one_dimension() -> None:
    one, four = (
        sum(p.flops * n for p, n in products(Setting(SCHNELL, batch, 32, 256)).items())
        for batch in (1, 4)
    )
    assert four == 4 * one


@pytest.mark.parametrize("rest", [0.0, 0.03])
def test_seconds_per_block_follow_from_three_depths(rest: float) -> None:
    seconds = {(d, s): d * 0.02 + s * 0.01 + rest for d, s in halves(DEPTHS[0])}
    assert step.fit_depths(seconds) == pytest.approx((0.02, 0.01, rest))


@pytest.mark.parametrize("depths", [[], [(8, 16)], [(8, 16), (4, 16)], [(8, 16), (4, 8), (2, 4)]])
def test_depths_that_cannot_tell_both_blocks_apart_give_no_fit(
    depths: list[tuple[int, int]],
) -> None:
    assert step.fit_depths(dict.fromkeys(depths, 1.0)) is None


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("nvjet_tst_192x192_64x4_2x1_v_bz_coopB_NTT", "matrix product"),
        ("void cutlass::Kernel2<cutlass_80_tensorop_bf16>", "matrix product"),
        ("Cijk_Ailk_Bljk_BBS_BH_MT256x256", "matrix product"),
        ("pytorch_flash::flash_bwd_dq_dk_dv_loop", "attention"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop", "attention"),
        ("ncclDevKernel_AllGather_RING_LL", "collective"),
        (
            "void at::native::multi_tensor_apply_kernel<FusedAdamMathFunctor>",
            "optimizer and clipping",
        ),
        ("Memcpy DtoD (Device -> Device)", "copy"),
        ("triton_red_fused_add_native_layer_norm_0", profile.OTHER),
    ],
)
def test_a_kernel_belongs_to_a_category(name: str, expected: str) -> None:
    assert profile.category(name) == expected


def test_idle_time_is_what_no_kernel_covers() -> None:
    kernels = [
        {"name": "gemm", "begin": 0.0, "seconds": 3.0},
        {"name": "nccl", "begin": 2.0, "seconds": 4.0},  # overlaps
        {"name": "triton", "begin": 9.0, "seconds": 3.0},
    ]
    summary = profile.summarise(kernels)
    assert summary["step_seconds"] == pytest.approx(12 / profile.NUM_STEPS)
    assert summary["busy_seconds"] == pytest.approx(9 / profile.NUM_STEPS)
    assert summary["idle_seconds"] == pytest.approx(3 / profile.NUM_STEPS)
    assert sum(summary["seconds_by_category"].values()) == pytest.approx(10 / profile.NUM_STEPS)


def test_every_contender_says_what_it_is() -> None:
    assert all(contender.says for contender in CONTENDERS.values())


@pytest.mark.parametrize(
    ("batch", "num_bytes", "depth"),
    [
        (32, H200, (8, 16)),
        (32, H100, (4, 8)),
        (64, H200, (4, 8)),
        (64, H100, (2, 4)),
        (8, 16 * GIB, (2, 4)),
        (32, None, (8, 16)),
    ],
)
def test_the_depth_follows_from_the_memory(batch: int, num_bytes: int | None, depth: Depth) -> None:
    assert deepest(make_setting(False, batch, None, None), num_bytes) == depth


def depths(*arguments: str, num_bytes: int = H100, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(kit, "gpu_memory", lambda: num_bytes)
    options = kit._parser().parse_args([*arguments])
    return kit._depths(options.part, options, make_setting(**kit._size(options)))


def test_given_depths_win(monkeypatch: pytest.MonkeyPatch) -> None:
    assert depths("step", monkeypatch=monkeypatch) == ((4, 8), (2, 8), (4, 4))
    assert depths("ablate", monkeypatch=monkeypatch)[0] == (2, 4)
    given = ("step", "--depths", "6+12", "0+3")
    assert depths(*given, monkeypatch=monkeypatch) == ((6, 12), (0, 3))


@pytest.mark.parametrize("text", ["8", "8x16", "+", "0+0", "-1+2", "8+16+1"])
def test_a_wrong_depth_is_refused_with_what_is_allowed(
    text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        kit._parser().parse_args(["step", f"--depths={text}"])
    last = capsys.readouterr().err.splitlines()[-1]
    assert repr(text) in last
    assert "8+16" in last


def test_timesteps_are_exact_in_bfloat16_also_a_thousandfold() -> None:
    times = random_batch(make_setting(True, 32, None, None)).timesteps
    for exact in (times, 1000 * times):
        assert torch.equal(exact.bfloat16().float(), exact)
    assert len(set(times.tolist())) > 1


@pytest.mark.parametrize("gradient", [False, True])
def test_fp8_is_timed_as_the_trainer_multiplies(
    monkeypatch: pytest.MonkeyPatch, gradient: bool
) -> None:
    calls = list[Any]()
    monkeypatch.setattr(ceiling, "product", lambda *args, **options: calls.append((args, options)))
    ceiling._fp8(Product(32, 16, 48, gradient))()
    [((left, right, dtype), options)] = calls
    assert options == {"fast": not gradient}, "only forward passes accumulate fast"
    assert (left.values.shape, right.values.shape, dtype) == ((32, 16), (16, 48), torch.bfloat16)
    assert left.values.dtype == (torch.float8_e5m2 if gradient else torch.float8_e4m3fn)
    assert right.values.stride() == (1, 16)


def test_what_needs_fsdp_is_left_out_where_there_is_none(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def chosen(*arguments: str, divides: bool) -> tuple[list[str], list[str]]:
        monkeypatch.setattr(contenders, "uses_fsdp", lambda config, size: divides)
        parser = kit._parser()
        options = parser.parse_args([*arguments])
        kit._leave_out(parser, options, make_setting(**kit._size(options)))
        return options.contenders, options.switches

    names, switches = chosen(divides=True)
    assert (names, switches) == (list(CONTENDERS), list(ablate.SWITCHES))
    assert capsys.readouterr().out == ""
    names, switches = chosen(divides=False)
    assert set(CONTENDERS) - set(names) == {"fluxtrain-tuned"}
    assert set(ablate.SWITCHES) - set(switches) == {"keep gathered weights", "reduce in bfloat16"}
    assert len(capsys.readouterr().out.splitlines()) == 2
    with pytest.raises(SystemExit):
        chosen("step", "--contenders", "fluxtrain-tuned", divides=False)
    assert "name fluxtrain too" in capsys.readouterr().err


class Clock:
    """Time in which processes run: of contender or switch ``hung`` until their limit, of others 30 s."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, hung: str) -> None:
        self.now, self.hung, self.asked = 0.0, hung, list[str]()
        for module in (processes, step, ablate):
            monkeypatch.setattr(module, "monotonic", lambda: self.now)
        for module in (step, ablate):
            monkeypatch.setattr(module, "ask", self.ask)

    def ask(self, request: Request, timeout: float, errors: Path) -> list[dict[str, Any]]:
        name = request.contender if request.attention == "auto" else request.attention
        hangs = name == self.hung
        self.asked.append(name)
        self.now += timeout if hangs else min(timeout, 30)
        if hangs or timeout < 30:
            return [{"depth": depth, "error": "took too long"} for depth in request.depths]
        result = {"seconds": [1.0], "losses": [1.0], "batch": 2, "flops_per_sample": 1}
        memory = dict.fromkeys(("peak_allocated_bytes", "peak_reserved_bytes"), 1)
        return [
            {"depth": list(depth), **result, **memory, "first_step_seconds": 1.0}
            for depth in request.depths
        ]


def full(end: float) -> Task:
    return Task(TOY | {"toy": False}, halves((8, 16)), end, Path("unused"))


@pytest.mark.parametrize("hung", ["fluxtrain", "torchtitan-best", "diffusers-plain"])
def test_a_hung_contender_leaves_time_to_the_others(
    monkeypatch: pytest.MonkeyPatch, hung: str
) -> None:
    clock, names = Clock(monkeypatch, hung), list(CONTENDERS)
    result = step.measure(full(520), FULL, names)
    assert [name for name, each in result["summary"].items() if "error" in each] == [hung]
    assert clock.asked.count(hung) == 1
    assert clock.now <= 520


def test_a_hung_switch_leaves_time_to_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch, "cudnn")
    names = list(ablate.SWITCHES)
    result = ablate.measure(full(520), 32, names)
    failed = [name for name, each in result["results"].items() if "error" in each]
    assert failed == ["attention: cudnn"]
    assert len(result["results"]) + len(result["left_out"]) == len(names) + 2
    assert len(result["results"]) > 10
    assert clock.now <= 520


@pytest.mark.slow
def test_a_process_ends_at_its_limit_with_all_that_it_has_started(tmp_path: Path) -> None:
    errors, begin = tmp_path / "errors.log", time.monotonic()
    code = (
        "import os, sys, time; print('one', flush=True); os.fork(); "
        "sys.stderr.write('why\\n'); time.sleep(100)"
    )
    with errors.open("w") as log:
        found = processes._output([sys.executable, "-c", code], 5, log.fileno())
    assert found == ("one\n", None)
    assert time.monotonic() - begin < 60, "a child kept the pipe open"
    assert "why" in errors.read_text()


def test_the_last_line_of_a_failed_process_is_its_reason_and_the_rest_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    errors = tmp_path / "errors.log"
    errors.write_text("earlier\n")

    def fail(command: list[str], timeout: float, log: int) -> tuple[str, int | None]:
        os.write(log, b"a traceback\nTypeError: unexpected\n")
        return '{"depth": [2, 2]}\n', 1

    monkeypatch.setattr(processes, "_output", fail)
    request = Request("fluxtrain", ((2, 2), (1, 2)), TOY, 1, 1)
    assert processes.ask(request, 5, errors) == [
        {"depth": [2, 2]},
        {"depth": (1, 2), "error": "TypeError: unexpected"},
    ]
    kept = errors.read_text()
    assert kept.startswith("earlier\n== {")
    assert "a traceback" in kept


@pytest.mark.parametrize(("most", "kept"), [(1 << 20, 3), (10, 1)])
def test_a_trace_that_is_too_large_keeps_what_the_device_did(
    tmp_path: Path, most: int, kept: int
) -> None:
    path = tmp_path / profile.TRACE
    events = [{"cat": cat, "name": cat} for cat in ("kernel", "cpu_op", "user_annotation")]
    path.write_bytes(gzip.compress(json.dumps({"traceEvents": events}).encode()))
    assert profile.limit_trace(path, most) == events
    left = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    assert left == events[:kept]


def parts_of(command: str) -> Iterator[Any]:
    for text in re.split(r"[;|()]", command):
        words = shlex.split(text)
        if "benchmarks.gpu" in words:
            yield kit._parser().parse_args(
                words[
                    words.index("benchmarks.gpu") + 1 : words.index("2>&1")
                    if "2>&1" in words
                    else None
                ]
            )


def test_the_commands_are_those_of_all_parts() -> None:
    parts = [options.part for command in COMMANDS for options in parts_of(command)]
    assert set(parts) == set(kit.PARTS)
    assert parts[0] == "first"


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_ends_in_time_whatever_hangs(command: str) -> None:
    limits = [kit.seconds_of_part(options.part, options) for options in parts_of(command)]
    assert INSTALL_SECONDS + sum(START_SECONDS + limit for limit in limits) < MOST_SECONDS
    assert kit.seconds_of_part("first", kit._parser().parse_args([])) <= 60


def rehearsed() -> list[str]:
    """Return the commands without those whose parts another one has."""
    seen, chosen = set[str](), list[str]()
    for command in COMMANDS:
        parts = {f"{o.part} {o.contenders}" for o in parts_of(command)}
        chosen += [command] if parts - seen else []
        seen |= parts
    return chosen


@pytest.fixture(scope="module")
def peers() -> Path:
    """torchtitan 0.2.2 and what it needs, as the kit's wheels: installed once, in a cache."""
    packages = torchtitan("0.2.2")
    digest = hashlib.sha256(repr((packages, sys.version_info[:2])).encode()).hexdigest()[:16]
    folder = CACHE / "peers" / digest
    if not folder.exists():
        partial = folder.with_suffix(f".{os.getpid()}")
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, "--no-deps", f"--target={partial}", *packages], check=True)
        partial.rename(folder)
    return folder


@pytest.mark.proof
@pytest.mark.parametrize("command", rehearsed())
def test_a_command_runs_with_a_tiny_model(command: str, tmp_path: Path, peers: Path) -> None:
    toy = command.replace(
        "python3 -m benchmarks.gpu", f"{sys.executable} -W ignore -m benchmarks.gpu --toy"
    )
    path = os.pathsep.join([str(peers), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "OUT": str(tmp_path), "PYTHONPATH": path}
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", toy],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=MOST_SECONDS,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    results = {path.stem: json.loads(path.read_text()) for path in tmp_path.glob("*.json")}
    parts = [options.part for options in parts_of(command)]
    assert set(parts) <= set(results)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) <= 8, "as many as are easily copied"
    assert all(path.stat().st_size < 16 << 20 for path in files)
    for part in parts:
        CHECKS[part](results[part], done.stdout)


def check_first(result: dict[str, Any], said: str) -> None:
    verdicts = {check["name"]: check["verdict"] for check in result["checks"]}
    absent = {name for name, verdict in verdicts.items() if verdict != "ok"}
    assert all(name.endswith(("attention cudnn", "attention efficient")) for name in absent), said
    assert {"memory", "product, fp8", "step, fp8"} <= set(verdicts)
    assert "expect a step of 2+2 blocks" in said


def check_ceiling(result: dict[str, Any], said: str) -> None:
    assert result["step_seconds"]["bf16"] > 0
    assert result["step_seconds"]["fp8"] > 0
    assert "matrix products" in said


def check_step(result: dict[str, Any], said: str) -> None:
    losses = [each["last_loss"] for each in result["summary"].values()]
    assert losses == pytest.approx([losses[0]] * len(losses), rel=step.LOSS_TOLERANCE), said
    assert "as rounding explains" in said
    assert "MORE THAN" not in said
    assert "each at its best" in said


def check_ablate(result: dict[str, Any], said: str) -> None:
    measured = result["results"]
    assert not any("error" in each for each in measured.values()), said
    assert measured["base"]["losses"] == measured["base again"]["losses"]
    assert "one switch at a time" in said


def check_profile(result: dict[str, Any], said: str) -> None:
    assert result["seconds_by_category"]["matrix product"] > 0


CHECKS = {
    "first": check_first,
    "ceiling": check_ceiling,
    "step": check_step,
    "ablate": check_ablate,
    "profile": check_profile,
}
