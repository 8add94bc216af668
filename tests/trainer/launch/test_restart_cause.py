"""Why trainers failed: from their exit codes, and the kernel's count of kills for memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from fluxtrain.contract.process import root_cause
from fluxtrain.launch.torchrun import num_out_of_memory_kills, restart_cause

FAILED, KILLED, OUT_OF_MEMORY = "ProcessFailed", "ProcessKilled", "ProcessOutOfMemory"


@pytest.mark.parametrize(
    ("codes", "out_of_memory", "expected"),
    [
        ([], False, FAILED),
        ([], True, FAILED),
        ([1], False, FAILED),
        ([74, 1], True, FAILED),
        ([-9], False, KILLED),
        ([-11], False, KILLED),
        ([-11], True, KILLED),
        ([-9], True, OUT_OF_MEMORY),
        ([1, -9, 1], False, KILLED),
        ([1, -11, -9], True, OUT_OF_MEMORY),
    ],
)
def test_a_kill_is_the_cause_of_errors(
    codes: list[int], out_of_memory: bool, expected: str
) -> None:
    assert restart_cause(codes, out_of_memory) == expected


@pytest.mark.parametrize(
    ("causes", "expected"),
    [
        ([], FAILED),
        ([FAILED], FAILED),
        (["", "Newer"], FAILED),
        ([FAILED, KILLED, "Newer"], KILLED),
        ([OUT_OF_MEMORY, KILLED], OUT_OF_MEMORY),
    ],
)
def test_of_the_causes_that_agents_tell_a_kill_is_the_root(
    causes: list[str], expected: str
) -> None:
    assert root_cause(causes) == expected


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, 0),
        ({"proc/self/cgroup": "0::/\n"}, 0),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.events": "low 0\noom_kill 3\n"}, 3),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.events": "oom_kill many\n"}, 0),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.events": "low 0\n"}, 0),
        (
            {
                "proc/self/cgroup": "4:memory:/kubepods/pod\n",  # which the container cannot see
                "sys/fs/cgroup/memory/memory.oom_control": "under_oom 0\noom_kill 2\n",
            },
            2,
        ),
    ],
    ids=["nothing", "no file", "version 2", "damaged", "an old kernel", "version 1"],
)
def test_kills_for_memory_are_counted(tmp_path: Path, files: dict[str, str], expected: int) -> None:
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert num_out_of_memory_kills(tmp_path) == expected
