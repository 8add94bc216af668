"""A trial ends on all ranks when it ends badly on one, and its processes are gone then."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from fluxtrain.benchmark import results
from fluxtrain.benchmark.results import Status, Trial, TrialProcess, TrialRunner
from fluxtrain.contract.process import RunPaths
from fluxtrain.contract.run.resolve import resolve
from fluxtrain.contract.run.setting import Setting
from fluxtrain.parallel.distributed import World
from fluxtrain.report.endpoint import Endpoint

CONFIG = resolve(
    {
        "preset": "micro",
        "task": "benchmark",
        "logging": {"metrics_port": 0},
        "benchmark": {"memory_gib": 1.0},
    }
)
TRIAL = Trial(Setting(32, 4, "float32", "none", 0.0, False), 4, 1, 4, is_measured=False)


class TwoRanks(World):
    """Rank 0 of two, whose peer is of a given status from the second look on."""

    peer: Status = Status.RUNNING
    looks = 0

    def gather_numbers(self, own: list[float]) -> list[list[float]]:
        self.__class__.looks += 1
        return [own, [float(self.peer if self.looks > 1 else Status.RUNNING)]]


@pytest.fixture
def endpoint(tmp_path: Path) -> Endpoint:
    return Endpoint(CONFIG, paths(tmp_path), World.alone())


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Let trials run the given program instead of a training."""

    def use(text: str) -> None:
        popen = results.subprocess.Popen

        def run(command: list[str], **options: Any) -> Any:
            return popen([command[0], "-c", text], **options)

        monkeypatch.setattr(results.subprocess, "Popen", run)

    return use


def paths(folder: Path) -> RunPaths:
    return RunPaths(folder, folder, folder)


def start(folder: Path, endpoint: Endpoint, seconds: float = 60.0) -> TrialProcess:
    return TrialProcess({"seconds": seconds}, {"RANK": "0"}, folder, endpoint)


def wait(trial: TrialProcess) -> Status:
    deadline = time.monotonic() + 60
    while (status := trial.status()) == Status.RUNNING and time.monotonic() < deadline:
        time.sleep(0.05)
    trial.end()
    return status


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("import sys; sys.stdin.read()", Status.DONE),
        ("import sys; sys.exit(12)", Status.OUT_OF_MEMORY),
        ("import os; os.kill(os.getpid(), 9)", Status.OUT_OF_MEMORY),
        ("import sys; sys.exit('wrong')", Status.FAILED),
        ("import os; os.kill(os.getpid(), 11)", Status.FAILED),
    ],
)
def test_the_exit_code_tells_how_a_trial_ended(
    text: str, expected: Status, tmp_path: Path, endpoint: Endpoint, program: Any
) -> None:
    program(text)
    trial = start(tmp_path, endpoint)
    assert wait(trial) == expected
    if text.endswith("'wrong')"):
        assert trial.reason() == f"wrong ({tmp_path / 'rank_0.log'})"


def test_a_trial_that_takes_too_long_has_failed(
    tmp_path: Path, endpoint: Endpoint, program: Any
) -> None:
    program("import time; time.sleep(600)")
    trial = start(tmp_path, endpoint, seconds=0.2)
    assert wait(trial) == Status.FAILED
    assert trial.reason() == "it took longer than benchmark.trial_seconds"


def test_the_processes_of_a_trial_have_none_of_the_agents_files(
    tmp_path: Path, endpoint: Endpoint, program: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", "/error.json")
    monkeypatch.setenv("FLUXTRAIN_SNAPSHOTS", "/snapshots")
    program(
        "import os; print(sorted(set(os.environ) & {'TORCHELASTIC_ERROR_FILE', "
        "'FLUXTRAIN_SNAPSHOTS', 'FLUXTRAIN_OUTPUT', 'RANK'}))"
    )
    assert wait(start(tmp_path, endpoint)) == Status.DONE
    assert (tmp_path / "rank_0.log").read_text() == "['FLUXTRAIN_OUTPUT', 'RANK']\n"


@pytest.mark.parametrize("peer", [Status.FAILED, Status.OUT_OF_MEMORY])
def test_a_rank_whose_peer_fails_kills_its_own_process(
    peer: Status, tmp_path: Path, endpoint: Endpoint, program: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TwoRanks, "peer", peer)
    monkeypatch.setattr(TwoRanks, "looks", 0)
    monkeypatch.setattr(results, "_POLL_SECONDS", 0.05)
    program(
        f"import os, time; open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()));"
        "time.sleep(600)"
    )
    world = TwoRanks(0, 0, 1, World.alone().device)
    outcome = TrialRunner(CONFIG, paths(tmp_path), world, endpoint).run(TRIAL)
    assert (outcome.status, outcome.reason, outcome.records) == (peer, "", [])
    with suppress(FileNotFoundError, ValueError), pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), signal.SIGCONT)
