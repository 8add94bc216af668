"""Reads a file in a child process with a limited address space, and measures the child's peak memory."""

from __future__ import annotations

import ctypes
import gc
import json
import resource
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.trainer import ranks

from fluxtrain.errors import FluxtrainError

HEADROOM = 3 << 30
"""Bytes of addresses beyond those that the child has when it begins to read."""
SECONDS = 300
Make = Callable[[Path], Path]
Read = Callable[[Path], object]


@dataclass(frozen=True)
class Outcome:
    """What reading a file came to."""

    answer: str
    """The error in one line, or what was returned."""
    is_error: bool
    """Whether the answer is an error that commands print without a traceback."""
    peak_mib: int
    """More memory than before the file was read."""
    input_kib: int
    """What the file takes on the disk."""


def outcomes(count: int) -> Iterator[Outcome]:
    """Make and read the files of the first ``count`` rows of the table in one child process."""
    with tempfile.TemporaryDirectory() as folder:
        reports = Path(folder) / "reports"
        process = ranks.FORKED.Process(target=_measure_all, args=(Path(folder), reports, count))
        ranks.start_process(process)
        process.join(SECONDS)
        process.kill()
        process.join()
        for line in reports.read_text().splitlines():
            yield Outcome(**json.loads(line))


def _measure_all(folder: Path, reports: Path, count: int) -> None:
    from tests.trainer.bombs.rows import ROWS  # which imports this module

    _, most = resource.getrlimit(resource.RLIMIT_AS)
    with reports.open("w", buffering=1) as file:
        for number, row in enumerate(ROWS[:count]):
            inside = folder / str(number)
            inside.mkdir()
            path = row.make(inside)
            file.write(json.dumps(vars(_measure(row.read, path, most))) + "\n")
            shutil.rmtree(inside)


def _measure(read: Read, path: Path, most: int) -> Outcome:
    """Read ``path`` with a limited address space; ``most`` is the limit that is set again."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    before = _status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    resource.setrlimit(resource.RLIMIT_AS, (_status("VmSize") + HEADROOM, most))
    try:
        answer, is_error = repr(read(path))[:500], False
    except FluxtrainError as error:
        answer, is_error = str(error), True
    except Exception as error:
        answer, is_error = f"uncaught {error!r}"[:500], False
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    peak = max(0, _status("VmHWM") - before)
    return Outcome(answer, is_error, round(peak / 2**20), -(-path.stat().st_blocks // 2))


def _status(name: str) -> int:
    """Return a field of this process's status in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise AssertionError(name)
