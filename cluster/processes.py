"""Background programs: started with a log, recorded and stopped by process id.

A process id may be reused by another program; with its start time it is unique until the machine reboots.
Signals are sent through a pidfd, so that they reach that process only.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from cluster.errors import ClusterError
from cluster.layout import LOGS, PROCESSES
from cluster.programs.packages import program

STOP_SECONDS = 10
NO_PROXY = {"NO_PROXY": "*", "no_proxy": "*"}  # all connections are local


def start(
    name: str,
    argv: Sequence[str | Path],
    *,
    namespace: str | None = None,
    env: Mapping[str, str] | None = None,
) -> int:
    """Start ``argv`` in the background, in a network ``namespace`` if given; return its process id.

    It logs to `.cluster/logs/NAME.log`. Raises ClusterError if it runs already.
    """
    if is_running(name):
        raise ClusterError(f"{name} runs already")
    command = [str(part) for part in argv]
    if namespace is not None:
        # not `ip netns exec`, which mounts another /sys that hides the cgroups
        command = [program("nsenter"), f"--net=/run/netns/{namespace}", *command]
    pid = _spawn(command, {**os.environ, **NO_PROXY, **(env or {})}, log(name))
    PROCESSES.mkdir(parents=True, exist_ok=True)
    _record(name).write_text(json.dumps({"pid": pid, "started": _started(pid), "argv": command}))
    return pid


def _spawn(command: list[str], env: dict[str, str], log_file: Path) -> int:
    """Start a process in its own session, which Ctrl-C of this terminal does not reach."""
    log_file.parent.mkdir(parents=True, exist_ok=True)
    append = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    actions = [
        (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
        (os.POSIX_SPAWN_OPEN, 1, str(log_file), append, 0o644),
        (os.POSIX_SPAWN_DUP2, 1, 2),
    ]
    return os.posix_spawn(command[0], command, env, file_actions=actions, setsid=True)


def log(name: str) -> Path:
    """Return the log file of ``name``."""
    return LOGS / f"{name}.log"


def log_tail(name: str, num_lines: int = 8) -> str:
    """Return the last lines of the log of ``name``."""
    if not log(name).exists():
        return ""
    return "\n".join(log(name).read_text(errors="replace").splitlines()[-num_lines:])


def names() -> list[str]:
    """Return all programs that were started and not stopped, including those that have exited."""
    return sorted(path.stem for path in PROCESSES.glob("*.json"))


def is_running(name: str) -> bool:
    """Return whether ``name`` is running."""
    return pid_of(name) is not None


def pid_of(name: str) -> int | None:
    """Return the process id of ``name``, None if it is not running."""
    try:
        record = json.loads(_record(name).read_text())
    except FileNotFoundError:
        return None
    pid: int = record["pid"]
    started = _started(pid)  # None is recorded for a process that exited immediately
    return pid if started is not None and started == record["started"] else None


def require_running(name: str) -> None:
    """Raise ClusterError with the end of its log if ``name`` is not running."""
    if not is_running(name):
        raise ClusterError(f"{name} has exited; the end of {log(name)}:\n{log_tail(name)}")


def stop(programs: Iterable[str], *, grace_seconds: float = 0) -> None:
    """Stop programs and delete their records: SIGTERM, after ``grace_seconds`` SIGKILL."""
    listed = list(programs)
    kill([pid for name in listed if (pid := pid_of(name)) is not None], grace_seconds=grace_seconds)
    for name in listed:
        _record(name).unlink(missing_ok=True)


def kill(pids: Iterable[int], *, grace_seconds: float = 0) -> None:
    """Stop processes and wait until they have ended.

    Raises ClusterError if one is still running ten seconds after SIGKILL.
    """
    with contextlib.ExitStack() as stack:
        handles = []
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                handle = os.pidfd_open(pid)
                stack.callback(os.close, handle)
                handles.append(handle)
        if grace_seconds:
            _signal(handles, signal.SIGTERM)
            handles = _wait(handles, grace_seconds)
        _signal(handles, signal.SIGKILL)
        left = _wait(handles, STOP_SECONDS)
    _reap()
    if left:
        raise ClusterError(f"{len(left)} processes are still running after SIGKILL")


def _signal(handles: list[int], number: signal.Signals) -> None:
    for handle in handles:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(handle, number)


def _wait(handles: list[int], seconds: float) -> list[int]:
    """Return those still running after ``seconds``."""
    left = set(handles)
    poll = select.poll()
    for handle in handles:
        poll.register(handle, select.POLLIN)
    end = time.monotonic() + seconds
    while left and (now := time.monotonic()) < end:
        for handle, _ in poll.poll(1000 * (end - now)):
            poll.unregister(handle)
            left.discard(handle)
    return sorted(left)


def _reap() -> None:
    """Reap our dead children, since one long-lived program may call `up` and `down`."""
    for path in PROCESSES.glob("*.json"):
        with contextlib.suppress(ChildProcessError):
            os.waitpid(json.loads(path.read_text())["pid"], os.WNOHANG)


def _record(name: str) -> Path:
    return PROCESSES / f"{name}.json"


def _started(pid: int) -> str | None:
    """Return the start time of a process in clock ticks since boot, None if it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in "ZX" else fields[19]
