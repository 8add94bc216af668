"""The privileged container that empties page caches: only where it is allowed, and truthful."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from tests.operator.planner.pods import make_job

from fluxtrain.contract.process import ENV_FLUSHED
from fluxtrain.mlperf.facts import flushed
from fluxtrain_operator.base.settings import PodDefaults
from fluxtrain_operator.resources.volumes import flush_container


@pytest.mark.parametrize("works", [True, False])
def test_the_container_tells_the_time_only_if_the_kernel_did_it(
    tmp_path: Path, works: bool
) -> None:
    defaults = PodDefaults.model_validate({"flushCaches": True})
    job = make_job(run={"preset": "mlperf-schnell"}, nodes={"min": 1, "max": 1})
    vars(job).update(pod_defaults=defaults, rendezvous_image="registry.example.com/operator:1")
    (container,) = flush_container(job)
    assert container["image"] == "registry.example.com/operator:1", "the administrator's"
    switch = tmp_path / "drop_caches"
    if not works:
        switch.mkdir()  # nothing can be written there
    (command,) = container["command"][2:]
    command = command.replace("/proc/sys/vm/drop_caches", str(switch))
    command = command.replace("/flushed/time", str(tmp_path / "time")).replace("sync", "true", 1)
    ended = subprocess.run(["/bin/sh", "-c", command], check=False, capture_output=True)
    assert (ended.returncode == 0) == works
    assert (flushed({ENV_FLUSHED: str(tmp_path / "time")}) is not None) == works
    assert not works or switch.read_text() == "3\n"
    assert (tmp_path / "time").exists() == works


@pytest.mark.parametrize(
    ("allowed", "run", "flushes"),
    [
        (True, {"preset": "mlperf-schnell"}, True),
        (False, {"preset": "mlperf-schnell"}, False),
        (True, {"preset": "mlperf-schnell", "logging": {"mlperf": {"division": "auto"}}}, True),
        (True, {"preset": "mlperf-schnell", "logging": {"mlperf": {"division": "open"}}}, False),
        (True, {"preset": "mlperf-schnell-raw", "task": "preprocess"}, False),
        (True, {"preset": "micro"}, False),
    ],
)
def test_only_benchmark_runs_flush_and_only_where_it_is_allowed(
    allowed: bool, run: dict[str, object], flushes: bool
) -> None:
    job = make_job(run=run, nodes={"min": 1, "max": 1})
    vars(job).update(pod_defaults=PodDefaults.model_validate({"flushCaches": allowed}))
    assert bool(flush_container(job)) == flushes
