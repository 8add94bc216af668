"""The progress of every rank of a node: each writes a file once a second, for local rank 0 and the agent.

The files hold times of the machine's monotonic clock, which all its processes share. So the seconds without
progress of a process that is stopped go on growing. They are not believed while no file can be written, as on
a full disk.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

from pydantic import FiniteFloat, NonNegativeInt, PositiveInt, TypeAdapter

from fluxtrain.contract.process import (
    ENV_GENERATION,
    ENV_NODE_PROGRESS,
    ENV_TERMINATION_MESSAGE,
    Phase,
    stall_seconds,
)
from fluxtrain.runtime.files import atomic_write
from fluxtrain.runtime.progress import Progress

_WRITE_SECONDS = 1.0
_SILENT_SECONDS = 10.0
"""After this long without progress, a rank also writes where it is."""
_FROZEN_SECONDS = 10.0
"""A process that has not written its file for this long is frozen."""
_PROBE_BYTES = 4096
LATE = 0.1
"""After this fraction of the time after which it counts as stalled, more than a step, a rank may be hung."""
_PACKAGE = "fluxtrain"


@dataclass(frozen=True)
class RankProgress:
    """The progress of one rank; times are of the machine's monotonic clock."""

    rank: NonNegativeInt
    pid: PositiveInt
    phase: Phase
    step: NonNegativeInt
    phase_began: FiniteFloat
    progressed: FiniteFloat
    step_seconds: FiniteFloat | None = None
    """Mean seconds of a step; None before the first."""
    stack: str = ""
    """The innermost frame of the main thread, and pending collectives, if there is no progress."""
    generation: NonNegativeInt = 0
    """Generation of the agents that it runs in; 0 on a single machine."""
    written: FiniteFloat = 0.0
    """When the process wrote this."""
    frozen: bool = False
    """Whether the process does not write any more: it is stopped, or a call holds the GIL."""

    def seconds_since_progress(self, now: float) -> float:
        return max(0.0, now - self.progressed)

    def stall_seconds(self) -> float:
        """Return the seconds without progress after which the rank counts as stalled."""
        return stall_seconds(self.phase, self.step_seconds)

    def report(self, now: float) -> dict[str, Any]:
        """Return the entry of this rank in /progress."""
        return {
            "rank": self.rank,
            "phase": self.phase,
            "step": self.step,
            "secondsInPhase": round(max(0.0, now - self.phase_began), 3),
            "secondsSinceProgress": round(self.seconds_since_progress(now), 3),
            **({"stepSeconds": self.step_seconds} if self.step_seconds is not None else {}),
            **({"stack": self.stack} if self.stack else {}),
            **({"frozen": True} if self.frozen else {}),
            **({"generation": self.generation} if self.generation else {}),
        }


_FORMAT = TypeAdapter(RankProgress)


def publish(progress: Progress, environment: Mapping[str, str] = os.environ) -> None:
    """Write the progress of this rank to the node's folder once a second, in a thread, if there is one."""
    folder = environment.get(ENV_NODE_PROGRESS)
    if folder is None:
        return
    path = Path(folder) / f"rank_{int(environment.get('LOCAL_RANK', '0')):04d}.json"
    rank = int(environment.get("RANK", "0"))
    generation = int(environment.get(ENV_GENERATION, "0"))

    def write_forever() -> None:
        while True:
            with suppress(
                Exception
            ):  # such as a full disk; without this thread the rank looks frozen
                _write(path, _present(progress, rank, generation))
            time.sleep(_WRITE_SECONDS)

    threading.Thread(target=write_forever, name="progress", daemon=True).start()


def read_ranks(environment: Mapping[str, str] = os.environ) -> list[RankProgress]:
    """Return the progress of the node's ranks whose processes exist, by rank.

    Frozen ones are left out while the folder cannot be written.
    """
    folder = environment.get(ENV_NODE_PROGRESS)
    if not folder:
        return []
    ranks, now = [_read(path) for path in Path(folder).glob("rank_*.json")], time.monotonic()
    running = [_checked(rank, now) for rank in ranks if rank is not None and _exists(rank.pid)]
    if any(rank.frozen for rank in running) and not _can_write(folder):
        running = [rank for rank in running if not rank.frozen]
    return sorted(running, key=lambda rank: rank.rank)


def node_report() -> list[dict[str, Any]]:
    """Return the entries of the node's ranks in /progress."""
    now = time.monotonic()
    return [rank.report(now) for rank in read_ranks()]


def _present(progress: Progress, rank: int, generation: int) -> RankProgress:
    values, now = progress.read(), time.monotonic()
    silent = values["secondsSinceProgress"]
    return RankProgress(
        rank=rank,
        pid=os.getpid(),
        phase=values["phase"],
        step=values.get("step", 0),
        phase_began=now - values["secondsInPhase"],
        progressed=now - silent,
        step_seconds=values.get("stepSeconds"),
        stack=_stack(values["phase"], values.get("stepSeconds"), silent),
        generation=generation,
        written=now,
    )


