"""What a trainer says as it ends, and how its agent hands that on to Kubernetes.

Rank 0 may be gone before the operator asks it for the last time; the status of its pod stays.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from fluxtrain.contract.launch import ENV_TERMINATION_MESSAGE
from fluxtrain.report.metrics import Progress

LONGEST_BYTES = 2048
"""Of a termination message: kubelet keeps 4096 of one container, 12,288 of all containers of a pod."""
_LONGEST_CHARACTER = 6  # bytes, as JSON writes control characters


def leave(progress: Progress, environment: Mapping[str, str] = os.environ) -> None:
    """Leave ``progress`` for the agent that started this process, where one asked for it."""
    path = environment.get(ENV_TERMINATION_MESSAGE)
    if path is not None:
        with suppress(OSError):  # that nothing can be told must not hide how the run ended
            Path(path).write_text(json.dumps(progress.read()))


def forward_termination_message(words: Path, message: str, log: Path) -> None:
    """Write the progress left at ``words`` and the ``message`` to ``log``, as JSON of LONGEST_BYTES at most.

    A message that is too long loses its beginning: errors stand at the end. A ``log`` that does not exist
    is read by nobody.
    """
    if log.exists():
        said = _read(words) | ({"message": message} if message else {})
        while message and (excess := len(_encoded(said)) - LONGEST_BYTES) > 0:
            message = message[excess // _LONGEST_CHARACTER + 1 :]
            said["message"] = message
        log.write_bytes(_encoded(said))


def _read(words: Path) -> dict[str, object]:
    try:
        values = json.loads(words.read_text())
    except (OSError, ValueError):
        return {}  # no trainer came so far, or it was killed while it wrote
    return values if isinstance(values, dict) else {}


def _encoded(said: dict[str, object]) -> bytes:
    return json.dumps(said, ensure_ascii=False).encode(errors="replace")
