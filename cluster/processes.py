"""Background programs: started with a log, remembered by process id, ended by process id.

A process id alone may be reused by another program; together with the moment of its start it is
unique until the machine reboots. A pidfd then makes sure that a signal reaches that very process.
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
from cluster.packages import program
from cluster.places import LOGS, PROCESSES

STOP_SECONDS = 10
NO_PROXY = {
    "NO_PROXY": "*",
    "no_proxy": "*",
}  # everything that these programs call is on this machine


def start(
    name: str,
    argv: Sequence[str | Path],
    *,
    namespace: str | None = None,
    env: Mapping[str, str] | None = None,
) -> int:
    """Start ``argv`` in the background, in a network namespace where one is named; return its id.

    Its messages go to `.cluster/logs/NAME.log`. Raises ClusterError where it runs already.
    """
    if alive(name):
        raise ClusterError(f"{name} runs already")
    command = [str(part) for part in argv]
    if namespace is not None:
        # Not `ip netns exec`: that mounts another /sys and so hides the cgroups.
        command = [program("nsenter"), f"--net=/run/netns/{namespace}", *command]
    pid = _spawn(command, {**os.environ, **NO_PROXY, **(env or {})}, log(name))
    PROCESSES.mkdir(parents=True, exist_ok=True)
    _record(name).write_text(json.dumps({"pid": pid, "started": _started(pid), "argv": command}))
    return pid


def _spawn(command: list[str], env: dict[str, str], log_file: Path) -> int:
    """Start a process of its own session, deaf to this terminal's Ctrl-C."""
    log_file.parent.mkdir(parents=True, exist_ok=True)
    append = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    actions = [
        (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
        (os.POSIX_SPAWN_OPEN, 1, str(log_file), append, 0o644),
        (os.POSIX_SPAWN_DUP2, 1, 2),
    ]
    return os.posix_spawn(command[0], command, env, file_actions=actions, setsid=True)


def log(name: str) -> Path:
    """Return the file with the messages of ``name``."""
    return LOGS / f"{name}.log"


def log_tail(name: str, num_lines: int = 8) -> str:
    """Return the last lines that ``name`` wrote."""
    if not log(name).exists():
        return ""
    return "\n".join(log(name).read_text(errors="replace").splitlines()[-num_lines:])


def names() -> list[str]:
    """Return all programs that were started and not stopped, dead ones included."""
    return sorted(path.stem for path in PROCESSES.glob("*.json"))


def alive(name: str) -> bool:
    """Tell whether ``name`` runs."""
    return pid_of(name) is not None


def pid_of(name: str) -> int | None:
    """Return the process id of ``name``, where it runs."""
    try:
        record = json.loads(_record(name).read_text())
    except FileNotFoundError:
        return None
    pid: int = record["pid"]
    started = _started(pid)  # None also in the record where it died before we could look
    return pid if started is not None and started == record["started"] else None


def require_alive(name: str) -> None:
    """Raise ClusterError with the end of its log where ``name`` died."""
    if not alive(name):
        raise ClusterError(f"{name} died; the end of {log(name)}:\n{log_tail(name)}")


def stop(wanted: Iterable[str], *, patience: float = 0) -> None:
    """End programs and forget them: SIGTERM and ``patience`` seconds of waiting, then SIGKILL."""
    listed = list(wanted)
    kill([pid for name in listed if (pid := pid_of(name)) is not None], patience=patience)
    for name in listed:
        _record(name).unlink(missing_ok=True)


def kill(pids: Iterable[int], *, patience: float = 0) -> None:
    """End processes and wait for their end.

    Raises ClusterError where one outlives SIGKILL by ten seconds.
    """
    with contextlib.ExitStack() as stack:
        handles = []
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                handle = os.pidfd_open(pid)
                stack.callback(os.close, handle)
                handles.append(handle)
        if patience:
            _signal(handles, signal.SIGTERM)
            handles = _wait(handles, patience)
        _signal(handles, signal.SIGKILL)
        left = _wait(handles, STOP_SECONDS)
    _reap()
    if left:
        raise ClusterError(f"{len(left)} processes outlive SIGKILL")


def _signal(handles: list[int], number: signal.Signals) -> None:
    for handle in handles:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(handle, number)


def _wait(handles: list[int], seconds: float) -> list[int]:
    """Return those that still run after ``seconds``."""
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
    """Collect our own dead children: `up` and `down` may be called by one long-lived program."""
    for path in PROCESSES.glob("*.json"):
        with contextlib.suppress(ChildProcessError):
            os.waitpid(json.loads(path.read_text())["pid"], os.WNOHANG)


def _record(name: str) -> Path:
    return PROCESSES / f"{name}.json"


def _started(pid: int) -> str | None:
    """Return the moment at which a process started, in clock ticks since boot; None where it is dead."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in "ZX" else fields[19]
