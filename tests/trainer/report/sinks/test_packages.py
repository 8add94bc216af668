"""A package that a sink needs is missed before anything starts, and imported only if its sink is on."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from tests.paths import MICRO
from tests.trainer import in_process, ranks

from fluxtrain.cli import main
from fluxtrain.contract.process import ENV_CONFIG, RunPaths
from fluxtrain.contract.run.config import RunConfig
from fluxtrain.contract.run.resolve import resolve
from fluxtrain.errors import EXIT_USAGE
from fluxtrain.launch import rank
from fluxtrain.mlperf import log
from fluxtrain.parallel.distributed import World
from fluxtrain.report import sinks


@pytest.fixture(autouse=True)
def nothing_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sinks, "find_spec", lambda name: None)
    monkeypatch.setattr(log, "find_spec", lambda name: None)


@pytest.mark.parametrize(
    ("option", "field", "extra"),
    [
        ("--logging.tensorboard=true", "logging.tensorboard", "tensorboard"),
        ("--logging.wandb={project: p}", "logging.wandb", "wandb"),
        ("--preset=mlperf-schnell", "preset", "mlperf"),
    ],
)
def test_a_missing_package_is_named_before_anything_starts(
    option: str, field: str, extra: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "run"
    assert main(["run", str(MICRO), "--output", str(output), option]) == EXIT_USAGE
    error = capsys.readouterr().err
    assert f"spec.run.{field}: got " in error
    assert f"not installed: pip install 'fluxtrain[{extra}]'" in error
    assert not output.exists()


def test_a_training_without_mlcommons_package_has_no_mlperf_log(tmp_path: Path) -> None:
    config = resolve({"preset": "micro", "schedule": {"steps": 1}, "logging": {"metrics_port": 0}})
    paths = RunPaths(tmp_path, tmp_path, tmp_path)
    in_process.train(config, paths)
    assert (tmp_path / "metrics.jsonl").exists()
    assert not list(tmp_path.glob("mlperf*"))


def test_a_log_that_mlcommons_package_began_is_not_left_incomplete(tmp_path: Path) -> None:
    config = resolve({"preset": "micro", "schedule": {"steps": 1}, "logging": {"metrics_port": 0}})
    (tmp_path / "mlperf.log").write_text("")
    with pytest.raises(
        AssertionError, match=r"to continue .*mlperf.log .*: pip install 'fluxtrain\[mlperf\]'"
    ):
        in_process.train(config, RunPaths(tmp_path, tmp_path, tmp_path))


def test_a_pod_without_the_package_ends_with_the_code_of_a_wrong_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = resolve({"preset": "micro", "logging": {"tensorboard": True}})
    path = tmp_path / "config.json"
    path.write_text(config.model_dump_json())
    monkeypatch.setenv(ENV_CONFIG, str(path))
    monkeypatch.setattr(rank, "_print_stacks_on_signal", lambda: None)
    assert rank.main() == EXIT_USAGE
    assert "spec.run.logging.tensorboard" in capsys.readouterr().err


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"logging": {"wandb": {"mode": "disabled"}}},
        {"task": "benchmark", "logging": {"tensorboard": True, "wandb": {}}},
    ],
)
def test_nothing_is_needed_if_nothing_is_written(changes: dict[str, object]) -> None:
    sinks.require_packages(resolve({"preset": "micro", **changes}))


def train_and_list_modules(config: RunConfig, paths: RunPaths, world: World) -> None:
    ranks.train_alone(config, paths, world)
    (paths.output / "modules.json").write_text(json.dumps(list(sys.modules)))


@pytest.mark.slow
def test_a_run_without_sinks_imports_neither(tmp_path: Path) -> None:
    config = resolve({"preset": "micro", "schedule": {"steps": 1}, "logging": {"metrics_port": 0}})
    paths = RunPaths(tmp_path, tmp_path, tmp_path)
    assert ranks.finish(train_and_list_modules, config, paths) == [0], ranks.output_of(paths)
    modules = json.loads((tmp_path / "modules.json").read_text())
    assert "fluxtrain.report.sinks" in modules
    assert not {"wandb", "tensorboard", "torch.utils.tensorboard"} & {*modules}