def _stack(phase: Phase, step_seconds: float | None, silent: float) -> str:
    """Return where this process is after ``silent`` seconds without progress; if late, what it waits for."""
    if silent < _SILENT_SECONDS:
        return ""
    is_late = silent >= LATE * stall_seconds(phase, step_seconds)
    pending = pending_collectives() if is_late else ""
    return f"{_position()}; waits for {pending}" if pending else _position()


def _position() -> str:
    """Return the innermost frame of the main thread, and of this package if that differs."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    own = frame
    while own is not None and _module(own).partition(".")[0] != _PACKAGE:
        own = own.f_back
    frames = [frame] if own is frame else [frame, own]
    return ", called from ".join(
        f"{f.f_code.co_name} ({_module(f)}:{f.f_lineno})" for f in frames if f is not None
    )


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "?"))


def _write(path: Path, rank: RankProgress) -> None:
    with atomic_write(path) as partial:
        partial.write_text(json.dumps(asdict(rank)), encoding="utf-8")


def _read(path: Path) -> RankProgress | None:
    try:
        return _FORMAT.validate_json(path.read_bytes(), strict=True)
    except (OSError, ValueError):
        return None  # not written yet, or by another version


def _checked(rank: RankProgress, now: float) -> RankProgress:
    """Return ``rank`` with whether its process is frozen, and the state of such a process as its stack."""
    if now - rank.written < _FROZEN_SECONDS:
        return replace(rank, frozen=False)
    stack = f"the process does not respond, its state is {_state(rank.pid)}"
    return replace(rank, frozen=True, stack=stack)


def _state(pid: int) -> str:
    """Return the state of a process as the kernel names it, such as "T (stopped)"."""
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines():
            if line.startswith("State:"):
                return line.partition(":")[2].strip()
    return "unknown"


def _can_write(folder: str) -> bool:
    """Return whether a file can be written to ``folder`` now."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(_PROBE_BYTES))
    except OSError:
        return False
    return True


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


_MAX_LISTED = 3


def pending_collectives() -> str:
    """Return the first collectives of this process that have not ended; empty without torch or any."""
    torch = sys.modules.get("torch._C._distributed_c10d")  # a process that imports has none
    if torch is None:
        return ""
    entries = _entries(getattr(torch, "_dump_nccl_trace_json", None), onlyActive=True)
    entries += _entries(getattr(torch, "_dump_fr_trace_json", None))  # gloo's
    pending = [_described_recorder(e) for e in entries if not e.get("retired")]
    return ", ".join(dict.fromkeys(pending[:_MAX_LISTED]))


def _entries(dump: Any, **options: bool) -> list[dict[str, Any]]:
    if dump is None:  # a build of torch without it
        return []
    entries = json.loads(dump(includeCollectives=True, **options)).get("entries", [])
    return [entry for entry in entries if isinstance(entry, dict)]


def _described_recorder(entry: dict[str, Any]) -> str:
    """Return the name, the number and the process group of a collective."""
    group = (entry.get("process_group") or ["?"])[-1]
    return f"{entry.get('profiling_name')} {entry.get('collective_seq_id')} of {group}"


# The termination message of a pod: a trainer leaves its progress in a file, its agent forwards it.
#
# The operator reads it from the pod's status if rank 0 ends before it is polled again.


MAX_BYTES = 2048
"""Of a termination message; kubelet keeps 4096 of one container, 12,288 of all containers of a pod."""
_MAX_CHARACTER_BYTES = 6  # as JSON writes control characters


def write_progress(progress: Progress, environment: Mapping[str, str] = os.environ) -> None:
    """Write ``progress`` to the file that the agent named in ``environment``, if any."""
    path = environment.get(ENV_TERMINATION_MESSAGE)
    if path is not None:
        with suppress(OSError):  # must not hide the error that ended the run
            Path(path).write_text(json.dumps(progress.read()), encoding="utf-8")


def write_termination_log(
    progress_file: Path, message: str, process_restarts: int, log: Path
) -> None:
    """Write the progress in ``progress_file`` and ``message`` to ``log``, as JSON of at most MAX_BYTES.

    A message that is too long loses its beginning, since errors are at the end. Nothing is written if
    ``log`` does not exist.
    """
    if log.exists():
        content = _read_termination_message(progress_file) | {"processRestarts": process_restarts}
        content |= {"message": message} if message else {}
        while message and (excess := len(_encode(content)) - MAX_BYTES) > 0:
            message = message[excess // _MAX_CHARACTER_BYTES + 1 :]
            content["message"] = message
        log.write_bytes(_encode(content))


def _read_termination_message(progress_file: Path) -> dict[str, object]:
    try:
        values = json.loads(progress_file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}  # no trainer has started, or it was killed while writing
    return values if isinstance(values, dict) else {}


def _encode(content: dict[str, object]) -> bytes:
    return json.dumps(content, ensure_ascii=False).encode(errors="replace")
