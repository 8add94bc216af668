"""The termination message of a pod: a trainer leaves its progress in a file, its agent forwards it.

The operator reads it from the pod's status if rank 0 ends before it is polled again.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from fluxtrain.contract.launch import ENV_TERMINATION_MESSAGE
from fluxtrain.progress import Progress

MAX_BYTES = 2048
"""Of a termination message; kubelet keeps 4096 of one container, 12,288 of all containers of a pod."""
_MAX_CHARACTER_BYTES = 6  # as JSON writes control characters


def write_progress(progress: Progress, environment: Mapping[str, str] = os.environ) -> None:
    """Write ``progress`` to the file that the agent named in ``environment``, if any."""
    path = environment.get(ENV_TERMINATION_MESSAGE)
    if path is not None:
        with suppress(OSError):  # must not hide the error that ended the run
            Path(path).write_text(json.dumps(progress.read()))


def write_termination_log(
    progress_file: Path, message: str, process_restarts: int, log: Path
) -> None:
    """Write the progress in ``progress_file`` and ``message`` to ``log``, as JSON of at most MAX_BYTES.

    A message that is too long loses its beginning, since errors are at the end. Nothing is written if
    ``log`` does not exist.
    """
    if log.exists():
        content = _read(progress_file) | {"processRestarts": process_restarts}
        content |= {"message": message} if message else {}
        while message and (excess := len(_encode(content)) - MAX_BYTES) > 0:
            message = message[excess // _MAX_CHARACTER_BYTES + 1 :]
            content["message"] = message
        log.write_bytes(_encode(content))


def _read(progress_file: Path) -> dict[str, object]:
    try:
        values = json.loads(progress_file.read_text())
    except (OSError, ValueError):
        return {}  # no trainer has started, or it was killed while writing
    return values if isinstance(values, dict) else {}


def _encode(content: dict[str, object]) -> bytes:
    return json.dumps(content, ensure_ascii=False).encode(errors="replace")
