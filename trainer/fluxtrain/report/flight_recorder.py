"""Collectives that have not ended, from torch's flight recorder: they tell what a hung rank waits for."""

from __future__ import annotations

import json
import sys
from typing import Any

_MAX_LISTED = 3


def pending_collectives() -> str:
    """Return the first collectives of this process that have not ended; empty without torch or any."""
    torch = sys.modules.get("torch._C._distributed_c10d")  # a process that imports has none
    if torch is None:
        return ""
    entries = _entries(getattr(torch, "_dump_nccl_trace_json", None), onlyActive=True)
    entries += _entries(getattr(torch, "_dump_fr_trace_json", None))  # gloo's
    pending = [_described(e) for e in entries if not e.get("retired")]
    return ", ".join(dict.fromkeys(pending[:_MAX_LISTED]))


def _entries(dump: Any, **options: bool) -> list[dict[str, Any]]:
    if dump is None:  # a build of torch without it
        return []
    entries = json.loads(dump(includeCollectives=True, **options)).get("entries", [])
    return [entry for entry in entries if isinstance(entry, dict)]


def _described(entry: dict[str, Any]) -> str:
    """Return the name, the number and the process group of a collective."""
    group = (entry.get("process_group") or ["?"])[-1]
    return f"{entry.get('profiling_name')} {entry.get('collective_seq_id')} of {group}"
