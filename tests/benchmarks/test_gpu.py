"""The measuring kit for GPUs: its arithmetic, and all four parts with a tiny model on this machine."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks.gpu import profile, step
from benchmarks.gpu.ceiling import products
from benchmarks.gpu.contenders import CONTENDERS
from benchmarks.gpu.setting import SCHNELL, Setting
from tests.paths import ROOT

FULL = Setting(SCHNELL, batch=1, latent=32, text=256)


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
    seconds = {(d, s): d * 0.02 + s * 0.01 + rest for d, s in step.DEPTHS}
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


@pytest.mark.slow
def test_all_parts_run_with_a_tiny_model(tmp_path: Path) -> None:
    names = ["fluxtrain", "fluxtrain-tuned", "diffusers-plain"]
    command = [
        *(sys.executable, "-W", "ignore", "-m", "benchmarks.gpu", "--toy", f"--output={tmp_path}"),
        *("--minutes=9", "--contenders", *names),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=580)
    assert done.returncode == 0, done.stderr
    results = {path.stem: json.loads(path.read_text()) for path in tmp_path.glob("*.json")}
    assert {"ceiling", "step", "ablate", "profile"} <= set(results)
    losses = [results["step"]["summary"][name]["last_loss"] for name in names]
    assert losses == pytest.approx([losses[0]] * 3, rel=step.LOSS_TOLERANCE), done.stdout
    assert results["ceiling"]["step_seconds"]["bf16"] > 0
    measured = results["ablate"]["results"]
    assert measured["base"]["losses"] == measured["base again"]["losses"]
    assert results["profile"]["seconds_by_category"]["matrix product"] > 0
    for title in ("equal settings", "each at its best", "one switch at a time", "matrix products"):
        assert title in done.stdout


def test_every_contender_says_what_it_is() -> None:
    assert all(contender.says for contender in CONTENDERS.values())
