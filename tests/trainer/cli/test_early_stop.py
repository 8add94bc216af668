"""Programs that are asked to stop at any time of their start and work: one line and a settled exit code."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.paths import MICRO

from fluxtrain.contract.process import ENV_CONFIG, RunPaths
from fluxtrain.errors import EXIT_INTERRUPTED, EXIT_STOPPED
from fluxtrain.launch import torchrun

STOP = """
import os, signal
from fluxtrain import cli
from fluxtrain.cli import commands
commands.make_parser = lambda: os.kill(os.getpid(), signal.SIGTERM)
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
