"""Programs that are asked to stop at any time of their start and work: one line and a settled exit code."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import FrameType
from unittest import mock

import pytest
from tests.paths import MICRO
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.api import SignalException

from fluxtrain.contract.process import ENV_CONFIG, RunPaths
from fluxtrain.errors import EXIT_INTERRUPTED, EXIT_STOPPED
from fluxtrain.launch import torchrun

pytestmark = pytest.mark.slow

STOP = """
import os, signal
from fluxtrain import cli
from fluxtrain.cli import commands
commands.make_parser = lambda name: os.kill(os.getpid(), signal.SIGTERM)
cli.main(["{}"])
"""
INTERRUPTED_IMPORT = """
import os, signal, sys
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Finder())
sys.argv[1:] = {arguments!r}
{program}
"""
FLUXTRAIN = "from fluxtrain.cli import main; sys.exit(main())"
PLUGIN = "from fluxtrain_operator.kubectl import run; sys.exit(run())"
OPERATOR = "from fluxtrain_operator.__main__ import main; sys.exit(main())"
INTERRUPTED_WORK = """
import os, signal, sys, threading, time
from fluxtrain.runtime import program
def work():
    threading.Thread(target=time.sleep, args=[60]).start()
    try:
        os.kill(os.getpid(), signal.SIGINT)
    finally:
        {cleanup}
    return 0
sys.exit(program.run("fluxtrain", "trainer", work))
"""
AGAIN = "os.kill(os.getpid(), signal.SIGINT)"
AT_THE_END = (
    "threading.Timer(1, os.kill, (os.getpid(), signal.SIGINT)).start()"  # of the interpreter
)


def python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], timeout=60, check=False, capture_output=True, text=True
    )


@pytest.mark.parametrize(("command", "code"), [("run", EXIT_STOPPED), ("plan", -signal.SIGTERM)])
def test_sigterm_before_anything_is_loaded(command: str, code: int) -> None:
    assert python(STOP.format(command)).returncode == code


@pytest.mark.parametrize(
    ("name", "program", "arguments", "module"),
    [
        ("fluxtrain", FLUXTRAIN, ["--help"], "fluxtrain.errors"),
        ("fluxtrain", FLUXTRAIN, ["--help"], "argparse"),
        ("fluxtrain", FLUXTRAIN, ["import-config", "x"], "pydantic"),
        ("fluxtrain", FLUXTRAIN, ["plan", str(MICRO)], "numpy"),
        ("fluxtrain", FLUXTRAIN, ["run", str(MICRO), "--output=/dev/null/x"], "torch._C"),
        ("fluxtrain", FLUXTRAIN, ["data", "check", "."], "torch.nn"),
        ("fluxtrain", FLUXTRAIN, ["sample", ".", "--output=x", "--prompt=x"], "safetensors"),
        ("fluxtrain", FLUXTRAIN, ["prepare", "openmoji"], "PIL"),
        ("fluxtrain", FLUXTRAIN, ["mlperf", "check", "."], "fluxtrain.mlperf"),
        ("kubectl fluxtrain", PLUGIN, ["why", "job"], "fluxtrain_operator.kubectl.main"),
        ("fluxtrain_operator", OPERATOR, ["--image=x"], "aiohttp"),
    ],
)
def test_ctrl_c_during_an_import(
    name: str, program: str, arguments: list[str], module: str
) -> None:
    code = INTERRUPTED_IMPORT.format(module=module, arguments=arguments, program=program)
    done = python(code)
    assert (done.returncode, done.stderr) == (EXIT_INTERRUPTED, f"{name}: interrupted\n")


@pytest.mark.parametrize("cleanup", [AGAIN, AT_THE_END], ids=["twice", "while it ends"])
def test_ctrl_c_during_work(cleanup: str) -> None:
    done = python(INTERRUPTED_WORK.format(cleanup=cleanup))
    assert (done.returncode, done.stderr) == (EXIT_INTERRUPTED, "fluxtrain: interrupted\n")


@pytest.mark.parametrize(
    ("task", "is_saved", "signum", "code"),
    [
        ("train", True, signal.SIGINT, EXIT_STOPPED),
        ("train", False, signal.SIGINT, EXIT_INTERRUPTED),
        ("train", False, signal.SIGTERM, EXIT_STOPPED),
        ("sample", False, signal.SIGINT, EXIT_INTERRUPTED),
        ("preprocess", False, signal.SIGINT, EXIT_STOPPED),
    ],
)
def test_the_exit_code_of_ctrl_c_says_whether_anything_is_kept(
    task: str,
    is_saved: bool,
    signum: signal.Signals,
    code: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"task": task}))
    monkeypatch.setenv(ENV_CONFIG, str(config))
    newest = tmp_path / "checkpoints" / "step_0000000003" if is_saved else None
    monkeypatch.setattr(torchrun, "latest", lambda folder: newest)
    found, message = torchrun._stopped(RunPaths(tmp_path, tmp_path, tmp_path), signum)
    assert found == code
    assert message.startswith(f"stopped by {signum.name}; ")


STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@pytest.fixture
def kept_signals() -> Iterator[None]:
    before = {signum: signal.getsignal(signum) for signum in STOPS}
    yield
    for signum, handler in before.items():
        signal.signal(signum, handler)


def _handle(signum: int, frame: FrameType | None) -> None:
    raise SignalException("", signal.Signals(signum))


@pytest.mark.parametrize("signum", [signal.SIGHUP, signal.SIGINT])
@pytest.mark.parametrize("is_ignored", [True, False])
def test_signals_that_are_ignored_at_the_start_stop_no_run(
    signum: signal.Signals, is_ignored: bool, kept_signals: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(agent: LocalElasticAgent, group: object) -> dict[int, object]:
        signal.signal(signum, _handle)
        return {}

    monkeypatch.setattr(LocalElasticAgent, "_start_workers", start)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    agent = object.__new__(torchrun.ElasticAgent)
    agent._peers, agent._remaining_restarts = torchrun.ALONE, 0
    signal.signal(signum, signal.SIG_IGN if is_ignored else signal.SIG_DFL)
    group = mock.Mock()
    group.spec.max_restarts = 0
    agent._start_workers(group)
    with nullcontext() if is_ignored else pytest.raises(SignalException):
        os.kill(os.getpid(), signum)


@pytest.mark.parametrize("signum", STOPS)
def test_a_signal_that_comes_twice_does_not_interrupt_the_end(
    signum: signal.Signals, kept_signals: None
) -> None:
    signal.signal(signum, _handle)
    torchrun._ignore_stops()
    os.kill(os.getpid(), signum)
