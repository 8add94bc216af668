"""What a hung rank waits for, from torch's flight recorder."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace

import pytest

from fluxtrain.report.progress import pending_collectives


def entry(number: int, retired: bool) -> dict[str, object]:
    group = ["0", "default_pg"]
    name = {"profiling_name": "nccl:all_reduce", "collective_seq_id": number}
    return {**name, "process_group": group, "retired": retired}


def set_torch(monkeypatch: pytest.MonkeyPatch, torch: object) -> None:
    monkeypatch.setitem(sys.modules, "torch._C._distributed_c10d", torch)


def dumping(*entries: object) -> object:
    return lambda **_: json.dumps({"entries": entries}).encode()


def test_only_collectives_that_have_not_ended_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    dump = dumping(entry(6, True), entry(7, False), entry(8, False), "odd")
    set_torch(monkeypatch, SimpleNamespace(_dump_nccl_trace_json=dump))
    expected = "nccl:all_reduce 7 of default_pg, nccl:all_reduce 8 of default_pg"
    assert pending_collectives() == expected


@pytest.mark.parametrize(
    "torch",
    [
        None,
        SimpleNamespace(),
        SimpleNamespace(_dump_fr_trace_json=lambda **_: b'{"pg_config": {}}'),
    ],
    ids=["not imported", "without a recorder", "no process group"],
)
def test_nothing_pending_is_empty(monkeypatch: pytest.MonkeyPatch, torch: object) -> None:
    set_torch(monkeypatch, torch)
    assert pending_collectives() == ""
