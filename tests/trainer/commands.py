"""The command line ``fluxtrain`` as a process that is forked, with its trainers, from the fork server."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from cluster.free_ports import free_port
from tests.trainer import ranks
from tests.trainer.outputs import mlperf_values, newest_step
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

from fluxtrain.cli import main
from fluxtrain.launch import rank


def environment() -> dict[str, str]:
    """Return the environment of a process with one thread."""
    return {**os.environ, "OMP_NUM_THREADS": "1"}


def command(*arguments: str) -> list[str]:
    """Return the command line ``fluxtrain ARGUMENTS``."""
    return [sys.executable, "-m", "fluxtrain.cli", *arguments]


class Forked:
    """A function that runs in its own process group."""

    def __init__(self, function: Callable[..., object], *arguments: object) -> None:
        self._process = ranks.FORKED.Process(target=_run_in_group, args=(function, *arguments))
        ranks.start_process(self._process)
        assert self._process.pid is not None
        self.pid = self._process.pid

    def poll(self) -> int | None:
        """Return the exit code, None while the process runs."""
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int | None:
        """Return the exit code, None if the process still runs after ``timeout`` seconds."""
        self._process.join(timeout)
        return self.poll()

    def send_signal(self, signum: signal.Signals) -> None:
        """Send ``signum`` to the process, not to its group."""
        os.kill(self.pid, signum)

    def kill(self) -> None:
        """Kill the process group if the process runs; trainers end with it."""
        if self.poll() is None:
            os.killpg(self.pid, signal.SIGKILL)
        self.wait()


def start(
    *arguments: str, log: Path, errors: Path | None = None, pause: float = 0.0, **variables: str
) -> Forked:
    """Start ``fluxtrain ARGUMENTS``; write stdout to ``log``, stderr to ``errors`` (default: ``log``).

    Its trainers sleep ``pause`` seconds after each step: they last for a test, at little work.
    """
    environ = {**environment(), **variables}
    return Forked(run_command, arguments, environ, log, errors or log, pause)


class Job:
    """The processes of a run in ``folder``, and what they wrote."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.output, self.port = folder, folder / "output", free_port()
        self.processes: list[Forked] = []

    def start(self, *arguments: str, pause: float, **variables: str) -> Forked:
        """Start ``fluxtrain ARGUMENTS``, with a log of its own."""
        log = self.log(len(self.processes))
        self.processes.append(start(*arguments, log=log, pause=pause, **variables))
        return self.processes[-1]

    def log(self, number: int) -> Path:
        """Return the log of the process that was started as ``number``, from 0."""
        return self.folder / f"process_{number}.log"

    def logs(self) -> str:
        """Return the ends of all logs."""
        texts = {path.name: path.read_text() for path in sorted(self.folder.glob("process_*.log"))}
        return "\n".join(f"== {name}\n{text[-2000:]}" for name, text in texts.items())

    def step(self) -> int:
        return newest_step(self.output)

    def ranks(self) -> list[int]:
        """Return the number of ranks after each resume."""
        return [value["num_ranks"] for value in mlperf_values(self.output, "run_resumed")]

    def wait_for_step(self, step: int) -> None:
        self.wait_for(lambda: self.step() >= step)

    def wait_for(self, done: Callable[[], bool], seconds: float = 240) -> None:
        """Wait until ``done``; fail with the logs on a timeout."""
        deadline = time.monotonic() + seconds
        while not done():
            assert time.monotonic() < deadline, self.logs()
            time.sleep(0.1)

    def wait_for_ends(self, processes: Sequence[Forked], *codes: int, seconds: float = 240) -> None:
        """Assert that ``processes`` end in time with ``codes``, or all of them with the only one."""
        found = [process.wait(seconds) for process in processes]
        assert found == list(codes) * (len(found) // len(codes)), self.logs()

    def kill(self) -> None:
        for process in self.processes:
            process.kill()


def children(pid: int) -> list[int]:
    """Return the process ids of the children of ``pid``."""
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(child) for child in text.split()]


def fluxtrain(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run ``fluxtrain ARGUMENTS`` to its end, whatever its exit code."""
    with tempfile.TemporaryDirectory() as folder:
        out, errors = Path(folder) / "stdout", Path(folder) / "stderr"
        process = start(*arguments, log=out, errors=errors)
        code = process.wait(300)
        process.kill()
        assert code is not None, f"still running after 300 s: {errors.read_text()}"
        return subprocess.CompletedProcess(arguments, code, out.read_text(), errors.read_text())


def run_command(
    arguments: tuple[str, ...],
    variables: Mapping[str, str],
    log: Path,
    errors: Path,
    pause: float = 0.0,
) -> None:
    """Run ``fluxtrain ARGUMENTS`` in this process, and its trainers as forks of it."""
    _replace_environment(variables)
    ranks.redirect(log, errors)
    if pause:
        ranks.pause_after_steps(pause)
    with mock.patch.object(SubprocessHandler, "_popen", _fork_trainer):
        _exit(main(list(arguments)))


def _run_in_group(function: Callable[..., object], *arguments: object) -> None:
    os.setsid()
    for signum in (signal.SIGINT, signal.SIGHUP):  # ignored if the tests run in the background
        signal.signal(signum, signal.SIG_DFL)
    function(*arguments)


def _fork_trainer(handler: SubprocessHandler, command: tuple[str, ...], env: Any) -> _Trainer:
    assert command[1:] == ("-u", "-m", "fluxtrain.launch.rank"), command
    return _Trainer(env)


class _Trainer:
    """What torchrun uses of `subprocess.Popen`, for a trainer that is forked from its agent."""

    def __init__(self, variables: Mapping[str, str]) -> None:
        self._code: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            os.setsid()
            for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
                signal.signal(signum, signal.SIG_DFL)
            _replace_environment(variables)
            torch.set_num_threads(int(variables["OMP_NUM_THREADS"]))
            _exit(rank.main())

    def poll(self) -> int | None:
        if self._code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self._code = os.waitstatus_to_exitcode(status)
        return self._code

    def wait(self, timeout: float = float("inf")) -> int:
        deadline = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("trainer", timeout)
            time.sleep(0.01)
        return code


def _replace_environment(variables: Mapping[str, str]) -> None:
    os.environ.clear()
    os.environ.update(variables)


def _exit(code: int) -> None:
    """End this process and the workers of its data loaders, whose parent is the fork server."""
    for child in multiprocessing.active_children():
        child.kill()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
