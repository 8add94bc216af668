"""Snapshots of one rank: two slots in turn, none of a poisoned state, off if memory is short."""

from __future__ import annotations

import errno
import os
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from torch import Tensor

from fluxtrain.contract.process import RunPaths
from fluxtrain.contract.run.resolve import resolve
from fluxtrain.errors import ConfigError
from fluxtrain.optim import NEVER
from fluxtrain.parallel.distributed import Channel, World
from fluxtrain.state import slots, snapshots
from fluxtrain.state.free_memory import SHARED_MEMORY, Bound
from fluxtrain.state.recovery import Recovery
from fluxtrain.state.run_state import RunState
from fluxtrain.state.slots import Shard, Slot, Slots, checksum, read_copies, rows_of
from fluxtrain.state.snapshots import Cost, Snapshots, next_interval

WORLD = World(0, 0, 1, torch.device("cpu"))
GOOD = torch.tensor(NEVER)


def make_state(value: float = 1.0) -> dict[str, Tensor]:
    return {"model.weight": torch.full((5, 3), value), "model.bias": torch.full((2,), value)}


class Run:
    """A run whose state is the number of its step."""

    def __init__(self, folder: Path, every: int | None = 2, start: int = 1, step: int = 0) -> None:
        self.volume, self.reported = folder / "memory", list[int]()
        self.memory = list[tuple[int, bool]]()
        self.volume.mkdir(exist_ok=True)
        self.config = resolve({"preset": "micro", "checkpoint": {"memory_every_steps": every}})
        self.state, self.run = make_state(0.0), RunState(step, step * 16)
        self.step_seconds = 0.1
        parts = Slots(self.volume, start, WORLD, rows_of(self.state), Shard(0, 1))
        self.writer = Snapshots(
            self.state,
            parts,
            Channel(WORLD),
            self.config,
            self.run,
            self.on_complete,
            lambda size, is_paused: self.memory.append((size, is_paused)),
        )

    def on_complete(self, step: int, stall: float) -> None:
        assert stall >= 0
        self.reported.append(step)

    def train(self, steps: int, bad_step: Tensor = GOOD) -> Run:
        """Go on for ``steps`` and wait until the pending snapshot is complete."""
        self.go_on(steps, bad_step)
        self.writer.finish()
        return self

    def go_on(self, steps: int, bad_step: Tensor = GOOD) -> None:
        for _ in range(steps):
            step = self.run.step + 1
            self.run = RunState(step, step * 16, train_seconds=step * self.step_seconds)
            for tensor in self.state.values():
                tensor.fill_(step)
            self.writer.after_step(self.run, bad_step)

    @property
    def steps(self) -> list[int]:
        """The steps whose images are valid."""
        return sorted(copy.step for copy in read_copies(self.volume, node=0))


def ignore(*arguments: object) -> None:
    pass


def load(folder: Path, **changes: object) -> tuple[RunState, dict[str, Tensor]]:
    """Return what another start continues from."""
    config = resolve({"preset": "micro", **changes})
    paths = RunPaths(folder, folder, folder, snapshots=folder / "memory")
    state = make_state(-1.0)
    return Recovery(config, paths, WORLD).load(state, lambda: None), state


def continued(folder: Path, start: int) -> None:
    """Write the lineage of a run whose newest start is ``start``."""
    (folder / ".snapshots.json").write_text(f'{{"start": {start}}}')


def test_two_slots_are_written_in_turn(tmp_path: Path) -> None:
    run = Run(tmp_path)
    for steps in ([], [2], [2, 4], [4, 6], [6, 8]):
        run.writer.finish()
        assert run.steps == steps
        assert run.reported == list(range(2, run.run.step + 1, 2))
        run.go_on(2)
    images = list(run.volume.glob("start_*/*.image"))
    assert [path.stat().st_size for path in images] == [68, 68]


