"""Which of torch's implementations of attention is used, and that all compute the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tests.trainer import in_process, ranks
from tests.trainer.outputs import records
from tests.trainer.ranks import CPU
from torch.backends.cuda import (
    cudnn_sdp_enabled,
    flash_sdp_enabled,
    math_sdp_enabled,
    mem_efficient_sdp_enabled,
)
from torch.nn.attention import SDPBackend

from fluxtrain.contract.process import RunPaths
from fluxtrain.contract.run.config import RunConfig
from fluxtrain.contract.run.resolve import merge, resolve
from fluxtrain.errors import EXIT_USAGE, ConfigError
from fluxtrain.parallel import compile
from fluxtrain.parallel.compile import BACKENDS, attention_backend, attention_on
from fluxtrain.parallel.distributed import World

CUDA = torch.device("cuda", 0)
CHECKS: dict[str, Callable[[], bool]] = {
    "flash": flash_sdp_enabled,
    "cudnn": cudnn_sdp_enabled,
    "efficient": mem_efficient_sdp_enabled,
    "math": math_sdp_enabled,
}
RUN = {
    "preset": "micro",
    "schedule": {"steps": 3, "warmup_steps": 0},
    "evaluation": {"every_samples": 0, "at_end": False},
    "logging": {"every_steps": 1, "metrics_port": 0},
}


def config_of(attention: str, **changes: object) -> RunConfig:
    return resolve(merge(RUN, {"parallel": {"attention": attention, **changes}}))


def enabled() -> set[str]:
    return {name for name, is_enabled in CHECKS.items() if is_enabled()}


@pytest.mark.parametrize("name", ["auto", *BACKENDS])
def test_only_the_named_implementation_is_enabled(name: str) -> None:
    with attention_backend(name):
        assert enabled() == (set(BACKENDS) if name == "auto" else {name})
    assert enabled() == set(BACKENDS)


@pytest.mark.parametrize(
    ("name", "found"), [("auto", "flash"), ("flash", "flash"), ("math", "math")]
)
def test_a_cpu_has_flash_attention_and_math(name: str, found: str) -> None:
    assert attention_on(CPU, config_of(name)) == found


@pytest.mark.parametrize("name", ["cudnn", "efficient"])
def test_an_implementation_that_the_device_lacks_is_refused(name: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"parallel\.attention: got '{name}'; a CPU cannot"
    ) as error:
        attention_on(CPU, config_of(name))
    assert "use flash, math or auto" in str(error.value)


@pytest.mark.parametrize(
    ("hip", "preferred", "text"),
    [
        ("7.0", "_ROCmFABackend.Default", "flash (AOTriton)"),
        ("7.0", "_ROCmFABackend.AOTriton", "flash (AOTriton)"),
        ("7.0", "_ROCmFABackend.Ck", "flash (CK)"),
        (None, "_ROCmFABackend.Default", "flash"),
    ],
)
def test_flash_attention_of_rocm_has_the_name_of_its_library(
    monkeypatch: pytest.MonkeyPatch, hip: str | None, preferred: str, text: str
) -> None:
    zeros = torch.zeros
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch, "zeros", lambda shape, **kwargs: zeros(shape))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    library = SimpleNamespace(preferred_rocm_fa_library=lambda: preferred)
    monkeypatch.setattr(torch.backends, "cuda", library)
    choices = {frozenset({"cudnn"}): SDPBackend.ERROR}
    monkeypatch.setattr(
        torch,
        "_fused_sdp_choice",
        lambda *qkv: int(choices.get(frozenset(enabled()), SDPBackend.FLASH_ATTENTION)),
    )
    assert attention_on(CUDA, config_of("flash")) == text
    with pytest.raises(ConfigError, match=r"a GPU cannot compute it so; use flash or auto"):
        attention_on(CUDA, config_of("cudnn"))


def train(config: RunConfig, paths: RunPaths, world: World, *, port: int) -> None:
    """Train with blocks that are traced as for the compiler, without its code."""
    vars(compile)["BACKEND"] = "aot_eager_decomp_partition"
    ranks.train_together(config, paths, world, port=port)


def numbers_of(output: Path, attention: str, size: int = 1, **parallel: object) -> list[float]:
    """Train; return the losses and gradient norms."""
    paths = ranks.finish_all(train, output, size, config_of(attention, **parallel))
    assert f" · attention: {attention.replace('auto', 'flash')}" in ranks.output_of(paths)
    return [row[key] for row in records(output) for key in ("train_loss", "grad_norm")]


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Return the numbers of a run in which torch chooses."""
    return numbers_of(tmp_path_factory.mktemp("auto") / "run", "auto")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("attention", "size", "parallel"),
    [
        ("flash", 1, {}),
        ("math", 1, {}),
        ("math", 2, {"activation_checkpointing": 1.0}),
        ("math", 1, {"compile": True, "activation_checkpointing": 0.5}),
        ("flash", 1, {"compile": True}),
    ],
    ids=["flash", "math", "math-ranks-recomputed", "math-compiled-recomputed", "flash-compiled"],
)
def test_all_compute_the_same(
    expected: list[float],
    tmp_path: Path,
    attention: str,
    size: int,
    parallel: dict[str, object],
) -> None:
    assert numbers_of(tmp_path / "run", attention, size, **parallel) == pytest.approx(
        expected, rel=1e-5
    )


def test_a_run_on_a_device_that_lacks_it_ends_with_the_code_of_wrong_files(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path, tmp_path, tmp_path)
    assert in_process.finish(ranks.train_alone, config_of("math"), paths) == [0]
    assert enabled() == set(BACKENDS), "the next run of the process is not bound to it"
    paths = RunPaths(tmp_path / "other", tmp_path, tmp_path)
    assert in_process.finish(ranks.train_alone, config_of("cudnn"), paths) == [EXIT_USAGE]
    assert "spec.run.parallel.attention" in ranks.output_of(paths)