def test_a_snapshot_holds_the_state_of_its_step(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.go_on(5)  # the tensors go on while the snapshot of step 4 is finished
    run.writer.finish()
    continued(tmp_path, 1)
    loaded, state = load(tmp_path)
    assert loaded == RunState(4, 64, train_seconds=0.4)
    assert all(bool((tensor == 4).all()) for tensor in state.values())


def test_a_crash_while_a_slot_is_written_leaves_the_other(tmp_path: Path) -> None:
    run = Run(tmp_path).train(6)
    pair = run.writer._slots.next
    assert pair is not None
    pair.own.invalidate()  # as `after_step` does first
    pair.own.bytes.fill_(7)
    continued(tmp_path, 1)
    assert load(tmp_path)[0].step == 6


def test_a_poisoned_state_is_dropped(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.go_on(4)
    run.train(4, torch.tensor(5))
    assert run.reported == [2, 4]
    assert run.steps == [4]


def test_the_interval_follows_from_the_cost(tmp_path: Path) -> None:
    run = Run(tmp_path, every=None)
    run.step_seconds = 60.0  # next to it any machine's snapshot costs nothing
    run.train(300)
    assert run.reported[:2] == [10, 20], "while the cost is not known"
    assert len(run.reported) > 31, "and more often then"


SHORT = Bound("the memory cgroup", 2_000_000_000, 100_000_000, 300_000_000)
FIGURES = "0.10 of 2.00 GB of the memory cgroup are free, the reserve is 0.30 GB"


@pytest.fixture
def no_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slots, "HOLD_SECONDS", 0.0)


def lines(capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Return what was printed about snapshots, without figures that differ."""
    return [line.split(": ", 1)[1] for line in capsys.readouterr().err.splitlines()]


@pytest.mark.usefixtures("no_hold")
def test_without_enough_memory_there_are_none_until_there_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(volume: Path, needed: int) -> None:
        raise OSError(errno.ENOMEM, f"a node needs {needed} bytes")

    with monkeypatch.context() as patched:
        patched.setattr(slots, "require_room", refuse)
        run = Run(tmp_path)
        run.train(20)
    assert run.steps == run.reported == []
    assert list(run.volume.glob("start_*/*.image")) == []
    assert set(run.memory) == {(0, True)}
    assert lines(capsys) == ["snapshots in memory are paused: a node needs 136 bytes"]
    run.train(6)
    assert run.reported[-1] == 26
    assert run.memory[-1] == (136, False)
    (again,) = lines(capsys)
    assert again.startswith("snapshots in memory are taken again: ")


def test_nothing_is_reserved_for_some_seconds_after_memory_was_short(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run(tmp_path).train(4)
    run.writer.drop_one(SHORT)
    run.train(40)
    assert run.steps == [4]
    assert lines(capsys) == [f"snapshots in memory are paused: {FIGURES}"]


@pytest.mark.usefixtures("no_hold")
@pytest.mark.parametrize(
    ("taken", "drops", "left"),
    [(0, 1, []), (2, 1, [2]), (2, 2, []), (4, 1, [4]), (4, 2, []), (4, 3, [])],
)
def test_the_older_snapshot_is_dropped_first(
    tmp_path: Path, taken: int, drops: int, left: list[int]
) -> None:
    run = Run(tmp_path).train(taken)
    for _ in range(drops):
        run.writer.drop_one(SHORT)
    assert run.steps == left
    assert len(list(run.volume.glob("start_*/*.image"))) == len(left)
    assert run.memory[-1] == (68 * len(left), True)
    continued(tmp_path, 1)
    assert load(tmp_path)[0].step == (left[0] if left else 0)


@pytest.mark.usefixtures("no_hold")
def test_snapshots_that_were_dropped_are_taken_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run(tmp_path).train(4)
    run.writer.drop_one(SHORT)
    run.writer.drop_one(SHORT)
    run.train(10)
    assert run.steps == [12, 14]
    paused, again = lines(capsys)
    assert paused == f"snapshots in memory are paused: {FIGURES}"
    assert again.startswith("snapshots in memory are taken again: ")
    continued(tmp_path, 1)
    assert load(tmp_path)[0].step == 14


def test_a_snapshot_that_is_dropped_while_it_is_written_never_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its memory is zero, and so is what the checksum is computed of."""
    run = Run(tmp_path).train(4)

    def drop_first(image: Tensor) -> int:
        run.writer.drop_one(SHORT)
        return checksum(image)

    monkeypatch.setattr(snapshots, "checksum", drop_first)
    run.train(2)
    assert run.steps == [4]
    assert run.reported == [2, 4]


@pytest.mark.usefixtures("no_hold")
def test_slots_that_are_reserved_again_are_not_those_that_were_dropped(tmp_path: Path) -> None:
    run = Run(tmp_path).train(4)
    for _ in range(3):
        run.writer.drop_one(SHORT)
    run.go_on(2)  # pauses
    run.writer.finish()
    run.writer.drop_one(SHORT)
    run.train(12)
    assert run.steps == [run.run.step - 2, run.run.step]
    assert len(list(run.volume.glob("start_*/*.image"))) == 2


@pytest.mark.usefixtures("no_hold")
def test_what_the_launcher_removed_is_reserved_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run(tmp_path).train(4)
    for path in run.volume.glob("start_*/*"):
        path.unlink()
    run.train(10)
    assert run.steps == [12, 14]
    assert "the launcher removed them" in lines(capsys)[0]


@pytest.mark.usefixtures("no_hold")
def test_an_error_that_stays_is_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run(tmp_path)
    run.writer.finish()

    def fail(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", fail)  # for the second slot
    run.train(60)
    assert run.steps == [2]
    assert lines(capsys) == ["snapshots in memory are paused: No space left on device"]


@pytest.mark.skipif(not SHARED_MEMORY.exists(), reason="there is no /dev/shm")
def test_a_dropped_slot_has_no_memory_though_it_is_mapped() -> None:
    size = 32 << 20
    with TemporaryDirectory(dir=SHARED_MEMORY) as folder:
        before = shared_bytes()
        slot = Slot(Path(folder) / "rank_00000_0", size)
        slot.bytes.fill_(1)
        assert shared_bytes() - before >= size - size // 8  # others may free a few pages
        slot.drop()
        assert shared_bytes() - before < size // 8
        slot.bytes[: size // 2].fill_(2)  # a thread that still writes
        slot.drop()
        assert shared_bytes() - before < size // 8


def shared_bytes() -> int:
    """Return the memory of tmpfs that this process has mapped."""
    status = Path("/proc/self/status").read_text().splitlines()
    (line,) = (line for line in status if line.startswith("RssShmem:"))
    return 1024 * int(line.split()[1])


def test_a_new_start_replaces_the_snapshots_of_the_one_before(tmp_path: Path) -> None:
    run = Run(tmp_path).train(6)
    continued(tmp_path, 1)
    assert load(tmp_path)[0].step == 6
    assert run.steps == [6], "the older slot is freed"
    later = Run(tmp_path, start=2, step=6)
    later.train(1)
    assert run.steps == [6], "until the new start has one of its own"
    later.train(1)
    assert run.steps == [8]
    assert [path.name for path in run.volume.iterdir()] == ["start_000002"]


def test_ranks_of_an_earlier_start_cannot_bring_back_their_state(tmp_path: Path) -> None:
    old = Run(tmp_path).train(4)
    continued(tmp_path, 1)
    assert load(tmp_path)[0].step == 4
    old.go_on(4)  # the processes were frozen and continue
    old.writer.finish()
    assert load(tmp_path)[0].step == 0


def test_the_snapshot_of_another_config_is_refused_with_the_field(tmp_path: Path) -> None:
    Run(tmp_path).train(2)
    continued(tmp_path, 1)
    with pytest.raises(ConfigError) as refused:
        load(tmp_path, optim={"learning_rate": 0.5})
    assert refused.value.path == "spec.run.optim.learning_rate"


@pytest.mark.parametrize(
    ("steps", "taken", "named", "renamed"),
    [
        ((8, 10), 12, "", 0),  # is newer, so that no checkpoint is verified
        ((8, 14), 12, "step 12 from memory is used instead", 1),
        ((11, 13, 14), 12, "step 12 from memory is used instead", 2),
    ],
)
def test_a_snapshot_is_used_instead_of_damaged_checkpoints_that_are_newer(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    steps: tuple[int, ...],
    taken: int,
    named: str,
    renamed: int,
) -> None:
    run = Run(tmp_path, every=taken)
    run.train(taken)
    continued(tmp_path, 1)
    for step in steps:
        checkpoint = tmp_path / "checkpoints" / f"step_{step:010d}"
        checkpoint.mkdir(parents=True)
        (checkpoint / "DONE").touch()  # nothing else
    state, _ = load(tmp_path)
    assert state.step == taken
    assert named in capsys.readouterr().err
    assert len(list((tmp_path / "checkpoints").glob("damaged_*"))) == renamed


def test_a_snapshot_that_cannot_be_loaded_is_removed(tmp_path: Path) -> None:
    run = Run(tmp_path).train(2)
    continued(tmp_path, 1)
    paths = RunPaths(tmp_path, tmp_path, tmp_path, snapshots=run.volume)
    recovery = Recovery(resolve({"preset": "micro"}), paths, WORLD)
    with pytest.raises(RuntimeError):
        recovery.load({"other.weight": torch.zeros(50, 30)}, lambda: None)
    assert run.steps == []


def test_a_pod_without_the_volume_turns_them_off(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path, tmp_path, tmp_path)
    recovery = Recovery(resolve({"preset": "micro"}), paths, WORLD)
    run = recovery.load(make_state(), lambda: None)
    assert recovery.is_new
    assert recovery.snapshots(make_state(), run, ignore, ignore) is None
    assert not (tmp_path / ".snapshots.json").exists()
    assert replace(paths, snapshots=tmp_path).environment()["FLUXTRAIN_SNAPSHOTS"] == str(tmp_path)


STEP = 0.1
# steps so far, waited for all, waited for the last one, written in the background, interval before, next one
ROWS = [
    (1000, 0.0, 0.0, 0.0, 10, 1),
    (1000, 0.01, 0.01, 0.0, 10, 10),
    (1000, 0.0101, 0.0101, 0.0, 10, 11),
    (1000, 0.1, 0.1, 6.0, 100, 120),
    (1000, 0.01, 0.01, 30.0, 10, 40),
    (1000, 30.0, 30.0, 0.0, 40, 160),
    (100_000, 1.0, 1.0, 0.0, 10_000, 1000),
    (1000, 5.0, 0.001, 0.0, 1000, 4000),
    (5000, 5.0, 0.05, 0.0, 1000, 50),
]


@pytest.mark.parametrize(("steps", "stalled", "last", "background", "before", "expected"), ROWS)
def test_the_interval(
    steps: int, stalled: float, last: float, background: float, before: int, expected: int
) -> None:
    cost = Cost(steps, steps * STEP, stalled, last, background)
    assert next_interval(cost, before) == expected


def test_a_clock_that_has_not_moved_changes_little() -> None:
    assert next_interval(Cost(10, 0.0, 0.1, 0.1, 0.1), 10) == 10


@pytest.mark.parametrize("stall", [0.0, 0.02, 0.5, 10.0])
def test_all_snapshots_together_soon_cost_at_most_one_percent(stall: float) -> None:
    steps, stalled, interval = 0, 0.0, 10
    for _ in range(12):
        steps += interval
        stalled += stall
        interval = next_interval(Cost(steps, steps * STEP, stalled, stall, 0.0), interval)
    assert stalled <= 0.0101 * (steps + interval) * STEP


def test_after_one_slow_snapshot_others_follow() -> None:
    slow = Cost(1000, 100.0, 60.0, 60.0, 0.0)
    assert next_interval(slow, 10) == 40
